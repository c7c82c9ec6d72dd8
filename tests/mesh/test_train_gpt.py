"""The demo's training: the same model on every mesh, and the files that it names."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tessera.train.metrics import Row, column, read_metrics
from tests.cases import LONG

ROOT = Path(__file__).resolve().parents[2]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 20
SMALL: dict[str, Any] = {
    "steps": STEPS, "batch": 8, "seq": 24, "d": 32, "layers": 2, "heads": 4, "vocab": 300,
    "lr": 1e-2, "val_batches": 1, "val_every": 10, "sample_tokens": 4, "prompt": "the ",
}  # fmt: skip

EITHER = ": name it, or leave it out"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of few words, some of which always occur together."""
    root = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    pairs = ["the cat", "the dog", "a bird", "some fish", "one horse"]
    ends = [" sleeps.\n", " is awake.\n", " sees "]
    for i in range(20):
        text = "".join(draw.choice(pairs) + draw.choice(ends) for _ in range(300))
        (root / f"{i}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(
    example: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, list[Row]]]:
    """Returns a function that runs the demo as a user does, each setting once, and gives its folder
    and rows."""
    root = tmp_path_factory.mktemp("runs")
    done: dict[str, Path] = {}

    def runs(mesh: str, **changed: Any) -> tuple[Path, list[Row]]:
        key = json.dumps([mesh, changed])
        if key not in done:
            out = root / str(len(done))
            settings = {**SMALL, **changed, "corpus": corpus, "cache": root / "kept"}
            example.main(**settings, mesh=mesh, out=out)
            done[key] = out
        return done[key], read_metrics(done[key] / "metrics.jsonl")

    return runs


@pytest.mark.parametrize(
    ("mesh", "changed"),
    [
        ("dp=2,tp=4", {}),
        pytest.param(
            "dp=2,tp=2,pp=2", {"zero": 3, "schedule": "ZB-H1", "recompute": "full"}, marks=LONG
        ),
        pytest.param("dp=8", {}, marks=LONG), pytest.param("tp=4", {}, marks=LONG),
        pytest.param("dp=2,tp=4", {"zero": 3}, marks=LONG),
        pytest.param("dp=2,tp=2,pp=2", {}, marks=LONG),
        pytest.param("dp=2,cp=2,pp=2", {"context": "ring"}, marks=LONG),
        pytest.param("dp=2,tp=2,pp=2", {"fold": "dp=1,tp=2,pp=2"}, marks=LONG),
    ],
)  # fmt: skip
def test_every_mesh_gives_the_losses_of_one_device(
    run: Callable[..., Any], mesh: str, changed: dict[str, Any]
) -> None:
    _, alone = run("dp=1")
    _, rows = run(mesh, **changed)
    for name in ("loss", "val_loss", "grad_norm"):
        steps, expected = column(alone, name)
        assert steps == ([10] if name == "val_loss" else list(range(STEPS)))
        np.testing.assert_allclose(column(rows, name)[1], expected, rtol=0, atol=1e-4)
    losses = column(rows, "loss")[1]
    assert losses[-1] < losses[0] - 1.0  # without learning, equal losses would prove nothing


@LONG
@pytest.mark.filterwarnings("ignore:the auxiliary loss of experts")  # the third case warns
@pytest.mark.parametrize(
    ("mesh", "like"),
    [
        ("dp=2,ep=4", "dp=1"), ("dp=4,tp=2", "dp=1"), ("dp=2,ep=2,pp=2", "dp=4,pp=2"),
    ],
)  # fmt: skip
def test_experts_train_alike_on_every_mesh(run: Callable[..., Any], mesh: str, like: str) -> None:
    """In a pipeline the auxiliary loss is that of microbatches, which are parts of each device's
    rows."""
    _, rows = run(mesh, moe=4, batch=16, steps=8)
    _, others = run(like, moe=4, batch=16, steps=8)
    np.testing.assert_allclose(column(rows, "loss")[1], column(others, "loss")[1], atol=1e-4)


def test_a_run_leaves_what_it_names(run: Callable[..., Any]) -> None:
    folder, rows = run("dp=2,tp=4")
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "graph.txt",
        "loss.png",
        "metrics.jsonl",
        "sample.txt",
        "schedule.txt",
        "weights.safetensors",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["mesh"] == "dp=2,tp=4" and (folder.parent / "kept" / config["text"]).is_dir()
    assert (folder / "graph.txt").read_text().startswith("graph train_step  v1  mesh dp=2 tp=4\n")
    assert (folder / "schedule.txt").read_text().startswith("schedule train_step  v1  mesh dp=2")
    assert (folder / "sample.txt").read_text().startswith("the ")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    weights = load_file(folder / "weights.safetensors")
    assert weights["blocks.layers.1.attention.qkv"].shape == (32, 3, 4, 8)
    assert {"step", "loss", "grad_norm", "step_s", "tokens_per_s", "mfu"} <= set(rows[0])


