"""Rules for `gather` and the `scatter`s of JAX, in their general form.

The indexed dims are made one, of places: a gather is then a `take` of rows (`take_along`, where
dims are a batch of both operands), a scatter its transpose.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.dtypes import beyond, int32
from ...core.errors import UsageError
from ..math import functions as F
from ..math.scatter import Combine, rows_at, written
from ..math.shape import sliced
from ..record.operands import scalar
from ..value.tensor import Tensor
from .jax_rules import inverse, permuted, reshaped, rule


@dataclass(frozen=True)
class Dims:
    """The dims of an operand: `batch` (also of the indices), `places` (indexed, or taken in part),
    `rest` (whole), and `windows`, the size of the window in each of `places`."""

    batch: tuple[int, ...]
    places: tuple[int, ...]
    rest: tuple[int, ...]
    windows: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.batch, *self.places, *self.rest)

    def flat(self, x: Tensor) -> Tensor:
        """`x` as [*batch, places, *rest]."""
        size = math.prod(x.shape[d] for d in self.places)
        lead, tail = ([x.shape[d] for d in dims] for dims in (self.batch, self.rest))
        return reshaped(permuted(x, self.order), (*lead, size, *tail))

    def unflat(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `flat`, for a tensor of this shape."""
        return permuted(reshaped(x, [shape[d] for d in self.order]), inverse(self.order))


def _dims(shape: Sequence[int], sizes: Sequence[int], indexed: Any, batch: Any) -> Dims:
    """The dims of an operand with windows of these sizes."""
    partial = [d for d, n in enumerate(shape) if sizes[d] != n and d not in (*indexed, *batch)]
    places = (*indexed, *partial)
    rest = tuple(d for d in range(len(shape)) if d not in (*batch, *places))
    return Dims(tuple(batch), places, rest, tuple(sizes[d] for d in places))


def _places(
    ids: Tensor, ids_batch: Any, shape: Sequence[int], dims: Dims, drops: bool
) -> tuple[Tensor, Tensor | None]:
    """(The place of each element of each window [*batch, *others, *windows], which windows lie
    inside [*batch, *others] if others are dropped). A window that does not is moved inside."""
    others = [d for d in range(ids.ndim - 1) if d not in ids_batch]
    ids = permuted(ids, (*ids_batch, *others, ids.ndim - 1))
    lead = ids.shape[:-1]
    rank = len(dims.windows)
    out, inside = None, None
    for j, (d, window) in enumerate(zip(dims.places, dims.windows, strict=True)):
        at: Tensor | None = None
        if j < ids.shape[-1]:
            at = reshaped(sliced(ids, {len(lead): (j, j + 1, 1)}), lead).to(int32)
            most = shape[d] - window
            if drops:
                here = (at >= 0) & (at <= most)
                inside = here if inside is None else inside & here
            at = reshaped(F.clip(at, 0, most), (*lead, *(1,) * rank))
        if window > 1 or at is None:
            line = F.arange(window).reshape(*(window if i == j else 1 for i in range(rank)))
            at = line if at is None else at + line
        step = math.prod(shape[e] for e in dims.places[j + 1 :])
        at = at * step if step != 1 else at
        out = at if out is None else out + at
    whole = (*lead, *dims.windows)
    if out is None:
        out = F.full((1,) * len(lead), 0, int32)
    return (out if out.shape == whole else F.broadcast_to(out, whole)), inside


