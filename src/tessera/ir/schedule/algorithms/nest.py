"""Hierarchical collectives: nested levels, each with its own algorithm.

Ranks are row-major over the levels, outermost first: ranks of the last level are neighbours. An
all_reduce is a reduce_scatter on each level from the innermost, an all_reduce of the remaining
chunk on the outermost, and all_gathers back, so the slow outer links carry 1/g of the bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .table import Algorithm, Collective, Round, Transfer

# (rank without the level's coordinate, chunk of the level's algorithm) -> chunks of the whole.
Expand = Callable[[tuple[int, ...], int], Sequence[int]]
Place = tuple[int | slice, ...]


def nested(
    kind: Collective,
    name: str,
    bases: Sequence[Algorithm],
    gathers: Sequence[Algorithm | None],
    root: int,
) -> Algorithm:
    """The algorithm that nests `bases`, one per level, outermost first."""
    shape = tuple(b.n for b in bases)
    n, depth = math.prod(shape), len(shape)
    k = math.lcm(*(b.pieces for b in bases), *(g.pieces for g in gathers if g is not None))
    rounds: list[Round] = []
    if kind == "broadcast":
        at = np.unravel_index(root, shape)
        for i, base in enumerate(bases):
            # Groups that have the chunk by now: their ranks agree with the root on all inner
            # levels.
            groups = [g for g in _groups(shape, i) if g[i:] == tuple(int(c) for c in at[i + 1 :])]
            rounds += _stage(base, shape, i, groups, partial(_piece, base, k))
        return Algorithm(kind, name, n, k, tuple(rounds), root)
    if kind == "all_to_all":
        return Algorithm(kind, name, n, n * n * k, tuple(_exchange(bases, shape, k)))

    # Blocks by their owner's coordinates; an all_reduce has none on the outermost level.
    owned = shape[1:] if kind == "all_reduce" else shape
    first = depth - len(owned)
    ids = np.arange(math.prod(owned) * k).reshape(*owned, k)

    def scattered(i: int, base: Algorithm) -> Expand:
        def expand(group: tuple[int, ...], chunk: int) -> list[int]:
            block, piece = divmod(chunk, base.pieces)
            place: list[int | slice] = [slice(None)] * len(owned)
            place[i - first] = block
            place[i - first + 1 :] = group[i:]
            wide = k // base.pieces
            found: list[int] = (
                ids[(*place, slice(piece * wide, (piece + 1) * wide))].ravel().tolist()
            )
            return found

        return expand

    inward = [(i, b) for i, b in enumerate(bases) if i >= first]
    if kind != "all_gather":
        for i, base in reversed(inward):
            rounds += _stage(base, shape, i, _groups(shape, i), scattered(i, base))
    if kind == "all_reduce":
        top = bases[0]

        def share_ids(group: tuple[int, ...], chunk: int) -> list[int]:
            mine: list[int] = ids[group].tolist()
            return [mine[p] for p in _share(top, chunk, k)]

        rounds += _stage(top, shape, 0, _groups(shape, 0), share_ids)
    if kind != "reduce_scatter":
        for i, base in inward:
            spread = gathers[i] or base
            rounds += _stage(spread, shape, i, _groups(shape, i), scattered(i, spread))
    return Algorithm(kind, name, n, ids.size, tuple(rounds))


def _share(base: Algorithm, chunk: int, k: int) -> range:
    """The range of `k` pieces that `chunk` covers, for an algorithm without owners of chunks."""
    wide = k // base.chunks
    return range(chunk * wide, (chunk + 1) * wide)


def _piece(base: Algorithm, k: int, group: tuple[int, ...], chunk: int) -> range:
    return _share(base, chunk, k)


def _groups(shape: tuple[int, ...], level: int) -> list[tuple[int, ...]]:
    """The coordinates of all groups that work in parallel on `level`."""
    rest = [range(s) for i, s in enumerate(shape) if i != level]
    return list(itertools.product(*rest))


def _stage(
    base: Algorithm,
    shape: tuple[int, ...],
    level: int,
    groups: Sequence[tuple[int, ...]],
    expand: Expand,
) -> list[Round]:
    """The rounds of `base` on `level`, run by all `groups` at once."""

    def rank(group: tuple[int, ...], at: int) -> int:
        return int(np.ravel_multi_index((*group[:level], at, *group[level:]), shape))

    made = []
    for moves in base.rounds:
        transfers = [
            Transfer(
                rank(group, t.src),
                rank(group, t.dst),
                tuple(sorted(x for c in t.chunks for x in expand(group, c))),
                t.op,
            )
            for group in groups
            for t in moves
        ]
        made.append(tuple(sorted(transfers, key=lambda t: (t.src, t.dst, t.op))))
    return made


def _exchange(bases: Sequence[Algorithm], shape: tuple[int, ...], k: int) -> list[Round]:
    """The rounds of an all_to_all: chunks move to their destination's coordinate on the innermost
    level first, then outwards."""
    n = math.prod(shape)
    ids = np.arange(n * n * k).reshape(*shape, *shape, k)
    depth = len(shape)
    rounds: list[Round] = []
    for i in reversed(range(depth)):
        base = bases[i]
        wide = k // base.pieces

        def expand(
            group: tuple[int, ...], chunk: int, i: int = i, base: Algorithm = base, wide: int = wide
        ) -> list[int]:
            pair, piece = divmod(chunk, base.pieces)
            src, dst = divmod(pair, base.n)
            # The chunk is at its source's coordinate on this and outer levels, at its destination's
            # on inner levels.
            source: Place = (*group[:i], src, *(slice(None),) * (depth - i - 1))
            goal: Place = (*(slice(None),) * i, dst, *group[i:])
            place: Place = (*source, *goal, slice(piece * wide, (piece + 1) * wide))
            found = ids[place]
            return [int(c) for c in found.ravel()]

        rounds += _stage(base, shape, i, _groups(shape, i), expand)
    return rounds
