"""Memory of a step on each device, by category at its peak, before the step is compiled.

The bytes of arguments and results are exact: they follow from the layouts. Those inside of the
program are an estimate, by the rules of cost/liveness.py.

>>> from tessera.core.layout import parse_type
>>> from tessera.core.mesh import Mesh
>>> from tessera.ir.graph.build import Builder
>>> mesh = Mesh(["dp", "tp"], devices=range(8), shape=(2, 4))
>>> b = Builder("step")
>>> x, w = (b.input(parse_type(t, mesh)) for t in ("f32[512@dp, 64]", "f32[64, 256@tp]"))
>>> y = b("sum", b("tanh", b("contract", x, w, index="a b, b c -> a c")), dims=(1,))
>>> plan = memory_plan(b.graph([y]), {"weights": [w.type]})
>>> plan.rows
{'weights': 16384, 'batch': 65536, 'results': 1024, 'temporaries': 65536}
>>> plan.persistent, plan.peak
(16384, 148480)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core.checks import mapping, unfit
from ..core.devices import platform
from ..core.flags import MULTIPLIES_BF16
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..ir.graph.node import Graph, need_graph
from ..ir.schedule.donation import donation_aliases
from ..ir.schedule.schedule import Schedule, Send, Step, need_schedule
from .liveness import Liveness, by_rows
from .program import of_graph, of_schedule

Held = Mapping[str, Iterable[TensorType]]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device at the peak of a run.

    `persistent_rows` are the arguments that stay between runs, by category, and `batch` the other
    arguments; `results` are those that take no argument's memory. Inside the program, at its peak,
    `gradients` and `activations` wait for later readers; `working` is read or written at that
    moment.
    """

    persistent_rows: Mapping[str, int]
    batch: int
    results: int
    gradients: int
    activations: int
    working: int

    @property
    def persistent(self) -> int:
        return sum(self.persistent_rows.values())

    @property
    def temporary(self) -> int:
        """The bytes of values that exist only while the program runs."""
        return self.gradients + self.activations + self.working

    @property
    def peak(self) -> int:
        return self.persistent + self.batch + self.results + self.temporary

    @property
    def rows(self) -> dict[str, int]:
        """All bytes by category, without empty categories."""
        rows = {
            **self.persistent_rows,
            "batch": self.batch,
            "results": self.results,
            "gradients": self.gradients,
            "activations kept": self.activations,
            "temporaries": self.working,
        }
        return {name: size for name, size in rows.items() if size}


def memory_plan(
    program: Graph | Schedule,
    held: Held | None = None,
    gradients: Iterable[TensorType] = (),
    *,
    donated: bool = True,
    widens: bool | None = None,
    on: str | None = None,
) -> MemoryPlan:
    """Returns the memory of one run of `program` on each device.

    `held` has the types of the arguments that stay between runs, by category ("weights",
    "optimizer"); the others are the batch. `gradients` are the types by which waiting gradients are
    told from waiting activations. `donated`: results take the memory of arguments of their type.
    `on` is the kind of device, "cpu" or "gpu"; None: the kind that programs run on. `widens`: the
    device multiplies narrow floats as f32; None: as this CPU does, and no GPU.
    """
    widens, gpu = _rules(widens, on)
    if isinstance(program, Schedule):
        p = of_schedule(program)
    else:
        p = of_graph(need_graph("memory_plan", program))
    held, gradients = _checked("memory_plan", held, gradients)
    rows, batch = _categories([n.type for n in p.inputs], held)
    free = Counter(n.type for n in p.inputs if donated)
    given = set(p.inputs)
    stays = given.intersection(p.results) if donated else set()
    free.subtract(n.type for n in stays)
    results = 0
    for n in p.results:  # a result that is returned twice has two buffers
        if n in stays:
            stays.discard(n)
        elif free[n.type] > 0:
            free[n.type] -= 1
        else:
            results += n.type.local_bytes
    live = Liveness(p, widens, fresh=not donated, gpu=gpu)
    mine, other = _Gradients(gradients).split_bytes(live.waiting())
    return MemoryPlan(rows, batch, results, mine, other, live.peak - mine - other)


