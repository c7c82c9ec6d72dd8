"""Trigonometric, hyperbolic and error functions, elementwise: `atan2`, `sinh`, `hypot`,
`erfinv`."""

from __future__ import annotations

import math

from ..record.operands import emit, matched
from ..value.tensor import Like, Tensor
from .elementwise import abs, as_float, exp, expm1, log, log1p, maximum, minimum, sqrt, where


def atan2(y: Like, x: Like) -> Tensor:
    """The angle of the point (`x`, `y`) in radians, from -pi to pi, elementwise. Shapes broadcast.
    Integers are computed as f32."""
    a, b = matched("atan2", y, x)
    return emit("atan2", as_float("atan2", a), as_float("atan2", b))


def atan(x: Like) -> Tensor:
    """The angle whose tangent is `x`, in radians, elementwise. Integers are computed as f32."""
    return atan2(as_float("atan", x), 1.0)


def asin(x: Like) -> Tensor:
    """The angle whose sine is `x`, in radians, elementwise: NaN below -1 and above 1. Integers are
    computed as f32."""
    t = as_float("asin", x)
    return atan2(t, _other_side(t))


def acos(x: Like) -> Tensor:
    """The angle whose cosine is `x`, in radians, elementwise: NaN below -1 and above 1. Integers
    are computed as f32."""
    t = as_float("acos", x)
    return atan2(_other_side(t), t)


def _other_side(t: Tensor) -> Tensor:
    """The cosine of an angle from its sine, or the reverse. `1 - t * t` would lose digits near
    one."""
    return sqrt(1.0 - t) * sqrt(1.0 + t)


def sinh(x: Like) -> Tensor:
    """`(exp(x) - exp(-x)) / 2`, elementwise, accurate for small `x` too. Integers are computed as
    f32."""
    t = as_float("sinh", x)
    near = where(abs(t) < 1.0, t, 0.0)
    far = _half_exp(t) - _half_exp(-t)
    return where(abs(t) < 1.0, (expm1(near) - expm1(-near)) * 0.5, far)


def cosh(x: Like) -> Tensor:
    """`(exp(x) + exp(-x)) / 2`, elementwise. Integers are computed as f32."""
    t = as_float("cosh", x)
    return _half_exp(t) + _half_exp(-t)


def _half_exp(t: Tensor) -> Tensor:
    """Half of `exp(t)`, without overflow of `exp(t)` itself."""
    root = exp(t * 0.5)
    return (root * 0.5) * root


def asinh(x: Like) -> Tensor:
    """The number whose `sinh` is `x`, elementwise. Integers are computed as f32."""
    t = as_float("asinh", x)
    size = where(t < 0, -t, t)  # its slope is 1 at zero, where that of abs is 0
    near = size < _large(t)
    small = where(near, size, 0.0)
    of_small = log1p(small + small * small / (1.0 + sqrt(small * small + 1.0)))
    found = where(near, of_small, _log_of_double(size, near))
    return where(t < 0, -found, found)


def _large(t: Tensor) -> float:
    """The limit up to which the square of `t` does not overflow; above it, 1 is negligible beside
    the square."""
    return 1e4 if t.dtype.bytes > 2 else 100.0


def _log_of_double(t: Tensor, none: Tensor) -> Tensor:
    """`log(2 t)`; any value where `none` is true."""
    return log(where(none, 1.0, t)) + math.log(2.0)


def acosh(x: Like) -> Tensor:
    """The number of at least 0 whose `cosh` is `x`, elementwise: NaN below 1. Integers are computed
    as f32."""
    t = as_float("acosh", x)
    near = t < _large(t)
    more = where(near, t, 2.0) - 1.0
    return where(near, log1p(more + sqrt(more) * sqrt(more + 2.0)), _log_of_double(t, near))


def atanh(x: Like) -> Tensor:
    """The number whose `tanh` is `x`, elementwise: NaN below -1 and above 1. Integers are computed
    as f32."""
    t = as_float("atanh", x)
    return (log1p(t) - log1p(-t)) * 0.5


def hypot(x: Like, y: Like) -> Tensor:
    """`sqrt(x * x + y * y)`, elementwise, without overflow. Shapes broadcast. Integers are computed
    as f32."""
    a, b = matched("hypot", x, y)
    a, b = abs(as_float("hypot", a)), abs(as_float("hypot", b))
    long, short = maximum(a, b), minimum(a, b)
    bounded = (long > 0) & (long < math.inf)
    ratio = where(bounded, short, 0.0) / where(bounded, long, 1.0)
    return where(bounded, long * sqrt(1.0 + ratio * ratio), long)


def erfc(x: Like) -> Tensor:
    """`1 - erf(x)`, elementwise, accurate for large `x` too. Integers are computed as f32."""
    return emit("erfc", as_float("erfc", x))


def erfinv(x: Like) -> Tensor:
    """The number whose `erf` is `x`, elementwise: NaN below -1 and above 1. Integers are computed
    as f32."""
    return emit("erfinv", as_float("erfinv", x))
