"""How does one microbatch's graph come apart into the stages of a pipeline?

Its forward nodes belong to stages, its backward nodes to the stages of what they are gradients of.
A stage has up to three regions: F, its forward; I, what of its backward the stage before waits for;
W, the rest, the gradients of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ....core.errors import GraphError
from ....core.layout import TensorType
from ....core.mesh import Mesh
from ....core.options import ProgramOptions
from ...graph.again import kept
from ...graph.node import Emit, Graph, Node, copied, input_node, reachable
from ...graph.turns import combining

REGIONS = ("F", "I", "W")


@dataclass(frozen=True, slots=True)
class Region:
    """The nodes of one stage and kind: what it takes from elsewhere and what others take of it;
    `again` are nodes of its forward that it computes again."""

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
    """The stage of every node. What is not marked goes where its arguments come from, or, if they
    come from no stage, where it is read first; a gradient goes where the node is that it is the
    gradient of."""
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
    for n in own:  # what picks one result of several stays with its node
        if n.op == "item":
            stage[n] = stage[n.args[0]]
    return stage


def _together(n: Node, stage: Mapping[Node, int], free: frozenset[Node]) -> int:
    """The first stage that has several values which `n` makes one of, no larger than they are: what
    is added up there is sent once. Of any other node, 0."""
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
    """The regions by (stage, kind), for what `wanted` needs, of which the forward pass gives the
    `results`. `origins` are nodes of gradients with what they were derived from.

    Raises GraphError if the forward pass of a stage needs a later one.
    """
    needed = reachable(wanted)
    forward = reachable(results) | needed - depends(graph.nodes, origins)
    nodes = [n for n in graph.nodes if n in needed and n.op != "input" and n not in free]
    _one_way(nodes, forward, stage)
    # Of the backward pass, what reaches another stage is I, and so is what that needs.
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
        _, again = kept(wants, {*groups.get((s, "F"), ())}, free.union(graph.inputs))
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
    """What a region takes that needs the values `wanted`, and which nodes of `again` it makes of
    that."""
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
    found: Mapping[tuple[int, str], Region], wanted: Sequence[Node]
) -> dict[tuple[int, str], Region]:
    """By (stage, "B"), the two halves of a backward as one region."""
    out: dict[tuple[int, str], Region] = {}
    for s in dict.fromkeys(s for s, kind in found if kind != "F"):
        halves = [found[s, k] for k in "IW" if (s, k) in found]
        mine = {n for r in halves for n in r.nodes}
        others = {a for r in found.values() if r not in halves for a in r.takes} | set(wanted)
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
    """Values that can be handed on. What has several results is picked apart where it is made."""
    return [n for n in nodes if len(n.types) == 1]


def _one_way(nodes: Sequence[Node], forward: set[Node], stage: Mapping[Node, int]) -> None:
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
    """The graph of a region of a program. The nodes `sums` are combined over microbatches, by sum,
    max or min: it takes so many earlier totals of each, and gives its own with these on top, one
    after the other."""
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
    """`graph` with all types on `mesh`, whose axes are those of its own. What has no mesh stays so,
    unless nothing has one: then nothing would say where it runs."""
    nowhere = all(t.mesh is None for n in graph.nodes for t in n.types)

    def on(t: TensorType) -> TensorType:
        return t.on(mesh) if nowhere else moved_type(t, mesh)

    def moved(was: Node, n: Node, emit: Emit) -> Node:
        attrs = {k: on(v) if isinstance(v, TensorType) else v for k, v in n.attrs.items()}
        return emit(replace(n, types=tuple(map(on, n.types)), attrs=attrs))

    return graph.rewrite(moved)


def moved_type(t: TensorType, mesh: Mesh) -> TensorType:
    """`t` on `mesh`; a type without a mesh goes anywhere and stays."""
    return t if t.mesh is None else t.on(mesh)


# -- balance --------------------------------------------------------------------------------------
def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where to cut `costs` into `parts` runs so that the slowest run costs least: the index at
    which each run begins. The first of equal cuts is taken.

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
