"""Guarded runs of several processes: a joint save at a signal, and an end if one hangs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np

from tessera import checkpoint
from tessera.train.watchdog import HUNG
from tests.cases import LONG
from tests.procs.launched import Done, launch, until

SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
import tessera as ts
from tessera import dist, optim
from tessera.data import create_distributed_dataloader
from tessera.train.guard import Guard, TrainState
from tessera.train.run import Run

folder, pause_s, hangs = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:] == ["hangs"]
mesh, plan = dist.Mesh.parse("dp=2"), dist.strategy("zero_redundancy_optimizer", stage=3)
optimizer = optim.AdamW(1e-2)
ts.seed(0)
weights = dist.place({"w": ts.dist.tensor((16, 8)), "v": ts.dist.tensor((8, 16))}, plan, mesh)
loader = create_distributed_dataloader(
    {"data": np.arange(500) % 16, "batch_size": 1, "sequence_length": 4, "epochs": 2}, mesh
)
live = TrainState(weights, optimizer.init(weights, plan), loader)

@ts.jit
def step_of(weights, state, ids):
    loss = ts.nn.cross_entropy((weights["w"][ids] @ weights["v"]).reshape(-1, 16), ids.reshape(-1))
    return loss, *optimizer.update(weights, ts.grad(loss, weights, layout=plan), state)

with dist.deterministic(level="mesh_invariant"):
    run = Run(folder, steps=40, tokens_per_step=8, resume=True)
    hang_s = 60 if hangs else 600  # a machine that does other things takes long to compile a step
    with run, Guard(run, live, every=4, hang_s=hang_s) as guard:
        for step in guard:
            with run.step(step) as row:
                ids = next(loader)["input_ids"]
                row["loss"], live.weights, live.optimizer = step_of(
                    live.weights, live.optimizer, ids
                )
            (folder.parent / f"pid{dist.process_index()}").write_text(f"{os.getpid()} {step}")
            time.sleep(pause_s)
            if hangs and step == 5 and dist.process_index() == 1:
                time.sleep(300)
full = {n: dist.to_host(w) for n, w in sorted(live.weights.items())}
if dist.process_index() == 0:
    np.savez(folder.parent / "end.npz", **full)
"""


def run_of(folder: Path, pause_s: float, *more: str, size: int = 2, **how: object) -> Done:
    (folder / "script.py").write_text(SCRIPT)
    arguments = ["-n", size, folder / "script.py", folder / "run", pause_s, *more]
    devices = str(2 // size)
    return launch(*arguments, folder=folder, TESSERA_DEVICES=devices, **how)  # type: ignore[arg-type]


def came_to(folder: Path, rank: int) -> tuple[int, int]:
    """A rank's pid, and its last step."""
    try:
        pid, step = (folder / f"pid{rank}").read_text().split()
        return int(pid), int(step)
    except (OSError, ValueError):
        return 0, -1


@LONG
def test_one_rank_is_told_to_end_and_all_save_and_another_number_of_processes_goes_on(
    tmp_path: Path,
) -> None:
    def tell(started: subprocess.Popen[str]) -> None:
        until(lambda: came_to(tmp_path, 1)[1] >= 5, folder=tmp_path)
        os.kill(came_to(tmp_path, 1)[0], signal.SIGTERM)

    first = run_of(tmp_path, 0.05, meanwhile=tell)
    assert first.code == 128 + signal.SIGTERM, first
    tag = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert tag is not None and int(tag[-8:]) >= 6
    ended = f"ended by SIGTERM after {int(tag[-8:])} steps; it is saved as {tag} in "
    assert ended in first.out
    again = run_of(tmp_path, 0, size=1)
    assert again.code == 0 and f"it goes on after step {int(tag[-8:])}" in again.out, again
    end = {**np.load(tmp_path / "end.npz")}
    whole = tmp_path / "whole"
    whole.mkdir()
    undisturbed = run_of(whole, 0)
    assert undisturbed.code == 0, undisturbed
    for name, x in np.load(whole / "end.npz").items():
        assert x.tobytes() == end[name].tobytes(), name


@LONG
def test_a_rank_that_hangs_ends_the_run(tmp_path: Path) -> None:
    done = run_of(tmp_path, 0, "hangs")
    assert done.code == HUNG, done
    assert "run: step 5 has not ended within 60 s, so this process ends" in done.err
    assert "script.py" in done.err and checkpoint.latest(tmp_path / "run" / "checkpoints")
