"""Lowering of a schedule to one XLA program, step by step and node by node.

This is the fused executor; runtime/stepped_executor.py runs the steps one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import jax
from jax import lax

from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..core.options import PLAIN, ProgramOptions
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..passes.channels_last import channels_last
from . import xp_jax
from .arrays import block_shape, sharding, spec
from .devices import jax_mesh, platform
from .folds import Blocks, Folds
from .interpreter import Interpreter
from .program_cache import Program

Array = Any
NONE: Mapping[int, int] = {}


@dataclass(frozen=True)
class _Reordered:
    """A jitted program whose results the engine sees in another order."""

    run: Any
    back: Sequence[int]  # for each result, its index in the results of `run`

    def __call__(self, *arrays: Array) -> list[Array]:
        given = self.run(*arrays)
        return [given[i] for i in self.back]

    def lower(self, *arrays: Any) -> Any:
        return self.run.lower(*arrays)

    def trace(self, *arrays: Any) -> Any:
        return self.run.trace(*arrays)

    @property
    def is_compiled(self) -> bool:
        return bool(self.run.is_compiled)


def run_step(step: Step, values: Sequence[Blocks], interpreter: Interpreter) -> list[Blocks]:
    """Returns the results of one step on this device, from the values that it reads."""
    match step:
        case Compute(graph=graph):
            # XLA for GPUs chooses layouts itself; mesh_invariant fixes the order of sums.
            if platform() == "cpu" and not interpreter.under.mesh_invariant:
                graph = channels_last(graph)
            return interpreter.run(graph, values)
        case Collective():
            return interpreter.run(step.graph, values, bucket=len(step.nodes) > 1)
        case Loop(body=body):
            return interpreter.run(
                step.graph, values, lambda _, xs: run_steps(body, xs, interpreter.under)
            )
        case Region(body=body):
            return run_steps(body, values, interpreter.under)
        case Send():
            raise AssertionError("what is sent goes from one program to another")
        case _:
            assert_never(step)


def run_steps(schedule: Schedule, args: Sequence[Blocks], under: ProgramOptions) -> list[Blocks]:
    """Returns the results of all steps on this device, in one program."""
    env = dict(zip(schedule.inputs, args, strict=True))
    interpreter = Interpreter(schedule.mesh, under)
    ends: list[Sequence[Blocks]] = []
    for i, step in enumerate(schedule.steps):
        values = [env[b] for b in step.reads]
        late = [j for j in step.after if j not in _by_buffers(schedule, i)]
        if late and values:
            # An `after` in the schedule becomes a dependency in the program: otherwise XLA could
            # run the two steps in any order.
            behind = [e for j in late for e in ends[j][:1]]
            values, _ = lax.optimization_barrier((values, behind))
            if isinstance(step, Collective) and step.nodes[0].attrs.get("again"):
                values = [Blocks(xp_jax.dependent(x, behind[0][0]) for x in v) for v in values]
        outs = run_step(step, values, interpreter)
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
    under: ProgramOptions = PLAIN,
) -> Callable[..., Any]:
    """Returns the jitted program of `schedule`: device arrays in, a list of device arrays out.
    `donate` maps a donated argument to the result that reuses its memory; `under` has the options
    with the level of determinism."""
    mesh = schedule.mesh
    types = [schedule.buffers[b] for b in schedule.inputs]
    return jitted(
        schedule.name,
        lambda args: run_steps(schedule, args, under),
        types,
        [schedule.buffers[b] for b in schedule.outputs],
        mesh,
        donate,
        options,
        is_wide=any(step.graph.is_wide for step in schedule.steps),
    )


def jitted(
    name: str,
    body: Callable[[Sequence[Blocks]], Sequence[Blocks]],
    ins: Sequence[TensorType],
    results: Sequence[TensorType],
    mesh: Mesh | None,
    donate: Mapping[int, int] = NONE,
    options: Mapping[str, Any] | None = None,
    is_stage: bool = False,
    is_wide: bool = False,
) -> Callable[..., Any]:
    """Returns a jitted program that runs `body` on the folds of each device of `mesh`. With
    `is_stage`, `mesh` is a pipeline stage's part of the devices."""
    folds = Folds(mesh)
    many = mesh is not None and (mesh.size > 1 or mesh.onto is not None)
    outs = [t.on(mesh) for t in results]
    # XLA assigns donated buffers to results of the same shape in order.
    taken = [donate[i] for i in sorted(donate)]
    order = [*taken, *sorted({*range(len(outs))} - {*taken})]
    # XLA's partitioner fails on arguments without elements, so each device makes its own.
    held = [i for i, t in enumerate(ins) if t.size or not many]

    def program(*args: Array) -> list[Array]:
        rest = iter(args)
        arrays = [
            next(rest) if t.size or not many else xp_jax.full(block_shape(t), 0, t.dtype)
            for t in ins
        ]
        found = body([folds.unpack(a, t) for a, t in zip(arrays, ins, strict=True)])
        return [folds.pack(found[i], outs[i]) for i in order]

    def make_program() -> Any:
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
                out_specs=[spec(outs[i]) for i in order],
                check_vma=False,
            )

        def whole(*arrays: Array) -> list[Array]:
            return inner(*(arrays[i] for i in held))

        whole.__name__ = whole.__qualname__ = name
        return jax.jit(
            inner if len(held) == len(ins) else whole,
            donate_argnums=tuple(donate),
            # The sharding of values from the host, or a call with results would compile again.
            out_shardings=[sharding(outs[i]) for i in order]
            if mesh is not None and not many
            else None,
            compiler_options=dict(options) if options else None,
        )

    run = Program(make_program, mesh, is_stage, is_wide)
    if order == sorted(order):
        return run
    return _Reordered(run, sorted(range(len(order)), key=order.__getitem__))
