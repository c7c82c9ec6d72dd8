"""Ops with structure: `scan` runs a body graph over the leading dim, `item` selects one result,
`after` orders two values, `in_memory` moves one to host memory or back.

A `scan` with length None is a while loop: it runs while its first carry, a bool, is true. `scan`
implements repeated layers (the carry is the activation, the weights are scanned), losses and MLPs
in blocks (token blocks are scanned, gradients are the carry), and attention in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtypes import bool_
from ..core.errors import LayoutError, ShapeError
from ..core.layout import Factor, TensorType, dim_axes, same_type, without
from .cast import narrowed
from .op import Array, Attrs, Batched, Build, Call, Inferred, Op, define


def stacked(t: TensorType, length: int | None) -> TensorType:
    """The type of `length` values of type `t`, stacked along a new, unsplit leading dim."""
    assert length is not None, "a while loop stacks nothing"
    return t.with_dims(((Factor(length),), *t.dims))


def iterations(length: int | None) -> int:
    """The number of iterations of a loop of this length; 1 for a while loop, whose number is not
    known."""
    return 1 if length is None else length


def _scan_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The types of constants and carries as the body takes them, and of scanned values and results
    with one more leading dim. A carry must end in the type in which it began."""
    body, length = attrs["body"], attrs["length"]
    consts, carries = attrs["consts"], attrs["carries"]
    inner = tuple(node.type for node in body.inputs)
    outer = (
        *inner[: consts + carries],
        *(stacked(t, length) for t in inner[consts + carries :]),
    )
    if len(inner) != len(ins) or any(a.shape != t.shape for a, t in zip(outer, ins, strict=True)):
        raise ShapeError(
            f"scan: the body takes {len(inner)} values that do not fit the {len(ins)} given",
            body=", ".join(map(str, outer)),
            given=", ".join(map(str, ins)),
            fix="scanned values carry the length as their first dim",
        )
    results = tuple(node.type for node in body.outputs)
    for start, end in zip(inner[consts : consts + carries], results[:carries], strict=True):
        if not same_type(start, end):
            raise LayoutError(
                "scan: the carry changes its type",
                before=start,
                after=end,
                fix="redistribute the carry at the end of the body",
            )
    if length is None:
        _check_while(ins, attrs)
    return Inferred(outer, (*results[:carries], *(stacked(t, length) for t in results[carries:])))


def _check_while(ins: tuple[TensorType, ...], attrs: Attrs) -> None:
    body, consts, carries = attrs["body"], attrs["consts"], attrs["carries"]
    if len(ins) != consts + carries or len(body.outputs) != carries or attrs["reverse"]:
        raise ShapeError(
            "scan: without a length there are no rows to take, to give or to reverse",
            given=", ".join(map(str, ins)),
            fix="give carries alone, the first of which says whether to go on",
        )
    go = body.inputs[consts].type if carries else None
    if go is None or go.dtype is not bool_ or go.rank or go.partial:
        raise ShapeError(
            "scan: without a length the first carry is one bool, the same on all devices",
            carries=", ".join(str(n.type) for n in body.inputs[consts:]),
            fix="carry whether to go on",
        )
    if go.varying and any(True for _ in body.collectives()):
        raise LayoutError(
            "while_loop: devices go on for different numbers of turns, and wait for each other in "
            "the body",
            until=go,
            fix="decide together, e.g. dist.all_reduce(go, axis, op='max')",
        )


def _scan_local(c: Call, *args: Array) -> tuple[Array, ...]:
    body, consts, carries = c.attrs["body"], c.attrs["consts"], c.attrs["carries"]
    fixed = args[:consts]

    def step(carry: tuple[Array, ...], xs: tuple[Array, ...]) -> tuple[tuple[Array, ...], ...]:
        out = c.run(body, (*fixed, *carry, *xs))
        return tuple(out[:carries]), tuple(out[carries:])

    start, xs = args[consts : consts + carries], args[consts + carries :]
    if c.attrs["length"] is None:
        return tuple(c.xp.while_loop(lambda carry: step(carry, ())[0], tuple(start)))
    end, ys = c.xp.scan(step, tuple(start), tuple(xs), c.attrs["length"], c.attrs["reverse"])
    return (*end, *ys)


