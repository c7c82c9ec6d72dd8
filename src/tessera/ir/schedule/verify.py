"""Verifier of schedules: buffers, types, options and the order of steps."""

from __future__ import annotations

from typing import NoReturn, assert_never

from ...core.errors import GraphError, UsageError
from ...core.layout import same_type, shard_count
from ..graph.verify import verify as verify_graph
from .algorithms.build import named
from .schedule import Collective, Compute, Loop, Region, Schedule, Send, Step, need_schedule


def verify_schedule(s: Schedule) -> None:
    """Raises GraphError if the schedule breaks a rule of Schedule IR.

    - Each buffer is filled once, and before it is read; outputs are filled.
    - A step's buffers have the types of its graph, and the graphs of steps have the schedule's
      options.
    - A compute step has no collectives, also not in the bodies of loops; a collective step has
      nothing else.
    - `after` names earlier steps.
    - The same holds for the bodies of loops and regions.

    All devices run the steps in this one order, so all members of a group run its collectives in
    the same order.
    """
    need_schedule("verify", s)
    filled = set(s.inputs)
    for i, step in enumerate(s.steps):
        _step(s, i, step, filled)
        filled.update(step.writes)
    for b in s.outputs:
        if b not in filled:
            _wrong(s, None, f"b{b} is returned and never filled")
    for b in range(len(s.buffers)):
        if b not in filled:
            _wrong(s, None, f"b{b} is never filled")
    for b in s.donated:
        if b not in s.inputs:
            _wrong(s, None, f"b{b} is donated and no input")


def _step(s: Schedule, i: int, step: Step, filled: set[int]) -> None:
    """Raises GraphError unless step `i` reads filled buffers, fills empty ones, in the types of its
    graph, and contains only nodes that its kind allows."""
    numbers = "its graph takes and gives other numbers of values than it reads and fills"
    if len(step.reads) != _takes(step):
        _wrong(s, i, numbers)
    if isinstance(step, Loop) and not all(0 <= k < len(step.body.outputs) for k in step.gives):
        _wrong(s, i, "it gives a result that its body lacks")
    g = step.graph
    if g.options != s.options and not isinstance(step, Send):
        _wrong(s, i, f"its graph was recorded under other options: {g.options}")
    if len(g.outputs) != len(step.writes):
        _wrong(s, i, numbers)
    for b in (*step.reads, *step.writes):
        if not 0 <= b < len(s.buffers):
            _wrong(s, i, f"b{b} does not exist")
    for b, n in zip(step.reads, g.inputs, strict=True):
        if b not in filled:
            _wrong(s, i, f"it reads b{b} before that is filled")
        sent = isinstance(step, Send) and s.buffers[b].text == n.type.text
        if not sent and not same_type(s.buffers[b], n.type):
            _wrong(s, i, f"it reads b{b} as {n.type}, which is {s.buffers[b]}")
    for b, n in zip(step.writes, g.outputs, strict=True):
        if b in filled or step.writes.count(b) > 1:
            _wrong(s, i, f"it fills b{b}, which is filled already")
        if not same_type(s.buffers[b], n.type):
            _wrong(s, i, f"it fills b{b} with {n.type}, which is {s.buffers[b]}")
    for j in step.after:
        if not 0 <= j < i:
            _wrong(s, i, f"it follows s{j}, which is not before it")
    match step:
        case Compute():
            for n, _ in g.collectives():
                _wrong(s, i, f"a compute step holds {n.op}")
        case Collective():
            rest = {n.op for n in step.graph.nodes if not n.is_collective}
            if not step.nodes or not rest <= {"input", "item"}:
                _wrong(s, i, "a collective step holds what is no collective")
        case Loop() | Region():
            verify_schedule(step.body)
        case Send():
            pass
        case _:
            assert_never(step)
    for n in g.nodes:
        if "algorithm" in n.attrs:
            try:
                named(n.op, n.attrs["algorithm"], shard_count(n.attrs["axes"], n.type.sizes))
            except UsageError as error:
                _wrong(s, i, f"{n.op} has no such table: {str(error).splitlines()[0]}")
    verify_graph(g, "schedule")


def _takes(step: Step) -> int:
    """The number of values that `step` takes, from its graph or body."""
    match step:
        case Compute() | Collective():
            return len(step.graph.inputs)
        case Send():
            return len(step.types)
        case Loop() | Region():
            return len(step.body.inputs)
        case _:
            assert_never(step)


def _wrong(s: Schedule, i: int | None, message: str) -> NoReturn:
    rows = [("schedule", s.name)]
    if i is not None:
        step = s.steps[i]
        rows.append(("step", f"s{i} {step.kind}"))
    raise GraphError(
        f"verify: the schedule is not valid: {message}",
        rows=rows,
        fix="correct the text, or what made the schedule",
        at="",
    )
