"""Input-output aliases of steps: results that reuse the memory of donated arguments.

>>> from ..graph.build import Builder
>>> from .build import build_schedule
>>> from ...core.layout import plain
>>> from ...core.dtypes import f32
>>> from ...core.options import ScheduleOptions
>>> from dataclasses import replace
>>> b = Builder("step")
>>> w, g = (b.input(plain(f32, (8,)), name) for name in "wg")
>>> s = build_schedule(b.graph([b("sub", w, g)]))
>>> donation_aliases(s), donation_aliases(replace(s, donated=(0,)))
(({},), ({0: 0},))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...core.layout import TensorType
from ...ops.redistribute import NAMES
from ..graph.node import Graph, Node
from .schedule import Compute, Region, Schedule


def donation_aliases(s: Schedule) -> tuple[Mapping[int, int], ...]:
    """For each step, a map from reads to the writes that take their memory, as indices into both.
    Such a read is a donated argument, or was sent from one, has the type of the result, and has no
    later reader. Steps with the same graph have the same aliases.

    Sums over microbatches are excluded: the engine would add them in place only once all terms
    exist, which saves little memory.
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
        if not isinstance(step, Compute | Region):
            mine = set()
        free[step.graph] = free.get(step.graph, mine) & mine
    aliases = {graph: aliases_in(graph, mine) for graph, mine in free.items()}
    return tuple(aliases[step.graph] for step in s.steps)


def aliases_in(
    graph: Graph, donated: Iterable[int], kind: Callable[[TensorType], object] = lambda t: t
) -> Mapping[int, int]:
    """A map from inputs in `donated` to the outputs of the same `kind` that take their memory, as
    indices. An input is paired with the output that is fewest elementwise ops away, a weight with
    the updated weight and a moment with the updated moment; another pairing would cost a copy.
    Remaining inputs and outputs are paired in order."""
    places = {graph.inputs[i]: i for i in sorted(donated)}
    if not places:
        return {}
    pairs: dict[int, int] = {}
    free: dict[object, list[int]] = {}  # outputs by kind, the first one last
    for w in reversed(range(len(graph.outputs))):
        free.setdefault(kind(graph.outputs[w].type), []).append(w)
    near = [
        (far, places[n], w)
        for w, out in enumerate(graph.outputs)
        for n, far in _sources(out).items()
        if n in places
    ]
    for _, i, w in sorted(near):
        left = free.get(kind(graph.inputs[i].type), [])
        if i not in pairs and w in left:
            left.remove(w)
            pairs[i] = w
    for i in sorted({*places.values()} - {*pairs}):
        if rest := free.get(kind(graph.inputs[i].type)):
            pairs[i] = rest.pop()
    return dict(sorted(pairs.items()))


def _sources(out: Node) -> Mapping[Node, int]:
    """The nodes that `out` is computed from elementwise, with the number of ops between."""
    found = {out: 0}
    for n in (todo := [out]):
        in_place = n.kind.elements in ("computed", "same") or n.kind.memory == "view"
        if in_place or n.op in NAMES:
            for a in n.args:
                if a not in found and a.type.shape == out.type.shape:
                    found[a] = found[n] + 1
                    todo.append(a)
    return found


def _shared(s: Schedule) -> Sequence[int]:
    """For each buffer, the first buffer whose memory it may share: a send may leave a value in
    place, and a step may return its input."""
    root = list(range(len(s.buffers)))

    def of(b: int) -> int:
        while root[b] != b:
            b = root[b]
        return b

    for step in s.steps:
        place = {n: k for k, n in enumerate(step.graph.inputs)}
        for b, n in zip(step.writes, step.graph.outputs, strict=True):
            while n.kind.hands_on and n.args:
                several = n.op == "item" and n.args[0].kind.memory == "view"
                n = n.args[0].args[n.attrs["index"]] if several else n.args[0]
            if n in place:
                one, other = sorted((of(step.reads[place[n]]), of(b)))
                root[other] = one
    return [of(b) for b in range(len(s.buffers))]
