"""The dearest layers and collectives of a step, with the user's lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from ..core.machine.chip import Chip
from ..cost.step_time import Kernel, kernels
from ..ir.graph.node import Graph, scope_family
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send
from .timeline import Event, Timeline, waits

MOST = 10


@dataclass(frozen=True, slots=True)
class Share:
    """A layer or collective of one device of a stage: its place in the model and the user's line,
    its seconds in a step, those of them that the device waits, and its bytes (a collective's are
    received) and FLOPs."""

    stage: int
    what: str
    where: str
    at: str
    count: int
    time_s: float
    exposed_s: float
    bytes: int
    flops: int


def dearest(every: Iterable[Share]) -> list[Share]:
    """The sums of `every` by stage, what, where and line; the longest first."""
    found: dict[tuple[object, ...], Share] = {}
    for s in every:
        key = (s.stage, s.what, s.where, s.at)
        old = found.get(key)
        found[key] = s if old is None else replace(
            s, count=s.count + old.count, time_s=s.time_s + old.time_s,
            exposed_s=s.exposed_s + old.exposed_s, bytes=s.bytes + old.bytes,
            flops=s.flops + old.flops,
        )  # fmt: skip
    return sorted(found.values(), key=lambda s: -s.time_s)[:MOST]


def layers(schedule: Schedule, chip: Chip) -> Iterator[Share]:
    """The kernels of each stage, by the module of the model; those outside of modules by op."""
    made: dict[Graph, list[Kernel]] = {}

    def walk(s: Schedule, times: int, stage: int) -> Iterator[Share]:
        for step in s.steps:
            here = stage if step.mesh in (None, schedule.mesh) else step.stage
            match step:
                case Compute():
                    mesh = step.graph.mesh or schedule.mesh
                    devices = mesh.physical.size if mesh is not None else 1
                    places = mesh.size // devices if mesh is not None else 1
                    if step.graph not in made:
                        made[step.graph] = kernels(step.graph, chip.part(devices))
                    for k in made[step.graph]:
                        n = k.times * times * places
                        name = scope_family(k.scope)
                        yield Share(here, name or k.op, name, k.at, n, n * k.time_s, 0.0,
                                    n * k.moved_bytes, n * k.flops)  # fmt: skip
                case Loop() | Region():
                    more = step.times if isinstance(step, Loop) else 1
                    yield from walk(step.body, times * more, here)
                case Collective() | Send():
                    pass
                case _:
                    assert_never(step)

    yield from walk(schedule, 1, 0)


def communication(timeline: Timeline) -> Iterator[Share]:
    """The collectives and sends of each stage, inside of loops and regions too."""

    def walk(events: Iterable[Event], times: int, stage: int) -> Iterator[Share]:
        rows = [*events]
        exposed = waits(rows)
        for e in rows:
            if e.inside:
                yield from walk(e.inside, times * e.times, stage)
            elif not e.computes:
                what = f"{e.what} {','.join(e.axes)}".strip()
                yield Share(stage, what, e.scope, e.at, times, times * e.time_s,
                            times * exposed.get(e, 0.0), times * e.bytes, 0)  # fmt: skip

    for s in timeline.stages:
        yield from walk((e for e in timeline.events if e.stage == s.stage), 1, s.stage)
