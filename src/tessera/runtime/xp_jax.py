"""The local array functions in JAX: the engine's half of the `xp` protocol.

The oracle's half (ir/graph/xp_numpy.py) has the same names. Functions call `lax` directly where one
call is enough, since tracing a program calls them for every node.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.dtypes import DType
from ..ir.tile.kernel import Kernel
from . import fused_attention, ragged
from .cpu import convolutions
from .cpu import erf as cpu_erf
from .cpu.narrow_floats import bits_of, floats_of, moved
from .cpu.narrow_floats import cast as cast
from .cpu.narrow_floats import wide as _wide
from .cpu.pooling_windows import window as window
from .cpu.products import contract as contract
from .cpu.products import sum as sum
from .devices import platform
from .user_op import user as user  # a user's own function; part of the protocol

Array = Any


def _binary(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def run(x: Array, y: Array) -> Array:
        if x.shape != y.shape:
            shape = jnp.broadcast_shapes(x.shape, y.shape)
            x, y = broadcast_to(x, shape), broadcast_to(y, shape)
        return f(x, y)

    return run


neg, exp, log, sqrt, rsqrt = lax.neg, lax.exp, lax.log, lax.sqrt, lax.rsqrt
log1p, expm1 = lax.log1p, lax.expm1
real, imag, conj = lax.real, lax.imag, lax.conj
tanh, sin, cos, floor, sign = lax.tanh, lax.sin, lax.cos, lax.floor, lax.sign
abs = jnp.abs  # lax.abs takes no unsigned integers
erf, erfc, erfinv = cpu_erf.erf, lax.erfc, lax.erf_inv
isfinite, logical_not, sigmoid = lax.is_finite, lax.bitwise_not, lax.logistic
add, sub, mul, div, pow = map(_binary, (lax.add, lax.sub, lax.mul, lax.div, lax.pow))
complex = _binary(lax.complex)
maximum, minimum, atan2 = map(_binary, (lax.max, lax.min, lax.atan2))
mod = _binary(jnp.mod)
eq, ne, lt, le, gt, ge = map(_binary, (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge))
bit_and, bit_or, bit_xor = map(_binary, (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor))
logical_and, logical_or, logical_xor = bit_and, bit_or, bit_xor
shift_left, shift_right = _binary(lax.shift_left), _binary(jnp.right_shift)


@_binary
def floordiv(x: Array, y: Array) -> Array:
    whole = jnp.floor_divide(x, y)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return whole
    return jnp.where(y == 0, x / y, whole)  # jax 0.10.0 has NaN for 1.0 // 0.0


def where(pick: Array, x: Array, y: Array) -> Array:
    shape = jnp.broadcast_shapes(pick.shape, x.shape, y.shape)
    return lax.select(broadcast_to(pick, shape), broadcast_to(x, shape), broadcast_to(y, shape))


def bitcast(x: Array, dtype: DType) -> Array:
    return lax.bitcast_convert_type(x, dtype.numpy)


def full(shape: tuple[int, ...], value: float, dtype: DType | str) -> Array:
    return lax.full(shape, value, jnp.int32 if isinstance(dtype, str) else dtype.numpy)


def max(x: Array, dims: tuple[int, ...]) -> Array:
    return lax.reduce_max(x, axes=dims)


def min(x: Array, dims: tuple[int, ...]) -> Array:
    return lax.reduce_min(x, axes=dims)


def prod(x: Array, dims: tuple[int, ...]) -> Array:
    return lax.reduce_prod(_wide(x), axes=dims).astype(x.dtype)


def argmax(x: Array, dim: int) -> Array:
    return lax.argmax(x, dim, jnp.int32)


def argmin(x: Array, dim: int) -> Array:
    return lax.argmin(x, dim, jnp.int32)


def cumsum(x: Array, dim: int) -> Array:
    return lax.cumsum(_wide(x), dim).astype(x.dtype)


def argsort(x: Array, dim: int, descending: bool) -> Array:
    return jnp.argsort(x, axis=dim, stable=True, descending=descending).astype(jnp.int32)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    values, ids = lax.top_k(x, k)
    return values, ids.astype(jnp.int32)


def flip(x: Array, dim: int) -> Array:
    return lax.rev(x, (dim,))


def reshape(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else lax.reshape(x, shape)


def transpose(x: Array, perm: tuple[int, ...]) -> Array:
    moved = [d for d in perm if x.shape[d] != 1]
    if moved == sorted(moved):  # nothing but dims of size 1 changes its place
        return lax.reshape(x, tuple(x.shape[d] for d in perm))
    return lax.transpose(x, perm)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    if x.shape == shape:
        return x
    extra = len(shape) - x.ndim
    return lax.broadcast_in_dim(x, shape, tuple(range(extra, len(shape))))


def slice(
    x: Array, starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    return lax.slice(x, starts, stops, steps)


def pad(x: Array, starts: tuple[int, ...], steps: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    rows = [
        (s, total - s - ((n - 1) * k + 1), k - 1)
        for s, k, n, total in zip(starts, steps, x.shape, shape, strict=True)
    ]
    bits = bits_of(x)
    return floats_of(lax.pad(bits, jnp.zeros((), bits.dtype), rows), x.dtype)


def concat(xs: Sequence[Array], dim: int) -> Array:
    return floats_of(lax.concatenate([bits_of(x) for x in xs], dim), xs[0].dtype)


def take(table: Array, ids: Array, dim: int) -> Array:
    n = table.shape[dim]
    ok = lax.bitwise_and(ids >= 0, ids < n)
    bits = bits_of(table)
    rows = jnp.take(bits, jnp.clip(ids, 0, n - 1), axis=dim, mode="clip")
    shape = (1,) * dim + ids.shape + (1,) * (table.ndim - dim - 1)
    return floats_of(where(reshape(ok, shape), rows, jnp.zeros((), bits.dtype)), table.dtype)


def put(ids: Array, updates: Array, dim: int, size: int) -> Array:
    rest_before, rest_after = updates.shape[:dim], updates.shape[dim + ids.ndim :]
    wide = _wide(updates)
    zeros = jnp.zeros((*rest_before, size, *rest_after), wide.dtype)
    ids = jnp.where(ids < 0, size, ids)
    at = (*(builtins.slice(None),) * dim, ids)
    return zeros.at[at].add(wide, mode="drop").astype(updates.dtype)


def take_along(x: Array, ids: Array, dim: int) -> Array:
    n = x.shape[dim]
    ok = lax.bitwise_and(ids >= 0, ids < n)
    # Dims of size 1 in `ids` stay so: then whole rows are gathered, not single elements.
    wide = tuple(k if i == dim or m == 1 else m for i, (k, m) in enumerate(zip(x.shape, ids.shape)))
    got = jnp.take_along_axis(broadcast_to(x, wide), jnp.clip(ids, 0, n - 1), dim, mode="clip")
    return where(ok, got, jnp.zeros((), x.dtype))


def put_along(ids: Array, updates: Array, dim: int, size: int) -> Array:
    if updates.shape[dim] == 1:  # no sums: an elementwise select, which fuses with other loops
        shape = tuple(size if i == dim else n for i, n in enumerate(updates.shape))
        hit = lax.broadcasted_iota(ids.dtype, shape, dim) == ids
        return jnp.where(hit, updates, jnp.zeros((), updates.dtype))
    ids = broadcast_to(jnp.where(ids < 0, size, ids), updates.shape)
    shape = tuple(size if i == dim else n for i, n in enumerate(updates.shape))
    grid = list(jnp.indices(updates.shape, sparse=True))
    grid[dim] = ids
    wide = _wide(updates)
    put = jnp.zeros(shape, wide.dtype).at[tuple(grid)].add(wide, mode="drop")
    return put.astype(updates.dtype)


def scan(
    step: Callable[..., Any],
    carry: tuple[Array, ...],
    xs: tuple[Array, ...],
    length: int,
    reverse: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    of = partial(jax.tree.map, lambda x: x.dtype)
    made: list[Any] = []

    def scan_step(carry: tuple[Array, ...], now: tuple[Array, ...]) -> Any:
        carry, ys = step(carry, jax.tree.map(floats_of, now, of(xs)))
        made[:] = [of(ys)]
        return carry, jax.tree.map(bits_of, ys)

    carry, ys = lax.scan(
        scan_step, carry, jax.tree.map(bits_of, xs), length=length, reverse=reverse
    )
    return carry, jax.tree.map(floats_of, ys, made[0])


def in_memory(x: Array, space: str) -> Array:
    """Returns `x` in host memory, or in the device's. A CPU has one memory."""
    if platform() == "cpu":
        return x
    spaces = {"host": jax.memory.Space.Host, "device": jax.memory.Space.Device}
    return jax.device_put(x, spaces[space])


