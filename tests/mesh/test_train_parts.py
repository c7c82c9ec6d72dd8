"""Parts of a training loop: sampling, evaluation, text, speed, folders."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera.core.errors import OptionWarning, UsageError
from tessera.core.mesh import Mesh
from tessera.train.evaluate import mean_loss
from tessera.train.generate import generate
from tessera.train.metrics import MetricsWriter, read_metrics
from tessera.train.run import Run, fresh_folder
from tessera.train.sampling import sample, uniform
from tessera.train.text import prepare
from tessera.train.throughput import gemm_peak

VOCAB = 11


def adds_last_two(ids: ts.Tensor) -> ts.Tensor:
    """Logits [B, S, V] of a model that predicts the sum of the last two tokens, mod V."""
    before = ts.concat([ids[:, :1] * 0, ids[:, :-1]], 1)
    return ts.one_hot((ids + before) % VOCAB, VOCAB) * 50.0


# ---- generate ----------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [None, Mesh.parse("dp=2,tp=4")])
def test_generation_reads_the_last_token_of_the_window_and_slides(mesh: Mesh | None) -> None:
    found = generate(adds_last_two, [1, 1], 12, window=6, temperature=0.0, mesh=mesh)
    expected = [1, 1]
    while len(expected) < 14:
        expected.append((expected[-1] + expected[-2]) % VOCAB)
    assert found == expected


def test_generation_ends_before_the_stop_token() -> None:
    assert generate(adds_last_two, [1, 1], 12, window=6, temperature=0.0, stop=8) == [1, 1, 2, 3, 5]


@pytest.mark.parametrize("stop", [[8, 5], (5, 8), np.array([5, 8]), ts.tensor([5])])
def test_generation_ends_before_any_of_several_tokens(stop: Any) -> None:
    assert generate(adds_last_two, [1, 1], 12, window=6, temperature=0.0, stop=stop) == [1, 1, 2, 3]


def test_generation_without_a_stop_token_goes_on() -> None:
    for stop in (None, []):
        assert len(generate(adds_last_two, [1, 1], 5, window=6, temperature=0.0, stop=stop)) == 7


def test_a_prompt_longer_than_the_window_is_kept_whole() -> None:
    assert generate(adds_last_two, [9, 9, 9, 1, 2], 1, window=2, temperature=0.0)[-2:] == [2, 3]


def test_the_seed_decides_the_sample() -> None:
    def undecided(ids: ts.Tensor) -> ts.Tensor:
        return ts.one_hot(ids, VOCAB) * 0.0

    runs = [generate(undecided, [0], 20, window=4, seed=s, top_k=0) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_sampling_follows_temperature_and_filters() -> None:
    at = uniform([0], 8000)[0]
    logits = np.tile(np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), (8000, 1))

    def shares(**how: float) -> Any:
        return np.bincount(sample(logits, at, **how).numpy(), minlength=4) / 8000

    np.testing.assert_allclose(shares(), [0.1, 0.2, 0.3, 0.4], atol=0.02)
    np.testing.assert_allclose(shares(temperature=0.5), np.array([1, 4, 9, 16]) / 30, atol=0.02)
    np.testing.assert_allclose(shares(top_k=2), [0, 0, 3 / 7, 4 / 7], atol=0.02)
    np.testing.assert_allclose(shares(top_p=0.71), [0, 2 / 9, 3 / 9, 4 / 9], atol=0.02)
    np.testing.assert_allclose(shares(min_p=0.6), [0, 0, 3 / 7, 4 / 7], atol=0.02)
    for cold in (0.0, 1e-320):
        assert (sample(logits, at, temperature=cold).numpy() == 3).all()
    assert (sample(logits[:2], [0.0, 1.0]).numpy() == [3, 0]).all()
    with pytest.raises(UsageError, match=r"^sample: temperature cannot be inf"):
        sample(logits, at, temperature=float("inf"))


def test_a_repeated_token_is_less_likely() -> None:
    def likes_three(ids: ts.Tensor) -> ts.Tensor:
        return ts.one_hot(ids * 0 + 3, VOCAB) * 2.0 + ts.one_hot(ids * 0 + 5, VOCAB)

    def found(repetition: float) -> Any:
        return generate(likes_three, [3], 2, window=4, temperature=0.0, repetition=repetition)

    assert [found(r) for r in (1.0, 1.5, 3.0)] == [[3, 3, 3], [3, 3, 3], [3, 5, 3]]


class Words:
    """A tokenizer of letters: "a" is 0."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_text_goes_in_and_comes_out() -> None:
    """Tokens b, b, then their sums mod 11."""
    how: Any = {"window": 6, "temperature": 0.0, "tokenizer": Words()}
    assert generate(adds_last_two, "bb", 6, **how) == "bbcdfick"
    assert generate(adds_last_two, ["bb", "c"], 3, **how) == ["bbcdf", "cceg"]
    for stop, text, ids in (
        ("fi", "bbcd", [1, 1, 2, 3]),
        (["ic", "zz"], "bbcdf", [1, 1, 2, 3, 5]),
        ([8, "zz"], "bbcdf", [1, 1, 2, 3, 5]),
        (["c", "cd"], "bb", [1, 1]),
    ):
        for stream in (None, [].append):
            assert generate(adds_last_two, "bb", 6, stop=stop, stream=stream, **how) == text
            assert generate(adds_last_two, [1, 1], 6, stop=stop, stream=stream, **how) == ids


