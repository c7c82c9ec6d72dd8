"""Simulator of pipelines: the time and memory of a table, from the costs of its stages.

>>> from .orders import pipeline_table
>>> line = simulate(pipeline_table("1F1B", ranks=4, microbatches=8))
>>> line.makespan_s, line.bubble_s, line.peak_activations
(33, 9, (4, 3, 2, 1))
>>> [f"{x:.0%}" for x in line.idle_fraction]
['27%', '27%', '27%', '27%']
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ....core.declared import Given
from ....core.errors import UsageError
from .check import run_order
from .orders import SCHEDULES, pipeline_table
from .tables import Action, Event, Table

Cost = float | Sequence[float]
"""One number for all stages, or one for each."""


LAUNCH_S = 1e-4
"""The time that a step costs its launching thread, as measured by `bench/pipeline.py --small`."""
FEWER = "use fewer, larger microbatches, or fewer stages a rank"


class PipelineWarning(UserWarning):
    """Warns that a pipeline idles much of the time, or that its loss is not that of one device."""


@dataclass(frozen=True, repr=False)
class Timeline:
    """Start and end of each action of `table`: `start_s[rank][slot]`, `end_s[rank][slot]`, in
    seconds.

    The members of a joined pair have the same times. `peak_activations` is per rank, in units of
    the argument `activation` of `simulate`: with 1, forwards whose backward has not run.
    """

    table: Table
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    peak_activations: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """The time from the first action to the last, over all ranks."""
        return max(row[-1] for row in self.end_s)

    @property
    def gap_s(self) -> tuple[float, ...]:
        """The time that each rank idles between its own first and last action."""
        ends = zip(self.start_s, self.end_s, self.busy_s)
        return tuple(end[-1] - start[0] - busy for start, end, busy in ends)

    @property
    def bubble_s(self) -> float:
        """The longest `gap_s`, which papers call the bubble. It is the idle time per step if no
        rank waits for the others at the end of a step."""
        return max(self.gap_s)

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """The part of the makespan that each rank idles, if all ranks begin and end a step
        together."""
        total = self.makespan_s
        return tuple(1 - busy / total if total else 0.0 for busy in self.busy_s)

    def __repr__(self) -> str:
        idle = sum(self.idle_fraction) / self.table.ranks
        return f"Timeline {self.table.name}: {self.makespan_s:g} s, idle {idle:.0%}"


def simulate(
    table: Annotated[Table, Given('make one: pipeline_table("1F1B", ranks=4, microbatches=8)')],
    forward_s: Cost = 1,
    backward_input_s: Cost = 1,
    backward_weight_s: Cost = 1,
    send_s: float = 0,
    *,
    joined_s: Cost | None = None,
    activation: Cost = 1,
    kept_for_weight: float = 1,
) -> Timeline:
    """The start and end of each action of `table`, as a `Timeline`.

    Each rank runs its actions in order, each as soon as its inputs are available. Costs are in
    seconds, one for all stages or one for each. A whole backward takes the input cost plus the
    weight cost. A result reaches another rank `send_s` later, while its rank goes on. A joined pair
    takes `joined_s` (by the stage of its forward), by default the sum of both. `activation` is the
    memory that a forward keeps for its backward; the part `kept_for_weight` of it is kept from I to
    W. Raises GraphError if the table cannot run, UsageError if a cost is not a number of at least
    0.
    """
    order = run_order(table)
    costs = {
        "forward_s": forward_s,
        "backward_input_s": backward_input_s,
        "backward_weight_s": backward_weight_s,
        "activation": activation,
    }
    forward, inputs, weights, held = (_costs(k, v, table.stages) for k, v in costs.items())
    joined = None if joined_s is None else _costs("joined_s", joined_s, table.stages)
    send, kept = _number("send_s", send_s), _number("kept_for_weight", kept_for_weight)
    if kept > 1:
        raise _bad("kept_for_weight", kept_for_weight, "give a part, from 0 to 1")

    whole = tuple(a + b for a, b in zip(inputs, weights))
    takes = {"F": forward, "I": inputs, "W": weights, "B": whole}
    done: dict[Event, tuple[float, int]] = {}
    free: list[float] = [0] * table.ranks
    start: list[list[float]] = [[] for _ in table.rows]
    end: list[list[float]] = [[] for _ in table.rows]
    busy: list[float] = [0] * table.ranks
    for rank, slot in order:
        row = table.rows[rank]
        unit = [row[slot], *(a for a in row[slot + 1 : slot + 2] if a.joined)]
        ready = [free[rank]]
        for a in unit:
            for t, where in (done[need] for need in a.needs(table.stages)):
                ready.append(t if where == rank else t + send)
        if joined is not None and len(unit) > 1:
            lasts = joined[next(a.stage for a in unit if a.kind == "F")]
        else:
            lasts = sum(takes[a.kind][a.stage] for a in unit)
        begin = max(ready)
        free[rank] = begin + lasts
        busy[rank] += lasts
        for a in unit:
            start[rank].append(begin)
            end[rank].append(free[rank])
            done.update((event, (free[rank], rank)) for event in a.gives)
    return Timeline(
        table,
        tuple(map(tuple, start)),
        tuple(map(tuple, end)),
        tuple(busy),
        tuple(_peak(row, held, kept) for row in table.rows),
    )


def warn_if_few(table: Table, timeline: Timeline | None = None, *, stacklevel: int = 1) -> None:
    """Warns with PipelineWarning if there are fewer microbatches than twice the ranks.

    The warning gives the part of a step that the ranks idle: by `timeline`, or else as if forward,
    input and weight of each stage took the same time. It points at the caller's line, or with a
    higher `stacklevel` at a line further up the stack.
    """
    p, m = table.ranks, table.microbatches
    if p == 1 or m >= 2 * p:
        return
    now = _mean_idle(timeline or simulate(table))
    then = ""
    if timeline is None and table.name in SCHEDULES:
        enough = simulate(pipeline_table(table.name, p, 2 * p, table.chunks))
        then = f"; with {2 * p} it would be {_mean_idle(enough):.0%}"
    warnings.warn(
        f"{table.name}: with {m} microbatch{'es' if m > 1 else ''} on {p} ranks each rank idles"
        f" {now:.0%} of a step{then}. Use at least {2 * p} microbatches",
        PipelineWarning,
        stacklevel=stacklevel + 1,
    )


def _mean_idle(line: Timeline) -> float:
    return sum(line.idle_fraction) / len(line.idle_fraction)


def _peak(row: Sequence[Action], held: Sequence[float], kept_part: float) -> float:
    """The peak memory of a rank that runs `row`. A forward holds the activations of its stage; a
    backward for the inputs keeps the part `kept_part` of them, which the backward for the weights
    frees."""
    now: float = 0
    peak: float = 0
    for a in row:
        match a.kind:
            case "F":
                now += held[a.stage]
            case "B":
                now -= held[a.stage]
            case "I":
                now -= held[a.stage] * (1 - kept_part)
            case "W":
                now -= held[a.stage] * kept_part
        peak = max(peak, now)
    return peak


def _costs(name: str, value: object, stages: int) -> tuple[float, ...]:
    many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * stages
    if len(many) != stages:
        raise _bad(
            name, f"{len(many)} numbers", f"give one number, or one for each stage: {stages}"
        )
    return tuple(_number(name, x) for x in many)


def _number(name: str, x: object) -> float:
    if isinstance(x, numbers.Real) and math.isfinite(x) and float(x) >= 0:
        return x  # type: ignore[return-value]  # exact numbers stay exact
    raise _bad(name, repr(x), "give a finite number of at least 0")


def _bad(name: str, value: object, fix: str) -> UsageError:
    return UsageError(f"simulate: {name} cannot be {value}", fix=fix)
