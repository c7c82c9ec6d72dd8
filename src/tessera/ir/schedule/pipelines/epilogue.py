"""Placement of the nodes after the microbatches (the optimizer) on ranks.

A node goes to the rank of its largest argument; neighbours on one rank are one step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from ...graph.node import Graph, Node, reachable


def late_nodes(graph: Graph, scheduled: Container[Node]) -> list[Node]:
    """The nodes of `graph` that run once, after the nodes in `scheduled`, in order."""
    needed = reachable(graph.outputs, scheduled)
    return [n for n in graph.nodes if n in needed and n.op != "input"]


def settle(
    nodes: Sequence[Node],
    free: Container[Node],
    filled: Mapping[Node, int],
    sums: Container[Node],
    rank: dict[Node, int],
) -> None:
    """Gives each of `nodes` a rank: that of its largest argument. If that argument has no rank yet
    (a moment that is an input on the whole mesh), both get the rank of the node that reads the
    result. `filled` maps values to the ranks that computed them; `sums` are the inputs that are
    sums over microbatches."""
    loose: set[Node] = set()
    own = [n for n in nodes if n not in free]
    for n in own:
        known, unknown = [(0, 0)], 0
        for a in n.args:
            if a in free:
                continue
            if a in rank or a in filled:
                known.append((a.type.size, rank[a] if a in rank else filled[a]))
            else:
                unknown = max(unknown, a.type.size)
        size, where = max(known, key=lambda k: (k[0], -k[1]))
        if size and size >= unknown:
            rank[n] = where
        else:
            loose.add(n)
    for n in reversed(own):
        rank.setdefault(n, 0)
        for a in n.args:
            if a in loose or (a.op == "input" and a not in sums):
                rank.setdefault(a, rank[n])
    for n in nodes:
        rank.setdefault(n, 0)


def by_rank(
    nodes: Sequence[Node], free: Container[Node], outputs: Container[Node], rank: dict[Node, int]
) -> list[list[Node]]:
    """Groups of nodes with one rank each, in an order that can run. An `item` node is in the group
    of its argument. Free nodes are left out, unless they are in `outputs`."""
    groups: list[list[Node]] = []
    pending: dict[int, list[Node]] = {}
    items: dict[Node, list[Node]] = {}
    for n in nodes:
        if n.op == "item":
            items.setdefault(n.args[0], []).append(n)
    for n in nodes:
        if n.op == "item" or (n in free and n not in outputs):
            continue
        # A node may join its rank's open group unless it needs another rank's open group.
        for other in [r for r in pending if r != rank[n]]:
            if any(a in pending[other] for a in n.args):
                groups.append(pending.pop(other))
        pending.setdefault(rank[n], []).append(n)
        for i in items.get(n, ()):
            rank[i] = rank[n]
            pending[rank[n]].append(i)
    return [*groups, *pending.values()]
