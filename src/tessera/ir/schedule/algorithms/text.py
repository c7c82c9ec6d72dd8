"""Text form and picture of a table of rounds.

One line is one round; `0>1 +3` says that rank 0 sends chunk 3 to rank 1, where it is added, and
`0>1 =0-2` that chunks 0, 1 and 2 are copied. `parse(text(a)) == a`, so a table can also be written
by hand.

>>> from tessera.ir.schedule.algorithms.build import build
>>> print(text(build("reduce_scatter", "ring", 3)))
reduce_scatter "ring"  n=3 chunks=3
  0: 0>1 +2  1>2 +0  2>0 +1
  1: 0>1 +1  1>2 +2  2>0 +0
"""

from __future__ import annotations

import re
from typing import cast

from ....core.checks import string
from ....core.errors import GraphError
from .build import MOST_RANKS, MOST_SEGMENTS
from .check import replay, verify
from .table import (
    COLLECTIVES,
    Action,
    Algorithm,
    Collective,
    Round,
    Transfer,
    need_algorithm,
)

_MARK: dict[Action, str] = {"add": "+", "copy": "="}
_N = r"\d{1,9}"
_HEAD = re.compile(rf'(\w+) "([^"]*)"  n=({_N}) chunks=({_N})(?: root=({_N}))?( native)?')
_MOVE = re.compile(rf"({_N})>({_N}) ([+=])({_N}(?:-{_N})?(?:,{_N}(?:-{_N})?)*)")


def text(algorithm: Algorithm) -> str:
    """The text of the table, which `parse` reads back."""
    a = need_algorithm("text", algorithm)
    root = f" root={a.root}" if a.root else ""
    head = f'{a.collective} "{a.name}"  n={a.n} chunks={a.chunks}{root}{" native" * a.native}'
    wide = len(str(max(a.steps - 1, 0)))
    rows = [
        f"  {k:>{wide}}: "
        + "  ".join(f"{t.src}>{t.dst} {_MARK[t.op]}{_runs(t.chunks)}" for t in moves)
        for k, moves in enumerate(a.rounds)
    ]
    return "\n".join([head, *rows])


def _runs(chunks: tuple[int, ...]) -> str:
    """Chunk numbers in short form: 0-2,5."""
    runs: list[list[int]] = []
    for c in chunks:
        if runs and c == runs[-1][1] + 1:
            runs[-1][1] = c
        else:
            runs.append([c, c])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse(source: str) -> Algorithm:
    """The verified table that `source` describes. Raises GraphError with the first line that is
    wrong."""
    string("algorithm", "the text", source)
    lines = [line for line in source.splitlines() if line.strip()]
    head = _HEAD.fullmatch(lines[0].strip()) if lines else None
    if head is None or head[1] not in COLLECTIVES or int(head[3]) < 1:
        raise GraphError(
            "algorithm: cannot read the first line",
            line=repr(lines[0]) if lines else "there is none",
            fix='write for instance: all_reduce "mine"  n=4 chunks=4',
        )
    n, chunks = int(head[3]), int(head[4])
    blocks = {"all_reduce": 1, "broadcast": 1, "all_to_all": n**2}.get(head[1], n)
    most = 2 * MOST_SEGMENTS * blocks
    if n > MOST_RANKS or chunks > most:
        raise GraphError(
            f"algorithm: n={n} chunks={chunks} is more than a table holds",
            line=repr(lines[0]),
            fix=f"write n up to {MOST_RANKS}, and for it chunks up to {most}",
        )
    rounds = tuple(_round(line, k, chunks) for k, line in enumerate(lines[1:]))
    algorithm = Algorithm(
        cast(Collective, head[1]), head[2], n, chunks, rounds, int(head[5] or 0), bool(head[6])
    )
    if algorithm.root >= algorithm.n:
        raise GraphError(
            f"algorithm: root={algorithm.root} is not one of the ranks",
            line=repr(lines[0]),
            fix=f"name one from 0 to {algorithm.n - 1}",
        )
    if chunks % blocks or not chunks:
        raise GraphError(
            f"algorithm: {chunks} chunks are not whole blocks",
            line=repr(lines[0]),
            fix="cut a scattered or gathered tensor into a multiple of n, an exchange of n * n",
        )
    verify(algorithm)
    return algorithm


def _round(line: str, k: int, chunks: int) -> Round:
    """The transfers in the line of round `k`. Raises GraphError if the line cannot be read."""
    number, colon, rest = line.partition(":")
    moves = [m.strip() for m in re.split(r"\s{2,}", rest.strip())]
    found = [_MOVE.fullmatch(m) for m in moves]
    if not colon or number.strip() != str(k) or not all(found):
        raise GraphError(
            f"algorithm: cannot read round {k}",
            line=repr(line),
            fix="write its number and transfers, two spaces apart: 0: 0>1 +3  1>2 =0-2,5",
        )
    made = []
    for m in found:
        assert m is not None
        op: Action = "add" if m[3] == "+" else "copy"
        made.append(Transfer(int(m[1]), int(m[2]), tuple(_chunks(m[4], chunks)), op))
    return tuple(sorted(made, key=lambda t: (t.src, t.dst, t.op)))


def _chunks(runs: str, among: int) -> list[int]:
    """The chunks that `runs` names. A run beyond `among` chunks is cut after its first excess
    chunk, so that an error stays small."""
    found: list[int] = []
    for run in runs.split(","):
        low, _, high = run.partition("-")
        found.extend(range(int(low), min(int(high or low), max(among, int(low))) + 1))
    return found


def picture(algorithm: Algorithm) -> str:
    """The growth of the result as text: one row a round; per rank one character a chunk.

    A character counts the ranks whose shares the chunk contains: · none, 1 to 9, then letters, #
    for all.

    >>> from tessera.ir.schedule.algorithms.build import build
    >>> print(picture(build("all_reduce", "halving", 4)))
    all_reduce by halving
            rank 0  rank 1  rank 2  rank 3
    start   1111    1111    1111    1111
    0       2211    1122    2211    1122
    1       #211    11#2    2#11    112#
    2       ##11    11##    ##11    11##
    3       ####    ####    ####    ####
    """
    a = need_algorithm("picture", algorithm)
    sums = a.collective in ("all_reduce", "reduce_scatter")
    wide = max(a.chunks, 6)
    rows = [" " * 8 + "  ".join(f"{f'rank {r}':<{wide}}" for r in range(a.n)).rstrip()]
    for k in range(a.steps + 1):
        part = Algorithm(a.collective, a.name, a.n, a.chunks, a.rounds[:k], a.root)
        held = replay(part, lambda r, c: 1, lambda x, y, *_: x + y)
        cells = [
            "".join(_count(here.get(c, 0), a.n if sums else 1) for c in range(a.chunks))
            for here in held
        ]
        row = "  ".join(f"{cell:<{wide}}" for cell in cells).rstrip()
        rows.append(f"{'start' if k == 0 else k - 1!s:<8}{row}")
    return "\n".join([f"{a.collective} by {a.name}", *rows])


def _count(shares: int, full: int) -> str:
    if shares >= full:
        return "#"
    return "·123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[min(shares, 61)]