def test_a_stream_joins_to_the_text() -> None:
    """It holds back what may be the beginning of a stop string."""
    for prompt, stop in (("bb", "fk"), ("bb", "fi"), ("bb", None), ([1, 1], "fi"), ([1, 1], 8)):
        pieces: list[Any] = []
        how: Any = {"window": 6, "temperature": 0.0, "tokenizer": Words(), "stop": stop}
        text = generate(adds_last_two, prompt, 6, stream=pieces.append, **how)
        assert text == sum(pieces, prompt) if isinstance(prompt, list) else prompt + "".join(pieces)
        assert len(pieces) >= (6 if stop in ("fk", None) else 3)
    several: list[Any] = []
    found = generate(adds_last_two, [[1, 1], [2]], 4, window=6, temperature=0.0, stop=5,
                     stream=several.append)  # fmt: skip
    assert several[0] == [[2], [2]] and several[-1][0] == []
    assert found == [[1, 1, 2, 3], [2, 2, 4, 6, 10]]


@pytest.mark.parametrize(("prompt", "tokens", "window"), [([], 1, 4), ([1], -1, 4), ([1], 1, 0)])
def test_generation_needs_a_prompt_a_count_and_a_window(
    prompt: list[int], tokens: int, window: int
) -> None:
    with pytest.raises(UsageError, match=r"^generate: "):
        generate(adds_last_two, prompt, tokens, window=window)


def test_sampling_refuses_negative_numbers() -> None:
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": -1.0}, {"min_p": -1.0}):
        with pytest.raises(UsageError, match="cannot be -1"):
            sample(np.zeros((1, 3)), [0.5], **wrong)


# ---- evaluation and speed ----------------------------------------------------------------------
def test_the_mean_loss_is_over_batches() -> None:
    assert mean_loss(lambda x: ts.tensor(x).sum(), [[1.0, 2.0], [4.0, 5.0]]) == 6.0
    with pytest.raises(UsageError, match="there are no batches"):
        mean_loss(lambda x: ts.tensor(x).sum(), [])


def test_the_gemm_peak_is_a_speed() -> None:
    assert 1e8 < gemm_peak(256, seconds=0.05) < 1e15
    assert gemm_peak(256, seconds=0.05) == gemm_peak(256, seconds=0.05)
    with pytest.raises(UsageError, match="size cannot be 0"):
        gemm_peak(0)


# ---- text --------------------------------------------------------------------------------------
def write_corpus(root: Path, word: str) -> None:
    root.mkdir(exist_ok=True)
    for i in range(8):
        (root / f"{i}.txt").write_text(f"{word} {i}\n" * 50)


def test_text_is_made_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    corpus, cache = tmp_path / "corpus", tmp_path / "kept"
    write_corpus(corpus, "apple")
    first = prepare(corpus, vocab=270, cache=cache)
    made = (first.kept_at / "train.npy").stat().st_mtime_ns
    second = prepare(corpus, vocab=270, cache=cache)
    assert second.kept_at == first.kept_at
    assert (second.kept_at / "train.npy").stat().st_mtime_ns == made
    np.testing.assert_array_equal(second.train, first.train)
    assert "apple" in first.tokenizer.decode(first.train[:40])
    assert prepare(corpus, vocab=280, cache=cache).kept_at != first.kept_at
    write_corpus(corpus, "pears")  # of the same length as before
    changed = prepare(corpus, vocab=270, cache=cache)
    assert "pears" in changed.tokenizer.decode(changed.train[:40])
    assert sorted(p.name for p in cache.iterdir() if p.name.startswith(".")) == []


