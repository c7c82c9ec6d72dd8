"""Gradient accumulation and pipelines in two source trees, compared in one run.

Each tree has a worker process; the workers take their steps in turn. Measured for each: seconds of
a step, of recording and of the first two calls (the first compiles the recording; a pipeline
records again when its weights lie on their stages), the calls of the user's function, and memory:
of the process, of the memory plan, and of one device by XLA's analysis. Run it: `python
bench/microbatches.py --src old/src --src new/src` prints one line of JSON per case, with medians
and the ratios of the second tree to the first; the ratios of processor time are less disturbed by a
busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from processor import kind
from turns import Steps, Workers, apart, in_turn, ratio, serve, timed

HERE = Path(__file__).resolve()
COUNT, ROWS, TOKENS, VOCAB = 8, 16, 256, 4096
SAME, LIMIT_S = 1e-3, 300.0  # the largest difference of losses; the limit of a worker
# No program of an earlier process is reused.
FRESH = {"TESSERA_PROGRAM_CACHE": "off", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
A_CORE_EACH = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}  # one core per stage's device

CALLS: list[None] = []  # one item per run of the user's function
Case = tuple[Any, tuple[Any, ...], Callable[[], float]]  # a jitted step, its arguments, one run


def gpt(dp: int, zero: int = 0, ignored: bool = False, layers: int = 4, d: int = 256) -> Case:
    """AdamW over microbatches; with `ignored` most labels of the first rows are ignored."""
    import numpy as np

    import tessera as ts
    from tessera import dist, nn
    from tessera.train.accumulate import accumulated

    mesh, plan = dist.Mesh(("dp",), devices=dp), dist.strategy("data_parallel")
    if zero:
        plan = dist.strategy("zero_redundancy_optimizer", stage=zero)
    ts.seed(0)
    config = nn.GPTConfig(vocab=VOCAB, seq=TOKENS, d=d, layers=layers, heads=8)
    model = dist.place(nn.GPT(config), plan, mesh)
    opt = ts.optim.AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    box = {"state": opt.init(model.parameters(), plan)}
    rng = np.random.default_rng(0)
    stream = rng.integers(0, VOCAB, (ROWS, TOKENS + 1), dtype=np.int32)
    ids, labels = stream[:, :-1], stream[:, 1:].copy()
    if ignored:
        labels[rng.random(labels.shape) > (np.arange(ROWS)[:, None] + 1) / ROWS] = -100
    batch = dist.place({"ids": ids, "labels": labels}, plan, mesh, kind="batch")

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, batch: Any) -> Any:
        def loss_of(part: Any, weights: Any) -> Any:
            CALLS.append(None)
            return model.loss(part["ids"], part["labels"])

        weights = model.parameters()
        loss, grads = accumulated(loss_of, batch, weights, COUNT)
        new, state = opt.update(weights, grads, state)
        model.load_parameters(new)
        return loss, state

    def run() -> float:
        loss, box["state"] = step(model, box["state"], batch)
        for w in model.parameters().values():
            w.stored.block_until_ready()
        return float(loss)

    return step, (model, box["state"], batch), run


def piped(layers: int, width: int, rows: int) -> Case:
    """MLP blocks on two stages, 1F1B over microbatches, with gradient descent."""
    import pipeline as blocks

    import tessera as ts
    from tessera import dist, pipeline

    def first(w: Any, x: Any) -> Any:
        CALLS.append(None)
        return blocks.block(0)(w, x)

    parts = [first, *(blocks.block(k) for k in range(1, layers))]
    mesh = dist.Mesh(("pp",), devices=2)
    model = pipeline.compose(2, parts, mesh=mesh, schedule="1F1B", microbatches=COUNT)
    step = blocks.step_of(model)
    w, *data = blocks.values(Namespace(layers=layers, width=width, rows=rows))
    x, y = map(ts.tensor, data)
    box = {"w": w}

    def run() -> float:
        loss, box["w"] = step(box["w"], x, y)
        value = loss.item()
        for t in box["w"].values():
            t.stored.block_until_ready()
        return float(value)

    return step, (w, x, y), run


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: gpt(1),
    "gpt dp=2": lambda: gpt(2),
    "gpt ignored labels": lambda: gpt(1, ignored=True),
    "gpt dp=2 ZeRO-3": lambda: gpt(2, zero=3),
    "gpt small": lambda: gpt(2, layers=1, d=64),
    "pipeline": lambda: piped(8, 512, 2048),
    "pipeline tiny": lambda: piped(2, 8, 16),  # tensors that take no time: a step is dispatch
}


def work(name: str) -> None:
    """One tree's worker: measures the recording and the first two calls, then one step per line."""
    from few_devices import start_few
    from gpt_step import our_memory

    from tessera.cost.memory import memory_plan

    start_few(2)
    step, args, run = CASES[name]()
    many = 40 if name == "pipeline tiny" else 1
    record = timed(lambda: (step.plan(*args), float(len(CALLS)))[1])
    taken = {"record": record(), "first": timed(run)(), "second": timed(run)()}
    about = {f"{k}_s": t.wall_s for k, t in taken.items()}
    about |= {f"{k}_cpu_s": t.cpu_s for k, t in taken.items()}
    about |= {"calls": taken["record"].value, "calls_in_all": len(CALLS)}
    schedule = step.schedule
    about |= {"steps": len(schedule.steps), "planned_peak_mb": memory_plan(schedule).peak / 1e6}
    about |= our_memory(step) if name.startswith("gpt") else {}
    serve(lambda: [run() for _ in range(many)][-1], None, **about, many=many)


