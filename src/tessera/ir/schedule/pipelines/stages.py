"""Stages of one microbatch's graph: the stage of each node, and the regions of a stage.

Forward nodes belong to stages; a backward node belongs to the stage of the node that it is a
gradient of. A stage has up to three regions: F, its forward; I, the part of its backward that the
stage before waits for; W, the rest, the gradients of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ....core.errors import GraphError
from ....core.layout import TensorType
from ....core.mesh import Mesh
from ....core.options import ProgramOptions
from ...graph.node import Emit, Graph, Node, copied, input_node, reachable
from ...graph.remat import choose_saved
from ...graph.time_axis import combining

REGIONS = ("F", "I", "W")


@dataclass(frozen=True, slots=True)
class Region:
    """The nodes of one stage and kind, their operands from other regions, and their results that
    other regions read. `again` are nodes of the stage's forward that the region recomputes."""

    stage: int
    kind: str
    nodes: tuple[Node, ...]
    takes: tuple[Node, ...]
    gives: tuple[Node, ...]
    again: frozenset[Node] = frozenset()


def depends(nodes: Sequence[Node], sources: Iterable[Node]) -> set[Node]:
    """`sources` and every one of `nodes` that is computed from them."""
    found = set(sources)
    for n in nodes:
        if any(a in found for a in n.args):
            found.add(n)
    return found


def stage_numbers(
    nodes: Sequence[Node],
    marked: Mapping[Node, int],
    origins: Mapping[Node, Node],
    last: int,
    free: frozenset[Node],
) -> dict[Node, int]:
    """The stage of every node. An unmarked node goes to the last stage among its arguments or, if
    they have none, to the first stage that reads it. A gradient goes to the stage of its origin."""
    stage: dict[Node, int] = {}
    backward = depends(nodes, origins)
    own = [n for n in nodes if n.op != "input" and n not in free]
    forward = [n for n in own if n not in backward]
    loose: dict[Node, list[int]] = {}  # in no stage yet: the stages that read it
    for n in forward:
        before = [stage[a] for a in n.args if a in stage]
        if n in marked:
            stage[n] = marked[n]
        elif before:
            stage[n] = min(max(before), last)
        else:
            loose[n] = []
    for n in reversed(forward):
        if n in loose:
            stage[n] = min(loose[n], default=0)
            if not loose[n]:
                continue  # no stage reads it
        for a in n.args:
            if a in loose:
                loose[a].append(stage[n])
    for n in own:
        if n in stage:
            continue
        source = origins.get(n)
        if n.op != "item" and source is not None and source in stage:
            stage[n] = max(stage[source], _together(n, stage, free))
        else:
            stage[n] = min(max((stage[a] for a in n.args if a in stage), default=0), last)
    for n in own:  # an `item` stays with its argument
        if n.op == "item":
            stage[n] = stage[n.args[0]]
    return stage


def _together(n: Node, stage: Mapping[Node, int], free: frozenset[Node]) -> int:
    """The first stage of the arguments of `n`, if `n` combines several of them into at most half
    their bytes: then one value is sent in place of several. Otherwise 0."""
    args = [a for a in n.args if a not in free]
    if len(args) < 2 or not all(a in stage for a in args):
        return 0
    small = sum(t.nbytes for t in n.types) <= sum(a.type.nbytes for a in args) / 2
    return min(stage[a] for a in args) if small else 0


def regions(
    graph: Graph,
    wanted: Sequence[Node],
    results: Sequence[Node],
    stage: Mapping[Node, int],
    free: frozenset[Node],
    origins: Mapping[Node, Node],
) -> dict[tuple[int, str], Region]:
    """The regions by (stage, kind) that compute `wanted`; `results` are those of the forward pass.
    `origins` maps nodes of gradients to the nodes that they were derived from.

    Raises GraphError if the forward pass of a stage needs a later one.
    """
    needed = reachable(wanted)
    forward = reachable(results) | needed - depends(graph.nodes, origins)
    nodes = [n for n in graph.nodes if n in needed and n.op != "input" and n not in free]
    _check_stage_order(nodes, forward, stage)
    # A backward node that another stage reads is in I, and so are the nodes that it depends on.
    crossing = [
        a for n in nodes for a in n.args
        if n not in forward and a not in forward and a in stage and stage[a] != stage[n]
    ]  # fmt: skip
    early = reachable(crossing) - forward
    early |= {n.args[0] for n in early if n.op == "item"}
    kind = {n: "F" if n in forward else "I" if n in early else "W" for n in nodes}
    kind.update((n, kind[n.args[0]]) for n in nodes if n.op == "item")
    home = {n: (stage[n], kind[n]) for n in nodes}
    groups: dict[tuple[int, str], list[Node]] = {}
    for n in nodes:
        groups.setdefault(home[n], []).append(n)
    takes: dict[tuple[int, str], dict[Node, None]] = {
        k: {a: None for n in group for a in n.args if a not in free and home.get(a) != k}
        for k, group in groups.items()
    }
    made: dict[tuple[int, str], frozenset[Node]] = {}
    for s in {s for s, _ in groups}:
        behind = [k for k in ((s, "I"), (s, "W")) if k in groups]
        wants = [a for k in behind for a in takes[k]]
        _, again = choose_saved(wants, {*groups.get((s, "F"), ())}, free.union(graph.inputs))
        for k in behind:
            takes[k], made[k] = _through(takes[k], again, free)
    gives: dict[tuple[int, str], dict[Node, None]] = {k: {} for k in groups}
    for a in [*(a for own in takes.values() for a in own), *wanted]:
        if a in home:
            gives[home[a]][a] = None
    return {
        k: Region(
            *k, tuple(group), tuple(takes[k]), tuple(_single(gives[k])), made.get(k, frozenset())
        )
        for k, group in groups.items()
    }


