"""Predicted against measured training steps on this machine: seconds and memory.

The machine is measured first, as `tessera calibrate` does. Then each step is planned, predicted and
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
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TESSERA_DEVICES", "8")

from plan_programs import Row, processes, virtual
from scipy.stats import spearmanr  # type: ignore[import-untyped]  # no stubs

import tessera as ts
from tessera import dist
from tessera.core.machine.machine import Machine
from tessera.plan.calibrate import calibrate
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
    with ts.autocast(row.dtype):
        step(*args).item()
        step(*args).item()
        while len(quiet_ms) < rounds and len(took_ms) < 5 * rounds:
            before, begin = watch.is_quiet(), time.perf_counter()
            step(*args).item()
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


def measure(rows: dict[str, Row], rounds: int) -> list[dict[str, Any]]:
    """Predicts and runs each row; process 0 prints a line for each."""
    first = dist.process_index() == 0
    machine, watch = calibrate(rounds=8).machine, Watch()
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


def over_processes(only: str, rounds: int) -> list[dict[str, Any]]:
    """The rows over two processes, which this script measures in processes of its own."""
    command = [sys.executable, "-m", "tessera", "run", "-n", "2", __file__, "--inside"]
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
    ap.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    ap.add_argument("--lines", type=Path, help="a file of these lines to add up again")
    a = ap.parse_args()
    if a.lines:
        found = map(json.loads, a.lines.read_text().splitlines())
        print(json.dumps(summary([d for d in found if "error" in d])))
        return
    table = processes() if a.inside else virtual()
    done = measure({k: row for k, row in table.items() if a.only in k}, a.rounds)
    if not a.inside:
        print(json.dumps(summary(done + over_processes(a.only, a.rounds))))


if __name__ == "__main__":
    main()
