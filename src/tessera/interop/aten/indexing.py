"""Rules for elements by ids: reads, writes and sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtypes import bool_, int32, uint8
from ...core.errors import UsageError
from ...lang.math import functions as F
from ...lang.math.elementwise import stop_gradient
from ...lang.value.tensor import Tensor
from ...nn import functional as N
from .table import Operand, aten, cut, in_dim, line, number


# -- reads ----------------------------------------------------------------------------------------
@aten("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    return x[tuple(slice(None) if i is None else i for i in indices)]


@aten("index_select")
def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return F.take(x, index.reshape(-1), dim) if x.ndim else x


@aten("gather")
def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if not index.size:
        return F.full(index.shape, 0, x.dtype)
    return _gathered(x, index, dim) if x.ndim and index.ndim else x.reshape(index.shape)


@aten("take")
def _take(x: Tensor, index: Tensor) -> Tensor:
    return F.take(x.reshape(-1), index, 0)


@aten("take_along_dim")
def _take_along(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    return _take(x, index) if dim is None else F.gather(x, index, dim)


@aten("embedding")
def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    if scale_grad_by_freq:
        raise UsageError(
            "embedding: gradients are not scaled by the frequency of ids",
            weight=weight.type,
            fix="leave scale_grad_by_freq out",
        )
    rows = N.embedding(indices, weight)
    if padding_idx < 0:
        return rows
    padding = (indices == padding_idx).reshape((*indices.shape, 1))  # has no gradient
    return F.where(padding, stop_gradient(rows), rows)


@aten("one_hot")
def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise UsageError("one_hot: the number of classes depends on values", fix="give num_classes")
    return F.one_hot(x, num_classes, int32)


# -- writes ---------------------------------------------------------------------------------------
def put(x: Tensor, dim: int, ids: Tensor, values: Tensor) -> Tensor:
    """`x` with `values` at the places `ids` along `dim`, of the shape of `values`; the last of
    several values for one place stays."""
    dim %= x.ndim
    n, count = x.shape[dim], ids.shape[dim]
    ids = ids.to(int32)
    values = values.to(x.dtype)
    if count > 1:  # values of one place become neighbours, and only the last of them is written
        order = F.argsort(ids, dim)
        ids, values = F.gather(ids, order, dim), _gathered(values, order, dim)
        later = F.concat([cut(ids, dim, 1, count), F.full_like(cut(ids, dim, 0, 1), n)], dim)
        ids = F.where(ids == later, n, ids)
    room = F.full(tuple(k + (i == dim) for i, k in enumerate(x.shape)), 0, int32)
    hit = cut(F.scatter_add(room, ids, F.full(ids.shape, 1, int32), dim), dim, 0, n) > 0
    kind = uint8 if x.dtype is bool_ else x.dtype
    new = F.scatter_add(room.to(kind), ids, values.to(kind), dim)
    return F.where(hit, cut(new, dim, 0, n).to(x.dtype), x)


def _gathered(x: Tensor, ids: Tensor, dim: int) -> Tensor:
    if x.dtype is bool_:
        return F.gather(x.to(uint8), ids, dim) != 0
    return F.gather(x, ids, dim)


@aten("scatter.src", "scatter.value")
def _scatter(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    if not x.ndim:
        return number(src, x.dtype) if not isinstance(src, Tensor) else src.to(x.dtype)
    if not isinstance(src, Tensor):
        src = F.broadcast_to(number(src, x.dtype), index.shape)
    return put(x, dim, index, _corner(src, index.shape))


def _corner(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of `x`, in `shape`."""
    return x if x.shape == tuple(shape) else x[tuple(slice(0, n) for n in shape)]


@aten("scatter_add")
def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    if x.dtype is bool_:
        return _scatter_add(x.to(uint8), dim, index, src.to(uint8)) != 0
    if not x.ndim:
        return x + src.reshape(())
    return F.scatter_add(x, index, _corner(src, index.shape), dim)


@aten("scatter_reduce.two")
def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if reduce == "prod":
        raise UsageError(
            "scatter_reduce: 'prod' has no rule here",
            x=x.type,
            fix="use another reduction, or give a rule:"
            ' @ts.interop.rule("aten.scatter_reduce.two")',
        )
    src = _corner(src, index.shape)
    if reduce in ("amax", "amin"):
        return _extreme(x, dim, index, src, reduce == "amax", include_self)
    if x.dtype is bool_:
        small = _scatter_reduce(x.to(uint8), dim, index, src.to(uint8), reduce,
                                include_self=include_self)  # fmt: skip
        return small != 0
    count = F.scatter_add(F.full(x.shape, 0, int32), index, F.full(index.shape, 1, int32), dim)
    start = x if include_self else F.where(count > 0, 0, x)
    total = F.scatter_add(start, index, src, dim)
    if reduce == "sum":
        return total
    by = F.maximum(count + int(include_self), 1)
    return total / by.to(x.dtype) if x.dtype.is_float else total // by


