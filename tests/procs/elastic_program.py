"""An elastic run under disturbance: trains in a loop with rollback, and prints the hash of its
final state.

Its arguments are the number of steps, the logical mesh, a folder, the pause in each step (seconds),
the number of its own device losses, and `guarded` for a guarded loop.

In the folder, the first process appends a line to `steps` for each step, and each process writes
its pid to its own file.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from elastic_model import Dense, step_of

import tessera as ts
from tessera import dist, elastic, optim
from tessera.core.devices import LOST
from tessera.train.guard import Guard, TrainState
from tessera.train.run import Run

COUNT, MESH, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
PAUSE_S, LOSSES, GUARDED = float(sys.argv[4]), int(sys.argv[5]), sys.argv[6:] == ["guarded"]
RNG = np.random.default_rng(3)
X, Y = (RNG.normal(size=(8, 24, 6)).astype(np.float32) for _ in range(2))


class Losses:
    """Sets the number of devices to 4, 6, 2, 8, 4, ... of 8, `LOSSES` times, before or during
    steps."""

    def __init__(self) -> None:
        self.draw = random.Random(0)
        self.left = [(4, 6, 2, 8)[i % 4] for i in range(2 * LOSSES)]
        self.count = 0  # the number of losses so far

    def maybe(self) -> None:
        if self.count >= LOSSES or self.draw.random() < 0.5:
            return
        there, want = [i for i in range(8) if i not in LOST], self.left.pop(0)
        self.count += want < len(there)
        for i in self.draw.sample(there, max(0, len(there) - want)):
            elastic.drop(i)
        for i in self.draw.sample(sorted(LOST), max(0, want - len(there))):
            elastic.restore(i)


def main() -> None:
    rank, losses = dist.process_index(), Losses()
    (FOLDER / f"rank-{rank}").write_text(str(os.getpid()))
    plan = dist.strategy("zero_redundancy_optimizer", stage=2)
    optimizer = optim.Adam(1e-2)

    train_step = step_of(plan, optimizer)

    ts.seed(1)
    model = dist.place(Dense(), plan, elastic.fit(dist.Mesh.parse(MESH)))
    state = optimizer.init(model.parameters(), plan)

    def made(i: int, devices: int) -> Any:
        losses.maybe()
        x, y = (dist.place(v[i % 8], plan, kind="batch") for v in (X, Y))
        loss = train_step(model, state, x, y)
        losses.maybe()
        dist.to_host(loss)
        time.sleep(PAUSE_S)
        if rank == 0:
            with (FOLDER / "steps").open("a") as file:
                file.write(f"{i} {devices}\n")
        return loss

    loop = elastic.steps({"model": model, "optimizer": state}, COUNT)
    if GUARDED:
        run = Run(FOLDER / "run", steps=COUNT, tokens_per_step=24, resume=True)
        with run, Guard(run, TrainState(model, state), every=10) as guard:
            for i in guard:
                with run.step(i) as row:
                    row["loss"] = made(i, model.up.mesh.physical.size)
    else:
        with dist.elastic():
            for step in loop:
                with step as i:
                    made(i, step.mesh.physical.size)
    found = hashlib.sha256()
    tensors = [*model.parameters().values(), state["step"], *state["m"].values()]
    for x in dist.to_host(tensors):
        found.update(np.asarray(x).tobytes())
    if rank == 0:
        print("lost", losses.count, *(f"{s:.3f}" for s in loop.recovered_s))
        print("hash", found.hexdigest(), flush=True)


main()
