"""The stepped executor: every step of a schedule is a program of its own, dispatched in order.

Dispatch is asynchronous, so independent steps overlap if their devices differ. It makes each
collective measurable, and it cross-checks the fused executor.

With several processes, each runs the steps that use its devices, in the order of the schedule. A
value of other processes is an array without local shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import BackendError
from ..core.layout import TensorType
from ..core.limits import limits
from ..core.mesh import Mesh
from ..core.options import PLAIN, ProgramOptions
from ..core.wording import ranks_text
from ..ir.graph.node import Graph
from ..ir.schedule.donation import donation_aliases
from ..ir.schedule.listener import watcher
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from .arrays import array_shape, sharding
from .cpu.throttle import throttle_of
from .folds import Blocks
from .interpreter import Interpreter
from .lower import jitted, run_step
from .processes.flight import arrive, flight
from .processes.program_consistency import processes_of
from .send import sender
from .transfer import absent

Array = Any
Program = Callable[..., list[Array]]


class Stepped:
    """Runs `schedule` step by step: device arrays in, a list of device arrays out. `inner`: the
    schedule is the body of a step, and its runs belong to the outer run."""

    def __init__(
        self,
        schedule: Schedule,
        inner: bool = False,
        options: Mapping[str, Any] | None = None,
        under: ProgramOptions = PLAIN,
    ) -> None:
        self.schedule, self.inner = schedule, inner
        self.options, self.under = options, under
        self._programs: dict[object, Program] = {}
        self._warm: set[Program] = set()  # programs that had a first call without measurement
        # Steps with equal `runs` share one program and its donated arguments.
        runs = (step.runs for step in schedule.steps)
        self._aliases = dict(zip(runs, donation_aliases(schedule), strict=True))
        self.elsewhere = {i for i in range(len(schedule.steps)) if not self._is_local(i)}
        self.steps = [self._program(i, step) for i, step in enumerate(schedule.steps)]
        writers = {b: i for i, step in enumerate(schedule.steps) for b in step.writes}
        self.launches = [
            (step, self._recorded(i, program, writers), step.reads, step.writes, freed)
            for i, (step, program, freed) in enumerate(
                zip(schedule.steps, self.steps, schedule.freed, strict=True)
            )
        ]

    def __call__(self, *args: Array) -> list[Array]:
        s, look = self.schedule, watcher()
        env: list[Any] = [None] * len(s.buffers)
        for b, x in zip(s.inputs, self._deduplicated(args), strict=True):
            env[b] = x
        if look is None:
            for _, program, reads, writes, freed in self.launches:
                for b, x in zip(writes, program(*[env[b] for b in reads])):
                    env[b] = x
                for b in freed:
                    env[b] = None
            return [env[b] for b in s.outputs]
        if not self.inner:
            look.begin(s)
        for i, (_, program, reads, writes, freed) in enumerate(self.launches):
            args = tuple(env[b] for b in reads)
            # A loop or a stepped region reports its own steps.
            told = i in self.elsewhere or isinstance(self.steps[i], Stepped | _Looped)
            if not told and self.steps[i] not in self._warm:
                self._call_unmeasured(i, args)
            jax.block_until_ready(args)
            start_s = time.perf_counter()
            outs = program(*args)
            if not told:
                look.step(s, i, start_s, time.perf_counter(), _ready(outs, start_s))
            for b, x in zip(writes, outs, strict=True):
                env[b] = x
            for b in freed:
                env[b] = None
        return [env[b] for b in s.outputs]

    def _call_unmeasured(self, i: int, args: Sequence[Array]) -> None:
        """Makes the first call of step `i`, which compiles, with copies of donated arguments."""
        taken = self._aliases[self.schedule.steps[i].runs]
        own = [
            jax.device_put(x, x.sharding, may_alias=False) if k in taken else x
            for k, x in enumerate(args)
        ]
        jax.block_until_ready(self.steps[i](*own))
        self._warm.add(self.steps[i])

    def _deduplicated(self, args: Sequence[Array]) -> Sequence[Array]:
        """Returns `args`, with copies of repeated arrays if any argument is donated: an array
        passed twice (two results that were one value) cannot be donated twice."""
        if not self.schedule.donated or len({*map(id, args)}) == len(args):
            return args
        seen: set[int] = set()
        own = []
        for x in args:
            own.append(jnp.copy(x) if id(x) in seen else x)
            seen.add(id(x))
        return own

    def _recorded(self, i: int, program: Program, writers: Mapping[int, int]) -> Program:
        """Returns `program` with a record in the flight recorder: for each collective, and between
        processes for each step of several processes."""
        s, step = self.schedule, self.schedule.steps[i]
        mesh = step.mesh or s.mesh
        several = jax.process_count() > 1
        group = self._processes(step) if several else tuple(mesh.device_ids) if mesh else (0,)
        moves = isinstance(step, Collective)
        if len(group) == 1 or (not moves and not several) or i in self.elsewhere:
            return program
        name, operation, at = f"s{i}", step.description, step.at
        size = sum(s.buffers[b].local_bytes for b in step.writes)
        makers = [_maker_text(s, writers.get(b)) for b in step.reads]
        fresh = True

        def run(*args: Array) -> list[Array]:
            nonlocal fresh
            record = flight().begin(s.name, name, operation, at, group, size, compiles=fresh)
            fresh = False
            try:
                if moves:
                    arrive(record, makers, args)
                outs = program(*args)
            except Exception as error:
                flight().failed(record, error)
                raise
            if several:
                flight().dispatched(record, outs)
            else:
                flight().finish(record)
            return outs

        return run

    def _processes(self, step: Step) -> tuple[int, ...]:
        """Returns the processes that take part in `step`."""
        if not isinstance(step, Send):
            return processes_of(step.mesh or self.schedule.mesh)
        ends = {self.schedule.buffers[b].mesh for b in (*step.reads, *step.writes)}
        return tuple(sorted({p for mesh in ends for p in processes_of(mesh)}))

    def _is_local(self, i: int) -> bool:
        step = self.schedule.steps[i]
        return jax.process_count() == 1 or jax.process_index() in self._processes(step)

    def _program(self, i: int, step: Step) -> Program:
        if i in self.elsewhere:
            mesh = step.mesh or self.schedule.mesh
            types = [self.schedule.buffers[b] for b in step.writes]
            types = types if isinstance(step, Send) else [t.on(mesh) for t in types]
            names = [absent(array_shape(t), t.dtype.numpy, sharding(t)) for t in types]
            return lambda *_: names
        known = self._programs.get(step.runs)
        if known is None:
            known = self._programs[step.runs] = self._program_of(step)
        return known

    def _program_of(self, step: Step) -> Program:
        """Returns the program of one step. Recordings share the programs of pipeline stages."""
        match step:
            case Send():
                return sender([self.schedule.buffers[b] for b in step.reads], step.types)
            case Loop():
                return _Looped(step, self._inner(step.body), throttle_of(self.schedule.mesh))
            case Region() if self.schedule.options.executor == "stepped":
                return self._inner(step.body)
            case Region() | Compute() if self.schedule.is_staged:
                mesh, aliases = step.mesh or self.schedule.mesh, self._aliases[step.runs]
                return cached(step.graph, mesh, self.under, aliases, lambda: self._compiled(step))
            case Compute() | Collective() | Region():
                return self._compiled(step)
            case _:
                assert_never(step)

    def _inner(self, body: Schedule) -> Stepped:
        return Stepped(body, True, self.options, self.under)

    def _compiled(self, step: Compute | Collective | Region) -> Program:
        aliases = self._aliases[step.runs]
        return step_program(self.schedule, step, aliases, self.options, self.under)


def step_program(
    schedule: Schedule, step: Compute | Collective | Region, aliases: Mapping[int, int],
    options: Mapping[str, Any] | None, under: ProgramOptions,
) -> Program:  # fmt: skip
    """Returns `step` of `schedule` as a program of its own."""
    mesh = step.mesh or schedule.mesh

    def body(args: Sequence[Blocks]) -> list[Blocks]:
        return run_step(step, args, Interpreter(mesh, under))

    ins = [n.type for n in step.graph.inputs]
    outs = [n.type for n in step.graph.outputs]
    name = f"{schedule.name}_{step.kind}"
    staged, wide = step.mesh is not None, step.graph.is_wide
    return jitted(name, body, ins, outs, mesh, aliases, options, staged, wide)


def _maker_text(s: Schedule, i: int | None) -> str:
    """Returns the text of the step that makes a value."""
    if i is None:
        return "an argument"
    step = s.steps[i]
    return f"s{i} of {s.name}: {step.description}" + (f" at {step.at}" if step.at else "")


class _Looped:
    """A loop that runs the steps of its body repeatedly. `before` is called before each launch of
    the loop's own programs."""

    def __init__(self, step: Loop, body: Stepped, before: Callable[[], None] | None) -> None:
        self.step, self.body, self.before = step, body, before

    def _next(self, program: Any, *args: Any) -> Array:
        if self.before is not None:
            self.before()
        return program(*args)

    def __call__(self, *args: Array) -> list[Array]:
        step, types = self.step, self.body.schedule.graph
        first = step.consts + step.carries
        fixed, carry, rows = args[: step.consts], args[step.consts : first], args[first:]
        leads = [_lead(n.type) for n in types.inputs[first:]]
        ends: list[list[Array]] = []
        while step.length is None and _is_true(carry[0]):
            carry = tuple(self.body(*fixed, *carry))
        order = range(step.length or 0)
        for i in reversed(order) if step.reverse else order:
            xs = [self._next(_row, x, i, lead) for x, lead in zip(rows, leads, strict=True)]
            outs = self.body(*fixed, *carry, *xs)
            carry = tuple(outs[: step.carries])
            ends.append(outs[step.carries :])
        if step.reverse:
            ends.reverse()

        def result(k: int) -> Array:
            if k < step.carries:
                return carry[k]
            parts = [e[k - step.carries] for e in ends]
            return self._next(_stack, parts, _lead(types.outputs[k].type))

        return list(map(result, step.gives))


