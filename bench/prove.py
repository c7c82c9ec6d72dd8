"""Proof of reproducible bits: one logical program on many placements.

`make prove` trains small models (dropout, clipping, AdamW, a schedule) on logical meshes: a GPT
with experts over dp in microbatches on dp × pp × tp; a plain one on dp × tp, also with a dp that
does not divide tp's share of a dim; others with experts on dp × ep, or with sequences over cp. Each
runs unfolded, and folded axis by axis down to one device, with ZeRO stages, step by step, with
overlap and buckets, with recomputation, by several pipeline schedules, in one process and in
several. It prints the SHA-256 of the weights and of all losses in full precision, in f32 and in
bf16, and fails unless each program has one of each.

Then random programs (bench/generated.py): one hash each over all placements, or one reason of a
refusal.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import typer

os.environ.setdefault("TESSERA_DETERMINISTIC", "1")

import generated

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.core.context import replaced
from tessera.core.options import ScheduleOptions

BATCH, SEQ, VOCAB, MICROBATCHES = 8, 16, 64, 4
BUCKETS = ScheduleOptions(overlap=True, bucket_bytes=4096)
SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "backwards")


@dataclass(frozen=True)
class Program:
    """A logical program: its mesh and its model's arguments. `experts` are split over the axis
    `over`."""

    mesh: str
    experts: int = 0
    over: str = "ep"
    capacity: float | None = None
    context: str | None = None

    @property
    def axes(self) -> list[str]:
        return [part.split("=")[0] for part in self.mesh.split(",")]


PROGRAMS = {
    "whole": Program("dp=2,pp=2,tp=2", experts=4, over="dp", capacity=1.25),
    "dense": Program("dp=2,tp=2"),
    "uneven": Program("dp=3,tp=2"),
    "experts": Program("dp=2,ep=2", experts=4, capacity=1.25),
    "dropless": Program("dp=2,ep=2", experts=4),
    "ring": Program("dp=2,cp=2", context="ring"),
}


@dataclass(frozen=True)
class Placement:
    """A program's placement and executor, which must not affect its bits."""

    program: str
    onto: str
    zero: int = 0
    executor: str = "fused"
    schedule: ScheduleOptions = ScheduleOptions()  # noqa: RUF009  # it is frozen
    recompute: bool = False
    pipe: str = ""  # the schedule of a pipeline
    processes: int = 1

    def __str__(self) -> str:
        said = [f"{self.program:8} {self.onto:14}", f"ZeRO-{self.zero}"]
        said.append(self.pipe or self.schedule.text() or self.executor)
        said += ["recompute"] * self.recompute
        return "  ".join(said + [f"{self.processes} processes"] * (self.processes > 1))


Row = tuple[Placement, str]  # and the dtype


def folds(program: str) -> list[str]:
    """The unfolded mesh, then folds of some axes, then the fold of all axes."""
    sizes = dist.Mesh.parse(PROGRAMS[program].mesh).sizes
    return [
        ",".join(f"{a}={n}" for a, n in zip(sizes, onto, strict=True))
        for onto in itertools.product(*((n, 1) for n in sizes.values()))
    ]


def placements(small: bool) -> Iterator[Placement]:
    if small:
        yield Placement("whole", "dp=2,pp=2,tp=2", pipe="1F1B")
        yield Placement("whole", "dp=1,pp=1,tp=1", 2, pipe="backwards")
        yield Placement("dense", "dp=2,tp=2", 3, schedule=BUCKETS)
        yield Placement("dense", "dp=1,tp=1", 1, recompute=True)
        yield Placement("uneven", "dp=3,tp=2")
        yield Placement("uneven", "dp=3,tp=2", 3)
        yield Placement("experts", "dp=2,ep=2")
        yield Placement("experts", "dp=1,ep=1", 3, recompute=True)
        yield Placement("dense", "dp=2,tp=2", 1, processes=2)
        return
    for count in (2, 4):
        yield Placement("dense", "dp=2,tp=2", 3, processes=count)
        yield Placement("experts", "dp=2,ep=2", 1, processes=count)
        yield Placement("ring", "dp=2,cp=2", 2, processes=count)
        yield Placement("whole", "dp=2,pp=2,tp=2", 3, pipe="ZB-H1", processes=count)
    yield Placement("whole", "dp=1,pp=2,tp=1", pipe="1F1B", processes=2)
    for i, onto in enumerate(folds("whole")):
        for k, zero in enumerate((0, 3)):
            yield Placement("whole", onto, zero, pipe=SCHEDULES[(2 * i + k) % len(SCHEDULES)])
        yield Placement("whole", onto, 1 + i % 2, pipe="1F1B", recompute=True)
    for onto in folds("dense"):
        for zero in (0, 1, 2, 3):
            yield Placement("dense", onto, zero)
        yield Placement("dense", onto, 3, "stepped")
        yield Placement("dense", onto, 2, schedule=BUCKETS)
        yield Placement("dense", onto, 1, recompute=True)
    for onto in folds("uneven"):
        for zero in (0, 1, 2, 3):
            yield Placement("uneven", onto, zero)
        yield Placement("uneven", onto, 3, "stepped")
    for onto in folds("experts"):
        yield Placement("experts", onto, 3)
        yield Placement("experts", onto, 1, recompute=True)
        yield Placement("dropless", onto, 1)
    for i, onto in enumerate(folds("ring")):
        yield Placement("ring", onto, i, recompute=i % 2 == 1)


