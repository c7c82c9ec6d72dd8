"""How does a schedule become one XLA program? Step by step, node by node, each device computing its
own blocks. This is the fused executor; runtime/stepped.py runs the steps one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import jax
import numpy as np
from jax import lax

from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..ir.graph.node import Graph, Node
from ..ir.graph.xp_numpy import identity
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..ops.op import OPS, Call, infer
from . import xp_jax
from .algorithms import by_algorithm
from .arrays import block_shape, spec
from .buckets import run_bucket
from .devices import jax_mesh
from .fixed_order import FixedXp
from .programs import Program
from .throttle import throttle_of

Array = Any
# Runs the graph of a loop's body.
Bodies = Callable[[Graph, Sequence[Any]], list[Any]]
Run = Callable[[Step, Sequence[Any], Bodies | None], list[Any]]
NONE: Mapping[int, int] = {}


@dataclass(frozen=True)
class _InTurn:
    """A jitted program whose results the engine sees in another order."""

    run: Any
    back: Sequence[int]  # per result, its place in what `run` gives

    def __call__(self, *arrays: Array) -> list[Array]:
        given = self.run(*arrays)
        return [given[i] for i in self.back]

    def lower(self, *arrays: Any) -> Any:
        return self.run.lower(*arrays)


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

    def at(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
        """The place of this block along `axes`, major first."""
        return xp_jax.axis_index(axes, sizes)

    def _lines(self, t: TensorType, dim: int) -> tuple[Array, Array]:
        """(global index, is it real) of each local element along `dim`."""
        total, ok = np.zeros(1, np.int32), np.ones(1, np.bool_)
        for d in t.digits(dim):
            at = self.at(d.axes, t.sizes) if d.axes else np.int32(0)
            line = np.arange(d.local, dtype=np.int32) + at * np.int32(d.local)
            total = (total[:, None] * np.int32(d.size) + line[None, :]).reshape(-1)
            if d.uneven:
                ok = (ok[:, None] & (line < d.size)[None, :]).reshape(-1)
            else:
                ok = np.repeat(ok, d.local) if isinstance(ok, np.ndarray) else ok.repeat(d.local)
        return jax.numpy.asarray(total), ok


def masked(x: Array, ok: Array, dim: int, kind: str) -> Array:
    shape = [1] * x.ndim
    shape[dim] = -1
    fill = jax.numpy.asarray(identity(kind, x.dtype), x.dtype)
    return xp_jax.where(ok.reshape(shape), x, fill)


def run_local(
    graph: Graph, args: Sequence[Array], site: Block, xp: Any = xp_jax, bodies: Bodies | None = None
) -> list[Array]:
    """The outputs of `graph` on this device, from its blocks of the inputs, by the functions of
    `xp`. `bodies` runs the bodies of its loops and branches; None: node by node, as their graphs
    are."""
    env: dict[Node, Any] = dict(zip(graph.inputs, args, strict=True))

    def inner(body: Graph, values: Sequence[Array]) -> list[Array]:
        return bodies(body, values) if bodies else run_local(body, values, Block(), xp)

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
            for i, dim, kind in infer(op, ins, n.attrs).reduces:
                values[i] = masked(values[i], site.valid(ins[i], dim), dim, kind)
        how = by_algorithm(n.attrs["algorithm"]) if "algorithm" in n.attrs else xp
        env[n] = op.compute(Call(how, site, ins, n.types, n.attrs, inner), *values)
    return [env[o] for o in graph.outputs]


def local_run(mesh: Mesh | None, order: str) -> Run:
    """What runs a step on this device: its values are blocks, or on a mesh that runs turn by turn
    those of runtime/folded.py."""
    if mesh is not None and by_turns(mesh, order):
        from .folded import Folded

        turns = Folded(mesh, order)
        return lambda step, values, bodies: turns.program(step.graph, values, bodies)
    site, xp = Block(), FixedXp if order else xp_jax

    def run(step: Step, values: Sequence[Array], bodies: Bodies | None) -> list[Array]:
        def graph(g: Graph, values: Sequence[Array]) -> list[Array]:
            return run_local(g, values, site, xp, bodies)

        several = isinstance(step, Collective) and len(step.nodes) > 1
        return run_bucket(step, values, graph) if several else graph(step.graph, values)

    return run


def run_step(
    step: Step, values: Sequence[Any], mesh: Mesh | None, order: str, run: Run | None = None
) -> list[Any]:
    """The results of one step on this device; `run` is what `local_run` gives."""
    run = run or local_run(mesh, order)
    match step:
        case Compute() | Collective():
            return run(step, values, None)
        case Loop(body=body):
            return run(step, values, lambda _, xs: run_steps(body, xs, order))
        case Region(body=body):
            return run_steps(body, values, order)
        case Send():
            raise AssertionError("what is sent goes from one program to another")
        case _:
            assert_never(step)


def run_steps(schedule: Schedule, args: Sequence[Any], order: str) -> list[Any]:
    """The results of all steps on this device, in one program."""
    env: dict[int, Any] = dict(zip(schedule.inputs, args, strict=True))
    run = local_run(schedule.mesh, order)
    ends: list[Sequence[Any]] = []
    for i, step in enumerate(schedule.steps):
        values = [env[b] for b in step.reads]
        late = [j for j in step.after if j not in _by_buffers(schedule, i)]
        if late and values:
            # What the text says comes after is a path in the program: these values come after
            # those.
            behind = [e for j in late for e in ends[j][:1]]
            values, _ = lax.optimization_barrier((values, behind))
        outs = run_step(step, values, schedule.mesh, order, run)
        env.update(zip(step.writes, outs, strict=True))
        ends.append(outs)
    return [env[b] for b in schedule.outputs]


def _by_buffers(schedule: Schedule, i: int) -> set[int]:
    made = {b: j for j, s in enumerate(schedule.steps[:i]) for b in s.writes}
    return {made[b] for b in schedule.steps[i].reads if b in made}


def lower(
    schedule: Schedule,
    donate: Mapping[int, int] = NONE,
    options: Mapping[str, Any] | None = None,
    order: str = "",
) -> Callable[..., Any]:
    """The jitted program of `schedule`: device arrays in, a list of device arrays out. `donate` are
    arguments that are given up, each with the result that takes its memory; `order` is that of sums
    over devices ("": as the engine likes)."""
    mesh = schedule.mesh
    types = [schedule.buffers[b] for b in schedule.inputs]
    return jitted(
        schedule.name,
        lambda args: run_steps(schedule, args, order),
        types,
        [schedule.buffers[b] for b in schedule.outputs],
        mesh,
        donate,
        options,
        order,
    )


def by_turns(mesh: Mesh | None, order: str) -> bool:
    """Whether programs on `mesh` run turn by turn: it is folded, or sums have a fixed order."""
    return mesh is not None and (mesh.onto is not None or (bool(order) and mesh.size > 1))


def jitted(
    name: str,
    body: Callable[[Sequence[Array]], Sequence[Array]],
    ins: Sequence[TensorType],
    results: Sequence[TensorType],
    mesh: Mesh | None,
    donate: Mapping[int, int] = NONE,
    options: Mapping[str, Any] | None = None,
    order: str = "",
) -> Callable[..., Any]:
    """`body`, which works on one device's blocks, as a jitted program over `mesh`; where that is
    folded, on what runtime/folded.py holds of each value."""
    folded = by_turns(mesh, order)
    many = mesh is not None and (mesh.size > 1 or folded)
    outs = [t.on(mesh) for t in results]
    # The engine gives donated memory to results of one shape in their order.
    taken = [donate[i] for i in sorted(donate)]
    turn = [*taken, *sorted({*range(len(outs))} - {*taken})]
    # The engine's partitioner fails over arguments without elements: each device makes its own.
    held = [i for i, t in enumerate(ins) if t.size or not many]

    def program(*given: Array) -> list[Array]:
        rest = iter(given)
        arrays = [
            next(rest) if t.size or not many else xp_jax.full(block_shape(t), 0, t.dtype)
            for t in ins
        ]
        if folded:
            from .folded import Folded

            assert mesh is not None
            turns = Folded(mesh)
            values = body([turns.unpack(a, t) for a, t in zip(arrays, ins, strict=True)])
            return [turns.pack(values[i], outs[i]) for i in turn]
        args = [
            lax.reshape(a, t.local_shape) if a.shape != t.local_shape else a
            for a, t in zip(arrays, ins, strict=True)
        ]
        found = body(args)
        return [
            lax.reshape(r, block_shape(t)) if r.shape != block_shape(t) else r
            for r, t in ((found[i], outs[i]) for i in turn)
        ]

    def made() -> Any:
        def run(*arrays: Array) -> list[Array]:
            return program(*arrays)

        run.__name__ = run.__qualname__ = name
        inner = run
        if many:
            assert mesh is not None
            inner = jax.shard_map(
                run,
                mesh=jax_mesh(mesh),
                in_specs=tuple(spec(ins[i].on(mesh)) for i in held),
                out_specs=[spec(outs[i]) for i in turn],
                check_vma=False,
            )

        def whole(*arrays: Array) -> list[Array]:
            return inner(*(arrays[i] for i in held))

        whole.__name__ = whole.__qualname__ = name
        return jax.jit(
            inner if len(held) == len(ins) else whole,
            donate_argnums=tuple(donate),
            compiler_options=dict(options) if options else None,
        )

    run = Program(made, throttle_of(mesh))
    if turn == sorted(turn):
        return run
    return _InTurn(run, sorted(range(len(turn)), key=turn.__getitem__))
