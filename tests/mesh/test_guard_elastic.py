"""Guarded runs with elastic devices: rollback and continuation as in `elastic.steps`."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera import checkpoint, dist, elastic, optim
from tessera.core.devices import LOST
from tessera.train.guard import Guard, TrainState
from tessera.train.metrics import read_metrics
from tessera.train.run import Preempted, Run
from tests.procs.elastic_model import Dense, step_of

RNG = np.random.default_rng(11)
X, Y = (RNG.normal(size=(5, 24, 6)).astype(np.float32) for _ in range(2))
STEPS = 6
PLAN, OPTIMIZER = dist.strategy("zero_redundancy_optimizer", stage=2), optim.Adam(1e-2)
TRAIN_STEP = step_of(PLAN, OPTIMIZER)


@pytest.fixture(autouse=True)
def all_devices() -> Iterator[None]:
    yield
    for device in [*LOST]:
        elastic.restore(device)


class Crash(Exception):
    pass


def guarded(folder: Path, events: dict[float, Any], safe_point: Any = 1, **how: Any) -> Any:
    """Returns the final bits, and the (step, devices) that ran. `events` drop devices (-1 - device)
    or restore them, raise, end the run, or spoil a loss, before or during a step."""
    ts.seed(5)
    model = dist.place(Dense(), PLAN, elastic.fit(dist.Mesh.parse("dp=8")))
    state, made, events = OPTIMIZER.init(model.parameters(), PLAN), [], dict(events)

    def happen(when: float) -> bool:
        for event in (found := events.pop(when, ())):
            if event is Crash:
                raise Crash
            if event == "told":
                os.kill(os.getpid(), signal.SIGTERM)
            elif event != "bad":
                elastic.restore(event) if event >= 0 else elastic.drop(-1 - event)
        return "bad" in found

    run = Run(folder, steps=STEPS, tokens_per_step=24, resume=True,
              console=Console(file=io.StringIO()))  # fmt: skip
    guard = Guard(run, TrainState(model, state), every=2, **how)
    on = dist.elastic(safe_point=safe_point)
    with dist.deterministic(level="mesh_invariant"), on, run, guard:
        for i in guard:
            with run.step(i) as row:
                happen(i)
                at = (i + guard.skipped) % 5
                x, y = (dist.place(v[at], PLAN, kind="batch") for v in (X, Y))
                row["loss"] = TRAIN_STEP(model, state, x, y)
                if happen(i + 0.5):
                    row["loss"] = float("nan")
                made.append((i, model.up.mesh.physical.size))
            happen(i + 0.75)
            checkpoint.wait()
    kept = [*model.parameters().values(), *state["m"].values(), state["step"]]
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(STEPS)]
    return [ts.tensor(t).numpy().tobytes() for t in kept] + [row["loss"] for row in rows], made


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a run without faults."""
    return guarded(tmp_path_factory.mktemp("quiet"), {})


def test_it_repeats_the_step_in_which_devices_were_lost_and_takes_them_back(
    quiet: Any, tmp_path: Path, capfd: Any
) -> None:
    events = {1.5: [-1, -4, -6], 3: [-2, -3, -5], 4.75: [0, 1, 2, 3, 4, 5]}
    bits, made = guarded(tmp_path, events)
    assert bits == quiet[0]
    assert made == [(0, 8), (1, 8), (1, 4), (2, 4), (3, 2), (4, 2), (5, 8)]
    assert "devices 0, 3, 5 are lost in step 1: goes on after 1 step on 4 of 8" in (
        capfd.readouterr().err
    )


def test_it_goes_on_from_the_younger_of_safe_point_and_checkpoint(
    quiet: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tessera.elastic.rollback._loops", 0)
    monkeypatch.setenv("TESSERA_ELASTIC", str(tmp_path / "memory"))
    with pytest.raises(Crash):
        guarded(tmp_path, {2.75: [Crash]})
    checkpoint.wait()
    assert checkpoint.latest(tmp_path / "checkpoints") == "step-00000002"
    monkeypatch.setattr("tessera.elastic.rollback._loops", 0)  # as in a restarted program
    with pytest.raises(Crash):  # step 3 has run, and its checkpoint is saved
        guarded(tmp_path, {4: [Crash]}, safe_point=5)
    monkeypatch.setattr("tessera.elastic.rollback._loops", 0)
    bits, made = guarded(tmp_path, {})
    assert bits == quiet[0] and [i for i, _ in made] == [4, 5]


def test_a_signal_leaves_a_safe_point_of_the_last_step(
    quiet: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """No step is repeated if no checkpoint is read, as in the demo without --save-every."""
    monkeypatch.setattr("tessera.elastic.rollback._loops", 0)
    monkeypatch.setenv("TESSERA_ELASTIC", str(tmp_path / "memory"))
    with pytest.raises(Preempted) as caught:
        guarded(tmp_path, {2: ["told"]}, safe_point=5, resume=False)
    assert caught.value.saved.startswith("it is saved as step-00000003 in ")
    monkeypatch.setattr("tessera.elastic.rollback._loops", 0)
    bits, made = guarded(tmp_path, {}, resume=False)
    assert bits == quiet[0] and [i for i, _ in made] == [3, 4, 5]


def test_several_processes_without_safe_points_go_back_after_a_bad_loss(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tessera.elastic.rollback.process_count", lambda: 2)
    with pytest.warns(ts.EngineWarning, match="when one of several processes is lost"):
        _, made = guarded(tmp_path, {2.5: ["bad"]}, on_bad_loss="rollback")
    assert [i for i, _ in made] == [0, 1, 2, 2, 3, 4, 5]


def test_after_a_bad_loss_it_goes_back_to_what_came_of_it(tmp_path: Path) -> None:
    bad = {2.5: ["bad"]}
    plain = guarded(tmp_path / "plain", bad, on_bad_loss="rollback")
    bits, made = guarded(tmp_path / "lost", {**bad, 3: [-1]}, on_bad_loss="rollback")
    assert bits == plain[0] and [i for i, _ in made] == [0, 1, 2, 2, 3, 4, 5]
