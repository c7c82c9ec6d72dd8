"""Rounds of the algorithms on one group of n ranks: ring, line, direct, halving, trees.

Most are built from one pattern. Chunk c is at rank c and spreads to all ranks: an all_gather. Run
backwards, with additions in place of copies, it is a reduce_scatter; the two in sequence are an
all_reduce. The algorithms differ in the path of a chunk: around a ring, along a line, one hop to
each rank, or doubling. All of them take any n; docstrings say what changes if n is no power of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .table import Hop, Round, backwards, renamed, table, together

Rounds = tuple[Round, ...]


# ---- spreading: all_gather, and backwards reduce_scatter ---------------------------------------
def ring_gather(n: int) -> Rounds:
    """All_gather: each rank passes on the chunk of the round before; n - 1 rounds of one chunk."""
    return table([[(r, (r + 1) % n, (r - k) % n, "copy") for r in range(n)] for k in range(n - 1)])


def ring_scatter(n: int) -> Rounds:
    """Reduce_scatter: chunk c goes around the ring from rank c + 1 to c, as a left fold."""
    return table(
        [[(r, (r + 1) % n, (r - k - 1) % n, "add") for r in range(n)] for k in range(n - 1)]
    )


def line_gather(n: int) -> Rounds:
    """All_gather on a ring without the link between the ends: chunks travel in both directions."""
    rounds: list[list[Hop]] = []
    for k in range(n - 1):
        right: list[Hop] = [(c + k, c + k + 1, c, "copy") for c in range(n - 1 - k)]
        left: list[Hop] = [(c - k, c - k - 1, c, "copy") for c in range(k + 1, n)]
        rounds.append(right + left)
    return table(rounds)


def direct_gather(n: int) -> Rounds:
    """All_gather: each chunk goes to every rank in one hop; in round k to the k-th neighbour."""
    return table([[(r, (r + k) % n, r, "copy") for r in range(n)] for k in range(1, n)])


def halving_scatter(n: int) -> Rounds:
    """Reduce_scatter by recursive halving, neighbours first: additions in adjacent pairs.

    In round k blocks of 2^k ranks meet: for each chunk one rank of a block holds the block's sum,
    and sends it to the rank that holds the sum of both blocks. For a power of two this is the
    classical exchange with rank r xor 2^k, and each rank sends n - 1 chunks. For another n the last
    block of a round is short or absent; the order of additions is still adjacent pairs, the rounds
    are still ceil(log2 n), and some ranks send a share to more than one partner (see
    `docs/algorithms.md`).
    """
    rounds: list[list[Hop]] = []
    width = 1
    while width < n:
        hops: list[Hop] = []
        for low in range(0, n - width, 2 * width):
            for c in range(n):
                ends = _holder(c, low, width, n), _holder(c, low + width, width, n)
                stays = _holder(c, low, 2 * width, n)
                hops.append((ends[0] if stays == ends[1] else ends[1], stays, c, "add"))
        rounds.append(hops)
        width *= 2
    return table(rounds)


def _holder(chunk: int, low: int, width: int, n: int) -> int:
    """The rank of the block [low, low + width) that holds the block's sum of `chunk`."""
    high = min(low + width, n)
    if low <= chunk < high:
        return chunk
    while high - low > 1:
        half = 1 << ((high - low - 1).bit_length() - 1)
        right = low + (chunk & (2 * half - 1)) >= low + half
        if right and low + (chunk & (2 * half - 1)) < high:
            low += half
        else:
            high = low + half
    return low


def halving_gather(n: int) -> Rounds:
    """All_gather by recursive doubling, far ranks first: `halving_scatter` in reverse."""
    return backwards(halving_scatter(n), "copy")


SCATTER: dict[str, Callable[[int], Rounds]] = {
    "ring": ring_scatter,
    "line": lambda n: backwards(line_gather(n), "add"),
    "direct": lambda n: backwards(direct_gather(n), "add"),
    "halving": halving_scatter,
}
GATHER: dict[str, Callable[[int], Rounds]] = {
    "ring": ring_gather,
    "line": line_gather,
    "direct": direct_gather,
    "halving": halving_gather,
}


def bit_reversed(n: int) -> list[int]:
    """An order of n chunks in which halving sends contiguous chunks (n a power of two)."""
    bits = (n - 1).bit_length()
    return [int(f"{c:0{bits}b}"[::-1], 2) if bits else 0 for c in range(n)]


