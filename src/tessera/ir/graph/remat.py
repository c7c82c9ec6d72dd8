"""Rematerialization: the values that a forward pass keeps for its backward pass.

They are as few bytes as possible. Results of matrix products and reductions are kept. An
elementwise value is computed again where it is read, if that saves bytes: a min-cut between the
values that can be kept and the values that the backward reads, as in PyTorch's AOTAutograd (Jain et
al. 2020, "Checkmate": the general case).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...ops.elementwise import save_for_backward
from .node import Node

MOST_FLOPS = 16  # an element: random bits take more


def is_free(n: Node) -> bool:
    """Returns whether `n` creates its value without arguments, so that each reader creates it
    again."""
    return n.kind.memory == "created" and not n.args


def free_nodes(nodes: Iterable[Node]) -> frozenset[Node]:
    """The nodes that depend on no input, like masks and tables of angles: each reader recomputes
    them."""
    found: set[Node] = set()
    for n in nodes:
        if is_free(n) or (n.args and all(a in found for a in n.args)):
            found.add(n)
    return frozenset(found)


def is_form(n: Node) -> bool:
    """Returns whether `n` only changes the form of its one argument: a view, a cast, or a slice."""
    kind = n.kind
    other = kind.memory == "moves" and kind.elements in ("computed", "chosen")
    return len(n.args) == 1 and n.op != "item" and (kind.memory == "view" or other)


def choose_saved(
    wanted: Iterable[Node], forward_nodes: Container[Node], free_nodes: Container[Node]
) -> tuple[frozenset[Node], frozenset[Node]]:
    """(nodes that the forward keeps, nodes that the backward recomputes) for the values `wanted`.

    `forward_nodes` are the nodes of the forward pass. Values in `free_nodes` are available at no
    cost. Of several minimum cuts, the one that recomputes least is taken.
    """
    import networkx  # only loops and pipelines need it, and it is slow to import

    net = networkx.DiGraph()
    todo, visited = list(wanted), set[Node]()
    ends = set(todo)
    while todo:
        n = todo.pop()
        if n in visited:
            continue
        visited.add(n)
        if n in ends:  # an edge without a capacity is never cut
            net.add_edge((n, "read"), "backward")
        if n in free_nodes:
            continue
        net.add_edge((n, "made"), (n, "read"), capacity=sum(t.local_bytes for t in n.types))
        if n not in forward_nodes or not _follows(n):
            net.add_edge("forward", (n, "made"))
            continue
        for a in n.args:
            net.add_edge((a, "read"), (n, "made"))
            todo.append(a)
    if "forward" not in net:
        return frozenset(), frozenset(n for n in visited if n not in free_nodes)
    _, (_, behind) = networkx.minimum_cut(net, "forward", "backward")
    again = frozenset(n for n in visited if (n, "made") in behind)
    cut = (n for n in visited if (n, "read") in behind and n not in again and n not in free_nodes)
    return frozenset(cut), again


def _follows(n: Node) -> bool:
    """Returns whether `n` is cheap to recompute from its arguments at each reader."""
    kind = n.kind
    if n.attrs.get("again"):
        return True
    if len(n.types) > 1 or kind.bodies or not kind.pure or n.is_collective:
        return False
    ins = tuple(a.type for a in n.args if len(a.types) == 1)
    if len(ins) < len(n.args) or n.op == save_for_backward.name:
        return False
    flops = kind.flops(ins, n.types, n.attrs)
    near = kind.fuses or kind.memory == "view"
    return near and flops <= MOST_FLOPS * max(1, n.type.size)