def test_text_that_fails_to_be_made_leaves_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", "apple")
    with pytest.raises(UsageError):
        prepare(tmp_path / "corpus", vocab=3, cache=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


# ---- the run's folder --------------------------------------------------------------------------
def test_a_run_writes_rows_reads_tensors_and_knows_its_speed(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run", steps=3, tokens_per_step=100, model_flops=1e3, peak_flops=1e9,
        settings={"lr": 0.1, "out": tmp_path}, console=Console(file=io.StringIO()),
    )  # fmt: skip
    with run:
        for i in range(3):
            with run.step(i, val_loss=9.0) as row:
                row.update(loss=ts.tensor(2.0 - i))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(r["step"], r["loss"], r["val_loss"]) for r in rows] == [
        (0, 2.0, 9.0),
        (1, 1.0, 9.0),
        (2, 0.0, 9.0),
    ]
    for r in rows:
        assert r["tokens_per_s"] == pytest.approx(100 / r["step_s"], rel=0.02)
        # The row is rounded to microseconds, and a step takes less than a hundred of them.
        assert r["mfu"] == pytest.approx(1e3 / r["step_s"] / 1e9, rel=0.02, abs=1e-4)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {
        "lr": 0.1,
        "out": str(tmp_path),
    }
    assert re.fullmatch(r"\d+ ms +[\d.]+[kM]? tokens/s  MFU [\d.]+ %", run.median_speed)


def test_a_step_that_fails_writes_no_row(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=2, tokens_per_step=1, console=Console(file=io.StringIO()))
    with pytest.raises(ZeroDivisionError), run:
        with run.step(0) as row:
            row["loss"] = 1.0
        with run.step(1) as row:
            row["loss"] = 1 / 0
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0]


def test_an_earlier_runs_files_do_not_stay(tmp_path: Path) -> None:
    (tmp_path / "sample.txt").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")
    said = io.StringIO()

    def run(**how: Any) -> Run:
        console = Console(file=said, width=400)
        return Run(tmp_path, steps=1, tokens_per_step=1, console=console, **how)

    with run() as first, first.step(0) as row:
        row["loss"] = 1.0
    assert [name for name, _, _ in first.files()] == ["config.json", "metrics.jsonl"]
    assert (tmp_path / "mine.txt").read_text() == "mine"
    removed = f"run: what an earlier run left in {tmp_path} is removed: "
    assert f"{removed}sample.txt; Run(..., resume=True) keeps it\n" in said.getvalue()
    with run(resume=True) as again:
        assert len(again.rows()) == 1 and said.getvalue().count("is removed") == 1
    with run() as other:
        assert other.rows() == []
    assert f"{removed}config.json, metrics.jsonl (1 rows); " in said.getvalue()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spare": 3}, "Run: spare cannot be 3"),
        ({"trackers": [MetricsWriter]}, "trackers: a tracker cannot be an object of type type"),
    ],
)
def test_arguments_without_a_meaning_remove_nothing(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UsageError, match=says):
        Run(tmp_path, **{"steps": 1, "tokens_per_step": 1, **given})
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("number", [-1, 0.5, "first", None])
def test_a_step_has_a_number(number: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, steps=1, tokens_per_step=1, console=Console(file=io.StringIO()))
    with run, pytest.raises(UsageError, match=r"Run\.step: number cannot be"), run.step(number):
        pass
    with pytest.raises(UsageError, match="the row of step 0 comes after the end"), run.step(0):
        pass
    with pytest.warns(OptionWarning, match=r"write with run\.step\(i\) as row"):
        run.step(1)


def test_paths_are_paths() -> None:
    for make in (lambda: Run(None, steps=1, tokens_per_step=1), lambda: MetricsWriter(3),
                 lambda: read_metrics(None)):  # type: ignore[arg-type]  # fmt: skip
        with pytest.raises(UsageError, match=r"cannot be (None|3)\n.*\n  fix : give a path"):
            make()


def test_metrics_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be written: Is a directory\n"):
        MetricsWriter(tmp_path)


def test_a_row_that_was_cut_off_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for cut, counted in ('{"step": 1, "lo', 0), ('{"step": 1}', 0), ('{"step": 1}\n', 1):
        path.write_text('{"step": 0}\n' + cut)
        with MetricsWriter(path, append=True) as metrics:
            assert metrics.cut(1) == counted
            metrics.write(1, loss=2.0)
        assert read_metrics(path) == [{"step": 0}, {"step": 1, "loss": 2.0}]
    path.write_text('{"step": 0}')
    with MetricsWriter(path, append=True) as metrics:
        assert metrics.cut(1) == 0
        metrics.write(1)
    assert read_metrics(path) == [{"step": 1}]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be a folder for results"):
        Run(tmp_path / "file", steps=1, tokens_per_step=1)


def test_a_fresh_folder_is_one_that_is_not_there(tmp_path: Path) -> None:
    for expected in ("gpt", "gpt-2", "gpt-3"):
        made = fresh_folder(tmp_path, "gpt")
        assert made == tmp_path / expected
        made.mkdir()
