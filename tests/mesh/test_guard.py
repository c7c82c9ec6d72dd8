"""Guarded runs: no steps, samples or bits are lost, however the run ends."""

from __future__ import annotations

import io
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from rich.console import Console

import tessera as ts
from tessera import checkpoint, dist, nn, optim
from tessera.data import create_dataloader
from tessera.train import guard as signals
from tessera.train import recipe
from tessera.train.bad_loss import LossError
from tessera.train.guard import Guard, TrainState
from tessera.train.metrics import read_metrics
from tessera.train.run import Preempted, Run
from tessera.train.saving import load_checkpoint
from tessera.train.watchdog import HUNG
from tests.cases import LONG

SMALL: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "sequence_length": 4,
    "batch_size": 2, "learning_rate": 1e-2, "total_steps": 100, "dropout": 0.1,
    "data": np.arange(900) % 16, "seed": 3,
}  # fmt: skip
STEPS = 6


def written(slow: bool = False) -> None:
    """Waits until the save is written: these steps are faster than a disk."""
    while checkpoint.saving.pending() and not slow:
        time.sleep(0.01)


STEP: dict[str, Any] = {}  # of each configuration, compiled once


def step_of(config: dict[str, Any]) -> Any:
    key = repr({k: v for k, v in config.items() if k != "data"})
    return STEP.setdefault(key, recipe.make_step(config))


