"""The functions on tensors: those that are one op, or a few, and those of `shaping`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.checks import flag, number, sizes, whole
from ..core.context import settings
from ..core.dtypes import bool_, dtype_of, f32, int32, summed
from ..core.errors import LayoutError, ShapeError, fail
from ..core.layout import TensorType
from .checks import fitting
from .indexing import (
    argmax,
    argmin,
    argsort,
    flip,
    gather,
    one_hot,
    scatter_add,
    sort,
    take,
    topk,
)
from .indexing import gather_or_zero as gather_or_zero
from .indexing import take_or_zero as take_or_zero
from .matrices import diag, diagonal, eye, tril, triu
from .operands import as_tensor, binary, cast, emit, matched
from .products import broadcast_lead as broadcast_lead
from .products import einsum, matmul
from .products import narrowed as narrowed
from .shaping import (
    Dims,
    along,
    broadcast_to,
    concat,
    dims_of,
    need_some,
    permute,
    reshape,
    split,
    stack,
)
from .shaping import swap as swap
from .subscript import getitem as getitem
from .tensor import Like, Tensor, method


# -- elementwise ----------------------------------------------------------------------------------
def _float(name: str, x: Like) -> Tensor:
    t = as_tensor(x)
    return t if t.dtype.is_float else t.to(f32)


def exp(x: Like) -> Tensor:
    """e to the power of `x`, elementwise. Integers and bools are computed as f32."""
    return emit("exp", widened(_float("exp", x)))


def log(x: Like) -> Tensor:
    """The natural logarithm, elementwise: NaN below 0, -inf at 0. Integers are computed as f32."""
    return emit("log", widened(_float("log", x)))


def sqrt(x: Like) -> Tensor:
    """The square root, elementwise: NaN below 0. Integers are computed as f32."""
    return emit("sqrt", _float("sqrt", x))


def rsqrt(x: Like) -> Tensor:
    """`1 / sqrt(x)`, elementwise: NaN below 0, inf at 0. Integers are computed as f32."""
    return emit("rsqrt", widened(_float("rsqrt", x)))


def tanh(x: Like) -> Tensor:
    """The hyperbolic tangent, elementwise. Integers are computed as f32."""
    return emit("tanh", _float("tanh", x))


def sigmoid(x: Like) -> Tensor:
    """`1 / (1 + exp(-x))`, elementwise. Integers are computed as f32."""
    return emit("sigmoid", _float("sigmoid", x))


def sin(x: Like) -> Tensor:
    """The sine of `x` in radians, elementwise. Integers are computed as f32."""
    return emit("sin", _float("sin", x))


def cos(x: Like) -> Tensor:
    """The cosine of `x` in radians, elementwise. Integers are computed as f32."""
    return emit("cos", _float("cos", x))


def erf(x: Like) -> Tensor:
    """The error function `2/sqrt(pi) * integral of exp(-t*t) from 0 to x`, elementwise."""
    return emit("erf", _float("erf", x))


def abs(x: Like) -> Tensor:
    """The absolute value, elementwise, in the dtype of `x`."""
    return emit("abs", as_tensor(x))


def sign(x: Like) -> Tensor:
    """-1, 0 or 1 by the sign of each element, in the dtype of `x`."""
    return emit("sign", as_tensor(x))


def floor(x: Like) -> Tensor:
    """The largest whole number not above `x`, elementwise. Its gradient is zero."""
    return emit("floor", _float("floor", x))


def round(x: Like, decimals: int = 0) -> Tensor:
    """The nearest whole number, or the nearest number with `decimals` decimal places, elementwise.

    Halves are rounded to the even neighbour. The gradient is zero. Raises UsageError if `decimals`
    is not from -38 to 38.
    """
    t, places = as_tensor(x), whole("round", "decimals", decimals, -38, 38)
    if places:
        return round(_float("round", t) * 10.0**places) * 10.0**-places
    if not t.dtype.is_float:
        return t
    low = floor(t)
    rest = t - low
    odd = low - floor(low * 0.5) * 2.0
    return where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), low + 1.0, low)


@method("__round__")
def _rounded(x: Tensor, decimals: int | None = None) -> Tensor:
    return round(x, decimals or 0)


def isfinite(x: Like) -> Tensor:
    """True for each element that is neither infinite nor NaN."""
    return emit("isfinite", _float("isfinite", x))


def stop_gradient(x: Like) -> Tensor:
    """The same value, through which no gradient flows."""
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
        raise fail(
            ShapeError,
            "straight_through: value and path have different shapes",
            [("value", value.type), ("path", path.type)],
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


# -- reductions -----------------------------------------------------------------------------------
def widened(x: Tensor) -> Tensor:
    """Inside `ts.autocast`, a narrow float in f32: for sums and what grows without bound."""
    narrow = settings().autocast is not None and x.dtype.is_float and x.dtype is not f32
    return x.to(f32) if narrow else x


def reduce(op: str, x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    t = as_tensor(x)
    if op in ("sum", "prod"):
        t = widened(t.to(summed(t.dtype)))
    dims = dims_of(op, t, dim)
    out = emit(op, t, dims=dims) if dims else t
    if flag(op, "keepdims", keepdims):
        return reshape(out, tuple(1 if i in dims else n for i, n in enumerate(t.shape)))
    return out


@method("sum")
def sum(x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    """The sum along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps the summed dims with size 1. Bools and integers of less than 32 bits are summed
    in int32, which wraps on overflow. Raises ShapeError if `x` has no such dim.
    """
    return reduce("sum", x, dim, keepdims)


@method("max")
def max(x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    """The largest element along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps these dims with size 1. Raises ShapeError if one of them has no elements.
    """
    t = as_tensor(x)
    need_some("max", t, dims_of("max", t, dim))
    return reduce("max", t, dim, keepdims)


@method("min")
def min(x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    """The smallest element along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps these dims with size 1. Raises ShapeError if one of them has no elements.
    """
    t = as_tensor(x)
    need_some("min", t, dims_of("min", t, dim))
    return reduce("min", t, dim, keepdims)


def prod(x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    """The product along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps these dims with size 1. Raises ShapeError if `x` has no such dim.
    """
    return reduce("prod", x, dim, keepdims)


@method("mean")
def mean(x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    """The mean along `dim` (an int, several ints, or None for all dims), computed in f32.

    The result has the dtype of `x`, or f32 for integers and bools. `keepdims` keeps these dims with
    size 1. The mean of no elements is NaN. Raises ShapeError if `x` has no such dim.
    """
    t = widened(_float("mean", x))
    count = math.prod(t.shape[d] for d in dims_of("mean", t, dim))
    part = 1.0 / count if count else math.nan
    return (reduce("sum", t.to(f32), dim, keepdims) * part).to(t.dtype)


def var(x: Like, dim: Dims = None, keepdims: bool = False, correction: float = 0) -> Tensor:
    """The variance along `dim` (None: all dims): the sum of squares over `count - correction`.

    `correction` is 0 as in NumPy (PyTorch's default is 1). It is computed in f32; the result has
    the dtype of `x`, or f32 for integers. Raises ShapeError if `x` has no such dim.
    """
    t = widened(_float("var", x))
    w = t.to(f32)
    d = w - mean(w, dim, True)
    count = math.prod(t.shape[i] for i in dims_of("var", t, dim))
    rest = count - number("var", "correction", correction)
    out = mean(d * d, dim, keepdims)
    out = out if rest == count else out * (count / rest if rest > 0 else math.nan)
    return out.to(t.dtype)


def logsumexp(x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    """`log(sum(exp(x)))` along `dim` (None: all dims), computed in f32 without overflow."""
    t = widened(_float("logsumexp", x))
    return _logsumexp(t.to(f32), dim, keepdims).to(t.dtype)


def _logsumexp(t: Tensor, dim: Dims, keepdims: bool) -> Tensor:
    top = stop_gradient(reduce("max", t, dim, True))
    top = where(isfinite(top), top, 0.0)  # where all is -inf, so is the result
    out = log(sum(exp(t - top), dim, True)) + top
    if flag("logsumexp", "keepdims", keepdims):
        return out
    dims = dims_of("logsumexp", t, dim)
    return reshape(out, tuple(n for i, n in enumerate(t.shape) if i not in dims))


def cumsum(x: Like, dim: int = -1) -> Tensor:
    """The running sum along `dim`, each element included, in the shape of `x`.

    Raises ShapeError if `x` has no such dim.
    """
    t = as_tensor(x)
    t = widened(t.to(summed(t.dtype)))
    return along(lambda t, d: emit("cumsum", t, dim=d), "cumsum", t, dim)


# -- creation -------------------------------------------------------------------------------------
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


def zeros_like(x: Tensor) -> Tensor:
    """Zeros with the shape, dtype and layout of `x`."""
    t = as_tensor(x).type.complete()
    return emit("full", dtype=t.dtype, shape=t.shape, value=0, layout=t)


def arange(stop: int, dtype: object = int32) -> Tensor:
    """The whole numbers 0, 1, ..., `stop` - 1 as a tensor [stop]."""
    count = whole("arange", "stop", stop, 0)
    return emit("iota", dtype=dtype_of(dtype), shape=sizes("arange", count), dim=0)


# -- layout ---------------------------------------------------------------------------------------
def complete(x: Tensor) -> Tensor:
    """`x` with its partial sums completed."""
    return relayout(x, x.type.complete())


def relayout(x: Tensor, to: TensorType) -> Tensor:
    """`x` in the layout `to`, written by the user (not marked as inserted)."""
    if x.type is to:
        return x
    if to.shape != x.shape:
        raise fail(
            LayoutError,
            f"redistribute: the layout has shape {to.shape}, the tensor {x.shape}",
            [("x", x.type), ("layout", to)],
            fix="write the tensor's own sizes",
        )
    return emit("redistribute", x, to=to)


# What users call: `tessera` has all of these.
__all__ = [
    "abs", "arange", "argmax", "argmin", "argsort", "broadcast_to", "cast", "concat", "cos",
    "cumsum", "diag", "diagonal", "einsum", "erf", "exp", "eye", "flip", "floor", "full", "gather",
    "isfinite", "log", "logsumexp", "matmul", "max", "maximum", "mean", "min", "minimum", "one_hot",
    "ones", "permute", "prod", "reshape", "round", "rsqrt", "save_for_backward", "scatter_add",
    "sigmoid", "sign", "sin", "sort", "split", "sqrt", "stack", "straight_through", "sum", "take",
    "tanh", "topk", "tril", "triu", "var", "where", "zeros", "zeros_like",
]  # fmt: skip
