"""Dispatch of tokens to experts and back: tables of slots, gathers of rows, and a change of layout.

In the change of layout the tokens' dims lose the axes of the experts, and the experts' dim gets
them. Tokens are x [G, P, S, d]: G groups in P parts of S tokens. G and P may be split over devices,
S and d are whole, so everything but the change of layout is local. Each choice of an expert has a
slot, in the order of tokens; one table maps slots to choices, another maps choices to slots. With
both, the gradient of a gather is a gather, so no additions are in random order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...core.dtypes import f32, int32
from ...core.layout import Dim, Factor, TensorType, digits, shard_count, without
from ...lang.autodiff.custom import custom_gradient
from ...lang.autodiff.scan import scan
from ...lang.math import functions as F
from ...lang.record.operands import emit
from ...lang.value.tensor import Tensor
from .packing import exchange

# The experts of one device. Arguments: rows [A, J, N, B, d] in N blocks of B rows; and the expert,
# of El on each device J, of each block, as [A, J, N, El] of 0 and 1, or None if block n belongs to
# expert n.
Experts = Callable[[Tensor, Tensor | None], Tensor]
# The experts of one device, applied to rows [A, J, R, d] in the order of experts, with counts [A,
# J, El].
Runs = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Wire:
    """The settings of dispatch and combine: `axes` of the experts, `packing` of the payload, and
    its number of `buckets`, which an `ordered` epoch sends one after the other. `algorithm` is that
    of its all_to_alls ("": the program's)."""

    axes: tuple[str, ...] = ()
    packing: str | None = None
    buckets: int = 1
    ordered: bool = False
    algorithm: str = ""

    @property
    def combine_packing(self) -> str | None:
        """The packing of the combine: sums need more than 8 bits."""
        return "bf16" if self.packing == "fp8_e4m3" else self.packing

    def room(self, slots: int) -> int:
        """`slots`, rounded up if all buckets must have one size."""
        return -(-slots // self.buckets) * self.buckets if self.ordered else slots

    def dispatch_layout(self, t: TensorType) -> TensorType:
        """The layout of slots [G, P, E, ...] after the dispatch, on the experts' devices."""
        dims = [without(d, self.axes, t.sizes) for d in t.dims]
        dims[2] = (Factor(t.shape[2], self.axes),)
        return t.with_dims(dims)

    def combine_layout(self, home: TensorType) -> Callable[[TensorType], TensorType]:
        """A function that gives the layout of the combine: that of the slots before the dispatch,
        `home`, where axes that split no tokens stay on the experts."""
        stay = tuple(a for a in self.axes if a not in home.split_axes)

        def to(t: TensorType) -> TensorType:
            expert: Dim = (Factor(t.shape[2], stay),)
            return t.with_dims((*home.dims[:2], expert, *t.dims[3:]))

        return to

    def sent(self, rows: Tensor) -> Tensor:
        """Slots on the experts' devices."""
        return exchange(rows, self.dispatch_layout, self.packing, self.algorithm)

    def returned(self, rows: Tensor, home: TensorType) -> Tensor:
        """Slots on the devices that they had in `home`."""
        return exchange(rows, self.combine_layout(home), self.combine_packing, self.algorithm)


# -- tables of slots ------------------------------------------------------------------------------
def places(bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For ids `bucket` [G, P, N] below `count`: (index of each entry within its bucket, in order;
    size of each bucket [G, P, count])."""
    hot = (bucket.reshape(*bucket.shape, 1) == F.arange(count)).to(int32)
    at = F.sum(hot * F.cumsum(hot, 2), -1) - 1
    return at, F.sum(hot, 2)


def filled(slot: Tensor, values: Tensor, size: int) -> Tensor:
    """A table [G, P, size] with `values` [G, P, N] at the indices `slot`, and -1 elsewhere."""
    return emit("put_along", slot, values + 1, dim=2, into=str(size)) - 1


def line(like: Tensor) -> Tensor:
    """0, 1, 2, ... along the last dim, in the shape of `like`."""
    return F.broadcast_to(F.arange(like.shape[-1]), like.shape)


def rows_at(x: Tensor, ids: Tensor, slots: Tensor) -> Tensor:
    """Rows of `x` [.., S, d] at `ids` [.., N]; -1 gives zeros.

    `slots` [.., S, K] are the indices in the result of each row, -1 for none: the gradient of a row
    is the sum over its slots, in that order.
    """

    @custom_gradient
    def picked(x: Tensor) -> Any:
        def backward(g: Tensor) -> Tensor:
            return total([pick(g, slots[..., j]) for j in range(slots.shape[-1])])

        return pick(x, ids), backward

    out: Tensor = picked(x)
    return out


def pick(x: Tensor, ids: Tensor) -> Tensor:
    return F.gather_or_zero(x, ids.reshape(*ids.shape, 1), -2)


def total(xs: Sequence[Tensor]) -> Tensor:
    """The sum of `xs`, from left to right."""
    out = xs[0]
    for x in xs[1:]:
        out = out + x
    return out


def combined(y: Tensor, slot: Tensor, choice: Tensor, gates: Tensor) -> Tensor:
    """Tokens [G, P, S, d]: the weighted sum of the rows of their k choices in `y` [G, P, slots,
    d]."""
    g, p, s, k = gates.shape
    rows = rows_at(y, slot, choice.reshape(*choice.shape, 1)).reshape(g, p, s, k, -1)
    return total([rows[..., j, :] * gates[..., j : j + 1].to(y.dtype) for j in range(k)])


def in_buckets(rows: Tensor, wire: Wire, each: Callable[[Tensor], Tensor]) -> Tensor:
    """`each` applied to the buckets of `rows` [G, P, E, slots, d], concatenated."""
    n, size = wire.buckets, rows.shape[3]
    if n == 1:
        return each(rows)
    if not wire.ordered:
        cuts = [size * i // n for i in range(n + 1)]
        return F.concat([each(rows[:, :, :, a:b]) for a, b in pairwise(cuts)], 3)
    # In a loop the collectives of one iteration end before the next begins.
    g, p, e, _, d = rows.shape
    parts = F.permute(rows.reshape(g, p, e, n, size // n, d), (3, 0, 1, 2, 4, 5))
    _, out = scan(lambda carry, part: (carry, each(part)), (), parts, policy="recompute")
    return F.permute(out, (1, 2, 3, 0, 4, 5)).reshape(g, p, e, size, -1)


# -- with a capacity ------------------------------------------------------------------------------
def by_capacity(
    x: Tensor, ids: Tensor, gates: Tensor, experts: int, capacity: int, wire: Wire, run: Experts,
    runs: Tensor | None = None, all_served: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(result, number of dropped choices): each expert takes the first `capacity` choices of a
    group, in the order of its tokens, on any device. `runs` are those of `Tokens.runs`. Unless
    `all_served`, a choice of id `experts` goes to no expert."""
    g, p, s, d = x.shape
    k, devices = ids.shape[-1], shard_count(wire.axes, x.type.sizes)
    flat = ids.reshape(g, p, s * k)
    at, counts = places(flat, experts)
    keep = at < capacity
    if runs is not None:
        keep = _rank(flat, experts, runs) < capacity
        at, _ = places(F.where(keep, flat, experts), experts)  # positions among kept choices
    elif p > 1:  # choices of earlier parts take room first
        before = F.cumsum(counts, 1) - counts
        keep = at + F.gather_or_zero(before, flat, -1) < capacity
    dropped = ~keep
    if not all_served:
        keep, dropped = keep & (flat < experts), dropped & (flat < experts)
    room = wire.room(min(capacity, s))
    slot = F.where(keep, flat * room + at, -1)
    choice = filled(slot, line(slot), experts * room)
    token = filled(slot, line(slot) // k, experts * room)
    rows = rows_at(x, token, slot.reshape(g, p, s, k)).reshape(g, p, experts, room, d)

    def through(part: Tensor) -> Tensor:
        """Sends one bucket to the experts, through them and back."""
        home, c = part.type, part.shape[3]
        part = wire.sent(part) if wire.axes else part
        # All rows of an expert in one block: [1, J, El, rows, d].
        held = F.permute(part, (2, 0, 1, 3, 4))
        y = run(held.reshape(1, devices, experts // devices, g * p * c, d), None)
        y = F.permute(y.reshape(experts, g, p, c, -1), (1, 2, 0, 3, 4))
        return wire.returned(y, home) if wire.axes else y

    y = in_buckets(rows, wire, through).reshape(g, p, experts * room, -1)
    return combined(y, slot, choice, gates), F.sum(dropped.to(f32))


def _rank(flat: Tensor, experts: int, runs: Tensor) -> Tensor:
    """For each of the choices `flat` [G, P, N], the number of earlier choices of the same expert in
    the group's own order."""
    (g, p, n), each = flat.shape, runs.shape[0] // flat.shape[1]
    mine = flat.reshape(g, p * each, n // each)
    at, counts = places(mine, experts)
    sums = F.take(counts, F.argsort(runs), 1)
    before = F.take(F.cumsum(sums, 1) - sums, runs, 1)
    return (at + F.gather_or_zero(before, mine, -1)).reshape(g, p, n)


# -- dropless -------------------------------------------------------------------------------------
def dropless(
    x: Tensor, ids: Tensor, gates: Tensor, experts: int, wire: Wire, run: Runs,
    all_served: bool = True,
) -> Tensor:  # fmt: skip
    """The result with every choice served: each device of experts has room for all rows that may be
    sent to it. Unless `all_served`, a choice of id `experts` goes to no expert.

    A part of S tokens sends at most S min(k, El) rows to a device of El experts. There they are
    sorted by expert, as grouped products need them (Gale et al. 2022).
    """
    g, p, s, d = x.shape
    k, devices = ids.shape[-1], shard_count(wire.axes, x.type.sizes)
    experts_per_device = experts // devices
    size = wire.room(s * min(k, experts_per_device))
    flat = ids.reshape(g, p, s * k)
    goal = flat // experts_per_device
    if wire.axes:
        at, _ = places(goal, devices)
        slot = goal * size + at
        if not all_served:
            slot = F.where(flat < experts, slot, -1)
    else:  # they are sorted as they are picked
        slot, counts = in_order(
            flat if all_served else F.where(flat < experts, flat, -1), experts_per_device
        )
    choice = filled(slot, line(slot), devices * size)
    token = filled(slot, line(slot) // k, devices * size)
    rows = rows_at(x, token, slot.reshape(g, p, s, k)).reshape(g, p, devices, size, d)
    if wire.axes:
        home = rows.type
        kind = filled(slot, flat - goal * experts_per_device, devices * size).reshape(
            g, p, devices, size
        )
        kind = F.relayout(kind, wire.dispatch_layout(kind.type), wire.algorithm)
        rows = in_buckets(rows, wire, wire.sent)
        y = unfolded(_sorted(*folded(rows, kind), experts_per_device, run), rows.type)
        y = in_buckets(y, wire, lambda part: wire.returned(part, home))
    else:
        y = run(rows.reshape(g * p, 1, size, d), counts.reshape(g * p, 1, experts_per_device))
    return combined(y.reshape(g, p, devices * size, -1), slot, choice, gates)


def in_order(kind: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """For rows of experts `kind` [.., .., R] (-1: none): (index of each row after sorting by
    expert, -1 for none; number of rows of each expert)."""
    at, counts = places(kind, experts)
    starts = F.cumsum(counts, -1) - counts
    return F.where(kind >= 0, F.gather_or_zero(starts, kind, -1) + at, -1), counts


def _sorted(rows: Tensor, kind: Tensor, expert_count: int, run: Runs) -> Tensor:
    """The results of `rows` [A, J, R, d], each of expert `kind` [A, J, R] of `expert_count`; -1:
    none."""
    slot, counts = in_order(kind, expert_count)
    holds = filled(slot, line(slot), rows.shape[2])
    y = run(rows_at(rows, holds, slot.reshape(*slot.shape, 1)), counts)
    return rows_at(y, slot, holds.reshape(*holds.shape, 1))


def in_blocks(run: Experts, block: int | None) -> Runs:
    """`run` on rows in blocks of `block` (None: chosen here) of one expert each. The last block of
    an expert is padded, so El more blocks are computed than the rows fill."""

    def laid_out(rows: Tensor, counts: Tensor) -> Tensor:
        (a, j, r, d), own = rows.shape, counts.shape[-1]
        size = block or max(8, -(-r // (2 * own)))
        blocks = -(-r // size) + own
        needs = (counts + (size - 1)) // size
        ends, stops = F.cumsum(needs, -1), F.cumsum(counts, -1)
        at = F.arange(r)
        kind = F.sum((at.reshape(r, 1) >= stops.reshape(a, j, 1, own)).to(int32), -1)
        first = (ends - needs) * size - (stops - counts)  # an expert's first slot minus first row
        slot = F.where(kind < own, F.gather_or_zero(first, kind, -1) + at, -1)
        holds = filled(slot, line(slot), blocks * size)
        laid = rows_at(rows, holds, slot.reshape(a, j, r, 1)).reshape(a, j, blocks, size, d)
        # Block n belongs to the expert whose blocks begin at or before n and end after it.
        n = F.arange(blocks).reshape(blocks, 1)
        ends = ends.reshape(a, j, 1, own)
        mine = (n >= ends - needs.reshape(a, j, 1, own)) & (n < ends)
        y = run(laid, mine.to(rows.dtype)).reshape(a, j, blocks * size, -1)
        return rows_at(y, slot, holds.reshape(a, j, blocks * size, 1))

    return laid_out


def folded(rows: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """(rows [G, P, J, size, d] as [A, J, R, d], kind [G, P, J, size] as [A, J, R]): A are the split
    digits of G and P, R all rows that one device of experts receives from one of A."""
    order, shape = _fold(rows.type)
    split = F.permute(rows.reshape(*shape, rows.shape[-1]), (*order, len(order)))
    a, j, r = _folded_sizes(rows.type)
    return split.reshape(a, j, r, rows.shape[-1]), (
        F.permute(kind.reshape(*shape), order).reshape(a, j, r)
    )


def unfolded(y: Tensor, t: TensorType) -> Tensor:
    """The inverse of `folded`, for rows of type `t`."""
    order, shape = _fold(t)
    inverse = [order.index(i) for i in range(len(order))]
    y = y.reshape(*[shape[i] for i in order], y.shape[-1])
    return F.permute(y, (*inverse, len(order))).reshape(*t.shape[:-1], y.shape[-1])


def _fold(t: TensorType) -> tuple[list[int], list[int]]:
    """(order, shape): the sizes of the digits of [G, P, J, size], and the order that puts split
    digits of G and P first, then J, then the rest."""
    runs = [digits(t.dims[i], t.sizes) for i in (0, 1)]
    flat = [d for run in runs for d in run]
    first = [i for i, d in enumerate(flat) if d.axes]
    rest = [i for i, d in enumerate(flat) if not d.axes]
    n = len(flat)
    return [*first, n, *rest, n + 1], [*[d.size for d in flat], *t.shape[2:4]]


def _folded_sizes(t: TensorType) -> tuple[int, int, int]:
    order, shape = _fold(t)
    at = order.index(len(shape) - 2)
    a = math.prod(shape[i] for i in order[:at])
    return a, t.shape[2], math.prod(shape[i] for i in order[at + 1 :])