class Trained:
    """A recipe's run in `folder`, as in a user's script: its state, rows and output."""

    def __init__(self, folder: Path, steps: int = STEPS, **config: Any) -> None:
        self.c = {**SMALL, **config}
        weights = recipe.initialize_model_weights(self.c)
        state = recipe.initialize_optimizer_state(weights, self.c)
        self.batches: Any = create_dataloader(self.c)
        self.live = TrainState(weights, state, self.batches)
        self.step = step_of(self.c)
        self.said = io.StringIO()
        self.folder, self.steps = folder, steps
        self.seen: list[Any] = []
        self.slow = False

    def __call__(self, after: Any = None, loss_of: Any = None, **guard: Any) -> Trained:
        console = Console(file=self.said, width=1000)
        live = self.live
        run = Run(self.folder, steps=self.steps, tokens_per_step=8, console=console, resume=True)
        with run, Guard(run, live, **{"every": 2, **guard}) as self.guard:
            for step in self.guard:
                with run.step(step) as row:
                    batch = next(self.batches)
                    self.seen.append(batch["input_ids"].numpy().tobytes())
                    row["loss"], live.weights, live.optimizer = self.step(
                        batch, live.weights, live.optimizer
                    )
                    if loss_of is not None:
                        row["loss"] = loss_of(step, self.guard, row["loss"])
                written(self.slow)
                if after is not None:
                    after(step)
        return self

    @property
    def bits(self) -> dict[str, bytes]:
        weights = {k: w.numpy().tobytes() for k, w in self.live.weights.items()}
        moments = {f"m {k}": w.numpy().tobytes() for k, w in self.live.optimizer["m"].items()}
        return weights | moments

    @property
    def losses(self) -> list[float]:
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [r["step"] for r in rows] == list(range(len(rows)))
        return [float(r["loss"]) for r in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run without faults."""
    return Trained(tmp_path_factory.mktemp("whole"))()


class Crash(Exception):
    pass


def crash_at(step: int) -> Any:
    def after(done: int) -> None:
        if done == step:
            raise Crash

    return after


def test_a_run_that_crashes_goes_on_with_the_same_bits(whole: Trained, tmp_path: Path) -> None:
    """Weights, moments, rows, dropout and the order of the data; it reports the step of the
    checkpoint."""
    first = Trained(tmp_path)
    with pytest.raises(Crash):
        first(crash_at(4))
    checkpoint.wait()
    (tmp_path / "checkpoints" / "step-00000005").mkdir()
    rest = tmp_path / "checkpoints" / "step-00000005" / f"data-{'0' * 12}-00000-00000.bin"
    rest.write_bytes(b"a save that was killed")
    again = Trained(tmp_path)()
    assert again.seen == whole.seen[4:] and again.losses == whole.losses
    assert again.bits == whole.bits
    line = next(x for x in again.said.getvalue().splitlines() if "found" in x)
    assert re.match(r"run: found step-00000004 of \d+ (s|min) ago in ", line)
    assert "goes on after step 4; 1 steps that came after it are made again" in line
    assert line.endswith("left out: saves that did not end (step-00000005)")
    assert "checkpoint: step-00000006 is saved" in again.said.getvalue()
    done = Trained(tmp_path)()
    assert done.guard.run.median_speed == "none was made"
    assert done.seen == [] and "all 6 steps were made before" in done.said.getvalue()
    assert done.bits == whole.bits
    more = Trained(tmp_path / "other", STEPS + 1)(resume=tmp_path / "checkpoints")
    assert len(more.seen) == 1
    found = load_checkpoint(tmp_path / "checkpoints")  # guard and recipe share one format
    assert found.step == STEPS and found.loader["sample"] == 2 * STEPS


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=LONG)])
def test_a_signal_saves_after_the_step(signum: int, whole: Trained, tmp_path: Path) -> None:
    before = signal.getsignal(signum)

    def after(done: int) -> None:
        if done in (2, 4):
            os.kill(os.getpid(), signum)
            os.kill(os.getpid(), signum)  # a launcher forwards a signal that ranks got already

    first = Trained(tmp_path)
    with pytest.raises(Preempted) as caught:
        first(after)
    assert caught.value.code == 128 + signum and signal.getsignal(signum) is before
    said = first.said.getvalue()
    name = signal.Signals(signum).name
    assert f"run: {name}: it saves after this step" in said
    assert f"run: ended by {name} after 3 steps; it is saved as step-00000003 in" in said
    again = Trained(tmp_path)
    with pytest.raises(Preempted):
        again(after)
    said = again.said.getvalue()
    assert f"run: ended by {name} after 5 steps; it is saved as step-00000005 in" in said
    last = Trained(tmp_path)()
    assert again.seen + last.seen == whole.seen[3:] and last.bits == whole.bits


def test_a_signal_whose_save_fails_says_what_there_is(tmp_path: Path) -> None:
    run = Trained(tmp_path)

    def after(done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            full.__enter__()

    full = files_of_at_most(2000)
    try:
        with pytest.raises(Preempted):
            run(after)
    finally:
        full.__exit__(None, None, None)
    ended = "run: ended by SIGTERM after 3 steps; it is not saved; the newest is step-00000002 in"
    assert ended in run.said.getvalue()


def test_a_second_signal_does_not_wait(tmp_path: Path, monkeypatch: Any) -> None:
    def after(done: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(signals, "SAME_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        Trained(tmp_path)(after, every=None)
    assert caught.value.code == 143 and not isinstance(caught.value, Preempted)
    assert not (tmp_path / "checkpoints").exists()


def test_a_damaged_checkpoint_is_passed_over(whole: Trained, tmp_path: Path) -> None:
    Trained(tmp_path, 4)()
    (file,) = (tmp_path / "checkpoints" / "step-00000004").glob("data-*")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    again = Trained(tmp_path)()
    assert "'step-00000004' is damaged" in again.said.getvalue()
    assert "found step-00000002" in again.said.getvalue() and again.bits == whole.bits
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    with pytest.raises(ts.CheckpointError, match="do not fit 'step-0000000"):
        Trained(tmp_path, num_layers=2)()


def bad_where(data: set[int], value: float = float("nan")) -> Any:
    """Returns a loss function that gives `value` for the batches `data`."""
    return lambda step, guard, loss: value if step + guard.skipped in data else loss


def test_a_bad_loss_goes_back_and_leaves_the_batches_out(whole: Trained, tmp_path: Path) -> None:
    run = Trained(tmp_path)(loss_of=bad_where({3}), on_bad_loss="rollback")
    assert run.guard.skipped == 2 and len(run.losses) == STEPS
    # Steps 0 to 3, then again from step 2 on, with the batches after 3.
    long = Trained(tmp_path / "long", 8)(every=None)
    assert run.seen == long.seen[:4] + long.seen[4:]
    assert "step 3 is bad: its loss is nan; it goes back to step-00000002" in run.said.getvalue()
    assert "leaves out batches 2 to 3" in run.said.getvalue()
    # Skipped batches stay skipped after a crash.
    more = Trained(tmp_path, 7)(on_bad_loss="rollback")
    assert more.guard.skipped == 2 and more.live.loader.state_dict()["sample"] == 2 * 9


def test_weights_that_were_saved_bad_are_not_used_again(tmp_path: Path) -> None:
    """All batches from 4 on fail with the weights of step 3, so the run goes back to the checkpoint
    of step 2."""
    state = {"bad": True}

    def loss_of(step: int, guard: Guard, loss: Any) -> Any:
        if guard._bad_tags:
            state["bad"] = False
        return float("inf") if state["bad"] and step >= 4 else loss

    run = Trained(tmp_path)(loss_of=loss_of, on_bad_loss="rollback")
    said = run.said.getvalue()
    assert said.count("it goes back to step-00000004") == 1
    assert said.count("it goes back to step-00000002") == 1 and len(run.losses) == STEPS


def test_a_bad_loss_has_an_end(tmp_path: Path) -> None:
    always = bad_where(set(range(3, 99)))
    with pytest.raises(LossError, match="it went back 2 times before") as caught:
        Trained(tmp_path)(loss_of=always, on_bad_loss="rollback", rollbacks=2)
    assert "newest checkpoint : step-00000002" in str(caught.value)
    with pytest.raises(LossError, match="step 3 is bad: its loss is nan"):
        Trained(tmp_path / "stop")(loss_of=always)
    with pytest.raises(LossError, match="there is no checkpoint to go back to"):
        Trained(tmp_path / "none")(loss_of=always, on_bad_loss="rollback", every=None)
    assert len(Trained(tmp_path / "go on")(loss_of=always, on_bad_loss="ignore").losses) == STEPS


def test_a_run_that_begins_anew_goes_back_to_none_of_the_run_before(tmp_path: Path) -> None:
    Trained(tmp_path, 4)()
    checkpoint.wait()
    anew = Trained(tmp_path, 8)
    with pytest.raises(LossError, match="there is no checkpoint to go back to") as error:
        anew(loss_of=bad_where({3}), resume=False, every=8, on_bad_loss="rollback")
    assert "newest checkpoint : none" in str(error.value)


def test_a_state_of_optax_goes_on(tmp_path: Path) -> None:
    def trained(folder: Path, after: Any = None) -> bytes:
        ts.seed(0)
        optimizer, layer = optim.from_optax(optax.adamw(0.1)), nn.Linear(3, 2)
        live = TrainState(layer, optimizer.init(layer))

        @ts.jit
        def step(layer: Any, state: Any, x: Any) -> Any:
            loss = (layer(x) ** 2).mean()
            weights, state = optimizer.update(layer, ts.grad(loss, layer), state)
            layer.load_parameters(weights)
            return loss, state

        run = Run(folder, steps=6, tokens_per_step=1, console=Console(quiet=True), resume=True)
        with run, Guard(run, live, every=2) as guard:
            for i in guard:
                with run.step(i) as row:
                    row["loss"], live.optimizer = step(layer, live.optimizer, ts.ones((4, 3)) * i)
                written()
                if after is not None:
                    after(i)
        return layer.weight.numpy().tobytes()

    whole = trained(tmp_path / "whole")
    with pytest.raises(Crash):
        trained(tmp_path / "cut", crash_at(4))
    assert trained(tmp_path / "cut") == whole


def test_a_guard_says_where_a_loader_came_or_went(tmp_path: Path) -> None:
    for first, second, says in (
        (None, "loader", "step-00000002 has no position of a loader"),
        ("loader", None, "has the position of a loader, which is not taken"),
    ):
        folder = tmp_path / str(first)
        for steps, has in ((2, first), (4, second)):
            one = Trained(folder, steps)
            one.live.loader = one.batches if has else None
            one()
            checkpoint.wait()
        assert says in one.said.getvalue()


def test_a_run_that_goes_on_from_another_folder_misses_nothing_in_its_own(tmp_path: Path) -> None:
    Trained(tmp_path / "a", 2)()
    checkpoint.wait()
    two = Trained(tmp_path / "b", 4)(resume=tmp_path / "a" / "checkpoints")
    assert two.guard.begin == 2 and "is gone" not in two.said.getvalue()


def test_rows_of_a_run_that_never_saved_do_not_stay(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        Trained(tmp_path)(crash_at(1), every=None)
    assert len(Trained(tmp_path)(every=None).losses) == STEPS


@pytest.mark.parametrize(("given", "write", "says"), [
    ({}, lambda run, step: None, "does not write the row of the step"),
    ({}, lambda run, step: step + 1, "does not write the row of the step"),
    ({"spike": 2.0}, lambda run, step: step, "'loss' or 'grad_norm', but train_loss"),
    ({}, lambda run, step: step, ""),
    ({"on_bad_loss": "ignore"}, lambda run, step: None, ""),
])  # fmt: skip
def test_a_loss_that_nobody_sees_is_told_once(
    given: Any, write: Any, says: str, tmp_path: Path
) -> None:
    one = Trained(tmp_path)
    run = Run(tmp_path, steps=3, tokens_per_step=1, console=Console(quiet=True))
    with warnings.catch_warnings(record=True) as caught, run, Guard(run, one.live, **given) as g:
        warnings.simplefilter("always")
        for step in g:
            if (number := write(run, step)) is not None:
                with run.step(number) as row:
                    row["train_loss"] = 1.0
    found = [str(w.message) for w in caught if issubclass(w.category, ts.OptionWarning)]
    assert len(found) == bool(says) and all(says in text for text in found)


@pytest.mark.parametrize("loss", [None, "unknown", True])
def test_a_loss_may_be_any_value_of_a_row(loss: Any, tmp_path: Path) -> None:
    said = io.StringIO()
    run = Run(tmp_path, steps=1, tokens_per_step=1, console=Console(file=said))
    with run, run.step(0) as row:
        row["loss"] = loss
    assert run.rows()[0]["loss"] is loss or run.rows()[0]["loss"] == loss
    assert "1/1" in said.getvalue()


def test_a_spike_is_a_bad_loss(tmp_path: Path) -> None:
    run = Trained(tmp_path, 12)(
        loss_of=bad_where({10}, 90.0), on_bad_loss="rollback", spike=3.0, keep=2
    )
    assert "step 10 is bad: its loss is 90, and that of the steps before it" in run.said.getvalue()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limits the size of files, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_said_once_a_save_and_training_goes_on(
    whole: Trained, tmp_path: Path
) -> None:
    full = files_of_at_most(2000)

    def after(done: int) -> None:
        if done == 2:
            full.__enter__()
        if done == 4:
            full.__exit__(None, None, None)

    run = Trained(tmp_path)(after)
    lines = [x for x in run.said.getvalue().splitlines() if "is not saved" in x]
    assert len(lines) == 1 and "step-00000004 is not saved: checkpoint: " in lines[0]
    assert "File too large; step-00000002 stays" in lines[0]
    assert run.bits == whole.bits and checkpoint.latest(tmp_path / "checkpoints") == "step-00000006"
    assert checkpoint.verify("step-00000002", tmp_path / "checkpoints")


def test_a_folder_that_goes_is_made_again_and_a_last_save_that_fails_is_an_error(
    whole: Trained, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"

    def gone(done: int) -> None:
        if done == 2:
            shutil.rmtree(root)

    run = Trained(tmp_path)(gone)
    assert run.bits == whole.bits
    assert f"run: step-00000002 is gone from {root}" in run.said.getvalue()
    assert checkpoint.latest(root) == "step-00000006"

    def blocked(done: int) -> None:
        if done == 4:
            shutil.rmtree(root)
            root.write_text("no folder")

    run = Trained(tmp_path / "blocked")
    root = tmp_path / "blocked" / "checkpoints"
    with pytest.raises(ts.CheckpointError, match="cannot be"):
        run(blocked)
    assert "there is no other checkpoint" in run.said.getvalue()


def test_a_slow_drive_delays_saves_and_not_steps(
    whole: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.saving.written

    def slow(job: Any) -> None:
        while len(run.seen) < 5:
            time.sleep(0.01)
        write(job)

    monkeypatch.setattr(checkpoint.saving, "written", slow)
    run = Trained(tmp_path)
    run.slow = True
    run()
    assert "run: step-00000004 waits: the save before it is still being" in run.said.getvalue()
    assert run.bits == whole.bits
    assert checkpoint.latest(tmp_path / "checkpoints") == "step-00000006"


ZERO3 = dist.strategy("zero_redundancy_optimizer", stage=3)
TP = dist.strategy("tensor_parallel")
MESHES: dict[str, tuple[Any, Any]] = {
    "dp=4": (lambda: dist.Mesh.parse("dp=4 tp=2"), ZERO3 + TP),
    "folded": (lambda: dist.Mesh.parse("dp=4 tp=2").fold(onto="dp=2,tp=1"), ZERO3 + TP),
    "one": (lambda: dist.Mesh.parse("dp=4 tp=2").fold(onto=1), ZERO3 + TP),
}


def modular(folder: Path, place: str, after: Any = None) -> tuple[dict[str, bytes], Any]:
    """Trains a module updated in place under `mesh_invariant`; returns the bits of its weights."""
    make, plan = MESHES[place]
    mesh, optimizer, said = make(), optim.AdamW(1e-2), io.StringIO()
    ts.seed(0)
    model = dist.place(nn.GPT(nn.GPTConfig(16, 4, 8, 1, 2, dropout=0.1)), plan, mesh)
    live = TrainState(model, optimizer.init(model.parameters(), plan))

    @ts.jit
    def train_step(model: Any, state: Any, ids: Any) -> Any:
        loss = model.loss(ids, ids)
        weights = model.parameters()
        weights, new = optimizer.update(weights, ts.grad(loss, weights, layout=plan), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    rows = np.random.default_rng(0).integers(0, 16, (STEPS, 8, 4)).astype(np.int32)
    console = Console(file=said, width=1000)
    with dist.deterministic(level="mesh_invariant"):
        run = Run(folder, steps=STEPS, tokens_per_step=8, console=console, resume=True)
        with run, Guard(run, live, every=2) as guard:
            for step in guard:
                with run.step(step) as row:
                    ids = dist.place(rows[step + guard.skipped], plan, mesh, kind="batch")
                    row["loss"] = train_step(model, live.optimizer, ids)
                written()
                if after is not None:
                    after(step)
    weights = {k: w.numpy().tobytes() for k, w in model.parameters().items()}
    rows_of = read_metrics(folder / "metrics.jsonl")
    return weights, [(row["step"], row["loss"]) for row in rows_of]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Any]:
    return modular(tmp_path_factory.mktemp("undisturbed"), "dp=4")


@pytest.mark.parametrize(
    ("stops", "goes_on"),
    [
        pytest.param(a, b, marks=[LONG] * ((a, b) != ("folded", "dp=4")))
        for a in ("dp=4", "folded") for b in ("folded", "one", "dp=4")
    ],
)  # fmt: skip
def test_another_mesh_goes_on_with_the_same_bits(
    stops: str, goes_on: str, undisturbed: tuple[dict[str, bytes], Any], tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        modular(tmp_path, stops, crash_at(3))
    assert modular(tmp_path, goes_on) == undisturbed


def test_a_state_that_is_not_put_back_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=4, tokens_per_step=8, console=Console(file=io.StringIO()))
    trained = Trained(tmp_path)
    with run, Guard(run, trained.live, every=2) as guard:  # noqa: SIM117
        with pytest.raises(ts.UsageError, match="put what a step gives back"):
            trained.live.optimizer["step"].item()
            for step in guard:
                with run.step(step) as row:
                    row["loss"] = 1.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"resume": "no/where"}, "no checkpoint to go on from in 'no/where'"),
    ],
)
def test_arguments_without_a_meaning(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ts.TesseraError, match=says) as caught:
        Trained(tmp_path)(**given)
    assert "fix" in str(caught.value)


def test_a_guard_that_is_called_otherwise_says_how(tmp_path: Path) -> None:
    trained, said = Trained(tmp_path / "a"), io.StringIO()

    def run(**how: Any) -> Run:
        return Run(tmp_path / "a", steps=4, tokens_per_step=8, console=Console(file=said), **how)

    with run() as made:
        with pytest.raises(ts.UsageError, match="it was not entered"):
            next(iter(Guard(made, trained.live)))
        with pytest.raises(ts.UsageError, match=r"give TrainState\(model, state, loader\)"):
            Guard(made, trained.live.weights)
        live = TrainState(trained.live.weights, trained.live.optimizer, [1, 2])
        with pytest.raises(ts.UsageError, match="Guard: 3 arguments by place, where it takes 2"):
            Guard(made, trained.live.weights, trained.live.optimizer)  # type: ignore[call-arg]
        with pytest.raises(ts.UsageError, match=r"live\.loader cannot be \[1, 2\]"):
            Guard(made, live)
    Trained(tmp_path / "a")(every=2)
    with pytest.raises(ts.CheckpointError, match=r"name its root, resume='.*/a/checkpoints'"):
        tag = tmp_path / "a" / "checkpoints" / "step-00000004"
        with run() as made, Guard(made, trained.live, root=tmp_path / "none", resume=tag):
            pass
    with run(resume=True) as made, Guard(made, trained.live):
        assert made.waits
    unasked = pytest.raises(ts.UsageError, match="the guard gave out no step 0")
    with unasked, run(resume=True) as made, Guard(made, trained.live), made.step(0):
        pass


@pytest.mark.parametrize("epochs", [None, 1])
def test_a_loader_that_ends_before_the_run_says_so(epochs: int | None, tmp_path: Path) -> None:
    """The loop calls `next` for each batch, which raises StopIteration."""
    ends = Trained(tmp_path, 9, data=np.arange(41) % 16, epochs=epochs)
    with pytest.raises(ts.UsageError, match="it has no batch for step 5 of 9") as caught:
        ends()
    assert '"epochs": math.inf' in str(caught.value) and len(ends.losses) == 5
    assert "stopped by an error after 5 of 9 steps" in ends.said.getvalue()
    with pytest.raises(StopIteration, match="dataloader: 1 epochs are given out"):
        next(ends.live.loader)
    on = Trained(tmp_path, 9, data=np.arange(41) % 16, epochs=math.inf)()
    assert on.guard.begin == 4 and len(on.losses) == 9


HANGS = """
import sys, time, io
import numpy as np
import tessera as ts
from tessera.train.guard import Guard, TrainState
from tessera.train.run import Run

def gets_stuck():
    time.sleep(100)

state = {"step": ts.tensor(0) + 0}
run = Run(sys.argv[1], steps=9, tokens_per_step=1)
with run, Guard(run, TrainState({"w": ts.tensor([1.0])}, state), hang_s=8) as guard:
    for step in guard:
        if step == 2:
            gets_stuck()
        with run.step(step) as row:
            row["loss"] = 1.0
            state["step"] = state["step"] + 1
"""


def test_a_step_that_hangs_is_reported_and_ended(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == HUNG, done.stderr
    assert "run: step 2 has not ended within 8 s, so this process ends" in done.stderr
    assert "in gets_stuck" in done.stderr
