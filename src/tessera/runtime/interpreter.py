"""Interpreter of a graph on one device: node by node, on its blocks, in each of its folds.

A value has a block for each fold in which it differs (runtime/folds.py). A node is computed once
for each fold in which its arguments or results differ. A collective runs on all folds at once
(runtime/collectives.py); so does a loop, whose body may have collectives. On a mesh that is not
folded there is one fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import named_scope

from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..core.options import PLAIN, ProgramOptions
from ..ir.graph.node import Graph, Node
from ..ir.graph.xp_numpy import identity
from ..ops.op import OPS, Call, infer
from . import xp_jax
from .algorithms import by_algorithm
from .collectives import CollectiveXp, Wire, now
from .fixed_order import FixedXp
from .folds import Blocks, Folds, Place

Array = Any
Bodies = Callable[[Graph, Sequence[Blocks]], list[Blocks]]


class Interpreter:
    """Runs graphs on a device of `mesh`, in the fold `at`, or in all its folds without one. `under`
    has the options with the level of determinism."""

    def __init__(
        self, mesh: Mesh | None, under: ProgramOptions = PLAIN, at: Mapping[str, int] | None = None
    ) -> None:
        self.folds, self.under, self.order = Folds(mesh, at), under, under.sum_order
        self.xp = FixedXp if under.mesh_invariant else xp_jax

    def run(
        self, graph: Graph, values: Sequence[Blocks], bodies: Bodies | None = None,
        bucket: bool = False,
    ) -> list[Blocks]:  # fmt: skip
        """Returns the outputs of `graph` for the values of its inputs. `bodies` runs the bodies of
        its loops (default: this function). The collectives of a `bucket` (a graph of collectives
        alone) run as one."""
        env: dict[Node, Any] = dict(zip(graph.inputs, values, strict=True))
        nodes = [n for n in graph.nodes if n.op != "input"]
        if bucket:
            with named_scope(nodes[0].scope):
                found = self._collectives(nodes, [env[n.args[0]] for n in nodes])
            env.update(zip(nodes, found, strict=True))
        for n in () if bucket else nodes:
            if n.op == "item":
                env[n] = env[n.args[0]][n.attrs["index"]]
            else:
                with named_scope(n.scope):
                    env[n] = self._node(n, [env[a] for a in n.args], bodies or self.run)
        return [env[o] for o in graph.outputs]

    def _node(self, n: Node, values: Sequence[Blocks], bodies: Bodies) -> Any:
        """Returns the result of `n`; a list for a node with several results."""
        f, op, ins = self.folds, OPS[n.op], tuple([a.types[0] for a in n.args])
        # A while loop whose condition differs between folds runs in each fold by itself.
        separate = n.op == "scan" and n.attrs["length"] is None and f.axes(n.types[0])
        if n.op == "scan" and any(t.size for t in n.types) and not separate:
            return op.local(Call(self.xp, f.somewhere, ins, n.types, n.attrs, bodies), *values)
        several, axes = len(n.types) > 1 or op.many, f.axes(*ins, *n.types)
        ordered = op.mesh_invariance == "sums" and self._order(n)
        if n.is_collective and (axes or ordered):
            return self._collectives([n], values)[0]
        if not axes:
            made = self._computed(n, ins, f.somewhere, [v[0] for v in values])
            return [Blocks((x,)) for x in made] if several else Blocks((made,))
        blocks = [f.to(v, f.axes(t), axes) for v, t in zip(values, ins, strict=True)]
        found = [
            self._computed(n, ins, place, [b[i] for b in blocks])
            for i, place in enumerate(f.every(axes))
        ]
        columns = zip(*found, strict=True) if several else [found]
        outs = [f.to(Blocks(c), axes, f.axes(t)) for c, t in zip(columns, n.types, strict=True)]
        return outs if several else outs[0]

    def _computed(
        self, n: Node, ins: tuple[TensorType, ...], place: Place, blocks: list[Array]
    ) -> Any:
        """Returns the result of `n` at one place, from its blocks there."""
        op = OPS[n.op]
        if any(t.padded_dims for t in ins):
            for i, dim, kind in infer(op, ins, n.attrs).reduces:
                blocks[i] = _masked(blocks[i], place.valid(ins[i], dim), dim, kind)

        def inner(body: Graph, args: Sequence[Array]) -> list[Array]:
            here = Interpreter(self.folds.mesh, self.under, place.at)
            return [x for (x,) in here.run(body, [Blocks((b,)) for b in args])]

        return op.compute(Call(self._xp(n), place, ins, n.types, n.attrs, inner), *blocks)

    def _collectives(self, nodes: Sequence[Node], values: Sequence[Blocks]) -> list[Blocks]:
        """Returns the results of collectives; equal collectives are merged into one."""
        f, wire, made = self.folds, Wire(), []
        for n, x in zip(nodes, values, strict=True):
            (t,) = ins = (n.args[0].type,)
            axes = f.axes(t, n.type)
            xp = CollectiveXp(wire, f, axes, self._xp(n), self._order(n))
            call = Call(xp, f.somewhere, ins, n.types, n.attrs, self.run)
            made.append(OPS[n.op].compute(call, f.to(x, f.axes(t), axes)))
        wire.carry()
        return [
            f.to(now(x), f.axes(n.args[0].type, n.type), f.axes(n.type))
            for x, n in zip(made, nodes, strict=True)
        ]

    def _order(self, n: Node) -> str:
        """Returns the order of sums of the collective `n`; "" if the engine or an algorithm has its
        own."""
        return "" if "algorithm" in n.attrs else n.attrs.get("order", self.order)

    def _xp(self, n: Node) -> Any:
        return by_algorithm(n.attrs["algorithm"]) if "algorithm" in n.attrs else self.xp


def _masked(x: Array, ok: Array, dim: int, kind: str) -> Array:
    """Returns `x` with the identity of `kind` at the padding along `dim` (where `ok` is False)."""
    shape = [1] * x.ndim
    shape[dim] = -1
    fill = jnp.asarray(identity(kind, x.dtype), x.dtype)
    return xp_jax.where(ok.reshape(shape), x, fill)
