"""Collective algorithms by name: `build` makes the table of rounds of each of them, for any n.

| name | how a chunk travels | in which order it is added up |
|---|---|---|
| ring | from neighbour to neighbour, round | a left fold from the rank after its owner |
| line | from neighbour to neighbour, without the link between the ends | two folds that meet |
| direct | straight, in n - 1 rounds | its owner's, then the others downwards |
| halving | recursive halving and doubling, in about log2 n rounds | adjacent pairs, for any n |
| tree | up and down one binary tree | adjacent pairs, for any n |
| double_tree | half of it on each of two binary trees, where each rank works in one | its own |
| hierarchical | scattered within, reduced across, gathered within | level by level |
| puts, puts_hard | straight, by a kernel with puts (ir/tile), soft or hard epochs | as direct |
| engine | as the engine likes | unknown; priced as the ring |

>>> build("all_reduce", "ring", 4)
<all_reduce by ring: n=4 chunks=4 rounds=6>
>>> build("broadcast", "tree", 6, root=2).steps
3
>>> build("all_reduce", "hierarchical", shape=(2, 4)).name
'hierarchical(2:ring x 4:ring)'
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import assert_never

from ....core.checks import one_of, sizes, whole
from ....core.errors import UsageError
from . import flat as flat
from .nest import nested
from .table import (
    COLLECTIVES,
    Algorithm,
    Collective,
    Round,
    backwards,
    pipelined,
    renamed,
    together,
    trimmed,
)

FLAT = ("ring", "line", "direct", "halving", "tree", "double_tree")
PUTS = ("puts", "puts_hard")
NAMES = (*FLAT, *PUTS, "hierarchical", "engine")
# A table names every transfer: beyond this it says little that a formula would not (cost/).
MOST_RANKS, MOST_SEGMENTS = 1024, 4096
_COUNT = r"\d{1,9}"
# The algorithm by which the engine's own collective is verified and priced.
_ENGINE: dict[Collective, str] = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "tree",
    "all_to_all": "direct",
}


def build(
    collective: str,
    name: str,
    n: int | None = None,
    *,
    segments: int = 1,
    root: int = 0,
    shape: Sequence[int] = (),
    levels: Sequence[str] = (),
) -> Algorithm:
    """The table of rounds of `name` for `collective` among `n` ranks.

    `segments` cuts the message into parts that follow each other through a tree, or for a broadcast
    also along a ring or line. `shape` is the nesting of a hierarchical algorithm, outermost level
    first like the axes of a mesh (rank ids are row-major); `levels` are the algorithms of the
    levels (ring by default). Raises UsageError for a combination that does not exist.

    >>> build("all_gather", "halving", 8).steps, build("all_to_all", "ring", 8).steps
    (3, 4)
    """
    kind: Collective = one_of("algorithm", "the collective", collective, COLLECTIVES)
    one_of("algorithm", "the name", name, NAMES)
    nest = _shape(name, n, shape)
    count = math.prod(nest) if nest else whole("algorithm", "n", n, 1, MOST_RANKS)
    whole("algorithm", "segments", segments, 1, MOST_SEGMENTS)
    whole("algorithm", "root", root, 0, count - 1)
    if root and kind != "broadcast":
        raise UsageError(
            f"algorithm: {collective} has no root",
            root=root,
            fix="leave root out; only a broadcast has one",
        )
    if name == "hierarchical":
        each = (levels,) if isinstance(levels, str) else tuple(levels)
        return _hierarchical(kind, nest, segments, root, each)
    if levels:
        raise UsageError(
            f"algorithm: {name} has no levels",
            levels=tuple(levels),
            fix="levels belong to hierarchical",
        )
    if segments > 1 and not can_segment(kind, name):
        raise UsageError(
            f"algorithm: {collective} by {name} is not cut into segments",
            segments=segments,
            fix="leave segments out; trees and broadcasts along a ring or line take them",
        )
    return _flat(kind, name, count, segments, root)


def named(collective: str, name: str, n: int, root: int = 0) -> Algorithm:
    """The table with the name `name`, in the notation of `build`'s tables; `root` is a broadcast's
    root. Raises UsageError if there is none.

    >>> named("all_reduce", "double_tree/4", 8)
    <all_reduce by double_tree/4: n=8 chunks=8 rounds=9>
    >>> named("all_gather", "hierarchical(2:ring x 4:halving)", 8).n
    8
    """
    nest = re.fullmatch(r"hierarchical\((.+)\)", name)
    parts = [p.rpartition(":") for p in nest[1].split(" x ")] if nest else [("", "", name)]
    bases, segments = zip(*(_cut(base) for _, _, base in parts))
    if not nest:
        return build(collective, bases[0], n, segments=segments[0], root=root)
    if not all(re.fullmatch(_COUNT, size) for size, _, _ in parts):
        raise UsageError(
            f"algorithm: {name!r} is not an algorithm",
            collective=collective,
            fix="write for instance: hierarchical(2:ring x 4:halving)",
        )
    shape = [int(size) for size, _, _ in parts]
    cut = segments[0]
    return build(collective, "hierarchical", n, segments=cut, root=root, shape=shape, levels=bases)


def puts_by(epoch: str | None) -> str:
    """The name of the kernels with puts whose epochs are "hard" or "soft" (also None)."""
    return PUTS[epoch == "hard"]


def nest_size(name: str) -> int | None:
    """The number of ranks in a hierarchical name such as "hierarchical(2:ring x 4:halving)"; None
    for any other name.

    >>> nest_size("hierarchical(2:ring x 4:halving)"), nest_size("ring")
    (8, None)
    """
    sizes = re.findall(rf"[( ]({_COUNT}):", name)
    return math.prod(map(int, sizes)) if sizes else None


@lru_cache(maxsize=1024)
def received_share(collective: str, name: str, n: int) -> float:
    """Bytes that the busiest rank receives by the table `name`, as a multiple of the tensor's
    bytes.

    >>> received_share("all_reduce", "ring", 8), received_share("all_reduce", "tree", 8)
    (1.75, 3.0)
    """
    table = named(collective, name, n)
    return max(table.received(), default=0) / table.parts


def _cut(name: str) -> tuple[str, int]:
    base, slash, segments = name.partition("/")
    return (base, int(segments)) if slash and re.fullmatch(_COUNT, segments) else (name, 1)


def can_segment(collective: Collective, name: str) -> bool:
    """Returns whether the algorithm can send a message in segments that follow each other."""
    if collective == "all_reduce":
        return name in ("tree", "double_tree")
    return collective == "broadcast" and name in ("tree", "double_tree", "ring", "line")


def _shape(name: str, n: int | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the levels of `hierarchical`, () for all others. Raises UsageError if they do
    not fit the name or n."""
    sizes_given = sizes("algorithm", shape)
    if name != "hierarchical":
        if sizes_given:
            raise UsageError(
                f"algorithm: {name} has no shape",
                shape=sizes_given,
                fix="give n; a shape belongs to hierarchical",
            )
        return ()
    for size in sizes_given:
        whole("algorithm", "a size of the shape", size, 1, MOST_RANKS)
    if not sizes_given or (n is not None and n != math.prod(sizes_given)):
        raise UsageError(
            "algorithm: hierarchical needs the shape of its nesting",
            n=n,
            shape=sizes_given,
            fix="shape=(hosts, devices of a host), with n left out or their product",
        )
    whole("algorithm", "n", math.prod(sizes_given), 1, MOST_RANKS)
    return sizes_given


