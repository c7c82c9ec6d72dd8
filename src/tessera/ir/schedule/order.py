"""Execution order of a graph's nodes: program order, changed by the schedule options.

With `overlap` a collective runs as soon as its operand is computed. A collective whose operand is
an input, or a shared result of another collective (a weight that is gathered, a block that goes
around a ring), would fill memory if it ran early: it runs one block of work before its use.
`prefetch` sets that number of blocks for weights. Sums that can wait for each other form buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from ...core.options import ScheduleOptions
from ...ops.redistribute import all_gather, gathers_for_use
from ..graph.node import Graph, Node
from ..graph.remat import is_form


def ordered(graph: Graph, o: ScheduleOptions) -> list[Node]:
    """The nodes of `graph` without its inputs, in their execution order under `o`."""
    nodes = [n for n in graph.nodes if n.op != "input"]
    gathers = {
        n
        for n in nodes
        if gathers_for_use(n) or (n.op == all_gather.name and _source(n).op == "input")
    }
    if o.overlap:
        late = _late(nodes) - gathers
        nodes = _ahead(_early(nodes, late | gathers), late, 1)
    if o.overlap or o.prefetch is not None:
        nodes = _ahead(nodes, gathers, 1 if o.prefetch is None else o.prefetch)
    return _bucketed(nodes, o.bucket_bytes) if o.bucket_bytes else nodes


def _late(nodes: Sequence[Node]) -> set[Node]:
    """The collectives whose operand is an input, or the result of another collective with several
    readers. Running them early would only hold their results longer."""
    readers: dict[Node, int] = {}
    for n in nodes:
        for a in set(n.args):
            readers[a] = readers.get(a, 0) + 1

    def is_late(n: Node) -> bool:
        source = _source(n)
        return source.op == "input" or (source.is_collective and readers[source] > 1)

    return {n for n in nodes if n.is_collective and is_late(n)}


def _early(nodes: Sequence[Node], late: Collection[Node]) -> list[Node]:
    """`nodes` with each collective right after its operand, except those in `late`."""
    follow: dict[Node, list[Node]] = {}
    moved: set[Node] = set()
    for n in nodes:
        if n.is_collective and n not in late:
            behind = [*reversed(_chain(n)), n]
            follow.setdefault(_source(n), []).extend(behind)
            moved.update(behind)
    out: dict[Node, None] = {}
    for n in nodes:
        todo = [] if n in moved else [n]
        while todo:
            m = todo.pop()
            if m not in out:
                out[m] = None
                todo += reversed(follow.get(m, ()))
    return list(out)


def _ahead(nodes: Sequence[Node], chosen: Collection[Node], distance: int) -> list[Node]:
    """`nodes` with each of the collectives `chosen` moved to `distance` blocks of work before its
    use. A block begins where one of them, or the result that it sends on, is first used."""
    moved = {m for g in chosen for m in (g, *_chain(g))}
    sources = {_source(g) for g in chosen}
    work = [n for n in nodes if n not in moved]
    position = {n: i for i, n in enumerate(work)}
    use: dict[Node, int] = {}
    for i, n in enumerate(work):
        for a in n.args:
            if a in moved or (a in sources and a.is_collective):
                use.setdefault(a, i)
    starts = sorted({i for n, i in use.items() if n in chosen or n in sources})
    put: dict[int, list[Node]] = {}
    for g in sorted((g for g in chosen if g in use), key=lambda g: use[g]):
        block = starts.index(use[g])
        at = starts[block - distance] if block >= distance else 0
        put.setdefault(max(at, position.get(_source(g), -1) + 1), []).append(g)
    out: dict[Node, None] = {}

    def place(g: Node) -> None:
        chain = [g]
        while chain[-1].args[0] in moved and chain[-1].args[0] not in out:
            chain.append(chain[-1].args[0])
        out.update(dict.fromkeys(reversed(chain)))

    for i, n in enumerate(work):
        for g in put.get(i, ()):
            place(g)
        for a in n.args:  # a weight that is used as it is, beside its gather
            if a in moved and a not in out:
                place(a)
        out[n] = None
    for n in nodes:
        if n not in out:
            place(n)
    return list(out)


def _chain(g: Node) -> list[Node]:
    """The nodes between a collective and its source that only change the form, nearest first."""
    found = []
    n = g.args[0]
    while is_form(n):
        found.append(n)
        n = n.args[0]
    return found


def _source(g: Node) -> Node:
    chain = _chain(g)
    return chain[-1].args[0] if chain else g.args[0]


def _bucketed(nodes: Sequence[Node], most: int) -> list[Node]:
    """`nodes` with sums held back until they have `most` bytes or one of them is read."""
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
        local_bytes = n.args[0].type.local_bytes
        if size + local_bytes > most:
            flush()
            size = 0
        held.append(n)
        size += local_bytes
    flush()
    return out
