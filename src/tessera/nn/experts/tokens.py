"""The layout of tokens before dispatch: [G, P, S, d] (experts/dispatch.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...core.layout import Digit, TensorType, digits, dim_axes, shard_count
from ...core.reshard import gathered
from ...lang.math import functions as F
from ...lang.parallel.collectives import split_over
from ...lang.value.tensor import Tensor
from ..context_parallel import zigzag_positions


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens [.., d] of type `type`: `sizes` are the digits of their dims, `order` permutes these
    so that they regroup to `four` = (G, P, S). Sequences are in zig-zag order over `zigzag`
    devices."""

    type: TensorType
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    four: tuple[int, int, int]
    zigzag: int = 1

    def grouped(self, x: Tensor) -> Tensor:
        """`x` [.., d] as [G, P, S, d]."""
        x = F.relayout(x, self.type.with_dtype(x.dtype)) if self.type.mesh is not None else x
        d = x.shape[-1]
        cut = F.permute(x.reshape(*self.sizes, d), (*self.order, len(self.order)))
        return cut.reshape(*self.four, d)

    def ungrouped(self, y: Tensor) -> Tensor:
        """The inverse of `grouped`, up to the layout."""
        d = y.shape[-1]
        y = y.reshape(*[self.sizes[i] for i in self.order], d)
        inverse = [self.order.index(i) for i in range(len(self.order))]
        return F.permute(y, (*inverse, len(inverse))).reshape(*self.type.shape[:-1], d)

    def numbers(self) -> Tensor:
        """0, 1, 2, ... over the tokens in their own order, as [G, P, S, 1]."""
        *_, seq, _ = t = self.type.shape
        return self.each(self._order(math.prod(t[:-1]), seq).reshape(*t[:-1]))

    def each(self, values: Tensor) -> Tensor:
        """Values per token [..] as [G, P, S, 1]."""
        thin, home = values.reshape(*values.shape, 1), self.type
        if home.mesh is not None:
            dims = (*home.dims[:-1], thin.type.dims[-1])
            thin = F.relayout(thin, home.with_dims(dims).with_dtype(values.dtype))
        cut = F.permute(thin.reshape(*self.sizes, 1), (*self.order, len(self.order)))
        return cut.reshape(*self.four, 1)

    def runs(self) -> Tensor | None:
        """The position of each run of tokens in the group's own order, where a part consists of
        equal runs of consecutive tokens; None if the tokens are in that order already."""
        if self.zigzag == 1:
            return None
        _, parts, size = self.four
        seq = self.type.shape[-2]
        each = math.gcd(size, seq // (2 * self.zigzag))
        return self._order(parts * size // each, seq // each)

    def _order(self, count: int, seq: int) -> Tensor:
        """i32[count]: the original numbers of items in rows of `seq`, each row in zig-zag order."""
        if self.zigzag == 1:
            return F.arange(count)
        first = F.arange(count // seq).reshape(count // seq, 1) * seq
        return (first + zigzag_positions(seq, self.zigzag)).reshape(count)

    @property
    def parts(self) -> int:
        """The number of the G·P parts on one device."""
        g, p, _ = self.four
        return g * p // shard_count(self.type.split_axes, self.type.sizes)


def tokens_of(
    t: TensorType,
    axes: Sequence[str],
    hidden: Iterable[str],
    groups: int | None,
    zigzag: int = 1,
) -> Tokens:
    """The layout of the tokens of `t` [.., d] before dispatch: split over `axes` too where dims
    allow it.

    Their channels are whole. Axes in `hidden` split the inside of the experts: a sequence that is
    split over them is gathered, a batch is not. `groups` None is for dropless routing, which has no
    groups: the tokens of each device are one.
    """
    last = len(t.dims) - 1
    sequence = {a for d in t.dims[1:last] for a in dim_axes(d)}
    uneven = {a for i in t.padded_dims for a in dim_axes(t.dims[i])}
    gone = {*dim_axes(t.dims[last]), *(sequence & set(hidden)), *uneven}
    t = gathered(t.complete(), [a for a in t.split_axes if a in gone])
    missing = [a for a in axes if a not in t.split_axes and t.sizes[a] > 1]
    for some in (missing, *([a] for a in missing)):
        for i in range(last):
            if some and not set(some) & set(t.split_axes) and not (
                t.local_shape[i] % shard_count(some, t.sizes)
            ):  # fmt: skip
                t = split_over(t, i, some)
                break
    if groups is None:
        run = [g for i in range(last) for g in digits(t.dims[i], t.sizes)] or [Digit(1)]
        split = [i for i, g in enumerate(run) if g.axes]
        rest = [i for i, g in enumerate(run) if not g.axes]
        a, b = (math.prod(run[i].size for i in part) for part in (split, rest))
        return Tokens(t, tuple(g.size for g in run), (*split, *rest), (a, 1, b), zigzag)
    count = math.prod(t.shape[:-1])
    flat = t.reshape((groups, count // groups, t.shape[-1]))
    parts, inner = 1, False
    late: list[str] = []
    for g in digits(flat.dims[1], flat.sizes):
        if g.axes and (inner or g.uneven):
            late += g.axes
        elif g.axes:
            parts *= g.size
        inner = inner or not g.axes
    # A part is a run of tokens; a finer split is gathered.
    lost = [a for a in t.split_axes if a in late or a not in flat.split_axes]
    four = (groups, parts, count // groups // parts)
    return Tokens(gathered(t, lost), four, (0, 1, 2), four, zigzag)
