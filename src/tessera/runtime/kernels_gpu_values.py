"""Values of kernels on GPUs: in registers, without the dims of size 1, or in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core.dtypes import DType, bf16, f32
from ..core.errors import BackendError
from ..ir.tile.body import Op, Statement, where
from . import xp_jax
from .cpu.erf import ENDS, OVER, UNDER

Array = Any
# Larger numbers are NaN in a float of 8 bits: beyond the middle to what would be the next one.
BEYOND = {"f8e4m3": 464.0}


def refused(what: str, s: Statement, fix: str) -> BackendError:
    """The error that the lowering does not have a statement."""
    return BackendError(f"kernels on GPUs: {what}", line=where(s), fix=fix)


@dataclass(frozen=True)
class Shared:
    """A value in shared memory."""

    ref: Any


@dataclass(frozen=True)
class Product:
    """A product that is still to come: its result is added to another value, so it is summed there
    from the beginning."""

    x: Any
    y: Any
    op: Op


Values = dict[str, Any]  # arrays in registers, which lack the dims of size 1; Shared; Product


def flat(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def place_of(shape: Sequence[int], dim: int) -> int:
    """The place of a dim among those that are kept."""
    return len(flat(shape[:dim]))


def fit(x: Array, have: tuple[int, ...], want: tuple[int, ...]) -> Array:
    """A value of the shape `have`, broadcast to `want`."""
    if flat(have) == flat(want):
        return x
    dims = tuple(place_of(want, d) for d, n in enumerate(have) if n != 1)
    return lax.broadcast_in_dim(x, flat(want), dims)


def cast(x: Array, dtype: DType) -> Array:
    """The cast, by way of f32 if one of the dtypes is a float of 8 bits: the hardware has no other.
    Beyond the largest number it saturates; the cast is NaN."""
    narrow = [
        t for t in (x.dtype, dtype.numpy) if t.itemsize == 1 and jnp.issubdtype(t, jnp.floating)
    ]
    if narrow:
        x = lax.convert_element_type(x, jnp.float32)
    if dtype.numpy in narrow:
        if dtype.name not in BEYOND:
            raise BackendError(f"kernels on GPUs: no cast to {dtype}", fix="cast to f8e4m3")
        ends = lax.full_like(x, BEYOND[dtype.name])
        x = lax.select(lax.gt(lax.abs(x), ends), lax.full_like(x, jnp.nan), x)
    return lax.convert_element_type(x, dtype.numpy)


def _wide(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function, computed in f32 at least."""

    def run(x: Array) -> Array:
        if x.dtype.itemsize > 2:
            return f(x)
        return lax.convert_element_type(f(lax.convert_element_type(x, jnp.float32)), x.dtype)

    return run


def scalar(text: str, dtype: DType) -> Array:
    return dtype.numpy.type(float(text) if dtype.is_float else int(text))


def _erf(x: Array) -> Array:
    """The error function by the quotient of `cpu/erf.py`, without arrays of coefficients."""

    def sum_of(row: tuple[float, ...], x: Array) -> Array:
        return reduce(lambda total, factor: total * x + factor, row[1:], lax.full_like(x, row[0]))

    inner = lax.clamp(-ENDS, x, ENDS)
    square = inner * inner
    return lax.clamp(-1.0, inner * sum_of(OVER, square) / sum_of(UNDER, square), 1.0)


def _sqrt(x: Array) -> Array:
    ends = lax.bitwise_or(lax.eq(x, lax.full_like(x, 0)), lax.eq(x, lax.full_like(x, jnp.inf)))
    return lax.select(ends, x, lax.mul(x, lax.rsqrt(x)))


# The functions of `xp` that the backend lacks, or that have another form on CPUs.
_OWN: dict[str, Callable[..., Array]] = {
    "sum": lambda x, dims: lax.reduce_sum(x, axes=dims),
    "sqrt": _sqrt,
    "erf": _erf,
    "logical_not": lambda x: lax.bitwise_xor(x, lax.full_like(x, True)),
}
XP = SimpleNamespace(**{**vars(xp_jax), **_OWN})
for _name in ("exp", "log", "tanh", "sqrt", "rsqrt", "erf", "sigmoid"):
    setattr(XP, _name, _wide(getattr(XP, _name)))


def thirds(x: Array) -> list[Array]:
    """Three values in bf16, whose sum is `x` to the bits of f32."""
    parts = []
    for _ in range(3):
        parts.append(cast(x, bf16))
        x = lax.sub(x, cast(parts[-1], f32))
    return parts
