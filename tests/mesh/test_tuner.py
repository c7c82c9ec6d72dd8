"""Tuning of compiled functions: what is timed, which recording stays, what is recorded on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tessera as ts
from tessera import dist, nn, optim, pipeline, schedule
from tessera.autotune import records
from tessera.autotune.choices import words
from tessera.core import flags
from tessera.core.context import replaced
from tessera.ir.schedule.text import parse
from tessera.lang.jit import tuner
from tessera.lang.jit.tuner import Tuner
from tessera.launch.cli import app
from tessera.runtime import compile_options
from tessera.runtime.compile_options import LEAST_MEMORY, LIBRARIES, compiler_options
from tessera.runtime.devices import start

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
PRODUCT = ts.jit(lambda x: ts.tanh(x @ x).sum())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the records; library fusions are on."""
    start(8)
    monkeypatch.setenv("TESSERA_PROGRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(flags, "_fuses", [True])
    yield tmp_path / "tuning"
    records.records_in(tmp_path / "tuning").close()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The seconds of each candidate by name: 1.0 if it is not listed. Each program runs as well."""
    seconds: dict[str, float] = {}
    real = Tuner._run

    def run(self: Tuner, entry: Any) -> float:
        real(self, entry)
        name = next(k for k, e in self._entries.items() if e is entry)
        return seconds.get(words(eval(name)), 1.0)

    monkeypatch.setattr(Tuner, "_run", run)
    return seconds


def names(fn: Any) -> list[str]:
    return [words(t.choices) for t in fn.timings]


def picked(fn: Any) -> str:
    return next(words(t.choices) for t in fn.timings if t.chosen)


def step(w: ts.Tensor, x: ts.Tensor) -> Any:
    loss = (ts.tanh(x @ w) ** 2).mean()
    return w - 0.5 * ts.grad(loss, w), loss


def batch() -> tuple[ts.Tensor, ts.Tensor]:
    mesh = dist.Mesh(("dp",), shape={"dp": 4})
    return ts.tensor(X, mesh=mesh), ts.tensor(X, mesh=mesh, layout="[8@dp, 8]")


def test_a_tuned_step_gives_what_the_step_gives_and_takes_over_what_is_donated(
    table: dict[str, float],
) -> None:
    table |= {"library=older": 0.5, "overlap=True": 0.9}
    w, x = batch()
    plain, tuned = ts.jit(step), schedule(tune=True)(ts.jit(step, donate="w"))
    assert tuned.timings == ()
    a, b = w, w + 0.0
    for _ in range(3):
        a, want = plain(a, x)
        old = b
        b, got = tuned(b, x)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
        with pytest.raises(ts.DonatedError):
            old.numpy()
    np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-5, atol=1e-5)
    assert picked(tuned) == "library=older" and plain.timings == ()
    assert {"overlap=True", "algorithm=ring", "instruction_order=least_memory"} < {*names(tuned)}
    assert all(t.step_s > 0 and t.temporary_bytes is not None for t in tuned.timings)


def test_the_text_and_the_inspection_say_what_was_chosen(table: dict[str, float]) -> None:
    table |= {"library=older": 0.5}
    w, x = batch()
    tuned = schedule(tune=True)(ts.jit(step))
    tuned(w, x)
    head = tuned.schedule.text.split("\n")[0]
    told = "tuned: library=older, 2.00 times as fast as the defaults, "
    assert "options choices=library:older  # " + told in head and told in str(dist.inspect(tuned))
    assert parse(tuned.schedule.text).text.split("\n")[1:] == tuned.schedule.text.split("\n")[1:]
    assert parse(tuned.schedule.text).hash == tuned.schedule.hash
    assert tuned.choices.choices == (("library", "older"),)


def test_a_second_function_reads_what_the_first_one_recorded(
    table: dict[str, float], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    table |= {"library=older": 0.5}
    first = schedule(tune=True)(PRODUCT)
    first(ts.tensor(X))
    monkeypatch.setattr(Tuner, "search", lambda self: pytest.fail("nothing is timed again"))
    again = schedule(tune=True)(ts.jit(lambda x: ts.tanh(x @ x).sum()))
    again(ts.tensor(X))
    assert picked(again) == picked(first) == "library=older"
    assert "2.00 times as fast" in again.schedule.text
    monkeypatch.setattr(compile_options, "cores", lambda: 64)  # another machine
    with pytest.raises(pytest.fail.Exception):
        schedule(tune=True)(PRODUCT)(ts.tensor(X))


def test_a_failed_candidate_is_recorded_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    real, tried = Tuner._run, []

    def run(self: Tuner, entry: Any) -> float:
        choices = dict(entry.root.program().schedule.options.schedule.choices or ())
        tried.append(choices)
        if choices == {"library": "older"}:
            raise ts.BackendError("out of memory", fix="none")
        return real(self, entry)

    monkeypatch.setattr(Tuner, "_run", run)
    first = schedule(tune=True)(PRODUCT)
    first(ts.tensor(X))
    assert next(t for t in first.timings if t.error).choices == {"library": "older"}
    assert tried.count({"library": "older"}) == 1
    row = records.records_in(folder).failed(records.id_of({}))
    assert row == []  # of another program
    lines = [json.loads(line) for line in records.records_in(folder).lines() if line]
    assert [r["choices"] for r in lines if r.get("error")] == [{"library": "older"}]
    monkeypatch.setattr(records.Records, "choice", lambda self, id: None)
    schedule(tune=True)(ts.jit(lambda x: ts.tanh(x @ x).sum()))(ts.tensor(X))
    assert tried.count({"library": "older"}) == 1


def test_an_interrupt_loses_no_sample_and_changes_no_state(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    real, count = Tuner._run, [0]

    def run(self: Tuner, entry: Any) -> float:
        count[0] += 1
        if count[0] == 8:
            raise KeyboardInterrupt
        return real(self, entry) + 1.0

    monkeypatch.setattr(Tuner, "_run", run)
    w, x = batch()
    tuned = schedule(tune=True)(ts.jit(step, donate="w"))
    with pytest.raises(KeyboardInterrupt):
        tuned(w, x)
    assert np.array_equal(w.numpy(), X)  # it is not donated yet
    lines = [json.loads(line) for line in records.records_in(folder).lines() if line]
    assert sum("time_s" in row for row in lines) >= 3 and not any("chosen" in r for r in lines)
    monkeypatch.setattr(Tuner, "_run", real)
    want = ts.jit(step)(ts.tensor(X, mesh=w.mesh), x)[1]
    np.testing.assert_allclose(tuned(w, x)[1].numpy(), want.numpy(), rtol=1e-5, atol=1e-5)


def test_choices_of_the_recording_are_tuned_too(table: dict[str, float]) -> None:
    table |= {"layers=loop": 0.5, "attention_scores=65536": 0.6, "block_rows=128": 0.7}
    model = nn.GPT(nn.GPTConfig(vocab=64, seq=256, d=32, layers=2, heads=4))
    ids = ts.tensor(np.arange(1024).reshape(4, 256) % 64)

    def loss(model: Any, ids: ts.Tensor) -> ts.Tensor:
        return model.loss_of(model.features(ids), ids)

    tuned = schedule(tune=True)(ts.jit(loss))
    value = tuned(model, ids)
    both = "layers=loop attention_scores=65536 block_rows=128"
    found = {n.split("=")[0] for n in names(tuned)}
    assert {"layers", "attention_scores", "block_rows", "library"} <= found
    assert {*both.split()} < {*names(tuned)}
    assert any(n.op == "scan" for n in tuned.graph.nodes) and "layers:loop" in tuned.schedule.text
    np.testing.assert_allclose(
        value.numpy(), ts.jit(loss)(model, ids).numpy(), rtol=1e-5, atol=1e-5
    )


def test_the_form_of_attention_is_open_where_the_user_names_none(table: dict[str, float]) -> None:
    table |= {"attention=sequences": 0.5}
    q = ts.tensor(np.random.default_rng(0).normal(size=(4, 2, 64, 8)).astype(np.float32))

    def attend(q: ts.Tensor) -> ts.Tensor:
        return nn.flash_attention(q, q, q, causal=True)

    tuned = schedule(tune=True)(ts.jit(attend))
    got, want = tuned(q), ts.jit(attend)(q)
    assert picked(tuned) == "attention=sequences"
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)
    fixed = schedule(choices={"attention": "sequences"})(ts.jit(attend))
    assert np.array_equal(fixed(q).numpy(), got.numpy())


def test_a_program_that_fails_has_no_record(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def run(self: Tuner, entry: Any) -> float:
        raise ts.BackendError("out of memory", fix="none")

    with monkeypatch.context() as patch:
        patch.setattr(Tuner, "_run", run)
        schedule(tune=True)(PRODUCT)(ts.tensor(X))
    lines = [json.loads(line) for line in records.records_in(folder).lines() if line]
    assert lines and not any("chosen" in row for row in lines)


def test_what_the_user_has_set_is_not_open(table: dict[str, float]) -> None:
    w, x = batch()
    tuned = schedule(tune=True, overlap=True, choices={"library": "preferred"})(ts.jit(step))
    tuned(w, x)
    found = {n.split("=")[0] for n in names(tuned)}
    assert not found & {"overlap", "library"} and "algorithm" in found


@pytest.mark.parametrize("level", ["run_to_run", "mesh_invariant"])
def test_above_fast_only_choices_that_keep_the_bits_are_timed(
    table: dict[str, float], level: Any
) -> None:
    table |= {"overlap=True": 0.5}
    w, x = batch()
    with dist.deterministic(level=level):
        plain = ts.jit(step)(w, x)
        tuned = schedule(tune=True)(ts.jit(step))
        got = tuned(w, x)
    assert {n.split("=")[0] for n in names(tuned)} == {"the defaults", "overlap"}
    assert picked(tuned) == "overlap=True"
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(plain, got, strict=True))


def test_functions_that_read_values_step_by_step_and_pipelines_are_tuned(
    table: dict[str, float],
) -> None:
    table |= {"library=older": 0.5, "microbatches=2": 0.4}
    read = schedule(tune=True)(lambda x: x @ x * (2 if float(x.sum()) > 1 else 3))
    np.testing.assert_allclose(read(ts.tensor(X)).numpy(), X @ X * 3, rtol=1e-5, atol=1e-5)
    assert picked(read) == "library=older"
    with replaced(executor="stepped"):
        stepped = schedule(tune=True)(lambda x: x @ x)
        np.testing.assert_allclose(stepped(ts.tensor(X)).numpy(), X @ X, rtol=1e-5, atol=1e-5)
    assert picked(stepped) == "library=older"
    mesh = dist.Mesh(("pp",), shape={"pp": 2})

    @pipeline.run(mesh_axes=("pp",), schedule="1F1B", mesh=mesh)
    def model(w: Any, x: Any) -> Any:
        for i in range(2):
            x = ts.tanh(x @ w[f"w{i}"])
        return x

    def loss(w: Any, x: Any) -> Any:
        return model(w, x).mean()

    piped = schedule(tune=True)(ts.jit(loss))
    w = {"w0": X, "w1": X}
    value = piped(w, X)
    assert picked(piped) == "microbatches=2" and "microbatches=2" in piped.schedule.text
    np.testing.assert_allclose(value.numpy(), ts.jit(loss)(w, X).numpy(), rtol=1e-5, atol=1e-5)


def test_random_numbers_and_weights_are_those_of_a_step_that_is_not_tuned(
    table: dict[str, float],
) -> None:
    table |= {"library=older": 0.5}

    def run(tune: bool) -> list[np.ndarray[Any, Any]]:
        ts.seed(3)
        model = nn.Linear(8, 8)
        opt = optim.AdamW(lr=0.1)

        def train(model: Any, state: Any, x: Any) -> Any:
            loss = (nn.dropout(model(x), 0.5) ** 2).mean()
            weights = model.parameters()
            new, state = opt.update(weights, ts.grad(loss, weights), state)
            model.load_parameters(new)
            return loss, state

        fn = schedule(tune=tune or None)(ts.jit(train, donate=("model", "state")))
        state, losses = opt.init(model.parameters()), []
        for _ in range(3):
            loss, state = fn(model, state, X)
            losses.append(loss.numpy())
        return [*losses, model.weight.numpy()]

    for a, b in zip(run(False), run(True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_training_step_is_tuned_at_its_first_call(table: dict[str, float]) -> None:
    table |= {"library=older": 0.5}
    mesh = dist.Mesh(("dp",), shape={"dp": 2})
    w = dist.tensor(X.shape, mesh=mesh, name="w")

    @schedule(tune=True)
    @ts.graph.training_step(module="Net", strategy="data_parallel")
    def train(x: ts.Tensor) -> Any:
        loss = ((x @ w) ** 2).mean()
        return loss, ts.graph.backward(loss)

    with mesh:
        loss, grads = train(X)
        again, _ = train(X)
    assert picked(train) == "library=older" and len(train.compiled.programs) == 1
    assert loss.item() == again.item() and {*grads} == {"w"}


# -- modes ----------------------------------------------------------------------------------------
def test_the_environment_decides_for_a_process(
    table: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    table |= {"library=older": 0.5}
    x = ts.tensor(X)

    def fresh(tune: bool | None = None) -> Any:
        fn = schedule(tune=tune)(ts.jit(lambda x: ts.tanh(x @ x).sum()))
        fn(x)
        return fn

    monkeypatch.setenv("TESSERA_TUNE", "off")
    assert fresh(True).timings == ()
    monkeypatch.setenv("TESSERA_TUNE", "freeze")
    with pytest.raises(ts.UsageError, match="no choice is recorded for <lambda>"):
        fresh(True)
    assert fresh().timings == ()
    monkeypatch.setenv("TESSERA_TUNE", "read")
    assert fresh(True).timings == ()
    monkeypatch.setenv("TESSERA_TUNE", "search")
    assert picked(fresh()) == "library=older"
    for word in ("read", "freeze"):
        monkeypatch.setenv("TESSERA_TUNE", word)
        monkeypatch.setattr(Tuner, "search", lambda self: pytest.fail("it is only read"))
        assert picked(fresh()) == "library=older"
    monkeypatch.setenv("TESSERA_TUNE", "")
    assert fresh().timings == () and picked(fresh(True)) == "library=older"
    monkeypatch.setenv("TESSERA_TUNE", "maybe")
    with pytest.raises(ts.UsageError, match="'maybe' is no mode"):
        fresh()


def test_a_context_tunes_what_is_called_in_it(table: dict[str, float]) -> None:
    fn = ts.jit(lambda x: ts.tanh(x @ x).sum())
    fn(ts.tensor(X))
    with ts.tune(limit_s=30):
        fn(ts.tensor(X))
    assert len(fn.timings) > 1
    with pytest.warns(ts.OptionWarning, match="without `with`"):
        ts.tune(limit_s=5)


def test_a_folder_that_cannot_be_written_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSERA_PROGRAM_CACHE", str(tmp_path / "file"))
    with pytest.warns(ts.EngineWarning, match="choices are not recorded"):
        tuned = schedule(tune=True)(PRODUCT)
        tuned(ts.tensor(X))
    assert len(tuned.timings) > 1
    monkeypatch.setenv("TESSERA_PROGRAM_CACHE", "off")
    assert tuner.folder() is None


SCRIPT = """
import sys, numpy as np, tessera as ts
f = ts.jit(lambda x: ts.tanh(x @ x).sum())
f(ts.tensor(np.ones((8, 8), np.float32)))
print(len(f.timings) > 1, sys.argv[1:])
"""


def test_the_command_line_tunes_a_script_and_shows_the_records(
    tmp_path: Path, folder: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tessera", "tune", "--limit-s", "20", str(script), "--x", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "True ['--x', '1']\n", done
    shown = CliRunner().invoke(app, ["tune", "--list"])
    assert shown.exit_code == 0 and "8x8" in shown.output
    made = CliRunner().invoke(app, ["tune", "--export", str(tmp_path / "all.jsonl")])
    assert made.exit_code == 0 and "chosen" in (tmp_path / "all.jsonl").read_text()
    assert "1 choices deleted" in CliRunner().invoke(app, ["tune", "--clear"]).output
    assert "8x8" not in CliRunner().invoke(app, ["tune", "--list"]).output
    both = CliRunner().invoke(app, ["tune", "--list", "--clear"])
    assert both.exit_code == 2 and "one thing at a time" in both.output


# -- compiler options -----------------------------------------------------------------------------
def test_where_nothing_runs_at_once_least_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    PRODUCT(ts.tensor(X))
    s = PRODUCT.schedule
    for cores, want in ((1, LEAST_MEMORY), (2, {})):
        monkeypatch.setattr(compile_options, "cores", lambda n=cores: n)
        assert compiler_options(s, True) == compiler_options(s, False) == want
    monkeypatch.setattr(compile_options, "cores", lambda: 1)  # different choices would deadlock
    monkeypatch.setattr(compile_options, "processes_of", lambda mesh: (0, 1))
    assert compiler_options(s, True) == {}


def test_choices_give_the_compilers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = schedule(choices={"library": "older", "instruction_order": "least_memory"})(PRODUCT)
    fn(ts.tensor(X))
    assert compiler_options(fn.schedule, True) == {**LIBRARIES["older"], **LEAST_MEMORY}
    assert "library" in compile_options.open_choices(fn.schedule)
    monkeypatch.setattr(compile_options, "platform", lambda: "gpu")
    PRODUCT(ts.tensor(X))
    assert compiler_options(PRODUCT.schedule, True) == LIBRARIES["vendor"]
    assert compile_options.open_choices(PRODUCT.schedule) == {"library": ("engine",)}