def scatter_gather(name: str, n: int) -> Rounds:
    """All_reduce as a reduce_scatter and an all_gather by the same algorithm."""
    rounds = SCATTER[name](n) + GATHER[name](n)
    if name == "halving" and n & (n - 1) == 0:
        rounds = renamed(rounds, bit_reversed(n))
    return rounds


# ---- trees -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tree:
    """A rooted tree: each rank's parent (-1 for the root) and its round on the way up."""

    parent: tuple[int, ...]
    when: tuple[int, ...]

    @property
    def height(self) -> int:
        """The number of rounds from the leaves to the root."""
        return max((w + 1 for w, p in zip(self.when, self.parent) if p >= 0), default=0)

    def up(self, chunks: Sequence[int]) -> Rounds:
        """Reduction of `chunks` to the root."""
        rounds: list[list[Hop]] = [[] for _ in range(self.height)]
        for r, p in enumerate(self.parent):
            if p >= 0:
                rounds[self.when[r]].extend((r, p, c, "add") for c in chunks)
        return table(rounds)

    def down(self, chunks: Sequence[int]) -> Rounds:
        """Broadcast of `chunks` from the root."""
        return backwards(self.up(chunks), "copy")

    def deal(self, chunks: Callable[[int], Sequence[int]]) -> Rounds:
        """Scatter from the root: rank r receives `chunks(r)`. Each edge carries the chunks of a
        whole subtree."""
        rounds: list[list[Hop]] = [[] for _ in range(self.height)]
        for r in range(len(self.parent)):
            at = r
            while self.parent[at] >= 0:
                rounds[self.when[at]].extend((at, self.parent[at], c, "copy") for c in chunks(r))
                at = self.parent[at]
        return backwards(table(rounds), "copy")

    def over(self, names: Sequence[int], n: int) -> Tree:
        """The same tree among n ranks, with rank r renamed to `names[r]`."""
        parent, when = [-1] * n, [0] * n
        for r, p in enumerate(self.parent):
            parent[names[r]] = names[p] if p >= 0 else -1
            when[names[r]] = self.when[r]
        return Tree(tuple(parent), tuple(when))

    def route(self, src: int, dst: int) -> list[int]:
        """The ranks from `src` to `dst` along the tree."""
        up, down = [src], [dst]
        while self.parent[up[-1]] >= 0:
            up.append(self.parent[up[-1]])
        while down[-1] not in up:
            down.append(self.parent[down[-1]])
        return up[: up.index(down[-1])] + down[::-1]


def binary_tree(n: int) -> Tree:
    """A tree in which rank r, an odd multiple of 2^k, sends to r - 2^k in round k: adjacent pairs
    for any n."""
    parent = [r & (r - 1) if r else -1 for r in range(n)]
    when = [(r & -r).bit_length() - 1 if r else 0 for r in range(n)]
    return Tree(tuple(parent), tuple(when))


def two_trees(n: int) -> tuple[Tree, Tree]:
    """Two binary trees over all ranks; an inner rank of one is a leaf of the other.

    Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan
    (2009). The leaves of the first are the odd ranks. The second is its mirror image for even n;
    for odd n it is the first shifted by one rank, and one rank may be an inner rank of both.
    """
    parent, depth = [-1] * n, [0] * n
    for r in range(1, n):
        low = r & -r
        up = (r ^ low) | (low << 1)
        parent[r] = up if up < n else r ^ low
    for r in range(n):
        at = r
        while parent[at] >= 0:
            at, depth[r] = parent[at], depth[r] + 1
    height = max(depth)
    first = Tree(tuple(parent), tuple(height - d for d in depth))
    other = [n - 1 - r if n % 2 == 0 else (r + 1) % n for r in range(n)]
    return first, first.over(other, n)


def crowned(tree: Tree, root: int, n: int) -> Tree:
    """`tree` over the n - 1 other ranks, in order after `root`, with `root` as the parent of its
    root."""
    below = tree.over([(root + 1 + r) % n for r in range(n - 1)], n)
    parent = [root if p < 0 and r != root else p for r, p in enumerate(below.parent)]
    return Tree(tuple(parent), below.when)


