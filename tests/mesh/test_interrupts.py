"""Training state after an interrupt or an error at any time: complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim
from tessera.core import files, interrupts
from tessera.data.create import create_dataloader
from tessera.lang.jit import argument_updates
from tessera.train.metrics import read_metrics
from tests.cases import LONG, short

SOAK = Path(__file__).parents[2] / "bench" / "soak" / "interrupts.py"


@LONG
@pytest.mark.parametrize("signals", [(), ("--alarm",)])
def test_signals_at_random_times_disturb_no_loss(signals: tuple[str, ...]) -> None:
    """Without protection each of these kinds loses its weights, or mixes those of two steps."""
    kinds = ("kept", "state apart", "zero", *(() if signals else ("recording",)))
    here = {**os.environ, "PYTHONPATH": str(SOAK.parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, SOAK, "--signals", "12", "--small", *signals, "--kinds", ",".join(kinds)],
        env=here, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("the same losses, weights and moments") == len(kinds)


class Step:
    """Three weights and their moments, and a step that changes all of them."""

    def __init__(self, donate: tuple[str, ...] = ("model", "state")) -> None:
        self.model = nn.Linear(4, 4)
        adam = optim.AdamW(1e-2)
        self.state = adam.init(self.model)

        @ts.jit(donate=donate)
        def step(model: Any, state: Any, x: Any) -> Any:
            loss = (model(x) ** 2).mean()
            weights, new = adam.update(model, ts.grad(loss, model), state)
            model.load_parameters(weights)
            state.update(new)
            return loss

        self.step, self.x = step, ts.ones((2, 4))

    def __call__(self) -> float:
        return float(self.step(self.model, self.state, self.x).item())

    def values(self) -> list[np.ndarray[Any, Any]]:
        s = self.state
        parts = [self.model.parameters(), s["m"], s["v"], {"step": s["step"]}]
        return [t.numpy() for part in parts for t in part.values()]


@pytest.mark.parametrize("donate", [(), ("model", "state")])
def test_what_is_raised_between_two_weights_leaves_all_of_one_step(
    monkeypatch: pytest.MonkeyPatch, donate: tuple[str, ...]
) -> None:
    """An exception of another thread, or of a user's signal handler, can come anywhere."""
    ts.seed(2)
    calm, hit = Step(donate), Step(donate)
    hit.model.load_state_dict({k: t.numpy() for k, t in calm.model.state_dict().items()})
    left = 10**9
    really = nn.Parameter.fill, argument_updates._put

    def now() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    def fill(self: Any, data: Any, type: Any) -> None:
        now()
        really[0](self, data, type)

    def put(*args: Any) -> None:
        now()
        really[1](*args)

    monkeypatch.setattr(nn.Parameter, "fill", fill)
    monkeypatch.setattr(argument_updates, "_put", put)
    assert calm() == hit()
    came = 0
    for nth in range(1, 9):
        left = nth
        try:
            hit()
        except KeyboardInterrupt:
            came += 1
        left = 10**9
        calm()
        for a, b in zip(calm.values(), hit.values(), strict=True):
            assert a.tobytes() == b.tobytes()
    assert came >= 5  # two weights, two dicts of moments, the count
    assert calm() == hit()


