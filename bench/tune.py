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

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import numpy as np
from gpt_step import ours as gpt_step
from nets import CONVNET, MOE, ConvNet, Mixed
from peers import jax_gpt

import tessera as ts
from tessera import dist
from tessera.lang.jit.tuner import Tuner
from tessera.runtime.devices import start

RATE = 1e-3


def net_step(net: str, devices: int) -> Callable[[], Any]:
    """Returns a function that runs a step of "convnet" or "moe", data-parallel over `devices`."""
    ts.seed(0)
    rng = np.random.default_rng(0)
    mesh = dist.Mesh(("dp",), shape={"dp": devices})
    if net == "convnet":
        model: Any = ConvNet()
        x: Any = rng.normal(size=(CONVNET.batch, 3, 32, 32)).astype(np.float32)
        labels = rng.integers(0, CONVNET.classes, CONVNET.batch)
    else:
        model = Mixed()
        x = rng.integers(0, MOE.vocab, (MOE.batch, MOE.seq))
        labels = rng.integers(0, MOE.vocab, (MOE.batch, MOE.seq))
    plan = dist.strategy("data_parallel")
    dist.place(model, plan, mesh)
    given = [dist.place(ts.tensor(a), plan, mesh, kind="batch") for a in (x, labels)]
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

    run.step = step  # type: ignore[attr-defined]
    return run


def step_of(net: str, devices: int) -> Callable[[], Any]:
    if net != "gpt":
        return net_step(net, devices)
    run, compiled = gpt_step(jax_gpt.GPTConfig(), {"dp": devices}, wait=False)
    run.step = compiled  # type: ignore[attr-defined]
    return run


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
        plain, tuned = step_of(a.net, a.devices), step_of(a.net, a.devices)
        losses = [float(plain())]
        begin_s = time.perf_counter()
        with ts.tune(limit_s=a.limit):
            losses.append(float(tuned()))
        search_s = time.perf_counter() - begin_s
        times: dict[str, list[float]] = {"plain": [], "tuned": []}
        for _ in range(a.rounds):
            times["plain"].append(timed_s(plain))
            times["tuned"].append(timed_s(tuned))
        again, spent_s = step_of(a.net, a.devices), [0.0]
        find = Tuner.recorded

        def recorded(self: Tuner) -> Any:
            begin_s = time.perf_counter()
            try:
                return find(self)
            finally:
                spent_s[0] += time.perf_counter() - begin_s

        Tuner.recorded = recorded  # type: ignore[method-assign]
        with ts.tune(limit_s=a.limit):
            again()
        step = tuned.step  # type: ignore[attr-defined]
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
