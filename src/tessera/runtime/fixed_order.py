"""Sums over an axis in one fixed order of its logical places, on any number of devices.

"binary": adjacent pairs, then pairs of these. A device adds up what makes whole subtrees and
hands on the rest; then each device adds up its own part of the tensor, and all get all parts; or
devices halve what they have, level by level, where they hold one term each and are 2^k.
"ring": from the first place to the last, one after the other. No `psum` of more than two: its order
changes with size and with transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core.dtypes import DType
from . import xp_jax
from .narrow import moved
from .ragged import ragged_contract, ragged_dot

Array = Any
all_gather = moved(lax.all_gather)
all_to_all = moved(lax.all_to_all)
FOLD = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
SMALL = 4096  # elements a device; below, gathering all terms costs less than two exchanges
LARGE = 1 << 16  # elements a device; above, memory counts, below, the number of exchanges


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
    return _settled(tree(terms) if order == "binary" else chain(terms))


def _settled(total: Array) -> Array:
    """`total` with +0 for -0: an engine's own sum may begin with +0, and loses the sign."""
    return jnp.where(total == 0, jnp.zeros_like(total), total)


def fixed_sum(x: Array, dims: tuple[int, ...]) -> Array:
    """The sum over `dims` as a product with ones: the compiler fuses a reduction into whatever
    reads it, in another order of additions, and leaves a product of two matrices alone."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or not dims:
        return xp_jax.sum(x, dims)
    kept = [d for d in range(x.ndim) if d not in dims]
    rows, n = (math.prod(x.shape[d] for d in ds) for ds in (kept, dims))
    if kept and max(dims) < kept[0]:  # a transposed copy would cost more than the sum
        factors = jnp.ones((1, n), x.dtype), x.reshape(n, rows)
    else:
        flat = lax.transpose(x, (*kept, *dims)).reshape(rows, n)
        factors = flat, jnp.ones((n, 1), x.dtype)
    total = lax.dot(*factors, preferred_element_type=_wide(x.dtype))
    return total.reshape([x.shape[d] for d in kept]).astype(x.dtype)


def fixed_contract(
    args: Sequence[Sequence[str]], out: Sequence[str], values: Sequence[Array], dtype: DType
) -> Array:
    """A sum of products, of pairs of arguments from left to right. Letters of one argument alone
    are summed before, in the fixed order."""
    if len(values) > 2:
        later = set(out).union(*args[2:])
        keep = tuple(k for k in dict.fromkeys((*args[0], *args[1])) if k in later)
        first = fixed_contract(args[:2], keep, values[:2], dtype)
        return fixed_contract((keep, *args[2:]), out, (first, *values[2:]), dtype)
    groups, parts = [], []
    for i, (letters, x) in enumerate(zip(args, values, strict=True)):
        others = {*out, *(k for j, a in enumerate(args) if j != i for k in a)}
        alone = tuple(d for d, k in enumerate(letters) if k not in others)
        groups.append([k for k in letters if k in others])
        parts.append(fixed_sum(x, alone))
    if len(parts) == 2:
        (a, b), (x, y) = groups, parts
        inner = [k for k in a if k in b and k not in out]
        batch = any(k in a and k in b for k in out)
        rows, columns = ([k for k in g if k not in inner] for g in groups)
        thin = 1 in (x.size // max(1, _size(x, a, inner)), y.size // max(1, _size(y, b, inner)))
        if inner and not batch and thin:
            return _thin(a, b, rows, inner, columns, out, x, y, dtype)
    # The simplifier is off here, without which a constraint of a layout is not carried out.
    return xp_jax.contract(groups, out, parts, dtype, lax.optimization_barrier)


def _size(x: Array, letters: Sequence[str], some: Sequence[str]) -> int:
    return math.prod(x.shape[letters.index(k)] for k in some)


def _thin(
    a: Sequence[str], b: Sequence[str], rows: Sequence[str], inner: Sequence[str],
    columns: Sequence[str], out: Sequence[str], x: Array, y: Array, dtype: DType,
) -> Array:  # fmt: skip
    """A product with a vector, written as one of matrices with one row or column: the compiler
    fuses products of vectors into what reads them, in another order of additions."""
    left = lax.transpose(x, [a.index(k) for k in (*rows, *inner)])
    right = lax.transpose(y, [b.index(k) for k in (*inner, *columns)])
    shape = (*left.shape[: len(rows)], *right.shape[len(inner) :])
    m, k = (math.prod(n) for n in (left.shape[: len(rows)], left.shape[len(rows) :]))
    n = math.prod(right.shape[len(inner) :])
    total = lax.dot(left.reshape(m, k), right.reshape(k, n), preferred_element_type=_wide(x.dtype))
    made = [*rows, *columns]
    return xp_jax.cast(lax.transpose(total.reshape(shape), [made.index(d) for d in out]), dtype)


def _wide(dtype: Any) -> Any:
    """What products of values of `dtype` are added up in."""
    narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
    return jnp.float32 if narrow else dtype


def fixed_prod(x: Array, dims: tuple[int, ...]) -> Array:
    """The product over `dims`: of adjacent pairs, then of pairs of these."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or not dims or not x.size:
        return xp_jax.prod(x, dims)
    kept = [d for d in range(x.ndim) if d not in dims]
    shape = [x.shape[d] for d in kept]
    line = lax.transpose(x, (*dims, *kept)).reshape(-1, *shape)
    while line.shape[0] > 1:
        even = line.shape[0] // 2 * 2
        line = jnp.concatenate([line[0:even:2] * line[1:even:2], line[even:]])
    return line.reshape(shape)


