"""Rules for convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ...lang.math import functions as F
from ...lang.value.tensor import Tensor
from ...nn import conv as C
from .table import aten

CONV = {1: C.conv1d, 2: C.conv2d, 3: C.conv3d}
TRANSPOSED = {d: partial(C.conv_transpose, f"conv_transpose{d}d") for d in (1, 2, 3)}
Ints = Sequence[int]


@aten("convolution", "_convolution")
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool, output_padding: Ints, groups: int, *flags: bool,
) -> Tensor:  # fmt: skip
    rank = weight.ndim - 2
    stride, padding, dilation, more = (
        tuple(v) * (rank if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    if x.ndim == rank + 1:  # without a batch
        return _convolution(
            x.reshape((1, *x.shape)), weight, bias, stride, padding, dilation, transposed, more,
            groups,
        )[0]  # fmt: skip
    if not transposed:
        return CONV[rank](x, weight, bias, stride, padding, dilation, groups)
    return TRANSPOSED[rank](x, weight, bias, stride, padding, more, groups, dilation)


def _of_rank(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = (1,),
    padding: Ints | str = (0,), dilation: Ints = (1,), groups: int = 1,
) -> Tensor:  # fmt: skip
    if isinstance(padding, str):
        rank = weight.ndim - 2
        steps = [tuple(v) * (rank if len(v) == 1 else 1) for v in (stride, dilation)]
        return CONV[rank](x, weight, bias, steps[0], padding, steps[1], groups)
    return _convolution(x, weight, bias, stride, padding, dilation, False, (0,), groups)


aten("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")(_of_rank)


@aten("im2col")
def _im2col(x: Tensor, kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Tensor:
    """Windows [N, C * KH * KW, L] of images [N, C, H, W]."""
    if x.ndim == 3:
        return _im2col(x.reshape((1, *x.shape)), kernel_size, dilation, padding, stride)[0]
    parts, sizes = windows(x, kernel_size, stride, padding, dilation, 0.0)
    n, c = x.shape[:2]
    count = math.prod(sizes)
    stacked = F.stack([p.reshape((n, c, count)) for p in parts], 2)
    return stacked.reshape((n, c * len(parts), count))


def windows(
    x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, value: float,
    more: Ints = (),
) -> tuple[list[Tensor], list[int]]:  # fmt: skip
    """For each place in the window, the elements there of all windows of x [N, C, *sizes], and the
    sizes of these. `more` are further elements after each dim, of `value` as the padding."""
    rank = len(kernel)
    more = more or (0,) * rank
    pad = [n for d in range(rank)[::-1] for n in (padding[d], padding[d] + more[d])]
    y = F.pad(x, pad, value=value) if any(pad) else x
    sizes = [
        (y.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(rank)
    ]
    places: list[tuple[int, ...]] = [()]
    for k in kernel:
        places = [(*p, i) for p in places for i in range(k)]
    cuts = [
        tuple(
            slice(i * dilation[d], i * dilation[d] + (sizes[d] - 1) * stride[d] + 1, stride[d])
            for d, i in enumerate(place)
        )
        for place in places
    ]
    return [y[(slice(None), slice(None), *c)] for c in cuts], sizes
