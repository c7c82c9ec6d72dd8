"""Compile variants of a program on CPUs: chosen by rules and by measurement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline, schedule
from tessera.core import flags
from tessera.core.compile_variants import CompileVariant
from tessera.core.context import replaced
from tessera.runtime import compilation_cache
from tessera.runtime.compilation_cache import KeptPrograms
from tessera.runtime.cpu import autotune
from tessera.runtime.cpu.autotune import LEAST_MEMORY, LIBRARIES, Measured
from tessera.runtime.devices import start

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
PRODUCT = ts.jit(lambda x: ts.tanh(x @ x).sum())
CONV = ts.jit(lambda x, w: nn.conv2d(x, w))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptPrograms]:
    """The folder that keeps the choices."""
    start(8)
    kept = KeptPrograms(tmp_path, 1 << 20)
    monkeypatch.setattr(compilation_cache, "folder", lambda: kept)
    yield kept


class Clock:
    """Programs with the durations and memory of a table."""

    def __init__(self, table: dict[str, tuple[float, int]]) -> None:
        self.table, self.now_s, self.made, self.calls = table, 0.0, [], 0  # type: ignore[var-annotated]

    def perf_counter(self) -> float:
        return self.now_s

    def make(self, options: dict[str, Any]) -> Any:
        library = options.get(flags.FUSION)
        name = next(k for k, o in LIBRARIES.items() if o.get(flags.FUSION) == library)
        if LEAST_MEMORY.items() <= options.items():
            name += ", least memory"
        assert options["kept"] == 1  # an option of every variant
        self.made.append(name)
        size = self.table[name][1]

        class Run:
            is_compiled = True

            def __call__(_, *arrays: Any) -> list[Any]:
                self.now_s += self.table[name][0]
                self.calls += 1
                return [name]

            def lower(_, *arrays: Any) -> Any:
                found = SimpleNamespace(temp_size_in_bytes=size)
                program = SimpleNamespace(memory_analysis=lambda: found)
                return SimpleNamespace(compile=lambda: program)

        return Run()


def measured(clock: Clock, program: Any = PRODUCT) -> tuple[str, Measured]:
    """Returns (the variant that a call then takes, the program)."""
    if program is CONV:
        CONV(ts.tensor(np.ones((1, 2, 4, 4), "f")), ts.tensor(np.ones((2, 2, 3, 3), "f")))
    else:
        PRODUCT(ts.tensor(X))
    made = Measured(program.schedule, {"kept": 1}, clock.make, ())
    (name,) = made(X)
    assert made(X) == [name] == [w.name for w in made.variants if w.chosen]
    return name, made


@pytest.mark.parametrize(
    ("table", "want"),
    [
        ([(1.0, 100), (2.0, 100), (2.0, 50)], "preferred"),
        ([(2.0, 100), (1.0, 100), (2.0, 50)], "older"),
        ([(1.0, 100), (2.0, 100), (1.01, 50)], "preferred, least memory"),  # equally fast, smaller
        ([(1.0, 100), (2.0, 100), (0.5, 100)], "preferred, least memory"),  # faster
        ([(1.0, 100), (2.0, 100), (1.01, 95)], "preferred"),  # hardly smaller
        ([(1.0, 100), (0.99, 100), (2.0, 50)], "preferred"),  # equal times: the default
        ([(1.0, 100), (0.99, 10), (2.0, 50)], "older"),  # equal times, and it needs less memory
    ],
)
def test_the_quickest_way_is_taken_and_of_those_alike_the_one_that_needs_less(
    monkeypatch: pytest.MonkeyPatch, table: list[tuple[float, int]], want: str
) -> None:
    monkeypatch.setattr(flags, "_fuses", [True])
    best = "older" if table[1][0] < 0.98 * table[0][0] else "preferred"
    clock = Clock(dict(zip(["preferred", "older", f"{best}, least memory"], table, strict=True)))
    monkeypatch.setattr(autotune, "time", clock)
    name, made = measured(clock)
    assert name == want and clock.made == ["preferred", "older", f"{best}, least memory"]
    assert [(w.name, w.step_s, w.temporary_bytes) for w in made.variants] == [
        (n, pytest.approx(s), size) for n, (s, size) in clock.table.items()
    ]


def test_what_was_found_is_kept_and_nothing_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, folder: KeptPrograms
) -> None:
    monkeypatch.setattr(flags, "_fuses", [True])
    clock = Clock({"preferred": (2.0, 9), "older": (1.0, 9), "older, least memory": (3.0, 9)})
    monkeypatch.setattr(autotune, "time", clock)
    first = measured(clock)[1].variants
    calls = clock.calls
    name, made = measured(clock)
    assert name == "older" and made.variants == first and clock.calls == calls + 2
    assert clock.made[3:] == ["older"]  # only the chosen variant is compiled
    monkeypatch.setattr(autotune, "cores", lambda: 64)  # another number of cores is measured again
    measured(clock)
    assert len(clock.made) == 7
    monkeypatch.setattr(jax, "local_device_count", lambda: 64)  # and another number of threads
    measured(clock)
    assert len(clock.made) == 10


def test_a_machine_that_is_slower_for_a_while_is_so_for_every_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All listed times come from the same rounds."""
    monkeypatch.setattr(flags, "_fuses", [True])
    clock = Clock({"preferred": (2.0, 9), "older": (1.0, 9), "older, least memory": (0.9, 9)})
    plain = clock.make

    def make(options: dict[str, Any]) -> Any:
        if "preferred" in clock.made and "older" in clock.made:  # after the first rounds
            clock.table = {k: (3 * s, size) for k, (s, size) in clock.table.items()}
        return plain(options)

    clock.make = make  # type: ignore[method-assign]
    monkeypatch.setattr(autotune, "time", clock)
    found = {w.name: w.step_s for w in measured(clock)[1].variants}
    want = {"preferred": 6.0, "older": 3.0, "older, least memory": 2.7}
    assert found == {k: pytest.approx(s) for k, s in want.items()}


