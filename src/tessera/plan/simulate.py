"""Simulation of a schedule on a machine: when each step runs, and what the devices wait for.

A device has a stream for computation, one for each level of links, and one on each level for what
it sends to another stage. A step begins when the steps that it depends on have ended and its
streams are free; so communication overlaps with the computation that does not need it, and two
collectives overlap if they use different links. All
devices of a stage behave alike, so one of them is simulated: the cost does not grow with the
machine.

>>> from tessera.core.layout import parse_type
>>> from tessera.core.mesh import Mesh
>>> from tessera.ir.graph.build import Builder
>>> from tessera.passes.plan import plan
>>> from .machines import machine_of
>>> b = Builder("step")
>>> x, w = (b.input(parse_type(t, Mesh.parse("dp=1024"))) for t in
...         ("bf16[1048576@dp, 4096]", "bf16[4096, 4096] +dp"))
>>> done = b("all_reduce", w, axes=("dp",))
>>> line = simulate(plan(b.graph([b("contract", x, done, index="a b, b c -> a c")])),
...                 machine_of("dgx_h100", 1024))
>>> for e in line.events:
...     print(e.what, e.streams, f"{e.start_s * 1e6:.0f} to {e.end_s * 1e6:.0f} µs")
all_reduce ('node', 'gpu') 20 to 305 µs
compute ('compute',) 305 to 357 µs
>>> f"{line.stages[0].exposed_s * 1e6:.0f} µs", line.link_bytes
('285 µs', {'node': 67043328, 'gpu': 67043328})
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, assert_never

from ..core.declared import Flag, Given
from ..core.errors import UsageError
from ..core.machine.chip import Chip
from ..core.machine.machine import Machine
from ..core.mesh import Mesh
from ..core.public import checked
from ..core.topology import Topology
from ..cost.collective_time import CollectiveTime, collective_time
from ..cost.schedule_collectives import priced_as, whole_bytes
from ..cost.step_time import StepTime, step_time
from ..ir.graph.node import Graph, Node
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..ops.control import after, in_memory
from .timeline import Event, StageTime, Sums, Timeline, Traffic, summed

COMPUTE = "compute"


@checked
def simulate(
    schedule: Annotated[Schedule, Given("take the .schedule of a function, or its .plan(...)")],
    machine: Annotated[Machine, Given("machine_of('dgx_h100', devices=1024) has one")],
    *,
    overlap: Flag = True,
) -> Timeline:
    """Returns the simulated run of `schedule` on `machine`, in seconds from its start.

    With `overlap` False a stage does one thing at a time; a schedule that was made with
    overlap=False has that in its dependencies. The iterations of a loop follow each other. A
    pipeline launches each step as a program of its own. Raises UsageError if the machine is smaller
    than the program's mesh, or has no chip.
    """
    mesh = schedule.mesh.physical if schedule.mesh is not None else None
    largest = max(mesh.ids) + 1 if mesh is not None else 1
    if machine.size < largest:
        raise UsageError(
            f"simulate: {machine.name} has {machine.size:,} devices, and the program is for"
            f" {largest:,}",
            fix=f"take a larger one: machine_of({machine.name!r}, devices={largest})",
        )
    if machine.chip is None:
        raise UsageError(
            f"simulate: {machine.name} has no chip",
            fix="add the key chip to its file, or measure it: tessera calibrate",
        )
    return Simulator(schedule, machine, machine.chip, overlap).timeline()


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the schedule in a loop or region, from time 0."""

    events: tuple[Event, ...]
    span_s: float
    streams: tuple[str, ...]
    sums: Sums


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies to the host's memory and back in a step. They run beside it. `made` are the
    buffers that exist after them, `waited_for` those without which the step cannot end."""

    time_s: float
    bytes: int
    waited_for: frozenset[int]
    made: tuple[int, ...]


_NO_COPIES = _Copies(0.0, 0, frozenset(), ())
HOST = "host"


@lru_cache(maxsize=4096)
def _copied(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the inputs that are only waited for, and of the outputs that are copied to the
    host's memory or back."""
    first = {n.args[1] for n in graph.nodes if n.op == after.name}
    read = {a for n in graph.nodes for a in (n.args[:1] if n.op == after.name else n.args)}
    waits = tuple(i for i, n in enumerate(graph.inputs) if n in first and n not in read)
    return waits, tuple(i for i, n in enumerate(graph.outputs) if _is_copied(n))