@LONG
def test_a_pipelined_run_shows_who_does_what_when(
    run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run("dp=2,tp=2,pp=2", steps=2)
    text = capsys.readouterr().out
    assert "rank 0 │ F0 F1 .  .  B0 ─  F2 B1 ─  F3 B2 ─  .  B3 ─" in text
    assert "stage 1 on devices 1, 3, 5, 7: " in text
    # Each stage's bytes equal its column of the planned peak, in the order of stages.
    held = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes of weights", text)]
    column = re.search(r"planned peak of a step.*?weights +([\d.]+) KiB +([\d.]+) KiB", text, re.S)
    assert column is not None
    assert [float(k) for k in column.groups()] == pytest.approx([b / 1024 for b in held], abs=0.1)
    assert "send         pp" in text
    assert (folder / "pipeline.svg").read_text().startswith("<svg")
    assert "pipeline=1F1B microbatches=4" in (folder / "schedule.txt").read_text()


def test_the_same_command_gives_the_same_run(run: Callable[..., Any]) -> None:
    first, rows = run("dp=2,tp=4")
    again, same = run("dp=2,tp=4", sample_tokens=SMALL["sample_tokens"])
    assert first != again
    assert column(rows, "loss") == column(same, "loss")
    assert (first / "sample.txt").read_text() == (again / "sample.txt").read_text()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mesh": "dp=2,xp=4"}, "--mesh: axis 'xp' is unknown here; name dp, tp, pp, cp or ep"),
        ({"mesh": "pp=8"}, "--mesh: name dp or tp too, for instance dp=1,cp=8"),
        ({"recompute": "some"}, "--recompute: 'some' is not one of none, full, products"),
        ({"dtype": "fp16"}, "--dtype: 'fp16' is not one of f32, bf16, fp8"),
        ({"zero": 3, "mesh": "tp=2"}, "--zero has no effect without dp in --mesh" + EITHER),
        (
            {"context": "ring", "mesh": "dp=2"},
            "--context has no effect without cp in --mesh" + EITHER,
        ),
        (
            {"schedule": "no", "mesh": "dp=1"},
            "--schedule has no effect without pp in --mesh" + EITHER,
        ),
        (
            {"microbatches": 4, "mesh": "dp=1"},
            "--microbatches has no effect without pp in --mesh" + EITHER,
        ),
        ({"keep_every": 2}, "--keep-every has no effect without --save-every" + EITHER),
        (
            {"schedule": "1G1B"},
            "pipeline: there is no schedule '1G1B' (use one of these, a Table, the name of a .csv "
            "file, or a function)",
        ),
        (
            {"fold": "pp=3"},
            "mesh.fold: pp=3 is no fold of the mesh (give a size that divides 2)",
        ),
        (
            {"mesh": "2x4"},
            "Mesh: cannot read '2x4' as axis=size (write each axis as name=size, for instance "
            "dp=2,tp=4)",
        ),
        (
            {"corpus": Path("/no/such/text")},
            "corpus: '/no/such/text' does not exist (name a directory of text files, or leave it "
            "out for the standard library)",
        ),
        (
            {"vocab": 10},
            "tokenizer: vocab cannot be 10 (give a whole number from 257 to 65536)",
        ),
        (
            {"d": 30},
            "GPTConfig: d=30, heads=4, kv_heads=4 do not divide (heads divides d, kv_heads divides "
            "heads)",
        ),
    ],
)
def test_a_wrong_option_is_one_line(
    example: Any, corpus: Path, tmp_path: Path, wrong: dict[str, Any], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = {**SMALL, "corpus": corpus, "cache": tmp_path, "out": tmp_path / "out", **wrong}
    with pytest.raises(example.typer.Exit) as stop:
        example.main(**settings)
    assert stop.value.exit_code == 2
    assert capsys.readouterr().err == f"error: {says}\n"
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_go_on_with_another_text(
    example: Any, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with a text of equal size, whose ids stand for other tokens."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"text": "that of then"}')
    goes_on = {"resume": tmp_path / "checkpoints", "out": tmp_path / "out"}
    for again in (goes_on, {"save_every": 2, "out": tmp_path}):
        with pytest.raises(example.typer.Exit):
            example.main(**SMALL, mesh="dp=1", corpus=corpus, cache=tmp_path / "kept", **again)
        says = f"--corpus: the checkpoints beside {tmp_path / 'config.json'} are of another text"
        assert says in capsys.readouterr().err


def test_a_window_longer_than_the_text_is_one_line(
    example: Any, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(example.typer.Exit):
        example.main(**{**SMALL, "seq": 10**7}, corpus=corpus, cache=tmp_path, out=tmp_path / "out")
    assert "hold no window of 10000000" in capsys.readouterr().err


@pytest.mark.long
def test_a_killed_run_that_is_resumed_has_the_same_weights(tmp_path: Path) -> None:
    """In a pipeline, like the demo; a run resumed on another mesh works too."""
    script = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--steps", "4"]
    small = ["--sample-tokens", "2", "--val-batches", "1", "--d", "64", "--layers", "2"]
    out = tmp_path / "out"
    prove = [*script, *small, "--prove-resume", "--out", str(out)]
    done = subprocess.run(prove, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "killed by signal 9" in done.stdout and "are the same, bit by bit" in done.stdout
    other = ["--mesh", "dp=4", "--zero", "3", "--resume", str(out / "killed" / "checkpoints")]
    again = [*script, *small, *other, "--out", str(tmp_path / "again")]
    done = subprocess.run(again, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "goes on after step 2" in done.stdout, done.stderr
    rows = [
        {row["step"]: row["loss"] for row in map(json.loads, path.read_text().splitlines())}
        for path in (tmp_path / "again" / "metrics.jsonl", out / "whole" / "metrics.jsonl")
    ]
    assert rows[0].keys() == {2, 3} and rows[0][3] == pytest.approx(rows[1][3], rel=1e-4)