def after(x: Array, first: Array, copied: bool) -> Array:
    """Returns `x`, which the compiler computes with only after `first`. `copied`: that is in host
    memory, and one element of it is read."""
    if not first.size:
        return x
    if copied and platform() != "cpu":
        corner = lax.slice(first, (0,) * first.ndim, (1,) * first.ndim)
        return _computed_from(x, in_memory(corner, "device"))
    late, before = lax.optimization_barrier((x, first))
    return dependent(late, before)


def dependent(x: Array, first: Array) -> Array:
    """Returns `x` with a data dependency on `first` on CPUs: XLA drops barriers early there, and
    would merge two equal collectives or layers with one operand."""
    if platform() != "cpu" or not first.size:
        return x
    return _computed_from(x, first)


def _computed_from(x: Array, first: Array) -> Array:
    bits = lax.bitcast_convert_type(first.ravel()[0].astype(jnp.float32), jnp.int32)
    never = (bits * bits) & 3 == 2  # no square is 2 mod 4, which the compiler does not know
    return jnp.where(never, jnp.zeros_like(x), x)


def while_loop(
    step: Callable[[tuple[Array, ...]], tuple[Array, ...]], carry: tuple[Array, ...]
) -> tuple[Array, ...]:
    return lax.while_loop(lambda now: jax.tree.leaves(now[0])[0], step, carry)


