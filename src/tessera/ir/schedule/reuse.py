"""Which step may build its results in the memory of what the caller gave up? The last to read it.

>>> from ..graph.build import Builder
>>> from .build import build_schedule
>>> from ...core.layout import plain
>>> from ...core.dtypes import f32
>>> from ...core.options import ScheduleOptions
>>> from dataclasses import replace
>>> b = Builder("step")
>>> w, g = (b.input(plain(f32, (8,)), name) for name in "wg")
>>> s = build_schedule(b.graph([b("sub", w, g)]))
>>> reused(s), reused(replace(s, donated=(0,)))
(({},), ({0: 0},))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ops.redistribute import FORM, NAMES
from ..graph.node import Graph
from .schedule import COMM, SEND, Schedule

# What may give its argument back as it is.
SAME = FORM | NAMES | {"broadcast_to", "graft", "keep", "recast", "stop_gradient"}


def reused(s: Schedule) -> tuple[Mapping[int, int], ...]:
    """Per step, places among its reads to the places among its writes that take their memory: a
    donated argument, or what was sent of it, of the type of the result, whose memory nobody reads
    later. Steps of one graph have the same.

    Sums over microbatches stay out: the engine would add them up in place only after it has all
    terms, which saves little.
    """
    root = _shared(s)
    last: dict[int, int] = {}
    for b, (_, end) in enumerate(s.lifetimes):
        kept = root[b] not in s.donated
        last[root[b]] = max(last.get(root[b], -1), len(s.steps) if kept else end)
    free: dict[Graph, set[int]] = {}
    for i, step in enumerate(s.steps):
        roots = [root[b] for b in step.reads]
        mine = {k for k, r in enumerate(roots) if last[r] == i and roots.count(r) == 1}
        if step.stream in (COMM, SEND):
            mine = set()
        free[step.graph] = free.get(step.graph, mine) & mine
    found: list[Mapping[int, int]] = []
    for step in s.steps:
        left = dict(enumerate(s.buffers[b] for b in step.writes))
        pairs = {}
        for k in sorted(free[step.graph]):
            t = s.buffers[step.reads[k]]
            to = next((w for w, other in left.items() if other == t), None)
            if to is not None:
                del left[to]
                pairs[k] = to
        found.append(pairs)
    return tuple(found)


def _shared(s: Schedule) -> Sequence[int]:
    """Per buffer, the first one whose memory it may have: what is sent to where it is already, and
    what a step hands on."""
    root = list(range(len(s.buffers)))

    def of(b: int) -> int:
        while root[b] != b:
            b = root[b]
        return b

    for step in s.steps:
        place = {n: k for k, n in enumerate(step.graph.inputs)}
        for b, n in zip(step.writes, step.graph.outputs, strict=True):
            while n.op in SAME and n.args:
                n = n.args[0]
            if n in place:
                one, other = sorted((of(step.reads[place[n]]), of(b)))
                root[other] = one
    return [of(b) for b in range(len(s.buffers))]
