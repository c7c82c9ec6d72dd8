"""Rules for pooling and resizing of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ...core.dtypes import DType, f32, int32
from ...core.errors import UsageError
from ...lang.math import functions as F
from ...lang.record.operands import as_tensor
from ...lang.value.tensor import Tensor
from ...nn import pool as P
from .convolutions import windows
from .table import along, aten

Ints = Sequence[int]


def _each(values: Ints, rank: int) -> tuple[int, ...]:
    return tuple(values) * (rank if len(values) == 1 else 1)


def _batched(fn: Any, x: Tensor, rank: int) -> Any:
    """`fn(x)` for x [N, C, *sizes]; x [C, *sizes] gets a batch of one."""
    if x.ndim == rank + 2:
        return fn(x)
    found = fn(x.reshape((1, *x.shape)))
    return tuple(t[0] for t in found) if isinstance(found, tuple) else found[0]


def _more(n: int, k: int, s: int, p: int, d: int, ceil_mode: bool) -> int:
    """The number of elements after a dim that the last window of PyTorch's `ceil_mode` needs."""
    reach = d * (k - 1) + 1
    count = -(-(n + 2 * p - reach) // s) + 1
    if (count - 1) * s >= n + p:  # it would begin in the padding
        count -= 1
    return max(0, (count - 1) * s + reach - (n + 2 * p)) if ceil_mode else 0


# -- the largest of windows -----------------------------------------------------------------------
@aten("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices")
def _max_pool(
    x: Tensor, kernel_size: Ints, stride: Ints = (), padding: Ints = (0,), dilation: Ints = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rank = len(kernel_size) if len(kernel_size) > 1 else x.ndim - 2
    found: tuple[Tensor, Tensor] = _batched(
        lambda t: _largest(t, rank, kernel_size, stride, padding, dilation, ceil_mode), x, rank
    )
    return found


def _largest(
    x: Tensor, rank: int, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints,
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, s, p, d = (_each(v, rank) for v in (kernel_size, stride or kernel_size, padding, dilation))
    sizes = x.shape[2:]
    more = tuple(_more(*v, ceil_mode) for v in zip(sizes, k, s, p, d, strict=True))
    parts, _ = windows(x, k, s, p, d, _least(x.dtype), more)
    place = as_tensor(np.arange(math.prod(sizes), dtype=np.int32).reshape((1, 1, *sizes)))
    places, _ = windows(place, k, s, p, d, -1, more)
    stacked = F.stack(parts, -1)
    best = F.argmax(F.stop_gradient(stacked), -1, True)
    shape = (*parts[0].shape, 1)
    ids = F.gather(F.broadcast_to(F.stack(places, -1), stacked.shape), best, -1)
    return F.gather(stacked, best, -1).reshape(shape[:-1]), ids.reshape(shape[:-1])


def _least(dtype: DType) -> float:
    """The lowest number of `dtype`."""
    return -math.inf if dtype.is_float else int(np.iinfo(cast(Any, dtype.numpy)).min)


aten("max_pool1d", "max_pool2d", "max_pool3d")(lambda *a, **k: _max_pool(*a, **k)[0])


# -- the mean of windows --------------------------------------------------------------------------
@aten("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    x: Tensor, kernel_size: Ints, stride: Ints = (), padding: Ints = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    rank = len(kernel_size) if len(kernel_size) > 1 else x.ndim - 2
    k, s, p = (_each(v, rank) for v in (kernel_size, stride or kernel_size, padding))

    def run(t: Tensor) -> Tensor:
        sizes = t.shape[2:]
        more = tuple(_more(*v, 1, ceil_mode) for v in zip(sizes, k, s, p, strict=True))
        one = (1,) * rank
        parts, _ = windows(t.to(f32), k, s, p, one, 0.0, more)
        total = F.sum(F.stack(parts, 0), 0)
        if divisor_override:
            return (total * (1.0 / divisor_override)).to(t.dtype)
        edge = p if count_include_pad else (0,) * rank
        counts = np.ones((), np.float32)
        for n, kk, ss, pp, e, m in zip(sizes, k, s, p, edge, more, strict=True):
            first = np.arange((n + 2 * pp + m - kk) // ss + 1) * ss - pp
            last = np.minimum(first + kk, n + e)
            counts = counts[..., None] * (last - np.maximum(first, -e)).astype(np.float32)
        return (total * as_tensor((1.0 / counts).astype(np.float32))).to(t.dtype)

    found: Tensor = _batched(run, x, rank)
    return found


@aten("_adaptive_avg_pool2d", "adaptive_avg_pool2d")
def _adaptive_mean(x: Tensor, output_size: Ints) -> Tensor:
    found: Tensor = _batched(lambda t: P.adaptive_avg_pool2d(t, tuple(output_size)), x, 2)
    return found


@aten("adaptive_avg_pool1d")
def _adaptive_mean1d(x: Tensor, output_size: Ints) -> Tensor:
    found: Tensor = _batched(lambda t: P.adaptive_avg_pool1d(t, output_size[0]), x, 1)
    return found


@aten("_adaptive_avg_pool3d", "adaptive_avg_pool3d")
def _adaptive_mean3d(x: Tensor, output_size: Ints) -> Tensor:
    """The means of windows, dim by dim: a product with each dim's matrix of shares."""
    y = x.to(f32)
    for i, n in enumerate(output_size):
        d = x.ndim - 3 + i
        m = x.shape[d]
        at = np.arange(n)
        first, stop = at * m // n, -(-(at + 1) * m // n)
        inside = (np.arange(m) >= first[:, None]) & (np.arange(m) < stop[:, None])
        y = _by_matrix(y, d, inside / (stop - first)[:, None])
    return y.to(x.dtype)


def _by_matrix(x: Tensor, dim: int, matrix: np.ndarray[Any, Any]) -> Tensor:
    """`matrix` [new, old] applied along `dim`."""
    letters = "abcdefgh"[: x.ndim]
    to = letters.replace(letters[dim], "z")
    return F.einsum(f"z{letters[dim]},{letters}->{to}", as_tensor(matrix.astype(np.float32)), x)


# -- resizing -------------------------------------------------------------------------------------
def _sizes(x: Tensor, output_size: Ints | None, scales: Sequence[float] | None) -> list[int]:
    if output_size is not None:
        return list(output_size)
    return [int(n * s) for n, s in zip(x.shape[2:], scales or (), strict=True)]


def _step(old: int, new: int, scale: float | None, align: bool = False) -> float:
    """The distance of new pixels, in old ones."""
    if align:
        return (old - 1) / (new - 1) if new > 1 else 0.0
    return 1.0 / scale if scale else old / new


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _nearest(x: Tensor, output_size: Ints | None, scale_factors: Sequence[float] | None) -> Tensor:
    return _nearest_by(x, _sizes(x, output_size, scale_factors), *(scale_factors or ()))


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def _nearest_by(x: Tensor, output_size: Ints, *scales: float | None) -> Tensor:
    given = scales or (None,) * len(output_size)
    for d, (new, scale) in enumerate(zip(output_size, given, strict=True), 2):
        step = np.float32(_step(x.shape[d], new, scale))
        at = np.floor(np.arange(new, dtype=np.float32) * step).astype(np.int32)
        x = F.take(x, as_tensor(np.minimum(at, x.shape[d] - 1)), d)
    return x


@aten("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _linear(
    x: Tensor, output_size: Ints | None, align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Tensor:  # fmt: skip
    sizes = _sizes(x, output_size, scale_factors)
    return _linear_by(x, sizes, align_corners, *(scale_factors or ()))


@aten("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def _linear_by(x: Tensor, output_size: Ints, align_corners: bool, *scales: float | None) -> Tensor:
    y, given = x.to(f32), scales or (None,) * len(output_size)
    for d, (new, scale) in enumerate(zip(output_size, given, strict=True), 2):
        at = _centres(x.shape[d], new, scale, align_corners)
        at = np.maximum(at, 0.0)
        low = np.minimum(np.floor(at).astype(np.int32), x.shape[d] - 1)
        high = np.minimum(low + 1, x.shape[d] - 1)
        share = along(y, (at - low).astype(np.float32), d)
        first, second = F.take(y, as_tensor(low), d), F.take(y, as_tensor(high), d)
        y = first * (1.0 - share) + second * share
    return y.to(x.dtype)


def _centres(old: int, new: int, scale: float | None, align: bool) -> np.ndarray[Any, Any]:
    step, at = _step(old, new, scale, align), np.arange(new, dtype=np.float64)
    return at * step if align else (at + 0.5) * step - 0.5


@aten("upsample_bicubic2d.vec")
def _cubic(
    x: Tensor, output_size: Ints | None, align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Tensor:  # fmt: skip
    sizes = _sizes(x, output_size, scale_factors)
    return _cubic_by(x, sizes, align_corners, *(scale_factors or ()))


@aten("upsample_bicubic2d")
def _cubic_by(x: Tensor, output_size: Ints, align_corners: bool, *scales: float | None) -> Tensor:
    """Cubic convolution with a = -0.75 (Keys 1981), dim by dim."""
    y, given = x.to(f32), scales or (None,) * len(output_size)
    for d, (new, scale) in enumerate(zip(output_size, given, strict=True), 2):
        old = x.shape[d]
        at = _centres(old, new, scale, align_corners)
        low = np.floor(at).astype(np.int64)
        matrix = np.zeros((new, old))
        for k in range(-1, 3):
            apart = np.abs(at - (low + k))
            np.add.at(matrix, (np.arange(new), np.clip(low + k, 0, old - 1)), _keys(apart))
        y = _by_matrix(y, d, matrix)
    return y.to(x.dtype)


def _keys(t: np.ndarray[Any, Any], a: float = -0.75) -> np.ndarray[Any, Any]:
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


# -- values at points of images -------------------------------------------------------------------
@aten("grid_sampler_2d", "grid_sampler")
def _grid_sample(
    x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """x [N, C, H, W] at the points grid [N, h, w, 2], from -1 to 1; mode 0 is bilinear and 1
    nearest, padding 0 zeros, 1 the border, 2 mirrored."""
    if interpolation_mode == 2:
        raise UsageError(
            "grid_sample: mode 'bicubic' has no rule here", x=x.type, fix="use mode='bilinear'"
        )
    n, c, height, width = x.shape
    gx = _pixel(grid[..., 0].to(f32), width, padding_mode, align_corners)
    gy = _pixel(grid[..., 1].to(f32), height, padding_mode, align_corners)
    flat = x.reshape((n, c, height * width))

    def at(px: Tensor, py: Tensor) -> Tensor:
        inside = (px >= 0.0) & (px <= width - 1.0) & (py >= 0.0) & (py <= height - 1.0)
        ids = F.clip(py, 0.0, height - 1.0) * float(width) + F.clip(px, 0.0, width - 1.0)
        where = F.broadcast_to(ids.to(int32).reshape((n, 1, -1)), (n, c, math.prod(ids.shape[1:])))
        found = F.gather(flat, where, -1).reshape((n, c, *ids.shape[1:]))
        return F.where(inside.reshape((n, 1, *ids.shape[1:])), found, 0.0)

    if interpolation_mode == 1:
        return at(F.round(gx), F.round(gy))
    x0, y0 = F.floor(gx), F.floor(gy)
    fx, fy = (t.reshape((n, 1, *t.shape[1:])) for t in (gx - x0, gy - y0))
    top = at(x0, y0) * (1.0 - fx) + at(x0 + 1.0, y0) * fx
    low = at(x0, y0 + 1.0) * (1.0 - fx) + at(x0 + 1.0, y0 + 1.0) * fx
    return (top * (1.0 - fy) + low * fy).to(x.dtype)


def _pixel(g: Tensor, size: int, padding_mode: int, align: bool) -> Tensor:
    """Points from -1 to 1 as places of pixels, moved into the image as `padding_mode` says."""
    at = (g + 1.0) * ((size - 1) / 2) if align else ((g + 1.0) * float(size) - 1.0) * 0.5
    if padding_mode == 2:
        low, high = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
        span = high - low
        if span == 0.0:
            return at * 0.0
        off = F.abs(at - low) % (2 * span)
        at = F.minimum(off, 2 * span - off) + low
    return at if padding_mode == 0 else F.clip(at, 0.0, size - 1.0)
