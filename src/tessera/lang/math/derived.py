"""Functions composed of a few ops, as in NumPy and PyTorch: `diff`, `outer`, `meshgrid`, `tan`."""

from __future__ import annotations

import math

from ...core.checks import several
from ...core.declared import Natural, Real
from ...core.dtypes import int32, largest
from ...core.errors import UsageError
from ...core.tensor_checks import ranked
from ..record.operands import as_tensor, emit, matched, scalar
from ..value.tensor import Like, Tensor
from .elementwise import (
    abs,
    as_float,
    cos,
    floor,
    isfinite,
    isnan,
    log1p,
    maximum,
    sign,
    sin,
    where,
)
from .elementwise import exp as exp_of
from .matmul import einsum
from .shape import Dims, broadcast_to, dims_of, one_dim, reshape


def tan(x: Like) -> Tensor:
    """The tangent of `x` in radians, elementwise. Integers are computed as f32."""
    t = as_float("tan", x)
    return sin(t) / cos(t)


def trunc(x: Like) -> Tensor:
    """`x` without its fraction: the nearest whole number towards zero. Its gradient is zero."""
    t = as_tensor(x)
    return floor(abs(t)) * sign(t) if t.dtype.is_float else t


def nan_to_num(
    x: Like, nan: Real = 0.0, posinf: Real | None = None, neginf: Real | None = None
) -> Tensor:
    """`x` with `nan` for NaN, `posinf` and `neginf` for the infinities, elementwise.

    None: the largest and the lowest number of the dtype. Where an element is replaced the gradient
    is zero.
    """
    t = as_tensor(x)
    if not t.dtype.is_float:
        return t
    most = largest(t.dtype)
    up, down = most if posinf is None else posinf, -most if neginf is None else neginf
    infinite = where(t > 0, scalar(up, t.dtype), down)
    return where(isfinite(t), t, where(isnan(t), nan, infinite))


def logaddexp(x: Like, y: Like) -> Tensor:
    """`log(exp(x) + exp(y))`, elementwise, without overflow. Shapes broadcast."""
    a, b = matched("logaddexp", x, y)
    a, b = as_float("logaddexp", a), as_float("logaddexp", b)
    top, gap = maximum(a, b), abs(a - b)
    same = a == b  # two infinities: their difference is NaN
    return top + where(same, math.log(2.0), log1p(exp_of(-where(same, 0.0, gap))))


def outer(x: Like, y: Like) -> Tensor:
    """The products of all elements of `x` [n] with all of `y` [m]: [n, m]. Dims are flattened."""
    a, b = matched("outer", x, y)
    return einsum("i, j -> i j", reshape(a, (-1,)), reshape(b, (-1,)))


def diff(x: Like, n: Natural = 1, dim: int = -1) -> Tensor:
    """The difference of each element and the one before it along `dim`, taken `n` times.

    Raises ShapeError if `x` has no such dim, UsageError if `n` is below 0.
    """
    t = as_tensor(x)
    d = one_dim("diff", t, dim)
    for _ in range(n):
        size = t.shape[d]
        if size == 0:
            return t
        later = _between(t, d, 1, size)
        before = _between(t, d, 0, size - 1)
        t = later ^ before if t.dtype.kind == "bool" else later - before
    return t


def _between(t: Tensor, dim: int, start: int, stop: int) -> Tensor:
    starts, stops = [0] * t.ndim, list(t.shape)
    starts[dim], stops[dim] = start, stop
    return emit("slice", t, starts=tuple(starts), stops=tuple(stops), steps=(1,) * t.ndim)


def count_nonzero(x: Like, dim: Dims = None) -> Tensor:
    """The number of nonzero elements along `dim` (None: all dims), as int32.

    Raises ShapeError if `x` has no such dim.
    """
    t = as_tensor(x)
    dims = dims_of("count_nonzero", t, dim)
    some = (t if t.dtype.kind == "bool" else t != 0).to(int32)
    return emit("sum", some, dims=dims) if dims else some


def meshgrid(*xs: Like, indexing: str = "xy") -> tuple[Tensor, ...]:
    """The coordinates of all points of a grid whose axes are the vectors `xs`.

    `indexing` "ij" gives tensors [n0, n1, …]. "xy", as in NumPy, swaps the first two dims;
    PyTorch's default is "ij". Raises ShapeError if one of `xs` is not a vector, UsageError for
    another `indexing`.
    """
    if indexing not in ("xy", "ij"):
        raise UsageError(f"meshgrid: indexing cannot be {indexing!r}", fix='use "xy" or "ij"')
    ts = [as_tensor(x) for x in several("meshgrid", xs)]
    for t in ts:
        ranked("meshgrid", "x", t.type, 1, "give vectors, one for each axis")
    order = list(range(len(ts)))
    if indexing == "xy" and len(ts) > 1:
        order[:2] = [1, 0]
    shape = [0] * len(ts)
    for at, t in zip(order, ts, strict=True):
        shape[at] = t.shape[0]
    out = []
    for at, t in zip(order, ts, strict=True):
        line = [1] * len(ts)
        line[at] = t.shape[0]
        out.append(broadcast_to(reshape(t, line), shape))
    return tuple(out)
