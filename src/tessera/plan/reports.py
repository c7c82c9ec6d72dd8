"""Report of a step on a machine: its time, memory, communication, and what to change.

The numbers come from the simulated timeline and the memory plan of the step's schedule; nothing is
compiled or run, and the machine need not be there.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

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
from ..ir.graph.node import Graph
from ..ir.schedule.schedule import Schedule
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
from .dearest import Share, communication, dearest, layers
from .flat import COLUMNS, flat, trace_events
from .machines import as_machine, cluster_of
from .simulate import simulate
from .timeline import Timeline

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
        by_stage: defaultdict[int, float] = defaultdict(float)
        for t in self.timeline.traffic:
            by_stage[t.stage] += t.hidden_s
        return max(by_stage.values(), default=0.0)

    @property
    def fits(self) -> bool:
        """Returns whether every stage's peak is within its limit."""
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

    def _repr_html_(self) -> str:
        from ..show.notebook import text_html

        return text_html(self.text)

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
        rows = [[*(getattr(e, c) for c in COLUMNS), within]
                for e, within in flat(self.timeline.events)]  # fmt: skip
        shown = {**self.data(), "columns": [*COLUMNS, "within"], "events": rows}
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
        tuple(dearest(layers(schedule, chip))),
        tuple(dearest(communication(timeline))),
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


def weights_of(step: Any, args: Any, kwargs: Any = None) -> dict[str, TensorType]:
    """Returns the types of the weights of the modules in the arguments and of a training step, by
    name."""
    trees: list[Mapping[str, Tensor]] = [m.parameters() for m in _modules((args, kwargs or {}))]
    if isinstance(step, TrainingStep):
        with suppress(UsageError):  # it has none
            trees.append(step.parameters)
    found = {id(x): (name, x.type) for tree in trees for name, x in tree.items()}
    names = Counter(name for name, _ in found.values())
    return {f"{n} {i}" if names[n] > 1 else n: t for i, (n, t) in enumerate(found.values())}


def memory_of(
    schedule: Schedule, step: Any, args: tuple[Any, ...], machine: Machine
) -> tuple[Memory, ...]:
    """Returns the planned memory of each stage of `schedule`, that of `step(*args)`."""
    assert machine.chip is not None
    return tuple(_memory(schedule, _weights(step, args, {}), machine.chip))


def _weights(step: Any, args: Any, kwargs: Any) -> list[TensorType]:
    return list(weights_of(step, args, kwargs).values())


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
                [t, *(t.on(m) for m in meshes if m != t.mesh and {*t.split_axes} <= {*m.axes})]
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
    """The part of a type that is the same on every stage."""
    return t.dtype, t.dims


def _by_rows(m: Memory) -> int:
    """The bytes that grow with the rows of a batch."""
    return sum(m.rows.get(k, 0) for k in ("batch", "activations kept", "temporaries"))
