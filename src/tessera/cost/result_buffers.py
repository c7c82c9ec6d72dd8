"""Reuse of results' buffers for temporary values, before the results are written.

Results that reuse no argument have their own buffers, which are free until they are written. Values
are placed largest first, each in the first result that is large enough, and free during the value's
lifetime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from ..ir.graph.node import Node


class Buffer(NamedTuple):
    """The buffer of a node, with the first and the last time at which it is in use."""

    node: Node
    size: int
    first: int
    last: int


def lent(results: Sequence[Buffer], values: Iterable[Buffer], times: int) -> set[Node]:
    """Returns the nodes of `values` that are stored in the buffer of one of `results`.

    The results come in the order in which they are written, which is their first use. No value is
    empty, and all times are below `times`.
    """
    found: set[Node] = set()
    written = [r.first for r in results]
    by_size = sorted(range(len(results)), key=lambda i: results[i].size)
    large = 0  # the results whose buffers are large enough, a bit each
    taken = Occupied(times)
    for node, size, first, last in sorted(values, key=lambda v: -v.size):
        while by_size and results[by_size[-1]].size >= size:
            large |= 1 << by_size.pop()
        i = bisect_left(written, last)
        # A result written at the value's last read is written in place, or too early.
        if i < len(results) and written[i] == last:
            result = results[i].node
            # A partial result's array has one more dim, so it is not written in place.
            over = result.kind.fuses and not result.type.partial
            i += not over or results[i].size != size
        free = (large & ~taken.at(first, last)) >> i
        if free:
            taken.take(first, last, (free & -free) << i)
            found.add(node)
    return found


class Occupied:
    """The buffers, a bit each, that are taken at each of `n` times: a segment tree."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._whole = [0] * (2 * n)  # taken at all times below a node
        self._some = [0] * (2 * n)  # taken at some of these times

    def at(self, first: int, last: int) -> int:
        """Returns the buffers that are taken at some time from `first` to `last`."""
        inside, above = self._nodes(first, last)
        return reduce(or_, [*(self._some[m] for m in inside), *(self._whole[m] for m in above)])

    def take(self, first: int, last: int, buffers: int) -> None:
        """Takes `buffers` from `first` to `last`."""
        inside, above = self._nodes(first, last)
        for m in inside:
            self._whole[m] |= buffers
        for m in (*inside, *above):
            self._some[m] |= buffers

    def _nodes(self, first: int, last: int) -> tuple[list[int], set[int]]:
        """Returns (the tree nodes that make up the times from `first` to `last`, the nodes above
        them)."""
        inside, above = list[int](), set[int]()
        low, high = first + self.n, last + self.n + 1
        while low < high:
            if low & 1:
                inside.append(low)
                low += 1
            if high & 1:
                high -= 1
                inside.append(high)
            low, high = low >> 1, high >> 1
        for m in inside:
            while (m := m >> 1) and m not in above:
                above.add(m)
        return inside, above
