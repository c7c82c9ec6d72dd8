"""Collectives over all folds of a device and all tensors of a bucket as one collective.

The local code of an op calls one collective, of the array functions in `CollectiveXp`. Its blocks
wait on a `Wire` until those of the whole bucket are there. Equal collectives are then sent as one
flat buffer: places of one device are joined on the device, devices after them. The local code
continues with the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .fixed_order import ordered_scatter, ordered_sum, tree
from .folds import Along, Blocks, Folds

Array = Any
Axes = tuple[str, ...]
Rows = Sequence[Array]
Run = Callable[[Rows], Rows]


@dataclass(frozen=True, slots=True)
class Late:
    """A value of all folds that exists once its collective has run."""

    get: Callable[[], Blocks]


def now(x: Any) -> Any:
    return x.get() if isinstance(x, Late) else x


class Wire:
    """The collectives that local code asked for, each with the arrays of some groups of places."""

    def __init__(self) -> None:
        self._asked: dict[object, tuple[Run, bool, list[Rows]]] = {}
        self._came: dict[object, list[Rows]] = {}

    def ask(self, key: object, run: Run, joins: bool, sent: Sequence[Rows]) -> Callable[[], Any]:
        """Asks for `run` of each of `sent`. The returned function returns the results after
        `carry`."""
        _, _, every = self._asked.setdefault(key, (run, joins, []))
        first = len(every)
        every.extend(sent)
        return lambda: self._came[key][first : first + len(sent)]

    def carry(self) -> None:
        """Runs all collectives; those with the same key as one."""
        for key, (run, joins, sent) in self._asked.items():
            self._came[key] = _as_one(run, sent, joins)


def _as_one(run: Run, sent: Sequence[Rows], joins: bool) -> list[Rows]:
    """Returns `run` of each of `sent`, or of all of them concatenated along the last dim; `run`
    keeps the number of columns."""
    if len(sent) == 1 or not joins:
        return [run(rows) for rows in sent]
    whole = run([jnp.concatenate(row, -1) for row in zip(*sent, strict=True)])
    sizes = [rows[0].shape[-1] for rows in sent]
    ends = np.cumsum(sizes).tolist()
    return [
        [lax.slice_in_dim(x, end - size, end, axis=-1) for x in whole]
        for size, end in zip(sizes, ends, strict=True)
    ]


class CollectiveXp:
    """The array functions `xp` on values that have a block for each fold along `axes`. Collectives
    wait on `wire`. Sums are added in `order`; "" leaves the order to the engine."""

    def __init__(self, wire: Wire, folds: Folds, axes: Axes, xp: Any, order: str) -> None:
        self.wire, self.folds, self.axes, self.xp, self.order = wire, folds, axes, xp, order

    def __getattr__(self, name: str) -> Callable[..., Any]:
        f = getattr(self.xp, name)

        def each(*args: Any) -> Any:
            if any(isinstance(a, Late) for a in args):
                return Late(lambda: each(*map(now, args)))
            every = range(self.folds.count(self.axes))
            return Blocks(f(*(a[i] if isinstance(a, Blocks) else a for a in args)) for i in every)

        return each

    def _ask(
        self, key: tuple[object, ...], x: Blocks, along: Along,
        send: Callable[[Rows], Rows], run: Run, receive: Callable[[Rows], Rows],
        alone: Run = list,
    ) -> Late:  # fmt: skip
        """Asks for a collective. For each group of blocks whose places differ only along `along`,
        `send` makes the operands of `run`, and `receive` makes blocks of its results. `alone`
        replaces `run` if one device has all places."""
        groups = self.folds.groups(self.axes, along.axes)
        sent, several = [send([x[i] for i in g]) for g in groups], along.devices > 1
        # `id(self.xp)`: collectives by different algorithms are not merged.
        key = (*key, along.axes, x[0].dtype, id(self.xp))
        came = self.wire.ask(key, run if several else alone, several, sent)

        def get() -> Blocks:
            blocks: list[Array] = [None] * len(x)
            for g, rows in zip(groups, came(), strict=True):
                for i, block in zip(g, receive(rows), strict=True):
                    blocks[i] = block
            return Blocks(blocks)

        return Late(get)

    def all_reduce(self, x: Blocks, axes: Axes, kind: str) -> Late:
        shape, along = x.shape, self.folds.along(axes)
        receive: Run = lambda rows: [rows[0].reshape(shape)] * along.folds  # noqa: E731  # one line
        if kind == "sum" and self.order:
            send, run = _flat, partial(_sum_over, along, self.order)
            return self._ask(("all_reduce",), x, along, send, run, receive, run)
        return self._ask(
            ("all_reduce", kind), x, along, lambda blocks: _flat([tree(blocks, kind)]),
            lambda rows: [self.xp.all_reduce(rows[0], axes, kind)], receive,
        )  # fmt: skip

    def reduce_scatter(self, x: Blocks, axes: Axes, dim: int) -> Late:
        """Returns each fold's part of the sum over all places. Without a fixed order, the folds of
        a device are summed first."""
        along = self.folds.along(axes)
        places = along.devices * along.folds
        size, *others = jnp.moveaxis(x[0], dim, 0).shape

        def lines(x: Array) -> Array:
            return jnp.moveaxis(x, dim, 0).reshape(places, -1)

        def blocks_of(parts: Rows) -> Rows:
            return [jnp.moveaxis(p.reshape(size // places, *others), 0, dim) for p in parts]

        if self.order:
            run = partial(_scatter_over, along, self.order)
            send = lambda blocks: [*map(lines, blocks)]  # noqa: E731  # one line
            return self._ask(("reduce_scatter",), x, along, send, run, blocks_of, run)
        return self._ask(
            ("reduce_scatter",), x, along,
            lambda blocks: [along.devices_first(lines(tree(blocks))).reshape(along.devices, -1)],
            lambda rows: [self.xp.reduce_scatter(rows[0], axes, 0)],
            lambda rows: blocks_of(rows[0].reshape(along.folds, -1)),
        )  # fmt: skip

    def all_gather(self, x: Blocks, axes: Axes, dim: int) -> Late:
        shape, along = x.shape, self.folds.along(axes)

        def receive(rows: Rows) -> Rows:
            y = along.places(rows[0].reshape(along.devices, along.folds, *shape))
            whole = (*shape[:dim], y.shape[0] * shape[dim], *shape[dim + 1 :])
            return [jnp.moveaxis(y, 0, dim).reshape(whole)] * along.folds

        return self._ask(
            ("all_gather",), x, along, lambda blocks: [jnp.stack(blocks).reshape(1, -1)],
            lambda rows: [self.xp.all_gather(rows[0], axes, 0)], receive,
        )  # fmt: skip

    def all_to_all(self, x: Blocks, axes: Axes, split: int, concat: int) -> Late:
        """One exchange between devices carries the parts of all folds."""
        along = self.folds.along(axes)
        devices, folds = along.devices, along.folds
        part = jnp.moveaxis(x[0], split, 0).shape[1:]

        def send(blocks: Rows) -> Rows:
            parts = [along.devices_first(jnp.moveaxis(b, split, 0)) for b in blocks]
            return [jnp.stack(parts, 1).reshape(devices, -1)]

        def receive(rows: Rows) -> Rows:
            y = rows[0].reshape(devices, folds, folds, *part)  # sender, its fold, the fold here
            return [jnp.moveaxis(along.places(y[:, :, i]), 0, concat) for i in range(folds)]

        return self._ask(
            ("all_to_all",), x, along, send,
            lambda rows: [self.xp.all_to_all(rows[0], axes, 0, 0)], receive,
        )  # fmt: skip

    def broadcast(self, x: Blocks, axes: Axes, root: int) -> Late:
        shape, along = x.shape, self.folds.along(axes)
        device, fold = along.device_and_fold(root)
        return self._ask(
            ("broadcast", root), x, along, lambda blocks: _flat([blocks[fold]]),
            lambda rows: [self.xp.broadcast(rows[0], axes, device)],
            lambda rows: [rows[0].reshape(shape)] * along.folds,
        )  # fmt: skip

    def permute(self, x: Blocks, axes: Axes, pairs: Sequence[tuple[int, int]]) -> Late:
        """One exchange between devices per pair of folds; blocks that stay on their device are not
        sent."""
        shape, along = x.shape, self.folds.along(axes)
        moves: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of devices, by their folds
        for pair in pairs:
            (device, fold), (to, into) = map(along.device_and_fold, pair)
            moves.setdefault((fold, into), []).append((device, to))

        def run(rows: Rows) -> Rows:
            came = [jnp.zeros_like(row) for row in rows]
            for (fold, into), between in moves.items():
                if len(between) == along.devices and all(a == b for a, b in between):
                    came[into] = rows[fold]
                    continue
                taken = np.isin(np.arange(along.devices), [to for _, to in between])
                mine = jnp.asarray(taken)[lax.axis_index(axes)]
                came[into] = jnp.where(mine, self.xp.permute(rows[fold], axes, between), came[into])
            return came

        return self._ask(
            ("permute", tuple(pairs)), x, along, _flat, run,
            lambda rows: [row.reshape(shape) for row in rows], run,
        )  # fmt: skip


def _flat(blocks: Rows) -> Rows:
    return [b.reshape(-1) for b in blocks]


# -- sums in one order ----------------------------------------------------------------------------
def _sum_over(along: Along, order: str, rows: Rows) -> Rows:
    """Returns the sum of all places' `rows`, one for each fold: along the last axis first."""
    for axis, (devices, folds) in reversed([*zip(along.axes, along.sizes, strict=True)]):
        run = partial(_sum_along, axis, devices, order)
        runs = [rows[i : i + folds] for i in range(0, len(rows), folds)]
        rows = [total for (total,) in _as_one(run, runs, devices > 1)]
    return rows


def _sum_along(axis: str, devices: int, order: str, terms: Rows) -> Rows:
    return [ordered_sum(terms, axis, devices, order)]


def _scatter_over(along: Along, order: str, rows: Rows) -> Rows:
    """Returns each fold's lines of the sum of all places' `rows`: along the first axis first."""
    at = np.arange(along.folds).reshape([folds for _, folds in along.sizes])
    for i, (axis, (devices, folds)) in enumerate(zip(along.axes, along.sizes, strict=True)):
        run = partial(_scatter_along, axis, devices, order)
        runs = np.moveaxis(at, i, -1).reshape(-1, folds).tolist()
        came = _as_one(run, [[rows[j] for j in r] for r in runs], devices > 1)
        found = {j: x for r, parts in zip(runs, came, strict=True) for j, x in zip(r, parts)}
        rows = [found[j] for j in range(along.folds)]
    return rows


def _scatter_along(axis: str, devices: int, order: str, terms: Rows) -> Rows:
    parts: Rows = jnp.split(ordered_scatter(terms, axis, devices, 0, order), len(terms))
    return parts