def _is_copied(n: Node) -> bool:
    while n.kind.memory == "view" and n.op != in_memory.name:
        n = n.args[0]
    return n.op == in_memory.name


class Simulator:
    """One simulated run; `time_of` prices the graph of a compute step."""

    def __init__(
        self, schedule: Schedule, machine: Machine, chip: Chip, overlap: bool = True,
        time_of: Callable[[Graph, Chip], StepTime] = step_time,
    ) -> None:  # fmt: skip
        self.time_of = time_of
        self.whole, self.machine, self.chip = schedule, machine, chip
        self.one = chip.shared or not overlap  # a device does one thing at a time
        self.stages = _stages(schedule)
        self.stage_of = {mesh: i for i, mesh in enumerate(self.stages)}
        self.computed: dict[Graph, StepTime] = {}
        self.collected: dict[Graph, CollectiveTime] = {}
        self.runs: dict[Schedule, _Run] = {}
        self.inner: dict[Event, Sums] = {}

    def timeline(self) -> Timeline:
        """The events of the whole schedule, and the sums of each stage."""
        whole, staged = self.whole, self.whole.is_staged
        first_s = 0.0 if staged else self.chip.program_s  # one program, launched once
        events = self._events(whole, first_s, self.chip.program_s if staged else 0.0)
        step_s = max((e.end_s for e in events), default=first_s)
        stages, traffic = list[StageTime](), list[Traffic]()
        for i, mesh in enumerate(self.stages):
            found = summed([e for e in events if e.stage == i], self.inner)
            bubble_s = max(0.0, step_s - found.compute_s - found.exposed_s)
            times = found.compute_s, found.exposed_s, bubble_s
            stages.append(StageTime(i, _devices(mesh), *times, found.flops))
            for key, (count, size, took_s, exposed_s) in found.traffic.items():
                traffic.append(Traffic(i, *key, count, size, took_s, exposed_s))
        flops: Counter[str] = Counter()
        for t in self.computed.values():
            flops[t.dtype] += t.flops if t.dtype else 0
        devices = _devices(whole.mesh)
        peak = self.chip.rate(max(flops, key=flops.__getitem__, default="")).peak_flops_per_s
        peak /= devices if self.chip.shared else 1
        return Timeline(
            whole.name, devices, step_s, tuple(events), tuple(stages), tuple(traffic), peak
        )

    # -- events -----------------------------------------------------------------------------------
    def _events(self, s: Schedule, first_s: float, launch_s: float = 0.0) -> list[Event]:
        """The events of the steps of `s`, from `first_s` on; each step is launched for
        `launch_s`. A step on the whole mesh has an event on each stage."""
        ready = dict.fromkeys(s.inputs, first_s)
        free: dict[tuple[int, str], float] = {}
        ends: list[float] = []
        events: list[Event] = []
        for step in s.steps:
            event, busy = self._event(s, step)
            took_s = event.end_s + (launch_s if event.end_s and event.kind != "send" else 0.0)
            names = (COMPUTE,) if self.one else event.streams
            if event.kind == "send" and not self.one:
                names = tuple(f"send {name}" for name in names)
            streams = [(0 if self.chip.shared else i, name) for i in busy for name in names]
            if not took_s:
                streams = []  # nothing moves
            copies = self._copies(step)
            waits = [ready[b] for b in step.reads if b not in copies.waited_for]
            waits += [ends[i] for i in step.after]
            start = max([first_s, *waits, *(free.get(x, first_s) for x in streams)])
            end = max([start + took_s, *(ready[b] for b in copies.waited_for)])
            ends.append(end)
            ready.update(dict.fromkeys(step.writes, end))
            if copies.time_s:
                lane = busy[0], HOST
                begin = max(start, free.get(lane, first_s))
                free[lane] = begin + copies.time_s
                ready.update(dict.fromkeys(copies.made, max(end, free[lane])))
                events.append(
                    Event("copy", "copy", busy[0], (HOST,), begin, free[lane], (), copies.bytes)
                )
            free.update(dict.fromkeys(streams, end))
            for i in (busy if event.kind != "send" else [event.stage]) if took_s else ():
                events.append(replace(event, stage=i, start_s=start, end_s=start + took_s))
                if event in self.inner:
                    self.inner[events[-1]] = self.inner[event]
        return events

    def _copies(self, step: Step) -> _Copies:
        """The copies to the host's memory and back in `step`."""
        if not isinstance(step, Compute) or self.one:
            return _NO_COPIES
        t, (waits, made) = self._compute(step.graph), _copied(step.graph)
        return _Copies(
            t.copies_s, t.copied_bytes, frozenset(step.reads[i] for i in waits),
            tuple(step.writes[i] for i in made),
        )  # fmt: skip

    def _event(self, s: Schedule, step: Step) -> tuple[Event, list[int]]:
        """The event of `step` as if it began at 0, and the stages whose streams it takes."""
        stage = self.stage_of.get(step.mesh)
        busy = [stage] if stage is not None else list(range(len(self.stages)))
        match step:
            case Compute():
                t = self._compute(step.graph)
                took_s = t.time_s + (t.copies_s if self.one else 0.0)
                event = Event(
                    step.note or step.description, step.kind, busy[0], (COMPUTE,), 0.0, took_s,
                    (), t.moved_bytes, t.flops, step.at, _scope(step),
                )  # fmt: skip
            case Collective():
                c = self._collective(step.graph, step)
                size = sum(n.wire_bytes for n in step.nodes)
                event = Event(
                    step.op, step.kind, busy[0], self._links(c.levels), 0.0, c.time_s,
                    step.axes, size, 0, step.at, _scope(step),
                )  # fmt: skip
            case Send():
                source = s.buffers[step.reads[0]].mesh if step.reads else None
                size, c = self._send(step, s)
                event = Event(
                    "send", step.kind, busy[0], self._links(c.levels), 0.0, c.time_s,
                    s.along(step), size, 0, step.note,
                )  # fmt: skip
                busy = [self.stage_of.get(source, step.stage)]
            case Loop() | Region():
                times = step.times if isinstance(step, Loop) else 1
                run = self._run(step.body)
                event = Event(
                    step.note or step.body.name, step.kind, busy[0],
                    tuple(dict.fromkeys((COMPUTE, *run.streams))), 0.0, times * run.span_s,
                    (), times * run.sums.bytes, times * run.sums.flops, step.at, _scope(step),
                    times, run.events,
                )  # fmt: skip
                self.inner[event] = run.sums
            case _:
                assert_never(step)
        return event, busy

    def _run(self, body: Schedule) -> _Run:
        """One run of `body`, on one stage."""
        if body not in self.runs:
            events = self._events(body, 0.0)
            span_s = max((e.end_s for e in events), default=0.0)
            streams = tuple(dict.fromkeys(x for e in events for x in e.streams))
            self.runs[body] = _Run(tuple(events), span_s, streams, summed(events, self.inner))
        return self.runs[body]

    # -- times ------------------------------------------------------------------------------------
    def _compute(self, graph: Graph) -> StepTime:
        if graph not in self.computed:
            mesh = graph.mesh or self.whole.mesh
            one = self.time_of(graph, self.chip.part(_devices(mesh)))
            places = mesh.size // _devices(mesh) if mesh is not None else 1
            self.computed[graph] = replace(
                one,
                time_s=one.time_s * places,
                flops=one.flops * places,
                moved_bytes=one.moved_bytes * places,
                copies_s=one.copies_s * places,
                copied_bytes=one.copied_bytes * places,
            )
        return self.computed[graph]

    def _collective(self, graph: Graph, step: Collective) -> CollectiveTime:
        if graph not in self.collected:
            first, mesh = step.nodes[0], graph.mesh
            assert mesh is not None
            groups, size = groups_of(mesh.physical, step.axes), sum(map(whole_bytes, step.nodes))
            by, links = first.attrs.get("algorithm", "engine"), self._topology(_devices(mesh))
            self.collected[graph] = collective_time(priced_as(first), size, groups, links, by)
        return self.collected[graph]

    def _send(self, step: Send, s: Schedule) -> tuple[int, CollectiveTime]:
        """The bytes that the first device of the target receives, and their time."""
        size, levels, links = 0, set[int](), self._topology(_devices(step.mesh))
        for b, t in zip(step.reads, step.types, strict=True):
            source, target = s.buffers[b].mesh, t.mesh
            ends = _ends(source, target) if source is not None and target is not None else None
            if ends is not None:
                size += t.device_bytes
                a, z = (links.coords(d) for d in ends)
                levels.add(next(i for i in range(len(a)) if a[i] != z[i]))
        if not size:
            return 0, CollectiveTime(0.0, ())
        level = links.levels[min(levels)]
        sharing = min(_devices(step.mesh), math.prod(links.shape[min(levels) + 1 :]))
        moved = size * (sharing if level.shared else 1)
        time_s = level.link.latency_s + moved / level.link.bytes_per_s
        return size, CollectiveTime(time_s, (min(levels),))

    def _topology(self, devices: int) -> Topology:
        """The links as each of `devices` sees them, if all share one chip and its memory."""
        links = self.machine.topology
        if not self.chip.shared:
            return links
        more = links.size / devices
        levels = [
            replace(x, link=replace(x.link, bytes_per_s=x.link.bytes_per_s * more))
            for x in links.levels
        ]
        return replace(links, levels=tuple(levels), add_bytes_per_s=links.add_bytes_per_s * more)

    def _links(self, levels: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.machine.axes[i] for i in levels)


