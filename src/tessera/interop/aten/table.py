"""The table of rules for PyTorch's ops, and what its files share: dtypes as PyTorch has them.

A rule has the parameters of the op's schema. Its operands are tensors of ours and Python numbers;
dtypes are ours: i32 for PyTorch's int64 and int16, f32 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import DType, bool_, f32, int32, uint8
from ...lang.foreign.rules import R, Rules
from ...lang.math import functions as F
from ...lang.record.operands import as_tensor, scalar
from ...lang.value.tensor import Tensor

ATEN = Rules("PyTorch")
rule = ATEN.rule
Number = bool | int | float
Operand = Tensor | Number


def aten(*names: str) -> Callable[[R], R]:
    """`rule` for ops of ATen: "add.Tensor", or "exp" for its overload "default"."""
    return rule(*(f"aten.{n}" if "." in n else f"aten.{n}.default" for n in names))


# -- dtypes ---------------------------------------------------------------------------------------
def joined(a: DType | None, b: DType | None) -> DType | None:
    """The dtype that holds values of both, as `torch.promote_types`; None stands for no operand."""
    if a is None or b is None or a is b:
        return b if a is None else a
    if a.is_float or b.is_float:
        return f32 if a.is_float and b.is_float else a if a.is_float else b
    return b if a is bool_ else a if b is bool_ else int32


def result_dtype(*xs: Operand) -> DType:
    """The dtype of a result of `xs`, as `torch.result_type`: of tensors with dims, unless scalars
    are of a higher kind, of scalars unless Python numbers are."""
    groups: list[DType | None] = [None, None, None]
    for x in xs:
        at = 2 if not isinstance(x, Tensor) else 1 if x.ndim == 0 else 0
        groups[at] = joined(groups[at], x.dtype if isinstance(x, Tensor) else kind_of(x))
    result = groups[0]
    for lower in groups[1:]:
        if result is None or (lower is not None and _level(lower) > _level(result)):
            result = joined(result, lower)
    return result or f32


def _level(dtype: DType) -> int:
    return 0 if dtype is bool_ else 2 if dtype.is_float else 1


def kind_of(number: object) -> DType:
    """PyTorch's dtype of a Python number."""
    return bool_ if isinstance(number, bool) else int32 if isinstance(number, int) else f32


def number(value: Operand, dtype: DType) -> Tensor:
    """A scalar of `dtype`. A float beyond the dtype is infinite, as in PyTorch."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    if dtype.is_float:
        with np.errstate(over="ignore"):
            value = float(np.asarray(value, dtype.numpy))
    elif isinstance(value, float):
        value = bool(value) if dtype is bool_ else int(value)
    return scalar(bool(value) if dtype is bool_ else value, dtype)


def cast_all(*xs: Operand, dtype: DType | None = None) -> list[Tensor]:
    """The operands as tensors of `dtype`, by default of their `result_dtype`."""
    dtype = result_dtype(*xs) if dtype is None else dtype
    return [number(x, dtype) for x in xs]


def floats(*xs: Operand) -> list[Tensor]:
    """The operands as tensors of one float dtype; whole numbers become f32."""
    dtype = result_dtype(*xs)
    return cast_all(*xs, dtype=dtype if dtype.is_float else f32)


def as_float(x: Tensor) -> Tensor:
    return x if x.dtype.is_float else x.to(f32)


def truth(x: Operand) -> Tensor:
    """True where `x` is not 0."""
    t = as_tensor(x)
    return t if t.dtype is bool_ else t != 0


def unless_bool(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`fn`, computed in u8 for bools."""
    return lambda x: fn(x.to(uint8)).to(bool_) if x.dtype is bool_ else fn(x)


def of(x: Tensor, dtype: DType | None) -> Tensor:
    """`x` in `dtype`, if one is given."""
    return x if dtype is None else x.to(dtype)


# -- shapes ---------------------------------------------------------------------------------------
def dims_of(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The dims that `dim` names, counted from 0, in order; all for None and an empty list. A scalar
    has none, though PyTorch lets 0 and -1 name one."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(x.ndim))
    given = [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted(d % x.ndim for d in given)) if x.ndim else ()


def in_dim(fn: Callable[[Tensor, int], Any], x: Tensor, dim: int) -> Any:
    """`fn(x, dim)`, which takes a dim; a scalar is a vector of one element for it."""
    if x.ndim:
        return fn(x, dim % x.ndim)
    found = fn(x.reshape(1), 0)
    if isinstance(found, tuple):
        return tuple(t.reshape(()) for t in found)
    return found.reshape(())


def along(x: Tensor, values: Sequence[float] | np.ndarray[Any, Any], dim: int) -> Tensor:
    """A constant vector along `dim`, as it broadcasts to `x`."""
    return as_tensor(np.asarray(values)).reshape((-1, *(1,) * (x.ndim - 1 - dim)))


def cut(x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """The elements from `start` to `stop` of `dim`."""
    dim %= x.ndim
    return x[(*(slice(None),) * dim, slice(start, stop, step))]


def line(size: int) -> Tensor:
    """0 to `size - 1`."""
    return F.arange(size, dtype=int32)
