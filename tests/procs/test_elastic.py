"""`tessera run --elastic` with killed processes: it continues, and ends with the same bits."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tessera as ts
from tessera.launch.commands import Run
from tessera.launch.elastic_runs import Generations, elastic_sizes
from tessera.train.metrics import read_metrics
from tests.cases import LONG
from tests.procs.elastic_torture import Disturbed, alone
from tests.procs.launched import launch


@LONG
@pytest.mark.parametrize("more", [[], ["guarded"]], ids=["steps", "guarded"])
def test_a_run_goes_on_without_the_process_that_was_killed_and_takes_it_back(
    more: list[str], tmp_path: Path
) -> None:
    run = Disturbed(24, tmp_path / "killed", 2, *more)
    assert run.until(3)
    run.lose(random.Random(0), signal.SIGKILL)
    status, out, said = run.end()
    assert status == 0, said
    assert "tessera run: goes on with 1 of 2 processes; the last safe point is after " in said
    assert "tessera run: goes on with all 2 processes; the last safe point is after " in said
    assert out.split()[-1] == alone(24, tmp_path / "quiet")[-1]
    if more:
        rows = read_metrics(tmp_path / "killed" / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [*range(24)]


FEWER = """
import numpy as np
import tessera as ts
from tessera import checkpoint, dist, elastic, optim
from tessera.train.evaluate import mean_loss
from tessera.train.guard import Guard, TrainState
from tessera.train.run import Run

mesh, plan = elastic.fit(dist.Mesh.parse("dp=4")), dist.strategy("data_parallel")
loader = ts.data.create_distributed_dataloader(
    {"data": np.arange(400) % 16, "global_batch_size": 7, "sequence_length": 4, "shuffle": False},
    mesh,
)
optimizer = optim.AdamW(1e-2)
ts.seed(0)
weights = dist.place({"w": ts.dist.tensor((16, 16))}, plan, mesh)
live = TrainState(weights, optimizer.init(weights, plan), loader)

@ts.jit
def loss_of(weights, ids):
    return ts.nn.cross_entropy(weights["w"][ids].reshape(-1, 16), ids.reshape(-1))

@ts.jit
def step_of(weights, state, ids):
    loss = loss_of(weights, ids)
    return loss, *optimizer.update(weights, ts.grad(loss, weights, layout=plan), state)

with dist.deterministic(level="mesh_invariant"):
    run = Run("run", steps=3, tokens_per_step=28)
    with run, Guard(run, live, every=2) as guard:
        for step in guard:
            with run.step(step) as row:
                ids = next(loader)["input_ids"]
                first = dist.to_host(ids)[:, 0].tolist()
                row["loss"], live.weights, live.optimizer = step_of(
                    live.weights, live.optimizer, ids
                )
                row["about"] = ts.debug.statistics(live.weights)
            assert first == [4 * (7 * step + i) % 16 for i in range(7)]
    checkpoint.save("saved", live.weights, step=live.optimizer["step"])
    mean = mean_loss(lambda batch: loss_of(live.weights, batch["input_ids"]), [next(loader)])
