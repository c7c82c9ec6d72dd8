"""Pooling: the maximum or the mean of windows of [N, C, L] and [N, C, H, W].

Batch and channels may be split, spatial dims are whole. A window of a fixed size is one op; for a
fixed number of windows (adaptive), their elements are first gathered side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from ..core.dtypes import f32
from ..core.errors import ShapeError, UsageError
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Like, Tensor
from .conv import Size, image, spatial, spatial_dims

FEW = 16  # the largest window that is one op
OutputSize = int | Sequence[int | None] | None


def _pool(
    name: str, kind: str, x: Like, size: Size, stride: Size | None, padding: Size
) -> tuple[Tensor, tuple[int, ...]]:
    """(maximum or sum of each window, sizes of the window)."""
    rank = spatial_dims(name)
    t = image(name, x, rank)
    t = F.wide(t) if kind == "sum" else t
    window = spatial(name, "kernel_size", size, rank, 1)
    strides = window if stride is None else spatial(name, "stride", stride, rank, 1)
    pads = spatial(name, "padding", padding, rank, 0)
    if any(2 * p > k for p, k in zip(pads, window, strict=True)):
        raise UsageError(
            f"{name}: padding {pads} is more than half of the window {window}",
            fix="use less, so that every window meets an element",
        )
    return _windows(t, kind, window, strides, pads), window


def _windows(
    t: Tensor, kind: str, size: Sequence[int], stride: Sequence[int], pads: Sequence[int]
) -> Tensor:
    """The maximum or the sum of each window. Large windows are reduced dim by dim, the last dim
    first, so that the gradient still goes to the first of equal elements. A sum over a whole image
    is one reduction."""
    rank = len(size)
    if kind == "sum" and t.shape[2:] == tuple(size) and not any(pads):
        return F.sum(t, tuple(range(2, 2 + rank)), keepdims=True)
    several = sum(k > 1 for k in size) > 1
    for block_dims in range(rank)[::-1] if several and math.prod(size) > FEW else [range(rank)]:
        dims = [block_dims] if isinstance(block_dims, int) else block_dims
        sizes, steps, edges = (
            tuple(v[d] if d in dims else plain for d in range(rank))
            for v, plain in ((size, 1), (stride, 1), (pads, 0))
        )
        t = emit("window", t, kind=kind, size=sizes, stride=steps,
                 pads=tuple((p, p) for p in edges))  # fmt: skip
    return t


def _mean_pool(name: str, x: Like, size: Size, stride: Size | None, padding: Size) -> Tensor:
    t = as_tensor(x)
    y, window = _pool(name, "sum", t, size, stride, padding)
    return (y * (1.0 / math.prod(window))).to(t.dtype if t.dtype.is_float else f32)


def max_pool1d(x: Like, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The maximum of each window of x [N, C, L]; otherwise as `max_pool2d`."""
    return _pool("max_pool1d", "max", x, kernel_size, stride, padding)[0]


def max_pool2d(x: Like, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The maximum of each window of x [N, C, H, W], at steps of `stride` (default: `kernel_size`).

    Padding is never chosen. The gradient goes to the first of equal elements. Raises ShapeError if
    x has another rank, UsageError if `padding` is more than half of the window.
    """
    return _pool("max_pool2d", "max", x, kernel_size, stride, padding)[0]


def avg_pool1d(x: Like, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The mean of each window of x [N, C, L]; otherwise as `avg_pool2d`."""
    return _mean_pool("avg_pool1d", x, kernel_size, stride, padding)


def avg_pool2d(x: Like, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The mean of each window of x [N, C, H, W], at steps of `stride` (default: `kernel_size`).

    Padding counts as zeros. Raises ShapeError if x has another rank, UsageError if `padding` is
    more than half of the window.
    """
    return _mean_pool("avg_pool2d", x, kernel_size, stride, padding)


# -- a given number of windows --------------------------------------------------------------------
def _adaptive(name: str, kind: str, x: Like, output_size: OutputSize) -> Tensor:
    """The maximum or the mean of `output_size` windows.

    Window i of n over m elements is that from floor(i m / n) to ceil((i + 1) m / n).
    """
    rank = spatial_dims(name)
    t = image(name, x, rank)
    if not all(t.shape[2:]):
        raise ShapeError(
            f"{name}: an image of no elements has no window", x=t.type, fix="leave it out"
        )
    wanted_sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * rank
    sizes = [m if n is None else n for n, m in zip_longest(wanted_sizes, t.shape[2:])]
    counts = spatial(name, "output_size", sizes, rank, 1)
    y, window, mean = F.wide(t) if kind == "sum" else t, [], kind == "sum"
    shares: list[Tensor] = []
    for d, (n, m) in enumerate(zip(counts, t.shape[2:], strict=True), 2):
        i = np.arange(n, dtype=np.int32)
        first, stop = (i * m // n)[:, None], (-(-(i + 1) * m // n))[:, None]
        most = int((stop - first).max())
        window.append(most)
        if n * most != m:  # else they lie side by side already
            # A shorter window repeats its last element for a maximum, and has zeros for a sum.
            at = first + np.arange(most, dtype=np.int32)
            at = np.where(at < stop, at, -1 if mean else stop - 1)
            y = F.take_or_zero(y, at.reshape(-1), d)
        share = np.float32(1.0) / (stop - first).astype(np.float32)
        shares.append(as_tensor(share.reshape(-1, *(1,) * (t.ndim - 1 - d))))
    y = _windows(y, kind, window, window, (0,) * rank)
    for part in shares if mean else ():
        y = y * part
    return y.to(t.dtype)


def adaptive_avg_pool1d(x: Like, output_size: OutputSize) -> Tensor:
    """The means of `output_size` windows over x [N, C, L]; otherwise as `adaptive_avg_pool2d`."""
    return _adaptive("adaptive_avg_pool1d", "sum", x, output_size)


def adaptive_avg_pool2d(x: Like, output_size: OutputSize) -> Tensor:
    """The means of `output_size` windows over x [N, C, H, W], of equal size as far as possible.

    Window i of n over m elements is that from floor(i m / n) to ceil((i + 1) m / n), as in PyTorch.
    `output_size` is a number or one for each dim; None is the dim's own size. Raises ShapeError if
    x has another rank or no elements, UsageError if `output_size` is no such number.
    """
    return _adaptive("adaptive_avg_pool2d", "sum", x, output_size)


def adaptive_max_pool1d(x: Like, output_size: OutputSize) -> Tensor:
    """The maxima of `output_size` windows over x [N, C, L]; otherwise as `adaptive_avg_pool2d`."""
    return _adaptive("adaptive_max_pool1d", "max", x, output_size)


def adaptive_max_pool2d(x: Like, output_size: OutputSize) -> Tensor:
    """The maxima of `output_size` windows over x [N, C, H, W]; otherwise as `adaptive_avg_pool2d`.
    The gradient goes to the first of equal elements."""
    return _adaptive("adaptive_max_pool2d", "max", x, output_size)
