"""The text of a schedule, which can be read back: `to_text(parse(s)) == s`.

A line names each buffer with its type and the steps between which it lives, a line each step with
what it reads and fills, and below a step stands its graph. Steps that run one graph (the
microbatches of a pipeline) show it once: the first has it, the others say `as s3`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ...core.errors import GraphError, TesseraError, UsageError, fail
from ...core.layout import TensorType, parse_type
from ...core.mesh import Mesh
from ...core.options import PLAIN, parse_options
from ..graph.node import Graph
from ..graph.text import parse as parse_graph
from ..graph.text import size_text
from ..graph.text import to_text as graph_text
from .schedule import Schedule, Step

R = TypeVar("R")
VERSION = 1


def to_text(s: Schedule) -> str:
    """The text of `s`, without a final newline."""
    mesh = _head(s)
    options = " ".join(filter(None, (s.table, s.options.text())))
    lines = [f"schedule {s.name}  v{VERSION}{mesh}" + (f"  options {options}" if options else "")]
    for b, (t, (first, last)) in enumerate(zip(s.buffers, s.lifetimes, strict=True)):
        born = "given" if first < 0 else f"s{first}"
        dies = "returned" if last == len(s.steps) else f"s{last}" if last >= 0 else "unused"
        where = "" if t.mesh is None or t.mesh == s.mesh else f" on{_mesh(t.mesh)}"
        lines.append(
            f"  b{b} : {t}{where}{' donated' if b in s.donated else ''}"
            f"  # {born} to {dies}, {size_text(t.local_bytes)} a device"
        )
    shown: dict[Graph, int] = {}
    for i, step in enumerate(s.steps):
        lines.append(
            f"  s{i} {_step(step)}" + (f" as s{shown[step.graph]}" if step.graph in shown else "")
        )
        if step.graph not in shown:
            shown[step.graph] = i
            lines += ["    " + line for line in graph_text(step.graph, s.options).split("\n")]
    lines.append(f"  return {_buffers(s.outputs)}".rstrip())
    return "\n".join(lines)


def _head(s: Schedule) -> str:
    return "" if s.mesh is None else f"  mesh{_mesh(s.mesh)}"


def _mesh(mesh: Mesh) -> str:
    plain = mesh.ids == tuple(range(mesh.size))
    return f" {mesh.text()}" + ("" if plain else f" devices={','.join(map(str, mesh.ids))}")


def _step(step: Step) -> str:
    after = f" after {' '.join(f's{i}' for i in step.after)}" if step.after else ""
    note = f" note {step.note}" if step.note else ""
    return (
        f"{step.stream} stage={step.stage} ({_buffers(step.reads)}) -> ({_buffers(step.writes)})"
        f"{after}{note}"
    )


def _buffers(ids: tuple[int, ...]) -> str:
    return " ".join(f"b{b}" for b in ids)


_LINE = re.compile(
    r"s(\d+) (\w+) stage=(\d+) \(((?:b\d+ ?)*)\) -> \(((?:b\d+ ?)*)\)(?: after ((?:s\d+ ?)+?))?"
    r"(?: note ([^#]*?))?(?: as s(\d+))?\Z"
)

_TABLE = re.compile(r"(pipeline=(?!(?:True|False)\b).*? microbatches=\d+)? ?(.*)\Z")


def parse(text: str) -> Schedule:
    """The schedule whose text is `text`. Raises GraphError, with the line, if it is not one."""
    if not isinstance(text, str):
        raise fail(
            UsageError,
            f"parse: takes a schedule's text, not a {type(text).__name__}",
            fix="give schedule.text, or what was saved of it",
        )
    return _Parser(text.split("\n")).schedule()


class _Parser:
    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at, self.options = lines, 0, PLAIN

    def wrong(self, what: str) -> NoReturn:
        line = self.lines[min(self.at, len(self.lines) - 1)]
        raise fail(
            GraphError,
            f"schedule text, line {self.at + 1}: {what}",
            [("line", line.strip())],
            fix="write a step as: s2 compute stage=0 (b0 b1) -> (b3) after s1",
            at="",
        )

    def schedule(self) -> Schedule:
        head = re.match(
            rf"schedule (\S+)  v{VERSION}(?:  mesh ([^#]*?))?(?:  options ([^#]*))?\Z",
            self.lines[0],
        )
        if head is None:
            self.wrong(f"a schedule begins with: schedule NAME  v{VERSION}")
        steps: list[Step] = []
        graphs: list[Graph] = []
        mesh = self._mesh(head[2]) if head[2] else None
        # A pipeline's table stands before the options, one of which has its name.
        table, text = _TABLE.match(head[3] or "").groups()  # type: ignore[union-attr]
        self.options = self._guard(lambda: parse_options(text))
        self.at = 1
        types: list[TensorType] = []
        donated: list[int] = []
        while m := re.match(r"  b(\d+) : (.*?)(?: on (.*?))?( donated)?  # ", self._line()):
            if int(m[1]) != len(types):
                self.wrong(f"expected b{len(types)}, found b{m[1]}")
            where = self._mesh(m[3]) if m[3] else mesh
            donated += [len(types)] if m[4] else []
            types.append(self._type(m[2], where))
            self.at += 1
        while not self._line().startswith("  return"):
            step = _LINE.match(self._line()[2:])
            if step is None or int(step[1]) != len(steps):
                self.wrong(f"expected step s{len(steps)}")
            self.at += 1
            if step[8] is None:
                body = []
                while self._line().startswith("    "):
                    body.append(self._line()[4:])
                    self.at += 1
                graph = self._graph(body)
            else:
                if int(step[8]) >= len(graphs):
                    self.wrong(f"s{step[8]} is not above")
                graph = graphs[int(step[8])]
            graphs.append(graph)
            after = tuple(int(x[1:]) for x in (step[6] or "").split())
            reads, writes = self._ids(step[4]), self._ids(step[5])
            steps.append(Step(graph, reads, writes, step[2], int(step[3]), after, step[7] or ""))
        outputs = self._ids(self._line().removeprefix("  return"))
        filled = {b for s in steps for b in s.writes}
        inputs = tuple(b for b in range(len(types)) if b not in filled)
        return Schedule(
            head[1], mesh, tuple(types), inputs, outputs, tuple(steps), self.options,
            tuple(donated), table or "",
        )  # fmt: skip

    def _line(self) -> str:
        if self.at >= len(self.lines):
            self.wrong("the text ends before its schedule does")
        return self.lines[self.at]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(int(b[1:]) for b in text.split())

    def _type(self, text: str, mesh: Mesh | None) -> TensorType:
        return self._guard(lambda: parse_type(text, mesh))

    def _graph(self, lines: list[str]) -> Graph:
        return self._guard(lambda: parse_graph("\n".join(lines), self.options))

    def _mesh(self, text: str) -> Mesh:
        shape, _, ids = text.partition(" devices=")
        made = self._guard(lambda: Mesh.parse(shape))
        if not ids:
            return made
        return Mesh(made.axes, [int(i) for i in ids.split(",")], made.shape)

    def _guard(self, read: Callable[[], R]) -> R:
        try:
            return read()
        except TesseraError as error:
            self.wrong(str(error).splitlines()[0])
