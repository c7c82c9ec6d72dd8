"""Profiler: `dist.profile()` measures the time of every step of the schedule.

Programs run by the stepped executor, so each compute step and each collective is a separate
program, and each device's results are waited for. The time of a collective is its transfer; the
wait is the time from a device's end of a compute step to that of the last device. Steps that
overlap in a fused program are measured one after the other: the parts are right, their sum is an
upper bound.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from ..core.checks import file_access
from ..core.context import replaced, settings
from ..core.contexts import within
from ..core.declared import Count, Number
from ..core.files import write_whole
from ..core.mesh import Mesh
from ..core.public import checked
from ..core.wording import columns
from ..ir.graph.node import scope_prefixes
from ..ir.graph.text import size_text
from ..ir.schedule.listener import watching
from ..ir.schedule.pipelines.simulate import FEWER, LAUNCH_S
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..lang.value.checks import asked_function
from ..show.notebook import text_html

SCOPES = 4  # levels of scope that separate compute
KINDS = [s.kind for s in (Compute, Collective, Send, Loop, Region)]  # the streams of a device


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of one run: its begin, the return of its launch, and the time when each device had
    its results (seconds)."""

    schedule: Schedule
    index: int
    run: tuple[int, int]  # (id of the program, number of its run)
    start_s: float
    launched_s: float
    ready_s: dict[int, float]

    @property
    def step(self) -> Step:
        return self.schedule.steps[self.index]

    @property
    def end_s(self) -> float:
        return max(self.ready_s.values())

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def wait_s(self) -> float:
        """The mean time that devices waited for the last one."""
        return sum(self.end_s - t for t in self.ready_s.values()) / len(self.ready_s)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report, per run: a collective, or the compute of a scope. `at` is the user's
    line of its first node."""

    what: str
    where: str
    count: float
    received_bytes: int
    transfer_s: float
    wait_s: float
    compute_s: float
    at: str = ""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The times of a layer in one run, in seconds, and the bytes that a device receives in it."""

    path: str
    compute_s: float
    transfer_s: float
    wait_s: float
    received_bytes: int

    @property
    def total_s(self) -> float:
        return self.compute_s + self.transfer_s + self.wait_s


class LayerTable(tuple[LayerTimes, ...]):
    """The times of all layers, the longest first; `str()` is the table."""

    def __str__(self) -> str:
        lines: list[Sequence[str]] = [
            ("layer", "all", "share", "compute", "transfer", "wait", "receives")
        ]
        whole = sum(r.total_s for r in self) or 1.0
        for r in self:
            times = (_ms(r.compute_s), _ms(r.transfer_s), _ms(r.wait_s))
            size = size_text(r.received_bytes) if r.received_bytes else ""
            name = r.path or "outside of modules"
            lines.append((name, _ms(r.total_s), f"{r.total_s / whole:.0%}", *times, size))
        return "\n".join(columns(lines, 1))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return text_html(str(self))