print([repr(v) for row in run.rows() for k, v in row.items() if k[:5] in ("loss", "about")], mean)
"""


@LONG
def test_a_process_without_a_device_reads_what_the_others_read(tmp_path: Path) -> None:
    """Three processes with a device each share four mesh places; one of them gets none."""
    said = []
    for size in (1, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "script.py").write_text(FEWER)
        done = launch("-n", size, "script.py", folder=folder, TESSERA_DEVICES=str(4 // size))
        assert done.code == 0, done
        assert (folder / "checkpoints" / "saved").is_dir()
        said += [line for line in done.out.splitlines() if line.startswith("['")]
    assert len(said) == 4 and len({*said}) == 1, said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--elastic 3:2", "'3:2' is not MIN:MAX"),
        ("--elastic 2", "'2' is not MIN:MAX"),
        ("--elastic 1:2 -n 2", "--elastic does not go with -n"),
        ("--elastic 1:2 --backend mpi", "--elastic does not go with --backend mpi"),
        ("-n 2 --rejoin-after 5", "--rejoin-after has no effect without --elastic"),
    ],
)
def test_what_makes_no_sense_is_said(words: str, error: str, tmp_path: Path) -> None:
    done = launch(*words.split(), "true", folder=tmp_path)
    assert done.code == 2 and error in done.err


def test_a_folder_for_safe_points_beside_elastic_is_said(monkeypatch: Any) -> None:
    """It would be ignored: the variable is for a scheduler's run, and `--elastic` has its own
    folder."""
    monkeypatch.setenv("TESSERA_ELASTIC", "/dev/shm/run-7")
    with pytest.raises(ts.UsageError, match="TESSERA_ELASTIC=/dev/shm/run-7 is set"):
        elastic_sizes("1:2", "local", None, None, None)


def test_all_processes_come_back_some_seconds_after_the_first_safe_point(monkeypatch: Any) -> None:
    made = Generations(Run(({}, {}), ("true",), "127.0.0.1:1", ""), 1, 60.0, lambda: None)
    before, point = (SimpleNamespace(id=name, state={"rejoin": True}) for name in "ab")
    now, last = [0.0], [before]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(made, "_last", lambda: last[0])
    grows = made._grows(before)
    for now[0], last[0], expected in (
        (900.0, before, False),  # start and compilation
        (900.0, point, False),
        (959.0, point, False),
        (960.0, point, True),
    ):
        assert grows() is expected, now
    point.state["rejoin"] = False
    assert not grows()


def test_after_a_signal_it_says_where_the_same_command_begins(
    monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = SimpleNamespace(run=lambda: 143, signals=1, was_ended=False)
    made = Generations(Run(({},), ("true",), "127.0.0.1:1", ""), 1, 60.0, lambda *a, **k: ended)
    for last, said in ((None, False), (SimpleNamespace(id="a", step=7), True)):
        monkeypatch.setattr(made, "_last", lambda last=last: last)
        assert made.run() == 143
        told = "after 7 steps; the same command goes on from the program's newest checkpoint"
        assert (told in capsys.readouterr().err) is said


def test_a_program_that_makes_no_step_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    done = launch("--elastic", "1:9", "fails.py", folder=tmp_path)
    assert done.code == 3
    assert (
        done.err.count("goes on with") == 2
        and "3 times in a row no safe point was kept" in done.err
    )
    done = launch("--elastic", "2:2", "fails.py", folder=tmp_path)
    assert "1 processes are left, and --elastic asks for 2 at least" in done.err


EACH = """
import time
import numpy as np
import tessera as ts
from tessera import checkpoint, dist
from tessera.train.evaluate import mean_loss
from tessera.train.run import Run

rank = dist.process_index()
mine = dist.Mesh(("dp",), devices=[rank])
w = ts.tensor(np.ones(4) * (rank + 1), mesh=mine)
ts.jit(lambda w: w * 2)(w).numpy()  # the engine starts in both
with Run(f"run{rank}", steps=2 + rank, tokens_per_step=1) as run:
    for step in range(2 + rank):
        with run.step(step) as row:
            row["loss"] = (w * step).sum()
        time.sleep(0.5 * rank)
if rank:
    print(mean_loss(lambda b: (w * ts.tensor(b, mesh=mine)).sum(), [[1.0] * 4]))
    print([row["loss"] for row in run.rows()])
"""


@LONG
def test_processes_that_train_for_themselves_wait_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EACH)
    done = launch("-n", 2, "script.py", folder=tmp_path, TESSERA_COLLECTIVE_LIMIT="20")
    assert done.code == 0, done.err
    assert "8.0\n[0.0, 8.0, 16.0]\n" in done.out
