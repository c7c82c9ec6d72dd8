"""Unusual calls of `save` and `load`: the given values, in the given place."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint
from tessera.checkpoint import writing
from tessera.checkpoint.storage import Storage

W = {"w": np.arange(4, dtype=np.float32)}


def save(tag: str, tensors: Any = W, optimizer: Any = None, **how: Any) -> None:
    checkpoint.save(tag, tensors, optimizer, async_io=False, quiet=True, **how)


@pytest.mark.parametrize("given", [ts.ones((3,)), [ts.ones((3,))], {"a": {1: ts.ones((3,))}}])
def test_trees_of_all_kinds_come_back_by_name(given: Any, tmp_path: Path) -> None:
    save("a", given, {"nan": math.nan, "inf": math.inf, "n": 1 << 80}, root=tmp_path)
    found = checkpoint.load("a", root=tmp_path)
    by_name = found.tensors if isinstance(given, ts.Tensor) else next(iter(found.tensors.values()))
    assert by_name.numpy().tolist() == [1.0, 1.0, 1.0]
    into = checkpoint.load("a", given, root=tmp_path).tensors
    assert type(into) is type(given)
    assert math.isnan(found.optimizer["nan"]) and found.optimizer["inf"] == math.inf
    assert found.optimizer["n"] == 1 << 80


def test_numbers_of_numpy_and_a_number_by_itself(tmp_path: Path) -> None:
    save("a", W, 7, root=tmp_path, step=np.int64(3), metrics={"loss": np.float32(2.5)})
    found = checkpoint.load(root=tmp_path)
    assert (found.optimizer, found.step, found.metrics) == (7, 3, {"loss": 2.5})


def test_a_program_that_changes_its_folder_saves_where_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    goes, data = threading.Event(), writing._data

    def late(job: Any, id: str) -> Any:
        assert goes.wait(60)
        return data(job, id)

    monkeypatch.setattr(writing, "_data", late)
    checkpoint.save("a", W, root="runs", quiet=True)
    monkeypatch.chdir("other")
    goes.set()
    checkpoint.wait()
    assert not [*(tmp_path / "other").iterdir()]
    assert checkpoint.latest(tmp_path / "runs") == "a"
    save("b", root="~/runs")
    save("c", root=f"file://{tmp_path}/runs")
    assert (tmp_path / "home/runs/b/manifest.json").exists()
    assert checkpoint.latest(tmp_path / "runs") == "c"


def test_a_metric_that_is_no_number_is_not_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = checkpoint.Keep(1, best=1)
    for i, loss in enumerate([1.0, math.nan, 0.5, math.inf, math.nan, 3.0]):
        save(f"s{i}", root=tmp_path / "a", metrics={"loss": loss}, keep=keep)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["s2", "s5"]
    for i in range(2):
        keep = checkpoint.Keep(1, best=1, metric="val_loss") if i else None
        metrics = None if i else {"loss": 1.0}
        checkpoint.save(f"s{i}", W, async_io=False, root=tmp_path / "b", metrics=metrics, keep=keep)
    said = "checkpoint: s0 went: none has the metric 'val_loss', by which best=1 stay;"
    assert f"{said} there are: loss" in capsys.readouterr().err.splitlines()


def test_numbers_that_are_not_finite_come_back_from_state_as_from_metrics(tmp_path: Path) -> None:
    odd = {"best": math.inf, "worst": -math.inf, "none": math.nan}
    checkpoint.save("a", W, async_io=False, root=tmp_path, metrics=odd, state=[odd], quiet=True)
    found = checkpoint.load(root=tmp_path)
    np.testing.assert_equal([found.metrics, found.state[0]], [odd, odd])


def test_a_manifest_that_cannot_be_used_is_passed_over_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("a", root=tmp_path)
    save("b", root=tmp_path)
    (tmp_path / "b/manifest.json").write_text("{")
    assert checkpoint.load(root=tmp_path).tag == "a"
    said = f"checkpoint: the manifest of '{tmp_path}/b' cannot be used: a is taken for the latest"
    assert said in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("done", ["saved anew", "removed"])
def test_what_is_replaced_while_it_is_read_is_not_called_damaged(
    done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("a", root=tmp_path)
    read = Storage.read

    def late(self: Storage, key: str, most: int | None = None) -> bytes | None:
        if key.endswith(".bin"):
            monkeypatch.setattr(Storage, "read", read)
            if done == "removed":
                save("b", root=tmp_path, keep=1)
            else:
                save("a", root=tmp_path)
        return read(self, key, most)

    monkeypatch.setattr(Storage, "read", late)
    with pytest.raises(ts.CheckpointError, match=f"'a' was {done} while it was read"):
        checkpoint.load("a", root=tmp_path)


def test_a_donated_tensor_is_not_saved(tmp_path: Path) -> None:
    w = ts.ones((4,))
    ts.jit(lambda w: w + 1, donate=("w",))(w)
    with pytest.raises(ts.DonatedError):
        save("a", {"w": w}, root=tmp_path)


def test_two_savers_of_one_tag_do_not_tear_it(tmp_path: Path) -> None:
    save("a", root=tmp_path)
    with (
        Storage(tmp_path).held("a"),
        pytest.raises(ts.CheckpointError, match="another process writes 'a'"),
    ):
        save("a", root=tmp_path)
    assert checkpoint.verify("a", tmp_path) == 16
    save("a", root=tmp_path)


@pytest.mark.parametrize("waits", [False, True])
def test_a_save_that_fails_after_the_last_line_is_the_exit_status(
    waits: bool, tmp_path: Path
) -> None:
    program = f"""
import atexit
atexit.register(print, "too early")
import tessera as ts
from tessera import checkpoint
from tessera.checkpoint import writing
atexit.register(print, "at exit")

def full(job, id):
    raise ts.CheckpointError("the disk is full", at="")

writing._data = full
checkpoint.save("a", {{"w": ts.ones(4)}}, root={str(tmp_path)!r})
if {waits}:
    try:
        checkpoint.wait()
    except ts.CheckpointError:
        print("handled")
print("last line")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if waits:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1 and done.stderr == "the disk is full\n"
        assert done.stdout == "last line\nat exit\n"
