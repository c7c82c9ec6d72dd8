"""`x.at[key].set(value)` and its kin: new tensors with other values at some places.

The keys are those of `x[key]`. Numbers and slices give a part of `x`; ids name places in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.dtypes import bool_
from ...core.errors import ShapeError, UsageError
from ..record.operands import as_tensor, emit
from ..record.recorder import current
from ..value.tensor import Like, Tensor
from .elementwise import where
from .scatter import COMBINE, Mode, into, marked, updates_of, written
from .shape import broadcast_to, permute, reshape, sliced
from .subscript import flat_ids, getitem, parsed, spelled_out


class At:
    """`x.at`; a subscript selects places of `x`."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __getitem__(self, key: Any) -> Places:
        return Places(self._x, key)

    def __repr__(self) -> str:
        return f"<At of {self._x.type}>"


@dataclass(frozen=True, repr=False, eq=False)
class Places:
    """Places of a tensor, `x.at[key]`. Each method returns a new tensor.

    `key` is one that `x[key]` takes; `value` broadcasts to the shape of `x[key]`. A mask in a
    recorded function takes a value for each of its elements, or one for all; for values in the
    order of its true elements give `ts.nonzero(mask, size=n)` as key. Of several values for one
    place the last is set. If the host knows the ids, an id outside raises ShapeError; on the device
    the whole result then becomes NaN (integers: the number farthest from zero). With `mode="drop"`
    values outside are left out.
    """

    x: Tensor
    key: Any

    def get(self) -> Tensor:
        """`x[key]`."""
        return getitem(self.x, self.key)

    def set(self, value: Like, mode: Mode = "mark") -> Tensor:
        """`x` with `value` at these places."""
        return _updated(self.x, self.key, value, "set", mode)

    def add(self, value: Like, mode: Mode = "mark") -> Tensor:
        """`x` with `value` added at these places; several values for one place are all added."""
        return _updated(self.x, self.key, value, "add", mode)

    def mul(self, value: Like, mode: Mode = "mark") -> Tensor:
        """`x` multiplied by `value` at these places, by each of several for one place."""
        return _updated(self.x, self.key, value, "mul", mode)

    def max(self, value: Like, mode: Mode = "mark") -> Tensor:
        """The larger one of `x` and `value` at these places, `x` elsewhere."""
        return _updated(self.x, self.key, value, "max", mode)

    def min(self, value: Like, mode: Mode = "mark") -> Tensor:
        """The smaller one of `x` and `value` at these places, `x` elsewhere."""
        return _updated(self.x, self.key, value, "min", mode)

    def __repr__(self) -> str:
        return f"<Places of {self.x.type}>"


def _at(x: Tensor) -> At:
    """Places of the tensor, `x.at[key]`, for new values: `x.at[key].set(value)`, `add`, `mul`,
    `max` and `min`, as in JAX."""
    return At(x)


Tensor.at = property(_at)  # type: ignore[assignment, method-assign]


def _updated(x: Tensor, key: Any, value: Like, way: str, mode: str) -> Tensor:
    name = f"at[...].{way}"
    x = as_tensor(x)
    v = updates_of(name, value, x)
    combine = COMBINE[way]
    mask = _mask(key)
    if mask is not None and (done := _where(x, mask, v)) is not None:
        return where(done[0], done[1] if combine is None else combine(x, done[1]), x)
    if isinstance(mask, Tensor) and current() is not None:
        raise UsageError(
            f"{name}: how many places a mask selects is not known in a recorded function",
            x=x.type,
            mask=mask.type,
            value=v.type,
            fix="give one value; or the places with the largest number of them, and one outside for"
            " the rest: x.at[ts.nonzero(mask, size=n, fill_value=len(x))].set(values, 'drop')",
        )
    p = parsed(x, spelled_out(x, key), checks=mode == "mark")
    shape = p.shape
    if len(v.shape) > len(shape) or any(
        n not in (1, m) for n, m in zip(reversed(v.shape), reversed(shape))
    ):
        raise ShapeError(
            f"{name}: the value does not fit the places",
            x=x.type,
            places=shape,
            value=v.type,
            fix="give one number, or a value that broadcasts to the shape of x[key]",
        )
    v = broadcast_to(v, shape)
    region = sliced(x, p.rows)
    if not p.ids:
        return into(x, p.rows, _flipped(reshape(v, region.shape), p.flips), combine)
    done_region = _at_ids(_flipped(region, p.flips), p.ids, p.separate, v, way)
    out = into(x, p.rows, _flipped(done_region, p.flips), None)
    if mode == "drop":
        return out
    for d, k in p.ids.items():
        inside = emit("inside", where(k < 0, k + x.shape[d], k), size=x.shape[d])
        out = marked(out, inside)
    return out


def _flipped(t: Tensor, dims: list[int]) -> Tensor:
    for d in dims:
        t = emit("flip", t, dim=d)
    return t


def _at_ids(y: Tensor, ids: dict[int, Tensor], separate: bool, v: Tensor, way: str) -> Tensor:
    """`y` with `v`, in the shape of a read at `ids`, written there."""
    dims, sizes = [*ids], [y.shape[d] for d in ids]
    flat = flat_ids(sizes, [*ids.values()])
    rest = [d for d in range(y.ndim) if d not in ids]
    before = 0 if separate else sum(d < dims[0] for d in rest)
    v = reshape(
        v, (*(y.shape[d] for d in rest[:before]), *flat.shape, *(y.shape[d] for d in rest[before:]))
    )
    picks = range(before, before + flat.ndim)
    v = permute(v, *picks, *(i for i in range(v.ndim) if i not in picks))
    order = (*dims, *rest)
    lines = reshape(permute(y, *order), (math.prod(sizes), *(y.shape[d] for d in rest)))
    done = reshape(written(lines, flat, v, 0, COMBINE[way]), tuple(y.shape[d] for d in order))
    return permute(done, *(order.index(d) for d in range(y.ndim)))


def _mask(key: Any) -> Any:
    """`key` if it is one mask, a tensor or an array; else None."""
    if isinstance(key, list):
        key = np.asarray(key)
    is_mask = isinstance(key, (Tensor, np.ndarray)) and key.dtype in (bool_, np.bool_)
    return key if is_mask and key.ndim else None


def _where(x: Tensor, mask: Any, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """(The mask, the value) in the rank of `x`, if there is one value for all places of a slice;
    None if there are values for each true element."""
    if tuple(mask.shape) != x.shape[: mask.ndim]:
        return None  # `spelled_out` says what is wrong
    rest = x.ndim - mask.ndim
    if v.ndim > rest:
        if v.ndim != rest + 1 or v.shape[0] != 1:
            return None
        v = reshape(v, v.shape[1:])
    if any(n not in (1, m) for n, m in zip(reversed(v.shape), reversed(x.shape[mask.ndim :]))):
        return None
    return reshape(as_tensor(mask), (*mask.shape, *(1,) * rest)), v