def _through(
    wanted: Iterable[Node], again: frozenset[Node], free: frozenset[Node]
) -> tuple[dict[Node, None], frozenset[Node]]:
    """(values that a region takes to have `wanted`, nodes of `again` that it recomputes)."""
    takes: dict[Node, None] = {}
    made: set[Node] = set()
    todo = [*wanted][::-1]
    while todo:
        n = todo.pop()
        if n not in again:
            takes[n] = None
        elif n not in made:
            made.add(n)
            todo += [a for a in n.args if a not in free]
    return takes, frozenset(made)


def whole_backward(
    regions: Mapping[tuple[int, str], Region], wanted: Sequence[Node]
) -> dict[tuple[int, str], Region]:
    """The regions by (stage, "B"): I and W of each backward as one region."""
    out: dict[tuple[int, str], Region] = {}
    for s in dict.fromkeys(s for s, kind in regions if kind != "F"):
        halves = [regions[s, k] for k in "IW" if (s, k) in regions]
        mine = {n for r in halves for n in r.nodes}
        others = {a for r in regions.values() if r not in halves for a in r.takes} | set(wanted)
        out[s, "B"] = Region(
            s,
            "B",
            tuple(n for r in halves for n in r.nodes),
            tuple(dict.fromkeys(a for r in halves for a in r.takes if a not in mine)),
            tuple(n for r in halves for n in r.gives if n in others),
            frozenset().union(*(r.again for r in halves)),
        )
    return out


def _single(nodes: Iterable[Node]) -> list[Node]:
    """The nodes with one result, which can be passed between regions. A node with several has its
    `item` nodes in its own region."""
    return [n for n in nodes if len(n.types) == 1]


def _check_stage_order(
    nodes: Sequence[Node], forward: set[Node], stage: Mapping[Node, int]
) -> None:
    for n in nodes:
        for a in n.args:
            if n in forward and a in stage and a in forward and stage[a] > stage[n]:
                raise GraphError(
                    f"pipeline: stage {stage[n]} needs a value of stage {stage[a]}, which comes"
                    " later",
                    value=a.type,
                    made_at=a.loc,
                    fix="order the stages so that values only go forward",
                    at=n.loc,
                )


# -- on the mesh of a stage -----------------------------------------------------------------------
def region_graph(
    name: str,
    region: Region,
    sums: Mapping[Node, tuple[int, str]],
    free: frozenset[Node],
    options: ProgramOptions,
) -> Graph:
    """The graph of a region. Each node in `sums` is combined over microbatches, by sum, max or min:
    the graph takes the given number of its earlier totals, and returns a new total."""
    new = {a: input_node(a.type, f"v{i}") for i, a in enumerate(region.takes)}
    inputs = list(new.values())
    nodes = copied(region.nodes, new, among=free | region.again)
    outs = [new[n] for n in region.gives]
    for s, (earlier, kind) in sums.items():
        total = new[s]
        for _ in range(earlier):
            before = input_node(s.type, f"sum{len(inputs)}")
            inputs.append(before)
            op = combining(kind, s.type.dtype)
            total = Node(op.name, (before, total), s.types, {}, s.loc, s.scope)
            nodes.append(total)
        outs.append(total)
    return Graph(name, (*inputs, *nodes), tuple(inputs), tuple(outs), options)


def on_mesh(graph: Graph, mesh: Mesh) -> Graph:
    """`graph` with all types on `mesh`, which has the axes of its own mesh. A type without a mesh
    keeps none, unless no type has one: then all get `mesh`, on which the graph runs."""
    nowhere = all(t.mesh is None for n in graph.nodes for t in n.types)

    def on(t: TensorType) -> TensorType:
        return t.on(mesh) if nowhere else moved_type(t, mesh)

    def moved(was: Node, n: Node, emit: Emit) -> Node:
        attrs = {k: on(v) if isinstance(v, TensorType) else v for k, v in n.attrs.items()}
        return emit(replace(n, types=tuple(map(on, n.types)), attrs=attrs))

    return graph.rewrite(moved)


def moved_type(t: TensorType, mesh: Mesh) -> TensorType:
    """`t` on `mesh`; a type without a mesh is returned as it is."""
    return t if t.mesh is None else t.on(mesh)


# -- balance --------------------------------------------------------------------------------------
def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The first index of each of `parts` runs of `costs`, cut so that the largest cost of a run is
    smallest. Of equal cuts the first is taken.

    >>> balanced([4, 1, 1, 1, 1, 4], 3)
    [0, 1, 5]
    """
    n = len(costs)
    total = [0.0]
    for c in costs:
        total.append(total[-1] + c)
    best = [[0.0] * (n + 1) for _ in range(parts + 1)]
    cut = [[0] * (n + 1) for _ in range(parts + 1)]
    for i in range(1, n + 1):
        best[1][i] = total[i]
    for k in range(2, parts + 1):
        for i in range(k, n + 1):
            options = ((max(best[k - 1][j], total[i] - total[j]), j) for j in range(k - 1, i))
            best[k][i], cut[k][i] = min(options)
    starts, i = [], n
    for k in range(parts, 0, -1):
        i = cut[k][i] if k > 1 else 0
        starts.append(i)
    return starts[::-1]