@dataclass(repr=False)
class Profile:
    """The result of a profile: `str()` is the table, `.rows` its lines, `.save(path)` writes a
    Chrome trace."""

    timed: list[Timed] = field(default_factory=list)
    _runs: dict[int, int] = field(default_factory=dict)
    _programs: dict[int, Schedule] = field(default_factory=dict)
    _now: tuple[int, int] = (0, 0)

    # -- calls from the executor ------------------------------------------------------------------
    def begin(self, schedule: Schedule) -> None:
        number = self._runs[id(schedule)] = self._runs.get(id(schedule), -1) + 1
        self._programs[id(schedule)] = schedule
        self._now = id(schedule), number

    def step(
        self,
        schedule: Schedule,
        index: int,
        start_s: float,
        launched_s: float,
        ready_s: dict[int, float],
    ) -> None:
        self.timed.append(Timed(schedule, index, self._now, start_s, launched_s, ready_s))

    # -- the report -------------------------------------------------------------------------------
    @property
    def runs(self) -> int:
        """The number of runs of the largest program: small ones beside it create weights and add
        numbers."""
        size = {k: sum(len(s.graph.nodes) for s in p.steps) for k, p in self._programs.items()}
        return max(((size[k], n + 1) for k, n in self._runs.items()), default=(0, 0))[1]

    @property
    def rows(self) -> list[Row]:
        """Collectives by kind, axes and scope, then compute by scope; the longest first."""
        groups: dict[tuple[bool, str, str], list[Timed]] = {}
        for t in self.timed:
            groups.setdefault((_moves(t.step), *_label(t.step)), []).append(t)
        rows = [
            _row(what, where, comm, ts, self.runs) for (comm, what, where), ts in groups.items()
        ]
        return sorted(rows, key=lambda r: (r.compute_s > 0, -r.transfer_s - r.compute_s))

    @checked
    def by_layer(self, depth: Annotated[int, Number(least=1)] | None = None) -> LayerTable:
        """The rows summed by layer: the path of attributes of the module in which the code is, with
        at most `depth` parts (`net/blocks.3` has three). A step of several layers counts for the
        first.

        Raises UsageError if `depth` is below 1.
        """
        layers: dict[str, list[Row]] = {}
        for r in self.rows:
            path = r.where.removesuffix(" …")
            layers.setdefault((["", *scope_prefixes(path)])[: depth and depth + 1][-1], []).append(
                r
            )
        table = [
            LayerTimes(
                path,
                sum(r.compute_s for r in rows),
                sum(r.transfer_s for r in rows),
                sum(r.wait_s for r in rows),
                sum(r.received_bytes for r in rows),
            )
            for path, rows in layers.items()
        ]
        return LayerTable(sorted(table, key=lambda r: -r.total_s))

    @property
    def totals_s(self) -> dict[str, float]:
        """Seconds per run in transfer, wait and compute."""
        rows = self.rows
        return {
            "transfer": sum(r.transfer_s for r in rows),
            "wait": sum(r.wait_s for r in rows),
            "compute": sum(r.compute_s for r in rows),
        }

    def __str__(self) -> str:
        if not self.timed:
            return "profile: nothing was measured; call a compiled function inside it"
        head = ("what", "where", "times", "receives", "transfer", "wait", "compute", "at")
        lines: list[Sequence[str]] = [head]
        for r in self.rows:
            size = size_text(r.received_bytes) if r.received_bytes else ""
            times = (_ms(r.transfer_s), _ms(r.wait_s), _ms(r.compute_s))
            lines.append((r.what, r.where, f"{r.count:g}", size, *times, r.at))
        t = self.totals_s
        lines.append(("all", "", "", "", *(_ms(t[k]) for k in ("transfer", "wait", "compute")), ""))
        text = columns(lines, 2)
        share = t["transfer"] / (sum(t.values()) or 1.0)
        text.append(
            f"a run: {_ms(sum(t.values()))}, {share:.0%} of it transfer; {self.runs} measured"
        )
        for s in self._programs.values():
            text += _bound(s, [t for t in self.timed if t.run[0] == id(s)])
        return "\n".join(text)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return text_html(str(self))

    def events(self) -> list[dict[str, Any]]:
        """The steps as events of the Chrome trace format, one row per device and stream. Rows are
        numbers there, named by metadata events."""
        if not self.timed:
            return []
        zero = min(t.start_s for t in self.timed)
        rows = dict.fromkeys((d, t.step.kind) for t in self.timed for d in t.ready_s)
        out: list[dict[str, Any]] = []
        for device, kind in sorted(rows, key=lambda row: (row[0], KINDS.index(row[1]))):
            for metadata, name in (("process_name", f"device {device}"), ("thread_name", kind)):
                at = {"ph": "M", "pid": device, "tid": KINDS.index(kind)}
                out.append({"name": metadata, **at, "args": {"name": name}})
        for t in self.timed:
            metadata, where = _label(t.step)
            for device, ready in sorted(t.ready_s.items()):
                out.append({
                    "name": metadata if _moves(t.step) else where or metadata,
                    "cat": t.step.kind,
                    "ph": "X",
                    "pid": device,
                    "tid": KINDS.index(t.step.kind),
                    "ts": (t.start_s - zero) * 1e6,
                    "dur": (ready - t.start_s) * 1e6,
                    "args": {
                        "step": f"s{t.index} of {t.schedule.name}",
                        "scope": where,
                        "bytes": _bytes(t),
                        "lines": ", ".join(sorted({n.loc for n in t.step.nodes if n.loc})[:4]),
                    },
                })  # fmt: skip
        return out

    def save(self, path: str | Path) -> None:
        """Writes the trace for chrome://tracing or ui.perfetto.dev, compressed if the name ends
        with ".gz". Raises UsageError if it cannot be written."""
        shown = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        with file_access("profile", path, "written", "name a file in a folder of your own"):
            data = json.dumps(shown).encode()
            write_whole(Path(path), gzip.compress(data) if Path(path).suffix == ".gz" else data)


