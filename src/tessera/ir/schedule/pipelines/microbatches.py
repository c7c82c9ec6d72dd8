"""Order of additions over microbatches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
Place = tuple[Hashable, int, int]  # (owner of the total, level of pairs, index in it)


class Totals(Generic[T]):
    """Partial sums over `count` microbatches: added as they come or, if `paired`, in adjacent pairs
    and pairs of these. Then the bits do not depend on the order of execution.

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
        """(values to add to the part of microbatch `m`, one after the other; key in `waiting` for
        the total)."""
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
