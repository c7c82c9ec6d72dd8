"""Sizes and places of meshes and tensors: `MeshShape`, `MeshCoordinate`, ranges of them, `Shape`.

>>> MeshShape(2, 4), MeshShape([1, 8]).mesh_size(), MeshShape(y=1, x=4).dims()
(MeshShape([2, 4]), 8, 2)
>>> [tuple(c) for c in MeshCoordinateRange(MeshCoordinate(0, 1), MeshCoordinate(1, 2))]
[(0, 1), (0, 2), (1, 1), (1, 2)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..core.checks import whole
from ..core.errors import MeshError, ShapeError

TILE_SIZE = 32


class _Sizes(tuple[int, ...]):
    """Whole numbers in order, given one by one or as a sequence."""

    __slots__ = ()
    LEAST = 0

    def __new__(cls, *sizes: int | Sequence[int], **named: int) -> Self:
        given: Iterable[int] = sizes  # type: ignore[assignment]  # narrowed below
        if len(sizes) == 1 and not isinstance(sizes[0], int):
            given = sizes[0]
        if named:  # MeshShape(y=1, x=4): as the guide writes it
            if sizes or set(named) - {"z", "y", "x"}:
                raise MeshError(
                    f"{cls.__name__}: sizes are given by place, or as y= and x=",
                    given=f"{sizes or ''}{named}",
                    fix=f"write {cls.__name__}(2, 4)",
                )
            given = [named[a] for a in ("z", "y", "x") if a in named]
        return super().__new__(cls, [whole(cls.__name__, "a size", n, cls.LEAST) for n in given])

    def dims(self) -> int:
        """The number of dims."""
        return len(self)

    # A list of the same numbers is equal too.
    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class MeshShape(_Sizes):
    """The size of a mesh along each of its dims, outermost first: rows and columns.

    `MeshShape(2, 4)`, `MeshShape([2, 4])` or `MeshShape(y=2, x=4)`. Raises MeshError or UsageError
    if it is given otherwise.
    """

    __slots__ = ()
    LEAST = 1

    def mesh_size(self) -> int:
        """The number of devices."""
        return math.prod(self)


class MeshCoordinate(_Sizes):
    """A place on a mesh, one number a dim, from 0: `MeshCoordinate(row, column)`."""

    __slots__ = ()


@dataclass(frozen=True)
class MeshCoordinateRange:
    """The places from `start` to `end`, which is one of them; or all those of a `MeshShape`.

    Raises MeshError if `end` lies before `start`, or has other dims.
    """

    start: Sequence[int]
    end: Any = None

    def __post_init__(self) -> None:
        start, end = self.start, self.end
        if end is None:
            start, end = [0] * len(start), [n - 1 for n in start]
        object.__setattr__(self, "start", MeshCoordinate(start))
        object.__setattr__(self, "end", MeshCoordinate(end))
        if len(start) != len(end) or any(b < a for a, b in zip(start, end)):
            raise MeshError(
                "MeshCoordinateRange: the end is before the start, or has other dims",
                start=self.start,
                end=self.end,
                fix="give the first and the last place, both inclusive",
            )

    @property
    def shape(self) -> MeshShape:
        """The size along each dim."""
        return MeshShape([b - a + 1 for a, b in zip(self.start, self.end)])

    def __iter__(self) -> Iterator[MeshCoordinate]:
        rows = (range(a, b + 1) for a, b in zip(self.start, self.end))
        return map(MeshCoordinate, itertools.product(*rows))

    def __contains__(self, place: Sequence[int]) -> bool:
        return len(place) == len(self.start) and all(
            a <= n <= b for a, n, b in zip(self.start, place, self.end)
        )

    def __len__(self) -> int:
        return self.shape.mesh_size()


class MeshCoordinateRangeSet:
    """Several `MeshCoordinateRange`s."""

    def __init__(self, ranges: Iterable[MeshCoordinateRange] = ()) -> None:
        self._ranges = list(ranges)

    def ranges(self) -> list[MeshCoordinateRange]:
        """The ranges, in the order in which they were given."""
        return [*self._ranges]

    def coords(self) -> list[MeshCoordinate]:
        """All places of the ranges, each once."""
        return [*dict.fromkeys(c for r in self._ranges for c in r)]

    def __repr__(self) -> str:
        return f"MeshCoordinateRangeSet({self._ranges})"


class Shape(_Sizes):
    """The shape of a tensor on one device, without the padding to tiles."""

    __slots__ = ()

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self)

    def to_rank(self, rank: int) -> Shape:
        """The shape with dims of one in front, or without those that are there, to have `rank`
        dims. Raises ShapeError if a dim in front is not one."""
        gone = self[: max(len(self) - rank, 0)]
        if any(n != 1 for n in gone):
            raise ShapeError(
                f"Shape.to_rank: {self} has no {rank} dims without losing one",
                fix="reshape the tensor first",
            )
        return Shape([1] * (rank - len(self)) + list(self[len(gone) :]))


def padded(shape: Sequence[int], tiled: bool) -> Shape:
    """`shape` with its last two dims up to the next multiples of a tile's side."""
    if not tiled:
        return Shape(list(shape))
    full = list(shape) if len(shape) > 1 else [1] * (2 - len(shape)) + list(shape)
    return Shape([*full[:-2], *(-(-n // TILE_SIZE) * TILE_SIZE for n in full[-2:])])


__all__ = [
    "TILE_SIZE",
    "MeshCoordinate",
    "MeshCoordinateRange",
    "MeshCoordinateRangeSet",
    "MeshShape",
    "Shape",
]  # fmt: skip