def cond(
    pick: Array,
    yes: Callable[[Sequence[Array]], tuple[Array, ...]],
    no: Callable[[Sequence[Array]], tuple[Array, ...]],
    args: Sequence[Array],
) -> tuple[Array, ...]:
    return lax.cond(pick, yes, no, args)


# -- Fourier transforms
def fft(x: Array, kind: str, dim: int, n: int) -> Array:
    """Returns the transform `kind` ("fft", "ifft", "rfft", "irfft") along `dim`; `n` is the size of
    the untransformed dim."""
    y = lax.fft(jnp.moveaxis(x, dim, -1), kind, (n,))
    # XLA's transforms on CPUs take rows that follow each other, also where what reads the result
    # would have another order: a value of one dim has one order only.
    y = lax.optimization_barrier(y.reshape(-1)).reshape(y.shape)
    return jnp.moveaxis(y, -1, dim)


# -- products of rows in runs ---------------------------------------------------------------------
ragged_dot = partial(ragged.ragged_dot, contract)
ragged_contract = partial(ragged.ragged_contract, contract)
attention, attention_grad = fused_attention.attention, fused_attention.attention_grad


# -- convolution and windows ----------------------------------------------------------------------
def conv(
    x: Array,
    w: Array,
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    spread: tuple[int, ...],
    dtype: DType,
) -> Array:
    out = convolutions.conv(x, w, stride, pads, dilation, spread)
    return cast(out, dtype) if out.dtype != dtype.numpy else out


