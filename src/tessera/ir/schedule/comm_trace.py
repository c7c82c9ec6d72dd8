"""Trace of a program's communication, a line per collective; `TESSERA_COMM_TRACE=1` prints it.

>>> from tessera.ir.graph.text import parse
>>> print(*trace_lines(parse('''graph step  v1  mesh dp=2 tp=4
...   %0 = input "w"                      : f32[8, 8@tp] +dp
...   %1 = all_reduce %0 axes=("dp",)     : f32[8, 8@tp]  # train.py:31  grad
...   %2 = all_gather %1 axes=("tp",) dim=1  : f32[8, 8]     # train.py:32
...   return %2''')), sep="\\n")
step: all_reduce  dp  receives  64 B  : f32[8, 8@tp]  # train.py:31  grad
step: all_gather  tp  receives 192 B  : f32[8, 8]     # train.py:32
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from ..graph.node import Graph, Node, need_graph
from ..graph.text import size_text
from .schedule import Collective, Compute, Loop, Region, Schedule, Send

Row = tuple[str, str, str, str, str]


def trace_lines(program: Graph | Schedule) -> list[str]:
    """One line of text for each collective of `program`, in program order; for a schedule also one
    for each value that is sent to another mesh.

    A line has the kind, the mesh axes, the bytes that one device receives each time, the number of
    runs in a loop, the type of the result, the user's line, the scope, and the reason for an
    inserted collective. Raises UsageError if `program` is neither a graph nor a schedule.
    """
    if isinstance(program, Schedule):
        rows = list(_steps(program, 1))
    else:
        rows = [_row(*found) for found in need_graph("comm_trace", program).collectives()]
    width = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [_line(program.name, row, width) for row in rows]


def _steps(s: Schedule, times: int) -> Iterator[Row]:
    """Yields a row for each collective and each send of `s`, which runs `times` times, including
    the bodies of loops and regions."""
    for step in s.steps:
        match step:
            case Collective():
                yield from (_row(n, times) for n in step.nodes)
            case Send():
                axes, why = ",".join(s.along(step)), f"# {step.note}" if step.note else ""
                for t, size in zip(step.types, s.received(step), strict=True):
                    if size:
                        yield step.kind, axes, size_text(size), str(t), why
            case Loop():
                yield from _steps(step.body, times * step.times)
            case Region():
                yield from _steps(step.body, times)
            case Compute():
                pass
            case _:
                assert_never(step)


def _row(n: Node, times: int) -> Row:
    size = size_text(n.wire_bytes)
    why = "  ".join(filter(None, (n.loc, n.scope, n.note and f"inserted {n.note}")))
    axes = ",".join(n.attrs["axes"])
    each = size if times == 1 else f"{times} x {size}"
    name = n.attrs["kernel"].name if "kernel" in n.attrs else n.op
    return name, axes, each, str(n.type), f"# {why}" if why else ""


def _line(name: str, row: Sequence[str], width: Sequence[int]) -> str:
    kind, axes, size, made, why = row
    text = (
        f"{name}: {kind:<{width[0]}}  {axes:<{width[1]}}  receives {size:>{width[2]}}"
        f"  : {made:<{width[3]}}  {why}"
    )
    return text.rstrip()