def compared(name: str, trees: dict[str, str], rounds: int, starts: int) -> Any:
    """The measurements of each tree in one case, whose workers are started `starts` times."""
    all_steps = {k: Steps() for k in trees}
    about: dict[str, list[dict[str, float]]] = {k: [] for k in trees}
    for turn in range(starts):
        with ExitStack() as stack:
            running = {}
            for k in list(trees)[:: -1 if turn % 2 else 1]:
                env = {**FRESH, "PYTHONPATH": trees[k]}
                env |= A_CORE_EACH if name.startswith("pipeline") else {}
                worker = Workers([[str(HERE), "--serve", name]], LIMIT_S, env)
                running[k] = stack.enter_context(worker)
                about[k].append(running[k].about)
            found = in_turn({k: running[k].step for k in trees}, rounds, warm=1)
        apart(*found.values(), at_most=SAME)
        for k, steps in found.items():
            all_steps[k].wall_s += steps.wall_s
            all_steps[k].cpu_s += steps.cpu_s
            all_steps[k].peak_mb = max(all_steps[k].peak_mb, steps.peak_mb)
    a, b = (summary(all_steps[k], about[k]) for k in trees)
    ratios = {k: b[k] / a[k] for k in a if a[k]}
    ratios["step_s"] = ratio(all_steps["B"].wall_s, all_steps["A"].wall_s)
    ratios["step_cpu_s"] = ratio(all_steps["B"].cpu_s, all_steps["A"].cpu_s)
    return {"case": name, "processor": kind(), "A": a, "B": b, "ratio": ratios}


def summary(s: Steps, about: list[dict[str, float]]) -> dict[str, float]:
    """Medians over all starts."""
    found = {k: statistics.median(a[k] for a in about) for k in about[0]}
    many = found.pop("many")
    step_cpu_s = statistics.median(s.cpu_s) / many
    return {"step_s": s.median_s / many, "step_cpu_s": step_cpu_s, "peak_mb": s.peak_mb, **found}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--src", action="append", default=[], help="a tree's src folder; given twice")
    ap.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    ap.add_argument("--rounds", type=int, default=8, help="timed steps of each start")
    ap.add_argument("--starts", type=int, default=2, help="processes of each tree, one by one")
    ap.add_argument("--serve", default="", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.serve:
        work(a.serve)
        return
    trees = {k: str(Path(s).resolve()) for k, s in zip("AB", a.src)}
    if len(a.src) != 2 or not all((Path(t) / "tessera").is_dir() for t in trees.values()):
        ap.error("give --src twice, each the folder that holds tessera/")
    for name in a.only:
        print(json.dumps(compared(name, trees, a.rounds, a.starts)), flush=True)


if __name__ == "__main__":
    main()