@lru_cache(maxsize=32)
def _flat(kind: Collective, name: str, n: int, segments: int, root: int) -> Algorithm:
    """The table of one level. Each tree of a tree algorithm carries a part of the chunks;
    `pipelined` cuts chunks into segments that follow each other."""
    if name in PUTS:
        return replace(_flat(kind, "direct", n, 1, root), name=name)
    if name == "engine":
        return replace(_flat(kind, _ENGINE[kind], n, 1, root), name="engine", native=True)
    trees = name in ("tree", "double_tree")
    width = 2 if name == "double_tree" else 1
    rounds: tuple[Round, ...]
    match kind:
        case "all_reduce" if trees:
            each = flat.trees_of(name, n)
            rounds = together([t.up([j]) + t.down([j]) for j, t in enumerate(each)])
            chunks = width
        case "all_reduce":
            rounds, chunks = flat.scatter_gather(name, n), n
        case "reduce_scatter" | "all_gather" if trees:
            rounds = flat.tree_reduce_scatter(flat.trees_of(name, n), n)
            if kind == "all_gather":
                rounds = backwards(rounds, "copy")
            chunks = width * n
        case "reduce_scatter":
            rounds, chunks = flat.SCATTER[name](n), n
        case "all_gather":
            rounds, chunks = flat.GATHER[name](n), n
        case "broadcast":
            rounds, chunks = _broadcast(name, n, root), n if name == "halving" else width
        case "all_to_all":
            rounds, chunks = _all_to_all(name, n), width * n * n
        case _:
            assert_never(kind)
    if segments > 1:
        rounds, chunks = pipelined(rounds, chunks, segments), chunks * segments
        name = f"{name}/{segments}"
    algorithm = Algorithm(kind, name, n, chunks, rounds, root)
    twice = kind == "all_gather" if trees else (kind, name) == ("broadcast", "halving")
    return trimmed(algorithm) if twice else algorithm


