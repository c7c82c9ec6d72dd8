"""Rules for order: sorts, the largest, and places among sorted bounds."""

from __future__ import annotations

from ...core.dtypes import bool_, f32, int32, uint8
from ...lang.math import functions as F
from ...lang.record.operands import as_tensor
from ...lang.value.tensor import Tensor
from .table import Operand, aten, cast_all, cut, in_dim


@aten("sort", "sort.stable")
def _sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    def run(t: Tensor, d: int) -> tuple[Tensor, Tensor]:
        w = t.to(uint8) if t.dtype is bool_ else t
        ids = F.argsort(w, d, descending)
        found = F.gather(w, ids, d)
        return found != 0 if t.dtype is bool_ else found, ids

    found: tuple[Tensor, Tensor] = in_dim(run, x, dim)
    return found


@aten("argsort", "argsort.stable")
def _argsort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Tensor:
    return _sort(x, dim, descending)[1]


@aten("topk")
def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    def run(t: Tensor, d: int) -> tuple[Tensor, Tensor]:
        values, ids = F.topk(t.to(uint8) if t.dtype is bool_ else t, k, d, largest)
        return values.to(t.dtype), ids

    found: tuple[Tensor, Tensor] = in_dim(run, x, dim)
    return found


@aten("kthvalue")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    def run(t: Tensor, d: int) -> tuple[Tensor, Tensor]:
        values, ids = _sort(t, d)
        return cut(values, d, k - 1, k), cut(ids, d, k - 1, k)

    values, ids = in_dim(run, x, dim)
    return (values, ids) if keepdim or not x.ndim else (F.squeeze(values, dim), F.squeeze(ids, dim))


@aten("median.dim")
def _median_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two; NaN where there is one."""
    n = x.shape[dim] if x.ndim else 1
    values, ids = _kthvalue(x, (n + 1) // 2, dim, keepdim)
    if not x.dtype.is_float:
        return values, ids
    last, at = _kthvalue(x, n, dim, keepdim)
    return F.where(last != last, last, values), F.where(last != last, at, ids)


@aten("median")
def _median(x: Tensor) -> Tensor:
    return _median_dim(x.reshape(-1), 0)[0]


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def _searchsorted(
    sorted_sequence: Tensor, x: Operand, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows = sorted_sequence if sorter is None else F.gather(sorted_sequence, sorter)
    bounds, values = cast_all(rows, x)
    ends = bounds.reshape((*bounds.shape[:-1], *(1,) * (bounds.ndim == 1) * values.ndim, -1))
    if bounds.ndim > 1:
        ends = bounds.reshape((*bounds.shape[:-1], 1, bounds.shape[-1]))
    each = values.reshape((*values.shape, 1))
    before = ends <= each if right or side == "right" else ends < each
    return F.sum(before.to(int32), -1)


@aten("bucketize.Tensor", "bucketize.Scalar")
def _bucketize(
    x: Operand, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return _searchsorted(boundaries, as_tensor(x), right=right)


@aten("histc")
def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    flat = x.reshape(-1).to(f32)
    low, high = as_tensor(float(min)), as_tensor(float(max))
    if min == max:
        low, high = F.min(flat), F.max(flat)
        low, high = F.where(low == high, low - 1.0, low), F.where(low == high, high + 1.0, high)
    at = F.floor((flat - low) * (float(bins) / (high - low)))
    at = F.where(flat == high, bins - 1.0, at)
    inside = (flat >= low) & (flat <= high)
    at = F.where(inside, at, -1.0).to(int32)
    hits = at.reshape((-1, 1)) == F.arange(bins, dtype=int32)
    return F.sum(hits.to(f32), 0).to(x.dtype if x.dtype.is_float else f32)


@aten("isin.Tensor_Tensor")
def _isin(
    elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> Tensor:
    a, b = cast_all(elements, test_elements)
    found = F.any(a.reshape((*a.shape, 1)) == b.reshape(-1), -1)
    return ~found if invert else found
