"""`fft`: Fourier transforms along one dim, which is whole on each device.

A split dim gives its axes to another dim that they divide, which is one all_to_all: a transform of
a grid split into pencils. Where no dim takes them, the dim is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtypes import complex64, complex128, f32, f64
from ..core.errors import DTypeError
from ..core.layout import Factor, TensorType, dim_axes, shard_count
from .batch import next_dim
from .elementwise import const
from .op import Array, Attrs, Build, Call, Inferred, Op, define

REAL_INPUT, REAL_OUTPUT = "rfft", "irfft"
KINDS = ("fft", "ifft", REAL_INPUT, REAL_OUTPUT)


def taker(t: TensorType, dim: int) -> int | None:
    """The dim of `t` that takes the axes of `dim`: rather one that is whole, so that no axis moves
    twice, then one that they divide, then the one with the largest blocks. None if none is large
    enough."""
    blocks = {}
    for i, d in enumerate(t.dims):
        n = shard_count((*dim_axes(d), *dim_axes(t.dims[dim])), t.sizes)
        if i != dim and len(d) == 1 and t.shape[i] >= n:
            blocks[i] = not dim_axes(d), not t.shape[i] % n, t.shape[i] // n
    return max(blocks, key=lambda i: blocks[i]) if blocks else None


def _moved(t: TensorType, dim: int) -> TensorType:
    """`t` with `dim` whole, and its axes at the dim that takes them."""
    axes, to = dim_axes(t.dims[dim]), taker(t, dim)
    if not axes:
        return t
    dims = [*t.dims]
    dims[dim] = (Factor(t.shape[dim]),)
    if to is not None:
        dims[to] = (Factor(t.shape[to], (*dim_axes(dims[to]), *axes)),)
    return t.with_dims(dims)


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    kind, dim, n = attrs["kind"], attrs["dim"], attrs["n"]
    takes = (f32, f64) if kind == REAL_INPUT else (complex64, complex128)
    (x,) = ins
    if x.dtype not in takes:
        raise DTypeError(
            f"{kind}: takes {' or '.join(map(str, takes))}", x=x, fix="cast it with .to(dtype)"
        )
    if any(k != "sum" for _, k in x.partial):
        x = x.complete()
    want = _moved(x, dim)
    dims = [*want.dims]
    dims[dim] = (Factor(n // 2 + 1 if kind == REAL_INPUT else n),)
    dtype = x.dtype
    if kind == REAL_INPUT:
        dtype = complex64 if dtype is f32 else complex128
    elif kind == REAL_OUTPUT:
        dtype = dtype.real
    return Inferred((want,), (want.with_dims(dims).with_dtype(dtype),))


def _local(c: Call, x: Array) -> Array:
    return c.xp.fft(x, c.attrs["kind"], c.attrs["dim"], c.attrs["n"])


def _grad(b: Build, node: Any, g: Any) -> Sequence[Any]:
    """The transposed transform. That of a complex one is itself, since its matrix is symmetric."""
    kind, dim, n = node.attrs["kind"], node.attrs["dim"], node.attrs["n"]
    if kind == REAL_INPUT:  # the other half of the frequencies has no gradient
        whole = tuple(n if i == dim else k for i, k in enumerate(g.type.shape))
        starts, steps = (0,) * len(whole), (1,) * len(whole)
        g = b("pad", g, starts=starts, steps=steps, shape=whole)
        return [b("real", b("fft", g, kind="fft", dim=dim, n=n))]
    if kind == REAL_OUTPUT:  # all but the first and the middle frequency are read twice
        back = b("conj", b("fft", g, kind=REAL_INPUT, dim=dim, n=n))
        shape = tuple(k if i == dim else 1 for i, k in enumerate(back.type.shape))
        at = b("iota", dtype=g.type.dtype, shape=shape, dim=dim)
        ends = b("eq", at, const(b, at, 0.0))
        if n % 2 == 0:
            ends = b("logical_or", ends, b("eq", at, const(b, at, n // 2)))
        share = b("where", ends, const(b, at, 1.0 / n), const(b, at, 2.0 / n))
        return [b("mul", back, b("cast", share, dtype=back.type.dtype))]
    return [b("fft", g, kind=kind, dim=dim, n=n)]


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    n = attrs["n"]
    half = attrs["kind"] in (REAL_INPUT, REAL_OUTPUT)
    rows = max(ins[0].size, outs[0].size) // max(n // 2 + 1 if half else n, 1)
    return int(5 * rows * n * max(1.0, math.log2(max(n, 1)))) // (1 + half)


fft = define(
    Op("fft", _rule, _local, _grad, flops=_flops, attrs="kind dim n", batch=next_dim("dim"),
       scratch=lambda ins, outs, attrs: outs[0].local_bytes, invariance="library", linear="each")
)  # fmt: skip
