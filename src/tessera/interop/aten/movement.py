"""Rules for shapes: dims in another order, cut, joined, repeated and padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ...lang.math import functions as F
from ...lang.record.operands import as_tensor
from ...lang.value.tensor import Tensor
from .table import aten, cast_all, cut, dims_of


@aten("view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy")
def _view(x: Tensor, size: Sequence[int]) -> Tensor:
    return F.reshape(x, tuple(size))


@aten("permute", "permute_copy")
def _permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    return F.permute(x, tuple(d % x.ndim for d in dims)) if x.ndim else x


@aten("transpose.int", "transpose_copy.int")
def _transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return x.transpose(dim0, dim1) if x.ndim else x


aten("t", "t_copy")(lambda x: x.transpose(0, 1) if x.ndim == 2 else x)


@aten("expand", "expand_copy")
def _expand(x: Tensor, size: Sequence[int], *, implicit: bool = False) -> Tensor:
    new = len(size) - x.ndim
    return F.broadcast_to(x, tuple(x.shape[i - new] if n == -1 else n for i, n in enumerate(size)))


@aten("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy", "squeeze_copy.dim",
      "squeeze_copy.dims")  # fmt: skip
def _squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    dims = () if dim == [] else dims_of(x, dim)
    return x.reshape(tuple(n for i, n in enumerate(x.shape) if n != 1 or i not in dims))


@aten("unsqueeze", "unsqueeze_copy")
def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    at = dim % (x.ndim + 1)
    return x.reshape((*x.shape[:at], 1, *x.shape[at:]))


@aten("flatten.using_ints")
def _flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return F.flatten(x, start_dim, end_dim)


@aten("unflatten.int")
def _unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= x.ndim
    return x.reshape((*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


# -- parts ----------------------------------------------------------------------------------------
@aten("slice.Tensor", "slice_copy.Tensor")
def _slice(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    first, stop, _ = slice(start, end).indices(x.shape[dim])
    return cut(x, dim, first, max(first, stop), step)


@aten("narrow")
def _narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    first = start % x.shape[dim] if start < 0 else start
    return cut(x, dim, first, first + length)


@aten("select.int", "select_copy.int")
def _select(x: Tensor, dim: int, index: int | Tensor) -> Tensor:
    if isinstance(index, Tensor):
        return F.take(x, index.reshape(()), dim)
    return x[(*(slice(None),) * (dim % x.ndim), index)]


@aten("split_with_sizes", "split_with_sizes_copy", "split.sizes")
def _split_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    ends = [int(n) for n in np.cumsum([0, *sizes])]
    return [cut(x, dim, a, b) for a, b in pairwise(ends)]


@aten("split.Tensor", "split_copy.Tensor")
def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    n = x.shape[dim]
    return [cut(x, dim, i, min(i + size, n)) for i in range(0, n, size)] if n else [x]


@aten("chunk")
def _chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    return _split(x, -(-x.shape[dim] // chunks), dim)


@aten("unbind.int", "unbind_copy.int")
def _unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [_select(x, dim, i) for i in range(x.shape[dim])]


@aten("diagonal", "diagonal_copy")
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return F.diagonal(x, offset, dim1, dim2)


@aten("unfold", "unfold_copy")
def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    if not x.ndim:
        return x.reshape(1)
    dim = dimension % x.ndim
    count = (x.shape[dim] - size) // step + 1
    ids = np.arange(count)[:, None] * step + np.arange(size)
    rows = F.take(x, as_tensor(ids.astype(np.int32)), dim)
    return F.permute(rows, (*(d for d in range(rows.ndim) if d != dim + 1), dim + 1))


@aten("as_strided", "as_strided_copy")
def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Elements by their places in `x` as it lies in memory: whole, row by row, which the export
    has made sure of."""
    places = np.full((), storage_offset or 0, np.int64)
    for n, by in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(n) * by
    if places.size == x.size and (places.reshape(-1) == np.arange(x.size)).all():
        return x.reshape(tuple(size))
    return F.take(x.reshape(-1), as_tensor(places.astype(np.int32)), 0)


