"""The order in which microbatches are added up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
Place = tuple[Hashable, int, int]  # whose total, the level of its pairs, and the place there


class Totals(Generic[T]):
    """What waits while parts are added up over `count` microbatches: as they come or, where bits
    may depend on no order of execution (`paired`), in adjacent pairs and pairs of these.

    >>> totals = Totals(3, paired=True)
    >>> for m in (2, 1, 0):
    ...     earlier, place = totals.earlier("loss", m)
    ...     total = f"{m}"
    ...     for other in earlier:
    ...         total = f"({other} + {total})"
    ...     totals.waiting[place] = total
    >>> totals.waiting
    {('loss', 2, 0): '(2 + (1 + 0))'}
    """

    def __init__(self, count: int, paired: bool) -> None:
        self.count, self.paired = count, paired
        self.waiting: dict[Place, T] = {}

    def earlier(self, of: Hashable, m: int) -> tuple[list[T], Place]:
        """What is added to the part of microbatch `m`, one after the other, and the place in
        `waiting` for the total."""
        found: list[T] = []
        level, count = 0, self.count
        while self.paired and count > 1:
            if m ^ 1 < count:  # else the last of an odd number
                if (of, level, m ^ 1) not in self.waiting:
                    return found, (of, level, m)
                found.append(self.waiting.pop((of, level, m ^ 1)))
            level, m, count = level + 1, m // 2, -(-count // 2)
        last = (of, level, 0)
        if last in self.waiting:
            found.append(self.waiting.pop(last))
        return found, last
