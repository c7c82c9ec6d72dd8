"""Convolutions, norms over channels, resizing: images are [N, C, H, W], signals [N, C, L].

The batch may be split over devices, and so may channels; spatial dims are whole for ops along them.
The statistics of a batch norm are those of the whole batch, however it is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_lowercase

import numpy as np

from ..core.checks import MOST, divides, shown, unfit, whole
from ..core.declared import Count, Flag, Real
from ..core.dtypes import f32
from ..core.errors import ShapeError, UsageError
from ..core.tensor_checks import ranked, shaped
from ..core.value_checks import is_whole
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor, emit, matched
from ..lang.value.tensor import Like, Tensor

Size = int | Sequence[int]
Padding = int | Sequence[int] | str


def spatial(name: str, argument: str, value: object, rank: int, least: int) -> tuple[int, ...]:
    """One whole number for each spatial dim; a single number stands for all. Raises UsageError if
    `value` does not fit."""
    given = (value,) * rank if is_whole(value) else value
    if isinstance(given, (tuple, list)) and len(given) == rank:
        found = tuple(whole(name, argument, n, least) for n in given)
        if max(found) <= MOST:
            return found
    raise unfit(
        name, argument, value, f"give a whole number{f', or {rank} of them' if rank > 1 else ''}"
    )


def into_groups(name: str, groups: int, **counts: int) -> None:
    """Raises ShapeError if `groups` does not divide one of the named counts."""
    for what, count in counts.items():
        text = f"{{count}} {what} do not divide into {{parts}} groups"
        divides(name, count, groups, text, "give a number of groups that divides it")


def _pads(
    name: str, padding: object, kernel: Sequence[int], stride: Sequence[int], step: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Zeros before and after each spatial dim. Raises UsageError if `padding` does not fit."""
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * len(kernel)
        if padding == "same" and all(s == 1 for s in stride):
            ends = [(k - 1) * d for k, d in zip(kernel, step, strict=True)]
            return tuple((end // 2, end - end // 2) for end in ends)
        raise UsageError(
            f"{name}: padding {padding!r} with stride {tuple(stride)} is not known",
            fix='use "same" with a stride of 1, "valid", or whole numbers',
        )
    return tuple((p, p) for p in spatial(name, "padding", padding, len(kernel), 0))


def image(name: str, x: Like, rank: int) -> Tensor:
    """`x` as floats. Raises ShapeError unless it has `rank` spatial dims."""
    t = as_tensor(x)
    t = t if t.dtype.is_float else t.to(f32)
    sizes = ("length", "height, width", "depth, height, width")[rank - 1]
    ranked(name, "x", t.type, rank + 2, f"give [batch, channels, {sizes}]")
    return t


def spatial_dims(name: str) -> int:
    """The number of spatial dims of the function `name`: 2 for "conv2d"."""
    return int(name[-2])


def _conv(
    name: str, x: Like, weight: Like, bias: Like | None, stride: Size, padding: Padding,
    dilation: Size, groups: int,
) -> Tensor:  # fmt: skip
    """The convolution `name` as one op, with checked arguments, channels in groups, and the bias
    added."""
    rank = spatial_dims(name)
    t, w = F.narrowed(*matched(name, image(name, x, rank), image(name, weight, rank)))
    n, c, *sizes = t.shape
    outs, per, *kernel = w.shape
    if c != per * groups or outs % groups:
        raise ShapeError(
            f"{name}: {c} channels in {groups} groups do not fit the weight",
            x=t.type,
            weight=w.type,
            fix="the weight is [out, in / groups, *kernel], and groups divides out",
        )
    strides = spatial(name, "stride", stride, rank, 1)
    steps = spatial(name, "dilation", dilation, rank, 1)
    pads = _pads(name, padding, kernel, strides, steps)
    y = emit(
        "conv",
        t.reshape(n, groups, per, *sizes),
        w.reshape(groups, outs // groups, per, *kernel),
        stride=strides, pads=pads, dilation=steps, spread=(1,) * rank,
    )  # fmt: skip
    return _biased(name, y.reshape(n, outs, *y.shape[3:]), bias)


def _biased(name: str, y: Tensor, bias: Like | None) -> Tensor:
    if bias is None:
        return y
    return y + _channels(name, "bias", bias, y).to(y.dtype)


def _channels(name: str, argument: str, v: Like, x: Tensor) -> Tensor:
    """One value per channel, reshaped to broadcast over `x` [N, C, ...]."""
    t = as_tensor(v)
    shaped(name, argument, t.type, x.shape[1:2], x=x.type)
    return t.reshape(-1, *(1,) * (x.ndim - 2))


def conv1d(
    x: Like, weight: Like, bias: Like | None = None, stride: Size = 1, padding: Padding = 0,
    dilation: Size = 1, groups: Count = 1,
) -> Tensor:  # fmt: skip
    """The cross-correlation of x [N, C, L] with weight [O, C / groups, K]; otherwise as
    `conv2d`."""
    return _conv("conv1d", x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Like, weight: Like, bias: Like | None = None, stride: Size = 1, padding: Padding = 0,
    dilation: Size = 1, groups: Count = 1,
) -> Tensor:  # fmt: skip
    """The cross-correlation of x [N, C, H, W] with weight [O, C / groups, KH, KW], plus bias [O].

    `padding` is the number of zeros on each side, "valid" (none) or "same" (the output is as large
    as x; stride 1 only). `dilation` is the distance between neighbours in the kernel. Channels are
    in `groups` that do not mix. Inside `ts.autocast` it is computed in the narrow dtype. Raises
    ShapeError if the shapes or `groups` do not fit; UsageError if `stride`, `padding` or `dilation`
    is not a number that fits.
    """
    return _conv("conv2d", x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Like, weight: Like, bias: Like | None = None, stride: Size = 1, padding: Padding = 0,
    dilation: Size = 1, groups: Count = 1,
) -> Tensor:  # fmt: skip
    """The cross-correlation of x [N, C, D, H, W] with weight [O, C / groups, KD, KH, KW]; otherwise
    as `conv2d`."""
    return _conv("conv3d", x, weight, bias, stride, padding, dilation, groups)


def conv_transpose(
    name: str, x: Like, weight: Like, bias: Like | None, stride: Size, padding: Size,
    output_padding: Size, groups: int, dilation: Size,
) -> Tensor:  # fmt: skip
    """The transposed convolution `name`, of 1 to 3 spatial dims: a convolution of x with zeros
    between its elements and a flipped kernel."""
    rank = spatial_dims(name)
    t, w = F.narrowed(*matched(name, image(name, x, rank), image(name, weight, rank)))
    n, c, *sizes = t.shape
    ins, per, *kernel = w.shape
    if c != ins or c % groups:
        raise ShapeError(
            f"{name}: {c} channels in {groups} groups do not fit the weight",
            x=t.type,
            weight=w.type,
            fix="the weight is [in, out / groups, *kernel], and groups divides in",
        )
    strides = spatial(name, "stride", stride, rank, 1)
    steps = spatial(name, "dilation", dilation, rank, 1)
    cut = spatial(name, "padding", padding, rank, 0)
    more = spatial(name, "output_padding", output_padding, rank, 0)
    ends = [(k - 1) * d for k, d in zip(kernel, steps, strict=True)]
    for d in range(2, w.ndim):
        w = F.flip(w, d)
    y = emit(
        "conv",
        t.reshape(n, groups, c // groups, *sizes),
        w.reshape(groups, c // groups, per, *kernel).transpose(1, 2),
        stride=(1,) * rank,
        pads=tuple((e - p, e - p + m) for e, p, m in zip(ends, cut, more, strict=True)),
        dilation=steps,
        spread=strides,
    )
    return _biased(name, y.reshape(n, groups * per, *y.shape[3:]), bias)


def conv_transpose1d(
    x: Like, weight: Like, bias: Like | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, *, groups: Count = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """The transpose of `conv1d` as a linear map, of x [N, C, L] with weight [C, O / groups, K];
    otherwise as `conv_transpose2d`."""
    name = "conv_transpose1d"
    return conv_transpose(name, x, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(
    x: Like, weight: Like, bias: Like | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, *, groups: Count = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """The transpose of `conv2d` as a linear map, with weight [C, O / groups, KH, KW].

    Each pixel of x [N, C, H, W] adds its kernel to the output at steps of `stride` pixels.
    `output_padding` adds rows and columns at the end, since several output sizes have a `conv2d` of
    the same size. Raises ShapeError if the shapes or `groups` do not fit; UsageError if a setting
    is not a number that fits.
    """
    name = "conv_transpose2d"
    return conv_transpose(name, x, weight, bias, stride, padding, output_padding, groups, dilation)


# -- norms ----------------------------------------------------------------------------------------
def _normed(
    name: str, c: Tensor, variance: Tensor, eps: float, weight: Like | None, bias: Like | None
) -> Tensor:
    y = c * F.rsqrt(variance + eps)
    if weight is not None:
        y = y * _channels(name, "weight", weight, c).to(f32)
    return y if bias is None else y + _channels(name, "bias", bias, c).to(f32)


def _at_least(name: str, x: Like, rank: int) -> tuple[Tensor, Tensor]:
    """(`x` as floats, `x` in f32)."""
    t = as_tensor(x)
    ranked(name, "x", t.type, rank, "give [batch, channels, ...]", more=True)
    t = t if t.dtype.is_float else t.to(f32)
    return t, t.to(f32)


def batch_norm(
    x: Like,
    running: tuple[Tensor, Tensor],
    weight: Like | None = None,
    bias: Like | None = None,
    training: Flag = True,
    momentum: Real = 0.1,
    eps: Real = 1e-5,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns (x [N, C, ...] with zero mean and unit variance per channel, the new `running`).

    `running` is (mean, variance), [C] each. In training the statistics are those of the whole batch
    over all devices and microbatches (in an `op.kernel` those of one device's block), and `running`
    moves towards them by `momentum` (its variance towards the unbiased one). Otherwise they are
    `running`, which does not change (Ioffe & Szegedy 2015). Raises UsageError if `running` is not
    such a pair, or a training batch has one value per channel; ShapeError if a shape does not fit,
    or a training batch is empty.
    """
    name = "batch_norm"
    t, w = _at_least(name, x, 2)
    if not isinstance(running, (tuple, list)) or len(running) != 2:
        raise unfit(name, "running", running, "give (mean, variance), one value per channel each")
    mean, variance = (as_tensor(v) for v in running)
    old_mean, old_var = (_channels(name, "running", v, t) for v in (mean, variance))
    if not training:
        return _normed(name, w - old_mean, old_var, eps, weight, bias).to(t.dtype), (mean, variance)
    if not t.size:
        raise ShapeError(
            f"{name}: a batch without elements has no mean to train with",
            x=t.type,
            fix="leave the batch out, or pass training=False",
        )
    over = (0, *range(2, t.ndim))
    count = t.size // t.shape[1]
    if count == 1:
        raise UsageError(
            f"{name}: one value per channel has no variance to train with",
            x=t.type,
            fix="give more examples, leave the batch out, or pass training=False (model.eval())",
        )
    # Completed once here, because both the result and the running statistics need them.
    batch_mean = F.complete(F.mean(w, over, True))
    c = w - batch_mean
    spread = F.complete(F.mean(c * c, over, True))
    y = _normed(name, c, spread, eps, weight, bias).to(t.dtype)
    detached = [F.stop_gradient(v).reshape(t.shape[1]) for v in (batch_mean, spread)]
    detached[1] = detached[1] * (count / (count - 1))
    new_mean, new_var = (
        (v + momentum * (s - v)).to(v.dtype)
        for v, s in zip((mean, variance), detached, strict=True)
    )
    return y, (new_mean, new_var)


def group_norm(
    x: Like, groups: Count, weight: Like | None = None, bias: Like | None = None, eps: Real = 1e-5
) -> Tensor:
    """x [N, C, ...] with zero mean and unit variance per example and group of channels.

    One group per channel is an instance norm (Wu & He 2018). Raises ShapeError if `groups` does not
    divide C.
    """
    name = "group_norm"
    t, w = _at_least(name, x, 2)
    n, c = t.shape[:2]
    into_groups(name, groups, channels=c)
    parts = w.reshape(n, groups, math.prod(t.shape[1:]) // groups)
    parts = parts - F.mean(parts, -1, True)
    y = parts * F.rsqrt(F.mean(parts * parts, -1, True) + eps)
    y = y.reshape(t.shape)
    if weight is not None:
        y = y * _channels(name, "weight", weight, t).to(f32)
    if bias is not None:
        y = y + _channels(name, "bias", bias, t).to(f32)
    return y.to(t.dtype)


# -- resizing -------------------------------------------------------------------------------------
def interpolate(x: Like, size: Size, mode: str = "nearest") -> Tensor:
    """x [N, C, *sizes] resized to the spatial `size` by `mode`: "nearest", or "linear" per dim.

    "bilinear" is "linear" for images. Pixels are areas, as with `align_corners=False` in PyTorch.
    Raises ShapeError if x has no spatial dims, UsageError if `mode` is unknown for their number.
    """
    name = "interpolate"
    t = as_tensor(x)
    t = t if t.dtype.is_float else t.to(f32)
    ranked(name, "x", t.type, 3, "give [batch, channels, *sizes]", more=True)
    modes = ("nearest", "linear", *(("bilinear",) if t.ndim == 4 else ()))
    if not isinstance(mode, str) or mode not in modes:
        raise UsageError(
            f"{name}: mode {shown(mode)} is not known for {t.ndim - 2} spatial dims",
            fix='use "nearest" or "linear"; for images, "bilinear" is the same as "linear"',
        )
    for d, new in enumerate(spatial(name, "size", size, t.ndim - 2, 1), 2):
        old = t.shape[d]
        if new == old:
            continue
        if mode == "nearest":
            t = F.take_or_zero(t, np.arange(new) * old // new, d)
            continue
        # Each new pixel is a mean of two: a product with a matrix with two entries per row.
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        share = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old))).astype(np.float32)
        letters = ascii_lowercase[: t.ndim]
        out = letters.replace(letters[d], "Z")
        t = F.einsum(f"{letters},Z{letters[d]}->{out}", t, as_tensor(share, t.dtype))
    return t
