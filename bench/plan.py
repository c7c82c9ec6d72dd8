"""Predicted against measured training steps on this machine: seconds and memory.

The machine is measured first, as `tessera calibrate` does; of two processes only the link between
them, as they share the machine. Then each step is planned, predicted and
run, in this order; the least of its measured times counts, as other programs only make steps
longer. All devices share this machine's processor, so a step of n devices is n times the work of
one (`shared` of the chip). The memory of a fused program is compared with XLA's analysis of it.
Run it: `python bench/plan.py` prints a line of JSON for each step, and one with the summary; it
starts itself again for the steps over two processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TESSERA_DEVICES", "8")

from plan_programs import Row, processes, virtual
from scipy.stats import spearmanr  # type: ignore[import-untyped]  # no stubs

import tessera as ts
from tessera import dist
from tessera.core.devices import device_count
from tessera.core.machine.load import save
from tessera.core.machine.machine import Machine
from tessera.core.topology import Level, Topology
from tessera.plan.calibrate import LARGE, calibrate, measured_link
from tessera.plan.machines import machine_from_file
from tessera.plan.simulate import simulate
from tessera.show.plan_view import planned_memory
from tessera.train.memory import program_bytes

LIMIT_S = 900.0


def predicted(name: str, row: Row, machine: Machine) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step of `row`, its arguments, and its prediction."""
    step, args = row.step()
    with ts.autocast(row.dtype):
        schedule = step.plan(*args)
    line = simulate(schedule, machine)
    found = {
        "program": name,
        "kind": row.kind,
        "predicted_ms": round(line.step_s * 1e3, 2),
        "compute_ms": round(line.compute_s * 1e3, 2),
        "communication_ms": round(line.exposed_s * 1e3, 2),
    }
    if not row.schedule:
        found["planned_mb"] = round(planned_memory(schedule, {}).peak / 1e6, 2)
    return step, args, found


class Watch:
    """Tells whether other programs disturb the machine: then a product takes longer than its least
    time."""

    def __init__(self) -> None:
        self.product, self.least_s = ts.jit(lambda x: x @ x), math.inf
        self.x = ts.ones((1024, 1024))
        for _ in range(20):
            self.is_quiet()

    def is_quiet(self) -> bool:
        begin = time.perf_counter()
        self.product(self.x).stored.block_until_ready()
        took_s = time.perf_counter() - begin
        self.least_s = min(self.least_s, took_s)
        return took_s < 1.15 * self.least_s


def measured(
    row: Row, step: Any, args: tuple[Any, ...], rounds: int, watch: Watch
) -> dict[str, Any]:
    """The measured times of a step, and XLA's analysis of its memory. Steps beside which the
    machine was disturbed count only if there are no others."""
    quiet_ms, took_ms = list[float](), list[float]()

    def run() -> None:
        step(*args).item()
        for weight in args[0].parameters().values():
            weight.stored.block_until_ready()

    with ts.autocast(row.dtype):
        run()
        run()
        for _ in range(4 * rounds):
            if len(quiet_ms) >= rounds and dist.process_count() == 1:  # all run the same steps
                break
            before, begin = watch.is_quiet(), time.perf_counter()
            run()
            took_ms.append((time.perf_counter() - begin) * 1e3)
            if before and watch.is_quiet():
                quiet_ms.append(took_ms[-1])
    counted = quiet_ms or took_ms
    found = {
        "least_ms": round(min(counted), 2),
        "median_ms": round(statistics.median(counted), 2),
        "quiet_steps": len(quiet_ms),
    }
    if not row.schedule:
        found["xla_mb"] = round(program_bytes(step).peak / 1e6, 2)
    return found


def between_processes(machine: Machine) -> Machine:
    """The machine with the link between the devices of these processes."""
    levels = (Level(device_count(), measured_link(device_count(), LARGE, 8)),)
    return replace(machine, topology=Topology("measured", levels))


def measure(machine: Machine, rows: dict[str, Row], rounds: int) -> list[dict[str, Any]]:
    """Predicts and runs each row; process 0 prints a line for each."""
    first = dist.process_index() == 0
    watch = Watch()
    if first:
        print(json.dumps({"links": str(machine.topology), "chip": str(machine.chip)}), flush=True)
    done = []
    for name, row in rows.items():
        step, args, found = predicted(name, row, machine)
        found |= measured(row, step, args, rounds, watch)
        found["error"] = round(found["predicted_ms"] / found["least_ms"] - 1, 3)
        if "xla_mb" in found:
            found["memory_error"] = round(found["planned_mb"] / found["xla_mb"] - 1, 3)
        if first:
            print(json.dumps(found), flush=True)
        done.append(found)
    return done


def over_processes(machine: Machine, only: str, rounds: int) -> list[dict[str, Any]]:
    """The rows over two processes, which this script measures in processes of its own."""
    path = Path(tempfile.mkdtemp()) / "machine.yaml"
    save(machine, path)
    command = [sys.executable, "-m", "tessera", "run", "-n", "2", __file__, "--inside", str(path)]
    command += ["--only", only, "--rounds", str(rounds)]
    around = os.environ | {"TESSERA_DEVICES": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=around)
    lines = [text[text.index("{") :] for text in done.stdout.splitlines() if "{" in text]
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    print("\n".join(lines), flush=True)
    return [found for found in map(json.loads, lines) if "program" in found]


def summary(done: list[dict[str, Any]]) -> dict[str, Any]:
    """All rows, their errors, and the mean error of each kind."""
    sizes = [abs(found["error"]) for found in done]
    memory = [abs(found["memory_error"]) for found in done if "memory_error" in found]
    kinds = dict.fromkeys(found["kind"] for found in done)
    ranks = spearmanr([d["predicted_ms"] for d in done], [d["least_ms"] for d in done]).statistic
    return {
        "rows": done,
        "programs": len(done),
        "mean_error": round(statistics.mean(sizes), 3),
        "median_error": round(statistics.median(sizes), 3),
        "largest_error": round(max(sizes), 3),
        "ranks": round(float(ranks), 3),
        "by_kind": {
            k: round(statistics.mean(abs(d["error"]) for d in done if d["kind"] == k), 3)
            for k in kinds
        },
        "memory_mean_error": round(statistics.mean(memory), 3),
        "memory_median_error": round(statistics.median(memory), 3),
        "memory_within_5_percent": sum(e <= 0.05 for e in memory),
        "memory_programs": len(memory),
    }


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--only", default="", help="programs whose name has this text")
    ap.add_argument("--rounds", type=int, default=8, help="measured steps of each program")
    ap.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    ap.add_argument("--lines", type=Path, help="a file of these lines to add up again")
    a = ap.parse_args()
    if a.lines:
        found = map(json.loads, a.lines.read_text().splitlines())
        print(json.dumps(summary([d for d in found if "error" in d])))
        return
    if a.inside:
        machine, table = between_processes(machine_from_file(a.inside)), processes()
    else:
        machine, table = calibrate(rounds=8).machine, virtual()
    done = measure(machine, {k: row for k, row in table.items() if a.only in k}, a.rounds)
    if not a.inside:
        print(json.dumps(summary(done + over_processes(machine, a.only, a.rounds))))


if __name__ == "__main__":
    main()