def in_bf16(p: Placement) -> bool:
    """Returns whether a placement runs in bf16 too."""
    if p.program == "whole":
        return p.recompute
    return p.program not in ("dense", "uneven") or p.recompute or p.zero in (0, 3)


def backwards(rank: int, ranks: int, microbatches: int) -> list[str]:
    """A user-defined pipeline schedule: the last microbatch's backward runs first."""
    many = range(microbatches)
    return [f"{rank}F{m}" for m in many] + [f"{rank}B{m}" for m in reversed(many)]


def plan_of(p: Placement) -> Any:
    program, plan = PROGRAMS[p.program], dist.strategy("data_parallel")
    if "tp" in program.axes:
        plan = plan + dist.strategy("tensor_parallel")
    if program.experts:
        rules = [(r"(up|gate|down)$", -3)]
        plan = plan + dist.strategy("tensor_parallel", program.over, rules=rules)
    if p.zero:
        plan = plan + dist.strategy("zero_redundancy_optimizer", stage=p.zero)
    return plan


def trained(p: Placement, steps: int, dtype: str) -> tuple[str, str]:
    """Returns (hash of the weights, hash of the losses) after `steps` steps."""
    program = PROGRAMS[p.program]
    mesh, plan = dist.Mesh.parse(program.mesh).fold(p.onto), plan_of(p)
    ts.seed(7)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (steps, BATCH, SEQ + 1)).astype(np.int32)
    routed: Any = (
        {"experts": program.experts, "capacity": program.capacity} if program.experts else {}
    )
    config = nn.GPTConfig(
        VOCAB, SEQ, 32, 2, 4, positions="rotary", norm="rms", dropout=0.1, loop=False,
        remat=p.recompute, context=program.context, stacked=not p.pipe, **routed,
    )  # fmt: skip
    model = dist.place(nn.GPT(config), plan, mesh)
    rate = optim.warmup_cosine(1e-2, 2, max(steps, 2) + 1, end=1e-3, start=1e-3)
    optimizer = optim.AdamW(rate, weight_decay=0.1)
    state = optimizer.init(model.parameters(), plan)

    def features(model: Any, ids: Any) -> Any:
        return model.features(ids)

    run = features
    if p.pipe:
        order: Any = backwards if p.pipe == "backwards" else p.pipe
        run = pipeline.run(("pp",), order, MICROBATCHES, mesh=mesh)(features)

    @ts.jit
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        with ts.autocast(ts.bf16, enabled=dtype == "bf16"):
            loss = model.loss_of(run(model, ids), labels)
        weights = model.parameters()
        grads, _ = optim.clip_by_global_norm(ts.grad(loss, weights, layout=plan), 0.5)
        weights, new = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    losses = hashlib.sha256()
    for row in tokens:
        batch = dist.place((row[:, :-1], row[:, 1:]), plan, mesh, kind="batch")
        losses.update(step(model, state, *batch).numpy().tobytes())
    found = hashlib.sha256()
    for name, w in sorted(model.parameters().items()):
        found.update(name.encode() + dist.place(w, mesh=mesh).numpy().tobytes())
    return found.hexdigest(), losses.hexdigest()


def in_processes(p: Placement, steps: int, dtype: str) -> tuple[str, str]:
    """The hashes that each of its processes prints; "DIFFER" and all of them if they differ."""
    devices = dist.Mesh.parse(p.onto).size // p.processes
    code = "import sys; sys.path.insert(0, sys.argv[1]); from prove import *; "
    code += f"print('hashes', *hashes({replace(p, processes=1)!r}, {steps}, {dtype!r}))"
    run = ["-m", "tessera.launch.cli", "run", "-n", p.processes, "--devices", devices]
    command = [sys.executable, *run, sys.executable, "-c", code, Path(__file__).resolve().parent]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"hashes (\w{64}) (\w{64})", done.stdout)
    return found[0] if found == found[:1] * p.processes else ("DIFFER", str(sorted(found)))


