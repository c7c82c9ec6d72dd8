"""Verifier of pipeline tables: completeness, placement, and freedom from deadlock.

>>> from .tables import Table
>>> verify_table(Table.from_csv("0F0,0B0\\n1B0,1F0"))
Traceback (most recent call last):
tessera.GraphError: pipeline: table own cannot run
  rank 1, slot 0 : 1B0 comes before 1F0 (slot 1), whose result it needs
  fix            : correct the table
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ....core.errors import GraphError
from .tables import Action, Event, Table

Place = tuple[int, int]  # (rank, slot)
Problem = tuple[str, str]  # (where, what)
MOST = 8  # problems that an error lists


def verify_table(table: Table) -> None:
    """Raises GraphError if `table` is incomplete or cannot run; the error lists up to 8 faults.

    - Each stage is on one rank, and each rank has a stage.
    - Each stage runs one forward and one backward of each microbatch: whole, or input and then
      weight.
    - A joined pair is a forward and a backward.
    - Ranks do not wait for each other in a circle.
    """
    run_order(table)


def run_order(table: Table) -> tuple[Place, ...]:
    """All units of the table as (rank, first slot), in an order in which each follows its
    dependencies.

    One controller can launch them in this order: in each turn, one unit of each rank that can go
    on. Raises GraphError as `verify_table` does.

    >>> table = Table.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
    >>> " ".join(str(table.rows[rank][slot]) for rank, slot in run_order(table))
    '0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1'
    """
    # Each check assumes that the checks before it found no problem.
    for check in (_actions, _placement, _counts, _pairs, _local_order):
        _refuse(table, check(table))
    order, stuck = _run(table)
    _refuse(table, _circle(table, stuck))
    return order


def _refuse(table: Table, problems_found: Iterator[Problem]) -> None:
    """Raises GraphError if `problems_found` yields a problem."""
    problems = list(islice(problems_found, MOST + 1))
    if problems:
        rows = problems[:MOST] + ([("…", "and more")] if len(problems) > MOST else [])
        raise GraphError(
            f"pipeline: table {table.name} cannot run", rows=rows, fix="correct the table", at=""
        )


def _run(table: Table) -> tuple[tuple[Place, ...], dict[int, tuple[int, Event]]]:
    """(order of the units, for each blocked rank its slot and the event that it waits for)."""
    done: set[Event] = set()
    order: list[Place] = []
    at = [0] * table.ranks
    while True:
        # Events of this turn count from the next turn on, as if each unit took one time step.
        given: list[Event] = []
        stuck: dict[int, tuple[int, Event]] = {}
        for rank, units in enumerate(table.units):
            if at[rank] == len(units):
                continue
            unit = [table.rows[rank][slot] for slot in units[at[rank]]]
            missing = [n for a in unit for n in a.needs(table.stages) if n not in done]
            if missing:
                stuck[rank] = (units[at[rank]][0], missing[0])
                continue
            order.append((rank, units[at[rank]][0]))
            given += [event for a in unit for event in a.gives]
            at[rank] += 1
        if not given:
            return tuple(order), stuck
        done.update(given)


def _actions(table: Table) -> Iterator[Problem]:
    """Yields actions whose kind, stage or microbatch does not exist."""
    for rank, row in enumerate(table.rows):
        for slot, a in enumerate(row):
            if a.kind not in ("F", "B", "I", "W"):
                yield _at(rank, slot), f"{a}: kind {a.kind!r} is none of F, B, I, W"
            if not 0 <= a.stage < table.stages:
                yield _at(rank, slot), f"{a}: there are {table.stages} stages"
            if not 0 <= a.microbatch < table.microbatches:
                yield _at(rank, slot), f"{a}: there are {table.microbatches} microbatches"


def _placement(table: Table) -> Iterator[Problem]:
    """Yields stages on no rank or on several, and ranks without a stage or an action."""
    if not table.rows:
        yield "table", "it has no ranks"
    for s, rank in enumerate(table.placement):
        if not 0 <= rank < table.ranks:
            on = "no rank" if rank == -1 else f"rank {rank}, which does not exist"
            yield f"stage {s}", f"is on {on}"
    for rank, row in enumerate(table.rows):
        if not row:
            yield f"rank {rank}", "does nothing: it has no stage"
        for slot, a in enumerate(row):
            if (home := table.placement[a.stage]) != rank and home >= 0:
                yield _at(rank, slot), f"{a}: stage {a.stage} is on rank {home}"


def _counts(table: Table) -> Iterator[Problem]:
    """Yields missing and repeated actions."""
    first_place: dict[Event, tuple[Place, Action]] = {}
    for rank, row in enumerate(table.rows):
        for slot, a in enumerate(row):
            for event in a.gives:
                if event not in first_place:
                    first_place[event] = ((rank, slot), a)
                    continue
                (_, first), before = first_place[event]
                why = f"{a} is repeated: {before} is in slot {first}"
                if before.kind != a.kind:
                    whole = a if a.kind == "B" else before
                    why += f" ({whole} is the whole backward; its parts are I and W)"
                yield _at(rank, slot), why
                break
    for s, rank in enumerate(table.placement):
        for j in range(table.microbatches):
            split = any((k, s, j) in first_place for k in ("I", "W"))
            if ("F", s, j) not in first_place:
                yield f"rank {rank}", f"{s}F{j} is missing"
            if not split:
                yield f"rank {rank}", f"{s}B{j} (or {s}I{j} and {s}W{j}) is missing"
            else:
                for kind in ("I", "W"):
                    if (kind, s, j) not in first_place:
                        yield f"rank {rank}", f"{s}{kind}{j} is missing"


def _pairs(table: Table) -> Iterator[Problem]:
    for rank, row in enumerate(table.rows):
        for unit in table.units[rank]:
            pair = [row[slot] for slot in unit]
            kinds = sorted(a.kind for a in pair)
            if len(pair) > 1 and kinds not in (["B", "F"], ["F", "I"]):
                names = " and ".join(map(str, pair))
                yield _at(rank, unit[0]), f"{names} are joined: a pair is a forward and a backward"
            elif len(pair) > 1 and set(pair[1].needs(table.stages)) & set(pair[0].gives):
                yield _at(rank, unit[0]), f"{pair[1]} needs {pair[0]}: they cannot run together"


def _local_order(table: Table) -> Iterator[Problem]:
    """Yields actions that come before an action of the same rank whose result they need."""
    for rank, row in enumerate(table.rows):
        for slot, a in enumerate(row):
            for need in a.needs(table.stages):
                at, first = table.done_at[need]
                if at == rank and first > slot:
                    what = f"{a} comes before {row[first]} (slot {first}), whose result it needs"
                    yield _at(rank, slot), what


def _circle(table: Table, stuck: dict[int, tuple[int, Event]]) -> Iterator[Problem]:
    """Yields a cycle of ranks that wait for each other."""
    if not stuck:
        return
    trail: list[int] = []
    rank = next(iter(stuck))
    while rank not in trail:
        trail.append(rank)
        rank = table.done_at[stuck[rank][1]][0]
    for waiting in trail[trail.index(rank) :]:
        slot, need = stuck[waiting]
        on, later = table.done_at[need]
        head = stuck[on][0]
        yield (
            _at(waiting, slot),
            f"{table.rows[waiting][slot]} waits for {table.rows[on][later]}"
            f" (rank {on}, slot {later}), which comes after {table.rows[on][head]} (slot {head})",
        )


def _at(rank: int, slot: int) -> str:
    return f"rank {rank}, slot {slot}"
