"""Ops that create a tensor without arguments: `full`, a constant, and `iota`, the index along a
dim."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtypes import DType, counts_to, uint32
from ..core.errors import DTypeError, LayoutError, ShapeError
from ..core.layout import TensorType, plain
from ..core.mesh import Mesh
from ..core.tensor_checks import shaped
from .op import Array, Attrs, Call, Inferred, Op, define


def created(name: str, dtype: DType, attrs: Attrs, mesh: Mesh | None) -> TensorType:
    """The type of a created value: shape and layout from `attrs`."""
    shape, layout = tuple(attrs["shape"]), attrs.get("layout")
    if not isinstance(layout, TensorType):
        return plain(dtype, shape, mesh)
    shaped(name, "the layout", layout, shape)
    if any(kind == "sum" for _, kind in layout.partial) and attrs.get("value") != 0:
        raise LayoutError(
            f"{name}: only zero can be made as a sum still to be completed",
            layout=layout,
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


def levels(attrs: Attrs) -> list[tuple[int, int, int]]:
    """(dim, count, size) for each cut of a larger value that this value is a block of, the last cut
    first: `count` blocks along `dim`, of which runs of `size` indices are contiguous."""
    blocks = attrs.get("blocks", ())
    return list(zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True))


def check_numbers(name: str, numbers: Sequence[TensorType], attrs: Attrs) -> None:
    """Raises ShapeError unless there is one block number for each cut in `levels`."""
    odd = any(n.shape or n.dtype is not uint32 for n in numbers)
    if odd or len(numbers) != len(levels(attrs)):
        raise ShapeError(
            f"{name}: the number of a block is u32[], one for each three of `blocks`",
            rows=[(f"number{i}", n) for i, n in enumerate(numbers)],
            fix="see ts.map_chunks",
        )


def line(c: Call, dim: int, numbers: Sequence[Array]) -> Array:
    """The index (u32) of each local element along `dim` of the largest value. `numbers` are the
    numbers of its block in each cut."""
    xp = c.xp
    found = xp.cast(c.site.index(c.out, dim), uint32)
    have = c.out.shape[dim]
    for (d, count, size), number in zip(levels(c.attrs), numbers, strict=True):
        if d != dim:
            continue
        first = xp.mul(number, xp.full((), size, uint32))
        if size < have:  # the runs of the blocks take turns
            runs, found = (f(found, xp.full((), size, uint32)) for f in (xp.floordiv, xp.mod))
            first = xp.add(first, xp.mul(runs, xp.full((), count * size, uint32)))
        found = xp.add(found, first)
        have *= count
    return found


def _iota_local(c: Call, *numbers: Array) -> Array:
    dim = c.attrs["dim"]
    shape = [1] * len(c.shape)
    shape[dim] = c.shape[dim]
    index = line(c, dim, numbers) if numbers else c.site.index(c.out, dim)
    return c.xp.broadcast_to(c.xp.reshape(c.xp.cast(index, c.out.dtype), tuple(shape)), c.shape)


def _iota_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dtype, count = attrs["dtype"], tuple(attrs["shape"])[attrs["dim"]]
    check_numbers("iota", ins, attrs)
    if count - 1 > counts_to(dtype):
        raise DTypeError(
            f"arange: {dtype} does not hold every whole number below {count}",
            fix=f"count in i32, and cast where that is meant: ts.arange({count}).to('{dtype}')",
        )
    return Inferred(tuple(t.replicated() for t in ins), _full_rule(ins, attrs).outs)


iota = define(
    Op(
        "iota",
        _iota_rule,
        _iota_local,
        flops=lambda ins, outs, attrs: 0,
        creates=True,
        attrs="dtype shape dim layout? blocks?",
        memory="created",
        incidental=True,
    )
)
