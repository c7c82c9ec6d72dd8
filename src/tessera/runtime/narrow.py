"""How does a CPU carry floats of less than 32 bits? As their bits, wherever they are only moved.

Its compiler has no narrow floats in memory and on wires: it moves bf16 as f32 and fp8 as f16, back
and forth, and all of a buffer where one block of it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.dtypes import DType

Array = Any


def bits_of(x: Array) -> Array:
    """Narrow floats as whole numbers of their bits, everything else as it is."""
    narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if narrow else x


def floats_of(x: Array, dtype: Any) -> Array:
    """What `bits_of` of values of `dtype` became, as such values."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def moved(move: Callable[..., Array]) -> Callable[..., Array]:
    """A collective that only moves elements, as their bits."""

    @wraps(move)
    def run(x: Array, *how: Any, **more: Any) -> Array:
        return floats_of(move(bits_of(x), *how, **more), x.dtype)

    return run


# -- fp8_e4m3 --------------------------------------------------------------------------------------
def to_e4m3(x: Array) -> Array:
    """`x` in fp8_e4m3, of two values that are as near the one with an even last bit: 3 bits of an
    f32's 23 are left, and its exponent, less 120."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - np.uint32(120 << 23)) >> 20
    # Below 2**-6 they are multiples of 2**-9, which is the last bit of f32 from 2**14 on.
    shifted = lax.bitcast_convert_type(size, jnp.float32) + jnp.float32(2**14)
    small = lax.bitcast_convert_type(shifted, jnp.uint32) - np.float32(2**14).view(np.uint32)
    kept = jnp.where(size < 121 << 23, small, normal)
    beyond = size > np.float32(464).view(np.uint32)  # NaN, as there is no infinity
    code = (bits >> 24) & 0x80 | jnp.where(beyond, 0x7F, kept)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)


def from_e4m3(x: Array) -> Array:
    """`x` in f32."""
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
    if (x.dtype == eight) == (dtype.numpy == eight):
        return lax.convert_element_type(x, dtype.numpy)
    # A CPU's compiler goes by way of f16, element by element.
    of = from_e4m3 if x.dtype == eight else to_e4m3
    plain = partial(lax.convert_element_type, new_dtype=dtype.numpy)
    return lax.platform_dependent(x, cpu=lambda x: plain(of(x)), default=plain)


def wide(x: Array) -> Array:
    """Narrow floats as f32, everything else as it is: what many elements are added up in."""
    narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32) if narrow else x
