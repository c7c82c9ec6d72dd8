"""The ops of the local view: what each device has of its own, and how the whole is made of it.

A value "varying dp" has one block for each device along dp: a global value with a leading dim that
the shape leaves out. `reinterpret` reads the same blocks under another type: a split dim as blocks
of their own and back, values of their own as the summands of a partial sum. It moves nothing. What
moves data are the collectives of `redistribute`, and two that move whole blocks: `permute` hands
them from device to device, `broadcast` gives all the block of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.dtypes import bool_, int32
from ..core.errors import GraphError, LayoutError, ShapeError
from ..core.layout import (
    Digit,
    Dim,
    TensorType,
    digits,
    grouped,
    plain,
    same_type,
    unknown_axis,
)
from ..core.reshard import completed
from .op import Array, Attrs, Build, Call, Inferred, Op, define


def block_dim(dim: Dim, axes: Iterable[str], t: TensorType) -> Dim:
    """`dim` as one device along `axes` sees it. Raises LayoutError if blocks are not equal."""
    gone = set(axes)
    run = digits(dim, t.sizes)
    if any(d.uneven and gone & set(d.axes) for d in run):
        raise LayoutError(
            f"local view: a dim does not divide over {', '.join(sorted(gone))}",
            tensor=t,
            fix="pad it to a multiple, or pass the tensor replicated",
        )
    return grouped(d for d in run if not gone & set(d.axes))


def as_local(t: TensorType, axes: Iterable[str]) -> TensorType:
    """The type of one device's block of `t` along `axes`; what they do not split stays whole."""
    split = [a for a in axes if a in t.split_axes]
    dims = tuple(block_dim(d, split, t) for d in t.dims)
    return TensorType(t.dtype, dims, t.partial, t.mesh, (*t.varying, *split))


def joined(t: TensorType, axes: Sequence[str], dim: int) -> TensorType:
    """The type of each device's own blocks put together along `dim`, where they are."""
    return with_dim(t, dim, joined_dim(axes, digits(t.dims[dim], t.sizes), t))


def joined_dim(axes: Sequence[str], run: Sequence[Digit], t: TensorType) -> Dim:
    """The digits `run` below a digit for each of `axes`."""
    return grouped([*(Digit(t.sizes[a], (a,)) for a in axes if t.sizes[a] > 1), *run])


def with_dim(t: TensorType, dim: int, new: Dim) -> TensorType:
    """`t` with another dim; along the axes that split it a device has nothing else of its own."""
    gone = {a for f in new for a in f.axes}
    dims = (*t.dims[:dim], new, *t.dims[dim + 1 :])
    return TensorType(t.dtype, dims, t.partial, t.mesh, (a for a in t.varying if a not in gone))


def _reinterpret_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """Each device keeps its block; only what is said of it changes: its own value, a part of a
    split dim, a share of a sum. Raises LayoutError if the blocks would differ."""
    out = attrs["layout"]
    src = ins[0] if ins[0].mesh is not None else ins[0].on(out.mesh)
    axes = [a for a in out.sizes if _role(src, a) != _role(out, a)]
    moves = {(_role(src, a), _role(out, a)) for a in axes}
    legal = {("all", "varying"), ("split", "varying"), ("varying", "split"), ("varying", "partial"),
             ("partial", "varying")}  # fmt: skip

    def rest(t: TensorType) -> TensorType:
        dims = (block_dim(d, axes, t) for d in t.dims)
        partial = tuple(p for p in t.partial if p[0] not in axes)
        return TensorType(t.dtype, dims, partial, t.mesh, (a for a in t.varying if a not in axes))

    if not moves <= legal or rest(src) is not rest(out):
        raise LayoutError(
            "reinterpret: the two types are not readings of the same blocks",
            rows=[("from", src), ("to", out)],
            fix="give each device's block its own axis, a split dim or a partial sum",
        )
    return Inferred(ins, (out,))


def _role(t: TensorType, axis: str) -> str:
    if axis in t.split_axes:
        return "split"
    return "partial" if axis in t.partial_axes else "varying" if axis in t.varying else "all"


def _reinterpret_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    """The gradient in the result's layout, read back. What all devices had the same becomes a sum
    over them."""
    src, out = n.args[0].type, n.type
    fixed = {*src.split_axes, *out.split_axes, *src.varying, *out.varying, *out.partial_axes}
    if any(k != "sum" for a, k in out.partial if a not in src.partial_axes):
        raise GraphError(
            "reinterpret: a max or min over devices has no gradient by itself",
            fix="use dist.all_reduce(x, axis, op=...), which has one",
        )
    if any(_role(src, a) == "partial" for a in out.varying):
        raise GraphError(
            "reinterpret: the summands of a gradient over devices have no second gradient",
            fix='write the loop with policy="recompute", or the loss without blocks',
        )
    free = tuple(p for p in g.type.partial if p[0] not in fixed)
    g = b.redistribute(
        g, out.complete().with_partial(free).with_dtype(g.type.dtype), "for the gradient"
    )
    spread = tuple((a, "sum") for a in out.varying if _role(src, a) == "all")
    partial = (*free, *spread)
    return [
        b(
            "reinterpret",
            g,
            layout=TensorType(g.type.dtype, src.dims, partial, out.mesh, src.varying),
        )
    ]