def test_a_convolution_has_one_way_more_and_a_library_that_the_user_chose_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flags, "_fuses", [True])
    names = ["preferred", "products", "older", "products, least memory"]
    clock = Clock(dict(zip(names, [(2.0, 9), (1.0, 9), (3.0, 9), (4.0, 9)], strict=True)))
    monkeypatch.setattr(autotune, "time", clock)
    assert measured(clock, CONV)[0] == "products" and clock.made == names
    monkeypatch.setattr(flags, "_fuses", [False])
    monkeypatch.setattr(compilation_cache, "folder", lambda: None)
    clock = Clock({"preferred": (1.0, 9), "preferred, least memory": (2.0, 9)})
    monkeypatch.setattr(autotune, "time", clock)
    assert measured(clock, CONV)[0] == "preferred" and len(clock.made) == 2


# -- as users write it -----------------------------------------------------------------------------
def test_a_measured_step_gives_what_the_step_gives_and_takes_over_what_is_donated() -> None:
    mesh = dist.Mesh(("dp",), shape={"dp": 4})
    x = ts.tensor(X, mesh=mesh, layout="[8@dp, 8]")

    def step(w: ts.Tensor, x: ts.Tensor) -> Any:
        loss = (ts.tanh(x @ w) ** 2).mean()
        return w - 0.5 * ts.grad(loss, w), loss

    plain, timed = ts.jit(step), schedule(measure=True)(ts.jit(step, donate="w"))
    assert timed.variants == ()
    a = b = ts.tensor(X, mesh=mesh, layout="[8, 8]")
    b = b + 0.0
    for _ in range(3):
        a, want = plain(a, x)
        old = b
        b, got = timed(b, x)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5)
        with pytest.raises(ts.DonatedError):
            old.numpy()
    np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-5)
    assert [w.chosen for w in timed.variants].count(True) == 1 and plain.variants == ()
    assert all(isinstance(w, CompileVariant) and w.step_s > 0 for w in timed.variants)
    again = schedule(measure=True)(ts.jit(step, donate="w"))
    again(b, x)
    assert (
        again.variants == timed.variants
    )  # equal to the last digit, so they were read from the file


def run_with(**k: Any) -> Any:
    with dist.deterministic(**k):
        return schedule(measure=True)(lambda x: x @ x)(ts.tensor(X))


def piped() -> Any:
    mesh = dist.Mesh(("pp",), shape={"pp": 2})

    @pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=4, mesh=mesh)
    def model(w: Any, x: Any) -> Any:
        for i in range(2):
            x = ts.tanh(x @ w[f"w{i}"])
        return x

    return schedule(measure=True)(ts.jit(lambda w, x: model(w, x).mean()))({"w0": X, "w1": X}, X)


def read(x: Any) -> Any:
    return x * 2 if float(x.sum()) > 0 else x * 3


def stepped() -> Any:
    with replaced(executor="stepped"):
        return schedule(measure=True)(lambda x: x @ x)(ts.tensor(X))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: run_with(), "at this level of determinism"),
        (lambda: run_with(level="run_to_run"), "at this level of determinism"),
        (piped, ".* is several programs: it has stages"),
        (lambda: schedule(measure=True)(read)(ts.tensor(X)), "read is several .* it reads values"),
        (stepped, "its steps are programs of their own"),
    ],
)
def test_where_nothing_is_measured_a_warning_says_why(call: Any, why: str) -> None:
    with pytest.warns(ts.OptionWarning, match=f"has no effect: {why}"):
        call()


def test_a_gpu_measures_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    PRODUCT(ts.tensor(X))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "a gpu by itself" in autotune.why_not(PRODUCT.schedule, True, False)
    assert autotune.usual(PRODUCT.schedule, True) == autotune.CUBLAS


def test_a_wrong_choice_is_an_error() -> None:
    with pytest.raises(ts.UsageError, match="measure"):
        schedule(measure="yes")


# -- by what is known ------------------------------------------------------------------------------
def test_where_nothing_runs_at_once_least_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    PRODUCT(ts.tensor(X))
    for cores, want in ((1, LEAST_MEMORY), (2, {})):
        monkeypatch.setattr(autotune, "cores", lambda n=cores: n)
        assert (
            autotune.usual(PRODUCT.schedule, True)
            == autotune.usual(PRODUCT.schedule, False)
            == want
        )
    monkeypatch.setattr(autotune, "cores", lambda: 1)  # different choices would deadlock
    monkeypatch.setattr(autotune, "processes_of", lambda mesh: (0, 1))
    assert autotune.usual(PRODUCT.schedule, True) == {}
