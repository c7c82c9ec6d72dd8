"""240 shapes of a training step in one process: its memory maps and memory must stay bounded."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np

import tessera as ts
from tessera import dist

SHAPES, MOST = 240, 1200


def maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 1_000_000


def main() -> int:
    warnings.simplefilter("ignore", ts.TraceWarning)
    ts.set_program_cache(maps=MOST, bytes=1 << 40)
    mesh = dist.Mesh.parse("dp=2")
    eye = np.eye(32, dtype=np.float32)
    weights = {f"w{i}": ts.tensor(eye, mesh=mesh, layout="[32, 32]") for i in range(6)}

    @ts.jit
    def step(weights: dict[str, ts.Tensor], x: ts.Tensor) -> dict[str, ts.Tensor]:
        h = x
        for w in weights.values():
            h = ts.tanh(h @ w)
        grads = ts.grad((h * h).mean(), weights)
        norm = ts.sqrt(sum((g * g).sum() for g in grads.values()))
        return {k: w - 0.1 * grads[k] / (norm + 1) for k, w in weights.items()}

    found = []
    for n in range(1, SHAPES + 1):
        x = ts.tensor(np.ones((2 * n, 32), np.float32), mesh=mesh, layout=f"[{2 * n}@dp, 32]")
        weights = step(weights, x)
        found.append((maps(), resident_mb()))
        if n % 60 == 0:
            print(f"  {n} shapes: {found[-1][0]} maps, {found[-1][1]} MB", flush=True)
    half = SHAPES // 2
    return int(max(m for m, _ in found) > MOST + 100 or found[-1][1] > found[half][1] * 1.3)


if __name__ == "__main__":
    sys.exit(main())