# -- matrices -------------------------------------------------------------------------------------
def _exact(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` computed in f32 at least, with results in the arguments' dtype."""

    def run(*xs: Array, **how: Any) -> Any:
        dtype = xs[0].dtype
        if dtype.itemsize >= 4:
            return f(*xs, **how)
        out = f(*(x.astype(jnp.float32) for x in xs), **how)
        return jax.tree.map(lambda v: v.astype(dtype), out)

    return run


def _column_signs(v: Array) -> Array:
    """Returns for each column the sign of its first element with at least 0.9 of the largest
    size."""
    size = lax.abs(v)
    at = jnp.argmax(size >= 0.9 * size.max(-2, keepdims=True), axis=-2, keepdims=True)
    return jnp.where(jnp.take_along_axis(v, at, -2) < 0, -1, 1).astype(v.dtype)


@_exact
def cholesky(a: Array) -> Array:
    return lax.linalg.cholesky(a, symmetrize_input=True)


@_exact
def triangular_solve(a: Array, y: Array, lower: bool) -> Array:
    return lax.linalg.triangular_solve(a, y, left_side=True, lower=lower)


@_exact
def solve(a: Array, y: Array) -> Array:
    return jnp.linalg.solve(a, y)


@_exact
def slogdet(a: Array) -> tuple[Array, Array]:
    sign, size = jnp.linalg.slogdet(a)
    return sign, size


@_exact
def eigh(a: Array) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(a, symmetrize_input=True)
    return values, vectors * _column_signs(vectors)


@_exact
def qr(a: Array) -> tuple[Array, Array]:
    q, r = jnp.linalg.qr(a)
    signs = jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1).astype(a.dtype)
    return q * signs[..., None, :], r * signs[..., :, None]


@_exact
def svd(a: Array) -> tuple[Array, Array, Array]:
    u, s, vt = jnp.linalg.svd(a, full_matrices=False)
    signs = _column_signs(u)
    return u * signs, s, vt * jnp.swapaxes(signs, -1, -2)


# -- collectives: inside shard_map ----------------------------------------------------------------
@moved
def all_gather(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def reduce_scatter(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def all_reduce(x: Array, axes: tuple[str, ...], kind: str) -> Array:
    """Returns the reduction over the devices along `axes`. A maximum or minimum with a NaN is
    NaN."""
    if kind == "sum":
        return lax.psum(x, axes)
    extreme = lax.pmax if kind == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme(x, axes)
    # Transports treat NaN differently, so they compare integers in the order of the floats, with
    # NaN beyond all others. Not every transport has integers of less than 32 bits.
    floats, whole = (jnp.float64, jnp.int64) if x.dtype.itemsize > 4 else (jnp.float32, jnp.int32)
    nan = floats(jnp.nan if kind == "max" else -jnp.nan)
    wide = x.astype(floats)
    bits = lax.bitcast_convert_type(jnp.where(wide != wide, nan, wide), whole)
    return lax.bitcast_convert_type(_flipped(extreme(_flipped(bits), axes)), floats).astype(x.dtype)


def _flipped(bits: Array) -> Array:
    """Returns the bits of floats as integers in the order of the floats, and back again."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


@moved
def permute(x: Array, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Array:
    """Returns the block received by `pairs` of places along `axes`, zeros without one."""
    # ppermute takes axes only in the mesh's order, and numbers places in that order.
    names = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes)
    if names != axes:
        places = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in axes])
        number = np.argsort(places.transpose([axes.index(a) for a in names]).ravel()).tolist()
        pairs = [(number[a], number[b]) for a, b in pairs]
    return lax.ppermute(x, names, pairs)


@moved
def broadcast(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """Returns the block of place `root` along `axes`, on each device."""
    return lax.platform_dependent(
        x,
        cuda=lambda x: lax.pbroadcast(x, axes, root),
        default=lambda x: _handed_on(x, axes, root),
    )


def _handed_on(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """Returns the broadcast by permutes, where the engine has none: each device with the block
    sends it on, so the number of devices with it doubles in each round."""
    n, far = lax.axis_size(axes), 1
    place = (lax.axis_index(axes) - root) % n
    while far < n:
        pairs = [((root + i) % n, (root + i + far) % n) for i in range(far) if i + far < n]
        came = permute(x, axes, pairs)
        x = jnp.where((place >= far) & (place < 2 * far), came, x)
        far *= 2
    return x


@moved
def all_to_all(x: Array, axes: tuple[str, ...], split: int, concat: int) -> Array:
    return lax.all_to_all(x, axes, split, concat, tiled=False)


def dynamic_slice(x: Array, dim: int, block: Array, size: int) -> Array:
    """Returns block number `block` of `size` elements along `dim`."""
    return lax.dynamic_slice_in_dim(x, block * size, size, dim)


def kernel(k: Kernel, axes: tuple[str, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Returns the outputs of a kernel of Tile IR on a device's blocks."""
    from .kernels import run_kernel  # which computes with the functions above

    return run_kernel(k, axes, arrays)
