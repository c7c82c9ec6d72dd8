"""Rules for new tensors, copies and casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.dtypes import DType, bool_, f32, int32
from ...lang.math import functions as F
from ...lang.math.elementwise import stop_gradient
from ...lang.record.operands import as_tensor
from ...lang.value.tensor import Tensor
from .table import Operand, aten, kind_of, number, of, rule


@aten("full")
def _full(size: Sequence[int], fill_value: Operand, *, dtype: DType | None = None) -> Tensor:
    kind = fill_value.dtype if isinstance(fill_value, Tensor) else kind_of(fill_value)
    return F.broadcast_to(number(fill_value, dtype or kind), tuple(size))


@aten("full_like", "new_full")
def _full_like(x: Tensor, *args: Any, dtype: DType | None = None) -> Tensor:
    *size, value = args
    return _full(size[0] if size else x.shape, value, dtype=dtype or x.dtype)


def _filled(value: int) -> Any:
    def run(size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
        return _full(size, value, dtype=dtype or f32)

    return run


def _filled_like(value: int) -> Any:
    def run(x: Tensor, *size: Any, dtype: DType | None = None) -> Tensor:
        return _full(size[0] if size else x.shape, value, dtype=dtype or x.dtype)

    return run


aten("zeros", "empty.memory_format")(_filled(0))
aten("empty_strided", "empty_permuted")(
    lambda size, order, *, dtype=None: _filled(0)(size, dtype=dtype)
)
aten("ones")(_filled(1))
aten("zeros_like", "empty_like", "new_zeros", "new_empty", "new_empty_strided")(_filled_like(0))
aten("ones_like", "new_ones")(_filled_like(1))


@aten("scalar_tensor")
def _scalar_tensor(value: Operand, *, dtype: DType | None = None) -> Tensor:
    return _full((), value, dtype=dtype or f32)


@aten("fill.Scalar", "fill.Tensor")
def _fill(x: Tensor, value: Operand) -> Tensor:
    return _full(x.shape, value, dtype=x.dtype)


@aten("arange.start_step", "arange.start")
def _arange(start: float, end: float, step: float = 1, *, dtype: DType | None = None) -> Tensor:
    whole = all(isinstance(v, int) for v in (start, end, step))
    count = max(0, int(np.ceil((end - start) / step)))
    kind = dtype or (int32 if whole else f32)
    x = F.arange(count, dtype=int32)
    if whole:
        return (x * step + start if (start, step) != (0, 1) else x).to(kind)
    return (x.to(f32) * float(step) + float(start)).to(kind)


@aten("arange")
def _arange_to(end: float, *, dtype: DType | None = None) -> Tensor:
    return _arange(0, end, dtype=dtype)


@aten("linspace")
def _linspace(start: float, end: float, steps: int, *, dtype: DType | None = None) -> Tensor:
    return as_tensor(np.linspace(start, end, steps, dtype=np.float32)).to(dtype or f32)


@aten("eye", "eye.m")
def _eye(n: int, m: int | None = None, *, dtype: DType | None = None) -> Tensor:
    return F.eye(n, m, dtype or f32)


@aten("tril_indices")
def _tril_indices(row: int, col: int, offset: int = 0, *, dtype: DType | None = None) -> Tensor:
    return as_tensor(np.stack(np.tril_indices(row, offset, col)).astype(np.int32)).to(
        dtype or int32
    )


@aten("triu_indices")
def _triu_indices(row: int, col: int, offset: int = 0, *, dtype: DType | None = None) -> Tensor:
    return as_tensor(np.stack(np.triu_indices(row, offset, col)).astype(np.int32)).to(
        dtype or int32
    )


# -- the same values ------------------------------------------------------------------------------
def _same(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


aten("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "lift", "alias_copy",
     "detach_copy")(_same)  # fmt: skip
aten("detach")(stop_gradient)
rule("tessera.stop_gradient.default")(stop_gradient)  # of torch_export.py


@aten("_to_copy", "to.dtype")
def _to_copy(x: Tensor, dtype: DType | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if dtype is not None and dtype.is_int and x.dtype.is_float:
        x = F.trunc(x)
    return x != 0 if dtype is bool_ and x.dtype is not bool_ else of(x, dtype)


@aten("copy")
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return F.broadcast_to(_to_copy(source, x.dtype), x.shape)


@aten("view.dtype")
def _bits(x: Tensor, dtype: DType) -> Tensor:
    return F.bitcast(x, dtype)
