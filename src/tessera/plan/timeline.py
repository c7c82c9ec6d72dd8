"""`Timeline`: the simulated events of a program, and the sums over them, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A step of a schedule in simulated time, on one device of each stage.

    - `kind` is that of the step; `what` describes it: the op of a collective, the note of a region.
    - `streams` are the streams of the stage that it occupies: "compute", levels of links, or "host"
      for copies to the host's memory and back.
    - `bytes`: those that a device receives; of a computation those of memory. `flops`: of a device.
    - A loop runs the events in `inside` `times`, a region once; their times count from the start of
      the event (of the first iteration), and its own bytes and FLOPs are their sums.
    """

    what: str
    kind: str
    stage: int
    streams: tuple[str, ...]
    start_s: float
    end_s: float
    axes: tuple[str, ...] = ()
    bytes: int = 0
    flops: int = 0
    at: str = ""
    scope: str = ""
    times: int = 1
    inside: tuple[Event, ...] = ()

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def computes(self) -> bool:
        """Returns whether it occupies the device's processors, also as a loop or region."""
        return self.kind not in ("collective", "send", "copy")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communication of one kind along some axes, of one device of a stage: `count` runs that
    receive `bytes` and take `time_s` in all. The device waits for `exposed_s` of it; the rest is
    hidden behind computation, or behind other communication."""

    stage: int
    what: str
    axes: tuple[str, ...]
    links: tuple[str, ...]
    count: int
    bytes: int
    time_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return self.time_s - self.exposed_s


@dataclass(frozen=True, slots=True)
class StageTime:
    """One device of a stage in a step: seconds of computation, of waiting for communication, and
    without either (the bubble), which together are the step."""

    stage: int
    devices: int
    compute_s: float
    exposed_s: float
    bubble_s: float
    flops: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step: its events in order, and the sums for each stage."""

    name: str
    devices: int
    step_s: float
    events: tuple[Event, ...]
    stages: tuple[StageTime, ...]
    traffic: tuple[Traffic, ...]
    peak_flops_per_s: float

    @property
    def compute_s(self) -> float:
        """The computation of the busiest stage."""
        return max((s.compute_s for s in self.stages), default=0.0)

    @property
    def exposed_s(self) -> float:
        """The longest wait of a stage for communication."""
        return max((s.exposed_s for s in self.stages), default=0.0)

    @property
    def bubble(self) -> float:
        """The mean part of the step in which a stage neither computes nor waits for
        communication."""
        if not self.step_s:
            return 0.0
        return sum(s.bubble_s for s in self.stages) / len(self.stages) / self.step_s

    @property
    def flops(self) -> int:
        """The operations of all devices; replicated work counts on each."""
        return sum(s.flops * s.devices for s in self.stages)

    @property
    def link_bytes(self) -> dict[str, int]:
        """For each level of links, the bytes that the device with most of them receives over it, or
        over it and further levels."""
        total: Counter[tuple[str, int]] = Counter()
        for t in self.traffic:
            for link in t.links:
                total[link, t.stage] += t.bytes
        found: dict[str, int] = {}
        for (link, _), size in total.items():
            found[link] = max(found.get(link, 0), size)
        return found

    def utilization(self, model_flops: float) -> float:
        """Returns the MFU: the part of all devices' peak at which they run `model_flops` in a
        step."""
        return model_flops / (self.step_s * self.devices * self.peak_flops_per_s)


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums over the events of one stage: its computation, waits, FLOPs, and traffic by what,
    axes and links as (count, bytes, time, exposed time)."""

    compute_s: float
    exposed_s: float
    flops: int
    bytes: int
    traffic: dict[tuple[str, tuple[str, ...], tuple[str, ...]], tuple[int, int, float, float]]


def summed(events: Sequence[Event], inner: dict[Event, Sums]) -> Sums:
    """Returns the sums over `events`, all of one stage; `inner` has those of one run of the inside
    of each loop and region."""
    exposed = waits(events)
    compute_s, exposed_s, flops, size = 0.0, sum(exposed.values()), 0, 0
    traffic: dict[tuple[str, tuple[str, ...], tuple[str, ...]], tuple[int, int, float, float]] = {}

    def add(key: tuple[str, tuple[str, ...], tuple[str, ...]],
            more: tuple[int, int, float, float], times: int = 1) -> None:  # fmt: skip
        old = traffic.get(key, (0, 0, 0.0, 0.0))
        n, b, t, x = (a + times * c for a, c in zip(old, more, strict=True))
        traffic[key] = int(n), int(b), t, x

    for e in events:
        flops += e.flops
        part = inner.get(e)
        if part is not None:
            compute_s += e.time_s - e.times * part.exposed_s
            exposed_s += e.times * part.exposed_s
            for key, row in part.traffic.items():
                add(key, row, e.times)
        elif e.computes:
            compute_s += e.time_s
        else:
            add((e.what, e.axes, e.streams), (1, e.bytes, e.time_s, exposed.get(e, 0.0)))
        size += e.bytes if not e.computes or part is not None else 0
    return Sums(compute_s, exposed_s, flops, size, traffic)


def waits(events: Sequence[Event]) -> dict[Event, float]:
    """Returns the seconds for which nothing computes while each communication runs; of those at the
    same time each gets an equal part."""
    marks: list[tuple[float, int, Event]] = []
    for e in events:
        if e.end_s > e.start_s:
            marks += [(e.start_s, 1, e), (e.end_s, -1, e)]
    marks.sort(key=lambda m: (m[0], m[1]))
    found: dict[Event, float] = {}
    running: dict[Event, None] = {}
    busy, last = 0, 0.0
    for at, change, e in marks:
        if not busy and running and at > last:
            for r in running:
                found[r] = found.get(r, 0.0) + (at - last) / len(running)
        last = at
        if e.computes:
            busy += change
        elif change > 0:
            running[e] = None
        else:
            del running[e]
    return found
