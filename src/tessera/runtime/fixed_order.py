"""Sums over an axis in one fixed order of its logical places, on any number of devices.

"binary": adjacent pairs, then pairs of these. A device adds up whole subtrees of its own terms and
sends the rest; then each device adds up its own part of the tensor, and all gather all parts. If
the 2^k devices hold one term each, large sums use recursive halving. "ring": from the first place
to the last, one after the other. No `psum` of more than two devices: its order depends on size and
transport.
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
from .cpu.narrow_floats import moved
from .ragged import ragged_contract, ragged_dot

Array = Any
all_gather = moved(lax.all_gather)
all_to_all = moved(lax.all_to_all)
FOLD = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
SMALL = 4096  # elements per device; below, gathering all terms costs less than two exchanges
LARGE = 1 << 16  # elements per device; above, memory traffic decides, below, the exchanges' number


def tree(terms: Sequence[Array], kind: str = "sum") -> Array:
    """Returns the terms reduced in adjacent pairs."""
    level = list(terms)
    while len(level) > 1:
        level = [
            FOLD[kind](level[i], level[i + 1]) if i + 1 < len(level) else level[i]
            for i in range(0, len(level), 2)
        ]
    return level[0]


def chain(terms: Sequence[Array]) -> Array:
    """Returns the sum of the terms from left to right."""
    total = terms[0]
    for t in terms[1:]:
        total = total + t
    return total


def _subtrees(terms: Sequence[Array], order: str) -> list[Array]:
    """Returns the partial sums of local terms that the order allows: runs of 2^k terms, 2^k the
    largest power of two that divides their number."""
    if order != "binary":
        return list(terms)
    size = len(terms) & -len(terms)
    return [tree(terms[i : i + size]) for i in range(0, len(terms), size)]


def _total(terms: Sequence[Array], order: str) -> Array:
    return _settled(tree(terms) if order == "binary" else chain(terms))


def _settled(total: Array) -> Array:
    """Returns `total` with +0 for -0: the engine's own sum may begin with +0, and loses the
    sign."""
    return jnp.where(total == 0, jnp.zeros_like(total), total)


def fixed_sum(x: Array, dims: tuple[int, ...]) -> Array:
    """Returns the sum over `dims` as a product with ones. The compiler fuses a reduction into its
    readers, in another order of additions, but does not fuse a product of two matrices."""
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
    """Returns an einsum by pairs of arguments from left to right. Letters of one argument alone are
    summed first, in the fixed order."""
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
    # XLA's simplifier is off in these programs, and layout constraints have no effect without it.
    return xp_jax.contract(groups, out, parts, dtype, lax.optimization_barrier)


def _size(x: Array, letters: Sequence[str], summed: Sequence[str]) -> int:
    return math.prod(x.shape[letters.index(k)] for k in summed)


def _thin(
    a: Sequence[str], b: Sequence[str], rows: Sequence[str], inner: Sequence[str],
    columns: Sequence[str], out: Sequence[str], x: Array, y: Array, dtype: DType,
) -> Array:  # fmt: skip
    """Returns a product with a vector as one of matrices with one row or column: the compiler fuses
    products of vectors into their readers, in another order of additions."""
    left = lax.transpose(x, [a.index(k) for k in (*rows, *inner)])
    right = lax.transpose(y, [b.index(k) for k in (*inner, *columns)])
    shape = (*left.shape[: len(rows)], *right.shape[len(inner) :])
    m, k = (math.prod(n) for n in (left.shape[: len(rows)], left.shape[len(rows) :]))
    n = math.prod(right.shape[len(inner) :])
    total = lax.dot(left.reshape(m, k), right.reshape(k, n), preferred_element_type=_wide(x.dtype))
    made = [*rows, *columns]
    return xp_jax.cast(lax.transpose(total.reshape(shape), [made.index(d) for d in out]), dtype)


def _wide(dtype: Any) -> Any:
    """Returns the accumulation dtype of products of values of `dtype`."""
    narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
    return jnp.float32 if narrow else dtype


def fixed_prod(x: Array, dims: tuple[int, ...]) -> Array:
    """Returns the product over `dims`: of adjacent pairs, then of pairs of these."""
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
    """Returns running sums along `dim`: adds to each element the one 1, 2, 4, ... places before."""
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
    """Returns (sign, log of the absolute value) of determinants, by LAPACK's LU factors."""
    wide = a.astype(jnp.float32) if a.dtype.itemsize < 4 else a
    lu, pivots, _ = lax.linalg.lu(wide)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    swaps = jnp.sum(pivots != jnp.arange(a.shape[-1], dtype=pivots.dtype), axis=-1)
    signs = fixed_prod(lax.sign(diagonal), (diagonal.ndim - 1,))
    sign = jnp.where(swaps % 2 == 1, -signs, signs)
    size = fixed_sum(lax.log(lax.abs(diagonal)), (diagonal.ndim - 1,))
    return sign.astype(a.dtype), size.astype(a.dtype)


