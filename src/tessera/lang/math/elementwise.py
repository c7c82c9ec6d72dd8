"""Elementwise functions: `exp`, `sqrt`, `maximum`, `where`, `clip` and others."""

from __future__ import annotations

import math
from typing import Annotated

from ...core.context import settings
from ...core.declared import Whole
from ...core.dtypes import bool_, f32
from ...core.errors import ShapeError, UsageError
from ..record.operands import as_tensor, binary, emit, matched
from ..value.tensor import Like, Tensor, method


def widened(x: Tensor) -> Tensor:
    """Returns a narrow float as f32 inside `ts.autocast`: for sums and for functions such as
    `exp`."""
    return wide(x) if settings().autocast is not None and x.dtype.is_float else x


def wide(x: Tensor) -> Tensor:
    """Returns `x` in f32, unless it is a float or complex number of 32 bits or more."""
    return x if x.dtype.is_float and x.dtype.bytes >= 4 else x.to(f32)


def as_float(name: str, x: Like) -> Tensor:
    """Returns `x`, converted to f32 if it is not a float."""
    t = as_tensor(x)
    return t if t.dtype.is_float else t.to(f32)


def exp(x: Like) -> Tensor:
    """e to the power of `x`, elementwise. Integers and bools are computed as f32."""
    return emit("exp", widened(as_float("exp", x)))


def log(x: Like) -> Tensor:
    """The natural logarithm, elementwise: NaN below 0, -inf at 0. Integers are computed as f32."""
    return emit("log", widened(as_float("log", x)))


def sqrt(x: Like) -> Tensor:
    """The square root, elementwise: NaN below 0. Integers are computed as f32."""
    return emit("sqrt", as_float("sqrt", x))


def rsqrt(x: Like) -> Tensor:
    """`1 / sqrt(x)`, elementwise: NaN below 0, inf at 0. Integers are computed as f32."""
    return emit("rsqrt", widened(as_float("rsqrt", x)))


def tanh(x: Like) -> Tensor:
    """The hyperbolic tangent, elementwise. Integers are computed as f32."""
    return emit("tanh", as_float("tanh", x))


def sigmoid(x: Like) -> Tensor:
    """`1 / (1 + exp(-x))`, elementwise. Integers are computed as f32."""
    return emit("sigmoid", as_float("sigmoid", x))


def sin(x: Like) -> Tensor:
    """The sine of `x` in radians, elementwise. Integers are computed as f32."""
    return emit("sin", as_float("sin", x))


def cos(x: Like) -> Tensor:
    """The cosine of `x` in radians, elementwise. Integers are computed as f32."""
    return emit("cos", as_float("cos", x))


def erf(x: Like) -> Tensor:
    """The error function `2/sqrt(pi) * integral of exp(-t*t) from 0 to x`, elementwise."""
    return emit("erf", as_float("erf", x))


def abs(x: Like) -> Tensor:
    """The absolute value, elementwise, in the dtype of `x`."""
    return emit("abs", as_tensor(x))


def sign(x: Like) -> Tensor:
    """-1, 0 or 1 by the sign of each element, in the dtype of `x`."""
    return emit("sign", as_tensor(x))


def log1p(x: Like) -> Tensor:
    """`log(1 + x)`, elementwise, accurate for small `x` too: NaN below -1, -inf at -1."""
    return emit("log1p", widened(as_float("log1p", x)))


def expm1(x: Like) -> Tensor:
    """`exp(x) - 1`, elementwise, accurate for small `x` too. Integers are computed as f32."""
    return emit("expm1", widened(as_float("expm1", x)))


def ceil(x: Like) -> Tensor:
    """The smallest whole number not below `x`, elementwise. Its gradient is zero."""
    return -floor(-as_float("ceil", x))


def floor(x: Like) -> Tensor:
    """The largest whole number not above `x`, elementwise. Its gradient is zero."""
    return emit("floor", as_float("floor", x))


