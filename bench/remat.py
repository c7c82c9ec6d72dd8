"""`ts.remat` on an own model of 12 layers that are written out: the memory and the time of a step.

A section of `make bench` (`ARGS='--only remat'`). A step computes a loss and its gradients. Each
policy's time is the median of steps that are taken in turn with those of the other policies.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np
from few_devices import start_few

import tessera as ts
from tessera import nn
from tessera.show.plan_view import recomputation
from tessera.train.memory import program_bytes

LAYERS = 12
POLICIES = (None, "nothing", "dots", "everything")


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        self.heads = heads
        self.qkv, self.out = nn.Parameter(width, 3 * width), nn.Parameter(width, width)
        self.up, self.down = nn.Parameter(width, 4 * width), nn.Parameter(4 * width, width)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        rows, seq, width = x.shape
        parts = (nn.rms_norm(x) @ self.qkv).reshape(rows, seq, 3, self.heads, -1)
        q, k, v = (parts[:, :, i].transpose(1, 2) for i in range(3))
        scores = nn.softmax(q @ k.transpose(2, 3) * (width // self.heads) ** -0.5, -1)
        x = x + (scores @ v).transpose(1, 2).reshape(rows, seq, width) @ self.out
        return x + nn.gelu(nn.rms_norm(x) @ self.up) @ self.down


class Model(nn.Module):
    def __init__(self, policy: str | None, width: int, heads: int) -> None:
        blocks = [Block(width, heads) for _ in range(LAYERS)]
        self.blocks = [ts.remat(b, policy=policy) for b in blocks] if policy else blocks

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


def made(policy: str | None, rows: int, seq: int, width: int, heads: int) -> tuple[Any, Any]:
    """Returns (a compiled step, its argument)."""
    ts.seed(0)
    model = Model(policy, width, heads)
    x = ts.tensor(np.random.default_rng(0).normal(size=(rows, seq, width)).astype(np.float32))

    @ts.jit
    def step(x: ts.Tensor) -> Any:
        return ts.value_and_grad(model)(x)

    step(x)[0].item()
    return step, x


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--seq", type=int, default=256)
    ap.add_argument("--width", type=int, default=256)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--steps", type=int, default=9)
    a = ap.parse_args()
    start_few(1)
    steps = {p: made(p, a.rows, a.seq, a.width, a.heads) for p in POLICIES}
    times: dict[str | None, list[float]] = {p: [] for p in POLICIES}
    for _ in range(a.steps):
        for p, (step, x) in steps.items():
            start = time.perf_counter()
            step(x)[0].item()
            times[p].append(time.perf_counter() - start)
    found = []
    for p, (step, _) in steps.items():
        r = recomputation(step.graph)
        found.append({
            "policy": p or "all kept", "planned_bytes": r.temporary,
            "xla_bytes": program_bytes(step).temporary, "flops": r.flops, "s": median(times[p]),
        })  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
