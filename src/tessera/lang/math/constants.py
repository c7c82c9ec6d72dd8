"""Constant and counting tensors: `full`, `zeros`, `ones`, `arange`, `linspace`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from ...core.checks import number, sizes, unfit
from ...core.declared import Natural
from ...core.dtypes import DType, adds_up_in, counts_to, dtype_of, f32, f64, int32, int64, uint64
from ...core.errors import DTypeError, UsageError, lines_up
from ...core.value_checks import is_whole
from ..record.operands import as_tensor, emit
from ..value.checks import fitting
from ..value.tensor import Tensor
from .elementwise import where


def full(shape: int | Sequence[int], value: float, dtype: object = f32) -> Tensor:
    """A tensor of `shape` filled with `value`.

    Raises DTypeError if `value` does not fit `dtype`, ShapeError if a size is negative.
    """
    want = dtype_of(dtype)
    return emit("full", dtype=want, shape=sizes("full", shape), value=fitting("full", value, want))


def zeros(shape: int | Sequence[int], dtype: object = f32) -> Tensor:
    """A tensor of `shape` filled with zeros."""
    return full(sizes("zeros", shape), 0, dtype)


def ones(shape: int | Sequence[int], dtype: object = f32) -> Tensor:
    """A tensor of `shape` filled with ones."""
    return full(sizes("ones", shape), 1, dtype)


def full_like(x: Tensor, value: float) -> Tensor:
    """A tensor with the shape, dtype and layout of `x`, filled with `value`."""
    t = as_tensor(x).type.complete()
    held = fitting("full_like", value, t.dtype)
    return emit("full", dtype=t.dtype, shape=t.shape, value=held, layout=t)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros with the shape, dtype and layout of `x`."""
    return full_like(x, 0)


def ones_like(x: Tensor) -> Tensor:
    """Ones with the shape, dtype and layout of `x`."""
    return full_like(x, 1)


# -- sequences of numbers -------------------------------------------------------------------------
def arange(start: float, stop: object = None, step: float = 1, dtype: object = None) -> Tensor:
    """The numbers `start`, `start + step`, ... before `stop`, as a tensor of one dim.

    `arange(n)` counts 0, 1, ..., `n` - 1. The dtype is int32 if all three are whole numbers, else
    f32. For fractions the count is `ceil((stop - start) / step)`, as in NumPy. Raises UsageError if
    `step` is 0, DTypeError if `dtype` does not hold the numbers.
    """
    if isinstance(stop, (DType, str, type)):
        stop, dtype = None, dtype_of(stop)
        warnings.warn(
            "arange(stop, dtype) is written arange(stop, dtype=...) now; the old way goes with the "
            "next version",
            DeprecationWarning,
            stacklevel=lines_up(),
        )
    first, end = (0, start) if stop is None else (start, stop)
    given = {"start": first, "stop": end, "step": step}
    first, end, by = (_finite("arange", k, v) for k, v in given.items())
    if not by:
        raise UsageError("arange: step cannot be 0", fix="give a number above or below 0")
    counts = (first, by) == (0, 1) and is_whole(end)
    count = end if counts else math.ceil((end - first) / by)
    if stop is not None:  # a step away from `stop` gives no elements, as in NumPy
        count = max(0, count)
    shape = sizes("arange", count)
    if not all(map(is_whole, given.values())):
        want = f32 if dtype is None else dtype_of(dtype)
        _of_floats("arange", want)
        return (emit("iota", dtype=adds_up_in(want), shape=shape, dim=0) * by + first).to(want)
    want = int32 if dtype is None else dtype_of(dtype)
    if (first, by) == (0, 1):
        return emit("iota", dtype=want, shape=shape, dim=0)
    counted = int64 if want in (f64, int64, uint64) else int32
    ends = (first, first + max(0, count - 1) * by)
    for n in ends:
        fitting("arange", n, want)
        fitting("arange", n, counted)
    if max(map(abs, ends)) > counts_to(want):
        raise DTypeError(
            f"arange: {want} does not hold every whole number up to {max(map(abs, ends))}",
            fix=f"count in i32, and cast where that is meant: .to('{want}')",
        )
    return (emit("iota", dtype=counted, shape=shape, dim=0) * by + first).to(want)


def linspace(start: float, end: float, steps: Natural, dtype: object = f32) -> Tensor:
    """`steps` numbers from `start` to `end`, both included, at equal distances: [steps].

    They are computed in f32, those of f64 in f64. (NumPy and JAX call `end` stop, and `steps` num.)
    Raises UsageError if `steps` is negative, DTypeError if `dtype` is not a float.
    """
    first, last = _finite("linspace", "start", start), _finite("linspace", "end", end)
    shape, want = sizes("linspace", steps), dtype_of(dtype)
    _of_floats("linspace", want)
    by = (last - first) / max(1, steps - 1)
    at = emit("iota", dtype=adds_up_in(want), shape=shape, dim=0)
    # Each half counts from its own end, so that both ends are exact.
    late = last - (max(1, steps) - 1 - at) * by
    return where(at < steps / 2, at * by + first, late).to(want)


def _finite(name: str, argument: str, value: object) -> float:
    x = number(name, argument, value)
    if isinstance(x, bool) or not math.isfinite(x):
        raise unfit(name, argument, value, "give a finite number")
    return x


def _of_floats(name: str, dtype: DType) -> None:
    if not dtype.is_float:
        raise DTypeError(
            f"{name}: fractions do not fit {dtype}",
            fix="make them in f32, and cast where rounding towards zero is meant: .to(ts.int32)",
        )
