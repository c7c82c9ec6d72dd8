"""How does a graph become a schedule? Its nodes in order, cut into steps at the collectives.

Without options the order is the graph's. With `overlap` a collective comes as soon as its operand
is there; with `overlap=False` everything waits for it. Sums that may wait for each other form
buckets; gathers of weights move ahead of their use by `prefetch` blocks of work. The body of a loop
that has collectives becomes a schedule of its own, by the same options.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ...core.options import ScheduleOptions
from ...ops.redistribute import all_gather
from ..graph.again import is_free
from ..graph.node import Graph, Node, input_node
from .schedule import Collective, Compute, Loop, Region, Schedule, Step


def build_schedule(graph: Graph) -> Schedule:
    """The schedule of `graph` under its options."""
    o = graph.options.schedule
    steps = _cut(_order(graph, o), graph, o)
    made = {n: k for k, group in enumerate(steps) for n in group}
    leaving: list[dict[Node, None]] = [{} for _ in steps]
    for k, group in enumerate(steps):
        for a in (a for n in group for a in n.args):
            if a in made and made[a] != k:
                leaving[made[a]][a] = None
    for out in graph.outputs:
        if out in made:
            leaving[made[out]][out] = None
    buffer = {n: i for i, n in enumerate(graph.inputs)}
    types = [n.type for n in graph.inputs]
    built: list[Step] = []
    for k, group in enumerate(steps):
        for n in leaving[k]:
            buffer[n] = len(types)
            types.append(n.type)
        after = _after(built, group, o)
        built.append(_step(graph, group, list(leaving[k]), buffer, after))
    return Schedule(
        graph.name,
        graph.mesh,
        tuple(types),
        tuple(range(len(graph.inputs))),
        tuple(buffer[n] for n in graph.outputs),
        tuple(built),
        graph.options,
    )


def with_regions(s: Schedule) -> Schedule:
    """`s`, in which each compute step whose graph has collectives is a region, with its own steps.
    Steps of one graph have one body."""
    bodies: dict[Graph, Schedule] = {}

    def step(x: Step) -> Step:
        if not isinstance(x, Compute) or not any(True for _ in x.graph.collectives()):
            return x
        if x.graph not in bodies:
            bodies[x.graph] = build_schedule(x.graph)
        body = bodies[x.graph]
        return Region(x.reads, x.writes, body, stage=x.stage, after=x.after, note=x.note)

    return replace(s, steps=tuple(map(step, s.steps)))


def is_loop(n: Node) -> bool:
    """Whether `n` is a loop with collectives in its body."""
    return n.op == "scan" and any(True for _ in n.attrs["body"].collectives())


# -- the steps ------------------------------------------------------------------------------------
def _cut(nodes: Sequence[Node], graph: Graph, o: ScheduleOptions) -> list[list[Node]]:
    """The nodes of each step. What picks one result of several stays with its node."""
    groups: list[list[Node]] = []
    last: object = None
    made: dict[Node, int] = {}
    for n in _needed(nodes, set(graph.outputs)):
        if n.op == "item":
            made[n] = made[n.args[0]]
            groups[made[n]].append(n)
            continue
        kind = _kind(n, o)
        joins = bool(groups) and last == kind and kind is not None
        if joins and n.is_collective:
            joins = _fits(groups[-1], n, o)
        if not joins:
            groups.append([])
        groups[-1].append(n)
        made[n], last = len(groups) - 1, kind
    return groups


def _needed(nodes: Iterable[Node], given: set[Node]) -> Iterator[Node]:
    """`nodes` without those made of nothing, but for what is given back and, right before it, what
    a loop or a collective reads: these take buffers."""
    done: set[Node] = set()
    for n in nodes:
        if n.is_collective or is_loop(n):
            for a in n.args:
                if is_free(a) and a not in done:
                    done.add(a)
                    yield a
        if n not in done and (n in given or not is_free(n)):
            yield n


def _kind(n: Node, o: ScheduleOptions) -> object:
    """What neighbours must share to be one step; None for what is always a step of its own."""
    if n.is_collective:
        t = n.args[0].type
        kind = dict(t.partial).get(n.attrs["axes"][0])
        return (n.op, n.attrs["axes"], t.dtype, kind, n.attrs.get("order"))
    if is_loop(n):
        return None
    return () if o.scope_depth is None else tuple(n.scope.split("/")[: o.scope_depth])


def _fits(bucket: Sequence[Node], n: Node, o: ScheduleOptions) -> bool:
    """Whether `n` goes with the collectives in `bucket`: it needs none of them, and there is
    room."""
    held = sum(m.args[0].type.local_bytes for m in bucket)
    room = held + n.args[0].type.local_bytes <= (o.bucket_bytes or 0)
    return room and not any(a in bucket for a in n.args)


def _step(
    whole: Graph,
    group: Sequence[Node],
    out: Sequence[Node],
    buffer: dict[Node, int],
    after: tuple[int, ...],
) -> Step:
    """The step that runs the nodes `group`: what they read becomes inputs of a graph of its own,
    and `out` fills the buffers that `buffer` names. Free nodes are copied into each step that reads
    them."""
    writes = tuple(buffer[n] for n in out)
    first = group[0]
    if is_loop(first):
        at, given = first.attrs, tuple(buffer[n] for n in first.args)
        return Loop(
            given, writes, build_schedule(at["body"]), at["length"], at["consts"], at["carries"],
            at["reverse"], tuple(n.attrs["index"] for n in out), first.loc, first.scope,
            after=after,
        )  # fmt: skip
    new: dict[Node, Node] = {}
    made = set(group)
    inputs: list[Node] = []
    nodes: list[Node] = []
    reads: list[int] = []
    for n in group:
        for a in n.args:
            if a in new:
                continue
            if a in buffer and a not in made:  # what is free may be made below its reader
                new[a] = input_node(a.type, f"b{buffer[a]}")
                inputs.append(new[a])
                reads.append(buffer[a])
            else:
                assert is_free(a), a.op
                new[a] = a
                nodes.append(a)
        if n not in new:
            new[n] = n.with_args(tuple([new[a] for a in n.args]))
            nodes.append(new[n])
    ends = tuple(inputs), tuple(new[n] for n in out)
    graph = Graph(whole.name, (*inputs, *nodes), *ends, whole.options)
    kind = Collective if first.is_collective else Compute
    return kind(tuple(reads), writes, graph, after=after)


def _after(steps: Sequence[Step], group: Sequence[Node], o: ScheduleOptions) -> tuple[int, ...]:
    """What a step that comes after `steps` must wait for by the options, besides its buffers."""
    if o.overlap is None or not steps:
        return ()
    if not o.overlap:
        return (len(steps) - 1,)
    # One stream of collectives, in this order; compute goes on beside it.
    if group[0].is_collective:
        return tuple(i for i, s in enumerate(steps) if isinstance(s, Collective))[-1:]
    return ()


# -- the order ------------------------------------------------------------------------------------
def _order(graph: Graph, o: ScheduleOptions) -> list[Node]:
    nodes = [n for n in graph.nodes if n.op != "input"]
    if o.overlap:
        nodes = _early(nodes)
    if o.prefetch is not None:
        nodes = _ahead(nodes, o.prefetch)
    return _bucketed(nodes, o.bucket_bytes) if o.bucket_bytes else nodes


def _early(nodes: Sequence[Node]) -> list[Node]:
    """Each collective right behind its operand."""
    here = set(nodes)
    follow: dict[Node | None, list[Node]] = {}
    for n in nodes:
        if n.is_collective:
            follow.setdefault(n.args[0] if n.args[0] in here else None, []).append(n)
    out: list[Node] = []

    def put(n: Node) -> None:
        out.append(n)
        for m in follow.get(n, ()):
            put(m)

    for m in follow.get(None, ()):
        put(m)
    for n in nodes:
        if not n.is_collective:
            put(n)
    return out


def _ahead(nodes: Sequence[Node], distance: int) -> list[Node]:
    """The gathers of weights, each `distance` blocks of work before its use. A block begins where
    a gathered weight is first used."""
    gathers = {n for n in nodes if n.op == all_gather.name and _source(n).op == "input"}
    moved = gathers | {m for g in gathers for m in _chain(g)}
    work = [n for n in nodes if n not in moved]
    use: dict[Node, int] = {}
    for i, n in enumerate(work):
        for a in n.args:
            if a in moved:
                use.setdefault(a, i)
    starts = sorted({use[g] for g in gathers if g in use})
    put: dict[int, list[Node]] = {}
    for g in sorted((g for g in gathers if g in use), key=lambda g: use[g]):
        block = starts.index(use[g])
        put.setdefault(starts[block - distance] if block >= distance else 0, []).append(g)
    out: list[Node] = []
    done: set[Node] = set()

    def place(g: Node) -> None:
        for m in (*reversed(_chain(g)), g):
            if m not in done:
                done.add(m)
                out.append(m)

    for i, n in enumerate(work):
        for g in put.get(i, ()):
            place(g)
        for a in n.args:  # a weight that is used as it is, beside its gather
            if a in moved and a not in done:
                place(a)
        out.append(n)
    for n in nodes:
        if n in moved and n not in done:
            place(n)
    return out


def _chain(g: Node) -> list[Node]:
    """The silent nodes between a gather and what it gathers, nearest first."""
    found = []
    n = g.args[0] if g.op == all_gather.name else g
    while _is_silent(n):
        found.append(n)
        n = n.args[0]
    return [n for n in found if n is not g]


def _is_silent(n: Node) -> bool:
    """Whether `n` only shows its one argument in another form: as a view, or in another dtype."""
    kind = n.kind
    casts = kind.memory == "moves" and kind.elements == "computed"
    return len(n.args) == 1 and n.op != "item" and (kind.memory == "view" or casts)


def _source(g: Node) -> Node:
    chain = _chain(g)
    return chain[-1].args[0] if chain else g.args[0]


def _bucketed(nodes: Sequence[Node], most: int) -> list[Node]:
    """Sums held back until `most` bytes are together or one of them is needed."""
    out: list[Node] = []
    held: list[Node] = []

    def alike(n: Node) -> tuple[Any, ...]:
        return n.op, n.attrs["axes"], n.attrs.get("order", "")

    def flush() -> None:
        for _, same in groupby(sorted(held, key=alike), key=alike):
            out.extend(same)
        held.clear()

    size = 0
    for n in nodes:
        if any(a in held for a in n.args):
            flush()
            size = 0
        if not n.is_collective or n.kind.mesh_invariance != "sums":
            out.append(n)
            continue
        here = n.args[0].type.local_bytes
        if size + here > most:
            flush()
            size = 0
        held.append(n)
        size += here
    flush()
    return out
