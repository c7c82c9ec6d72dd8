"""Pipeline tables: the actions of each rank in order, as plain data.

An action runs one stage on one microbatch. Its cell names stage, kind and microbatch: `0F3` is the
forward of stage 0 on microbatch 3. The kinds:

- `F` forward
- `B` the whole backward, gradients of inputs and of weights
- `I` the backward for the inputs only, which the stage before waits for
- `W` the backward for the weights, which no other action waits for, some time after `I`

As CSV a table has a line for each rank and a cell for each action. Empty cells and lines that begin
with `#` are ignored; only the order counts. `(0F7;7B3)OVERLAP_F_B` is a forward and a backward that
run together, one hiding the other's communication. This is the format of
torch.distributed.pipelining without its communication cells, which the order here implies.

>>> table = Table.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="mine")
>>> table
Table mine: 2 ranks, 2 stages, 2 microbatches
>>> table.placement, table.rows[1][1]
((0, 1), Action(kind='B', stage=1, microbatch=0, joined=False))
>>> print(table.to_csv(), end="")
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ....core.checks import whole
from ....core.errors import GraphError, UsageError

Kind = Literal["F", "B", "I", "W"]
Event = tuple[Literal["F", "I", "W"], int, int]
"""A completed part: the forward, the gradient of the inputs or that of the weights of (stage,
microbatch). A whole backward gives the last two."""
Order = Callable[[int, int, int], Iterable["Action | str"]]
"""The actions of a rank, given (rank, ranks, microbatches)."""

_CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)(OVERLAP_F_B)?")
_COMMUNICATION = re.compile(
    r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*"
)
_FORMAT = "a cell is stage, kind and microbatch, e.g. 0F3, 2B1, 1I0, 1W0 or (0F7;3B2)"


@dataclass(frozen=True, slots=True)
class Action:
    """`kind` ("F", "B", "I" or "W") of `stage` on `microbatch`, one entry of a pipeline's table.

    F is forward, B backward, I and W its input part and weight part. A `joined` action runs
    together with the one before it.
    """

    kind: Kind
    stage: int
    microbatch: int
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def gives(self) -> tuple[Event, ...]:
        """The events that this action completes."""
        s, j = self.stage, self.microbatch
        match self.kind:
            case "B":
                return ("I", s, j), ("W", s, j)
            case "F" | "I" | "W":
                return ((self.kind, s, j),)

    def needs(self, stages: int) -> tuple[Event, ...]:
        """The events that must be complete before it, in a pipeline of `stages` stages."""
        s, j = self.stage, self.microbatch
        match self.kind:
            case "F":
                return (("F", s - 1, j),) if s else ()
            case "B" | "I":
                after: tuple[Event, ...] = (("I", s + 1, j),) if s + 1 < stages else ()
                return ("F", s, j), *after
            case "W":
                return (("I", s, j),)


@dataclass(frozen=True, repr=False)
class Table:
    """The actions of each rank in order, and `placement`: the rank of each stage (-1: none).

    A table may be impossible to run; `verify_table` checks that.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Iterable[Action | str]],
        *,
        name: str = "",
        placement: Sequence[int] | None = None,
        microbatches: int | None = None,
    ) -> Table:
        """A table from one row of actions (or of their cells as text) for each rank.

        Without `placement`, a stage is on the first rank that has an action of it. Without
        `microbatches`, their number follows from the actions. Raises GraphError if a cell cannot be
        read.
        """
        if not isinstance(rows, Iterable) or isinstance(rows, str):
            raise _no_rows("rows", rows)
        read = tuple(_row(row, rank) for rank, row in enumerate(rows))
        if placement is None:
            rank_of: dict[int, int] = {}
            for rank, row in enumerate(read):
                for a in row:
                    rank_of.setdefault(a.stage, rank)
            if (top := max(rank_of, default=0)) > (total := sum(map(len, read))):
                raise GraphError(
                    f"pipeline: a table of {total} actions names stage {top}",
                    fix="number the stages from 0, with none left out",
                    at="",
                )
            placement = [rank_of.get(s, -1) for s in range(max(rank_of, default=-1) + 1)]
        if microbatches is None:
            microbatches = max((a.microbatch for row in read for a in row), default=-1) + 1
        return cls(name or "own", read, tuple(placement), microbatches)

    @classmethod
    def from_csv(cls, source: str | Path, *, name: str = "") -> Table:
        """A table from its text, or from a file: a `Path`, or a name that ends in `.csv`.

        Raises GraphError if a cell cannot be read, UsageError if the file cannot.
        """
        text = source
        if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".csv")):
            try:
                text = Path(source).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    "pipeline: the table cannot be read",
                    file=source,
                    error=error,
                    fix="give the name of a text file, or the text itself",
                ) from None
            name = name or Path(source).stem
        if not isinstance(text, str):
            raise UsageError(
                "pipeline: a table is read from text",
                given=type(source).__name__,
                fix="give the text of the table, or the Path of its file",
            )
        lines = [line for line in text.rstrip().split("\n") if not line.lstrip().startswith("#")]
        return cls.from_rows([line.split(",") for line in lines], name=name)

    @classmethod
    def from_function(cls, order: Order, ranks: int, microbatches: int, *, name: str = "") -> Table:
        """The table with the row `order(rank, ranks, microbatches)` for each rank.

        A row holds actions, or their cells as text.

        >>> def all_then_all(rank, ranks, microbatches):
        ...     yield from (f"{rank}F{j}" for j in range(microbatches))
        ...     yield from (f"{rank}B{j}" for j in reversed(range(microbatches)))
        >>> print(Table.from_function(all_then_all, 2, 2).to_csv(), end="")
        0F0,0F1,0B1,0B0
        1F0,1F1,1B1,1B0
        """
        if not callable(order):
            raise _no_rows("order", order)
        ranks, microbatches = count("ranks", ranks), count("microbatches", microbatches)
        rows = []
        for rank in range(ranks):
            row = order(rank, ranks, microbatches)
            if not isinstance(row, Iterable):
                raise _no_rows(f"rank {rank}", row)
            rows.append(list(row))
        name = name or getattr(order, "__name__", "")
        return cls.from_rows(rows, name=name, microbatches=microbatches)

    def to_csv(self) -> str:
        """The table as text that `from_csv` reads."""
        return "".join(
            ",".join(_cell([row[i] for i in unit]) for unit in units) + "\n"
            for row, units in zip(self.rows, self.units)
        )

    def __repr__(self) -> str:
        counts = ((self.ranks, "rank"), (self.stages, "stage"), (self.microbatches, "microbatch"))
        plural = {"rank": "ranks", "stage": "stages", "microbatch": "microbatches"}
        sizes = ", ".join(f"{n} {word if n == 1 else plural[word]}" for n, word in counts)
        return f"Table {self.name}: {sizes}"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max((len(self.stages_of(rank)) for rank in range(self.ranks)), default=0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in order: its chunks 0, 1, …"""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    @property
    def splits_backward(self) -> bool:
        """Returns whether any backward is split into its input part and its weight part."""
        return any(a.kind in "IW" for row in self.rows for a in row)

    @cached_property
    def units(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each rank the slots that run as one unit: one slot, or two for a joined pair."""
        out = []
        for row in self.rows:
            starts = [i for i, a in enumerate(row) if not (i and a.joined)]
            out.append(tuple(tuple(range(a, b)) for a, b in pairwise([*starts, len(row)])))
        return tuple(out)

    @cached_property
    def done_at(self) -> dict[Event, tuple[int, int]]:
        """The place (rank, slot) of each event; of a repeated event the first place."""
        found: dict[Event, tuple[int, int]] = {}
        for rank, row in enumerate(self.rows):
            for slot, a in enumerate(row):
                for event in a.gives:
                    found.setdefault(event, (rank, slot))
        return found


def _cell(unit: Sequence[Action]) -> str:
    return str(unit[0]) if len(unit) == 1 else f"({';'.join(map(str, unit))})OVERLAP_F_B"


def _row(row: object, rank: int) -> tuple[Action, ...]:
    if not isinstance(row, Iterable) or isinstance(row, str):
        raise _no_rows(f"rank {rank}", row)
    return tuple(
        a
        for slot, cell in enumerate(row)
        for a in ([cell] if isinstance(cell, Action) else _read(cell, rank, slot))
    )


def _no_rows(label: str, value: object) -> UsageError:
    return UsageError(
        "pipeline: a table is a list of actions for each rank",
        rows=[(label, f"an object of type {type(value).__name__}")],
        fix='give e.g. [["0F0", "0B0"], ["1F0", "1B0"]]',
    )


def _read(cell: object, rank: int, slot: int) -> list[Action]:
    """The actions of a cell: none, one, or a joined pair."""
    text = cell.strip() if isinstance(cell, str) else None
    if text == "":
        return []
    if text is not None:
        pair = _PAIR.fullmatch(text)
        parts = [p.strip() for p in pair.groups()[:2]] if pair else [text]
        matches = [_CELL.fullmatch(p) for p in parts]
        if all(matches):
            return [
                Action(m[2], int(m[1]), int(m[3]), joined=i > 0)  # type: ignore[arg-type]
                for i, m in enumerate(matches)
                if m is not None
            ]
    sent = text is not None and _COMMUNICATION.fullmatch(text)
    raise GraphError(
        f"pipeline: cell {cell!r} of a table cannot be read",
        rows=[("at", f"rank {rank}, slot {slot}")],
        fix='dump the table without communication: _dump_csv(file, format="compute_only")'
        if sent
        else _FORMAT,
        at="",
    )


def count(argument: str, value: object) -> int:
    """`value` as a whole number of at least 1. Raises UsageError if it is anything else."""
    return whole("pipeline", argument, value, 1)