def _rules(widens: bool | None, on: str | None) -> tuple[bool, bool]:
    """Returns (widens, gpu) as `Liveness` takes them, for a kind of device."""
    gpu = (platform() if on is None else on) == "gpu"
    return not (gpu or MULTIPLIES_BF16) if widens is None else widens, gpu


def _checked(
    name: str, held: object, gradients: object
) -> tuple[dict[str, list[TensorType]], list[TensorType]]:
    """Returns the caller's `held` and `gradients` as lists of types. Raises UsageError for anything
    else, since it would match no argument, and would count as batch."""
    fix = "give types: [w.type for w in weights.values()]; planned_memory takes tensors, too"

    def types(argument: str, value: object) -> list[TensorType]:
        made = list(value) if isinstance(value, Iterable) else [value]
        found = [t for t in made if isinstance(t, TensorType)]
        if not isinstance(value, Iterable) or len(found) < len(made):
            raise unfit(name, argument, value, fix)
        return found

    held = mapping(name, "what is held", {} if held is None else held, fix)
    return {kind: types(f"held[{kind!r}]", t) for kind, t in held.items()}, types(
        "gradients", gradients
    )


def _categories(live_types: Iterable[TensorType], held: Held) -> tuple[dict[str, int], int]:
    """Returns (bytes by category, bytes in no category)."""
    left = Counter(live_types)
    rows = {}
    for name, types in held.items():
        rows[name] = 0
        for t in types:
            if left[t] > 0:
                left[t] -= 1
                rows[name] += t.local_bytes
    return rows, sum(t.local_bytes * n for t, n in left.items())


class _Gradients:
    """Recognizes waiting gradients by their shapes; those of stacked layers may come one by one.
    Each is found once."""

    def __init__(self, types: Iterable[TensorType]) -> None:
        self.types = list(types)
        self.unmatched_elements = [t.size for t in self.types]  # elements not found yet

    def split_bytes(self, values: Iterable[tuple[TensorType, int, bool]]) -> tuple[int, int]:
        """Returns the bytes of `values`, as `Liveness.waiting` returns them: (of gradients, of
        others)."""
        mine = rest = 0
        for t, size, of_loop in values:
            if self.take(t, of_loop):
                mine += size
            else:
                rest += size
        return mine, rest

    def take(self, t: TensorType, of_loop: bool = False) -> bool:
        """Returns whether a value of type `t` is one of the gradients that are left, and counts it.
        A loop stacks gradients in the dtype of their computation, so any float dtype matches."""
        for i, g in enumerate(self.types):
            same = t.dtype is g.dtype or (of_loop and t.dtype.is_float)
            fits = same and t.rank > 0 and t.shape in (g.shape, g.shape[1:])
            if fits and self.unmatched_elements[i] >= t.size:
                self.unmatched_elements[i] -= t.size
                return True
        return False


# -- pipelines ------------------------------------------------------------------------------------
def stage_plans(
    schedule: Schedule,
    held: Held | None = None,
    gradients: Iterable[TensorType] = (),
    *,
    widens: bool | None = None,
    on: str | None = None,
) -> dict[Mesh, MemoryPlan]:
    """Returns the memory of each slice of the mesh that `schedule` runs on, in the order of the
    stages, at that slice's own peak.

    Between steps there are the buffers, whose lifetimes are in the schedule; a running step adds
    its internal buffers. The other arguments are as in `memory_plan`.
    """
    need_schedule("stage_plans", schedule)
    widens, gpu = _rules(widens, on)
    held, gradients = _checked("stage_plans", held, gradients)
    ranks: dict[Mesh, int] = {}
    last = len(schedule.steps)  # the rank of a slice without compute: a send has its source's stage
    for s in schedule.steps:
        m = s.graph.mesh
        if m is not None and m != schedule.mesh:
            ranks[m] = min(ranks.get(m, last), last if isinstance(s, Send) else s.stage)
    slices = sorted(ranks, key=ranks.__getitem__)
    if not slices and schedule.mesh is not None:
        slices = [schedule.mesh]
    # Steps with the same graph reuse the memory of the same arguments.
    reuse = {
        s.graph: {s.graph.outputs[w] for w in pairs.values()}
        for s, pairs in zip(schedule.steps, donation_aliases(schedule), strict=True)
    }
    inside = {g: Liveness(of_graph(g), widens, True, reuse=r, gpu=gpu) for g, r in reuse.items()}
    homes = _homes(schedule)
    return {m: _stage_plan(schedule, m, homes, inside, held, gradients) for m in slices}


