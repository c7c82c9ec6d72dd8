"""Narrow floats (less than 32 bits) on CPUs: moved as their bits, cast by bit operations.

XLA for CPUs has no narrow floats in memory and in collectives: it converts bf16 to f32 and fp8 to
f16 and back, and the whole buffer even if one block of it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...core.dtypes import DType

Array = Any


def bits_of(x: Array) -> Array:
    """Returns narrow floats as unsigned integers of their bits, other values unchanged."""
    narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if narrow else x


def floats_of(x: Array, dtype: Any) -> Array:
    """Returns values of `dtype` from the result of `bits_of`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def moved(move: Callable[..., Array]) -> Callable[..., Array]:
    """Returns `move`, a function that only moves elements, as one that moves their bits."""

    @wraps(move)
    def run(x: Array, *how: Any, **more: Any) -> Array:
        return floats_of(move(bits_of(x), *how, **more), x.dtype)

    return run


# -- fp8_e4m3 --------------------------------------------------------------------------------------
def to_e4m3(x: Array) -> Array:
    """Returns `x` in fp8_e4m3, rounded to nearest even: of an f32, 3 of 23 mantissa bits remain,
    and the exponent less 120."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - np.uint32(120 << 23)) >> 20
    # Values below 2**-6 are multiples of 2**-9, the last bit of f32 numbers from 2**14 on.
    shifted = lax.bitcast_convert_type(size, jnp.float32) + jnp.float32(2**14)
    small = lax.bitcast_convert_type(shifted, jnp.uint32) - np.float32(2**14).view(np.uint32)
    kept = jnp.where(size < 121 << 23, small, normal)
    # Beyond 464, halfway from the largest value, 448, to the next: NaN, as there is no infinity.
    beyond = size > np.float32(464).view(np.uint32)
    code = (bits >> 24) & 0x80 | jnp.where(beyond, 0x7F, kept)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)


def from_e4m3(x: Array) -> Array:
    """Returns `x` in f32."""
    bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32)
    size = bits & 0x7F
    normal = lax.bitcast_convert_type((size << 20) + np.uint32(120 << 23), jnp.float32)
    wide = jnp.where(size < 8, (normal - 2.0**-7) * 2, normal)
    wide = jnp.where(size == 0x7F, jnp.nan, wide)
    wide = lax.bitcast_convert_type(wide, jnp.uint32) | (bits & 0x80) << 24
    return lax.bitcast_convert_type(wide, jnp.float32)


# -- casts -----------------------------------------------------------------------------------------
def cast(x: Array, dtype: DType) -> Array:
    eight = jnp.float8_e4m3fn
    if jnp.iscomplexobj(x) and not dtype.is_complex:
        x = lax.real(x)
    if (x.dtype == eight) == (dtype.numpy == eight):
        return lax.convert_element_type(x, dtype.numpy)
    # XLA for CPUs casts by way of f16, element by element.
    of = from_e4m3 if x.dtype == eight else to_e4m3
    plain = partial(lax.convert_element_type, new_dtype=dtype.numpy)
    return lax.platform_dependent(x, cpu=lambda x: plain(of(x)), default=plain)


def wide(x: Array) -> Array:
    """Returns narrow floats as f32, the accumulation dtype of sums; other values unchanged."""
    narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32) if narrow else x
