"""Predicted against measured step times, on the machine that `tessera calibrate` measures here.

Each row is a program on one mesh of virtual devices: its simulated step, the least and the median
of its measured steps, and the relative error against the least. All devices share this machine's
processor, so a step of n devices is n times the work of one (`shared` of the chip). Other programs
on the machine disturb both sides: so the programs take turns, the machine is measured in each
round, and the best of each figure counts. Run it: `python bench/plan.py` prints a line of JSON for
the machine, one for each program, and one with the summary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TESSERA_DEVICES", "8")

import numpy as np

import tessera as ts
from tessera import dist, nn, optim
from tessera.core.machine.machine import Machine
from tessera.core.topology import Link
from tessera.plan.calibrate import calibrate
from tessera.plan.machines import machine_from_file
from tessera.plan.simulate import simulate

Program = tuple[Any, tuple[Any, ...]]  # a compiled function, its arguments


def mlp(mesh: Any, width: int, rows: int, layers: int = 4) -> Program:
    """A training step of a dense MLP with SGD, data parallel."""
    rng = np.random.default_rng(0)
    data = dist.strategy("data_parallel")
    weights = {
        f"w{i}": ts.tensor(rng.normal(size=(width, width)).astype(np.float32) / 32, mesh=mesh)
        for i in range(layers)
    }
    x, y = dist.place(
        (rng.normal(size=(rows, width)).astype(np.float32),) * 2, data, mesh, kind="batch"
    )

    @ts.jit
    def step(weights: Any, x: Any, y: Any) -> Any:
        h = x
        for w in weights.values():
            h = ts.tanh(h @ w)
        loss = ((h - y) * (h - y)).mean()
        grads = ts.grad(loss, weights)
        return loss, {k: w - 1e-3 * grads[k] for k, w in weights.items()}

    return step, (weights, x, y)


def gpt(mesh: Any, strategy: Any, d: int, seq: int, batch: int, layers: int) -> Program:
    """A training step of a GPT with AdamW."""
    config = nn.GPTConfig(vocab=4096, seq=seq, d=d, layers=layers, heads=8)
    model = dist.place(nn.GPT(config), strategy, mesh)
    optimizer = optim.AdamW(1e-3)
    state = optimizer.init(model.parameters(), strategy)
    ids = np.random.default_rng(0).integers(0, 4096, (batch, seq)).astype(np.int32)
    given = dist.place((ids, ids), strategy, mesh, kind="batch")

    @ts.jit
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss = model.loss(ids, labels)
        weights = model.parameters()
        weights, new = optimizer.update(weights, ts.grad(loss, weights, layout=strategy), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    return step, (model, state, *given)


def programs() -> dict[str, Callable[[], Program]]:
    """The programs by name; each is made when it is measured."""

    def dp(n: int) -> Any:
        return dist.Mesh(("dp",), devices=n)

    found: dict[str, Callable[[], Program]] = {}
    data = dist.strategy("data_parallel")
    for n in (1, 2, 4, 8):
        found[f"mlp 1024, dp={n}"] = partial(lambda n: mlp(dp(n), 1024, 2048), n)
        found[f"gpt 256, dp={n}"] = partial(lambda n: gpt(dp(n), data, 256, 256, 16, 4), n)
    found["mlp 512, dp=1"] = lambda: mlp(dp(1), 512, 512)
    found["mlp 2048, dp=2"] = lambda: mlp(dp(2), 2048, 1024, 2)
    found["gpt 512, dp=2"] = lambda: gpt(dp(2), data, 512, 128, 16, 2)
    zero = dist.strategy("zero_redundancy_optimizer", stage=3)
    found["gpt 256, zero 3, dp=4"] = lambda: gpt(dp(4), zero, 256, 256, 16, 4)
    both = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    mesh = {"dp": 2, "tp": 2}
    found["gpt 256, dp=2 tp=2"] = lambda: gpt(
        dist.Mesh(("dp", "tp"), shape=mesh), both, 256, 256, 16, 4
    )
    return found


class Running:
    """A program that is measured step by step; the first two steps compile."""

    def __init__(self, program: Program) -> None:
        self.step, self.args = program
        self.took_s: list[float] = []
        self.once()
        self.once()
        self.took_s.clear()
        self.schedule = self.step.schedule

    def once(self) -> None:
        begin = time.perf_counter()
        out = self.step(*self.args)
        (out[0] if isinstance(out, tuple) else out).item()
        self.took_s.append(time.perf_counter() - begin)
        if isinstance(out, tuple):  # the weights
            self.args = (out[1], *self.args[1:])


def fastest(machines: list[Machine]) -> Machine:
    """The machine of the best of several measurements, figure by figure."""

    def links(m: Machine) -> Link:
        return m.topology.levels[0].link

    chips = [m.chip for m in machines if m.chip is not None]
    best = max(chips, key=lambda c: c.products[0].peak_flops_per_s * c.products[0].most)
    chip = replace(
        best,
        memory_bytes_per_s=max(c.memory_bytes_per_s for c in chips),
        ops_per_s=max(c.ops_per_s for c in chips),
        kernel_s=min(c.kernel_s for c in chips),
        program_s=min(c.program_s for c in chips),
    )
    first = machines[0].topology
    link = replace(
        links(machines[0]),
        latency_s=min(links(m).latency_s for m in machines),
        bytes_per_s=max(links(m).bytes_per_s for m in machines),
    )
    levels = (replace(first.levels[0], link=link), *first.levels[1:])
    return replace(machines[0], topology=replace(first, levels=levels), chip=chip)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--machine", type=Path, help="a file of tessera calibrate; else it is measured")
    ap.add_argument("--only", default="", help="programs whose name has this text")
    ap.add_argument("--rounds", type=int, default=6, help="of two steps of each program")
    a = ap.parse_args()
    rows = {k: Running(make()) for k, make in programs().items() if a.only in k}
    machines = [machine_from_file(a.machine)] if a.machine else []
    for _ in range(a.rounds):
        if not a.machine:
            machines.append(calibrate(rounds=3).machine)
        for row in rows.values():
            row.once()
            row.once()
    machine = fastest(machines)
    print(json.dumps({"links": str(machine.topology), "chip": str(machine.chip)}))
    errors = []
    for name, running in rows.items():
        line, took = simulate(running.schedule, machine), running.took_s
        error = line.step_s / min(took) - 1
        errors.append(error)
        found = {
            "program": name,
            "predicted_ms": round(line.step_s * 1e3, 2),
            "least_ms": round(min(took) * 1e3, 2),
            "median_ms": round(statistics.median(took) * 1e3, 2),
            "error": round(error, 3),
            "compute_ms": round(line.compute_s * 1e3, 2),
            "communication_ms": round(line.exposed_s * 1e3, 2),
        }
        print(json.dumps(found), flush=True)
    sizes = [abs(e) for e in errors]
    summary = {
        "programs": len(errors),
        "mean_error": round(statistics.mean(sizes), 3),
        "largest_error": round(max(sizes), 3),
        "bias": round(math.exp(statistics.mean(math.log1p(e) for e in errors)) - 1, 3),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
