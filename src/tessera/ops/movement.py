"""Ops that only move elements: reshape, transpose, broadcast, slice, pad, concat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtypes import int32
from ..core.errors import DTypeError, ShapeError
from ..core.layout import Digit, Dim, Factor, TensorType, dim_axes, grouped, shard_count, without
from ..core.tensor_checks import shaped
from .batch import next_dim, sizes
from .elementwise import unbroadcast
from .index_string import Index, common_mesh, propagate
from .op import Array, Attrs, Batched, Build, Call, Inferred, Op, define


def _free(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return 0


def _reshape_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    shape = tuple(attrs["shape"])
    if math.prod(shape) != ins[0].size:
        raise ShapeError(
            f"reshape: {ins[0].size} elements do not fit shape {shape}",
            x=ins[0],
            fix="keep the number of elements, or give one dim as -1",
        )
    want, out = ins[0].before_reshape(shape)
    return Inferred((want,), (out,))


reshape = define(
    Op(
        "reshape",
        _reshape_rule,
        lambda c, x: c.xp.reshape(x, c.shape),
        lambda b, n, g: [b("reshape", g, shape=n.args[0].type.shape)],
        flops=_free,
        attrs="shape",
        batch=sizes(shape=None),
        elements="moved",
        memory="view",
    )
)


def _transpose_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    perm = tuple(attrs["perm"])
    if sorted(perm) != list(range(ins[0].rank)):
        raise ShapeError(
            f"transpose: {perm} is not an order of {ins[0].rank} dims",
            x=ins[0],
            fix="name each dim once",
        )
    return Inferred((ins[0],), (ins[0].with_dims(ins[0].dims[p] for p in perm),))


def _transpose_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    perm = n.attrs["perm"]
    return [b("transpose", g, perm=tuple(sorted(range(len(perm)), key=lambda i: perm[i])))]


def _transposed_batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched:
    return Batched({"perm": (0, *(d + 1 for d in attrs["perm"]))})


transpose = define(
    Op("transpose", _transpose_rule, lambda c, x: c.xp.transpose(x, tuple(c.attrs["perm"])),
       _transpose_grad, flops=_free, attrs="perm", batch=_transposed_batch, elements="moved",
       memory="transposed")
)  # fmt: skip


def _broadcast_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of `broadcast_to`: new dims are split as in `layout`, along axes that `x` does not
    use, since each device repeats its block."""
    shape, t, layout = tuple(attrs["shape"]), ins[0], attrs.get("layout")
    extra = len(shape) - t.rank
    if extra < 0 or any(n not in (1, m) for n, m in zip(t.shape, shape[extra:])):
        raise ShapeError(
            f"broadcast_to: {t.shape} does not broadcast to {shape}",
            x=t,
            fix="a dim broadcasts from 1, and new dims stand first",
        )
    grows = [n != m for n, m in zip(t.shape, shape[extra:])]
    # A dim of size 1 on one device (1@dp) must be replicated before it is repeated.
    t = t.with_dims((Factor(1),) if grow else d for d, grow in zip(t.dims, grows))
    fresh: list[Dim] = [(Factor(n),) for n in shape]
    if isinstance(layout, TensorType):
        shaped("broadcast_to", "the layout", layout, shape, x=t)
        t = t.on(common_mesh("broadcast_to", (t, layout)))
        # A device can only repeat its own block, so copies are split only along axes that x does
        # not use.
        taken = (*t.split_axes, *t.partial_axes)
        fresh = [without(d, taken, layout.sizes) for d in layout.dims]
    dims = (new if grow else d for d, grow, new in zip(t.dims, grows, fresh[extra:]))
    out = t.with_dims((*fresh[:extra], *dims))
    if isinstance(layout, TensorType) and layout.rest_axes:  # it rests like `layout`
        out = out.with_rest_axes((*out.rest_axes, *layout.rest_axes))
    return Inferred((t,), (out,))


# `layout` is the layout of the dims that x lacks; its other dims keep the layout of x.
def _broadcast_batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched:
    return Batched({"shape": (size, *attrs["shape"])}, len(attrs["shape"]))


broadcast_to = define(
    Op("broadcast_to", _broadcast_rule, lambda c, x: c.xp.broadcast_to(x, c.shape),
       lambda b, n, g: [unbroadcast(b, g, n.args[0].type)], flops=_free,
       attrs="shape layout?", batch=_broadcast_batch, elements="moved", memory="moves",
       incidental=True)
)  # fmt: skip


