"""Pipeline schedules by name, each a function that gives the actions of a rank.

`pipeline_table` builds a table by name, from a user's own table, file or function.

| name | order of a rank | stages |
|---|---|---|
| GPipe | all forwards, then all backwards | one a rank |
| 1F1B | as few forwards ahead as keep all ranks busy, then one backward for each forward | one |
| Interleaved1F1B | 1F1B over several chunks a rank, in groups of microbatches | s on rank s % p |
| ZB-H1 | 1F1B; the weights' part of a backward fills gaps, memory stays | one |
| ZB-H2 | more forwards ahead, no gaps, about twice the memory | one |
| ZBV | two chunks, down and back up; no gaps where F, I and W take the same time | V |
| DualPipeV | as ZBV, with forwards and backwards run together to hide communication | V |

All are closed forms: the order does not depend on measured times. In a V, rank r has the stages r
and 2p-1-r, so the loss is on rank 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ....core.errors import UsageError
from .tables import Action, Kind, Order, Table, count

Rows = Callable[[int, int, int, int], Iterator[Action]]
"""The actions of rank r, given (r, ranks, microbatches, chunks)."""


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A named pipeline schedule."""

    name: str
    row: Rows
    chunks: int | None = 1  # stages a rank; None: any number, 2 unless told
    v_shaped: bool = False
    per_rank: int = 0  # microbatches that it needs for each rank
    also: tuple[str, ...] = ()  # names that others give it


def pipeline_table(
    schedule: str | Path | Table | Order,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
) -> Table:
    """The table of `schedule` for the given numbers of ranks and microbatches.

    `schedule` is a name ("1F1B", "zb-h1", …), a table, a CSV file, or a function `order(rank,
    ranks, microbatches)` that returns a rank's actions or cells. `chunks` is the number of stages
    on a rank, for named schedules. A user's table is not verified here. Raises UsageError if the
    name is unknown or the schedule does not exist for these counts.

    >>> print(pipeline_table("1f1b", ranks=2, microbatches=3).to_csv(), end="")
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    p, m = count("ranks", ranks), count("microbatches", microbatches)
    v = None if chunks is None else count("chunks", chunks)
    if callable(schedule):
        return Table.from_function(schedule, p, m)
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = Table.from_csv(schedule)
    if isinstance(schedule, Table):
        if (schedule.ranks, schedule.microbatches) != (p, m):
            raise UsageError(
                f"pipeline: table {schedule.name} is for other counts",
                table=f"{schedule.ranks} ranks, {schedule.microbatches} microbatches",
                asked=f"{p} ranks, {m} microbatches",
                fix="make a table for these counts, or run with those of the table",
            )
        return schedule
    named = named_schedule(schedule)
    if named.chunks is not None and v not in (None, named.chunks):
        raise UsageError(
            f"pipeline: {named.name} has {named.chunks} stage(s) on a rank",
            chunks=v,
            fix="use Interleaved1F1B for any number of stages on a rank",
        )
    v = v or named.chunks or 2
    if m < named.per_rank * p:
        raise UsageError(
            f"pipeline: {named.name} on {p} ranks needs {named.per_rank * p} microbatches",
            microbatches=m,
            fix="use that many or more; ZBV has the same stages and takes any number",
        )
    rows = tuple(tuple(named.row(r, p, m, v)) for r in range(p))
    down = tuple(range(p))
    placement = down + down[::-1] if named.v_shaped else down * v
    return Table(named.name, rows, placement, m)


# -- one stage a rank -----------------------------------------------------------------------------
def _gpipe(r: int, p: int, m: int, v: int) -> Iterator[Action]:
    """Huang et al. 2019: all forwards, then all backwards."""
    for kind in ("F", "B"):
        yield from (Action(kind, r, j) for j in range(m))


def _1f1b(r: int, p: int, m: int, v: int) -> Iterator[Action]:
    """Narayanan et al. 2021, 2.2: p-1-r forwards ahead, then a backward after each forward."""
    ahead = min(p - 1 - r, m)
    yield from (Action("F", r, j) for j in range(ahead))
    for j in range(m):
        if ahead + j < m:
            yield Action("F", r, ahead + j)
        yield Action("B", r, j)


def _zero_bubble(depth: int) -> Rows:
    """Qi et al. 2023, section 2: H1 (depth 1) and H2 (depth 2).

    depth·(p-1-r) forwards come ahead; the weight part follows depth·r microbatches late. So a rank
    holds depth·(p-1-r)+1 forwards and depth·r late weight parts: the same total on each rank.
    """

    def row(r: int, p: int, m: int, v: int) -> Iterator[Action]:
        ahead, late = min(depth * (p - 1 - r), m), depth * r
        yield from (Action("F", r, j) for j in range(ahead))
        for j in range(m + late):
            if ahead + j < m:
                yield Action("F", r, ahead + j)
            if j < m:
                yield Action("I", r, j)
            if 0 <= j - late < m:
                yield Action("W", r, j - late)

    return row


# -- several stages a rank ------------------------------------------------------------------------
def _group(p: int, m: int) -> int:
    """Microbatches in a group of the interleaved order: p, or a few more where p does not divide m.

    A rank takes a group through its first chunk, then the same group through the next.
    """
    rounds = max(1, m // p)
    if m % rounds:
        fits = [k for k in range(max(1, m - p), m + p + 1) if k % max(1, k // p) == 0]
        near = sorted(sorted(fits, key=lambda k: abs(k - m))[:2])
        raise UsageError(
            f"pipeline: Interleaved1F1B on {p} ranks takes microbatches in {rounds} equal groups",
            microbatches=m,
            fix=f"use {' or '.join(map(str, near))} microbatches; every multiple of {p} will do",
        )
    return m // rounds


def _interleaved(r: int, p: int, m: int, v: int) -> Iterator[Action]:
    """Narayanan et al. 2021, 2.2: 1F1B over chunks; a forward of each pair comes first.

    2(p-1-r) + (v-1)·group forwards ahead. One chunk is plain 1F1B.
    """
    if v == 1:
        yield from _1f1b(r, p, m, v)
        return
    group, total = _group(p, m), m * v

    def forward_at(k: int) -> tuple[int, int]:
        """(chunk, microbatch) of a rank's k-th forward."""
        return k // group % v, k // (group * v) * group + k % group

    ahead = min(2 * (p - 1 - r) + (v - 1) * group, total)
    for k in range(total + ahead):
        if k < total:
            chunk, j = forward_at(k)
            yield Action("F", chunk * p + r, j)
        if k >= ahead:
            chunk, j = forward_at(k - ahead)
            yield Action("B", (v - 1 - chunk) * p + r, j)


