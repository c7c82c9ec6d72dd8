"""Einsums and sums on one device, in the forms that the backend's library computes fast.

The CPU library wants the left factor with its inner dims last, and f32 factors if it has no bf16
multiplication. Its sums are fast over neighbouring elements, or over one dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ...core import flags
from ...core.dtypes import DType
from ..devices import platform
from .narrow_floats import cast, wide

Array = Any


def in_place(x: Array) -> Array:
    """Returns `x` with its dims in memory in their order; without this constraint the compiler
    chooses by the reader. XLA's simplifier carries it out."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def contract(
    args: Sequence[Sequence[str]],
    out: Sequence[str],
    values: Sequence[Array],
    dtype: DType,
    laid: Callable[[Array], Array] = in_place,
) -> Array:
    """Returns the einsum that the letters say, by pairs from left to right. `laid` constrains a
    factor to the memory order that a product wants."""
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
    """Returns the product of two arguments as one dot_general. Letters of one argument alone are
    summed first; the arguments are swapped if the result then needs no transposition."""
    for operand, other, is_left in ((a, b, True), (b, a, False)):
        gone = tuple(i for i, k in enumerate(operand) if k not in other and k not in out)
        if gone:
            if is_left:
                x = sum(x, gone)
            else:
                y = sum(y, gone)
            operand[:] = [k for i, k in enumerate(operand) if i not in gone]
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
    # Sums are f32 on all devices. A GPU's library rounds its result itself, and writes half as
    # many bytes.
    sums = jnp.float32 if platform() == "cpu" else dtype.numpy
    product = partial(lax.dot_general, preferred_element_type=sums if narrow else None)
    plain = partial(product, dimension_numbers=dims)
    count = len(inner)
    long = not batch and math.prod(y.shape[count:]) >= WIDE and a[:count] == inner == b[:count]
    bf16 = x.dtype == y.dtype == jnp.bfloat16
    on_cpu = plain
    if free_a and (long or (bf16 and flags.MULTIPLIES_BF16 and a != [*batch, *free_a, *inner])):
        on_cpu = partial(_inner_last, product, dims, laid)  # for example gradients of weights
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


# From this many columns on, the transposition of the left f32 factor pays off on a CPU.
WIDE = 512


def _inner_last(
    product: Callable[..., Array],
    dims: Any,
    laid: Callable[[Array], Array],
    x: Array,
    y: Array,
) -> Array:
    """Returns the product with `x` in memory as [batch, rows, inner]. A CPU's library is slow if
    the inner dims are not last, and then takes no bf16 factors at all, which are widened."""
    (inner, inner_y), (batch, batch_y) = dims
    rows = [d for d in range(x.ndim) if d not in (*batch, *inner)]
    x = lax.transpose(x, (*batch, *rows, *inner))
    x = laid(x)  # without it the compiler would fuse the transposition into the product
    last = tuple(range(x.ndim - len(inner), x.ndim))
    return product(x, y, ((last, inner_y), (tuple(range(len(batch))), batch_y)))


def _widened(product: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """Returns the product of factors widened to f32: a CPU without bf16 multiplication takes 1.6
    times as long with bf16 (bench/RESULTS.md)."""
    return product(wide(x), wide(y))


MANY = 1024  # from this many terms on, sums over several dims are slow on a CPU


def sum(x: Array, dims: tuple[int, ...]) -> Array:
    plain = partial(lax.reduce_sum, axes=dims)
    terms = wide(x)
    sizes = [x.shape[d] for d in dims if x.shape[d] > 1]
    shape, over = _merged(x.shape, dims)
    if len(over) == len(sizes) or over[-1] == len(shape) - 1 or math.prod(sizes) < MANY:
        return plain(terms).astype(x.dtype)
    kept = [n for d, n in enumerate(x.shape) if d not in dims]

    def merged(x: Array) -> Array:
        # XLA for CPUs computes a sum over neighbouring dims before a kept one element by element,
        # ten times slower. Without the barrier it would undo the reshape.
        flat = lax.optimization_barrier(lax.reshape(x, shape))
        return lax.reshape(lax.reduce_sum(flat, axes=over), kept)

    return lax.platform_dependent(terms, cpu=merged, default=plain).astype(x.dtype)


def _merged(shape: Sequence[int], dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns `shape` and `dims` with neighbouring dims merged if all or none of them are in
    `dims`."""
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
