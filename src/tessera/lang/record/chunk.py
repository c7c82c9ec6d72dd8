"""Random draws inside `map_chunks`: each block takes its part of the draws for all rows.

A function that draws is first recorded for all rows, only to find its draws. A draw for a block is
the block's part of that draw: it has the same key, and its rows keep their positions in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ...core.errors import UsageError
from ..value.tensor import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """A draw of random bits. For a part of a larger draw, `numbers` and `blocks` are the operands
    and the attribute of `random_bits` that select the part."""

    shape: Shape
    along: tuple[str, ...] = ()  # the local axes along which each device draws its own
    numbers: tuple[Tensor, ...] = ()
    blocks: tuple[int, ...] = ()


class Chunk:
    """A recording of the function that `map_chunks` calls."""

    draws_around = False  # whether its keys are drawn in the function around `map_chunks`

    def draw(self, shape: Shape, around: Callable[[], Draw]) -> Draw:
        """Returns the draw of `shape` in this recording. `around()` is the draw without
        `map_chunks`."""
        raise NotImplementedError


class Drew(Exception):
    """Raised if the function draws: it must be recorded for all rows first."""


class NoDraws(Chunk):
    """A recording for one block of a function that never draws. Raises Drew if it does."""

    def draw(self, shape: Shape, around: Callable[[], Draw]) -> Draw:
        raise Drew


@dataclass
class AllRows(Chunk):
    """A recording for all rows; only its draws are used."""

    drawn: list[Draw] = field(default_factory=list)

    def draw(self, shape: Shape, around: Callable[[], Draw]) -> Draw:
        self.drawn.append(around())
        return self.drawn[-1]


@dataclass
class Block(Chunk):
    """The final recording of a function that draws: for block `number` of `count`, with `rows`
    rows, `each` of them on each device. `drawn` are the function's draws for all rows."""

    drawn: list[Draw]
    number: Tensor
    count: int
    rows: int
    each: int
    draw_index: int = 0

    draws_around = True

    def draw(self, shape: Shape, around: Callable[[], Draw]) -> Draw:
        if self.draw_index == len(self.drawn):
            self.refuse(shape, None)
        whole = self.drawn[self.draw_index]
        self.draw_index += 1
        if shape == whole.shape:
            return whole
        cut = [d for d, (b, w) in enumerate(zip(shape, whole.shape, strict=False)) if b != w]
        if len(shape) != len(whole.shape) or len(cut) != 1:
            self.refuse(shape, whole.shape)
        (dim,) = cut
        if (shape[dim], whole.shape[dim]) != (self.rows, self.rows * self.count):
            self.refuse(shape, whole.shape)
        numbers, blocks = (self.number, *whole.numbers), (dim, self.count, self.each, *whole.blocks)
        return replace(whole, shape=shape, numbers=numbers, blocks=blocks)

    def end(self) -> None:
        """Raises UsageError if the function drew less often than for all rows."""
        if self.draw_index < len(self.drawn):
            self.refuse(None, self.drawn[self.draw_index].shape)

    def refuse(self, block: Shape | None, whole: Shape | None) -> NoReturn:
        sides = ((self.rows, block), (self.rows * self.count, whole))
        raise UsageError(
            "map_chunks: the function does not draw random numbers for each row",
            rows=[(f"for {n} rows", "nothing" if s is None else f"of shape {s}") for n, s in sides],
            fix="draw as often for any number of rows, in shapes with one dim for the rows",
        )
