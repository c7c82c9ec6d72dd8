"""Writes at computed places: `scatter`, `nonzero`, and what `x.at[...]` and JAX's scatters share.

Each update is one row for one place. Rows for the same place are combined first, in the order of
the rows, so a result never depends on which device is first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from ...core.checks import listed, whole
from ...core.declared import OneOf
from ...core.dtypes import beyond, bool_, f32, int32, uint8
from ...core.errors import DTypeError, ShapeError, UsageError
from ...core.tensor_checks import integers
from ...core.value_checks import is_whole
from ..record.index_bounds import check_ids
from ..record.operands import as_tensor, emit, scalar, tensor_like
from ..record.recorder import current
from ..value.tensor import Like, Tensor
from .constants import full
from .elementwise import maximum, minimum, where
from .indexing import argsort, gather_or_zero, last_dim, take_or_zero
from .shape import broadcast_to, concat, permute, reshape, sliced

Combine = Callable[[Tensor, Tensor], Tensor]
Way = Annotated[str, OneOf("set", "add", "mul", "max", "min")]
Mode = Annotated[str, OneOf("mark", "drop")]
COMBINE: dict[str, Combine | None] = {
    "set": None, "add": operator.add, "mul": operator.mul, "max": maximum, "min": minimum,
}  # fmt: skip


# -- rows at places -------------------------------------------------------------------------------
def written(
    x: Tensor, at: Tensor, rows: Tensor, nb: int, combine: Combine | None, unique: bool = False
) -> Tensor:
    """x [*batch, places, *rest] with `rows` [*batch, *ids, *rest] written at the places `at`
    [*batch, *ids], or combined with what is there. There are `nb` dims of batch. A place that `x`
    does not have is left out. Of several rows for a place the last is written."""
    if x.dtype is bool_:
        return written(x.to(uint8), at, rows.to(uint8), nb, combine, unique) != 0
    count, size = math.prod(at.shape[nb:]), x.shape[nb]
    if not count:
        return x
    tail = rows.shape[at.ndim :]
    line = (*at.shape[:nb], count)
    if nb or combine is not operator.add:
        at, rows = reshape(at, line), reshape(rows, (*line, *tail))
    if combine is not operator.add and not unique and count > 1:
        at, rows = _one_each(at, rows, nb, combine)

    def wide(ids: Tensor) -> Tensor:
        return reshape(ids, (*line, *(1,) * len(tail))) if nb else ids

    if combine is operator.add:
        return x + _put(wide(at), rows, nb, size)
    ones = full((*line, *(1,) * len(tail)), 1.0, f32)
    hit = _put(wide(at), ones, nb, size) > 0
    new = _put(wide(at), rows, nb, size)
    return where(hit, new if combine is None else combine(x, new), x)


def _put(at: Tensor, rows: Tensor, nb: int, size: int) -> Tensor:
    """Zeros with `rows` [*batch, *ids, *rest] added at [*batch, *ids]."""
    op = "put_along" if nb else "put"
    return emit(op, at, rows, dim=nb, into=str(size))


def _one_each(at: Tensor, rows: Tensor, nb: int, combine: Combine | None) -> tuple[Tensor, Tensor]:
    """(Places [*batch, ids], rows) with one row for each place: the last one, or all of them
    combined; -1 for others. The places are sorted; equal neighbours join, 1, 2, 4, ... apart."""
    order = argsort(at, nb)
    ones = (1,) * (rows.ndim - at.ndim)
    at = gather_or_zero(at, order, nb)
    rows = rows_at(rows, order, nb)
    count, step = at.shape[nb], 1
    while combine is not None and step < count:
        before, after = {nb: (0, count - step, 1)}, {nb: (step, count, 1)}
        alike = sliced(at, before) == sliced(at, after)
        both = combine(sliced(rows, before), sliced(rows, after))
        joined = where(reshape(alike, (*alike.shape, *ones)), both, sliced(rows, after))
        rows = concat([sliced(rows, {nb: (0, step, 1)}), joined], nb)
        step *= 2
    last = sliced(at, {nb: (1, count, 1)}) != sliced(at, {nb: (0, count - 1, 1)})
    end = full((*at.shape[:nb], 1), 1, int32) > 0
    return where(concat([last, end], nb), at, -1), rows


def rows_at(x: Tensor, at: Tensor, nb: int) -> Tensor:
    """The rows of x [*batch, places, *rest] at [*batch, *ids]: [*batch, *ids, *rest]."""
    if not nb:
        return take_or_zero(x, at, 0)
    tail = x.shape[nb + 1 :]
    line = reshape(at, (*at.shape[:nb], math.prod(at.shape[nb:]), *(1,) * len(tail)))
    return reshape(gather_or_zero(x, line, nb), (*at.shape, *tail))


def marked(x: Tensor, inside: Tensor) -> Tensor:
    """`x`, or NaN (integers: the number farthest from zero) if an element of `inside` is NaN."""
    seen = emit("sum", inside, dims=tuple(range(inside.ndim)))
    if x.dtype is bool_:
        return x
    return emit("where", emit("isfinite", seen), x, scalar(beyond(x.dtype), x.dtype))


def updates_of(name: str, value: Like, x: Tensor) -> Tensor:
    """`value` as a tensor of the dtype of `x`. Raises DTypeError if that would change its kind."""
    t = tensor_like(value, x, name)
    if (t.dtype.is_float and not x.dtype.is_float) or (x.dtype is bool_) != (t.dtype is bool_):
        raise DTypeError(
            f"{name}: {t.dtype} values cannot be written into {x.dtype}",
            x=x.type,
            value=t.type,
            fix="cast one of them: value.to(x.dtype), or x.to(value.dtype)",
        )
    return t.to(x.dtype)


# -- element by element ---------------------------------------------------------------------------
def scatter(
    x: Like, ids: Like, updates: Like, dim: int = -1, op: Way = "set", mode: Mode = "mark"
) -> Tensor:
    """`x` with each element of `updates` written at the place along `dim` that `ids` names.

    As `torch.scatter`; `op` "add", "mul", "max" and "min" combine it with what is there, as
    `scatter_reduce`. `ids` and `updates` have the rank of `x`, or `updates` is a number; an id is
    from 0 to n - 1. In the other dims `ids` may have size 1 (one id for all of `updates`), and both
    may have fewer elements than `x`. With `ids` [k] of one dim, whole slices of `updates` are
    written. Of several updates for one place the last is written.

    If the host knows the ids, an id outside raises ShapeError; on the device the whole result then
    becomes NaN (integers: the number farthest from zero). With `mode="drop"` updates outside are
    left out. Gradients flow to `x` and `updates`. Raises ShapeError if the shapes do not match,
    DTypeError if `ids` are not integers or `updates` do not fit the dtype of `x`.

    >>> import tessera as ts
    >>> x, ids = ts.zeros((2, 3)), ts.tensor([[2], [0]])
    >>> ts.scatter(x, ids, 5.0, dim=1).numpy().tolist()
    [[0.0, 0.0, 5.0], [5.0, 0.0, 0.0]]
    """
    d = last_dim(x, ids, dim, "scatter", "ids, updates")
    t, at = as_tensor(x), as_tensor(ids)
    integers("scatter", "ids", at.type)
    u = updates_of("scatter", updates, t)
    by_slices = at.ndim == 1 and (t.ndim > 1 or u.ndim == 1)
    if not u.ndim:
        rest = (*t.shape[:d], *at.shape, *t.shape[d + 1 :])
        u = broadcast_to(u, rest if by_slices else at.shape)
    if mode == "mark":
        check_ids("scatter", "id", at, t.shape[d])
    if by_slices:
        want = (*t.shape[:d], *at.shape, *t.shape[d + 1 :])
        if u.shape != want:
            raise _unlike("scatter", t, at, u, f"give updates of shape {want}, or a number")
        order = (d, *(i for i in range(t.ndim) if i != d))
        out = written(permute(t, *order), at, permute(u, *order), 0, COMBINE[op])
        out = permute(out, *(order.index(i) for i in range(t.ndim)))
    else:
        out = _elements(t, at, u, d, op)
    return marked(out, emit("inside", at, size=t.shape[d])) if mode == "mark" else out


def _elements(t: Tensor, at: Tensor, u: Tensor, d: int, op: str) -> Tensor:
    fits = t.ndim == at.ndim == u.ndim and all(
        k == m if i == d else k in (1, m) and m <= n
        for i, (n, k, m) in enumerate(zip(t.shape, at.shape, u.shape))
    )
    if not fits:
        fix = "give each update an id: both of one shape, with the rank of x"
        raise _unlike("scatter", t, at, u, fix)
    part = {i: (0, m, 1) for i, m in enumerate(u.shape) if i != d and m < t.shape[i]}
    inner = sliced(t, part)
    last = (*(i for i in range(t.ndim) if i != d), d)
    back = [last.index(i) for i in range(t.ndim)]
    args = (permute(inner, *last), permute(broadcast_to(at, u.shape), *last), permute(u, *last))
    done = permute(written(*args, t.ndim - 1, COMBINE[op]), *back)
    return into(t, part, done, None) if part else done


def _unlike(name: str, x: Tensor, ids: Tensor, updates: Tensor, fix: str) -> ShapeError:
    return ShapeError(
        f"{name}: ids and updates must match each other, and x in the other dims",
        x=x.type,
        ids=ids.type,
        updates=updates.type,
        fix=fix,
    )


def into(
    x: Tensor, rows: dict[int, tuple[int, int, int]], value: Tensor, combine: Combine | None
) -> Tensor:
    """`x` with `value` written at the (start, stop, step) of each dim in `rows`, or combined with
    what is there."""
    ranges = [rows.get(i, (0, n, 1)) for i, n in enumerate(x.shape)]
    if not value.size:
        return x
    if value.shape == x.shape:
        return value if combine is None else combine(x, value)
    starts, steps = tuple(r[0] for r in ranges), tuple(r[2] for r in ranges)

    def padded(v: Tensor) -> Tensor:
        return emit("pad", v, starts=starts, steps=steps, shape=x.shape)

    if x.dtype is bool_:
        new, old = value.to(uint8), x.to(uint8)
        return into(old, rows, new, combine) != 0
    if combine is operator.add:
        return x + padded(value)
    hit = padded(full(value.shape, 1.0, f32)) > 0
    new = padded(value)
    return where(hit, new if combine is None else combine(x, new), x)


# -- masks ----------------------------------------------------------------------------------------
def nonzero(
    x: Like, size: int | None = None, fill_value: int | Sequence[int] = 0
) -> tuple[Tensor, ...]:
    """The int32 indices of the elements of `x` that are not zero, a tensor for each dim, in order.

    As `numpy.nonzero`. With `size` there are so many, as in `jax.numpy.nonzero`: the first ones,
    and `fill_value` (one number, or one for each dim) where there are fewer. A recorded function
    needs `size`, as the shape of a result cannot depend on values. `x[ts.nonzero(mask, size=n)]`
    are the elements that a mask selects; `ts.count_nonzero(mask)` says how many are meant.

    Raises UsageError without `size` in a recorded function, or if there is not one fill value for
    each dim; ShapeError if `x` is a scalar.

    >>> import tessera as ts
    >>> [i.numpy().tolist() for i in ts.nonzero(ts.tensor([0, 3, 0, 1]), size=3, fill_value=9)]
    [[1, 3, 9]]
    """
    t = as_tensor(x)
    if not t.ndim:
        raise ShapeError("nonzero: a scalar has no indices", x=t.type, fix="use x != 0")
    if size is None:
        if current() is not None:
            raise UsageError(
                "nonzero: how many elements are not zero is not known in a recorded function",
                x=t.type,
                fix="give the largest number: ts.nonzero(x, size=n)",
            )
        return tuple(as_tensor(i.astype(np.int32)) for i in np.nonzero(t.numpy()))
    whole("nonzero", "size", size, 0, 2**31 - 1)
    fills = listed(
        "nonzero", "fill_value", [fill_value] * t.ndim if is_whole(fill_value) else fill_value
    )
    if len(fills) != t.ndim:
        raise UsageError(
            f"nonzero: there are {len(fills)} fill values for {t.ndim} dims",
            x=t.type,
            fix="give one number, or one for each dim",
        )
    seen = reshape(t != 0, (t.size,)).to(int32)
    place = where(seen != 0, emit("cumsum", seen, dim=0) - 1, -1)
    line: Any = emit("iota", dtype=int32, shape=(t.size,), dim=0)
    flat = emit("put", place, line, dim=0, into=str(size))
    meant = emit("iota", dtype=int32, shape=(size,), dim=0) < emit("sum", seen, dims=(0,))
    steps = [math.prod(t.shape[i + 1 :]) for i in range(t.ndim)]
    return tuple(
        where(meant, (flat // max(step, 1)) % max(n, 1), fill)
        for step, n, fill in zip(steps, t.shape, fills, strict=True)
    )
