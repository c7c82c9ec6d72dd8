"""Checks of a table of rounds: `verify`, its order of additions, and a reference run in NumPy.

`verify` runs the table on symbols: each rank's share of each chunk is one bit, so it finds a share
that is added twice, lost, or sent before it arrives. `order` records the order of additions of each
result. `evaluate` runs the table on NumPy arrays, and is the oracle of the engine's implementation.

>>> from tessera.ir.schedule.algorithms.build import build
>>> verify(build("all_reduce", "ring", 3))
>>> order(build("all_reduce", "ring", 3))[0]
(0, (1, 2))
>>> order(build("all_reduce", "tree", 5))[0] == adjacent_pairs(5)
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ....core.errors import GraphError, UsageError
from .table import Algorithm, Transfer, need_algorithm

# A rank, or a pair of orders that are added. The one with the smallest rank is first, because a + b
# and b + a have the same bits.
Order: TypeAlias = "int | tuple[Order, Order]"
T = TypeVar("T")


def replay(
    algorithm: Algorithm,
    start: Callable[[int, int], T],
    add: Callable[[T, T, Transfer, int], T],
) -> list[dict[int, T]]:
    """The chunks that each rank holds after the last round.

    `start(rank, chunk)` is its value before the first round; `add(there, arrived, transfer, round)`
    is the value after an addition.
    """
    held = [{c: start(r, c) for c in algorithm.starts(r)} for r in range(algorithm.n)]
    for k, moves in enumerate(algorithm.rounds):
        sent = [[held[t.src][c] for c in t.chunks] for t in moves]
        for t, values in zip(moves, sent):
            here = held[t.dst]
            for c, value in zip(t.chunks, values):
                here[c] = value if t.op == "copy" else add(here[c], value, t, k)
    return held


def verify(algorithm: Algorithm) -> None:
    """Raises GraphError, with round and transfer, if the table does not implement its collective.

    It checks that ranks and chunks exist; that a rank sends only chunks that it holds; that a chunk
    of a rank is written by one copy or by additions only in one round; that no share is added twice
    and no transfer is redundant; and that after the last round each rank has all chunks that the
    collective owes it, from every rank that contributes.
    """
    a = need_algorithm("verify", algorithm)
    reduces = a.collective in ("all_reduce", "reduce_scatter")
    held = [dict.fromkeys(a.starts(r), 1 << r) for r in range(a.n)]
    for k, moves in enumerate(a.rounds):
        written: dict[tuple[int, int], str] = {}
        sent = []
        for t in moves:
            _shape(a, k, t, reduces)
            for c in t.chunks:
                if c not in held[t.src]:
                    raise _wrong(a, k, t, f"rank {t.src} does not hold chunk {c}")
                before = written.get((t.dst, c))
                if before is not None and "copy" in (before, t.op):
                    raise _wrong(a, k, t, f"chunk {c} of rank {t.dst} is written twice")
                written[t.dst, c] = t.op
            sent.append([held[t.src][c] for c in t.chunks])
        if list(moves) != sorted(moves, key=lambda t: (t.src, t.dst, t.op)):
            raise _wrong(a, k, moves[0], "transfers are not in ascending order of sender")
        for t, values in zip(moves, sent):
            here = held[t.dst]
            for c, value in zip(t.chunks, values):
                if t.op == "copy":
                    if here.get(c) == value:
                        raise _wrong(a, k, t, f"rank {t.dst} holds this chunk {c} already")
                    here[c] = value
                elif c not in here:
                    raise _wrong(a, k, t, f"rank {t.dst} has nothing to add chunk {c} to")
                elif here[c] & value:
                    raise _wrong(a, k, t, f"shares of chunk {c} are added twice")
                else:
                    here[c] |= value
    _results(a, held)


def _shape(a: Algorithm, k: int, t: Transfer, reduces: bool) -> None:
    if not (0 <= t.src < a.n and 0 <= t.dst < a.n and t.src != t.dst):
        raise _wrong(a, k, t, "the ranks are not two of the group")
    if not t.chunks or len(set(t.chunks)) != len(t.chunks):
        raise _wrong(a, k, t, "no chunk, or one twice")
    if not all(0 <= c < a.chunks for c in t.chunks):
        raise _wrong(a, k, t, f"a chunk is not one of {a.chunks}")
    if t.op == "add" and not reduces:
        raise _wrong(a, k, t, f"an {a.collective} adds nothing")


def _results(a: Algorithm, held: Sequence[dict[int, int]]) -> None:
    """Raises GraphError if a rank ends without a share of a chunk that the collective owes it.

    `held[rank][chunk]` is a bit mask of the ranks whose shares the chunk contains.
    """
    everyone = (1 << a.n) - 1
    for r in range(a.n):
        for c in a.wants(r):
            if a.collective in ("all_reduce", "reduce_scatter"):
                owed = everyone
            elif a.collective == "broadcast":
                owed = 1 << a.root
            else:  # all_gather, all_to_all: from the one rank that held it
                owed = 1 << (c // a.pieces if a.collective == "all_gather" else c // a.parts)
            got = held[r].get(c, 0)
            if got != owed:
                missing = [s for s in range(a.n) if (owed & ~got) >> s & 1]
                raise GraphError(
                    f"{a.collective} by {a.name}: rank {r} ends without "
                    f"{'ranks' if len(missing) > 1 else 'rank'} {_few(missing)} in chunk {c}",
                    table=a,
                    fix="print algorithm.text() and follow that chunk",
                )


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def _wrong(a: Algorithm, k: int, t: Transfer, message: str) -> GraphError:
    way = f"{t.src} > {t.dst} {t.op} {_few(t.chunks)}"
    return GraphError(
        f"{a.collective} by {a.name}, round {k}: {message}",
        transfer=way,
        table=a,
        fix="a rank sends what it held when the round began, and each share once",
    )


# ---- the order of additions --------------------------------------------------------------------
def adjacent_pairs(n: int) -> Order:
    """The tree that adds adjacent pairs, then pairs of pairs; an odd last one waits for the next
    level.

    >>> adjacent_pairs(7)
    (((0, 1), (2, 3)), ((4, 5), 6))
    """
    row: list[Order] = list(range(n))
    while len(row) > 1:
        row = [row[i] if i + 1 == len(row) else (row[i], row[i + 1]) for i in range(0, len(row), 2)]
    return row[0]


@lru_cache(maxsize=64)
def order(algorithm: Algorithm) -> tuple[Order, ...] | None:
    """The order of additions of each chunk, equal at every rank; None if the engine decides it.

    Raises UsageError for a collective that adds nothing, GraphError if two ranks would add in
    different orders: their sums might differ in the last bits.
    """
    a = need_algorithm("order", algorithm)
    if a.collective not in ("all_reduce", "reduce_scatter"):
        raise UsageError(
            f"order: {a.collective} adds nothing",
            table=a,
            fix="ask it of an all_reduce or a reduce_scatter",
        )
    if a.native:
        return None

    def add(x: tuple[int, Order], y: tuple[int, Order], *_: object) -> tuple[int, Order]:
        low, high = (x, y) if x[0] < y[0] else (y, x)
        return low[0], (low[1], high[1])

    held = replay(a, lambda r, c: (r, r), add)
    orders: dict[int, Order] = {}
    for r in range(a.n):
        for c in a.wants(r):
            if orders.setdefault(c, held[r][c][1]) != held[r][c][1]:
                raise GraphError(
                    f"{a.collective} by {a.name}: rank {r} adds chunk {c} up in another order than "
                    "the ranks before it",
                    table=a,
                    fix="let one rank finish the sum and copy it to the others",
                )
    return tuple(orders[c] for c in sorted(orders))


def in_pairs(algorithm: Algorithm) -> bool:
    """Returns whether every chunk is added in adjacent pairs: the order that any mesh can keep."""
    found = order(algorithm)
    return found is not None and all(tree == adjacent_pairs(algorithm.n) for tree in found)


def fold(tree: Order, values: Sequence[Any]) -> Any:
    """The sum of `values`, one per rank, added in the order of `tree`."""
    return values[tree] if isinstance(tree, int) else fold(tree[0], values) + fold(tree[1], values)


# ---- on arrays ---------------------------------------------------------------------------------
def evaluate(algorithm: Algorithm, blocks: Sequence[Any]) -> list[Any]:
    """The results of all ranks from their arrays, by NumPy, in the table's order of additions.

    Shapes are those of `lax.psum`, `psum_scatter`, `all_gather` and `all_to_all` on dim 0, tiled; a
    broadcast gives each rank the root's array. Block sizes must be divisible by the table's chunks.
    """
    a = algorithm
    arrays = [np.asarray(b) for b in blocks]

    def start(r: int, c: int) -> Any:
        at = c - r * a.pieces if a.collective == "all_gather" else c
        at = c - r * a.parts if a.collective == "all_to_all" else at
        cut = a.pieces if a.collective == "all_gather" else a.parts
        return arrays[r].reshape(cut, -1)[at]

    held = replay(a, start, lambda x, y, *_: x + y)
    results = []
    for r in range(a.n):
        flat = np.concatenate([held[r][c] for c in a.wants(r)])
        row_shape = arrays[r].shape[1:]
        same = a.collective in ("all_reduce", "broadcast", "all_to_all")
        results.append(flat.reshape(arrays[r].shape if same else (-1, *row_shape)))
    return results
