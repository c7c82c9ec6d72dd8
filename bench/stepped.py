"""The cost of the stepped executor against one program.

The GPT's training step over dp=2, data parallel and under ZeRO-3, by both executors in turn, and a
small one whose tensors take no time, which shows the cost of dispatch. Both reuse the memory of the
old weights for the new ones. Run it: `python bench/stepped.py` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt_step import axes_of, ours
from peers import jax_gpt
from turns import apart, in_turn, ratio, timed

from tessera import dist
from tessera.runtime.devices import start

EXECUTORS = ("fused", "stepped")
SAME = 1e-4  # the largest difference of losses
SMALL = jax_gpt.GPTConfig(width=16, layers=4, heads=2, vocab=32, seq=8, batch=4)


def compared(config: jax_gpt.GPTConfig, mesh: str, zero: int, rounds: int) -> dict[str, Any]:
    made = {e: ours(config, axes_of(mesh), zero=zero, executor=e) for e in EXECUTORS}
    found = in_turn({e: timed(run) for e, (run, _) in made.items()}, rounds, warm=2)
    fused, stepped = (found[e] for e in EXECUTORS)
    steps = len(made["stepped"][1].programs[0].schedule.steps)
    more_s = statistics.median(b - a for a, b in zip(fused.wall_s, stepped.wall_s, strict=True))
    return {
        "mesh": mesh,
        "width": config.width,
        "zero": zero,
        "steps": steps,
        "fused_s": fused.median_s,
        "stepped_s": stepped.median_s,
        "ratio": ratio(stepped.wall_s, fused.wall_s),
        "cpu_ratio": ratio(stepped.cpu_s, fused.cpu_s),
        "a_step_us": 1e6 * more_s / steps,
        "share": shares(made["stepped"][0]),
        "largest_loss_difference": apart(fused, stepped, at_most=SAME),
    }


def shares(run: Callable[[], float], times: int = 3) -> dict[str, float]:
    """The shares of stepped runs that wait for every step: computation, transfers, waits for the
    slowest device, and the rest, which is dispatch and Python."""
    with dist.profile():
        run()  # records and compiles
    with dist.profile() as seen:
        begin = time.perf_counter()
        for _ in range(times):
            run()
        whole_s = (time.perf_counter() - begin) / times
    parts = {k: v / whole_s for k, v in seen.totals_s.items()}
    return {**parts, "rest": 1 - sum(parts.values())}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--layers", type=int, default=4)
    a = ap.parse_args()
    start(8)
    config = jax_gpt.GPTConfig(layers=a.layers)
    rows = [
        compared(config, mesh, zero, a.rounds) for mesh, zero in (("dp=2,tp=2", 0), ("dp=2", 3))
    ]
    rows.append(compared(SMALL, "dp=2,tp=2", 0, 10 * a.rounds))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
