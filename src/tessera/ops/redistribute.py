"""Collectives that change a layout. In global terms each of them is the identity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtypes import bool_, int32
from ..core.errors import LayoutError
from ..core.layout import (
    Digit,
    TensorType,
    dim_axes,
    dim_text,
    parse_dim,
    shard_count,
    unknown_axis,
    without,
)
from ..core.reshard import Step, completed, gathered
from .op import Array, Attrs, Build, Call, Inferred, Op, define


def step_attrs(step: Step, x: TensorType, order: str = "") -> dict[str, Any]:
    """The attributes of the node for `step` on a value of type `x`. A sum is added in `order` ("":
    the order of the program's level)."""
    attrs: dict[str, Any] = {"axes": step.axes}
    if order and {kind for axis, kind in x.partial if axis in step.axes} == {"sum"}:
        attrs["order"] = order
    if step.dim >= 0:
        attrs["dim"] = step.dim
    if step.to_dim >= 0:
        attrs["to_dim"] = step.to_dim
        attrs["into"] = dim_text(step.type.dims[step.to_dim])
    return attrs


def _arrive(t: TensorType, attrs: Attrs) -> TensorType:
    """`t` with dim `to_dim` split as in the text `into`, by `axes` in addition to its own."""
    d, axes = attrs["to_dim"], attrs["axes"]
    for a in axes:
        if a not in t.sizes:
            raise unknown_axis(a, t.mesh)
    into = parse_dim(attrs["into"])
    new = t.with_dims((*t.dims[:d], into, *t.dims[d + 1 :]))
    here = set(dim_axes(new.dims[d]))
    fits = here.issuperset(axes) and without(new.dims[d], axes, t.sizes) == t.dims[d]
    if not fits or _part_of_a_digit(new, axes):
        raise LayoutError(
            f"redistribute: {attrs['into']} is not dim {d} split over {', '.join(axes)}",
            x=t,
            fix="keep the other digits of the dim as they are",
        )
    return new


Types = tuple[TensorType, ...]


def _part_of_a_digit(t: TensorType, axes: Sequence[str]) -> bool:
    """Returns whether `axes` are a proper subset of the axes of an uneven digit: then its blocks do
    not line up with blocks of the remaining axes."""
    split = [set(d.axes) for i in t.padded_dims for d in t.digits(i) if d.uneven]
    return any(s & set(axes) and not s <= set(axes) for s in split)


def _leave(t: TensorType, axes: Sequence[str]) -> TensorType:
    """`t` gathered over `axes` by one collective. Raises LayoutError for a part of an uneven
    digit's axes."""
    if _part_of_a_digit(t, axes):
        raise LayoutError(
            f"redistribute: {', '.join(axes)} cannot leave a dim that it splits unevenly with other"
            " axes",
            x=t,
            fix="gather all axes of that dim at once",
        )
    return gathered(t, axes)


def _all_gather(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, (_leave(ins[0], attrs["axes"]),))


def _all_reduce(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, (completed(ins[0], attrs["axes"]),))


def _reduce_scatter(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    if any(kind != "sum" for axis, kind in ins[0].partial if axis in attrs["axes"]):
        raise LayoutError(
            "reduce_scatter: only a sum is completed in parts",
            x=ins[0],
            fix="complete it with all_reduce, then split it",
        )
    return Inferred(ins, (_arrive(completed(ins[0], attrs["axes"]), attrs),))


def _all_to_all(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, (_arrive(_leave(ins[0], attrs["axes"]), attrs),))


def _shard(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, (_arrive(ins[0], attrs),))


def _to_partial(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    new = tuple((a, "sum") for a in attrs["axes"])
    return Inferred(ins, (ins[0].with_partial((*ins[0].partial, *new)),))


def _to_mesh(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return Inferred(ins, (ins[0].on(attrs["layout"].mesh),))


def _around(t: TensorType, dim: int, axes: Sequence[str]) -> tuple[int, int, int, Digit | None]:
    """For `axes` in `dim`: (local size above, number of devices, local size below, the uneven digit
    or None)."""
    run = t.digits(dim)
    at = [i for i, d in enumerate(run) if set(d.axes) & set(axes)]
    above = math.prod(d.local for d in run[: at[0]])
    below = math.prod(d.local for d in run[at[-1] + 1 :])
    uneven = run[at[0]] if run[at[0]].uneven else None
    return above, shard_count(axes, t.sizes), below, uneven


def _split(shape: tuple[int, ...], dim: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:dim], *parts, *shape[dim + 1 :])


def _gather_local(c: Call, x: Array) -> Array:
    """Gathers the digit of `dim` that `axes` split. If there are digits above it, the dim is
    reshaped so that the parts are concatenated at the digit; padding of an uneven split is
    removed."""
    dim, axes = c.attrs["dim"], c.attrs["axes"]
    above, n, below, uneven = _around(c.ins[0], dim, axes)
    here = c.site.shape(c.ins[0])
    if uneven is not None:
        x = c.xp.reshape(x, _split(here, dim, (above, uneven.local, below)))
        x = c.xp.all_gather(x, axes, dim + 1)
        shape = _split(here, dim, (above, n * uneven.local, below))
        stops = _split(here, dim, (above, uneven.size, below))
        if stops != shape:
            x = c.xp.slice(x, (0,) * len(shape), stops, (1,) * len(shape))
    elif above == 1:
        return c.xp.all_gather(x, axes, dim)
    else:
        x = c.xp.reshape(x, _split(here, dim, (above, 1, below)))
        x = c.xp.all_gather(x, axes, dim + 1)
    return c.xp.reshape(x, c.shape)


def _exposed(c: Call, x: Array) -> tuple[Array, int]:
    """(`x` with the digit that `axes` will split as a separate dim, after `to_dim`, padded to whole
    blocks; the size of one block)."""
    dim = c.attrs["to_dim"]
    above, n, below, uneven = _around(c.out, dim, c.attrs["axes"])
    here = c.site.shape(c.ins[0])
    if uneven is None:
        return c.xp.reshape(x, _split(here, dim, (above, n, below))), 1
    x = c.xp.reshape(x, _split(here, dim, (above, uneven.size, below)))
    if uneven.size < n * uneven.local:
        wide = _split(here, dim, (above, n * uneven.local, below))
        x = c.xp.pad(x, (0,) * len(wide), (1,) * len(wide), wide)
    return x, uneven.local


def _scatter_local(c: Call, x: Array) -> Array:
    dim, axes = c.attrs["to_dim"], c.attrs["axes"]
    above, _, _, uneven = _around(c.out, dim, axes)
    if above == 1 and uneven is None:
        return _truths(c, c.xp.reduce_scatter(_counts(c, x), axes, dim))
    x, _ = _exposed(c, x)
    x = c.xp.reduce_scatter(_counts(c, x), axes, dim + 1)
    return c.xp.reshape(_truths(c, x), c.shape)


def _shard_local(c: Call, x: Array) -> Array:
    dim, axes = c.attrs["to_dim"], c.attrs["axes"]
    x, block = _exposed(c, x)
    x = c.xp.dynamic_slice(x, dim + 1, c.site.rank(axes, c.out.sizes), block)
    return c.xp.reshape(x, c.shape)


def _exchange_local(c: Call, x: Array) -> Array:
    """One all_to_all: the axes leave one dim and split another, or another digit of that dim."""
    i, j, axes = c.attrs["dim"], c.attrs["to_dim"], c.attrs["axes"]
    above_i, n, below_i, _ = _around(c.ins[0], i, axes)
    above_j, _, below_j, _ = _around(c.out, j, axes)
    # Expose the digit that `axes` will split in dim j, exchange it, and put the parts into dim i.
    shape = list(c.site.shape(c.ins[0]))
    if i == j:  # within one dim: one of the two places is above the other
        down = above_j >= n * above_i
        top, low = (above_i, below_j) if down else (above_j, below_i)
        mid = shape[i] // (top * n * low)
        parts_i = (top, mid, n, low) if down else (top, n, mid, low)
        x = c.xp.reshape(x, _split(tuple(shape), i, parts_i))
        x = c.xp.all_to_all(x, axes, *((i + 2, i + 1) if down else (i + 1, i + 2)))
        return c.xp.reshape(x, c.shape)
    parts = [[m] for m in shape]
    parts[i], parts[j] = [above_i, below_i], [above_j, n, below_j]
    flat = tuple(m for p in parts for m in p)
    split = sum(len(p) for p in parts[:j]) + 1
    concat = sum(len(p) for p in parts[:i]) + 1
    concat -= split < concat  # counted once the split dim is gone
    x = c.xp.all_to_all(c.xp.reshape(x, flat), axes, split, concat)
    return c.xp.reshape(x, c.shape)


def _reduce_local(c: Call, x: Array) -> Array:
    kind = dict(c.ins[0].partial).get(c.attrs["axes"][0], "sum")
    if kind != "sum":
        return c.xp.all_reduce(x, c.attrs["axes"], kind)
    return _truths(c, c.xp.all_reduce(_counts(c, x), c.attrs["axes"], kind))


def _counts(c: Call, x: Array) -> Array:
    """The terms of a sum as engines add them: bools as int32, as engines cannot sum bools."""
    return c.xp.cast(x, int32) if c.out.dtype is bool_ else x


def _truths(c: Call, x: Array) -> Array:
    """The sum of bools as a bool: true if any term is, as in NumPy."""
    return c.xp.cast(x, bool_) if c.out.dtype is bool_ else x


def _to_partial_local(c: Call, x: Array) -> Array:
    xp = c.xp
    first = xp.eq(c.site.rank(c.attrs["axes"], c.out.sizes), xp.full((), 0, "index"))
    return xp.where(first, x, xp.full((), 0, c.out.dtype))


def _grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    """The gradient of a collective, which is the identity in global terms. A gather's gradient is
    split again.

    A reduce_scatter or all_to_all that the user wrote is undone at once; otherwise each reader of
    the gradient would undo it. At the level "mesh_invariant" every change is undone: a gradient in
    another layout than its value would be summed in another order, wherever a loop or a stage ends.
    """
    src, out = n.args[0].type, n.type
    gone = [a for a in src.split_axes if a not in out.split_axes]
    exact = b.options.mesh_invariant
    rested = _rested(src, out)
    if exact and rested:
        # The program treats a value at rest as whole, so its gradient is that of a whole value, and
        # is redistributed to its layout at the end.
        return [g]
    undone = n.op in ("reduce_scatter", "all_to_all") and (exact or not n.note)
    undone = undone or (n.op in ("all_gather", "all_to_all") and bool(gone))
    if undone or (exact and n.op == "shard"):
        free = tuple(p for p in g.type.partial if p[0] not in src.split_axes)
        if exact and undone:
            free = ()  # all at once, in the one order that there is
        by = n.attrs.get("algorithm", "")
        to, why = src.with_partial(free).with_dtype(g.type.dtype), "for the gradient"
        if by or not (rested or _is_input(n.args[0])):
            return [b.redistribute(g, to, why, algorithm=by)]
        return [b.summed(g, to, why)]
    return [g]


def _rested(src: TensorType, out: TensorType) -> bool:
    """Returns whether `src` and `out` differ only by axes over which `src` is at rest."""
    gone = {a for a in src.split_axes if a not in out.split_axes}
    return bool(gone) and gone <= {*src.rest_axes}


def gathers_for_use(n: Any) -> bool:
    """Returns whether the node `n` gathers a value at rest for its use, as in ZeRO-3."""
    return bool(n.op == all_gather.name) and _rested(n.args[0].type, n.type)


def _is_input(n: Any) -> bool:
    """Returns whether `n` is an input, such as a weight, up to its dtype and form."""
    while len(n.args) == 1 and (n.kind.incidental or n.kind.memory == "view"):
        n = n.args[0]
    return bool(n.op == "input")


def _free(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return 0


def _gather_scratch(ins: Types, outs: Types, attrs: Attrs) -> int:
    return _as_sent(ins[0], outs[0], attrs["dim"], attrs["axes"])


def _scatter_scratch(ins: Types, outs: Types, attrs: Attrs) -> int:
    return _as_sent(outs[0], ins[0], attrs["to_dim"], attrs["axes"])


def _as_sent(split: TensorType, whole: TensorType, dim: int, axes: Sequence[str]) -> int:
    """Bytes of the blocks of all devices as they are sent, one after the other; 0 if `whole` has
    them in that order already: blocks of the leading dim without padding."""
    above, n, _, _ = _around(split, dim, axes)
    sent = n * split.local_bytes
    leads = math.prod(split.local_shape[:dim]) * above == 1
    return 0 if leads and sent == whole.local_bytes else sent


all_gather = define(
    Op(
        "all_gather",
        _all_gather,
        _gather_local,
        _grad,
        flops=_free,
        attrs="axes dim algorithm? again?",  # again: for the backward pass
        elements="moved",
        scratch=_gather_scratch,
    )
)
all_reduce = define(
    Op("all_reduce", _all_reduce, _reduce_local, _grad, flops=_free, attrs="axes algorithm? order?",
       elements="moved", invariance="sums")
)  # fmt: skip
reduce_scatter = define(
    Op(
        "reduce_scatter",
        _reduce_scatter,
        _scatter_local,
        _grad,
        flops=_free,
        attrs="axes to_dim into algorithm? order?",
        elements="moved",
        scratch=_scatter_scratch,
        invariance="sums",
    )
)
all_to_all = define(
    Op(
        "all_to_all",
        _all_to_all,
        _exchange_local,
        _grad,
        flops=_free,
        attrs="axes dim to_dim into algorithm?",
        elements="moved",
        scratch=lambda ins, outs, attrs: ins[0].local_bytes,  # as it is sent
    )
)
shard = define(
    Op("shard", _shard, _shard_local, _grad, flops=_free, attrs="axes to_dim into",
       elements="moved", memory="moves")
)  # fmt: skip
to_partial = define(
    Op("to_partial", _to_partial, _to_partial_local, _grad, flops=_free, attrs="axes",
       elements="moved", memory="moves")
)  # fmt: skip
# A value without a mesh, equal everywhere, as a replicated value of the mesh in `layout`; or a
# value on a mesh with or without axes in time, along which it is whole, as a value on the other.
to_mesh = define(
    Op("to_mesh", _to_mesh, lambda c, x: x, _grad, flops=_free, attrs="layout",
       elements="moved", memory="view")
)  # fmt: skip
SILENT = frozenset(op.name for op in (shard, to_partial, to_mesh))
# The ops that change a layout and send bytes.
CHANGES = frozenset(op.name for op in (all_gather, all_reduce, reduce_scatter, all_to_all))
NAMES = SILENT | CHANGES
MOVES = frozenset({"broadcast", "permute"})  # of whole blocks, in ops/local.py
COLLECTIVES = CHANGES | MOVES | {"mesh_kernel"}  # ir/tile/node.py
