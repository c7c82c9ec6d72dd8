"""Report of a step on a machine: its time, memory, communication, and what to change.

The numbers come from the simulated timeline and the memory plan of the step's schedule; nothing is
compiled or run, and the machine need not be there.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, assert_never

from ..core.checks import file_access
from ..core.declared import Count, Positive
from ..core.errors import UsageError
from ..core.files import write_whole
from ..core.layout import TensorType
from ..core.machine.chip import Chip
from ..core.machine.machine import Machine
from ..core.mesh import Mesh
from ..core.public import checked
from ..cost.memory import memory_plan, stage_plans
from ..cost.step_time import Kernel, kernels
from ..ir.graph.node import Graph
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send
from ..lang.jit.jit import Jit, jit
from ..lang.parallel.pipelines.pipe import Pipe
from ..lang.program.training_step import TrainingStep
from ..lang.record.operands import type_like
from ..lang.record.tree import flatten, tree_map
from ..lang.value.host_data import is_array
from ..lang.value.tensor import Tensor
from ..nn.module import Module
from ..passes.plan import plan
from .changes import Change, changes, model_flops
from .machines import as_machine, cluster_of
from .simulate import simulate
from .timeline import Event, Timeline, waits

MOST = 10  # layers and collectives in a report
MOST_EVENTS = 20_000  # events in a page or trace; further loops and regions stay one block
DAY_S = 86400.0
Cluster = Machine | str | Path


@dataclass(frozen=True, slots=True)
class Memory:
    """The planned peak of one device of a stage by category, in bytes, and its limit."""

    stage: int
    rows: Mapping[str, int]
    limit: int

    @property
    def peak(self) -> int:
        return sum(self.rows.values())


@dataclass(frozen=True, slots=True)
class Share:
    """A layer or collective of one device of a stage: its place in the model and the user's line,
    its seconds in a step, those of them that the device waits, and its bytes (a collective's are
    received) and FLOPs."""

    stage: int
    what: str
    where: str
    at: str
    count: int
    time_s: float
    exposed_s: float
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Report:
    """A step on a machine as plain data: `print(report)`, `.json()`, `.save_html(path)`.

    - `tokens` are those of a step, `model_flops` its products without recomputation, and `mfu` is
      the part of all devices' peak at which these run; None: unknown.
    - `days` and `cost` are those of `budget_tokens`.
    - `layers` and `collectives` are the ten dearest, `changes` what makes the step faster.
    """

    name: str
    mesh: str
    machine: str
    timeline: Timeline
    tokens: int | None
    model_flops: int
    budget_tokens: float | None
    price_per_device_hour: float | None
    memory: tuple[Memory, ...]
    layers: tuple[Share, ...]
    collectives: tuple[Share, ...]
    changes: tuple[Change, ...]

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.tokens and self.step_s else None

    @property
    def mfu(self) -> float:
        return self.timeline.utilization(self.model_flops) if self.step_s else 0.0

    @property
    def days(self) -> float | None:
        """The days that `budget_tokens` take."""
        if self.budget_tokens is None or not self.tokens_per_s:
            return None
        return self.budget_tokens / self.tokens_per_s / DAY_S

    @property
    def cost(self) -> float | None:
        """The price of these days on all devices."""
        if self.days is None or self.price_per_device_hour is None:
            return None
        return self.days * 24 * self.timeline.devices * self.price_per_device_hour

    @property
    def hidden_s(self) -> float:
        """Communication behind work, of the stage that has most."""
        by_stage: Counter[int] = Counter()
        for t in self.timeline.traffic:
            by_stage[t.stage] += t.hidden_s  # type: ignore[assignment]
        return float(max(by_stage.values(), default=0.0))

    @property
    def fits(self) -> bool:
        """Whether every stage's peak is within its limit."""
        return all(m.peak <= m.limit for m in self.memory)

    @property
    def text(self) -> str:
        """The report as text."""
        from ..show.mesh_picture import plain_text
        from .report_text import render_report  # slow to import

        return plain_text(render_report(self), 110)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def data(self) -> dict[str, Any]:
        """The report as dicts, lists and numbers; times in seconds, without the events."""
        line = self.timeline
        own = "step_s tokens tokens_per_s mfu model_flops budget_tokens price_per_device_hour days"
        return {
            **{k: getattr(self, k) for k in ("name", "mesh", "machine", *own.split(), "cost")},
            "devices": line.devices,
            "compute_s": line.compute_s,
            "exposed_s": line.exposed_s,
            "hidden_s": self.hidden_s,
            "bubble": line.bubble,
            "fits": self.fits,
            "memory": [{**asdict(m), "peak": m.peak} for m in self.memory],
            "stages": [asdict(s) for s in line.stages],
            "traffic": [{**asdict(t), "hidden_s": t.hidden_s} for t in line.traffic],
            "link_bytes": line.link_bytes,
            "layers": [asdict(s) for s in self.layers],
            "collectives": [asdict(s) for s in self.collectives],
            "changes": [asdict(c) for c in self.changes],
        }

    def json(self) -> str:
        """The report as JSON, without the events."""
        return json.dumps(self.data(), indent=1)

    def save_json(self, path: str | Path) -> None:
        """Writes `.json()` to a file. Raises UsageError if it cannot be written."""
        _write(path, self.json().encode())

    def save_html(self, path: str | Path) -> None:
        """Writes the report with its timeline as one page, which needs no network. Raises
        UsageError if it cannot be written."""
        columns = "what kind stage streams start_s end_s axes bytes flops at scope times".split()
        flattened = flat(self.timeline.events)
        rows = [[*(getattr(e, c) for c in columns), within] for e, within in flattened]
        shown = {**self.data(), "columns": [*columns, "within"], "events": rows}
        page = (files(__package__) / "report.html").read_text()
        # "</" would end the script that holds the data
        text = json.dumps(shown, separators=(",", ":")).replace("</", "<\\/")
        _write(path, page.replace("__DATA__", text, 1).encode())

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline for ui.perfetto.dev, compressed if the name ends with ".gz". Raises
        UsageError if it cannot be written."""
        data = json.dumps({"traceEvents": trace_events(self.timeline), "displayTimeUnit": "ms"})
        _write(path, gzip.compress(data.encode()) if Path(path).suffix == ".gz" else data.encode())


def _write(path: str | Path, data: bytes) -> None:
    with file_access("plan.report", path, "written", "name a file in a folder of your own"):
        write_whole(Path(path), data)


# -- the step -------------------------------------------------------------------------------------
@checked
def report(
    step: Any,
    *args: Any,
    cluster: Cluster,
    tokens: Count | None = None,
    budget_tokens: Positive | None = None,
    price_per_device_hour: Positive | None = None,
) -> Report:
    """Returns the report of `step(*args)` on `cluster`, without running it.

    `step` is a compiled or plain function, a training step, a `Pipe` (without `args`: its last
    recording), a Graph or a Schedule; `args` may be types. `cluster` is a Machine, a file, or a
    name: "dgx_h100:1024", "h100x1024". `tokens` are those of a step; None: the elements of the
    first array of integers in `args`. Weights are those of the modules in `args` and of a training
    step, "optimizer" is what else the step returns anew. Raises UsageError if the program does not
    fit the cluster, or has no chip.
    """
    return report_of(step, args, {}, cluster, tokens, budget_tokens, price_per_device_hour)


def report_of(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cluster: Cluster,
    tokens: int | None = None,
    budget_tokens: float | None = None,
    price_per_device_hour: float | None = None,
) -> Report:
    """`report` for a call with arguments by name, too."""
    machine = cluster_of(cluster)
    schedule = _planned(step, args, kwargs, machine)
    machine = cluster_of(cluster, _devices(schedule.mesh))
    timeline, chip = simulate(schedule, machine), machine.chip
    assert chip is not None
    memory = tuple(_memory(schedule, _weights(step, args, kwargs), chip))
    room = all(m.peak + _by_rows(m) <= m.limit for m in memory)
    return Report(
        schedule.name,
        schedule.mesh.text() if schedule.mesh is not None else "one device",
        f"{machine.name}, {machine.size:,} devices",
        timeline,
        _tokens(args, kwargs) if tokens is None else tokens,
        model_flops(schedule),
        budget_tokens,
        price_per_device_hour,
        memory,
        tuple(_dearest(_layers(schedule, chip))),
        tuple(_dearest(_communication(timeline))),
        changes(schedule, machine, timeline, room),
    )


def _planned(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], machine: Machine
) -> Schedule:
    if isinstance(step, Schedule | Graph):
        return step if isinstance(step, Schedule) else plan(step)
    if isinstance(step, Pipe) and not args and not kwargs:
        return step.schedule
    if not callable(step):
        raise UsageError(
            f"plan.report: {type(step).__name__} is no step",
            fix="give a compiled function and its arguments, or its .schedule",
        )
    given, named = tree_map(
        lambda x: Tensor(None, x) if isinstance(x, TensorType) else x, (args, dict(kwargs))
    )
    compiled = step if isinstance(step, Jit | TrainingStep) else jit(step)
    with as_machine(machine):
        found: Schedule = compiled.plan(*given, **named)
    return found


def _weights(step: Any, args: Any, kwargs: Any) -> list[TensorType]:
    trees = [dict(m.parameters()) for m in _modules((args, kwargs))]
    if isinstance(step, TrainingStep):
        with suppress(UsageError):  # it has none
            trees.append(step.parameters)
    found = {id(x): x.type for tree in trees for x in flatten(tree)[0] if isinstance(x, Tensor)}
    return list(found.values())


def _modules(x: Any) -> Iterator[Module]:
    if isinstance(x, Module):
        yield x
    elif isinstance(x, dict | list | tuple):
        for v in x.values() if isinstance(x, dict) else x:
            yield from _modules(v)


def _tokens(args: Any, kwargs: Any) -> int | None:
    """The elements of the first array of integers among the arguments."""
    leaves = (x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor | TensorType))
    arrays = (x for x in flatten((args, kwargs))[0] if is_array(x) and not isinstance(x, Tensor))
    every = [*(x.type if isinstance(x, Tensor) else x for x in leaves), *map(type_like, arrays)]
    return next((t.size for t in every if t.dtype.is_int and t.rank), None)


def _devices(mesh: Mesh | None) -> int:
    return max(mesh.physical.ids) + 1 if mesh is not None else 1


# -- memory ---------------------------------------------------------------------------------------
def _memory(schedule: Schedule, weights: list[TensorType], chip: Chip) -> Iterator[Memory]:
    meshes = [
        m for m in dict.fromkeys([schedule.mesh, *(step.mesh for step in schedule.steps)]) if m
    ]
    left = Counter(_kind(schedule.buffers[b]) for b in schedule.inputs)
    left.subtract(Counter(map(_kind, weights)))
    anew = Counter(_kind(schedule.buffers[b]) for b in schedule.outputs)

    def placed(types: Iterable[TensorType]) -> list[TensorType]:
        """The types as they are on each stage; one that is on no stage yet goes to its readers."""
        return [
            x for t in types for x in (
                [t] if t.mesh in meshes[1:] else
                [t.on(m) for m in meshes if {*t.split_axes} <= {*m.axes}] or [t]
            )
        ]  # fmt: skip

    rest = (+left) & anew
    of_state = [t for t in (schedule.buffers[b] for b in schedule.inputs) if rest[_kind(t)]]
    held = {"weights": placed(weights), "optimizer": placed(of_state)}
    on, limit = "cpu" if chip.shared else "gpu", int(chip.memory_bytes)
    if schedule.is_staged:
        plans = [*stage_plans(schedule, held, weights, on=on).values()]
    else:
        plans = [memory_plan(schedule, held, weights, on=on)]
    mesh = schedule.mesh
    places = mesh.size // mesh.physical.size if mesh is not None else 1
    for i, p in enumerate(plans):
        yield Memory(i, {name: size * places for name, size in p.rows.items()}, limit)


def _kind(t: TensorType) -> object:
    """What types on several stages share."""
    return t.dtype, t.dims


def _by_rows(m: Memory) -> int:
    """The bytes that grow with the rows of a batch."""
    return sum(m.rows.get(k, 0) for k in ("batch", "activations kept", "temporaries"))


# -- the dearest ----------------------------------------------------------------------------------
def _dearest(every: Iterable[Share]) -> list[Share]:
    """The sums of `every` by stage, what, where and line; the longest first."""
    found: dict[tuple[object, ...], Share] = {}
    for s in every:
        key = (s.stage, s.what, s.where, s.at)
        old = found.get(key)
        found[key] = s if old is None else replace(
            s, count=s.count + old.count, time_s=s.time_s + old.time_s,
            exposed_s=s.exposed_s + old.exposed_s, bytes=s.bytes + old.bytes,
            flops=s.flops + old.flops,
        )  # fmt: skip
    return sorted(found.values(), key=lambda s: -s.time_s)[:MOST]


def _layers(schedule: Schedule, chip: Chip) -> Iterator[Share]:
    """The kernels of each stage, by the module of the model; those outside of modules by op."""
    made: dict[Graph, list[Kernel]] = {}

    def walk(s: Schedule, times: int, stage: int) -> Iterator[Share]:
        for step in s.steps:
            here = stage if step.mesh in (None, schedule.mesh) else step.stage
            match step:
                case Compute():
                    mesh = step.graph.mesh or schedule.mesh
                    devices = mesh.physical.size if mesh is not None else 1
                    places = mesh.size // devices if mesh is not None else 1
                    if step.graph not in made:
                        made[step.graph] = kernels(step.graph, chip.part(devices))
                    for k in made[step.graph]:
                        n = k.times * times * places
                        yield Share(here, k.scope or k.op, k.scope, k.at, n, n * k.time_s, 0.0,
                                    n * k.moved_bytes, n * k.flops)  # fmt: skip
                case Loop() | Region():
                    more = step.times if isinstance(step, Loop) else 1
                    yield from walk(step.body, times * more, here)
                case Collective() | Send():
                    pass
                case _:
                    assert_never(step)

    yield from walk(schedule, 1, 0)


def _communication(timeline: Timeline) -> Iterator[Share]:
    """The collectives and sends of each stage, inside of loops and regions too."""

    def walk(events: Iterable[Event], times: int, stage: int) -> Iterator[Share]:
        rows = [*events]
        exposed = waits(rows)
        for e in rows:
            if e.inside:
                yield from walk(e.inside, times * e.times, stage)
            elif not e.computes:
                what = f"{e.what} {','.join(e.axes)}".strip()
                yield Share(stage, what, e.scope, e.at, times, times * e.time_s,
                            times * exposed.get(e, 0.0), times * e.bytes, 0)  # fmt: skip

    for s in timeline.stages:
        yield from walk((e for e in timeline.events if e.stage == s.stage), 1, s.stage)


# -- the timeline as rows -------------------------------------------------------------------------
def flat(events: Iterable[Event], most: int = MOST_EVENTS) -> list[tuple[Event, str]]:
    """Returns `events` with those inside of loops and regions in their place, iteration by
    iteration, each with the names of these, while there are at most `most`; further loops and
    regions stay one event."""
    rows = [*events]
    left = most - len(rows)
    out: list[tuple[Event, str]] = []

    def size(e: Event) -> int:
        return e.times * sum(map(size, e.inside)) if e.inside else 1

    def put(e: Event, at_s: float, stage: int, within: str) -> None:
        nonlocal left
        if not e.inside or size(e) - 1 > left:
            there = {"start_s": at_s + e.start_s, "end_s": at_s + e.end_s}
            out.append((replace(e, stage=stage, inside=(), **there), within))
            return
        left -= size(e) - 1
        each_s = e.time_s / e.times
        for i in range(e.times):
            name = f"{e.what} {i + 1} of {e.times}" if e.times > 1 else e.what
            for x in e.inside:
                at = at_s + e.start_s + i * each_s
                put(x, at, stage, f"{within}, {name}" if within else name)

    for e in rows:
        put(e, 0.0, e.stage, "")
    return out


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events in the Chrome trace format: a process for each stage, a thread for each stream."""
    rows = flat(timeline.events)
    streams = [*dict.fromkeys(s for e, _ in rows for s in e.streams)]
    out: list[dict[str, Any]] = []
    for stage in timeline.stages:
        named = [("process_name", 0, f"stage {stage.stage}")]
        named += [("thread_name", i, stream) for i, stream in enumerate(streams)]
        for kind, thread, name in named:
            at = {"ph": "M", "pid": stage.stage, "tid": thread}
            out.append({"name": kind, **at, "args": {"name": name}})
    for e, within in rows:
        for stream in e.streams:
            out.append({
                "name": e.what, "cat": e.kind, "ph": "X", "pid": e.stage,
                "tid": streams.index(stream), "ts": e.start_s * 1e6, "dur": e.time_s * 1e6,
                "args": {"in": within, "scope": e.scope, "line": e.at, "axes": ",".join(e.axes),
                         "bytes": e.bytes, "flops": e.flops, "times": e.times},
            })  # fmt: skip
    return out
