"""Text form of schedules, which can be parsed; `to_text(parse(s)) == s`.

Each buffer has a line with its type and the steps between which it is alive. Each step has a line
with the buffers that it reads and fills, and below it the graph or schedule that it runs. Steps
that run the same one (the microbatches of a pipeline) show it once: the later ones say `as s3`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, assert_never

from ...core.errors import GraphError, TesseraError, UsageError
from ...core.layout import TensorType, parse_type
from ...core.mesh import Mesh
from ...core.mesh_input import ids_of, ids_text
from ...core.options import PLAIN, ProgramOptions, parse_options
from ..graph.node import Graph
from ..graph.text import parse as parse_graph
from ..graph.text import size_text
from ..graph.text import to_text as graph_text
from .schedule import Collective, Compute, Loop, Region, Schedule, Send, Step

R = TypeVar("R")
VERSION = 1


def to_text(s: Schedule, around: ProgramOptions = PLAIN) -> str:
    """The text of `s`, without a final newline. Its options are shown if they differ from `around`,
    those of the enclosing program."""
    mesh = _head(s)
    options_text = s.options.text()
    options = " ".join(
        filter(None, (s.table, "" if options_text == around.text() else options_text))
    )
    lines = [f"schedule {_name(s.name)}  v{VERSION}{mesh}"]
    lines[0] += f"  options {options}" if options else ""
    lines[0] += f"  # {s.options.tuned}" if s.options.tuned != around.tuned else ""
    for b, (t, (first, last)) in enumerate(zip(s.buffers, s.lifetimes, strict=True)):
        born = "given" if first < 0 else f"s{first}"
        dies = "returned" if last == len(s.steps) else f"s{last}" if last >= 0 else "unused"
        where = "" if t.mesh is None or t.mesh == s.mesh else f" on{_mesh(t.mesh)}"
        lines.append(
            f"  b{b} : {t}{where}{' donated' if b in s.donated else ''}"
            f"  # {born} to {dies}, {size_text(t.device_bytes)} a device"
        )
    shown: dict[object, int] = {}
    for i, step in enumerate(s.steps):
        first = shown.setdefault(step.runs, i)
        lines.append(f"  s{i} {_step(step)}" + (f" as s{first}" if first < i else ""))
        if isinstance(step, Loop) and (step.loc or step.scope):
            lines[-1] += f"  # {step.loc}  {step.scope}".rstrip()
        if first == i:
            lines += ["    " + line for line in _runs(step, s.options)]
    lines.append(f"  return {_buffers(s.outputs)}".rstrip())
    return "\n".join(lines)


def _name(name: str) -> str:
    return name if re.fullmatch(r'[^\s"]+', name) else json.dumps(name, ensure_ascii=False)


def _head(s: Schedule) -> str:
    return "" if s.mesh is None else f"  mesh{_mesh(s.mesh)}"


def _mesh(mesh: Mesh) -> str:
    plain = mesh.ids == tuple(range(mesh.size))
    onto = "" if mesh.onto is None else f" folded onto{_mesh(mesh.onto)}"
    return f" {mesh.text()}" + ("" if plain else f" devices={ids_text(mesh.ids)}") + onto


def _runs(step: Step, around: ProgramOptions) -> list[str]:
    match step:
        case Compute() | Collective():
            return graph_text(step.graph, around).split("\n")
        case Loop() | Region():
            return to_text(step.body, around).split("\n")
        case Send():
            return []
        case _:
            assert_never(step)


def _loop(step: Step) -> str:
    if not isinstance(step, Loop):
        return ""
    gives = ",".join(map(str, step.gives))
    way = " reverse" if step.reverse else ""
    counts = f" length={step.length} consts={step.consts} carries={step.carries}"
    return f"{counts}{way} gives={gives}"


def _step(step: Step) -> str:
    after = f" after {' '.join(f's{i}' for i in step.after)}" if step.after else ""
    note = f" note {step.note}" if step.note else ""
    ends = f"({_buffers(step.reads)}) -> ({_buffers(step.writes)})"
    return f"{step.kind}{_loop(step)} stage={step.stage} {ends}{after}{note}"


def _buffers(ids: tuple[int, ...]) -> str:
    return " ".join(f"b{b}" for b in ids)


_N = r"\d{1,18}"  # a number, and none that Python would refuse to read
_LINE = re.compile(
    rf"s(?P<number>{_N}) (?P<kind>compute|collective|send|region|loop length=(?P<length>{_N}|None)"
    rf" consts=(?P<consts>{_N}) carries=(?P<carries>{_N})(?P<reverse> reverse)?"
    rf" gives=(?P<gives>(?:{_N},?)*))"
    rf" stage=(?P<stage>{_N}) \((?P<reads>(?:b{_N} ?)*)\) -> \((?P<writes>(?:b{_N} ?)*)\)"
    rf"(?: after (?P<after>(?:s{_N} ?)+?))?(?: note (?P<note>[^#]*?))?(?: as s(?P<like>{_N}))?"
    r"(?:  # (?P<loc>\S*)(?:  (?P<scope>\S+))?)?\s*\Z"
)
_BUFFER = re.compile(rf"  b({_N}) : (.*?)(?: on (.*?))?( donated)?(?:  #.*)?\s*\Z")

_TABLE = re.compile(r"(pipeline=(?!(?:True|False)\b).*? microbatches=\d+)? ?(.*)\Z")


def parse(text: str) -> Schedule:
    """The schedule whose text is `text`. Raises GraphError, with the line, if the text is not a
    schedule."""
    if not isinstance(text, str):
        raise UsageError(
            f"parse: takes a schedule's text, not a {type(text).__name__}",
            fix="give schedule.text, or what was saved of it",
        )
    return _Parser([line.rstrip("\r") for line in text.split("\n")]).schedule()


class _Parser:
    def __init__(self, lines: list[str], around: ProgramOptions = PLAIN, first: int = 1) -> None:
        self.lines, self.at, self.options, self.first = lines, 0, around, first

    def wrong(self, message: str) -> NoReturn:
        line = self.lines[min(self.at, len(self.lines) - 1)]
        raise GraphError(
            f"schedule text, line {self.first + self.at}: {message}",
            line=line.strip(),
            fix="write a step as: s2 compute stage=0 (b0 b1) -> (b3) after s1",
            at="",
        )

    def schedule(self) -> Schedule:
        """The whole schedule: head, buffers, steps, outputs."""
        head = re.match(
            rf'schedule ("(?:[^"\\]|\\.)*"|\S+)  v{VERSION}'
            r"(?:  mesh ([^#]*?))?(?:  options ([^#]*?))?(?:  # .*)?\Z",
            self.lines[0],
        )
        if head is None:
            self.wrong(f"a schedule begins with: schedule NAME  v{VERSION}")
        name = head[1] if head[1][0] != '"' else self._guard(lambda: str(json.loads(head[1])))
        steps: list[Step] = []
        mesh = self._mesh(head[2]) if head[2] else None
        # A pipeline's table comes before the options, since one option is also named `pipeline`.
        table, text = _TABLE.match(head[3] or "").groups()  # type: ignore[union-attr]
        if text:
            self.options = self._guard(lambda: parse_options(text))
        self.at = 1
        types: list[TensorType] = []
        donated: list[int] = []
        while m := _BUFFER.match(self._line()):
            if int(m[1]) != len(types):
                self.wrong(f"expected b{len(types)}, found b{m[1]}")
            where = self._mesh(m[3]) if m[3] else mesh
            donated += [len(types)] if m[4] else []
            types.append(self._type(m[2], where))
            self.at += 1
        while not self._line().startswith("  return"):
            steps.append(self._step(steps, types))
        last = re.fullmatch(rf"  return((?: b{_N})*) *", self._line())
        if last is None:
            self.wrong("expected buffers: return b3 b4")
        outputs = self._ids(last[1])
        for line in self.lines[self.at + 1 :]:
            self.at += 1
            if line.strip():
                self.wrong("the schedule has ended above")
        filled = {b for s in steps for b in s.writes}
        inputs = tuple(b for b in range(len(types)) if b not in filled)
        return Schedule(
            name, mesh, tuple(types), inputs, outputs, tuple(steps), self.options,
            tuple(donated), table or "",
        )  # fmt: skip

    def _step(self, steps: list[Step], types: list[TensorType]) -> Step:
        """One step. Its graph or schedule is below it, or is that of an earlier step (`like`)."""
        match = _LINE.match(self._line()[2:])
        if match is None or int(match["number"]) != len(steps):
            self.wrong(f"expected step s{len(steps)}")
        reads, writes = self._ids(match["reads"]), self._ids(match["writes"])
        after = tuple(int(x[1:]) for x in (match["after"] or "").split())
        fields: Any = {"stage": int(match["stage"]), "after": after, "note": match["note"] or ""}
        like, kind = match["like"], match["kind"].partition(" ")[0]
        if like is not None and (int(like) >= len(steps) or steps[int(like)].kind != kind):
            self.wrong(f"no {kind} step s{like} is above")
        self.at += 1
        if kind == "send":
            if not all(b < len(types) for b in writes):
                self.wrong("it fills a buffer that is not above")
            return Send(reads, writes, tuple(types[b] for b in writes), **fields)
        runs: Any = self._below(kind) if like is None else steps[int(like)].runs
        if kind in ("compute", "collective"):
            return (Compute if kind == "compute" else Collective)(reads, writes, runs, **fields)
        if kind == "region":
            return Region(reads, writes, runs, **fields)
        length = None if match["length"] == "None" else int(match["length"])
        consts, carries = int(match["consts"]), int(match["carries"])
        gives = tuple(int(k) for k in match["gives"].split(",") if k)
        where = match["loc"] or "", match["scope"] or ""
        return Loop(
            reads, writes, runs, length, consts, carries, bool(match["reverse"]), gives, *where,
            **fields,
        )  # fmt: skip

    def _below(self, kind: str) -> Graph | Schedule:
        """The graph or schedule below a step's line."""
        first, lines = self.at, []
        while self._line().startswith("    "):
            lines.append(self._line()[4:])
            self.at += 1
        if kind in ("compute", "collective"):
            return self._graph(lines)
        return _Parser(lines or [""], self.options, self.first + first).schedule()

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
        text, _, onto = text.partition(" folded onto ")
        if onto:
            logical, small = self._mesh(text), self._mesh(onto)
            return self._guard(lambda: logical.fold(small))
        shape, _, ids = text.partition(" devices=")
        made = self._guard(lambda: Mesh.parse(shape))
        if not ids:
            return made
        return self._guard(lambda: Mesh(made.axes, ids_of(ids), made.shape))

    def _guard(self, read: Callable[[], R]) -> R:
        try:
            return read()
        except (TesseraError, ValueError) as error:
            self.wrong(str(error).splitlines()[0])
