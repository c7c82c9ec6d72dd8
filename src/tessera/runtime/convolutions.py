"""How does the engine compute a convolution? With its channels last.

Which of its libraries does it on a CPU, runtime/ways.py says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any
# As the gradient of a weight, a convolution has an image for its kernel, and sums over the batch.
# With kernels of so many places, a CPU is up to twice as fast with so many images at a time; with
# more of them, where a program would have more than so many parts.
PLACES, IMAGES, PARTS = 64, 16, 8


def conv(x: Array, w: Array, *how: Any) -> Array:
    """That of x [N, groups, in, *sizes] with w [groups, out, in, *kernel]. What lies as it is
    wanted already (passes/channels_last.py) is not moved. `how` is the stride, the pads, the
    dilation and the spread of the op."""
    x = lax.transpose(x, (0, *range(3, x.ndim), 1, 2))
    w = lax.transpose(w, (*range(3, w.ndim), 2, 0, 1))
    made = partial(_last, how)
    parts = _parts(x.shape[-1]) if math.prod(w.shape[:-3]) >= PLACES else 1
    if parts > 1:
        out = lax.platform_dependent(x, w, cpu=partial(_in_parts, parts, made), default=made)
    else:
        out = made(x, w)
    return lax.transpose(out, (0, out.ndim - 2, out.ndim - 1, *range(1, out.ndim - 2)))


def _parts(images: int) -> int:
    units, rest = divmod(images, IMAGES)
    return 1 if rest or not units else max(k for k in range(1, PARTS + 1) if units % k == 0)


def _in_parts(parts: int, made: Callable[[Array, Array], Array], x: Array, w: Array) -> Array:
    each = zip(jnp.split(x, parts, -1), jnp.split(w, parts, -3), strict=True)
    return reduce(add, (made(*part) for part in each))


def _last(how: Sequence[Any], x: Array, w: Array) -> Array:
    """That of x [N, *sizes, groups, in] with w [*kernel, in, groups, out]. XLA counts groups
    itself, which lie side by side with the channels."""
    stride, pads, dilation, spread = how
    (groups, outs), rank = w.shape[-2:], x.ndim - 1
    order = (0, rank - 1, *range(1, rank - 1))
    out = lax.conv_general_dilated(
        lax.reshape(x, (*x.shape[:-2], groups * x.shape[-1])),
        lax.reshape(w, (*w.shape[:-2], groups * outs)),
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(
            order, (rank - 1, rank - 2, *range(rank - 2)), order
        ),
        feature_group_count=groups,
        preferred_element_type=jnp.float32 if x.dtype.itemsize < 4 else None,
    )
    return lax.reshape(out, (*out.shape[:-1], groups, outs))
