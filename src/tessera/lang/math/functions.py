"""The functions of `ts`: reductions are defined here, the others are imported from their
modules."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...core.checks import unfit
from ...core.declared import Flag, Real
from ...core.dtypes import bool_, int32, summed, uint8
from ...core.errors import LayoutError
from ...core.layout import TensorType, dim_axes
from ...core.reshard import gathered
from ..record.operands import as_tensor, binary, cast, emit
from ..value.host_data import is_array
from ..value.tensor import Like, Tensor, method
from .at import At as At
from .bitwise import (
    bitcast,
    bitwise_and,
    bitwise_left_shift,
    bitwise_not,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
)
from .complex_numbers import angle, complex, conj, imag, real
from .constants import arange, full, full_like, linspace, ones, ones_like, zeros, zeros_like
from .derived import count_nonzero, diff, logaddexp, meshgrid, nan_to_num, outer, tan, trunc
from .elementwise import (
    abs,
    ceil,
    clip,
    cos,
    erf,
    exp,
    expm1,
    floor,
    isfinite,
    isinf,
    isnan,
    log,
    log1p,
    maximum,
    minimum,
    round,
    rsqrt,
    save_for_backward,
    sigmoid,
    sign,
    sin,
    sqrt,
    straight_through,
    tanh,
    where,
)
from .elementwise import as_float as _float
from .elementwise import stop_gradient as stop_gradient
from .elementwise import wide as wide
from .elementwise import widened as widened
from .indexing import argmax, argmin, argsort, flip, gather, one_hot, scatter_add, sort, take, topk
from .indexing import gather_or_zero as gather_or_zero
from .indexing import take_or_zero as take_or_zero
from .matmul import broadcast_lead as broadcast_lead
from .matmul import einsum, matmul
from .matmul import narrowed as narrowed
from .matrices import diag, diagonal, eye, tril, triu
from .rearranging import flatten, pad, repeat_interleave, roll, squeeze, tile, unsqueeze
from .scatter import nonzero, scatter
from .shape import (
    Dims,
    along,
    broadcast_to,
    concat,
    dims_of,
    need_elements,
    permute,
    reshape,
    sliced,
    split,
    stack,
)
from .shape import swap as swap
from .subscript import getitem as getitem
from .trigonometry import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    cosh,
    erfc,
    erfinv,
    hypot,
    sinh,
)


# -- reductions -----------------------------------------------------------------------------------
def reduce(op: str, x: Like, dim: Dims = None, keepdims: bool = False) -> Tensor:
    t = as_tensor(x)
    if op in ("sum", "prod"):
        t = widened(t.to(summed(t.dtype)))
    dims = dims_of(op, t, dim)
    out = emit(op, t, dims=dims) if dims else t
    if keepdims:
        return reshape(out, tuple(1 if i in dims else n for i, n in enumerate(t.shape)))
    return out


@method("sum")
def sum(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The sum along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps the summed dims with size 1. Bools and integers of less than 32 bits are summed
    in int32, which wraps on overflow. Raises ShapeError if `x` has no such dim.
    """
    return reduce("sum", x, dim, keepdims)


