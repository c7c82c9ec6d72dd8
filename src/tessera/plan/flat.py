"""The events of a timeline as rows: for a page, and for Perfetto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .timeline import Event, Timeline

MOST_EVENTS = 20_000  # further loops and regions stay one block
COLUMNS = (
    "what", "kind", "stage", "streams", "start_s", "end_s", "axes", "bytes", "flops", "at", "scope",
    "times",
)  # fmt: skip


def flat(events: Iterable[Event], most: int = MOST_EVENTS) -> list[tuple[Event, str]]:
    """Returns `events` with those inside of loops and regions in their place, iteration by
    iteration, each with the names of these, while there are at most `most`; further loops and
    regions stay one event."""
    rows = [*events]
    left = most - len(rows)
    out: list[tuple[Event, str]] = []

    def size(e: Event) -> int:
        return e.times * sum(map(size, e.inside)) if e.inside else 1

    def put(e: Event, at_s: float, stage: int, within: str) -> None:
        nonlocal left
        if not e.inside or size(e) - 1 > left:
            first_s, last_s = at_s + e.start_s, at_s + e.end_s
            moved = replace(e, stage=stage, start_s=first_s, end_s=last_s, inside=())
            out.append((moved, within))
            return
        left -= size(e) - 1
        each_s = e.time_s / e.times
        for i in range(e.times):
            name = f"{e.what} {i + 1} of {e.times}" if e.times > 1 else e.what
            for x in e.inside:
                at = at_s + e.start_s + i * each_s
                put(x, at, stage, f"{within}, {name}" if within else name)

    for e in rows:
        put(e, 0.0, e.stage, "")
    return out


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events in the Chrome trace format: a process for each stage, a thread for each stream."""
    rows = flat(timeline.events)
    streams = [*dict.fromkeys(s for e, _ in rows for s in e.streams)]
    out: list[dict[str, Any]] = []
    for stage in timeline.stages:
        named = [("process_name", 0, f"stage {stage.stage}")]
        named += [("thread_name", i, stream) for i, stream in enumerate(streams)]
        for kind, thread, name in named:
            at = {"ph": "M", "pid": stage.stage, "tid": thread}
            out.append({"name": kind, **at, "args": {"name": name}})
    for e, within in rows:
        for stream in e.streams:
            out.append({
                "name": e.what, "cat": e.kind, "ph": "X", "pid": e.stage,
                "tid": streams.index(stream), "ts": e.start_s * 1e6, "dur": e.time_s * 1e6,
                "args": {"in": within, "scope": e.scope, "line": e.at, "axes": ",".join(e.axes),
                         "bytes": e.bytes, "flops": e.flops, "times": e.times},
            })  # fmt: skip
    return out
