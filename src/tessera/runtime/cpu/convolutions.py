"""Convolutions in the engine, with channels last, and faster forms of them for CPUs.

The CPU library that computes one is chosen in runtime/compile_options.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..devices import platform
from .pooling_windows import in_memory

Array = Any
Convolution = Callable[[Array, Array], Array]
# The convolution of a weight gradient has an image as its kernel, and sums over the batch. For
# kernels of PLACES and more places a CPU is up to twice as fast with IMAGES images at a time; with
# a multiple of IMAGES if the program would have more than PARTS parts.
PLACES, IMAGES, PARTS = 64, 16, 8
TERMS = 128  # most terms of a convolution written as a sum
CHANNELS = 32  # of a bundle of groups: beyond, the products with zeros cost more than more calls


def conv(x: Array, w: Array, *how: Any) -> Array:
    """Returns the convolution of x [N, groups, in, *sizes] with w [groups, out, in, *kernel].
    Operands that are already channels-last in memory (passes/channels_last.py) are not copied.
    `how` is the stride, padding, kernel dilation and input dilation of the op."""
    x = lax.transpose(x, (0, *range(3, x.ndim), 1, 2))
    w = lax.transpose(w, (*range(3, w.ndim), 2, 0, 1))
    made = partial(_last, how)
    own = _for_cpu(how, made, x.shape, w.shape)
    if own is None:
        out = made(x, w)
    else:
        dtype = _sums(x) or x.dtype
        on_cpu = partial(_as, dtype, own)  # both give the same type
        out = lax.platform_dependent(x, w, cpu=on_cpu, default=made)
    return lax.transpose(out, (0, out.ndim - 2, out.ndim - 1, *range(1, out.ndim - 2)))


def _as(dtype: Any, convolve: Convolution, x: Array, w: Array) -> Array:
    return convolve(x, w).astype(dtype)


def _for_cpu(
    how: Sequence[Any], convolve: Convolution, x: Sequence[int], w: Sequence[int]
) -> Convolution | None:
    """Returns a function that is faster on a CPU than one call of its library; None if none is
    known."""
    groups, places, made_places = w[-2], math.prod(w[:-3]), math.prod(_sizes(how, x, w))
    of_weight = _of_weight(how, x, w)
    if groups == 1 and places == 1:
        return partial(_by_product, how)
    if groups == 1 and made_places == 1:
        return partial(_of_whole_images, how, of_weight)
    if groups > 1 and x[-1] == 1 and not of_weight:
        return _in_f32(partial(_by_place_of_kernel, how)) if places <= TERMS else None
    if groups > 1 and x[0] == 1 and of_weight and made_places <= TERMS:
        return _in_f32(partial(_by_place_of_result, how))
    if of_weight and (parts := _parts(x[-1])) > 1:
        convolve = partial(_in_parts, parts, convolve)
    elif groups == 1:
        return None
    if groups == 1:
        return convolve
    most = max(x[0], w[-1]) if of_weight else max(x[-1], w[-1])
    together = max(
        k for k in range(1, groups + 1) if groups % k == 0 and (k == 1 or k * most <= CHANNELS)
    )
    return partial(_in_bundles, _all_pairs if of_weight else _with_zeros, together, convolve)


def _of_weight(how: Sequence[Any], x: Sequence[int], w: Sequence[int]) -> bool:
    places = math.prod(w[:-3])
    return places >= PLACES and places > math.prod(_sizes(how, x, w))


def _in_f32(convolve: Convolution) -> Convolution:
    def run(x: Array, w: Array) -> Array:
        return convolve(*(v.astype(jnp.float32) if v.dtype.itemsize < 4 else v for v in (x, w)))

    return run


def _sizes(how: Sequence[Any], x: Sequence[int], w: Sequence[int]) -> list[int]:
    """Returns the sizes of the result of x [N, *sizes, groups, in] and w [*kernel, in, groups,
    out]."""
    return [
        ((n - 1) * spread + low + high - (k - 1) * dilation) // stride + 1
        for n, k, stride, (low, high), dilation, spread in zip(x[1:-2], w[:-3], *how, strict=True)
    ]


def _around(how: Sequence[Any], x: Array) -> Array:
    """Returns `x` dilated and padded."""
    rows = [(low, high, spread - 1) for (low, high), spread in zip(how[1], how[3], strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *rows, (0, 0, 0), (0, 0, 0)])


def _by_product(how: Sequence[Any], x: Array, w: Array) -> Array:
    """Returns the convolution with a kernel of one place, as a matrix product."""
    stride = how[0]
    if any(s > 1 for s in stride):
        x, how = _cut(_around(how, x), [0] * len(stride), _sizes(how, x.shape, w.shape), stride), ()
    y = _dot(x, w, (x.ndim - 1,), (w.ndim - 3,))
    y = y.reshape(*x.shape[:-2], *w.shape[-2:])
    return _around(how, y) if how else y


def _of_whole_images(how: Sequence[Any], of_weight: bool, x: Array, w: Array) -> Array:
    """A result of one place, as one sum over places and channels.

    This includes the weight gradient of a kernel of one place, where w is the gradient of the
    result. Its operands lie in memory by images, places and channels: the summed dims are merged
    into one, since for several dims the compiler would write a copy in their order, and recompute x
    for it.
    """
    dilation = how[2]
    x = _cut(_around(how, x), [0] * len(dilation), w.shape[:-3], dilation)
    images, last = x.shape[0], x.ndim - 1
    if of_weight:
        x = lax.transpose(x, (last, *range(1, last), 0)).reshape(-1, images)
        w = lax.transpose(w, (last - 2, *range(last - 2), last - 1, last))
        y = _dot(x, w.reshape(-1, w.shape[-1]), (0,), (0,))
    else:
        y = _dot(x, w, (*range(1, last - 1), last), tuple(range(last - 1)))
    return y.reshape(images, *(1 for _ in dilation), 1, y.shape[-1])


def _dot(x: Array, w: Array, of_x: Sequence[int], of_w: Sequence[int]) -> Array:
    wide = jnp.float32 if x.dtype.itemsize < 4 else None
    return lax.dot_general(x, w, ((of_x, of_w), ((), ())), preferred_element_type=wide)


def _by_place_of_kernel(how: Sequence[Any], x: Array, w: Array) -> Array:
    """Returns the convolution of groups of one channel: for each place of the kernel, the shifted x
    times its weights, summed."""
    sizes = _sizes(how, x.shape, w.shape)
    stride, _, dilation, _ = how
    places = list(itertools.product(*map(range, w.shape[:-3])))

    def convolve(x: Array) -> Array:
        around = _around(how, x)
        starts = ([p * d for p, d in zip(place, dilation, strict=True)] for place in places)
        parts = (_cut(around, start, sizes, stride) for start in starts)
        return reduce(add, (part * w[place] for place, part in zip(places, parts, strict=True)))

    return in_memory(convolve, x)


def _by_place_of_result(how: Sequence[Any], x: Array, w: Array) -> Array:
    """Returns the weight gradient of such groups, where w is the gradient of the result: for each
    place of the kernel, the shifted x times that gradient, summed over images and then over their
    places."""
    sizes = _sizes(how, x.shape, w.shape)
    stride, _, dilation, _ = how
    places = list(itertools.product(*map(range, sizes)))
    kernel = w.shape[:-3]

    def convolve(operands: tuple[Array, Array]) -> Array:
        around = _around(how, operands[0])
        starts = ([p * s for p, s in zip(place, stride, strict=True)] for place in places)
        parts = (_cut(around, start, kernel, dilation) for start in starts)
        return jnp.stack([jnp.sum(part * operands[1], 0) for part in parts])

    # A loop, which stores its results, for the reason given at `in_memory`.
    loops = next((k for k in range(2, x.shape[-1] + 1) if x.shape[-1] % k == 0), 1)
    images = lax.transpose(x, (x.ndim - 1, *range(1, x.ndim - 1), 0))
    grads = lax.transpose(w, (w.ndim - 3, *range(w.ndim - 3), w.ndim - 2, w.ndim - 1))
    some = [v.reshape(loops, v.shape[0] // loops, *v.shape[1:]) for v in (images, grads)]
    whole = reduce(add, lax.map(convolve, tuple(some)))
    return jnp.sum(whole.reshape(len(places), math.prod(kernel), -1), 1).reshape(
        1, *sizes, *w.shape[-2:]
    )


def _cut(x: Array, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> Array:
    """Returns `counts` elements of each dim of [N, *sizes, ...] from `starts` on, in `steps`."""
    rows = zip(starts, counts, steps, strict=True)
    return x[(slice(None), *(slice(s, s + (n - 1) * k + 1, k) for s, n, k in rows))]


def _in_bundles(
    bundle: Callable[..., Array], together: int, convolve: Convolution, x: Array, w: Array
) -> Array:
    """Groups in bundles of `together` groups, each computed as one convolution without groups."""
    count = w.shape[-2] // together
    each = zip(jnp.split(x, count, -2), jnp.split(w, count, -2), strict=True)
    return jnp.concatenate([bundle(convolve, *part) for part in each], -2)


def _with_zeros(convolve: Convolution, x: Array, w: Array) -> Array:
    """Dense weights with zeros between channels of different groups. An infinite value in one group
    makes the results of its whole bundle NaN."""
    groups, out = w.shape[-2:]
    same = jnp.eye(groups, dtype=bool)[:, None, :, None]
    apart = jnp.moveaxis(w, -2, -3)[..., None, :]  # [*kernel, groups, in, groups, out]
    apart = jnp.where(same, apart, jnp.zeros((), w.dtype))
    y = convolve(x.reshape(*x.shape[:-2], 1, -1), apart.reshape(*w.shape[:-3], -1, 1, groups * out))
    return y.reshape(*y.shape[:-2], groups, out)


def _all_pairs(convolve: Convolution, x: Array, w: Array) -> Array:
    """Returns the weight gradient, where x is a batch of channels: all pairs of groups are
    computed, and the pairs of equal groups returned."""
    groups, out = w.shape[-2:]
    rows = jnp.moveaxis(x, -2, 0).reshape(-1, *x.shape[1:-2], 1, x.shape[-1])
    y = convolve(rows, w.reshape(*w.shape[:-2], 1, groups * out))
    pairs = y.reshape(groups, x.shape[0], *y.shape[1:-2], groups, out)
    return jnp.moveaxis(jnp.diagonal(pairs, axis1=0, axis2=-2), -1, -2)


def _parts(images: int) -> int:
    units, rest = divmod(images, IMAGES)
    return 1 if rest or not units else max(k for k in range(1, PARTS + 1) if units % k == 0)


def _in_parts(parts: int, convolve: Convolution, x: Array, w: Array) -> Array:
    each = zip(jnp.split(x, parts, -1), jnp.split(w, parts, -3), strict=True)
    return reduce(add, (convolve(*part) for part in each))


def _sums(x: Array) -> Any:
    """Returns the accumulation dtype for narrow floats: f32, also as the dtype of the result. None
    on a GPU, whose library accumulates in f32 but can return only x's dtype; and None for wide
    dtypes."""
    wide = x.dtype.itemsize < 4 and platform() == "cpu"
    return jnp.float32 if wide else None


def _last(how: Sequence[Any], x: Array, w: Array) -> Array:
    """Returns the convolution of x [N, *sizes, groups, in] with w [*kernel, in, groups, out]. XLA
    takes the groups within the channels dim; within the batch dim if w is the gradient of a result:
    only then does it call a GPU library's weight gradient with groups."""
    stride, pads, dilation, spread = how
    (groups, outs), rank = w.shape[-2:], x.ndim - 1
    order = (0, rank - 1, *range(1, rank - 1))
    of_weight = _of_weight(how, x.shape, w.shape)
    if by_batch := groups > 1 and of_weight:
        x = jnp.moveaxis(x, -2, 0).reshape(-1, *x.shape[1:-2], x.shape[-1])
    else:
        x = x.reshape(*x.shape[:-2], -1)
    w = w.reshape(*w.shape[:-2], groups * outs)
    if any(s > 1 for s in spread) and not of_weight and platform() == "gpu":
        # XLA calls the library's gradient of the input if it sees the kernel reversed.
        places = range(rank - 2)
        w = lax.rev(lax.optimization_barrier(lax.rev(w, places)), places)
    out = lax.conv_general_dilated(
        x,
        w,
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(
            order, (rank - 1, rank - 2, *range(rank - 2)), order
        ),
        feature_group_count=1 if by_batch else groups,
        batch_group_count=groups if by_batch else 1,
        preferred_element_type=_sums(x),
    )
    return out.reshape(*out.shape[:-1], groups, outs)
