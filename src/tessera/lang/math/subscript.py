"""Indexing `x[...]` as in NumPy and PyTorch: by numbers, slices, ids and masks.

>>> from tessera.lang.math.functions import arange
>>> x = arange(12).reshape(3, 4)
>>> x[1:, -1].numpy().tolist(), x[[0, -1], [1, 2]].numpy().tolist()
([7, 11], [1, 10])
>>> x[x % 5 == 0].numpy().tolist()
[0, 5, 10]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.checks import shown
from ...core.dtypes import bool_, int32, uint32
from ...core.errors import DTypeError, ShapeError, UsageError
from ...core.layout import dim_axes
from ...ops.create import iota
from ..record import recorder as recorder_module
from ..record.index_bounds import NOTHING, check_ids
from ..record.operands import as_tensor, binary, emit, scalar
from ..value.tensor import Tensor, method
from .shape import broadcast_to, permute, reshape, sliced


@method("__getitem__")
def getitem(t: Tensor, key: Any) -> Tensor:
    """`t[key]`: numbers, slices, `...`, None, tensors or lists of ids, masks.

    Several tensors of ids broadcast together; their dims stand where the first stood, or first of
    all if other keys are between them. A mask means the ids where it is true. Their number must be
    known, so a recorded function takes NumPy masks only. Raises ShapeError for ids outside,
    UsageError or DTypeError for keys of a wrong kind.
    """
    keys = spelled_out(t, key)
    if recorder_module.current() is None and _alone(t, keys):
        return _at_numbers(t, keys)
    p = parsed(t, keys)
    out = sliced(t, p.rows)
    for d in p.flips:
        out = emit("flip", out, dim=d)
    if len(p.ids) == 1:
        at, picks = next(iter(p.ids.items()))
        out = emit("take", out, picks, dim=at, ids="signed")
    elif p.ids:
        out = _at_places(out, p.ids, p.separate)
    return reshape(out, p.shape) if p.shape != out.shape else out


class Parsed(NamedTuple):
    """Keys by dim: (start, stop, step) in `rows`, of which `flips` run backwards, and `ids`, whose
    dims come first in the result if they are `separate`. `shape` is that of the result."""

    rows: dict[int, tuple[int, int, int]]
    flips: list[int]
    ids: dict[int, Tensor]
    separate: bool
    shape: tuple[int, ...]


def parsed(t: Tensor, keys: list[Any], checks: bool = True) -> Parsed:
    """`keys`, from `spelled_out`, by dim. Raises ShapeError for numbers outside, and with `checks`
    for ids outside that the host knows."""
    rows: dict[int, tuple[int, int, int]] = {}
    flips: list[int] = []
    shape: list[int] = []  # of the result; a dim of ids is -1
    ids: dict[int, Tensor] = {}
    separate, d = False, 0
    for k in keys:
        if k is None:
            shape.append(1)
            continue
        n = t.shape[d]
        if isinstance(k, slice):
            rows[d], backwards = _range(t, k, d)
            flips += [d] if backwards else []
            shape.append(len(range(*rows[d])))
        elif isinstance(k, Tensor):
            if checks:
                check_ids("index", "id", k, n, low=-n)
            separate |= bool(ids) and shape[-1] != -1
            ids[d] = k
            if len(ids) == 1:
                shape.append(-1)
        else:
            at = _place(t, k, d)
            rows[d] = (at, at + 1, 1)
        d += 1
    try:
        picks = np.broadcast_shapes(*(k.shape for k in ids.values()))
    except ValueError:
        raise ShapeError(
            "index: the ids do not broadcast together",
            rows=[(f"ids of dim {d}", k.type) for d, k in ids.items()],
            fix="give ids of one shape, or of shapes that broadcast",
        ) from None
    if separate:
        shape = [-1, *(n for n in shape if n != -1)]
    return Parsed(
        rows, flips, ids, separate, tuple(n for s in shape for n in (picks if s == -1 else (s,)))
    )


def _place(t: Tensor, k: int, dim: int) -> int:
    """Returns `k` counted from the start of `dim`. Raises ShapeError if it is outside."""
    n = t.shape[dim]
    if -n <= k < n:
        return k % n
    raise ShapeError(
        f"index: {k} is outside dim {dim} of size {n}",
        x=t.type,
        fix=f"use {-n} to {n - 1}" if n else NOTHING,
    )


def _alone(t: Tensor, keys: list[Any]) -> bool:
    """Returns whether `keys` are whole numbers in dims that are not split, and whole dims."""
    numbers = [d for d, k in enumerate(keys) if isinstance(k, int)]
    rest = [k for k in keys if not isinstance(k, int)]
    return (
        bool(numbers)
        and all(isinstance(k, slice) and k == slice(None) for k in rest)
        and not any(dim_axes(t.type.dims[d]) for d in numbers)
    )


def _at_numbers(t: Tensor, keys: list[Any]) -> Tensor:
    """Takes `t` at whole numbers, eagerly. They are arguments of one program, so that new numbers
    compile nothing."""
    places = {d: _place(t, k, d) for d, k in enumerate(keys) if isinstance(k, int)}
    for d in reversed(places):
        t = emit("take", t, scalar(places[d], int32), dim=d)
    return t


def spelled_out(t: Tensor, key: Any) -> list[Any]:
    """Returns a number, slice, None or tensor of ids for each dim in turn."""
    keys = [_checked_key(t, k) for k in (key if isinstance(key, tuple) else (key,))]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1:
        raise UsageError("index: more than one `...`", x=t.type, fix="keep one")
    used = sum(map(_dims, keys))
    if used > t.ndim:
        raise ShapeError(f"index: {used} indices for {t.ndim} dims", x=t.type, fix="use fewer")
    at = dots[0] if dots else len(keys)
    keys[at : at + 1] = [slice(None)] * (t.ndim - used)
    out: list[Any] = []
    d = 0
    for k in keys:
        mask = isinstance(k, (Tensor, np.ndarray)) and k.dtype in (bool_, np.bool_)
        out += _places(t, k, d) if mask else [k]
        d += _dims(k)
    return out


def _dims(k: Any) -> int:
    """The number of dims that `k` indexes."""
    if k is None or k is Ellipsis:
        return 0
    return k.ndim if isinstance(k, (Tensor, np.ndarray)) and k.dtype in (bool_, np.bool_) else 1


def _checked_key(t: Tensor, k: Any) -> Any:
    """Returns `k` as an int, slice, None, `...`, tensor of ids or mask. Raises UsageError or
    DTypeError for others."""
    if isinstance(k, (list, np.ndarray)):
        mask = np.asarray(k)
        if mask.dtype == np.bool_ and mask.ndim:
            return mask
        k = as_tensor(mask.astype(np.int32) if isinstance(k, list) and not mask.size else k)
    if isinstance(k, Tensor) and (k.dtype is not bool_ or not k.ndim):
        if k.dtype.is_int:
            return k
        raise DTypeError(
            "index: ids must be integers", ids=k.type, fix="cast them with .to(ts.int32)"
        )
    if k is None or k is Ellipsis or isinstance(k, (slice, Tensor)):
        return k
    if isinstance(k, (int, np.integer)) and not isinstance(k, bool):
        return int(k)
    raise UsageError(
        f"index: cannot index with {type(k).__name__}",
        x=t.type,
        fix="use whole numbers, slices, ..., None, ids or a mask",
    )


def _places(t: Tensor, mask: Any, dim: int) -> list[Tensor]:
    """Returns the ids where `mask` is true, for each of its dims; the mask is on `dim` and the dims
    after it."""
    if tuple(mask.shape) != t.shape[dim : dim + mask.ndim]:
        raise ShapeError(
            f"index: a mask of shape {tuple(mask.shape)} stands on dim {dim}",
            x=t.type,
            fix="give a mask of the shape of the dims that it picks from",
        )
    if isinstance(mask, Tensor):
        if recorder_module.current() is not None:
            raise UsageError(
                "index: how many elements a mask picks is not known in a recorded function",
                mask=mask.type,
                fix="give the largest number, x[ts.nonzero(mask, size=n)]; or keep the shape,"
                " ts.where(mask, x, 0)",
            )
        mask = mask.numpy()
    return [as_tensor(i.astype(np.int32)) for i in np.nonzero(mask)]


def _range(t: Tensor, k: slice, dim: int) -> tuple[tuple[int, int, int], bool]:
    """Returns ((start, stop, step) of `k` with a positive step, whether `k` runs backwards)."""
    n = t.shape[dim]
    try:
        start, stop, step = k.indices(n)
    except (TypeError, ValueError):
        computed = any(isinstance(i, Tensor) for i in (k.start, k.stop, k.step))
        raise UsageError(
            f"index: {shown(k)} is no slice of dim {dim}",
            x=t.type,
            fix="where it begins is computed, its size is not: x[ts.arange(size) + start]"
            if computed
            else "give whole numbers, and a step that is not 0",
        ) from None
    count = len(range(start, stop, step))
    if count == 0:
        return (0, 0, 1), False
    if step < 0:
        start, step = start + (count - 1) * step, -step
        return (start, start + (count - 1) * step + 1, step), True
    return (start, start + (count - 1) * step + 1 if step > 1 else start + count, step), False


def _at_places(t: Tensor, ids: dict[int, Tensor], separate: bool) -> Tensor:
    """Returns the elements at all `ids` together."""
    dims, sizes = [*ids], [t.shape[d] for d in ids]
    if dims == [0, 1] and _each_row(ids[0], sizes[0]) and ids[1].shape in ((), (1,), (sizes[0],)):
        at = broadcast_to(ids[1], (sizes[0],))  # one element per row: split rows need no gather
        at = reshape(at, (sizes[0], *(1,) * (t.ndim - 1)))
        return emit("take_along", t, at, dim=1, ids="signed")
    flat = flat_ids(sizes, [*ids.values()])
    other_dims = [d for d in range(t.ndim) if d not in ids]
    first = 0 if separate else dims[0]
    t = permute(t, (*other_dims[:first], *dims, *other_dims[first:]))
    t = reshape(t, (*t.shape[:first], math.prod(sizes), *t.shape[first + len(dims) :]))
    return emit("take", t, flat, dim=first, ids="exact")


def flat_ids(sizes: Sequence[int], ids: Sequence[Tensor]) -> Tensor:
    """The places of `ids` in dims of these `sizes` as one dim; the number of places for an id that
    is outside."""
    flat, seen = None, None
    for n, k in zip(sizes, ids, strict=True):
        # As int32 a large id would be negative, and would count from the end.
        k = (k if k.dtype is not uint32 else binary("minimum", k, 2**31 - 1)).to(int32)
        k = emit("where", binary("lt", k, 0), k + n, k)
        inside = emit("inside", k, size=n)
        flat = k if flat is None else flat * n + k
        seen = inside if seen is None else seen * inside
    assert flat is not None and seen is not None
    outside = scalar(math.prod(sizes), int32)
    return emit("where", emit("isfinite", seen), flat, outside)


def _each_row(ids: Tensor, rows: int) -> bool:
    """Returns whether `ids` are 0, 1, 2, ... up to the number of `rows`, as from
    `ts.arange(rows)`."""
    recorder = recorder_module.current()
    if recorder is None or ids.shape != (rows,):
        return False
    node = recorder.node(ids)
    return node.op == iota.name