def _extreme(
    x: Tensor, dim: int, ids: Tensor, src: Tensor, largest: bool, include_self: bool
) -> Tensor:
    """The largest or the smallest of the values for each place: in order, the last one stays."""
    kind = uint8 if x.dtype is bool_ else x.dtype
    order = F.argsort(src.to(kind), dim, descending=not largest)
    best = put(x, dim, F.gather(ids, order, dim), _gathered(src, order, dim)).to(kind)
    if include_self:
        best = (F.maximum if largest else F.minimum)(x.to(kind), best)
    return best.to(x.dtype) if x.dtype is not bool_ else best != 0


@aten("index_add")
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    if x.dtype is bool_:
        return _index_add(x.to(uint8), dim, index, source.to(uint8)) != 0
    added = source if alpha == 1 else source * number(alpha, source.dtype)
    found: Tensor = in_dim(
        lambda t, d: F.scatter_add(t, index.reshape(-1), added.reshape(added.shape or (1,)), d),
        x, dim,
    )  # fmt: skip
    return found


@aten("index_copy")
def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if not x.ndim:
        return source.reshape(())
    dim %= x.ndim
    ids = index.reshape((-1, *(1,) * (x.ndim - 1 - dim)))
    return put(x, dim, F.broadcast_to(ids, source.shape), source)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    if not x.ndim:
        return number(value, x.dtype)
    dim %= x.ndim
    ids = F.where(index < 0, index + x.shape[dim], index)
    hit = F.any(line(x.shape[dim]) == ids.reshape((-1, 1)), 0)
    mask = hit.reshape((-1, *(1,) * (x.ndim - 1 - dim)))
    return F.where(mask, number(value, x.dtype), x)


@aten("index_put", "_unsafe_index_put")
def _index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    named = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(named) == 1 and named[0][1].dtype is bool_:
        d, mask = named[0]
        after = x.ndim - d - mask.ndim
        if all(
            n == 1 for n in values.shape[: max(0, values.ndim - after)]
        ):  # one for all that are named
            mask = mask.reshape((*mask.shape, *(1,) * after))
            value = values.reshape(values.shape[max(0, values.ndim - after) :]).to(x.dtype)
            return F.where(mask, x + value if accumulate else value, x)
    if any(i.dtype is bool_ for _, i in named):
        raise UsageError(
            "index_put: how many elements a mask names depends on values",
            x=x.type,
            fix="write torch.where(mask, values, x)",
        )
    dims = [d for d, _ in named]
    shape = _broadcast([i.shape for _, i in named])
    separate = dims != list(range(dims[0], dims[0] + len(dims)))
    rest = [d for d in range(x.ndim) if d not in dims]
    before = 0 if separate else dims[0]  # how many dims of `values` stand before those of the ids
    picks = len(shape)
    full = (*(x.shape[d] for d in rest[:before]), *shape, *(x.shape[d] for d in rest[before:]))
    given = F.broadcast_to(values.to(x.dtype), full)
    order = (*range(before, before + picks), *range(before), *range(before + picks, given.ndim))
    rows = F.permute(given, order).reshape((math.prod(shape), -1))
    flat = F.full((), 0, int32)
    for d, i in named:
        flat = flat * x.shape[d] + F.where(i < 0, i + x.shape[d], i).to(int32)
    flat = F.broadcast_to(flat, shape).reshape(-1)
    table = F.permute(x, (*dims, *rest))
    flat_table = table.reshape((math.prod(x.shape[d] for d in dims), -1))
    if accumulate:
        new = F.scatter_add(flat_table, flat, rows, 0)
    else:
        new = put(flat_table, 0, F.broadcast_to(flat.reshape((-1, 1)), rows.shape), rows)
    back = [0] * x.ndim
    for at, d in enumerate((*dims, *rest)):
        back[d] = at
    return F.permute(new.reshape(table.shape), tuple(back))


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in ns if n != 1), 1) for ns in zip(*padded, strict=True))


@aten("masked_scatter")
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    mask = F.broadcast_to(mask, x.shape)
    at = F.cumsum(mask.reshape(-1).to(int32), 0) - 1
    at = F.clip(at, 0, source.size - 1)
    return F.where(mask, F.take(source.reshape(-1), at, 0).reshape(x.shape), x)
