"""The programs that are compiled for GPUs ahead of time: training steps on one device and on eight.

None of them runs, so their sizes are those of real work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.cost import memory
from tessera.ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule
from tessera.runtime.ahead_of_time import Compiled, compiled, described
from tessera.runtime.compiled_text import Text, read
from tessera.show.plan_view import planned_memory, planned_stages

OVERLAP = {"overlap": True}
WIDTH, LAYERS, HEADS, VOCAB, SEQ, ROWS = 1024, 4, 16, 16384, 1024, 8


def layouts(text: str) -> Any:
    """The strategies of "zero3+tp", each over its axis."""
    parts = []
    for word in text.split("+"):
        if word.startswith("zero"):
            parts.append(dist.strategy("zero_redundancy_optimizer", stage=int(word[4:])))
        else:
            name = {"dp": "data_parallel", "tp": "tensor_parallel", "ep": "expert_parallel"}[word]
            parts.append(dist.strategy(name))
    return sum(parts[1:], start=parts[0])


@dataclass(frozen=True)
class Case:
    """A GPT's training step in bf16 with AdamW and donated state, on `mesh` by `plan`."""

    mesh: str
    plan: str
    model: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 0

    @property
    def devices(self) -> int:
        return dist.Mesh.parse(self.mesh).size

    @property
    def is_merged(self) -> bool:
        """Returns whether the engine may merge its collectives: nobody has chosen their order."""
        return not self.how and not self.plan.startswith("zero3")

    def record(self) -> tuple[Any, dict[str, Any]]:
        """Returns (the jitted step with a plan, what it holds)."""
        mesh, plan = dist.Mesh.parse(self.mesh), layouts(self.plan)
        sizes = {"positions": "rotary", "norm": "rms", "stacked": False, **self.model}
        config = nn.GPTConfig(VOCAB, SEQ, WIDTH, LAYERS, HEADS, **sizes)
        ids = np.zeros((ROWS * max(1, mesh.sizes.get("dp", 1)), SEQ), np.int32)
        loss_fn: Any = nn.GPT.loss
        if self.microbatches:
            loss_fn = pipeline.run(("pp",), "1F1B", self.microbatches, mesh=mesh)(loss_fn)
        optimizer = optim.AdamW(1e-3, weight_decay=0.1)

        def train_step(model: nn.GPT, state: dict[str, Any], ids: Any, labels: Any) -> Any:
            loss = loss_fn(model, ids, labels)
            weights = model.parameters()
            grads = ts.grad(loss, weights, layout=plan)
            grads, norm = optim.clip_by_global_norm(grads, 1.0)
            weights, new = optimizer.update(weights, grads, state)
            model.load_parameters(weights)
            state.update(new)
            return {"loss": loss, "grad_norm": norm}

        step: Any = ts.jit(donate=("model", "state"))(train_step)
        if self.how:
            options: Any = ts.schedule  # a module that is called
            step = options(**self.how)(step)
        with ts.autocast("bf16"):
            model = dist.place(nn.GPT(config), plan, mesh)
            batch = dist.place((ids, ids), plan, mesh, kind="batch")
            state = optimizer.init(model.parameters(), plan)
            with described("h100", mesh.size):
                step.plan(model, state, *batch)
                if self.microbatches:
                    model = loss_fn.place(model)
                    state = optimizer.init(model.parameters(), plan)
                    step.plan(model, state, *batch)
        weights = model.parameters()
        gradients = {name: plan.gradient(name, t.type) for name, t in weights.items()}
        return step, {"weights": weights, "gradients": gradients, "optimizer": state}


CASES = {
    "GPT, one device": Case("dp=1", "dp"),
    "GPT, recompute": Case("dp=1", "dp", {"remat": True}),
    "GPT, dp": Case("dp=8", "dp"),
    "GPT, ZeRO-3, prefetch": Case("dp=8", "zero3", how=OVERLAP | {"prefetch": 1}),
    "GPT, tp, sequence parallel": Case("tp=8", "tp", {"sequence_parallel": "tp"}, OVERLAP),
    "GPT, ring": Case("dp=2,cp=4", "dp", {"context": "ring"}),
    "GPT, experts": Case("dp=2,ep=4", "dp+ep", {"experts": 8}, OVERLAP),
    "GPT, pipeline": Case("pp=4,dp=2", "dp", microbatches=8),
}


# -- what is compared -----------------------------------------------------------------------------
Count = Counter[tuple[str, int]]


