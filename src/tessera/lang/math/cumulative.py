"""Cumulative functions along a dim: `cumsum`, `cumprod`, `cummax`, `cummin`."""

from __future__ import annotations

from collections.abc import Callable

from ...core.dtypes import int32, summed
from ...core.layout import dim_axes
from ...core.reshard import gathered
from ..record.operands import as_tensor, binary, emit
from ..value.tensor import Like, Tensor
from .elementwise import stop_gradient, where, widened
from .indexing import gather_or_zero
from .shape import along, concat, sliced


def cumsum(x: Like, dim: int = -1) -> Tensor:
    """The running sum along `dim`, each element included, in the shape of `x`.

    Raises ShapeError if `x` has no such dim.
    """
    t = as_tensor(x)
    t = widened(t.to(summed(t.dtype)))
    return along(lambda t, d: emit("cumsum", t, dim=d), "cumsum", t, dim)


def cumprod(x: Like, dim: int = -1) -> Tensor:
    """The running product along `dim`, each element included, in the shape of `x`.

    Bools and integers of less than 32 bits are multiplied in int32. Raises ShapeError if `x` has no
    such dim.
    """
    t = as_tensor(x)
    t = widened(t.to(summed(t.dtype)))
    return along(lambda t, d: _running(lambda a, b: [a[0] * b[0]], [t], d)[0], "cumprod", t, dim)


def cummax(x: Like, dim: int = -1) -> tuple[Tensor, Tensor]:
    """(The largest element so far along `dim`, its int32 index): both in the shape of `x`.

    Of equal elements the index is that of the last one, as in PyTorch. After a NaN all elements are
    NaN. Raises ShapeError if `x` has no such dim.
    """
    return _extreme("cummax", "ge", x, dim)


def cummin(x: Like, dim: int = -1) -> tuple[Tensor, Tensor]:
    """(The smallest element so far along `dim`, its int32 index): both in the shape of `x`.

    Of equal elements the index is that of the last one, as in PyTorch. After a NaN all elements are
    NaN. Raises ShapeError if `x` has no such dim.
    """
    return _extreme("cummin", "le", x, dim)


def _extreme(name: str, beats: str, x: Like, dim: int) -> tuple[Tensor, Tensor]:
    t = as_tensor(x)

    def later(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        wins = binary(beats, b[0], a[0])
        wins = wins | (b[0] != b[0]) if t.dtype.is_float else wins
        return [where(wins, q, p) for p, q in zip(a, b, strict=True)]

    def place(t: Tensor, d: int) -> Tensor:
        shape = tuple(n if i == d else 1 for i, n in enumerate(t.shape))
        line = emit("broadcast_to", emit("iota", dtype=int32, shape=shape, dim=d), shape=t.shape)
        return _running(later, [stop_gradient(t), line], d)[1]

    ids = along(place, name, t, dim)
    return (gather_or_zero(t, ids, dim) if t.ndim else t), ids


def _running(
    join: Callable[[list[Tensor], list[Tensor]], list[Tensor]], xs: list[Tensor], dim: int
) -> list[Tensor]:
    """The associative scan of `xs` along `dim` by `join`, each element included: by doubling
    (Hillis & Steele 1986), in about log2 of the size steps."""
    xs = [_whole(x, dim) for x in xs]
    size, by = xs[0].shape[dim], 1
    while by < size:
        first = [sliced(x, {dim: (0, by, 1)}) for x in xs]
        before = [sliced(x, {dim: (0, size - by, 1)}) for x in xs]
        now = [sliced(x, {dim: (by, size, 1)}) for x in xs]
        joined = join(before, now)
        xs = [concat(pair, dim) for pair in zip(first, joined, strict=True)]
        by *= 2
    return xs


def _whole(x: Tensor, dim: int) -> Tensor:
    """Returns `x` complete, with `dim` not split, so that no step of the scan communicates."""
    to = gathered(x.type.complete(), dim_axes(x.type.dims[dim]))
    return x if to is x.type else emit("redistribute", x, to=to)