@method("max")
def max(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The largest element along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps these dims with size 1. Raises ShapeError if one of them has no elements.
    """
    return _extreme("max", x, dim, keepdims)


@method("min")
def min(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The smallest element along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps these dims with size 1. Raises ShapeError if one of them has no elements.
    """
    return _extreme("min", x, dim, keepdims)


def _extreme(name: str, x: Like, dim: Dims, keepdims: bool) -> Tensor:
    if is_array(dim) or isinstance(dim, Tensor):
        raise unfit(name, "dim", dim, f"of two tensors write ts.{name}imum(x, y)")
    t = as_tensor(x)
    need_elements(name, t, dims_of(name, t, dim))
    return reduce(name, t, dim, keepdims)


def prod(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The product along `dim` (an int, several ints, or None for all dims).

    `keepdims` keeps these dims with size 1. Raises ShapeError if `x` has no such dim.
    """
    return reduce("prod", x, dim, keepdims)


@method("mean")
def mean(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The mean along `dim` (an int, several ints, or None for all dims), computed in f32.

    The result has the dtype of `x`, or f32 for integers and bools. `keepdims` keeps these dims with
    size 1. The mean of no elements is NaN. Raises ShapeError if `x` has no such dim.
    """
    t = widened(_float("mean", x))
    count = math.prod(t.shape[d] for d in dims_of("mean", t, dim))
    part = 1.0 / count if count else math.nan
    return (reduce("sum", wide(t), dim, keepdims) * part).to(t.dtype)


@method("var")
def var(x: Like, dim: Dims = None, *, keepdims: Flag = False, correction: Real = 0) -> Tensor:
    """The variance along `dim` (None: all dims): the sum of squares over `count - correction`.

    `correction` is 0 as in NumPy (PyTorch's default is 1). It is computed in f32; the result has
    the dtype of `x`, or f32 for integers. Raises ShapeError if `x` has no such dim.
    """
    t = widened(_float("var", x))
    dims = dims_of("var", t, dim)
    w = wide(t)
    d = w - mean(w, dims, True)
    count = math.prod(t.shape[i] for i in dims)
    rest = count - correction
    out = mean(abs(d) ** 2 if t.dtype.is_complex else d * d, dims, keepdims)
    out = out if rest == count else out * (count / rest if rest > 0 else math.nan)
    return out.to(t.dtype.real)


@method("std")
def std(x: Like, dim: Dims = None, *, keepdims: Flag = False, correction: Real = 0) -> Tensor:
    """The standard deviation along `dim` (None: all dims): the root of `var` with `correction`.

    `correction` is 0 as in NumPy (PyTorch's default is 1). Where the deviation is 0 its gradient is
    0, as in PyTorch. Raises ShapeError if `x` has no such dim.
    """
    dims = dims_of("std", as_tensor(x), dim)
    v = var(x, dims, keepdims=keepdims, correction=correction)
    none = v == 0.0
    return where(none, 0.0, sqrt(where(none, 1.0, v)))


@method("any")
def any(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """True where at least one element along `dim` (None: all dims) is true, or is not 0.

    `keepdims` keeps these dims with size 1. The result for no elements is False. Raises ShapeError
    if `x` has no such dim.
    """
    dims = dims_of("any", as_tensor(x), dim)
    return reduce("max", _truth(x).to(uint8), dims, keepdims) != 0


@method("all")
def all(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """True where all elements along `dim` (None: all dims) are true, or are not 0.

    `keepdims` keeps these dims with size 1. The result for no elements is True. Raises ShapeError
    if `x` has no such dim.
    """
    dims = dims_of("all", as_tensor(x), dim)
    return reduce("min", _truth(x).to(uint8), dims, keepdims) != 0


def _truth(x: Like) -> Tensor:
    t = as_tensor(x)
    return t if t.dtype is bool_ else t != 0


def logsumexp(x: Like, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """`log(sum(exp(x)))` along `dim` (None: all dims), computed in f32 without overflow."""
    t = widened(_float("logsumexp", x))
    return _logsumexp(wide(t), dims_of("logsumexp", t, dim), keepdims).to(t.dtype)


def _logsumexp(t: Tensor, dim: Dims, keepdims: bool) -> Tensor:
    top = stop_gradient(reduce("max", t, dim, True))
    top = where(isfinite(top), top, 0.0)  # else -inf - -inf would be NaN
    out = log(sum(exp(t - top), dim, True)) + top
    if keepdims:
        return out
    dims = dims_of("logsumexp", t, dim)
    return reshape(out, tuple(n for i, n in enumerate(t.shape) if i not in dims))


# -- layout ---------------------------------------------------------------------------------------
def complete(x: Tensor) -> Tensor:
    """Completes the partial sums of `x`."""
    return relayout(x, x.type.complete())


def relayout(x: Tensor, to: TensorType, algorithm: str = "") -> Tensor:
    """Redistributes `x` to the layout `to`. The collectives count as written by the user;
    `algorithm` is that of an all_to_all ("": the program's)."""
    if x.type is to:
        return x
    if to.shape != x.shape:
        raise LayoutError(
            f"redistribute: the layout has shape {to.shape}, the tensor {x.shape}",
            x=x.type,
            layout=to,
            fix="write the tensor's own sizes",
        )
    if to.mesh is None and x.mesh is not None:  # a layout without a mesh is one of x's mesh
        to = to.on(x.mesh)
        if to == x.type:
            return x
    return emit("redistribute", x, to=to, **({"algorithm": algorithm} if algorithm else {}))


# The public functions: `tessera` exports all of them.
__all__ = [
    "abs", "acos", "acosh", "all", "angle", "any", "arange", "argmax", "argmin", "argsort", "asin",
    "asinh", "atan", "atan2", "atanh", "bitcast", "bitwise_and", "bitwise_left_shift",
    "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "broadcast_to", "cast",
    "ceil", "clip", "complex", "concat", "conj", "cos", "cosh", "count_nonzero", "cummax",
    "cummin", "cumprod", "cumsum", "diag", "diagonal", "diff", "einsum", "erf", "erfc", "erfinv",
    "exp", "expm1", "eye", "flatten", "flip", "floor", "full", "full_like", "gather", "hypot",
    "imag", "isfinite", "isinf", "isnan", "linspace", "log", "log1p", "logaddexp", "logsumexp",
    "matmul", "max", "maximum", "mean", "meshgrid", "min", "minimum", "nan_to_num", "nonzero",
    "one_hot", "ones", "ones_like", "outer", "pad", "permute", "prod", "real", "repeat_interleave",
    "reshape", "roll", "round", "rsqrt", "save_for_backward", "scatter", "scatter_add", "sigmoid",
    "sign", "sin", "sinh", "sort", "split", "sqrt", "squeeze",
    "stack", "std", "straight_through", "sum", "take", "tan", "tanh", "tile", "topk", "tril",
    "triu", "trunc", "unsqueeze", "var", "where", "zeros", "zeros_like",
]  # fmt: skip


# Cumulative functions along a dim: `cumsum`, `cumprod`, `cummax`, `cummin`.


def cumsum(x: Like, dim: int = -1) -> Tensor:
    """The running sum along `dim`, each element included, in the shape of `x`.

    Raises ShapeError if `x` has no such dim.
    """
    t = as_tensor(x)
    t = widened(t.to(summed(t.dtype)))
    return along(lambda t, d: emit("cumsum", t, dim=d), "cumsum", t, dim)


def cumprod(x: Like, dim: int = -1) -> Tensor:
    """The running product along `dim`, each element included, in the shape of `x`.

    Bools and integers of less than 32 bits are multiplied in int32. Raises ShapeError if `x` has no
    such dim.
    """
    t = as_tensor(x)
    t = widened(t.to(summed(t.dtype)))
    return along(lambda t, d: running(lambda a, b: [a[0] * b[0]], [t], d)[0], "cumprod", t, dim)


def cummax(x: Like, dim: int = -1) -> tuple[Tensor, Tensor]:
    """(The largest element so far along `dim`, its int32 index): both in the shape of `x`.

    Of equal elements the index is that of the last one, as in PyTorch. After a NaN all elements are
    NaN. Raises ShapeError if `x` has no such dim.
    """
    return _running_extreme("cummax", "ge", x, dim)


def cummin(x: Like, dim: int = -1) -> tuple[Tensor, Tensor]:
    """(The smallest element so far along `dim`, its int32 index): both in the shape of `x`.

    Of equal elements the index is that of the last one, as in PyTorch. After a NaN all elements are
    NaN. Raises ShapeError if `x` has no such dim.
    """
    return _running_extreme("cummin", "le", x, dim)


def _running_extreme(name: str, beats: str, x: Like, dim: int) -> tuple[Tensor, Tensor]:
    t = as_tensor(x)

    def later(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        wins = binary(beats, b[0], a[0])
        wins = wins | (b[0] != b[0]) if t.dtype.is_float else wins
        return [where(wins, q, p) for p, q in zip(a, b, strict=True)]

    def place(t: Tensor, d: int) -> Tensor:
        shape = tuple(n if i == d else 1 for i, n in enumerate(t.shape))
        line = emit("broadcast_to", emit("iota", dtype=int32, shape=shape, dim=d), shape=t.shape)
        return running(later, [stop_gradient(t), line], d)[1]

    ids = along(place, name, t, dim)
    return (gather_or_zero(t, ids, dim) if t.ndim else t), ids


def running(
    join: Callable[[list[Tensor], list[Tensor]], list[Tensor]], xs: list[Tensor], dim: int
) -> list[Tensor]:
    """The associative scan of `xs` along `dim` by `join`, each element included: by doubling
    (Hillis & Steele 1986), in about log2 of the size steps."""
    xs = [_whole(x, dim) for x in xs]
    size, by = xs[0].shape[dim], 1
    while by < size:
        first = [sliced(x, {dim: (0, by, 1)}) for x in xs]
        before = [sliced(x, {dim: (0, size - by, 1)}) for x in xs]
        now = [sliced(x, {dim: (by, size, 1)}) for x in xs]
        joined = join(before, now)
        xs = [concat(pair, dim) for pair in zip(first, joined, strict=True)]
        by *= 2
    return xs


def _whole(x: Tensor, dim: int) -> Tensor:
    """Returns `x` complete, with `dim` not split, so that no step of the scan communicates."""
    to = gathered(x.type.complete(), dim_axes(x.type.dims[dim]))
    return x if to is x.type else emit("redistribute", x, to=to)
