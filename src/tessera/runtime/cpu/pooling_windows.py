"""Windows of an image (pooling), as one slice for each place in a window.

A CPU runs these fused, faster than the engine's own reduce_window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any
LOOPS = 16  # most parts of the images; a prime number of images is taken one by one


def window(
    x: Array,
    kind: str,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
) -> Array:
    """Returns the largest element ("max"), the first place that holds it ("first") or the sum of
    each window over the last dims."""
    lead = x.shape[: x.ndim - len(size)]
    images = lax.reshape(x, (math.prod(lead), *x.shape[len(lead) :]))
    made = (_first if kind == "first" else _folded)(images, kind, size, stride, pads)
    return lax.reshape(made, (*lead, *made.shape[1:]))


def _folded(x: Array, kind: str, *how: Any) -> Array:
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 and kind == "sum" else x
    edge, fold = (0, lax.add) if kind == "sum" else (_least(x), lax.max)
    return reduce(fold, _places(wide, edge, *how)).astype(x.dtype)


def _first(x: Array, kind: str, *how: Any) -> Array:
    made = partial(_first_of, how=how)
    return lax.platform_dependent(x, cpu=partial(in_memory, made), default=made)


def in_memory(compute: Callable[[Array], Array], x: Array) -> Array:
    """Returns `compute` of x in a loop over parts, which writes its result to memory: otherwise a
    CPU's compiler would recompute a part of it in every reader."""
    images = x.shape[0]
    loops = max(k for k in range(1, LOOPS + 1) if images % k == 0)
    loops = images if loops == 1 else loops
    out = lax.map(compute, lax.reshape(x, (loops, x.shape[0] // loops, *x.shape[1:])))
    return lax.reshape(out, (x.shape[0], *out.shape[2:]))


def _first_of(x: Array, how: Sequence[Any]) -> Array:
    """Returns the first place of each window's largest element. NaN is larger than all; padding is
    never chosen."""
    parts = list(_places(x, _least(x), *how))
    inner: Sequence[Any] = [None] * len(parts)
    if any(map(any, how[-1])):
        inner = list(_places(jnp.ones(x.shape, bool), False, *how))
    best, at = parts[0], jnp.zeros(parts[0].shape, jnp.int32)
    if inner[0] is not None:
        at = at - ~inner[0]
    for place, (part, inside) in enumerate(zip(parts[1:], inner[1:], strict=True), 1):
        more = (part > best) | ((part != part) & (best == best))
        if inside is not None:
            more = (more | (at < 0)) & inside
        at, best = jnp.where(more, place, at), jnp.where(more, part, best)
    return at


def _least(x: Array) -> Any:
    return jnp.iinfo(x.dtype).min if jnp.issubdtype(x.dtype, jnp.integer) else -jnp.inf


def _places(
    x: Array, edge: Any, size: Sequence[int], stride: Sequence[int], pads: Sequence[Any]
) -> Iterator[Array]:
    """Yields, for each place in a window, row by row, the elements that all windows have there; x
    is padded with `edge`."""
    rows = [(0, 0, 0), *((low, high, 0) for low, high in pads)]
    around = lax.pad(x, jnp.asarray(edge, x.dtype), rows)
    counts = [(n - k) // s + 1 for n, k, s in zip(around.shape[1:], size, stride, strict=True)]
    for place in itertools.product(*map(range, size)):
        ends = [p + (m - 1) * s + 1 for p, m, s in zip(place, counts, stride, strict=True)]
        yield lax.slice(around, (0, *place), (x.shape[0], *ends), (1, *stride))