def _is_true(x: Array) -> bool:
    """Returns the value of a bool that is equal on all devices."""
    return bool(np.asarray(x.addressable_shards[0].data).any())


def _lead(t: TensorType) -> int:
    """Returns the array dim of dim 0 of a value of type `t`."""
    folded = t.mesh is not None and t.mesh.onto is not None  # an axis is two dims then
    return (len(t.partial) + len(t.varying)) * (2 if folded else 1)


_row = jax.jit(
    lambda x, i, at: jax.lax.dynamic_index_in_dim(x, i, at, keepdims=False), static_argnums=2
)


_stack = jax.jit(lambda rows, at: jnp.stack(rows, axis=at), static_argnums=1)


def _ready(outs: Sequence[Array], start_s: float) -> dict[int, float]:
    """Returns for each device when its last result was ready. Raises BackendError if one takes
    longer than the limit of collectives."""
    end_s = time.perf_counter() + limits().collective_s
    done: dict[int, float] = {}
    shards = sorted(
        ((s.device.id, s.data) for x in outs for s in x.addressable_shards), key=lambda s: s[0]
    )
    waiting = dict(enumerate(shards))
    while waiting:
        for k, (device, data) in list(waiting.items()):
            if data.is_ready():
                done[device] = time.perf_counter()
                del waiting[k]
        if waiting and time.perf_counter() > end_s:
            late = sorted({device for device, _ in waiting.values()})
            raise BackendError(
                f"a step took longer than {limits().collective_s:g} s: {ranks_text(late)}"
                " did not end",
                fix="see what it computes there, or allow more:"
                " dist.set_collective_timeout(seconds)",
            )
        if waiting:
            time.sleep(1e-5)
    return done or {0: start_s}


# Compiled programs of pipeline stages, cached by graph.
#
# They are the same in every recording, and in every schedule with the same stages.

Compiled = Callable[..., list[Any]]
STAGE_PROGRAMS = 128
_programs: dict[object, Compiled] = {}


def cached(
    graph: Graph, mesh: Mesh | None, under: ProgramOptions, aliases: Mapping[int, int],
    make: Callable[[], Compiled],
) -> Compiled:  # fmt: skip
    """Returns the program that `make` makes for `graph`, or the cached one of an equal graph; the
    last 128 are kept. `aliases` maps donated arguments to results."""
    if graph.key is None:
        return make()
    key = mesh, under, tuple(aliases.items()), graph.key
    found = _programs.pop(key, None) or make()
    _programs[key] = found  # the last used comes last
    if len(_programs) > STAGE_PROGRAMS:
        _programs.pop(next(iter(_programs)))
    return found


def forget() -> None:
    """Clears the cache; running pipelines keep their programs."""
    _programs.clear()
