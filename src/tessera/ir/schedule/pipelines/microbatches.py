"""How is a batch cut into microbatches, and put together again? Each device's rows stay there, and
sums over microbatches have an order."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from ....core.layout import TensorType
from ...graph.build import Builder
from ...graph.node import Node

T = TypeVar("T")
Place = tuple[Hashable, int, int]  # whose total, the level of its pairs, and the place there


def microbatches(b: Builder, x: Node, count: int) -> list[Node]:
    """Dim 0 of `x` in `count` parts, each device's rows cut where they are."""
    shape, devices = x.type.shape, _devices(x.type)
    rows = shape[0] // (devices * count)
    y = b("reshape", x, shape=(devices, count, rows, *shape[1:]))
    y = b("transpose", y, perm=(1, 0, *range(2, len(shape) + 2)))
    y = b("reshape", y, shape=(count, devices * rows, *shape[1:]))
    parts = b("unstack", y)
    return [b("item", parts, index=i) for i in range(count)]


def together(b: Builder, parts: Sequence[Node]) -> Node:
    """The inverse of `microbatches`."""
    t = parts[0].type
    devices = _devices(t)
    rows = t.shape[0] // devices
    rest = t.shape[1:]
    split = [b("reshape", p, shape=(devices, 1, rows, *rest)) for p in parts]
    y = b("concat", *split, dim=1) if len(split) > 1 else split[0]
    return b("reshape", y, shape=(devices * len(parts) * rows, *rest))


def _devices(t: TensorType) -> int:
    """Over how many devices dim 0 is split, major to all else."""
    return math.prod(d.size for d in takewhile(lambda d: d.axes, t.digits(0)))


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


def key_of(b: Builder, key: Node, m: int) -> Node:
    """The key of microbatch `m`: the call's, its second word moved on."""
    if m == 0:
        return key
    one = b("slice", key, starts=(0,), stops=(1,), steps=(1,))
    two = b("slice", key, starts=(1,), stops=(2,), steps=(1,))
    step = b("full", dtype=key.type.dtype, shape=(), value=(0x9E3779B9 * m) & 0xFFFFFFFF)
    return b("concat", one, b("add", two, step), dim=0)
