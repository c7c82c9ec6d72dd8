"""Sums over an axis in one fixed order of its logical places, on any number of devices.

"binary": adjacent pairs, then pairs of these. A device adds up what makes whole subtrees and
hands on the rest; then each device adds up its own part of the tensor, and all get all parts.
"ring": from the first place to the last, one after the other. No `psum`: its order changes with
size and with transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax

from . import xp_jax

Array = Any
FOLD = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
SMALL = 4096  # elements a device; below, gathering all terms costs less than two exchanges


def tree(terms: Sequence[Array], kind: str = "sum") -> Array:
    """The terms folded in adjacent pairs."""
    level = list(terms)
    while len(level) > 1:
        level = [
            FOLD[kind](level[i], level[i + 1]) if i + 1 < len(level) else level[i]
            for i in range(0, len(level), 2)
        ]
    return level[0]


def chain(terms: Sequence[Array]) -> Array:
    """The terms added up from left to right."""
    total = terms[0]
    for t in terms[1:]:
        total = total + t
    return total


def _subtrees(terms: Sequence[Array], order: str) -> list[Array]:
    """What can be added up here: runs of 2^k terms where 2^k divides their number."""
    if order != "binary":
        return list(terms)
    size = len(terms) & -len(terms)
    return [tree(terms[i : i + size]) for i in range(0, len(terms), size)]


def _total(terms: Sequence[Array], order: str) -> Array:
    return tree(terms) if order == "binary" else chain(terms)


def fixed_sum(x: Array, dims: tuple[int, ...]) -> Array:
    """The sum over `dims` as a product with ones: the compiler fuses a reduction into whatever
    reads it, in another order of additions, and leaves a product alone."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or not dims:
        return xp_jax.sum(x, dims)
    kept = [d for d in range(x.ndim) if d not in dims]
    rows = math.prod(x.shape[d] for d in kept)
    flat = lax.transpose(x, (*kept, *dims)).reshape(rows, -1)
    ones = jnp.ones((flat.shape[1], 1), x.dtype)
    total = lax.dot(flat, ones, preferred_element_type=jnp.float32)
    return total.reshape([x.shape[d] for d in kept]).astype(x.dtype)


FixedXp = SimpleNamespace(**{**vars(xp_jax), "sum": fixed_sum})


def ordered_sum(terms: Sequence[Array], axis: str, devices: int, order: str) -> Array:
    """The sum of all devices' `terms`, on each of them."""
    here = jnp.stack(_subtrees(terms, order))
    if devices == 1:
        return _total(list(here), order)
    shape, count = here.shape[1:], here.shape[0]
    size = here[0].size
    if size < SMALL * devices:
        every = lax.all_gather(here, axis)  # [devices, count, ...]
        return _total(list(every.reshape(devices * count, *shape)), order)
    flat = here.reshape(count, -1)
    flat = jnp.pad(flat, ((0, 0), (0, -size % devices)))
    mine = lax.all_to_all(flat.reshape(count, devices, -1), axis, 1, 0)  # [devices, count, part]
    part = _total(list(mine.reshape(devices * count, -1)), order)
    whole = lax.all_gather(part, axis, tiled=True)
    return whole[:size].reshape(shape)


def ordered_scatter(terms: Sequence[Array], axis: str, devices: int, dim: int, order: str) -> Array:
    """This device's part along `dim` of the sum of all devices' `terms`."""
    here = jnp.stack(_subtrees(terms, order))
    if devices == 1:
        return _total(list(here), order)
    count = here.shape[0]
    d = dim + 1
    split = here.reshape(*here.shape[:d], devices, here.shape[d] // devices, *here.shape[d + 1 :])
    mine = lax.all_to_all(split, axis, d, 0)  # [devices, count, ...]
    return _total(list(mine.reshape(devices * count, *mine.shape[2:])), order)