def own_along(b: Build, x: Any, axes: Iterable[str]) -> Any:
    """`x` as each device's own along `axes`: its share, where a sum over them is pending."""
    t = x.type
    partial = tuple(p for p in t.partial if p[0] not in axes)
    to = TensorType(t.dtype, t.dims, partial, t.mesh, dict.fromkeys((*t.varying, *axes)))
    return x if to is t else b("reinterpret", x, layout=to)


def _free(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return 0


reinterpret = define(
    Op("reinterpret", _reinterpret_rule, lambda c, x: x, _reinterpret_grad, flops=_free, own=True,
       attrs="layout", memory="view", invariance="moves", linear="each", incidental=True)
)  # fmt: skip


# The place of each device along `axes`, major first.
axis_index = define(
    Op(
        "axis_index",
        lambda ins, attrs: Inferred((), (attrs["layout"],)),
        lambda c: c.site.rank(c.attrs["axes"], c.out.sizes),
        flops=_free,
        own=True,
        attrs="axes layout",
        memory="moves",
        invariance="moves",
    )
)


def _own_block(t: TensorType, axes: Sequence[str]) -> TensorType:
    """`t` as each device's own along `axes`."""
    for a in axes:
        if a not in t.sizes:
            raise unknown_axis(a, t.mesh)
    return t.with_varying((*t.varying, *axes))


def _permute_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    want = _own_block(ins[0], attrs["axes"])
    return Inferred((want,), (want,))


def _permute_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    back = tuple((to, src) for src, to in n.attrs["pairs"])
    return [b("permute", g, axes=n.attrs["axes"], pairs=back)]


# Each pair hands the block of one place along `axes` to another; who gets none has zeros.
permute = define(
    Op(
        "permute",
        _permute_rule,
        lambda c, x: c.xp.permute(x, c.attrs["axes"], c.attrs["pairs"]),
        _permute_grad,
        flops=_free,
        own=True,
        attrs="axes pairs",
        invariance="moves",
        linear="each",
    )
)


def _broadcast_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    want = _own_block(ins[0], attrs["axes"])
    return Inferred(
        (want,), (want.with_varying(a for a in want.varying if a not in attrs["axes"]),)
    )


def _broadcast_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    """What all copies were worth, at the root; nothing elsewhere."""
    axes, src = n.attrs["axes"], n.args[0].type
    whole = b.redistribute(g, completed(g.type, [a for a in axes if a in g.type.partial_axes]))
    t = whole.type
    mine = b(
        "reinterpret",
        whole,
        layout=t.with_varying((*t.varying, *(a for a in axes if a in src.varying))),
    )
    place = b("axis_index", axes=axes, layout=plain(int32, (), t.mesh).with_varying(axes))
    here = b("eq", place, b("full", dtype=int32, shape=(), value=n.attrs["root"]))
    return [b("where", here, mine, b("full", dtype=t.dtype, shape=(), value=0.0))]


# The block at the place `root` along `axes`, on each device.
broadcast = define(
    Op(
        "broadcast",
        _broadcast_rule,
        lambda c, x: c.xp.broadcast(x, c.attrs["axes"], c.attrs["root"]),
        _broadcast_grad,
        flops=_free,
        own=True,
        attrs="axes root algorithm?",
        invariance="moves",
    )
)


# -- each device its own way ----------------------------------------------------------------------
def _cond_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """Both branches take the given values, after the bool, and give the same types."""
    yes, no = attrs["yes"], attrs["no"]
    outs = tuple(n.type for n in yes.outputs)
    if not ins or ins[0].dtype is not bool_ or ins[0].rank:
        raise ShapeError("cond: its first argument is one bool", given=ins[0])
    for body in (yes, no):
        inner = tuple(n.type for n in body.inputs)
        if len(inner) != len(ins) - 1 or any(
            a.shape != b.shape for a, b in zip(inner, ins[1:], strict=True)
        ):
            raise ShapeError(
                f"cond: a branch takes {len(inner)} values that do not fit those given",
                branch=", ".join(map(str, inner)),
                given=", ".join(map(str, ins[1:])),
                fix="give both branches the same values",
            )
    ends = tuple(n.type for n in no.outputs)
    if len(outs) != len(ends) or not all(map(same_type, outs, ends)):
        raise LayoutError(
            "cond: the two branches give different types",
            yes=", ".join(map(str, outs)),
            no=", ".join(map(str, ends)),
            fix="give values of one shape, dtype and layout from both",
        )
    return Inferred((ins[0], *(n.type for n in yes.inputs)), outs)


def _cond_local(c: Call, pick: Array, *args: Array) -> tuple[Array, ...]:
    yes, no = c.attrs["yes"], c.attrs["no"]
    return tuple(
        c.xp.cond(pick, lambda xs: tuple(c.run(yes, xs)), lambda xs: tuple(c.run(no, xs)), args)
    )


def _cond_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return max(int(attrs["yes"].flops), int(attrs["no"].flops))


# One of two bodies, as each device's own bool says. Bodies hold no collectives, so devices that go
# different ways do not wait for each other. Its gradient is in passes/differentiate.py.
cond = define(
    Op("cond", _cond_rule, _cond_local, flops=_cond_flops, attrs="yes no",
       bodies=True, many=True, invariance="body")
)  # fmt: skip