def _bound(s: Schedule, timed: Sequence[Timed]) -> list[str]:
    """A line if the steps of a pipeline take longer to launch than its busiest stage computes: one
    thread launches all steps, and the devices wait for it."""
    took: dict[tuple[Mesh | None, int, int], list[float]] = {}
    for t in timed:
        if not isinstance(t.step, Send):
            key = t.step.mesh, id(t.schedule), t.index
            took.setdefault(key, []).append(max(t.end_s - t.launched_s, 0.0))
    runs = len({t.run for t in timed})
    work: dict[Mesh | None, float] = {}  # seconds
    for (mesh, *_), seconds in took.items():
        work[mesh] = work.get(mesh, 0.0) + median(seconds) * len(seconds) / runs
    launch, most = len(s.steps) * LAUNCH_S, max(work.values(), default=0.0)
    if len(work) < 2 or launch <= most:
        return []
    return [
        f"{s.name}: its {len(s.steps)} steps take about {_ms(launch)} to launch, the"
        f" busiest stage computes for {_ms(most)}: {FEWER}"
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else ""


def _label(step: Step) -> tuple[str, str]:
    scopes = dict.fromkeys(scope_prefixes(n.scope)[:SCOPES][-1] for n in step.nodes if n.scope)
    where = next(iter(scopes), "") + (" …" if len(scopes) > 1 else "")
    if not isinstance(step, Collective):
        return step.description if isinstance(step, Compute) else step.kind, where
    return f"{step.name} {','.join(step.axes)}", where


def _moves(step: Step) -> bool:
    return isinstance(step, Collective | Send)


def _bytes(timed: Timed) -> int:
    """Bytes that one device receives."""
    if isinstance(timed.step, Send):
        return sum(timed.schedule.received(timed.step))
    return timed.step.graph.wire_bytes


def _row(operation: str, where: str, comm: bool, timed: Sequence[Timed], runs: int) -> Row:
    """A row of the table: medians per step of the schedule, summed and divided by the runs."""
    each: dict[tuple[int, int], list[Timed]] = {}
    for t in timed:
        each.setdefault((id(t.schedule), t.index), []).append(t)
    took = sum(median(t.took_s for t in ts) * len(ts) for ts in each.values()) / runs
    wait = sum(median(t.wait_s for t in ts) * len(ts) for ts in each.values()) / runs
    received = sum(_bytes(ts[0]) * len(ts) for ts in each.values()) // runs
    count = len(timed) / runs
    # A compute step lasts until its last device is done, so it includes the wait of the others.
    at = next((n.loc for t in timed for n in t.step.nodes if n.loc), "")
    if comm:
        return Row(operation, where, count, received, took, 0.0, 0.0, at)
    return Row(operation, where, count, received, 0.0, wait, took - wait, at)


def profile(
    fn: Callable[..., Any] | None = None, /, *args: Any, runs: Count = 3, **kwargs: Any
) -> Any:
    """Measures programs step by step: `with dist.profile() as p: step(batch)`, then `print(p)`.

    With a function `fn`, it calls `fn` `runs` times, and returns the `Profile`. Compiled functions
    that are called inside run by the stepped executor, which is slower than the fused one and
    computes the same. Compilation is not measured: each step's program is called once before.
    Raises UsageError if `runs` is below 1.
    """
    if fn is None:
        return within("dist.profile", "write with dist.profile() as p: step(batch), then print(p)")(
            _profiling
        )()
    fn = asked_function("profile", "the function", fn)
    with _profiling() as found:
        for _ in range(runs):
            fn(*args, **kwargs)
    return found


@contextmanager
def _profiling() -> Iterator[Profile]:
    found = Profile()
    options = replace(settings().program.schedule, scope_depth=SCOPES)
    with ExitStack() as stack:
        stack.enter_context(replaced(executor="stepped", schedule=options))
        stack.enter_context(watching(found))
        yield found