def test_an_exception_as_the_engine_returns_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ts.seed(2)
    hit = Step()
    hit()
    program = hit.step.programs[0]
    kind: Any = type(program)
    call = kind.__call__

    def interrupted(self: Any, *args: Any) -> Any:
        call(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(kind, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hit()
    assert hit.state["step"].item() == 2
    hit()
    assert hit.state["step"].item() == 3


def test_a_step_that_fails_draws_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @ts.jit
    def noise(x: Any) -> Any:
        return x + ts.random.uniform((3,))

    x = ts.zeros(3)
    ts.seed(5)
    wanted = [noise(x).numpy().tolist() for _ in range(3)]
    ts.seed(5)
    assert noise(x).numpy().tolist() == wanted[0]
    kind: Any = type(noise.programs[0])

    def fails(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as m:
        m.setattr(kind, "__call__", fails)
        with pytest.raises(MemoryError):
            noise(x)
    assert [noise(x).numpy().tolist() for _ in range(2)] == wanted[1:]


def test_recordings_that_fail_are_not_counted_as_changes() -> None:
    failing = True

    @ts.jit
    def f(x: Any) -> Any:
        if failing:
            raise ValueError("not yet")
        return x + 1

    for _ in range(4):
        with pytest.raises(ValueError, match="not yet"):
            f(ts.ones(2))
    failing = False
    assert f(ts.ones(2)).numpy().tolist() == [2.0, 2.0]


PROGRAM = """
import os, signal, sys, time
import tessera as ts
from tessera.core.interrupts import whole

@whole
def slow(s):
    end = time.monotonic() + s
    while time.monotonic() < end:
        pass
    return "kept"
"""


def ran(folder: Path, lines: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM + lines)
    here = {**os.environ, "PYTHONPATH": str(SOAK.parents[2] / "src")}
    return subprocess.run(
        [sys.executable, folder / "program.py"],
        env=here, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


PRESS = "import threading; threading.Timer({0}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"


def test_the_second_press_arrives_at_once_and_the_first_one_says_why_it_waits(
    tmp_path: Path,
) -> None:
    done = ran(
        tmp_path,
        PRESS.format(0.2) + PRESS.format(1.6)
        + "start = time.monotonic()\n"
        "try: slow(30)\n"
        "except KeyboardInterrupt: print(time.monotonic() - start < 15)\n"
    )  # fmt: skip
    assert done.stdout.split() == ["True"], done.stderr
    assert done.stderr == (
        "Ctrl-C: this call goes on to its end, so that nothing is half changed; press it again to"
        " stop now\n"
    )


def test_a_result_is_in_its_variable_before_the_interrupt_arrives(
    tmp_path: Path,
) -> None:
    done = ran(
        tmp_path,
        PRESS.format(0.2) +
        "x = None\n"
        "def body():\n"
        "    global x\n"
        "    (\n        x\n    ) = slow(0.5)\n"
        "    time.sleep(20)\n"
        "try: body()\n"
        "except KeyboardInterrupt: print(x)\n"
    )  # fmt: skip
    assert done.stdout.split() == ["kept"], done.stderr


def test_a_statement_that_goes_on_is_interrupted_all_the_same(
    tmp_path: Path,
) -> None:
    done = ran(
        tmp_path,
        PRESS.format(0.2) + "start = time.monotonic()\n"
        "try: slow(0.4); time.sleep(20)\n"
        "except KeyboardInterrupt: print(time.monotonic() - start < 5)\n",
    )
    assert done.stdout.split() == ["True"], done.stderr


def test_a_loop_that_the_statement_calls_later_is_interrupted(tmp_path: Path) -> None:
    done = ran(
        tmp_path,
        PRESS.format(0.2) + "start = time.monotonic()\n"
        "def loop():\n"
        "    for _ in range(60):\n"
        "        slow(0.1)\n"
        "try: slow(0.3); loop()\n"
        "except KeyboardInterrupt: print(time.monotonic() - start < 5)\n",
    )
    assert done.stdout.split() == ["True"], done.stderr


def test_the_handler_that_was_there_is_called_and_stays() -> None:
    seen: list[int] = []

    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, mine)
    try:
        ts.jit(lambda x: x + 1)(ts.ones(2))
        assert type(signal.getsignal(signal.SIGINT)) is interrupts.Handler
        time.sleep(2 * interrupts.DELAY_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ts.jit(lambda x: x + 1)(ts.ones(2))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_loader_gives_the_same_batch_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made() -> Any:
        tokens = np.arange(4000, dtype=np.uint16) % 50
        return iter(create_dataloader({"data": tokens, "sequence_length": 8, "batch_size": 2}))

    calm, hit = made(), made()
    wanted = [next(calm)["input_ids"].numpy().tolist() for _ in range(5)]
    found = [next(hit)["input_ids"].numpy().tolist() for _ in range(2)]
    really = hit._place

    def interrupted(rows: Any) -> Any:
        monkeypatch.setattr(hit, "_place", really)
        raise KeyboardInterrupt

    monkeypatch.setattr(hit, "_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(hit)
    found += [next(hit)["input_ids"].numpy().tolist() for _ in range(3)]
    assert found == wanted
    hit.close()
    calm.close()


# ---- a run -------------------------------------------------------------------------------------
RUN = """
import io, os, resource, shutil, signal, sys
from pathlib import Path
from rich.console import Console
import tessera as ts
from tessera import nn
from tessera.train.run import Run

out = Path(sys.argv[1])
model = nn.Linear(4, 4)
run = Run(
    out / "run", steps=4, tokens_per_step=1, settings={"seed": 1}, spare=SPARE,
    console=Console(file=sys.stdout, width=400), weights=lambda: model.state_dict(),
)
with run:
    for i in range(4):
        with run.step(i) as row:
            row["loss"] = model(ts.ones((1, 4))).mean()
        if i == 1:
            HERE
run.save_text("sample.txt", "words")
"""


def test_an_interrupted_run_saves_its_weights_and_says_where(tmp_path: Path) -> None:
    lines = RUN.replace("SPARE", "None").replace("HERE", "raise KeyboardInterrupt")
    done = ran_with(tmp_path, lines)
    assert done.returncode == -signal.SIGINT
    assert done.stdout.splitlines()[-1] == (
        "run: interrupted after 2 of 4 steps; the weights are in "
        f"{tmp_path}/run/weights.safetensors"
    )
    assert (tmp_path / "run" / "weights.safetensors").stat().st_size > 80
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("trouble", short(["deleted", "a file", "full"], "deleted"))
def test_a_run_goes_on_where_it_cannot_write(tmp_path: Path, trouble: str) -> None:
    """All steps run, and the outputs are in the folder or in the spare one."""
    here = {
        "deleted": "shutil.rmtree(out / 'run')",
        "a file": "shutil.rmtree(out / 'run'); (out / 'run').write_text('')",
        "full": "resource.setrlimit(resource.RLIMIT_FSIZE, (run.metrics.path.stat().st_size + 9,"
        " resource.RLIM_INFINITY))",
    }[trouble]
    room = "(out / 'spare')"
    lines = RUN.replace("SPARE", room).replace("HERE", here)
    if trouble == "full":  # space is freed before the end
        lines = lines.replace("run.save_text", "print('more', flush=True)\nrun.save_text")
        lines = lines.replace("        if i == 1:", "        if i == 3: resource.setrlimit("
                              "resource.RLIMIT_FSIZE, (-1, -1))\n        if i == 1:")  # fmt: skip
    done = ran_with(tmp_path, lines)
    assert done.returncode == 0, done.stderr
    place = tmp_path / ("spare" if trouble == "a file" else "run")
    assert [r["step"] for r in read_metrics(place / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (place / "weights.safetensors").stat().st_size > 80
    assert (place / "sample.txt").read_text() == "words\n"
    assert not [p for p in place.iterdir() if "part" in p.name]
    told = [line for line in done.stdout.splitlines() if "cannot be written" in line]
    assert len([line for line in told if "metrics" in line]) == (trouble != "deleted")
    assert done.stdout.count("weights.safetensors is in") == (trouble == "a file")


def test_a_file_that_is_interrupted_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    files.write_whole(path, b"old")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def ran_with(folder: Path, lines: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(lines)
    here = {**os.environ, "PYTHONPATH": str(SOAK.parents[2] / "src")}
    return subprocess.run(
        [sys.executable, folder / "program.py", folder],
        env=here, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