def _digit_slice(t: TensorType, dim: int, start: int, stop: int) -> Dim | None:
    """The layout of [start, stop) of `dim` if it covers whole leading local digits, else None."""
    run = t.digits(dim)
    if not run or run[0].axes:
        return None
    below = math.prod(d.size for d in run[1:])
    if start % below or stop % below:
        return None
    kept = (stop - start) // below
    return grouped([Digit(kept, (), kept), *run[1:]])


def _same_blocks(t: TensorType, dim: int, size: int) -> Dim | None:
    """The layout of `dim` with another `size`, if each device's block is as large as it was, so
    that only the number of elements that count differs; else None."""
    if len(t.dims[dim]) != 1 or not (axes := dim_axes(t.dims[dim])) or not size:
        return None
    n = shard_count(axes, t.sizes)
    return (Factor(size, axes),) if -(-size // n) == -(-t.shape[dim] // n) else None


def _slice_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of `slice`: a sliced dim must be whole, unless the slice falls between digits."""
    t = ins[0]
    wants, outs = list(t.dims), list(t.dims)
    rows = zip(attrs["starts"], attrs["stops"], attrs["steps"], t.shape, strict=True)
    for i, (start, stop, step, n) in enumerate(rows):
        if not (0 <= start <= stop <= n and step >= 1):
            raise ShapeError(
                f"slice: {start}:{stop}:{step} is not inside dim {i} with size {n}",
                x=t,
                fix=f"stay inside 0:{n}",
            )
        if (start, stop, step) == (0, n, 1):
            continue
        if start == stop:
            outs[i] = (Factor(0),)
            continue
        kept = _digit_slice(t, i, start, stop) if step == 1 else None
        if kept is None and (start, step) == (0, 1):
            kept = _same_blocks(t, i, stop)
        if kept is None:
            wants[i] = without(t.dims[i], dim_axes(t.dims[i]), t.sizes)
            kept = (Factor(-(-(stop - start) // step)),)
        outs[i] = kept
    return Inferred((t.with_dims(wants),), (t.with_dims(outs),))


def _scaled(c: Call, dim: int, at: int, of: TensorType) -> int:
    """The local index of a global index `at` in a dim (at a boundary of a digit)."""
    n, here = of.shape[dim], c.site.shape(of)[dim]
    return at if n == here else at * here // n


def _slice_local(c: Call, x: Array) -> Array:
    t = c.ins[0]
    starts = tuple(_scaled(c, i, s, t) for i, s in enumerate(c.attrs["starts"]))
    steps = tuple(c.attrs["steps"])
    return c.xp.slice(x, starts, _stops(starts, steps, c.shape), steps)


def _stops(starts: Sequence[int], steps: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """The ends of slices with `counts` elements."""
    rows = zip(starts, steps, counts, strict=True)
    return tuple(s + (n - 1) * k + 1 if n else s for s, k, n in rows)


def _slice_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    starts, steps = n.attrs["starts"], n.attrs["steps"]
    shape = n.args[0].type.shape
    return [b("pad", g, starts=starts, steps=steps, shape=shape)]


slice_ = define(
    Op("slice", _slice_rule, _slice_local, _slice_grad, flops=_free, attrs="starts stops steps",
       batch=sizes(starts=0, stops=None, steps=1), elements="chosen", memory="moves")
)  # fmt: skip


def _pad_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of `pad`: a padded dim must be whole, unless the padding consists of whole digits,
    as after a slice between digits, or lies within the blocks."""
    t, shape = ins[0], attrs["shape"]
    wants, outs = list(t.dims), list(t.dims)
    for i, (start, step, n) in enumerate(zip(attrs["starts"], attrs["steps"], shape, strict=True)):
        if start == 0 and step == 1 and n == t.shape[i]:
            continue
        same = _same_blocks(t, i, n) if (start, step) == (0, 1) else None
        if same is not None:
            outs[i] = same
            continue
        run = t.digits(i)
        lead = run[0] if run and not run[0].axes else Digit(1)
        minor = run[1:] if run and not run[0].axes else run
        below = math.prod(d.size for d in minor)
        if step == 1 and below > 1 and start % below == 0 and n % below == 0:
            # The inverse of a slice by digits: (3·1024@tp) from 1024@tp.
            outs[i] = grouped([Digit(n // below, (), n // below), *minor])
        else:
            wants[i] = without(t.dims[i], dim_axes(t.dims[i]), t.sizes)
            outs[i] = (Factor(n),)
        assert lead.size * below == t.shape[i]
    sums = tuple(p for p in t.partial if p[1] == "sum")  # zeros are no identity of max or min
    want, out = t.with_dims(wants).with_partial(sums), t.with_dims(outs).with_partial(sums)
    return Inferred((want,), (out,))


def _pad_local(c: Call, x: Array) -> Array:
    (t,), xp = c.ins, c.xp
    for i, n in enumerate(c.attrs["shape"]):
        if n != t.shape[i] and i in t.padded_dims and x.shape[i] == c.shape[i]:
            # The padding lies within the blocks, where anything may be.
            line = xp.lt(c.site.index(c.out, i), xp.full((), t.shape[i], int32))
            line = xp.reshape(line, tuple(k if j == i else 1 for j, k in enumerate(x.shape)))
            x = xp.where(line, x, xp.full((), 0, t.dtype))
    starts = tuple(_scaled(c, i, s, c.out) for i, s in enumerate(c.attrs["starts"]))
    return c.xp.pad(x, starts, tuple(c.attrs["steps"]), c.shape)


def _pad_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    starts, steps, inner = n.attrs["starts"], n.attrs["steps"], n.args[0].type.shape
    return [b("slice", g, starts=starts, stops=_stops(starts, steps, inner), steps=steps)]


# Places x inside zeros of `shape`: element i of a dim goes to start + i · step.
pad = define(
    Op("pad", _pad_rule, _pad_local, _pad_grad, flops=_free, attrs="starts steps shape",
       batch=sizes(starts=0, steps=1, shape=None), memory="moves", invariance="moves",
       linear="each")
)  # fmt: skip


def _with_dim(t: TensorType, dim: int, new: Dim) -> TensorType:
    return t.with_dims((*t.dims[:dim], new, *t.dims[dim + 1 :]))


def _concat_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of `concat`: the concatenated dim is whole, except that equal parts with the same
    split get one more digit above theirs. Arguments of size 0 along it are ignored."""
    dim, first = attrs["dim"], ins[0]
    for i, t in enumerate(ins):
        same = t.rank == first.rank and all(
            a == b for d, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if d != dim
        )
        if not same or t.dtype is not first.dtype:
            raise (ShapeError if not same else DTypeError)(
                f"concat: argument {i} does not fit along dim {dim}",
                rows=[("arg 0", first), (f"arg {i}", t)],
                fix="all other dims and the dtype must be equal",
            )
    common_mesh("concat", ins)
    letters = tuple(f"_{d}" for d in range(first.rank))
    index = Index((letters,) * len(ins), letters)
    held = [t for t in ins if t.shape[dim]] or ins
    if len({t.shape[dim] for t in held}) == 1:
        # Equal parts with split digits below: k parts of 1024@tp are (k·1024@tp).
        stand = tuple(t if t in held else _with_dim(t, dim, (Factor(1),)) for t in ins)
        got = propagate("concat", index, stand, first.dtype, linear="joint")
        t, k = got.outs[0], len(held)
        joined = grouped([Digit(k, (), k), *t.digits(dim)])
        wants = tuple(
            w if t in held else _with_dim(w, dim, (Factor(0),))
            for w, t in zip(got.wants, ins, strict=True)
        )
        return Inferred(wants, (_with_dim(t, dim, joined),))
    one = tuple(_with_dim(t, dim, (Factor(1),)) for t in ins)
    got = propagate("concat", index, one, first.dtype, linear="joint")
    wants = tuple(
        _with_dim(w, dim, (Factor(t.shape[dim]),)) for w, t in zip(got.wants, ins, strict=True)
    )
    size = sum(t.shape[dim] for t in ins)
    return Inferred(wants, (_with_dim(got.outs[0], dim, (Factor(size),)),))


def _concat_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    dim, at, out = n.attrs["dim"], 0, []
    for x in n.args:
        starts = tuple(at if i == dim else 0 for i in range(x.type.rank))
        stops = tuple(s + m for s, m in zip(starts, x.type.shape, strict=True))
        out.append(b("slice", g, starts=starts, stops=stops, steps=(1,) * x.type.rank))
        at += x.type.shape[dim]
    return out


concat = define(
    Op("concat", _concat_rule, lambda c, *xs: c.xp.concat(xs, c.attrs["dim"]), _concat_grad,
       flops=_free, attrs="dim", batch=next_dim("dim"), memory="expensive", invariance="moves",
       linear="each")
)  # fmt: skip
