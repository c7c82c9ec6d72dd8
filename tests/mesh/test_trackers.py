"""Metric trackers, read back from their files."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import tessera as ts
from tessera.core.errors import UsageError
from tessera.train.metrics import MetricsWriter, read_metrics
from tessera.train.run import Run
from tessera.train.trackers import Several, TensorBoard, WandB, tracker


class Kept:
    """A tracker that records its calls."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[Any] = []
        self.fails = fails

    def config(self, settings: Mapping[str, Any]) -> None:
        self.told.append(dict(settings))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.told.append("closed")
        if self.fails:
            raise OSError("full")


def events(folder: Path) -> Iterator[Any]:
    """Yields the events of the one event file in `folder`: records of length, crc, data, crc."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events.out.tfevents.*")
    with open(path, "rb") as file:
        while head := file.read(12):
            (length,) = struct.unpack("<Q", head[:8])
            yield Event.FromString(file.read(length))
            file.read(4)


def scalars(folder: Path) -> dict[tuple[int, str], float]:
    return {
        (e.step, v.tag): v.simple_value
        for e in events(folder)
        for v in e.summary.value
        if v.HasField("simple_value")
    }


def texts(folder: Path) -> dict[str, str]:
    return {
        v.tag: v.tensor.string_val[0].decode()
        for e in events(folder)
        for v in e.summary.value
        if v.HasField("tensor")
    }


def log_records(held: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log: blocks of 32 KiB of (crc, length, kind, data)."""
    at, parts = 7, b""  # after the file header
    while at + 7 <= len(held):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15  # the rest of a block is too small for a record
        _, length, kind = struct.unpack("<IHB", held[at : at + 7])
        parts += held[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def wandb_rows(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (rows, settings) of the one transaction log below `folder`, without W&B's own
    fields."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("**/run-*.wandb")
    rows, config = [], {}
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        items = {
            "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item
        }
        if items:
            rows.append({k: v for k, v in items.items() if k[0] != "_" or k == "_step"})
        config.update({i.key: json.loads(i.value_json) for i in record.config.update if i.key})
    return rows, {k: v for k, v in config.items() if k[0] != "_"}


# ---- TensorBoard -------------------------------------------------------------------------------
def test_tensorboard_gets_numbers_as_scalars_and_the_rest_as_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    board = TensorBoard(tmp_path / "tb")
    board.config({"lr": 0.1, "out": tmp_path})
    board.log(0, {"loss": 2.5, "ok": True, "phase": "warm up", "nothing": None})
    board.log(7, {"loss": np.float32(1.25), "count": np.int32(3)})
    board.close()
    assert scalars(tmp_path / "tb") == {
        (0, "loss"): 2.5, (0, "ok"): 1.0, (7, "loss"): 1.25, (7, "count"): 3.0,
    }  # fmt: skip
    found = texts(tmp_path / "tb")
    assert found["phase/text_summary"] == "warm up"
    assert '"lr": 0.1' in found["config/text_summary"]


# ---- W&B ---------------------------------------------------------------------------------------
def test_wandb_writes_its_files_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off",
        "WANDB_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path),
        "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path),
        "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true", "WANDB_ERROR_REPORTING": "false",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    board = WandB(tmp_path / "wb", project="p", name="n", mode="offline")
    board.config({"lr": 0.1, "out": tmp_path})
    board.log(0, {"loss": 2.5})
    board.log(3, {"loss": 1.25, "phase": "warm up"})
    board.close()
    # Its service, a separate process, may still write after the end of the run.
    until = time.monotonic() + 20
    history, config = wandb_rows(tmp_path / "wb")
    while len(history) < 2 and time.monotonic() < until:
        time.sleep(0.1)
        history, config = wandb_rows(tmp_path / "wb")
    assert history == [
        {"_step": 0, "loss": 2.5},
        {"_step": 3, "loss": 1.25, "phase": "warm up"},
    ]
    assert config == {"lr": 0.1, "out": str(tmp_path)}


# ---- several, by name --------------------------------------------------------------------------
@pytest.mark.parametrize(("library", "name"), [("tensorboardX", "tensorboard"), ("wandb", "wandb")])
def test_a_library_that_is_missing_is_named_with_the_line_that_installs_it(
    library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError) as error:
        tracker(name, tmp_path)
    assert f"fix : pip install {library}" in str(error.value)
    assert os.listdir(tmp_path) == []


def test_a_tracker_by_name(tmp_path: Path) -> None:
    made = tracker("jsonl", tmp_path)
    made.log(2, {"loss": float("nan"), "share": np.float32(0.5)})
    made.close()
    assert (tmp_path / "tracked.jsonl").read_text() == '{"step": 2, "loss": "nan", "share": 0.5}\n'


def test_a_run_that_goes_back_has_no_step_twice_in_its_trackers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    own = Kept()
    for begin, end, back in ((0, 5, 3), (2, 4, 4)):  # in the same process, and in a resumed one
        lines = tracker("jsonl", tmp_path, resume=begin > 0)
        board = TensorBoard(tmp_path / f"from {begin}")
        run = Run(tmp_path / "run", steps=6, tokens_per_step=1, console=Console(file=io.StringIO()),
                  trackers=[lines, board, own], resume=begin > 0)  # fmt: skip
        with run:
            if begin:
                run.cut(begin)
            for i in range(begin, end):
                with run.step(i) as row:
                    row["loss"] = float(10 * begin + i)
            assert run.cut(back) == end - back
        assert [r["step"] for r in run.rows()] == list(range(back))
        assert [r["step"] for r in read_metrics(tmp_path / "tracked.jsonl")] == list(range(back))
    assert [r["loss"] for r in read_metrics(tmp_path / "tracked.jsonl")] == [0, 1, 22, 23]
    for begin, steps in ((0, [3]), (2, [2, 4])):
        found = events(tmp_path / f"from {begin}")
        assert [e.step for e in found if e.session_log.status == 1] == steps


def test_rows_that_stay_are_on_disk_while_others_are_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    for i in range(5):
        metrics.log(i, {"loss": i / 2})
    with monkeypatch.context() as m:
        m.setattr(MetricsWriter, "_write", lambda self: None)  # as if the process ended here
        assert metrics.cut(3) == 2
        assert [r["step"] for r in read_metrics(metrics.path)] == [0, 1, 2]
        metrics.log(3, {"loss": 9.0})  # the row is buffered
        metrics.log(4, {"loss": 9.0})
        assert metrics.cut(4) == 1
    metrics.close()
    assert [r["step"] for r in read_metrics(metrics.path)] == [0, 1, 2, 3]


def test_all_are_told_and_all_are_closed(tmp_path: Path) -> None:
    first, last = Kept(fails=True), Kept()
    both = Several([first, last])
    both.config({"a": 1})
    both.log(4, {"loss": 1.0})
    with pytest.raises(OSError, match="full"):
        both.close()
    assert first.told == last.told == [{"a": 1}, (4, {"loss": 1.0}), "closed"]
    with pytest.raises(UsageError, match="a tracker cannot be"):
        Several(["tensorboard"])  # type: ignore[list-item]


# ---- a run -------------------------------------------------------------------------------------
def test_a_run_tells_its_trackers_what_it_writes(tmp_path: Path, mesh: ts.dist.Mesh) -> None:
    kept = Kept()
    grads = {"w": ts.tensor(np.array([3.0, 0.0, -4.0, 0.0], "f4"), mesh=mesh, layout="[4@dp]")}
    run = Run(
        tmp_path, steps=1, tokens_per_step=10, settings={"lr": 0.1}, trackers=[kept],
        console=Console(file=io.StringIO()),
    )  # fmt: skip
    with run, run.step(0) as row:
        row.update(loss=ts.tensor(2.0), grads=ts.debug.statistics(grads))
    (told,) = read_metrics(tmp_path / "metrics.jsonl")
    assert kept.told[0] == {"lr": 0.1} and kept.told[-1] == "closed"
    assert kept.told[1] == (0, {k: v for k, v in told.items() if k != "step"})
    assert {k: v for k, v in told.items() if k.startswith("grads")} == {
        "grads/w/norm": 5.0, "grads/w/max_abs": 4.0, "grads/w/mean": -0.25, "grads/w/zeros": 0.5,
        "grads/w/nonfinite": 0.0,
    }  # fmt: skip


def of_steps(folder: Path, *steps: int, fails: int | None = None, **how: Any) -> tuple[Run, str]:
    """Runs a user's loop over these steps; returns the run and its output."""
    said = io.StringIO()
    console = Console(file=said, width=200)
    with Run(folder, steps=9, tokens_per_step=1, console=console, **how) as run:
        for i in steps:
            with suppress(ZeroDivisionError), run.step(i) as row:
                fail, fails = i == fails, None if i == fails else fails
                row["loss"] = 1 / (not fail)
    return run, said.getvalue()


def test_a_loop_that_goes_back_without_a_guard_has_no_step_twice(tmp_path: Path) -> None:
    """After a resume, or a failed step. Two loops in a run keep the rows of both, with a
    warning."""
    own = Kept()
    of_steps(tmp_path, 0, 1, 2)
    run, said = of_steps(tmp_path, 2, 3, 4, resume=True, trackers=own)
    assert [r["step"] for r in run.rows()] == [0, 1, 2, 3, 4]
    assert "run: the rows of 1 steps from 2 on come again" in said
    assert [told[0] for told in own.told[1:-1]] == [2, 3, 4]
    run, said = of_steps(tmp_path, 0, 1, 2, 3, 2, 3, fails=3)
    assert [r["step"] for r in run.rows()] == [0, 1, 2, 3]
    assert "run: the rows of 1 steps from 2 on come again" in said
    run, said = of_steps(tmp_path, 0, 1, 0, 1)
    assert [r["step"] for r in run.rows()] == [0, 1, 0, 1]
    assert said.count("has a row already") == 1 and "call run.cut(0) before" in said


class Other:
    """A number of an unknown library."""

    shape = (1, 1)

    def item(self) -> float:
        return 2.0


NUMBERS: dict[str, Any] = {
    "tessera": ts.tensor([2.0]), "numpy": np.float32(2), "array": np.full((1, 1), 2.0),
    "torch": torch.tensor(2.0), "other": Other(), "python": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("library", NUMBERS)
def test_a_row_takes_the_numbers_of_any_library(library: str, tmp_path: Path) -> None:
    run = Run(tmp_path, steps=1, tokens_per_step=1, console=Console(file=io.StringIO()))
    with run, run.step(0) as row:
        row["x"] = NUMBERS[library]
    with MetricsWriter(tmp_path / "own.jsonl") as metrics:
        metrics.log(0, {"x": NUMBERS[library]})
    assert run.rows()[0]["x"] == read_metrics(metrics.path)[0]["x"] == 2.0


def test_a_run_takes_trackers_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a tracker cannot be"):
        Run(tmp_path, steps=1, tokens_per_step=1, trackers=["wandb"])  # type: ignore[list-item]


def test_the_writer_is_a_tracker(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.config({"lr": 1})
        writer.log(0, {"loss": 1.0})
        writer.write(1, loss=2.0)
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0},
    ]  # fmt: skip