def _broadcast(name: str, n: int, root: int) -> tuple[Round, ...]:
    match name:
        case "ring":
            return flat.ring_broadcast(n, root)
        case "line":
            return flat.line_broadcast(n, root)
        case "direct":
            return flat.direct_broadcast(n, root)
        case "halving":
            return flat.halving_broadcast(n, root)
    return together([t.down([j]) for j, t in enumerate(flat.broadcast_trees(name, n, root))])


def _all_to_all(name: str, n: int) -> tuple[Round, ...]:
    """The rounds in which each of n ranks sends a separate chunk to every other rank."""
    match name:
        case "ring":
            return flat.routes(n, flat.ring_route(n))
        case "line":
            return flat.routes(n, flat.line_route)
        case "direct":
            return flat.pairwise_exchange(n)
        case "halving":
            return flat.log_exchange(n)
    trees = flat.trees_of(name, n)
    k = len(trees)
    return together(
        [
            renamed(flat.routes(n, tree.route), [c * k + j for c in range(n * n)])
            for j, tree in enumerate(trees)
        ]
    )


def _hierarchical(
    kind: Collective, shape: tuple[int, ...], segments: int, root: int, levels: tuple[str, ...]
) -> Algorithm:
    """The table of nested levels, each with its own algorithm. An all_reduce is a reduce_scatter
    level by level from the innermost, an all_reduce at the outermost level, and all_gathers on the
    way back."""
    levels = levels or ("ring",) * len(shape)
    if len(levels) != len(shape) or any(name not in FLAT for name in levels):
        raise UsageError(
            "algorithm: hierarchical needs one algorithm a level",
            shape=shape,
            levels=levels,
            fix=f"name as many as the shape has sizes, of {', '.join(FLAT)}",
        )
    if segments > 1 and not (kind == "all_reduce" and can_segment(kind, levels[0])):
        raise UsageError(
            f"algorithm: {kind} by hierarchical is not cut into segments",
            levels=levels,
            segments=segments,
            fix="segments are for an all_reduce whose outermost level is a tree",
        )
    bases = []
    at = root
    for i, (name, size) in reversed(list(enumerate(zip(levels, shape)))):
        at, here = divmod(at, size)
        inner: Collective = "reduce_scatter" if kind == "all_reduce" and i else kind
        bases.append(
            _flat(inner, name, size, 1 if i else segments, here if kind == "broadcast" else 0)
        )
    gathers = [
        _flat("all_gather", name, size, 1, 0) if kind == "all_reduce" and i else None
        for i, (name, size) in enumerate(zip(levels, shape))
    ]
    label = " x ".join(f"{b.n}:{b.name}" for b in reversed(bases))
    return trimmed(nested(kind, f"hierarchical({label})", bases[::-1], gathers, root))
