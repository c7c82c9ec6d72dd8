"""How does a graph become one XLA program? Node by node, each device computing its own block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..ir.graph.node import Graph, Node
from ..ir.graph.oracle import identity
from ..ops.op import OPS, Call
from . import xp_jax
from .arrays import block_shape, spec
from .devices import jax_mesh

Array = Any


class Block:
    """Where local code runs inside the program: on this device's block of everything."""

    def __init__(self) -> None:
        self._index: dict[tuple[TensorType, int], tuple[Array, Array]] = {}

    def shape(self, t: TensorType) -> tuple[int, ...]:
        return t.local_shape

    def index(self, t: TensorType, dim: int) -> Array:
        return self._lines(t, dim)[0]

    def valid(self, t: TensorType, dim: int) -> Array:
        return self._lines(t, dim)[1]

    def start(self, t: TensorType, dim: int, digit: int) -> Array:
        return self.index(t, dim)[0]

    def _lines(self, t: TensorType, dim: int) -> tuple[Array, Array]:
        """(global index, is it real) of each local element along `dim`."""
        total, ok = np.zeros(1, np.int32), np.ones(1, np.bool_)
        for d in t.digits(dim):
            at = xp_jax.axis_index(d.axes, t.sizes) if d.axes else np.int32(0)
            line = np.arange(d.local, dtype=np.int32) + at * np.int32(d.local)
            total = (total[:, None] * np.int32(d.size) + line[None, :]).reshape(-1)
            if d.uneven:
                ok = (ok[:, None] & (line < d.size)[None, :]).reshape(-1)
            else:
                ok = np.repeat(ok, d.local) if isinstance(ok, np.ndarray) else ok.repeat(d.local)
        return jax.numpy.asarray(total), ok


def _masked(x: Array, ok: Array, dim: int, kind: str) -> Array:
    shape = [1] * x.ndim
    shape[dim] = -1
    fill = jax.numpy.asarray(identity(kind, x.dtype), x.dtype)
    return xp_jax.where(ok.reshape(shape), x, fill)


def run_local(graph: Graph, args: Sequence[Array], site: Block) -> list[Array]:
    """The outputs of `graph` on this device, from its blocks of the inputs."""
    env: dict[Node, Any] = dict(zip(graph.inputs, args, strict=True))

    def inner(body: Graph, values: Sequence[Array]) -> list[Array]:
        return run_local(body, values, Block())

    for n in graph.nodes:
        if n.op == "input":
            continue
        if n.op == "item":
            env[n] = env[n.args[0]][n.attrs["index"]]
            continue
        op = OPS[n.op]
        ins = tuple([a.types[0] for a in n.args])
        values = [env[a] for a in n.args]
        if any(t.padded_dims for t in ins):
            for i, dim, kind in op.rule(ins, n.attrs).reduces:
                values[i] = _masked(values[i], site.valid(ins[i], dim), dim, kind)
        env[n] = op.local(Call(xp_jax, site, ins, n.types, n.attrs, inner), *values)
    return [env[o] for o in graph.outputs]


def lower(
    graph: Graph,
    mesh: Mesh | None,
    donate: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The jitted program of `graph`: device arrays in, a list of device arrays out."""
    many = mesh is not None and mesh.size > 1
    outs = [n.type.on(mesh) for n in graph.outputs]

    def program(*arrays: Array) -> list[Array]:
        args = [
            lax.reshape(a, n.type.local_shape) if a.shape != n.type.local_shape else a
            for a, n in zip(arrays, graph.inputs, strict=True)
        ]
        results = run_local(graph, args, Block())
        return [
            lax.reshape(r, block_shape(t)) if r.shape != block_shape(t) else r
            for r, t in zip(results, outs, strict=True)
        ]

    program.__name__ = program.__qualname__ = graph.name
    if many:
        assert mesh is not None
        program = jax.shard_map(
            program,
            mesh=jax_mesh(mesh),
            in_specs=tuple(spec(n.type.on(mesh)) for n in graph.inputs),
            out_specs=[spec(t) for t in outs],
            check_vma=False,
        )
    return jax.jit(
        program,
        donate_argnums=tuple(donate),
        compiler_options=dict(options) if options else None,
    )