@rule("gather")
def _gather(
    x: Tensor, ids: Tensor, dimension_numbers: Any, slice_sizes: Any, mode: Any = None,
    fill_value: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = dimension_numbers
    drops = getattr(mode, "name", "") == "FILL_OR_DROP"
    dims = _dims(x.shape, slice_sizes, n.start_index_map, n.operand_batching_dims)
    at, inside = _places(ids, n.start_indices_batching_dims, x.shape, dims, drops)
    out = rows_at(dims.flat(x), at, len(dims.batch))
    if inside is not None:
        fill = beyond(x.dtype) if fill_value is None else fill_value
        ones = (1,) * (out.ndim - inside.ndim)
        out = F.where(reshaped(inside, (*inside.shape, *ones)), out, scalar(fill, x.dtype))
    # The dims of the result: those of the indices, and those of the windows, by operand dim.
    others = [d for d in range(ids.ndim - 1) if d not in n.start_indices_batching_dims]
    names = [*(("ids", d) for d in (*n.start_indices_batching_dims, *others)),
             *(("window", d) for d in (*dims.places, *dims.rest))]  # fmt: skip
    kept = [i for i, (kind, d) in enumerate(names)
            if kind == "ids" or d not in n.collapsed_slice_dims]  # fmt: skip
    out = reshaped(out, [out.shape[i] for i in kept])
    names = [names[i] for i in kept]
    by_ids, by_window = (iter(sorted(x for x in names if x[0] == k)) for k in ("ids", "window"))
    goal = [next(by_window if d in n.offset_dims else by_ids) for d in range(out.ndim)]
    return permuted(out, [names.index(name) for name in goal])


# -- scatter --------------------------------------------------------------------------------------
def _scatter(combine: Combine | None) -> Callable[..., Tensor]:
    """A rule that writes each update, or what `combine` makes of it and what is there."""

    def run(
        x: Tensor, ids: Tensor, updates: Tensor, dimension_numbers: Any, mode: Any = None,
        unique_indices: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        n = dimension_numbers
        batch, ids_batch = n.operand_batching_dims, n.scatter_indices_batching_dims
        own = [d for d in range(x.ndim) if d not in (*n.inserted_window_dims, *batch)]
        sizes = [1] * x.ndim
        for d, i in zip(own, n.update_window_dims, strict=True):
            sizes[d] = updates.shape[i]
        dims = _dims(x.shape, sizes, n.scatter_dims_to_operand_dims, batch)
        drops = getattr(mode, "name", "") == "FILL_OR_DROP"
        at, inside = _places(ids, ids_batch, x.shape, dims, drops)
        if inside is not None:
            mask = reshaped(inside, (*inside.shape, *(1,) * len(dims.windows)))
            at = F.where(mask, at, -1)
        # The updates as [*batch, *others, *windows, *rest].
        lead = [i for i in range(updates.ndim) if i not in n.update_window_dims]
        others = [i for i in range(ids.ndim - 1) if i not in ids_batch]
        window_of = dict(zip(own, n.update_window_dims, strict=True))
        tail = [window_of[d] for d in (*dims.places, *dims.rest) if d in window_of]
        rows = permuted(updates, [*(lead[i] for i in (*ids_batch, *others)), *tail])
        rows = reshaped(rows, (*at.shape, *(x.shape[d] for d in dims.rest)))
        done = written(dims.flat(x), at, rows, len(dims.batch), combine, unique_indices)
        return dims.unflat(done, x.shape)

    return run


@rule("scatter")
def _scatter_set(
    x: Tensor, ids: Tensor, updates: Tensor, update_jaxpr: Any = None, **params: Any
) -> Tensor:
    if update_jaxpr is not None:  # of a function of what is there; there are no updates
        raise UsageError(
            "scatter_apply of JAX has no rule",
            x=x.type,
            fix="set the values of the function: x.at[ids].set(f(x[ids])) for x.at[ids].apply(f)",
        )
    out: Tensor = _scatter(None)(x, ids, updates, **params)
    return out


rule("scatter-add")(_scatter(operator.add))
rule("scatter-mul")(_scatter(operator.mul))
rule("scatter-min")(_scatter(F.minimum))
rule("scatter-max")(_scatter(F.maximum))


@rule("scatter-sub")
def _scatter_sub(x: Tensor, ids: Tensor, updates: Tensor, **params: Any) -> Tensor:
    out: Tensor = _scatter(operator.add)(x, ids, -updates, **params)
    return out
