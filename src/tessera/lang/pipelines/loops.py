"""What does a loop give: a sum of what its turns add, or what they computed, moved?"""

from __future__ import annotations

from ...ir.graph.node import Node, reachable
from ...ops.cast import cast
from ...ops.control import item
from ...ops.custom import custom
from ...ops.elementwise import add
from ...ops.movement import reshape, transpose
from ...ops.redistribute import NAMES

MOVING = frozenset(op.name for op in (reshape, transpose))


def added_to(n: Node, carried: Node) -> list[Node] | None:
    """The terms that `n` adds to `carried`; None where it is not such a sum."""
    terms: list[Node] = []
    while n is not carried:
        if n.op in NAMES or n.op == cast.name:
            n = n.args[0]
            continue
        ways = [a for a in n.args if carried in reachable([a])]
        if n.op != add.name or len(ways) != 1:
            return None
        terms += [a for a in n.args if a is not ways[0]]
        n = ways[0]
    return terms


def of_loop(n: Node) -> bool:
    """Whether `n` is what a loop gives, moved, or with a gradient of its own."""
    while n.op in MOVING or n.op == custom.name:
        n = n.args[0]
    return n.op == item.name and n.args[0].kind.bodies
