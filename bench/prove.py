"""Do the bits depend on how many devices computed them? One logical program on many placements.

`make prove` trains a small GPT (dropout, clipping, AdamW, a schedule) on one logical mesh, dp=2 ×
tp=2: unfolded, folded axis by axis down to one device, with each ZeRO stage, step by step, with
overlap and buckets. It prints the SHA-256 of the weights and of all losses, and fails unless there
is one of each.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer

os.environ.setdefault("TESSERA_DETERMINISTIC", "1")

import tessera as ts
from tessera import dist, nn, optim
from tessera.core.context import replaced
from tessera.core.options import ScheduleOptions

LOGICAL = "dp=2,tp=2"
FOLDS = ("dp=2,tp=2", "dp=2,tp=1", "dp=1,tp=2", "dp=1,tp=1")


@dataclass(frozen=True)
class Placement:
    """Where and how the program runs: none of it may show in its bits."""

    onto: str
    zero: int = 0
    executor: str = "fused"
    schedule: ScheduleOptions = ScheduleOptions()  # noqa: RUF009  # it is frozen

    def __str__(self) -> str:
        return f"{self.onto}  ZeRO-{self.zero}  {self.schedule.text() or self.executor}"


def placements(small: bool) -> Iterator[Placement]:
    stages = (0, 3) if small else (0, 1, 2, 3)
    for onto in FOLDS:
        for zero in stages:
            yield Placement(onto, zero)
        if not small:
            yield Placement(onto, 3, "stepped")
            yield Placement(onto, 2, schedule=ScheduleOptions(overlap=True, bucket_bytes=4096))


def trained(p: Placement, steps: int, dtype: str) -> tuple[str, str]:
    """(hash of the weights, hash of the losses) after `steps` steps."""
    mesh = dist.Mesh.parse(LOGICAL).fold(p.onto)
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    if p.zero:
        plan = plan + dist.strategy("zero_redundancy_optimizer", stage=p.zero)
    ts.seed(7)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (steps, 8, 17)).astype(np.int32)
    config = nn.GPTConfig(64, 16, 32, 2, 4, positions="rotary", norm="rms", dropout=0.1, loop=False)
    model = dist.place(nn.GPT(config), plan, mesh)
    rate = optim.warmup_cosine(1e-2, 2, steps + 1, end=1e-3, start=1e-3)
    optimizer = optim.AdamW(rate, weight_decay=0.1)
    state = optimizer.init(model.parameters(), plan)

    @ts.jit
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        with ts.autocast(ts.bf16, enabled=dtype == "bf16"):
            loss = model.loss(ids, labels)
        weights = model.parameters()
        grads, _ = optim.clip_by_global_norm(ts.grad(loss, weights, layout=plan), 0.5)
        weights, new = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    losses = hashlib.sha256()
    for row in tokens:
        batch = dist.place((row[:, :-1], row[:, 1:]), plan, mesh, kind="batch")
        losses.update(step(model, state, *batch).numpy().tobytes())
    found = hashlib.sha256()
    for name, w in sorted(model.parameters().items()):
        found.update(name.encode() + w.numpy().tobytes())
    return found.hexdigest(), losses.hexdigest()


def main(steps: int = typer.Option(20, min=1), small: bool = False, dtype: str = "f32") -> None:
    """Prints the table; the exit status is 1 where hashes differ."""
    ts.seed(0)
    print(f"logical mesh {LOGICAL}, {steps} steps, {dtype}")
    print(f"{'placement':52} {'weights':18} {'losses':18} seconds")
    seen: set[tuple[str, str]] = set()
    for p in placements(small):
        start = time.perf_counter()
        with replaced(executor=p.executor, schedule=p.schedule):
            weights, losses = trained(p, steps, dtype)
        seen.add((weights, losses))
        took_s = time.perf_counter() - start
        print(f"{p!s:52} {weights[:16]:18} {losses[:16]:18} {took_s:.1f}", flush=True)
    print(f"{len(seen)} hash{'es' if len(seen) > 1 else ''}")
    sys.exit(len(seen) > 1)


if __name__ == "__main__":
    typer.run(main)
