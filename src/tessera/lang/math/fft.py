"""`ts.fft`: discrete Fourier transforms, in the conventions of NumPy.

A transformed dim that is split gives its axes to another dim, by one all_to_all: the transforms of
a grid run on pencils, and the result stays in the layout of the last one. Narrow floats are
computed in f32; f64 and complex128 keep their precision. Gradients are transforms too.

>>> import tessera as ts
>>> mesh = ts.dist.Mesh.parse("x=4")
>>> rows = [[float(i * j) for j in range(8)] for i in range(8)]
>>> grid = ts.tensor(rows, mesh=mesh, layout="[8@x, 8]")
>>> ts.fft.rfft2(grid).type
c64[8, 5@x]
>>> ts.fft.fft2(grid).type
c64[8, 8@x]
>>> round(ts.fft.ifft2(ts.fft.fft2(grid)).real[2, 3].item(), 4)
6.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ...core.checks import unfit, whole
from ...core.declared import Count, Integers, OneOf, Real
from ...core.errors import ShapeError, UsageError
from ...core.layout import Factor, dim_axes, shard_count
from ...core.public import public
from ...ops.fft import REAL_INPUT, REAL_OUTPUT, taker
from ..record.operands import as_tensor, emit
from ..value.tensor import Like, Tensor
from . import functions as F
from .complex_numbers import complex as of_parts
from .constants import zeros_like
from .shape import Dims, dims_of, one_dim, sliced

Norm = Annotated[str, OneOf("backward", "ortho", "forward")]


def _complex(x: Tensor) -> Tensor:
    t = x if x.dtype.is_complex else F.wide(x)
    return t if t.dtype.is_complex else of_parts(t, zeros_like(t))


def _sized(x: Tensor, dim: int, n: int) -> Tensor:
    """`x` with `n` elements along `dim`: cut, or filled with zeros behind."""
    have = x.shape[dim]
    if n <= have:
        return sliced(x, {dim: (0, n, 1)})
    shape = tuple(n if i == dim else k for i, k in enumerate(x.shape))
    return emit("pad", x, starts=(0,) * x.ndim, steps=(1,) * x.ndim, shape=shape)


def _even(x: Tensor, dim: int) -> Tensor:
    """`x` with `dim` whole, if it is split and its axes do not divide it or the dim that takes
    them. With zeros at the ends of both dims one all_to_all moves the blocks."""
    axes, to = dim_axes(x.type.dims[dim]), taker(x.type, dim)
    if not axes or to is None:
        return x
    sizes = {}
    for i, by in ((dim, axes), (to, (*dim_axes(x.type.dims[to]), *axes))):
        n = shard_count(by, x.type.sizes)
        sizes[i] = -(-x.shape[i] // n) * n
    if all(x.shape[i] == n for i, n in sizes.items()) or len(x.type.dims[dim]) > 1:
        return x
    t = x
    for i, n in sizes.items():
        t = _sized(t, i, n)
    dims = [*t.type.dims]
    dims[dim] = (Factor(t.shape[dim]),)
    dims[to] = (Factor(t.shape[to], (*dim_axes(dims[to]), *axes)),)
    t = F.relayout(t, t.type.with_dims(dims))
    return sliced(t, {i: (0, x.shape[i], 1) for i in sizes})


def _along(kind: str, x: Tensor, dim: int, n: int | None) -> Tensor:
    """The transform `kind` along one dim; `n` is the size of the side that is not transformed."""
    size = x.shape[dim]
    n = n or (2 * (size - 1) if kind == REAL_OUTPUT else size)
    if n < 1:
        raise ShapeError(
            f"{kind}: dim {dim} has no elements to transform", x=x.type, fix="give n=, from 1 on"
        )
    if kind == REAL_INPUT and x.dtype.is_complex:
        raise UsageError(f"{kind}: takes real numbers", x=x.type, fix="write ts.fft.fft")
    t = _even(F.wide(x) if kind == REAL_INPUT else _complex(x), dim)
    t = _sized(t, dim, n // 2 + 1 if kind == REAL_OUTPUT else n)
    return emit("fft", t, kind=kind, dim=dim, n=n)


def _scaled(x: Tensor, count: int, norm: str, inverse: bool) -> Tensor:
    """`x` with the factor of `norm`; the inverse transform divides by `count` by itself."""
    power = {"backward": 0.0, "ortho": 0.5, "forward": 1.0}[norm]
    by = float(count) ** (power if inverse else -power)
    return x if by == 1.0 else x * by


def _one(kind: str, x: Like, n: int | None, dim: int, norm: str) -> Tensor:
    t = as_tensor(x)
    d = one_dim(kind, t, dim)
    out = _along(kind, t, d, n)
    count = n or (out.shape[d] if kind != REAL_INPUT else t.shape[d])
    return _scaled(out, count, norm, kind in ("ifft", REAL_OUTPUT))


def _many(
    kind: str, x: Like, s: Sequence[int] | None, dim: Dims, norm: str, least: int = 1
) -> Tensor:
    """The transform over several dims. The real side of a real one is its last dim."""
    t = as_tensor(x)
    if dim is None and s is not None:
        dim = tuple(range(-len(s), 0))
    dims = _in_order(f"{kind}n", t, dim)
    if s is not None and len(s) != len(dims):
        raise ShapeError(
            f"{kind}n: {len(s)} sizes for {len(dims)} dims",
            x=t.type,
            fix="give s= a size for each dim of dim=",
        )
    if not dims and kind in (REAL_INPUT, REAL_OUTPUT):
        raise ShapeError(f"{kind}n: there is no dim to transform", x=t.type, fix="name one in dim=")
    for size in s or ():
        whole(f"{kind}n", "a size of s", size, 1)
    sizes: Sequence[int | None] = s if s is not None else [None] * len(dims)
    rows = list(zip(dims, sizes, strict=True))
    real, inverse = kind in (REAL_INPUT, REAL_OUTPUT), kind in ("ifft", REAL_OUTPUT)
    between = ("ifft" if inverse else "fft") if real else kind
    count = math.prod(n or t.shape[d] for d, n in rows)
    if kind == REAL_INPUT:
        t = _along(kind, t, *rows[-1])
    rest = rows[:-1] if real else rows
    # Whole dims first: the axes that a split dim gives away may go to one that is done.
    for d, n in sorted(rest, key=lambda row: bool(t.type.dims[row[0]][0].axes)):
        t = _along(between, t, d, n)
    if kind == REAL_OUTPUT:
        d, n = rows[-1]
        size = t.shape[d]
        t = _along(kind, t, d, n)
        count = count // (n or size) * t.shape[d]
    return _scaled(t, count, norm, inverse)


def _in_order(name: str, t: Tensor, dim: Dims) -> tuple[int, ...]:
    """The dims as they are named: of a real transform the last is halved."""
    whole = dims_of(name, t, dim)  # checks them
    if dim is None or isinstance(dim, int):
        return whole
    return tuple(d % t.ndim for d in dim)


def fft(x: Like, n: Count | None = None, dim: int = -1, norm: Norm = "backward") -> Tensor:
    """The Fourier transform along `dim`, complex, of the same size, or `n` after cutting or filling
    with zeros.

    `norm` "backward" divides the inverse by n, "forward" this one, "ortho" both by its root. Raises
    ShapeError if `x` has no such dim.
    """
    return _one("fft", x, n, dim, norm)


def ifft(x: Like, n: Count | None = None, dim: int = -1, norm: Norm = "backward") -> Tensor:
    """The inverse of `fft` along `dim`. Raises ShapeError if `x` has no such dim."""
    return _one("ifft", x, n, dim, norm)


def rfft(x: Like, n: Count | None = None, dim: int = -1, norm: Norm = "backward") -> Tensor:
    """The first n // 2 + 1 values of `fft` of a real `x`; the others are their conjugates. Raises
    UsageError if `x` is complex, ShapeError if it has no such dim."""
    return _one(REAL_INPUT, x, n, dim, norm)


def irfft(x: Like, n: Count | None = None, dim: int = -1, norm: Norm = "backward") -> Tensor:
    """The inverse of `rfft` along `dim`: `n` real numbers, by default 2 * (size - 1). Raises
    ShapeError if `x` has no such dim."""
    return _one(REAL_OUTPUT, x, n, dim, norm)


def fftn(x: Like, s: Integers | None = None, dim: Dims = None, norm: Norm = "backward") -> Tensor:
    """`fft` along each of `dim` (None: all, or the last ones if there are sizes `s`). Raises
    ShapeError if `x` has no such dim, or `s` another length; UsageError if a size is below 1."""
    return _many("fft", x, s, dim, norm)


def ifftn(x: Like, s: Integers | None = None, dim: Dims = None, norm: Norm = "backward") -> Tensor:
    """The inverse of `fftn`."""
    return _many("ifft", x, s, dim, norm)


def rfftn(x: Like, s: Integers | None = None, dim: Dims = None, norm: Norm = "backward") -> Tensor:
    """`fftn` of a real `x`, of which the last of `dim` keeps its first n // 2 + 1 values. Raises
    UsageError if `x` is complex."""
    return _many(REAL_INPUT, x, s, dim, norm)


def irfftn(x: Like, s: Integers | None = None, dim: Dims = None, norm: Norm = "backward") -> Tensor:
    """The inverse of `rfftn`; `s` has the sizes of its result."""
    return _many(REAL_OUTPUT, x, s, dim, norm)


def fft2(
    x: Like, s: Integers | None = None, dim: Dims = (-2, -1), norm: Norm = "backward"
) -> Tensor:
    """`fftn` along two dims, by default the last."""
    return _many("fft", x, s, dim, norm)


def ifft2(
    x: Like, s: Integers | None = None, dim: Dims = (-2, -1), norm: Norm = "backward"
) -> Tensor:
    """`ifftn` along two dims, by default the last."""
    return _many("ifft", x, s, dim, norm)


def rfft2(
    x: Like, s: Integers | None = None, dim: Dims = (-2, -1), norm: Norm = "backward"
) -> Tensor:
    """`rfftn` along two dims, by default the last."""
    return _many(REAL_INPUT, x, s, dim, norm)


def irfft2(
    x: Like, s: Integers | None = None, dim: Dims = (-2, -1), norm: Norm = "backward"
) -> Tensor:
    """`irfftn` along two dims, by default the last."""
    return _many(REAL_OUTPUT, x, s, dim, norm)


def _per_sample(caller: str, n: int, d: float) -> float:
    """The distance of two frequencies."""
    if not d:
        raise unfit(caller, "d", d, "give the distance of two samples, such as 0.1")
    return 1.0 / (n * d)


def fftfreq(n: Count, d: Real = 1.0) -> Tensor:
    """The frequency of each value of `fft`, in cycles per unit of the sample distance `d`: f32.
    Raises UsageError if `d` is 0."""
    each, first = _per_sample("fftfreq", n, d), F.arange((n + 1) // 2)
    return F.concat([first, F.arange(n // 2) - n // 2], 0).to("f32") * each


def rfftfreq(n: Count, d: Real = 1.0) -> Tensor:
    """The frequency of each value of `rfft`, in cycles per unit of the sample distance `d`: f32.
    Raises UsageError if `d` is 0."""
    return F.arange(n // 2 + 1).to("f32") * _per_sample("rfftfreq", n, d)


def fftshift(x: Like, dim: Dims = None) -> Tensor:
    """`x` with the value of frequency zero in the middle of each of `dim` (None: all)."""
    t = as_tensor(x)
    for d in dims_of("fftshift", t, dim):
        t = F.roll(t, t.shape[d] // 2, d)
    return t


def ifftshift(x: Like, dim: Dims = None) -> Tensor:
    """The inverse of `fftshift`."""
    t = as_tensor(x)
    for d in dims_of("ifftshift", t, dim):
        t = F.roll(t, -(t.shape[d] // 2), d)
    return t


__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "ifft", "ifft2", "ifftn", "ifftshift", "irfft",
    "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("ts.fft", globals())