@dataclass(frozen=True)
class Made:
    """A case compiled for a chip: the compiled programs, and the facts in the text of each.

    `peaks` are those of the whole mesh, or of each stage, in bytes: (planned, by the compiler).
    `temporary` is the largest number of bytes of temporaries, by the compiler.
    """

    schedule: Schedule
    parts: tuple[tuple[Compiled, Text], ...]
    peaks: tuple[tuple[int, int], ...]
    temporary: int


@cache
def recorded(name: str) -> tuple[Any, dict[str, Any]]:
    return CASES[name].record()


@cache
def made(name: str, chip: str) -> Made:
    step, held = recorded(name)
    program = step.programs[0]
    s: Schedule = program.schedule
    with described(chip, CASES[name].devices):
        parts = tuple((c, read(c.text)) for c in compiled(program))
        plans = planned_stages(s, held) if s.is_staged else [planned_memory(s, held)]
        theirs = stage_peaks(s, [c for c, _ in parts]) if s.is_staged else [parts[0][0].peak]
    peaks = tuple((plan.peak, peak) for plan, peak in zip(plans, theirs, strict=True))
    return Made(s, parts, peaks, max(c.bytes["temporary"] for c, _ in parts))


def stage_peaks(s: Schedule, parts: list[Compiled]) -> list[int]:
    """Returns the peak of each stage: the buffers between its steps, by the schedule, and the
    compiler's temporaries of the step that runs."""
    inside: dict[Any, Any] = {step.graph: SimpleNamespace(peak=0, waiting=list) for step in s.steps}
    for part in parts:
        for i in part.steps:
            inside[s.steps[i].graph].peak = part.bytes["temporary"]
    homes = memory._homes(s)
    slices = memory.stage_plans(s)
    return [memory._stage_plan(s, m, homes, inside, {}, []).peak for m in slices]


def collectives(s: Schedule) -> Iterator[tuple[Collective, int, int]]:
    """Yields the collectives of `s` with the number of runs, and of the steps of work that may run
    meanwhile: those after it that stand before the first step that waits for it."""
    for i, step in enumerate(s.steps):
        match step:
            case Collective():
                waiting = (j for j in range(i + 1, len(s.steps)) if i in s.waits[j])
                end = next(waiting, len(s.steps))
                yield step, 1, sum(isinstance(x, Compute) for x in s.steps[i + 1 : end])
            case Loop():
                for inner, times, work in collectives(step.body):
                    yield inner, times * step.times, work
            case Region():
                yield from collectives(step.body)
            case _:
                pass


def size_of(step: Collective) -> int:
    """Returns the bytes of its results on a device."""
    return sum(n.type.local_bytes for n in step.nodes)


def planned(s: Schedule, overlapping: bool = False) -> Count:
    """Counts the collectives of `s` by kind and bytes; only those that may overlap with work."""
    found = Count()
    for step, times, work in collectives(s):
        if work or not overlapping:
            found[step.op, size_of(step)] += times
    return found


def in_text(text: Text, overlapping: bool = False) -> Count:
    """Counts the collectives of a text in the same way."""
    found = Count()
    for x in text.collectives:
        if x.overlaps or not overlapping:
            found[x.kind, x.bytes] += x.times
    return found


def by_kind(count: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Returns the bytes of each kind."""
    found: dict[str, int] = {}
    for (kind, size), times in count.items():
        found[kind] = found.get(kind, 0) + size * times
    return found


def ahead(spans: list[tuple[int, int]]) -> list[int]:
    """Returns for each gathered weight, given as (start, first use), how many earlier ones are not
    yet used when it starts."""
    return [sum(used > start for _, used in spans[:k]) for k, (start, _) in enumerate(spans)]


def gathers_in_text(text: Text) -> list[tuple[int, int]]:
    return [(x.start, x.used) for x in text.collectives if x.kind == "all_gather"]


def gathers_planned(s: Schedule) -> list[tuple[int, int, bool]]:
    """Returns (step, first step that reads it, whether it is gathered again) of each gather."""
    found = []
    for i, step in enumerate(s.steps):
        if isinstance(step, Collective) and step.op == "all_gather":
            readers = (
                j for j in range(i + 1, len(s.steps)) if {*step.writes} & {*s.steps[j].reads}
            )
            found.append((i, next(readers), bool(step.nodes[0].attrs.get("again"))))
    return found
