"""`contract_fp8`: a product whose factors are rounded to fp8, each with one scale.

The values are rounded to e4m3; the gradient, whose values are of many sizes, to e5m2. A scale takes
the largest value of its tensor to the largest of the dtype, so it is the same for every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtypes import DType, f32, fp8_e4m3, fp8_e5m2, largest
from ..core.layout import TensorType
from .contract import index_of, spell
from .elementwise import need
from .index_string import Index, contraction_flops, letter_sizes, propagate
from .op import Array, Attrs, Batched, Build, Call, Inferred, Op, define


def scale_of(b: Callable[..., Any], x: Any, dtype: DType) -> Any:
    """The scale of the node `x` for `dtype`, f32[]: its largest absolute value over that of
    `dtype`; 1 for zeros."""
    x = b("stop_gradient", x)
    top = b("cast", b("abs", x), dtype=f32)
    top = b("max", top, dims=tuple(range(top.type.rank))) if top.type.rank else top
    one, zero, unit = (
        b("full", dtype=f32, shape=(), value=v) for v in (1.0, 0.0, 1.0 / largest(dtype))
    )
    scale = b("mul", top, unit)
    return b("where", b("gt", scale, zero), scale, one)


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    x, y, *scales = ins
    need("contract_fp8", ins, ("float",))
    got = propagate("contract_fp8", index_of((x, y), attrs), (x, y), attrs["dtype"])
    whole = tuple(s.replicated() for s in scales)
    return Inferred((*got.wants, *whole), got.outs, got.reduces)


def _local(c: Call, x: Array, y: Array, x_scale: Array, y_scale: Array) -> Array:
    xp, index = c.xp, index_of(c.ins[:2], c.attrs)

    def narrow(v: Array, scale: Array, dtype: DType) -> Array:
        wide = xp.div(xp.cast(v, f32), scale)
        top = xp.full((), largest(dtype), f32)
        return xp.cast(xp.maximum(xp.minimum(wide, top), xp.neg(top)), dtype)

    left = narrow(x, x_scale, c.attrs["left"])
    product = xp.contract(index.args, index.out, (left, narrow(y, y_scale, fp8_e4m3)), f32)
    return xp.cast(xp.mul(product, xp.mul(x_scale, y_scale)), c.out.dtype)


def _grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, y, x_scale, y_scale = n.args
    index = index_of([x.type, y.type], n.attrs)
    slope = scale_of(b, g, fp8_e5m2)
    rows = (
        (x, index.args[0], y, index.args[1], y_scale),
        (y, index.args[1], x, index.args[0], x_scale),
    )
    return [
        *(
            b("contract_fp8", g, other, slope, scale, left=fp8_e5m2, dtype=arg.type.dtype,
              index=spell(Index((index.out, letters), own)))
            for arg, own, other, letters, scale in rows
        ),
        None,
        None,
    ]  # fmt: skip


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    index = index_of(ins[:2], attrs)
    return contraction_flops(index, letter_sizes("contract_fp8", index, ins[:2]))


def _scratch(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return sum(t.local_bytes // t.dtype.bytes for t in ins[:2])


def _batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched | None:
    return None  # the scale would be one of all examples


contract_fp8 = define(
    Op("contract_fp8", _rule, _local, _grad, flops=_flops, attrs="index left dtype", batch=_batch,
       memory="product", scratch=_scratch)
)  # fmt: skip