def _stages(s: Schedule) -> list[Mesh | None]:
    """The slices of the mesh that `s` computes on, in the order of their stages."""
    ranks: dict[Mesh, int] = {}
    for step in s.steps if s.is_staged else ():
        if step.mesh is not None and step.mesh != s.mesh and not isinstance(step, Send):
            ranks[step.mesh] = min(ranks.get(step.mesh, step.stage), step.stage)
    found: list[Mesh | None] = [*sorted(ranks, key=ranks.__getitem__)]
    return found or [s.mesh]


def _devices(mesh: Mesh | None) -> int:
    return mesh.physical.size if mesh is not None else 1


def _scope(step: Step) -> str:
    return next((n.scope for n in step.nodes if n.scope), "")


@lru_cache(maxsize=8192)
def groups_of(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Returns `mesh.groups(axes)`, which is long to make for many devices."""
    return mesh.groups(axes)


@lru_cache(maxsize=1024)
def _ends(source: Mesh, target: Mesh) -> tuple[int, int] | None:
    """The first device of `target`, and the device of `source` that has its block of a value of the
    same layout on both; None if the first device has it already."""
    goal = target.ids[0]
    at = {a: c for a, c in target.coords(goal).items() if a in source}
    if goal in _ids(source):
        here = source.coords(goal)
        if all(here[a] == c for a, c in at.items()):
            return None
    return source.device_at({a: at.get(a, 0) for a in source.axes}), goal


@lru_cache(maxsize=1024)
def _ids(mesh: Mesh) -> frozenset[int]:
    return frozenset(mesh.ids)