def _scan_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return int(iterations(attrs["length"]) * attrs["body"].flops)


# Its gradient is a separate pass (passes/loops.py), because it builds a second body.
scan = define(
    Op(
        "scan",
        _scan_rule,
        _scan_local,
        flops=_scan_flops,
        varying=True,
        attrs="body length consts carries reverse policy",
        bodies=True,
        many=True,
        invariance="body",
    )
)


def _unstack_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    t = ins[0]
    if not t.rank:
        raise ShapeError("unstack: a scalar has no leading dim", x=t)
    want = t.with_dims((without(t.dims[0], dim_axes(t.dims[0]), t.sizes), *t.dims[1:]))
    return Inferred((want,), (want.with_dims(want.dims[1:]),) * t.shape[0])


def _unstack_local(c: Call, x: Array) -> tuple[Array, ...]:
    shape = c.site.shape(c.ins[0])
    parts = []
    for i in range(shape[0]):
        row = c.xp.slice(x, (i, *(0,) * (len(shape) - 1)), (i + 1, *shape[1:]), (1,) * len(shape))
        parts.append(c.xp.reshape(row, shape[1:]))
    return tuple(parts)


def _unstack_grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    t, parts = n.types[0], gs if isinstance(gs, list) else [gs]
    narrow = [narrowed(b, g) for g in parts if g is not None]
    dtypes = {t.dtype if n is None else n.type.dtype for n in narrow}
    if len(dtypes) == 1 and narrow[0] is not None:  # stacked, and sent, as they were made
        rest = iter(narrow)
        parts = [None if g is None else next(rest) for g in parts]
    dtype = next(g.type.dtype for g in parts if g is not None)
    rows = []
    for g in parts:
        if g is None:
            g = b("full", dtype=dtype, shape=t.shape, value=0.0, layout=t.with_dtype(dtype))
        rows.append(b("reshape", g, shape=(1, *t.shape)))
    whole = b("concat", *rows, dim=0) if len(rows) > 1 else rows[0]
    return [whole if dtype is t.dtype else b("cast", whole, dtype=t.dtype)]


# The rows of the leading dim as separate results, for example the weights of stacked layers.
unstack = define(
    Op("unstack", _unstack_rule, _unstack_local, _unstack_grad, flops=lambda ins, outs, attrs: 0,
       many=True, elements="chosen", memory="moves")
)  # fmt: skip


def _item_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, (ins[attrs["index"]],))


def _item_local(c: Call, *results: Array) -> Any:
    return results[c.attrs["index"]]


item = define(
    Op("item", _item_rule, _item_local, flops=lambda ins, outs, attrs: 0, varying=True,
       attrs="index",
       memory="view", invariance="moves", linear="each")
)  # fmt: skip


def _after_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, ins[:1])


def _after_batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched | None:
    return Batched(attrs) if which[0] else None


# Its first argument, which exists only after the second: the compiler neither merges what is
# computed from it with an equal computation before it, nor moves that forward. With `copied` the
# second is in host memory, and the copy to it has ended.
after = define(
    Op("after", _after_rule, lambda c, x, first: c.xp.after(x, first, "copied" in c.attrs),
       lambda b, n, g: [g, None], flops=lambda ins, outs, attrs: 0, varying=True, attrs="copied?",
       batch=_after_batch, elements="same", memory="cheap", linear="joint")
)  # fmt: skip


def _in_memory_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, ins)


# Its argument in host memory (`space` "host"), where nothing is computed with it, or back in the
# device's ("device"). A CPU has one memory.
in_memory = define(
    Op("in_memory", _in_memory_rule, lambda c, x: c.xp.in_memory(x, c.attrs["space"]),
       lambda b, n, g: [g], flops=lambda ins, outs, attrs: 0, varying=True, attrs="space",
       batch=lambda attrs, which, ins, size: Batched(attrs), elements="same", memory="view",
       linear="each")
)  # fmt: skip