def round(x: Like, decimals: Annotated[int, Whole(-38, 38)] = 0) -> Tensor:
    """The nearest whole number, or the nearest number with `decimals` decimal places, elementwise.

    Halves are rounded to the even neighbour. The gradient is zero. Raises UsageError if `decimals`
    is not from -38 to 38.
    """
    t = as_tensor(x)
    if decimals:
        x = wide(as_float("round", t))
        # 10.0**-n is inexact, so the reverse operation is used.
        by = 10.0 ** (decimals if decimals > 0 else -decimals)
        rounded = round(x * by) / by if decimals > 0 else round(x / by) * by
        return rounded.to(t.dtype) if t.dtype.is_float else rounded
    if not t.dtype.is_float:
        return t
    low = floor(t)
    fraction = t - low
    odd = low - floor(low * 0.5) * 2.0
    return where((fraction > 0.5) | ((fraction == 0.5) & (odd == 1.0)), low + 1.0, low)


@method("__round__")
def _rounded(x: Tensor, decimals: int | None = None) -> Tensor:
    return round(x, decimals or 0)


def isfinite(x: Like) -> Tensor:
    """True for each element that is neither infinite nor NaN."""
    return emit("isfinite", as_float("isfinite", x))


def isnan(x: Like) -> Tensor:
    """True for each element that is NaN, "not a number"."""
    t = as_float("isnan", x)
    return t != t


def isinf(x: Like) -> Tensor:
    """True for each element that is infinite, of either sign."""
    t = as_float("isinf", x)
    return (t == math.inf) | (t == -math.inf)


def stop_gradient(x: Like) -> Tensor:
    """Returns the same value as a constant: no gradient flows through it."""
    return emit("stop_gradient", as_tensor(x))


def save_for_backward(x: Like) -> Tensor:
    """Returns `x`; a loop that recomputes its body in the backward pass stores this value instead.

    Without it, `ts.scan` and `ts.map_chunks` with policy "recompute" compute the value a second
    time.
    """
    return emit("save_for_backward", as_tensor(x))


def straight_through(value: Tensor, path: Tensor) -> Tensor:
    """The value of `value` with the gradient of `path`, for example a straight-through estimator.

    Both have the same shape and dtype. Raises ShapeError if the shapes differ, DTypeError if the
    dtypes differ.
    """
    value, path = as_tensor(value), as_tensor(path)
    if value.shape != path.shape:
        raise ShapeError(
            "straight_through: value and path have different shapes",
            value=value.type,
            path=path.type,
            fix="give two expressions of one shape",
        )
    return emit("straight_through", value, path)


def maximum(x: Like, y: Like) -> Tensor:
    """The larger of `x` and `y`, elementwise, after broadcasting. A NaN in either gives NaN."""
    return binary("maximum", x, y)


def minimum(x: Like, y: Like) -> Tensor:
    """The smaller of `x` and `y`, elementwise, after broadcasting. A NaN in either gives NaN."""
    return binary("minimum", x, y)


def where(pick: Like, x: Like, y: Like) -> Tensor:
    """`x` where `pick` is true, else `y`, elementwise; the three are broadcast together.

    Raises ShapeError if the shapes do not broadcast.
    """
    a, b = matched("where", x, y)
    p = as_tensor(pick)
    return emit("where", p if p.dtype is bool_ else p != 0, a, b)


def clip(x: Like, min: Like | None = None, max: Like | None = None) -> Tensor:
    """`x` with elements below `min` replaced by `min`, and then elements above `max` by `max`.

    Both are numbers or tensors that broadcast with `x`; one of them may be None. Where `x` is
    within the bounds, or equals one, the gradient is that of `x`, as in PyTorch. A NaN in `x` or in
    a bound gives NaN. Raises UsageError if both are None.
    """
    if min is None and max is None:
        raise UsageError("clip: neither min nor max is given", fix="give one: ts.clip(x, min=0)")
    out = as_tensor(x)
    if min is not None:
        t, low = matched("clip", out, min)
        out = where((t < low) | isnan(low), low, t)
    if max is not None:
        t, high = matched("clip", out, max)
        out = where((t > high) | isnan(high), high, t)
    return out
