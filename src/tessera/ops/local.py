"""Ops of the local view: blocks that belong to one device, and global values made of them.

A value "varying dp" has one block for each device along dp: a global value with a leading dim that
the shape omits. `reinterpret` reads the same blocks as another type: a split dim as separate blocks
and back, or separate values as the terms of a partial sum. It moves no data. The collectives of
`redistribute` move data, and so do two ops that move whole blocks: `permute` sends blocks from
device to device, `broadcast` sends the block of one device to all.
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
    """`dim` without the digits of `axes`, as one device sees it. Raises LayoutError if blocks
    differ in size."""
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
    """The type of one device's block of `t` along `axes`; axes that split nothing are ignored."""
    split = [a for a in axes if a in t.split_axes]
    dims = tuple(block_dim(d, split, t) for d in t.dims)
    return TensorType(t.dtype, dims, t.partial, t.mesh, (*t.varying, *split))


def joined(t: TensorType, axes: Sequence[str], dim: int) -> TensorType:
    """The type of the varying blocks of `t` along `axes`, read as blocks of one dim `dim`."""
    return with_dim(t, dim, joined_dim(axes, digits(t.dims[dim], t.sizes), t))


def joined_dim(axes: Sequence[str], run: Sequence[Digit], t: TensorType) -> Dim:
    """The dim whose digits are one for each of `axes`, followed by `run`."""
    return grouped([*(Digit(t.sizes[a], (a,)) for a in axes if t.sizes[a] > 1), *run])


def with_dim(t: TensorType, dim: int, new: Dim) -> TensorType:
    """`t` with dim `dim` replaced by `new`; it does not vary over the axes of `new`."""
    gone = {a for f in new for a in f.axes}
    dims = (*t.dims[:dim], new, *t.dims[dim + 1 :])
    return TensorType(t.dtype, dims, t.partial, t.mesh, (a for a in t.varying if a not in gone))


def _reinterpret_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of `reinterpret`: each device keeps its block, and only its meaning changes between
    a varying value, a block of a split dim, and a term of a sum. Raises LayoutError if the blocks
    would differ."""
    out = attrs["layout"]
    src = ins[0] if ins[0].mesh is not None else ins[0].on(out.mesh)
    axes = [a for a in out.sizes if _role(src, a) != _role(out, a)]
    moves = {(_role(src, a), _role(out, a)) for a in axes}
    legal = {("all", "varying"), ("split", "varying"), ("varying", "split"), ("varying", "partial"),
             ("partial", "varying")}  # fmt: skip

    def without_axes(t: TensorType) -> TensorType:
        dims = (block_dim(d, axes, t) for d in t.dims)
        partial = tuple(p for p in t.partial if p[0] not in axes)
        return TensorType(t.dtype, dims, partial, t.mesh, (a for a in t.varying if a not in axes))

    if not moves <= legal or without_axes(src) is not without_axes(out):
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
    """The gradient in the result's layout, read as the argument's type. For a replicated argument
    it is partial."""
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


def as_varying(b: Build, x: Any, axes: Iterable[str]) -> Any:
    """`x` as a varying value along `axes`; a partial sum over them is read as its terms."""
    t = x.type
    partial = tuple(p for p in t.partial if p[0] not in axes)
    to = TensorType(t.dtype, t.dims, partial, t.mesh, dict.fromkeys((*t.varying, *axes)))
    return x if to is t else b("reinterpret", x, layout=to)


def _free(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return 0


reinterpret = define(
    Op("reinterpret", _reinterpret_rule, lambda c, x: x, _reinterpret_grad, flops=_free,
       varying=True,
       attrs="layout", memory="view", invariance="moves", linear="each", incidental=True)
)  # fmt: skip


# The rank of each device along `axes`, major first.
axis_index = define(
    Op(
        "axis_index",
        lambda ins, attrs: Inferred((), (attrs["layout"],)),
        lambda c: c.site.rank(c.attrs["axes"], c.out.sizes),
        flops=_free,
        varying=True,
        attrs="axes layout",
        memory="moves",
        invariance="moves",
    )
)


def _varying_block(t: TensorType, axes: Sequence[str]) -> TensorType:
    """`t` as a varying value along `axes`. Raises LayoutError if the mesh lacks one of them."""
    for a in axes:
        if a not in t.sizes:
            raise unknown_axis(a, t.mesh)
    return t.with_varying((*t.varying, *axes))


def _permute_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    want = _varying_block(ins[0], attrs["axes"])
    return Inferred((want,), (want,))


def _permute_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    back = tuple((to, src) for src, to in n.attrs["pairs"])
    return [b("permute", g, axes=n.attrs["axes"], pairs=back)]


# Each pair (source, destination) of ranks along `axes` sends a block; a rank that receives none
# gets zeros.
permute = define(
    Op(
        "permute",
        _permute_rule,
        lambda c, x: c.xp.permute(x, c.attrs["axes"], c.attrs["pairs"]),
        _permute_grad,
        flops=_free,
        varying=True,
        attrs="axes pairs",
        invariance="moves",
        linear="each",
    )
)


def _broadcast_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    want = _varying_block(ins[0], attrs["axes"])
    return Inferred(
        (want,), (want.with_varying(a for a in want.varying if a not in attrs["axes"]),)
    )


def _broadcast_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    """The sum of the copies' gradients at the root, zero elsewhere."""
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


# The block of rank `root` along `axes`, on each device.
broadcast = define(
    Op(
        "broadcast",
        _broadcast_rule,
        lambda c, x: c.xp.broadcast(x, c.attrs["axes"], c.attrs["root"]),
        _broadcast_grad,
        flops=_free,
        varying=True,
        attrs="axes root algorithm?",
        invariance="moves",
    )
)


# -- each device its own way ----------------------------------------------------------------------
def _cond_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of `cond`: both branches take the arguments after the bool and return the same
    types. Results vary along the axes of the bool, and along those of arguments that the branches
    take as one device's own."""
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
    if ins[0].varying and any(True for body in (yes, no) for _ in body.collectives()):
        raise LayoutError(
            "cond: devices choose by their own bools, and wait for each other in a branch",
            which=ins[0],
            fix="decide together, e.g. dist.all_reduce(which, axis, op='max'); or leave the"
            " collectives out of the branches",
        )
    wants, own = [ins[0].complete()], {*ins[0].varying}
    for body_input, t in zip(yes.inputs, ins[1:], strict=True):
        inside = body_input.type.varying
        wants.append(body_input.type.with_varying({*inside, *t.varying}))
        own |= {*t.varying} - {*inside}
    # A sum that is pending has each device's own term already.
    outs = tuple([t.with_varying({*t.varying, *own} - {*t.partial_axes}) for t in outs])
    return Inferred(tuple(wants), outs)


def _cond_local(c: Call, pick: Array, *args: Array) -> tuple[Array, ...]:
    yes, no = c.attrs["yes"], c.attrs["no"]
    return tuple(
        c.xp.cond(pick, lambda xs: tuple(c.run(yes, xs)), lambda xs: tuple(c.run(no, xs)), args)
    )


def _cond_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return max(int(attrs["yes"].flops), int(attrs["no"].flops))


# One of two bodies. If devices choose by bools of their own, the bodies have no collectives: they
# never wait for each other. The gradient is in passes/branches.py.
cond = define(
    Op("cond", _cond_rule, _cond_local, flops=_cond_flops, varying=True, attrs="yes no",
       bodies=True, many=True, invariance="body")
)  # fmt: skip