def _homes(schedule: Schedule) -> list[Mesh | None]:
    """Returns the slice of each buffer, None for a buffer on all slices."""
    homes = [t.mesh if t.mesh != schedule.mesh else None for t in schedule.buffers]
    for step in schedule.steps:
        for b in step.writes:
            if schedule.buffers[b].mesh is None and step.graph.mesh != schedule.mesh:
                homes[b] = step.graph.mesh
    return homes


def _stage_plan(
    schedule: Schedule,
    mesh: Mesh,
    homes: list[Mesh | None],
    inside: Mapping[Graph, Liveness],
    held: Held,
    gradients: list[TensorType],
) -> MemoryPlan:
    """Returns the plan of the devices of `mesh`, one stage of a pipeline: the buffers on them, at
    the step with the highest need, by category."""
    types, out = schedule.buffers, set(schedule.outputs)
    on_stage = {b for b, home in enumerate(homes) if home in (None, mesh)}
    input_types = [types[b].on(mesh) if types[b].mesh is None else types[b]
             for b in schedule.inputs if b in on_stage]  # fmt: skip
    rows, batch = _categories(input_types, held)
    spans = _spans(schedule, on_stage)
    change = [0] * (len(schedule.steps) + 2)
    for b, (first, last) in spans.items():
        change[first] += types[b].local_bytes
        change[last + 1] -= types[b].local_bytes
    best: tuple[int, int, int] = (-1, 0, 0)
    now = 0
    for i, step in enumerate(schedule.steps):
        now += change[i]
        inside_bytes = inside[step.graph].peak if _runs_on(step, mesh, schedule.mesh) else 0
        best = max(best, (now + inside_bytes, -i, inside_bytes))
    at, inside_bytes = -best[1], best[2]
    step = schedule.steps[at]
    ends = zip((*step.reads, *step.writes), (*step.graph.inputs, *step.graph.outputs), strict=True)
    kept = by_rows(step.graph)
    busy = {b for b, n in ends if n not in kept}
    gradients_found = _Gradients(gradients)
    sizes = dict.fromkeys(("results", "gradients", "activations"), 0)
    working = inside_bytes
    for b, (first, last) in spans.items():
        if not first <= at <= last:
            continue
        size = types[b].local_bytes
        if b in out:
            sizes["results"] += size
        elif gradients_found.take(types[b]):
            sizes["gradients"] += size
        elif b in busy:
            working += size
        else:
            sizes["activations"] += size
    if inside_bytes:
        mine, other = gradients_found.split_bytes(inside[step.graph].waiting())
        sizes["gradients"] += mine
        sizes["activations"] += other
        working -= mine + other
    return MemoryPlan(
        rows, batch, sizes["results"], sizes["gradients"], sizes["activations"], working
    )


def _spans(schedule: Schedule, buffers: set[int]) -> dict[int, tuple[int, int]]:
    """Returns the lifetimes of the buffers in `buffers`, without inputs. A buffer that takes the
    memory of another begins when that ends; one that takes an argument's memory is left out. A
    value sent to devices that already hold its blocks is not copied: it extends the lifetime of its
    source."""
    spans = {b: schedule.lifetimes[b] for b in sorted(buffers - set(schedule.inputs))}
    same: dict[int, int] = {}
    for step in schedule.steps:
        if isinstance(step, Send):
            for a, b in zip(step.reads, step.writes, strict=True):
                if a in buffers and b in buffers:
                    same[b] = same.get(a, a)
    for b, a in same.items():
        last = spans.pop(b)[1]
        if a in spans:
            spans[a] = spans[a][0], max(spans[a][1], last)
    for i, (step, pairs) in enumerate(zip(schedule.steps, donation_aliases(schedule), strict=True)):
        for read, write in pairs.items():
            a, b = step.reads[read], step.writes[write]
            if b in spans and same.get(a, a) in schedule.inputs:
                del spans[b]
            elif b in spans:
                spans[b] = i + 1, spans[b][1]
    return spans


def _runs_on(step: Step, mesh: Mesh, whole: Mesh | None) -> bool:
    return step.graph.mesh in (None, mesh, whole)
