"""The stepped executor: every step of a schedule is a program of its own, dispatched in order.

Dispatch is asynchronous, so steps that wait for nothing of each other overlap where their devices
differ. It makes each collective measurable, and it is the cross-check of the fused executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import BackendError, fail
from ..core.layout import TensorType
from ..core.limits import limits
from ..core.options import AS_IT_COMES
from ..core.words import ranks_text
from ..ir.graph.node import Graph, Node
from ..ir.schedule.build import build_schedule
from ..ir.schedule.donation import donation_aliases
from ..ir.schedule.schedule import COMM, Schedule, Step
from ..ir.schedule.watch import watcher
from .agree import processes_of
from .ahead import turn_of
from .flight import arrive, flight
from .lower import jitted, local_run
from .send import sender
from .stage_programs import kept

Array = Any
Program = Callable[..., list[Array]]


class Stepped:
    """Runs `schedule` step by step: device arrays in, a list of device arrays out. `inner` is the
    body of a loop, whose turns belong to the run around it."""

    def __init__(
        self,
        schedule: Schedule,
        inner: bool = False,
        options: Mapping[str, Any] | None = None,
        order: str = "",
    ) -> None:
        self.schedule, self.inner = schedule, inner
        self.options, self.order = options, order
        self._programs: dict[Graph, Program] = {}
        # Steps of one graph may reuse the same.
        self._reused = {
            step.graph: pairs
            for step, pairs in zip(schedule.steps, donation_aliases(schedule), strict=True)
        }
        self.steps = [self._program(step) for step in schedule.steps]
        made = {b: i for i, step in enumerate(schedule.steps) for b in step.writes}
        self.plan = [
            (step, self._recorded(i, program, made), step.reads, step.writes, freed)
            for i, (step, program, freed) in enumerate(
                zip(schedule.steps, self.steps, schedule.freed, strict=True)
            )
        ]

    def __call__(self, *args: Array) -> list[Array]:
        s, look = self.schedule, watcher()
        env: list[Any] = [None] * len(s.buffers)
        for b, x in zip(s.inputs, self._apart(args), strict=True):
            env[b] = x
        if look is None:
            for _, program, reads, writes, freed in self.plan:
                for b, x in zip(writes, program(*[env[b] for b in reads])):
                    env[b] = x
                for b in freed:
                    env[b] = None
            return [env[b] for b in s.outputs]
        if not self.inner:
            look.begin(s)
        for i, (_, program, reads, writes, freed) in enumerate(self.plan):
            args = tuple(env[b] for b in reads)
            jax.block_until_ready(args)
            start_s = time.perf_counter()
            outs = program(*args)
            look.step(s, i, start_s, time.perf_counter(), _ready(outs, start_s))
            for b, x in zip(writes, outs, strict=True):
                env[b] = x
            for b in freed:
                env[b] = None
        return [env[b] for b in s.outputs]

    def _apart(self, args: Sequence[Array]) -> Sequence[Array]:
        """`args`, each in memory of its own where some is given up: an array that is given twice
        (two results that were one value) may not be taken over twice."""
        if not self.schedule.donated or len({*map(id, args)}) == len(args):
            return args
        seen: set[int] = set()
        own = []
        for x in args:
            own.append(jnp.copy(x) if id(x) in seen else x)
            seen.add(id(x))
        return own

    def _recorded(self, i: int, program: Program, made: Mapping[int, int]) -> Program:
        """`program`, which the flight recorder sees: each collective, and between processes each
        step that several take part in."""
        s, step = self.schedule, self.schedule.steps[i]
        mesh = step.graph.mesh or s.mesh
        several = jax.process_count() > 1
        group = processes_of(mesh) if several else tuple(mesh.device_ids) if mesh else (0,)
        if len(group) == 1 or (step.stream != COMM and not several):
            return program
        name, what, at = f"s{i}", step.what, step.at
        size = sum(s.buffers[b].local_bytes for b in step.writes)
        makers = [_maker_text(s, made.get(b)) for b in step.reads]
        fresh = True

        def run(*args: Array) -> list[Array]:
            nonlocal fresh
            record = flight().begin(s.name, name, what, at, group, size, compiles=fresh)
            fresh = False
            try:
                if step.stream == COMM:
                    arrive(record, makers, args)
                outs = program(*args)
            except Exception as error:
                flight().failed(record, error)
                raise
            if several:
                flight().given(record, outs)
            else:
                flight().finish(record)
            return outs

        return run

    def _program(self, step: Step) -> Program:
        known = self._programs.get(step.graph)
        if known is None:
            match step.kind:
                case "loop":
                    known = Loop(step, self)
                case "send":
                    sources = [self.schedule.buffers[b] for b in step.reads]
                    known = sender(sources, [n.type for n in step.graph.outputs])
                case "fused":
                    mesh = step.graph.mesh or self.schedule.mesh
                    places = self._reused[step.graph]
                    known = kept(step.graph, mesh, self.order, places, lambda: self._compiled(step))
                case _:
                    known = self._compiled(step)
            self._programs[step.graph] = known
        return known

    def _compiled(self, step: Step) -> Program:
        mesh = step.graph.mesh or self.schedule.mesh

        def body(args: Sequence[Array]) -> list[Array]:
            return local_run(mesh, self.order)(step, args)

        ins = [n.type for n in step.graph.inputs]
        outs = [n.type for n in step.graph.outputs]
        name = f"{self.schedule.name}_{step.kind}"
        places = self._reused[step.graph]
        return jitted(name, body, ins, outs, mesh, places, self.options, self.order)


def _maker_text(s: Schedule, i: int | None) -> str:
    """The step that makes what another reads, in words."""
    if i is None:
        return "an argument"
    step = s.steps[i]
    return f"s{i} of {s.name}: {step.what}" + (f" at {step.at}" if step.at else "")


class Loop:
    """A loop with collectives in its body: its turns, step by step."""

    def __init__(self, step: Step, around: Stepped) -> None:
        (self.node,) = (n for n in step.nodes if n.op == "scan")
        self.step = step
        attrs = self.node.attrs
        body = attrs["body"]
        body = replace(body, options=replace(body.options, schedule=AS_IT_COMES))
        self.body = Stepped(build_schedule(body), True, around.options, around.order)
        self.places = [step.graph.inputs.index(a) if a.op == "input" else None
                       for a in self.node.args]  # fmt: skip
        self.made = {k: self._maker(a, around) for k, a in enumerate(self.node.args)
                     if a.op != "input"}  # fmt: skip
        self.turn = turn_of(around.schedule.mesh)

    def _maker(self, n: Node, around: Stepped) -> Program:
        """The program of an argument that is made from nothing."""
        step, mesh = Step(Graph(n.op, (n,), (), (n,)), (), ()), around.schedule.mesh

        def body(args: Sequence[Array]) -> list[Any]:
            return local_run(mesh, around.order)(step, args)

        return jitted(n.op, body, [], [n.type], mesh, options=around.options, order=around.order)

    def _next(self, program: Any, *args: Any) -> Array:
        if self.turn is not None:
            self.turn()
        return program(*args)

    def __call__(self, *args: Array) -> list[Array]:
        attrs = self.node.attrs
        consts, carries, length = attrs["consts"], attrs["carries"], attrs["length"]
        values = [
            args[p] if p is not None else self.made[k]()[0] for k, p in enumerate(self.places)
        ]
        fixed, carry = values[:consts], values[consts : consts + carries]
        rows = values[consts + carries :]
        types = [a.type for a in self.node.args[consts + carries :]]
        turns: list[list[Array]] = []
        order = range(length)
        for i in reversed(order) if attrs["reverse"] else order:
            xs = [self._next(_row, x, i, _lead(t)) for x, t in zip(rows, types, strict=True)]
            outs = self.body(*fixed, *carry, *xs)
            carry = outs[:carries]
            turns.append(outs[carries:])
        if attrs["reverse"]:
            turns.reverse()
        stacked = [
            self._next(_stack, [t[j] for t in turns], _lead(self.node.types[carries + j]))
            for j in range(len(self.node.types) - carries)
        ]
        results = [*carry, *stacked]
        picked = {n: results[n.attrs["index"]] for n in self.step.nodes if n.op == "item"}
        return [picked[o] for o in self.step.graph.outputs]


def _lead(t: TensorType) -> int:
    """Where dim 0 of a value of type `t` is in its array."""
    folded = t.mesh is not None and t.mesh.onto is not None  # where an axis is two dims
    return (len(t.partial) + len(t.varying)) * (2 if folded else 1)


_row = jax.jit(
    lambda x, i, at: jax.lax.dynamic_index_in_dim(x, i, at, keepdims=False), static_argnums=2
)


_stack = jax.jit(lambda rows, at: jnp.stack(rows, axis=at), static_argnums=1)


def _ready(outs: Sequence[Array], start_s: float) -> dict[int, float]:
    """Per device, when its last result was there. Raises BackendError where one takes longer than
    a collective may."""
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
            raise fail(
                BackendError,
                f"a step took longer than {limits().collective_s:g} s: {ranks_text(late)}"
                " did not end",
                fix="see what it computes there, or allow more: dist.set_collective_limit(seconds)",
            )
        if waiting:
            time.sleep(1e-5)
    return done or {0: start_s}
