"""Schedules of graphs: the nodes in order, cut into steps at the collectives.

Without options, neighbouring compute nodes are one step, and a step waits only for what it reads.
With `overlap`, the nodes of a compute step depend on the same collectives and are needed by the
same collectives, so no collective waits for unrelated work. With `overlap=False`, each step waits
for the one before it. The body of a loop with collectives is a schedule of its own, by the same
options. The order of the nodes is that of order.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...core.options import ScheduleOptions
from ..graph.node import Graph, Node, input_node, scope_prefixes
from ..graph.remat import is_free
from ..graph.write_out import written_out
from .order import ordered
from .schedule import Collective, Compute, Loop, Region, Schedule, Step


def build_schedule(graph: Graph) -> Schedule:
    """The schedule of `graph` under its options."""
    o = graph.options.schedule
    steps = _cut(ordered(graph, o), graph, o)
    step_of = {n: k for k, group in enumerate(steps) for n in group}
    leaving: list[dict[Node, None]] = [{} for _ in steps]
    for k, group in enumerate(steps):
        for a in (a for n in group for a in n.args):
            if a in step_of and step_of[a] != k:
                leaving[step_of[a]][a] = None
    for out in graph.outputs:
        if out in step_of:
            leaving[step_of[out]][out] = None
    buffer = {n: i for i, n in enumerate(graph.inputs)}
    types = [n.type for n in graph.inputs]
    built: list[Step] = []
    ahead = _one_ahead(steps)
    for k, group in enumerate(steps):
        for n in leaving[k]:
            buffer[n] = len(types)
            types.append(n.type)
        after = (k - 1,) if o.overlap is False and k else ahead.get(k, ())
        built.append(_step(graph, group, list(leaving[k]), buffer, after))
    if o.overlap:
        built = _in_streams(built)
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
    """`s` with a region in place of each compute step whose graph has collectives. Steps with the
    same graph share one body."""
    bodies: dict[Graph, Schedule] = {}

    def step(x: Step) -> Step:
        if not isinstance(x, Compute) or not any(True for _ in x.graph.collectives()):
            return x
        if x.graph not in bodies:
            bodies[x.graph] = build_schedule(written_out(x.graph))
        body = bodies[x.graph]
        return Region(x.reads, x.writes, body, stage=x.stage, after=x.after, note=x.note)

    return replace(s, steps=tuple(map(step, s.steps)))


def is_loop(n: Node) -> bool:
    """Returns whether `n` is a loop with collectives in its body."""
    return n.op == "scan" and any(True for _ in n.attrs["body"].collectives())


# -- the steps ------------------------------------------------------------------------------------
def _cut(nodes: Sequence[Node], graph: Graph, o: ScheduleOptions) -> list[list[Node]]:
    """The nodes of each step. An `item` node is in the step of its argument."""
    nodes = list(_needed(nodes, set(graph.outputs)))
    sides = _sides(nodes) if o.overlap else {}
    groups: list[list[Node]] = []
    last: dict[object, int] = {}  # by kind, its last step since a collective or a loop
    step_of: dict[Node, int] = {}
    for n in nodes:
        if n.op == "item":
            step_of[n] = step_of[n.args[0]]
            groups[step_of[n]].append(n)
            continue
        kind = (_kind(n, o), sides.get(n))
        at = last.get(kind, -1)
        joins = 0 <= at == len(groups) - 1 and not is_loop(n)
        if n.is_collective:
            joins = joins and _fits(groups[at], n, o)
        elif sides and at >= 0 and not is_loop(n):  # within one run of computing, neighbours or not
            joins = all(step_of.get(a, -1) <= at for a in n.args)
        if not joins:
            groups.append([])
            at = len(groups) - 1
        groups[at].append(n)
        step_of[n] = at
        if n.is_collective or is_loop(n):
            last.clear()
        if not is_loop(n):
            last[kind] = at
    return groups


def _one_ahead(steps: Sequence[Sequence[Node]]) -> dict[int, tuple[int, ...]]:
    """For each step that gathers a value again, the step that it waits for: the last compute before
    the previous such step. So a value is gathered while the one before it is used, and not all at
    once."""
    first = {(n.op, n.args) for s in steps for n in s if not n.attrs.get("again")}
    found: dict[int, tuple[int, ...]] = {}
    work = before = -1
    for k, s in enumerate(steps):
        if s[0].attrs.get("again") and any((n.op, n.args) in first for n in s):
            late = work if before < 0 else before
            if late >= 0:
                found[k] = (late,)
            before = work
        elif not s[0].is_collective:
            work = k
    return found


def _sides(nodes: Sequence[Node]) -> dict[Node, tuple[int, int]]:
    """For each compute node two bit masks of collectives and loops: its dependencies, and its
    dependents. If the nodes of a step agree on both, no step waits for work that its nodes
    do not need."""
    before, behind = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    own: dict[Node, int] = {}
    for n in nodes:
        for a in n.args:
            before[n] |= before.get(a, 0) | own.get(a, 0)
        if n.is_collective or is_loop(n):
            own[n] = 1 << len(own)
    for n in reversed(nodes):
        for a in n.args:
            if a in behind:
                behind[a] |= behind[n] | own.get(n, 0)
    return {n: (before[n], behind[n]) for n in nodes if n not in own}


def _needed(nodes: Iterable[Node], outputs: set[Node]) -> Iterator[Node]:
    """`nodes` without the free ones that no step needs as buffers. A free node stays if it is an
    output, or if a loop or collective reads it: then it comes right before its reader."""
    done: set[Node] = set()
    for n in nodes:
        if n.is_collective or is_loop(n):
            for a in n.args:
                if is_free(a) and a not in done:
                    done.add(a)
                    yield a
        if n not in done and (n in outputs or not is_free(n)):
            yield n


def _kind(n: Node, o: ScheduleOptions) -> object:
    """The key that nodes of one step share. A kernel is a step by itself."""
    if "kernel" in n.attrs:
        return n
    if n.is_collective:
        t = n.args[0].type
        kind = dict(t.partial).get(n.attrs["axes"][0])
        again = n.attrs.get("again")
        return (n.op, n.attrs["axes"], t.dtype, kind, n.attrs.get("order"), again)
    return () if o.scope_depth is None else tuple(scope_prefixes(n.scope)[: o.scope_depth])


def _fits(bucket: Sequence[Node], n: Node, o: ScheduleOptions) -> bool:
    """Returns whether `n` may join the collectives in `bucket`: it reads none of them, and there is
    room in `bucket_bytes`."""
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
    """The step that runs the nodes `group`. Values that they read from outside become inputs of the
    step's graph; `out` fills the buffers that `buffer` gives. Free nodes are copied into each step
    that reads them."""
    writes = tuple(buffer[n] for n in out)
    first = group[0]
    if is_loop(first):
        at, args = first.attrs, tuple(buffer[n] for n in first.args)
        return Loop(
            args, writes, build_schedule(at["body"]), at["length"], at["consts"], at["carries"],
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
            if a in buffer and a not in made:  # a free node may come after its reader
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


def _in_streams(steps: Sequence[Step]) -> list[Step]:
    """`steps` with each collective ordered after the previous one of its op and axes, where that
    delays no compute. Otherwise the engine would combine such sums into one, at the end. Sums are
    also ordered if no compute step reads both, as long as the work that the earlier needs comes no
    later than that of the later."""
    writer = {b: i for i, s in enumerate(steps) for b in s.writes}
    reads = [{writer[b] for b in s.reads if b in writer} for s in steps]
    work = [0 if isinstance(s, Collective) else 1 << i for i, s in enumerate(steps)]
    needed = [0] * len(steps)  # bits: the work that needs each step
    for i in reversed(range(len(steps))):
        for j in reads[i]:
            needed[j] |= needed[i] | work[i]
    needs = [0] * len(steps)
    last: dict[object, int] = {}
    out = list(steps)
    for i, s in enumerate(steps):
        for j in reads[i]:
            needs[i] |= needs[j] | work[j]
        if not isinstance(s, Collective):
            continue
        j = last.get((s.op, s.axes), -1)
        last[s.op, s.axes] = i
        if j < 0:
            continue
        if s.nodes[0].kind.mesh_invariance == "sums":
            free = needs[j].bit_length() <= needs[i].bit_length()
        else:
            free = not needs[j] & ~needs[i] and not needed[i] & ~needed[j]
        if free:
            out[i] = replace(s, after=tuple(sorted({*s.after, j})))
            needs[i] |= needs[j]
    return out