def hashes(p: Placement, steps: int, dtype: str) -> tuple[str, str]:
    if p.processes > 1:
        return in_processes(p, steps, dtype)
    with replaced(executor=p.executor, schedule=p.schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore", pipeline.PipelineWarning)  # the warning that ranks idle
        return trained(p, steps, dtype)


def timed(rows: list[Row], steps: int) -> list[tuple[Row, tuple[str, str], float]]:
    """Returns each of `rows` with its hashes and seconds."""
    found = []
    for p, dtype in rows:
        start = time.perf_counter()
        pair = hashes(p, steps, dtype)
        found.append(((p, dtype), pair, time.perf_counter() - start))
    return found


def main(
    steps: int = typer.Option(20, min=1),
    small: bool = False,
    dtype: str = typer.Option("both", help="f32, bf16 or both"),
    only: str = typer.Option("", help="rows that contain this"),
    jobs: int = typer.Option(2, min=1, help="processes"),
    drawn: int = typer.Option(48, min=0, help="programs that are drawn"),
) -> None:
    """Prints the table. Returns the exit status, 1 if hashes differ."""
    dtypes = ("f32", "bf16") if dtype == "both" else (dtype,)
    every = [(p, d) for p in placements(small) for d in dtypes if small or d == "f32" or in_bf16(p)]
    rows = [(p, d) for p, d in every if only in f"{p}  {d}"]
    print(f"{steps} steps, {len(rows)} runs")
    print(f"{'placement':66} {'':5} {'weights':18} {'losses':18} seconds")
    # Schedules of a pipeline on one fold share compiled programs, so one process runs them all.
    groups: dict[object, list[Row]] = {}
    for p, d in rows:
        alone = not p.pipe or p.processes > 1
        groups.setdefault((p, d) if alone else (p.program, p.onto, d), []).append((p, d))
    seen: dict[tuple[str, str], list[tuple[str, str]]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(timed, g, steps) for g in groups.values()]):
            for (p, d), (weights, losses), took_s in done.result():
                seen.setdefault((p.program, d), []).append((weights, losses))
                print(f"{p!s:66} {d:5} {weights[:16]:18} {losses[:16]:18} {took_s:.1f}", flush=True)
    print(f"\n{'logical program':26} {'':5} {'placements':11} mesh_invariant")
    for (program, d), pairs in sorted(seen.items()):
        different = sorted(set(pairs))
        said = f"{different[0][0][:16]} {different[0][1][:16]}"
        said = said if len(different) == 1 else f"{len(different)} hashes"
        print(f"{program + '  ' + PROGRAMS[program].mesh:26} {d:5} {len(pairs):<11} {said}")
    failed = any(len(set(pairs)) > 1 for pairs in seen.values())
    seeds = range(drawn) if only in "drawn" else ()
    few = [s for s in generated.QUICK if s in seeds] if small else seeds
    sys.exit(not drawn_agree(few, 3 if small else 0, jobs) or failed)


def drawn_agree(seeds: Sequence[int], places: int, jobs: int) -> bool:
    """Returns whether each program drawn with `seeds` has one hash, or one refusal, over `places`
    placements (0: all). Prints a row for each."""
    if not seeds:
        return True
    print(f"\n{len(seeds)} drawn programs")
    agree = True
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=8) as pool:
        runs = {pool.submit(all_of, seed, places): seed for seed in seeds}
        for done in as_completed(runs):
            found, program = done.result(), generated.drawn(runs[done])
            different = sorted(set(found.values()))
            one = len(different) == 1
            said = different[0] if different[0].startswith("refused") else different[0][:16]
            print(f"{said if one else 'DIFFER':18} {len(found):3} placements {program}", flush=True)
            for where, hash in () if one else found.items():
                print(f"    {where:44} {hash[:100]}", flush=True)
            agree = agree and one
    return agree


def all_of(seed: int, places: int) -> dict[str, str]:
    """The hash or the refusal of a random program at each of its placements."""
    program = generated.drawn(seed)
    return {str(s): generated.trained(program, s) for s in generated.spots(program, places)}


if __name__ == "__main__":
    typer.run(main)
