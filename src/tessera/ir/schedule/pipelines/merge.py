"""Fusion of neighbouring steps of one rank into one program, where no other rank waits for the
first.

Each step costs a launch, so fewer steps are faster. The forward and the backward of the last stage
become one step, since no value between them is sent. Two steps stay apart if the first would wait
longer as part of one step, or if there would be more programs to compile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....core.mesh import Mesh
from ...graph.node import Graph, Node, copied, input_node
from ..schedule import Compute, Schedule, Send, Step

# Two graphs; for each argument of the second, its index among the results and among the arguments
# of the first (-1: none); and for each result of the first, whether others read it too.
Kind = tuple[Graph, Graph, tuple[tuple[int, int], ...], tuple[bool, ...]]


def merged(s: Schedule) -> Schedule:
    """`s` with neighbouring steps fused where that delays no step."""
    while kinds := _kinds(s):
        s = _merge(s, kinds)
    return s


def _kinds(s: Schedule) -> dict[tuple[int, int], Kind]:
    """The pairs of steps to merge; each step is in at most one pair."""
    steps, homes = s.steps, [_home(s, step) for step in s.steps]
    writer = {b: i for i, step in enumerate(steps) for b in step.writes}
    readers: dict[int, set[int]] = defaultdict(set)
    for i, step in enumerate(steps):
        for b in step.reads:
            readers[b].add(i)

    def ready(b: int, i: int) -> bool:
        """Returns whether `b` is available when step `i` may begin, however late other ranks
        are."""
        if b in steps[i].reads or b not in writer:
            return True
        by = steps[writer[b]]
        given = isinstance(by, Send) and not any(a in writer for a in by.reads)
        return writer[b] < i and (given or homes[writer[b]] == homes[i])

    pairs: dict[Kind, list[tuple[int, int]]] = defaultdict(list)
    last: dict[Mesh | None, int] = {}
    for j, step in enumerate(steps):
        mesh = homes[j]
        i, last[mesh] = last.get(mesh, -1), j
        if mesh is None or i < 0:
            continue
        first = steps[i]
        shared = {b for b in step.reads if b in first.writes}
        alone = all(homes[k] == mesh for b in first.writes for k in readers[b])
        if shared and alone and all(b in shared or ready(b, i) for b in step.reads):
            wires = tuple((_place(first.writes, b), _place(first.reads, b)) for b in step.reads)
            kept = tuple(b in s.outputs or bool(readers[b] - {j}) for b in first.writes)
            pairs[first.graph, step.graph, wires, kept].append((i, j))
    _whole(pairs, Counter(step.graph for step in steps))
    if len(pairs) > len({g for kind in pairs for g in kind[:2]}):
        return {}  # more programs to compile than before
    kind_of: dict[tuple[int, int], Kind] = {}
    used: set[int] = set()
    for kind, mine in pairs.items():
        ends = [k for pair in mine for k in pair]
        if used.isdisjoint(ends) and len({*ends}) == len(ends):  # of one graph, a chain's overlap
            used.update(ends)
            kind_of.update(dict.fromkeys(mine, kind))
    return kind_of


def _whole(pairs: dict[Kind, list[tuple[int, int]]], times: Mapping[Graph, int]) -> None:
    """Removes the kinds that leave some steps unmerged, as both programs would still be needed."""
    while True:
        firsts, seconds = Counter[Graph](), Counter[Graph]()
        for (first, second, *_), mine in pairs.items():
            firsts[first] += len(mine)
            seconds[second] += len(mine)
        poor = [k for k in pairs if (firsts[k[0]], seconds[k[1]]) != (times[k[0]], times[k[1]])]
        if not poor:
            return
        for kind in poor:
            del pairs[kind]


def _home(s: Schedule, step: Step) -> Mesh | None:
    """The mesh slice that `step` computes on; None if it is no compute step of a slice."""
    mesh = step.graph.mesh
    return mesh if isinstance(step, Compute) and mesh != s.mesh else None


def _place(ids: Sequence[int], b: int) -> int:
    return ids.index(b) if b in ids else -1


def _merge(s: Schedule, kinds: Mapping[tuple[int, int], Kind]) -> Schedule:
    """`s` with each pair in `kinds` as one step, at the place of the first. Pairs of one kind share
    a graph, so that it is compiled once."""
    graphs: dict[Kind, Graph] = {}
    gone = {j for _, j in kinds}
    steps = list(s.steps)
    for (i, j), kind in kinds.items():
        first, second = s.steps[i], s.steps[j]
        if kind not in graphs:
            graphs[kind] = _one(first, second, kind[3])
        given = {*first.writes, *first.reads}
        steps[i] = Compute(
            (*first.reads, *dict.fromkeys(b for b in second.reads if b not in given)),
            (*(b for b, keep in zip(first.writes, kind[3], strict=True) if keep), *second.writes),
            graphs[kind],
            stage=first.stage,
            note=" ".join(dict.fromkeys((first.note, second.note))),
        )
    return _numbered(replace(s, steps=tuple(x for i, x in enumerate(steps) if i not in gone)))


def _one(first: Step, second: Step, result_needed: Sequence[bool]) -> Graph:
    """The graph that computes `first` and then `second`; it returns those results of the first that
    `result_needed` marks, and all of the second."""
    here = dict(zip(first.reads, first.graph.inputs)) | dict(zip(first.writes, first.graph.outputs))
    inputs, nodes = list(first.graph.inputs), first.nodes
    new: dict[Node, Node] = {}  # the second may have nodes of the first, as of one graph
    for b, x in zip(second.reads, second.graph.inputs, strict=True):
        if b not in here:
            here[b] = input_node(x.type, f"w{len(inputs)}")
            inputs.append(here[b])
        new[x] = here[b]
    nodes += copied(second.nodes, new)
    outs = [o for o, keep in zip(first.graph.outputs, result_needed, strict=True) if keep]
    outs += [new[o] for o in second.graph.outputs]
    name = f"{first.graph.name}_{second.graph.name.rpartition('_')[2]}"
    return Graph(name, (*inputs, *nodes), tuple(inputs), tuple(outs), first.graph.options)


def _numbered(s: Schedule) -> Schedule:
    """`s` renumbered without the buffers that no step fills."""
    there = [*s.inputs, *(b for step in s.steps for b in step.writes)]
    new = {b: k for k, b in enumerate(sorted(there))}

    def of(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(new[b] for b in ids)

    steps = tuple(replace(x, reads=of(x.reads), writes=of(x.writes)) for x in s.steps)
    types = tuple(s.buffers[b] for b in new)
    return replace(s, buffers=types, inputs=of(s.inputs), outputs=of(s.outputs), steps=steps)
