"""Ops that make a tensor of nothing: one value everywhere, or the place along a dim."""

from __future__ import annotations

from ..core.checks import shaped
from ..core.dtypes import DType, counts_to
from ..core.errors import DTypeError, LayoutError, fail
from ..core.layout import TensorType, plain
from ..core.mesh import Mesh
from .op import Array, Attrs, Call, Inferred, Op, define


def created(name: str, dtype: DType, attrs: Attrs, mesh: Mesh | None) -> TensorType:
    """The type of a value that is made from nothing: `shape`, in the layout that `attrs` ask
    for."""
    shape, layout = tuple(attrs["shape"]), attrs.get("layout")
    if not isinstance(layout, TensorType):
        return plain(dtype, shape, mesh)
    shaped(name, "the layout", layout, shape)
    if any(kind == "sum" for _, kind in layout.partial) and attrs.get("value") != 0:
        raise fail(
            LayoutError,
            f"{name}: only zero can be made as a sum still to be completed",
            [("layout", layout)],
            fix="make it complete, then redistribute it",
        )
    return layout.with_dtype(dtype)


def _full_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred((), (created("full", attrs["dtype"], attrs, None),))


full = define(
    Op(
        "full",
        _full_rule,
        lambda c: c.xp.full(c.shape, c.attrs["value"], c.out.dtype),
        flops=lambda ins, outs, attrs: 0,
        creates=True,
        attrs="dtype shape value layout?",
        memory="created",
        incidental=True,
    )
)


def _iota_local(c: Call) -> Array:
    dim = c.attrs["dim"]
    shape = [1] * len(c.shape)
    shape[dim] = c.shape[dim]
    line = c.xp.reshape(c.xp.cast(c.site.index(c.out, dim), c.out.dtype), tuple(shape))
    return c.xp.broadcast_to(line, c.shape)


def _iota_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dtype, count = attrs["dtype"], tuple(attrs["shape"])[attrs["dim"]]
    if count - 1 > counts_to(dtype):
        raise fail(
            DTypeError,
            f"arange: {dtype} does not hold every whole number below {count}",
            fix=f"count in i32, and cast where that is meant: ts.arange({count}).to('{dtype}')",
        )
    return _full_rule(ins, attrs)


iota = define(
    Op(
        "iota",
        _iota_rule,
        _iota_local,
        flops=lambda ins, outs, attrs: 0,
        creates=True,
        attrs="dtype shape dim layout?",
        memory="created",
        incidental=True,
    )
)
