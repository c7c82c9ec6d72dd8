"""A pipelined step against the bubble limit, and against PyTorch's pipelines.

A stack of MLP blocks of a GPT's shape on 2 stages, 8 microbatches, 1F1B, with gradient descent
inside the step. The limit is the best of two devices with one core each: half of the step on one
device of one core (`--one`, which is pinned to it), times the bubble's (m+p-1)/m. Run it: `python
bench/pipeline.py` prints one line of JSON; `--small` measures the cost of each dispatched step, on
tensors that take no time. `tessera run -n 2 bench/pipeline.py` has a process per stage, and does
not measure the one device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# A device is a core; the peer's processes have one each as well.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import numpy as np
from few_devices import start_few

import tessera as ts
from tessera import dist, pipeline

RANKS, COUNT = 2, 8


def block(k: int) -> Callable[..., Any]:
    def run(w: dict[str, Any], x: Any) -> Any:
        return w, x + ts.tanh(x @ w[f"up{k}"]) @ w[f"down{k}"]

    return run


def step_of(model: Callable[..., Any]) -> Any:
    def step(weights: dict[str, Any], x: Any, y: Any) -> Any:
        out = model(weights, x)[1]
        loss = ((out - y) ** 2).mean()
        grads = ts.grad(loss, weights)
        return loss, {k: w - 0.01 * grads[k] for k, w in weights.items()}

    return ts.jit(step)


def values(a: argparse.Namespace) -> tuple[dict[str, Any], Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    w = {}
    for k in range(a.layers):
        w[f"up{k}"] = normal(a.width, 4 * a.width) / a.width**0.5
        w[f"down{k}"] = normal(4 * a.width, a.width) / (4 * a.width) ** 0.5
    return w, normal(a.rows, a.width), normal(a.rows, a.width)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--width", type=int, default=512)
    ap.add_argument("--rows", type=int, default=2048)
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--small", action="store_true")
    ap.add_argument("--one", action="store_true")
    a = ap.parse_args()
    if a.one:  # before the engine counts the cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if a.small:
        a.layers, a.width, a.rows, a.rounds = 2, 8, 16, 60
    start_few(RANKS)
    parts = [block(k) for k in range(a.layers)]

    def plain(w: Any, x: Any) -> Any:
        out: Any = (w, x)
        for part in parts:
            out = part(*out)
        return out

    mesh = dist.Mesh(("pp",), devices=RANKS)
    model = pipeline.compose(RANKS, parts, mesh=mesh, schedule="1F1B", microbatches=COUNT)
    runs: dict[str, Any] = {"one": step_of(plain), "pipe": step_of(model)}
    if dist.process_count() > 1:
        del runs["one"]
    if a.one:
        del runs["pipe"]
    w, x, y = values(a)
    x, y = ts.tensor(x), ts.tensor(y)
    rest: dict[str, Any] = dict.fromkeys(runs, w)
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    cores: list[float] = []
    for turn in range(a.rounds + 3):
        for name, run in runs.items():
            begin, worked = time.perf_counter(), time.process_time()
            loss, rest[name] = run(rest[name], x, y)
            value = loss.item()
            for t in rest[name].values():
                t.stored.block_until_ready()
            if turn > 2:
                times[name].append(time.perf_counter() - begin)
                if name == "one":
                    cores.append((time.process_time() - worked) / times[name][-1])
                losses[name].append(value)
    if a.one:
        print(json.dumps({"one_core_s": statistics.median(times["one"])}))
        return
    pipe = statistics.median(times["pipe"])
    if dist.process_count() > 1:
        if dist.process_index() == 0:
            print(json.dumps({"pipeline_s": pipe, "pipeline_min_s": min(times["pipe"])}))
        return
    one = statistics.median(times["one"])
    print(json.dumps({
        "layers": a.layers, "width": a.width, "rows": a.rows,
        "ranks": RANKS, "microbatches": COUNT, "schedule": "1F1B",
        "one_device_s": one, "one_device_cores": statistics.median(cores),
        "pipeline_s": pipe, "pipeline_min_s": min(times["pipe"]),
        "share": (COUNT + RANKS - 1) / COUNT / RANKS,
        "steps": len(model.schedule.steps),
        "a_step_us": pipe / len(model.schedule.steps) * 1e6,
        "loss_difference": max(abs(p - q) for p, q in zip(losses["one"], losses["pipe"])),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