def fixed_kernel(k: Any, axes: tuple[str, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Returns the outputs of a kernel of Tile IR, with the sums and products of this file."""
    from .kernels import run_kernel  # as in xp_jax

    return run_kernel(k, axes, arrays, FixedXp)


# The array functions of mesh-invariant programs: reductions along a dim have a fixed order.
FixedXp = SimpleNamespace(**{
    **vars(xp_jax), "sum": fixed_sum, "contract": fixed_contract, "prod": fixed_prod,
    "cumsum": fixed_cumsum, "slogdet": fixed_slogdet,
    "kernel": fixed_kernel,
    "ragged_dot": partial(ragged_dot, fixed_contract),
    "ragged_contract": partial(ragged_contract, fixed_contract),
})  # fmt: skip


def ordered_sum(terms: Sequence[Array], axis: str, devices: int, order: str) -> Array:
    """Returns the sum of all devices' `terms`, on each of them."""
    local_sums = jnp.stack(_subtrees(terms, order))
    if devices == 1:
        return _total(list(local_sums), order)
    shape, count = local_sums.shape[1:], local_sums.shape[0]
    size = local_sums[0].size
    if size < SMALL * devices:
        every = all_gather(local_sums, axis)  # [devices, count, ...]
        return _total(list(every.reshape(devices * count, *shape)), order)
    flat, extra = local_sums.reshape(count, -1), -size % devices
    if extra:  # XLA would run an empty pad, too
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
    """Returns the sum of all devices' `x` [elements] in adjacent pairs, on each of them.

    Recursive halving: neighbours, then pairs of these, add up one half each, so every level of the
    tree touches half of the elements of the level before. A sum of two has no order.
    """
    near = 1
    while near < devices:
        pairs = [[i, i ^ near] for i in range(devices) if not i & near]
        x = lax.psum_scatter(x, axis, axis_index_groups=pairs, tiled=True)
        near *= 2
    # The first exchange decides the half of the whole vector, the second the quarter, and so on:
    # parts are in bit-reversed order of the places.
    bits = devices.bit_length() - 1
    holders = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(devices)]
    whole: Array = all_gather(_settled(x), axis, axis_index_groups=[holders], tiled=True)
    return whole


def ordered_scatter(terms: Sequence[Array], axis: str, devices: int, dim: int, order: str) -> Array:
    """Returns this device's part along `dim` of the sum of all devices' `terms`."""
    here = jnp.stack(_subtrees(terms, order))
    if devices == 1:
        return _total(list(here), order)
    count = here.shape[0]
    d = dim + 1
    split = here.reshape(*here.shape[:d], devices, here.shape[d] // devices, *here.shape[d + 1 :])
    mine = all_to_all(split, axis, d, 0)  # [devices, count, ...]
    return _total(list(mine.reshape(devices * count, *mine.shape[2:])), order)