# ---- ways: all_to_all --------------------------------------------------------------------------
def routes(n: int, path: Callable[[int, int], Sequence[int]]) -> Rounds:
    """All_to_all in which each chunk follows its path `path`, one hop a round from round 0 on."""
    rounds: list[list[Hop]] = []
    for s in range(n):
        for d in range(n):
            stops = path(s, d)
            rounds.extend([] for _ in range(len(stops) - 1 - len(rounds)))
            for k, (a, b) in enumerate(itertools.pairwise(stops)):
                rounds[k].append((a, b, s * n + d, "copy"))
    return table(rounds)


def ring_route(n: int) -> Callable[[int, int], list[int]]:
    """The shorter path around the ring; a tie goes upwards."""

    def route(s: int, d: int) -> list[int]:
        ahead = (d - s) % n
        step, hops = (1, ahead) if ahead <= n // 2 else (-1, n - ahead)
        return [(s + step * k) % n for k in range(hops + 1)]

    return route


def line_route(s: int, d: int) -> list[int]:
    """The path along the line."""
    return list(range(s, d + 1)) if s <= d else list(range(s, d - 1, -1))


def pairwise_exchange(n: int) -> Rounds:
    """All_to_all: in round k each rank sends one chunk to its k-th neighbour; n - 1 rounds."""
    return table([[(r, (r + k) % n, r * n + (r + k) % n, "copy") for r in range(n)]
                  for k in range(1, n)])  # fmt: skip


def log_exchange(n: int) -> Rounds:
    """All_to_all of Bruck et al. (1997): chunks move by powers of two.

    In round k all chunks whose distance has bit k move 2^k ranks on. It takes ceil(log2 n) rounds
    for any n; a chunk moves once for each set bit of its distance.
    """
    rounds: list[list[Hop]] = []
    for k in range((n - 1).bit_length()):
        hops: list[Hop] = []
        for s in range(n):
            for far in range(n):
                if far >> k & 1:
                    at = (s + (far & ((1 << k) - 1))) % n
                    hops.append((at, (at + (1 << k)) % n, s * n + (s + far) % n, "copy"))
        rounds.append(hops)
    return table(rounds)


# ---- broadcast ---------------------------------------------------------------------------------
def ring_broadcast(n: int, root: int) -> Rounds:
    """Broadcast from the root around the ring: n - 1 rounds."""
    return table([[((root + k) % n, (root + k + 1) % n, 0, "copy")] for k in range(n - 1)])


def line_broadcast(n: int, root: int) -> Rounds:
    """Broadcast from the root to both ends of the line."""
    rounds: list[list[Hop]] = []
    for k in range(max(root, n - 1 - root)):
        right: list[Hop] = [(root + k, root + k + 1, 0, "copy")] if root + k + 1 < n else []
        left: list[Hop] = [(root - k, root - k - 1, 0, "copy")] if root - k - 1 >= 0 else []
        rounds.append(right + left)
    return table(rounds)


def direct_broadcast(n: int, root: int) -> Rounds:
    """Broadcast in which the root sends to one rank after another."""
    return table([[(root, (root + k) % n, 0, "copy")] for k in range(1, n)])


def halving_broadcast(n: int, root: int) -> Rounds:
    """Broadcast as a scatter from the root and an all_gather by doubling.

    Van de Geijn's form for long messages: 2 S (n - 1) / n bytes leave the root, not S log2 n.
    """
    tree = binary_tree(n).over([(root + r) % n for r in range(n)], n)
    return tree.deal(lambda r: [r]) + halving_gather(n)


def tree_reduce_scatter(trees: Sequence[Tree], n: int) -> Rounds:
    """Reduce_scatter: piece j of block r is reduced to the root of tree j and sent from there to
    rank r."""
    k = len(trees)

    def one(j: int, tree: Tree) -> Rounds:
        return tree.up([r * k + j for r in range(n)]) + tree.deal(lambda r: [r * k + j])

    return together([one(j, tree) for j, tree in enumerate(trees)])


def trees_of(name: str, n: int) -> tuple[Tree, ...]:
    """The trees that the algorithm `name` uses: one, or two that share the chunks."""
    return two_trees(n) if name == "double_tree" else (binary_tree(n),)


def broadcast_trees(name: str, n: int, root: int) -> tuple[Tree, ...]:
    """The trees of a broadcast from `root`; of a double tree, both have `root` as their root."""
    if name == "double_tree" and n > 1:
        return tuple(crowned(t, root, n) for t in two_trees(n - 1))
    return (binary_tree(n).over([(root + r) % n for r in range(n)], n),)