def fixed_cumsum(x: Array, dim: int) -> Array:
    """Running sums along `dim`: to each element the one 1, 2, 4, ... places before is added."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return xp_jax.cumsum(x, dim)
    total = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    far = 1
    while far < x.shape[dim]:
        late = lax.slice_in_dim(total, far, None, axis=dim)
        early = lax.slice_in_dim(total, 0, x.shape[dim] - far, axis=dim)
        first = lax.slice_in_dim(total, 0, far, axis=dim)
        total = lax.concatenate([first, late + early], dim)
        far *= 2
    return total.astype(x.dtype)


def fixed_slogdet(a: Array) -> tuple[Array, Array]:
    """(sign, logarithm of the size) of determinants, by the factors of LAPACK."""
    wide = a.astype(jnp.float32) if a.dtype.itemsize < 4 else a
    lu, pivots, _ = lax.linalg.lu(wide)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    swaps = jnp.sum(pivots != jnp.arange(a.shape[-1], dtype=pivots.dtype), axis=-1)
    signs = fixed_prod(lax.sign(diagonal), (diagonal.ndim - 1,))
    sign = jnp.where(swaps % 2 == 1, -signs, signs)
    size = fixed_sum(lax.log(lax.abs(diagonal)), (diagonal.ndim - 1,))
    return sign.astype(a.dtype), size.astype(a.dtype)


# The array functions of programs whose bits no mesh may change: those that add up or multiply along
# a dim do it in an order of their own.
FixedXp = SimpleNamespace(**{
    **vars(xp_jax), "sum": fixed_sum, "contract": fixed_contract, "prod": fixed_prod,
    "cumsum": fixed_cumsum, "slogdet": fixed_slogdet,
    "ragged_dot": partial(ragged_dot, fixed_contract),
    "ragged_contract": partial(ragged_contract, fixed_contract),
})  # fmt: skip


def ordered_sum(terms: Sequence[Array], axis: str, devices: int, order: str) -> Array:
    """The sum of all devices' `terms`, on each of them."""
    here = jnp.stack(_subtrees(terms, order))
    if devices == 1:
        return _total(list(here), order)
    shape, count = here.shape[1:], here.shape[0]
    size = here[0].size
    if size < SMALL * devices:
        every = all_gather(here, axis)  # [devices, count, ...]
        return _total(list(every.reshape(devices * count, *shape)), order)
    flat, extra = here.reshape(count, -1), -size % devices
    if extra:  # the engine would carry out an empty one as well
        flat = jnp.pad(flat, ((0, 0), (0, extra)))
    halves = order == "binary" and count == 1 and devices & (devices - 1) == 0
    if halves and size >= LARGE:
        whole = _halved(flat[0], axis, devices)
        return (whole[:size] if extra else whole).reshape(shape)
    mine = all_to_all(flat.reshape(count, devices, -1), axis, 1, 0)  # [devices, count, part]
    part = _total(list(mine.reshape(devices * count, -1)), order)
    whole = all_gather(part, axis, tiled=True)
    return (whole[:size] if extra else whole).reshape(shape)


def _halved(x: Array, axis: str, devices: int) -> Array:
    """The sum of all devices' `x` [elements] in adjacent pairs, on each of them.

    Recursive halving: neighbours, then pairs of these, add up one half each, so every level of the
    tree touches half of what the one before did. A sum of two has no order.
    """
    near = 1
    while near < devices:
        pairs = [[i, i ^ near] for i in range(devices) if not i & near]
        x = lax.psum_scatter(x, axis, axis_index_groups=pairs, tiled=True)
        near *= 2
    # Who took the upper half first has a part of the upper half of the whole: parts lie in the
    # order of the places' bits read backwards.
    bits = devices.bit_length() - 1
    holders = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(devices)]
    whole: Array = all_gather(_settled(x), axis, axis_index_groups=[holders], tiled=True)
    return whole


def ordered_scatter(terms: Sequence[Array], axis: str, devices: int, dim: int, order: str) -> Array:
    """This device's part along `dim` of the sum of all devices' `terms`."""
    here = jnp.stack(_subtrees(terms, order))
    if devices == 1:
        return _total(list(here), order)
    count = here.shape[0]
    d = dim + 1
    split = here.reshape(*here.shape[:d], devices, here.shape[d] // devices, *here.shape[d + 1 :])
    mine = all_to_all(split, axis, d, 0)  # [devices, count, ...]
    return _total(list(mine.reshape(devices * count, *mine.shape[2:])), order)