class _V:
    """Writer of the row of a rank with two chunks in a V; it counts the next microbatch of each
    chunk.

    Microbatches beyond m are left out, so an order for many microbatches also serves for fewer.
    """

    def __init__(self, r: int, p: int, m: int) -> None:
        self.stages, self.m = (r, 2 * p - 1 - r), m
        self.done = {"F": [0, 0], "B": [0, 0]}  # forwards and backwards, per chunk
        self.late: deque[tuple[int, int]] = deque()  # weights' parts: (chunk, microbatch)

    def do(self, cells: str, *, joined: bool = False) -> Iterator[Action]:
        """Yields the actions of `cells`, e.g. "F0 I1 W": kinds and chunks, with the next microbatch
        of each chunk. W takes the oldest late weight part."""
        for i, cell in enumerate(cells.split()):
            kind: Kind = cell[0]  # type: ignore[assignment]
            if kind == "W":
                chunk, j = self.late.popleft()
            else:
                chunk = int(cell[1])
                done = self.done["F" if kind == "F" else "B"]
                j = done[chunk]
                done[chunk] += 1
                if kind == "I":
                    self.late.append((chunk, j))
            if j < self.m:
                yield Action(kind, self.stages[chunk], j, joined=joined and i > 0)


def _zbv(r: int, p: int, m: int, v: int) -> Iterator[Action]:
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", the V with 1F1B's memory.

    The first backward starts at once where the V ends, on rank 0 as on all others; from then on
    each rank repeats forward, input, weight on one chunk, then on the other.
    """
    row, many = _V(r, p, m), max(m, 2 * p - 1)
    for _ in range(2 * (p - r) - 1):
        yield from row.do("F0")
    for _ in range(r):
        yield from row.do("F1 F0")
    for _ in range(p - r):
        yield from row.do("F1 I1 W")
    ahead = 2 * p - 1 - r
    for k in range(many - p):
        yield from row.do("F0 I0 W F1 I1 W" if ahead + k < many else "I0 W F1 I1 W")
    for _ in range(r):
        yield from row.do("I0 I1")
    for _ in range(p - r):
        yield from row.do("I0 W")
    for _ in range(2 * r):
        yield from row.do("W")


def _dualpipe_v(r: int, p: int, m: int, v: int) -> Iterator[Action]:
    """DeepSeek-AI 2024, DualPipe, cut in half to a V: the eight steps of its published order."""
    row, rest = _V(r, p, m), p - 1 - r
    for _ in range(2 * rest):
        yield from row.do("F0")
    for _ in range(r + 1):
        yield from row.do("F0 F1")
    for _ in range(rest):
        yield from row.do("I1 W F1")
    for k in range(m - 2 * p + r + 1):
        # The first pair at the foot of the V is not joined: all other ranks wait for that backward.
        yield from row.do("F0 B1", joined=k > 0 or rest > 0)
        yield from row.do("F1 B0", joined=True)
    for _ in range(rest):
        yield from row.do("B1")
        yield from row.do("F1 B0", joined=True)
    for k in range(2 * (r + 1)):
        yield from row.do(("B" if k <= r else "I") + str(1 - k % 2))
    for _ in range(rest):
        yield from row.do("W I0")
    for _ in range(r + 1):
        yield from row.do("W")


# -- by name --------------------------------------------------------------------------------------
_ALL = (
    NamedSchedule("GPipe", _gpipe),
    NamedSchedule("1F1B", _1f1b),
    NamedSchedule("Interleaved1F1B", _interleaved, chunks=None, also=("interleaved",)),
    NamedSchedule("ZB-H1", _zero_bubble(1), also=("zb1p",)),
    NamedSchedule("ZB-H2", _zero_bubble(2), also=("zb2p",)),
    NamedSchedule("ZBV", _zbv, chunks=2, v_shaped=True, also=("zbvzerobubble",)),
    NamedSchedule("DualPipeV", _dualpipe_v, chunks=2, v_shaped=True, per_rank=2),
)
SCHEDULES = tuple(named.name for named in _ALL)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


_NAMED = {_key(name): named for named in _ALL for name in (named.name, *named.also)}


def named_schedule(name: object) -> NamedSchedule:
    """The named schedule; case and hyphens are ignored. Raises UsageError if there is none.

    >>> named_schedule("zbh1").name, named_schedule("interleaved_1f1b").name
    ('ZB-H1', 'Interleaved1F1B')
    """
    found = _NAMED.get(_key(name)) if isinstance(name, str) else None
    if found is None:
        raise UsageError(
            f"pipeline: there is no schedule {name!r}",
            known=", ".join(SCHEDULES),
            fix="use one of these, a Table, the name of a .csv file, or a function",
        )
    return found
