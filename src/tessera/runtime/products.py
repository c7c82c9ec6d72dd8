"""How does a device add up elements, and products of them? As its library is quick.

A CPU's takes the left factor with its inner dims last, and f32 where it multiplies no bf16; and it
adds up neighbours, or what lies along one dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ..core import flags
from ..core.dtypes import DType
from .narrow import cast, wide

Array = Any


def in_place(x: Array) -> Array:
    """`x` in memory in the order of its dims, which the compiler would else choose by the reader.
    The simplifier is what carries this out."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def contract(
    args: Sequence[Sequence[str]],
    out: Sequence[str],
    values: Sequence[Array],
    dtype: DType,
    laid: Callable[[Array], Array] = in_place,
) -> Array:
    """The sum of products that the letters say: pair by pair, from left to right. `laid` keeps a
    factor in the order of dims in which a product wants it."""
    if len(values) == 1:
        x, letters = values[0], list(args[0])
        gone = tuple(i for i, k in enumerate(letters) if k not in out)
        x = sum(x, gone) if gone else x
        letters = [k for k in letters if k in out]
        return cast(lax.transpose(x, [letters.index(k) for k in out]), dtype)
    if len(values) > 2:
        # Left to right: each step keeps what a later argument or the result still names.
        later = set(out).union(*args[2:])
        keep = tuple(k for k in dict.fromkeys((*args[0], *args[1])) if k in later)
        first = contract(args[:2], keep, values[:2], dtype, laid)
        return contract((keep, *args[2:]), out, (first, *values[2:]), dtype, laid)
    return _dot(list(args[0]), list(args[1]), list(out), values[0], values[1], dtype, laid)


def _dot(
    a: list[str],
    b: list[str],
    out: list[str],
    x: Array,
    y: Array,
    dtype: DType,
    laid: Callable[[Array], Array],
) -> Array:
    """The product of two as one dot_general. Letters of one argument alone are summed away first;
    the order of the two is the one that needs no transposition of the result, if there is one."""
    for own, other, left in ((a, b, True), (b, a, False)):
        gone = tuple(i for i, k in enumerate(own) if k not in other and k not in out)
        if gone:
            if left:
                x = sum(x, gone)
            else:
                y = sum(y, gone)
            own[:] = [k for i, k in enumerate(own) if i not in gone]
    batch = [k for k in a if k in b and k in out]
    inner = [k for k in a if k in b and k not in out]
    free_a, free_b = ([k for k in s if k not in batch and k not in inner] for s in (a, b))
    if [*batch, *free_a, *free_b] != out and [*batch, *free_b, *free_a] == out:
        a, b, x, y, free_a, free_b = b, a, y, x, free_b, free_a
    dims = (
        (tuple(a.index(k) for k in inner), tuple(b.index(k) for k in inner)),
        (tuple(a.index(k) for k in batch), tuple(b.index(k) for k in batch)),
    )
    narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    # Sums are f32 on all devices. A GPU's library rounds them itself, and writes half as much.
    sums = jnp.float32 if jax.default_backend() == "cpu" else dtype.numpy
    product = partial(lax.dot_general, preferred_element_type=sums if narrow else None)
    plain = partial(product, dimension_numbers=dims)
    count = len(inner)
    long = not batch and math.prod(y.shape[count:]) >= WIDE and a[:count] == inner == b[:count]
    bf16 = x.dtype == y.dtype == jnp.bfloat16
    on_cpu = plain
    if free_a and (long or (bf16 and flags.MULTIPLIES_BF16 and a != [*batch, *free_a, *inner])):
        on_cpu = partial(_inner_last, product, dims, laid)  # as in gradients of weights
    if bf16 and not flags.MULTIPLIES_BF16:
        on_cpu = partial(_widened, on_cpu)
    if on_cpu is plain:
        result = plain(x, y)
    else:
        result = lax.platform_dependent(x, y, cpu=on_cpu, default=plain)
    got = [*batch, *free_a, *free_b]
    if got != out:
        result = lax.transpose(result, [got.index(k) for k in out])
    return cast(result, dtype) if result.dtype != dtype.numpy else result


# Columns of a product of f32 from which a CPU earns back that its left factor is transposed first.
WIDE = 512


def _inner_last(
    product: Callable[..., Array],
    dims: Any,
    laid: Callable[[Array], Array],
    x: Array,
    y: Array,
) -> Array:
    """The product with `x` in memory as [batch, rows, inner]: a CPU's library is slow where its
    inner dims are not last, and takes no factors of bf16 at all, which are widened then."""
    (inner, inner_y), (batch, batch_y) = dims
    rows = [d for d in range(x.ndim) if d not in (*batch, *inner)]
    x = lax.transpose(x, (*batch, *rows, *inner))
    x = laid(x)  # a transposition alone, the compiler would take into the product again
    last = tuple(range(x.ndim - len(inner), x.ndim))
    return product(x, y, ((last, inner_y), (tuple(range(len(batch))), batch_y)))


def _widened(product: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """The product of factors in f32: with bf16, a CPU that does not multiply it takes 1.6 times as
    long (bench/RESULTS.md)."""
    return product(wide(x), wide(y))


MANY = 1024  # elements of one sum from which a CPU is slow where they lie along several dims


def sum(x: Array, dims: tuple[int, ...]) -> Array:
    plain = partial(lax.reduce_sum, axes=dims)
    terms = wide(x)
    sizes = [x.shape[d] for d in dims if x.shape[d] > 1]
    shape, over = _merged(x.shape, dims)
    if len(over) == len(sizes) or over[-1] == len(shape) - 1 or math.prod(sizes) < MANY:
        return plain(terms).astype(x.dtype)
    kept = [n for d, n in enumerate(x.shape) if d not in dims]

    def merged(x: Array) -> Array:
        # Over neighbours, with one dim behind them that stays, a CPU's compiler adds up element by
        # element, which takes ten times as long. Without the barrier it takes the reshape back.
        flat = lax.optimization_barrier(lax.reshape(x, shape))
        return lax.reshape(lax.reduce_sum(flat, axes=over), kept)

    return lax.platform_dependent(terms, cpu=merged, default=plain).astype(x.dtype)


def _merged(shape: Sequence[int], dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """`shape` and `dims` of it with neighbours as one dim where all or none are in `dims`."""
    sizes: list[int] = []
    over: list[int] = []
    inside: bool | None = None
    for d, n in enumerate(shape):
        if n == 1:
            continue
        if inside is (d in dims):
            sizes[-1] *= n
            continue
        inside = d in dims
        over += [len(sizes)] if inside else []
        sizes.append(n)
    return sizes, over
