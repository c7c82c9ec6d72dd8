"""The autotuner: steps after tuning against the defaults, in turn, on the demo's GPT, a convnet and
experts.

Run it: `python bench/tune.py gpt --devices 2` prints one line of JSON: median seconds of both, the
ratio, what was chosen, the seconds of the search, and the seconds that a second start takes to find
the choice. The records lie in a folder of this run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
from gpt_step import ours as gpt_step
from nets import example
from peers import jax_gpt

import tessera as ts
from tessera import dist
from tessera.lang.jit.tuner import Tuner
from tessera.runtime.devices import start

RATE = 1e-3


Step = tuple[Callable[[], Any], Any]


def net_step(net: str, devices: int) -> Step:
    """Returns (a function that runs a step of "convnet" or "moe", data-parallel over `devices`; the
    compiled step)."""
    model, *batch = example(net)
    mesh = dist.Mesh(("dp",), shape={"dp": devices})
    plan = dist.strategy("data_parallel")
    dist.place(model, plan, mesh)
    given = [dist.place(ts.tensor(a), plan, mesh, kind="batch") for a in batch]
    opt = ts.optim.AdamW(lr=RATE, weight_decay=0.0)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, x: ts.Tensor, labels: ts.Tensor) -> Any:
        loss = model.loss(x, labels)
        weights = model.parameters()
        new, state = opt.update(weights, ts.grad(loss, weights, layout=plan), state)
        model.load_parameters(new)
        return loss, state

    box = {"state": opt.init(model.parameters(), plan)}

    def run() -> Any:
        loss, box["state"] = step(model, box["state"], *given)
        return loss

    return run, step


def step_of(net: str, devices: int) -> Step:
    if net != "gpt":
        return net_step(net, devices)
    return gpt_step(jax_gpt.GPTConfig(), {"dp": devices}, wait=False)


def timed_s(run: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    jax.block_until_ready(run().stored)
    return time.perf_counter() - begin_s


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("net", choices=("gpt", "convnet", "moe"))
    ap.add_argument("--devices", type=int, default=1)
    ap.add_argument("--rounds", type=int, default=15)
    ap.add_argument("--limit", type=float, default=45.0, help="seconds of the search")
    a = ap.parse_args()
    start(a.devices)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TESSERA_PROGRAM_CACHE"] = folder
        (plain, _), (tuned, step) = (step_of(a.net, a.devices) for _ in range(2))
        losses = [float(plain())]
        begin_s = time.perf_counter()
        with ts.tune(limit_s=a.limit):
            losses.append(float(tuned()))
        search_s = time.perf_counter() - begin_s
        times: dict[str, list[float]] = {"plain": [], "tuned": []}
        for _ in range(a.rounds):
            times["plain"].append(timed_s(plain))
            times["tuned"].append(timed_s(tuned))
        (again, _), spent_s = step_of(a.net, a.devices), [0.0]
        find = Tuner.recorded

        def recorded(self: Tuner) -> Any:
            begin_s = time.perf_counter()
            try:
                return find(self)
            finally:
                spent_s[0] += time.perf_counter() - begin_s

        with mock.patch.object(Tuner, "recorded", recorded), ts.tune(limit_s=a.limit):
            again()
        median = {k: statistics.median(v) for k, v in times.items()}
        print(json.dumps({
            "net": a.net, "devices": a.devices, "plain_s": median["plain"],
            "tuned_s": median["tuned"], "ratio": median["plain"] / median["tuned"],
            "chosen": next(dict(t.choices) for t in step.timings if t.chosen),
            "timed": len(step.timings), "limit_s": a.limit,
            "search_s": search_s, "again_s": spent_s[0],
            "losses": losses, "timings": [str(t) for t in step.timings],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
