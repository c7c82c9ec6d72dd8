"""A collective algorithm as a table of rounds: transfers of chunks, copied or added.

A tensor of S bytes is cut into `parts` chunks of S / parts. In a round every rank sends the values
that it held when the round began; then copies overwrite and additions add, in ascending order of
the sender. So a table also fixes the order of additions, and with it the bits of the result.

>>> table = Algorithm("all_reduce", "by hand", 2, 1, (
...     (Transfer(1, 0, (0,), "add"),),
...     (Transfer(0, 1, (0,), "copy"),),
... ))
>>> table.steps, table.sent(), table.received()
(2, (1, 1), (1, 1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from ....core.checks import instance

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Action = Literal["copy", "add"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`src` sends `chunks` to `dst`, which replaces its own by them or adds them to its own."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    op: Action


Round: TypeAlias = tuple[Transfer, ...]
# One chunk on its way: (sender, receiver, chunk, copied or added).
Hop: TypeAlias = tuple[int, int, int, Action]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A collective among `n` ranks as rounds of transfers.

    `chunks` is the number of chunk ids. all_reduce and broadcast cut the tensor into `chunks` equal
    parts. reduce_scatter and all_gather cut it into n blocks of `pieces` chunks: chunk c belongs to
    rank c // pieces. In an all_to_all, chunk (s * n + d) * pieces + j is piece j of the block from
    s to d. `native` says that the engine's own collective runs; the rounds are then only for
    verification and cost.
    """

    collective: Collective
    name: str
    n: int
    chunks: int
    rounds: tuple[Round, ...]
    root: int = 0
    native: bool = False

    @property
    def steps(self) -> int:
        """The number of rounds."""
        return len(self.rounds)

    @property
    def parts(self) -> int:
        """The number of chunks of the whole tensor of S bytes, as the cost formulas count it.

        S is a rank's whole tensor: the input, or the result of an all_gather.
        """
        return self.chunks // self.n if self.collective == "all_to_all" else self.chunks

    @property
    def pieces(self) -> int:
        """Chunks per block that has an owner; all chunks for all_reduce and broadcast."""
        if self.collective in ("all_reduce", "broadcast"):
            return self.chunks
        return self.parts // self.n

    def starts(self, rank: int) -> range:
        """The chunks that `rank` holds before the first round."""
        if self.collective == "all_gather":
            return range(rank * self.pieces, (rank + 1) * self.pieces)
        if self.collective == "all_to_all":
            return range(rank * self.parts, (rank + 1) * self.parts)
        if self.collective == "broadcast" and rank != self.root:
            return range(0)
        return range(self.chunks)

    def wants(self, rank: int) -> tuple[int, ...]:
        """The chunks that `rank` must hold after the last round, in the order of the result."""
        k, n = self.pieces, self.n
        if self.collective == "reduce_scatter":
            return tuple(range(rank * k, (rank + 1) * k))
        if self.collective == "all_to_all":
            return tuple((s * n + rank) * k + j for s in range(n) for j in range(k))
        return tuple(range(self.chunks))

    def sent(self) -> tuple[int, ...]:
        """The number of chunks that each rank sends in all rounds."""
        return self._count(lambda t: t.src)

    def received(self) -> tuple[int, ...]:
        """The number of chunks that each rank receives in all rounds."""
        return self._count(lambda t: t.dst)

    def _count(self, end: Callable[[Transfer], int]) -> tuple[int, ...]:
        total = [0] * self.n
        for moves in self.rounds:
            for t in moves:
                total[end(t)] += len(t.chunks)
        return tuple(total)

    def __repr__(self) -> str:
        return (
            f"<{self.collective} by {self.name}: n={self.n} chunks={self.chunks} "
            f"rounds={self.steps}>"
        )


# ---- putting rounds together -------------------------------------------------------------------
def need_algorithm(name: str, value: object) -> Algorithm:
    """`value` as an Algorithm. Raises UsageError if it is anything else."""
    fix = 'make the table: build("all_reduce", "ring", 8), or parse(text)'
    return instance(name, "the algorithm", value, Algorithm, fix)


def table(rounds: Iterable[Iterable[Hop]]) -> tuple[Round, ...]:
    """Rounds of transfers from rounds of hops: hops between the same two ranks are one transfer."""
    made = []
    for hops in rounds:
        together: dict[tuple[int, int, Action], list[int]] = {}
        for src, dst, chunk, op in hops:
            together.setdefault((src, dst, op), []).append(chunk)
        if together:
            made.append(
                tuple(
                    Transfer(src, dst, tuple(sorted(chunks)), op)
                    for (src, dst, op), chunks in sorted(together.items())
                )
            )
    return tuple(made)


def backwards(rounds: Sequence[Round], op: Action) -> tuple[Round, ...]:
    """The same hops in reverse direction and order: a broadcast from a reduction, or vice versa."""
    return tuple(
        tuple(
            sorted(
                (Transfer(t.dst, t.src, t.chunks, op) for t in moves),
                key=lambda t: (t.src, t.dst),
            )
        )
        for moves in reversed(rounds)
    )


def renamed(rounds: Sequence[Round], chunks: Sequence[int]) -> tuple[Round, ...]:
    """The rounds with chunk c renamed to `chunks[c]`."""
    return tuple(
        tuple(Transfer(t.src, t.dst, tuple(sorted(chunks[c] for c in t.chunks)), t.op) for t in m)
        for m in rounds
    )


def together(tables: Sequence[Sequence[Round]], stagger: int = 0) -> tuple[Round, ...]:
    """Tables on different chunks run at once; table i starts in round i * `stagger`."""
    last = max((i * stagger + len(rounds) for i, rounds in enumerate(tables)), default=0)
    merged: list[list[Hop]] = [[] for _ in range(last)]
    for i, rounds in enumerate(tables):
        for k, moves in enumerate(rounds, i * stagger):
            merged[k].extend((t.src, t.dst, c, t.op) for t in moves for c in t.chunks)
    return table(merged)


def pipelined(rounds: Sequence[Round], chunks: int, segments: int) -> tuple[Round, ...]:
    """The rounds with each chunk cut into `segments` that follow each other, one round apart.

    Chunk c becomes chunks c * segments, ..., c * segments + segments - 1.
    """
    if segments == 1:
        return tuple(rounds)
    copies = [renamed(rounds, [c * segments + j for c in range(chunks)]) for j in range(segments)]
    return together(copies, stagger=1)


def trimmed(algorithm: Algorithm) -> Algorithm:
    """The algorithm without copies to a rank that already holds the same value."""
    held = [dict.fromkeys(algorithm.starts(r), 1 << r) for r in range(algorithm.n)]
    kept: list[list[Hop]] = []
    for moves in algorithm.rounds:
        hops: list[Hop] = []
        sent = [[held[t.src][c] for c in t.chunks] for t in moves]
        for t, values in zip(moves, sent):
            here = held[t.dst]
            for c, value in zip(t.chunks, values):
                if t.op == "add" or here.get(c) != value:
                    hops.append((t.src, t.dst, c, t.op))
                here[c] = here[c] | value if t.op == "add" else value
        kept.append(hops)
    return replace(algorithm, rounds=table(kept))