# -- joined and repeated --------------------------------------------------------------------------
@aten("cat", "concat", "concatenate")
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = cast_all(*tensors)
    parts = [t for t in parts if t.shape != (0,)] or parts[:1]
    return F.concat(parts, dim) if len(parts) > 1 else parts[0]


@aten("stack")
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return F.stack(cast_all(*tensors), dim)


@aten("repeat", "tile")
def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    lead = (1,) * (len(repeats) - x.ndim)
    return F.tile(x.reshape((*lead, *x.shape)), tuple(repeats)) if len(repeats) else x


@aten("repeat_interleave.self_int")
def _repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    return F.repeat_interleave(x, repeats, dim)


@aten("flip")
def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    return F.flip(x, dims_of(x, dims)) if dims and x.ndim else x


@aten("roll")
def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    return F.roll(x, tuple(shifts), tuple(dims)) if dims else F.roll(x, shifts[0])


@aten("tril")
def _tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return F.tril(x, diagonal)


@aten("triu")
def _triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return F.triu(x, diagonal)


# -- written into parts ---------------------------------------------------------------------------
@aten("select_scatter")
def _select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    at = index % x.shape[dim]
    return _slice_scatter(x, _unsqueeze(src, dim % x.ndim), dim, at, at + 1)


@aten("slice_scatter")
def _slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Tensor:  # fmt: skip
    n = x.shape[dim]
    first, stop, _ = slice(start, end).indices(n)
    ids = np.arange(n)
    inside = (ids >= first) & (ids < stop) & ((ids - first) % step == 0)
    if inside.all():
        return src.to(x.dtype)
    if step == 1:
        parts = [cut(x, dim, 0, first), src.to(x.dtype), cut(x, dim, max(first, stop), n)]
        return F.concat([p for p in parts if p.shape[dim]], dim)
    at = np.where(inside, (ids - first) // step, 0).astype(np.int32)
    spread = F.take(src.to(x.dtype), as_tensor(at), dim)
    mask = inside.reshape((-1, *(1,) * (x.ndim - 1 - dim % x.ndim)))
    return F.where(as_tensor(mask), spread, x)


# -- padding --------------------------------------------------------------------------------------
@aten("constant_pad_nd")
def _pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    if x.dtype.kind == "bool":
        return F.pad(x.to("u8"), list(pad), value=int(bool(value))) != 0
    return F.pad(x, list(pad), value=float(value) if x.dtype.is_float else value)


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflect(x: Tensor, padding: Sequence[int]) -> Tensor:
    return F.pad(x, list(padding), "reflect")


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _replicate(x: Tensor, padding: Sequence[int]) -> Tensor:
    return F.pad(x, list(padding), "replicate")


@aten("pad")
def _pad_by(
    x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    return _pad(x, pad, value or 0) if mode == "constant" else F.pad(x, list(pad), mode)


@aten("pixel_shuffle")
def _pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    *lead, c, h, w = x.shape
    r = upscale_factor
    y = x.reshape((*lead, c // r**2, r, r, h, w))
    return _ordered(y, (0, 3, 1, 4, 2)).reshape((*lead, c // r**2, h * r, w * r))


@aten("pixel_unshuffle")
def _pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    *lead, c, h, w = x.shape
    r = downscale_factor
    y = x.reshape((*lead, c, h // r, r, w // r, r))
    return _ordered(y, (0, 2, 4, 1, 3)).reshape((*lead, c * r**2, h // r, w // r))


def _ordered(x: Tensor, last: Sequence[int]) -> Tensor:
    """`x` with its last dims in the order `last`."""
    lead = x.ndim - len(last)
    return F.permute(x, (*range(lead), *(lead + d for d in last)))


@aten("channel_shuffle")
def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, *sizes = x.shape
    return x.reshape((n, groups, c // groups, *sizes)).transpose(1, 2).reshape(x.shape)


@aten("nonzero", "masked_select", "_unique2", "unique_dim", "bincount")
def _by_value(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    raise UsageError(
        "from_torch: the shape of a result depends on values",
        x=x.type,
        fix="shapes are known before a program runs: write it with a mask, such as torch.where",
    )
