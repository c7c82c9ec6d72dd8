"""60,000 steps without `ts.jit`: the process's objects and memory must stay constant."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import numpy as np

import tessera as ts

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000


def resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 1_000_000


def flat(name: str, found: list[tuple[int, int]], took_s: float) -> bool:
    objects, resident = zip(*found, strict=True)
    print(
        f"  {name}: objects {objects[0]} to {objects[-1]}, {resident[0]} to {resident[-1]} MB,"
        f" {took_s:.0f} s",
        flush=True,
    )
    # A leak grows with each part, whereas the system forms huge pages all at once.
    grown = np.diff(resident)
    return objects[-1] < objects[0] + 2000 and grown.sum() - grown.max() < 15


def main() -> int:
    w, m, x = ts.tensor(np.eye(8, dtype=np.float32)), ts.zeros((8, 8)), ts.ones((4, 8))
    kept = w  # a live reference to the first weights
    right = True
    found, begin, steps = [], time.perf_counter(), STEPS // 200
    for step in range(steps):  # each gradient is compiled
        g = ts.grad((ts.tanh(x @ w) ** 2).mean(), w)
        m = 0.9 * m + g
        w = w - 0.01 * m
        if step % (steps // 10) == 0:
            gc.collect()
            found.append((len(gc.get_objects()), resident_mb()))
    right &= flat("updates by gradients", found[1:], time.perf_counter() - begin)
    found, begin = [], time.perf_counter()
    with ts.no_grad():
        for step in range(STEPS):
            w = w - 0.001 * (w * float(step % 7)) + (w**0.5 if step % 2 else w**1.5) * 0.0
            w = ts.minimum(w, 1.0 + step * 1e-6)
            if step % (STEPS // 10) == 0:
                gc.collect()
                found.append((len(gc.get_objects()), resident_mb()))
    right &= flat("numbers that change", found[1:], time.perf_counter() - begin)
    return int(not right or kept is w)


if __name__ == "__main__":
    sys.exit(main())
