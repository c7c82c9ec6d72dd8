"""Long runs: short forms of `make soak`."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.runtime import program_cache
from tessera.runtime.devices import failed
from tests.compilations import compilations

SOAK = Path(__file__).parents[2] / "bench" / "soak"


def test_steps_that_nobody_reads_end() -> None:
    """On all devices of a machine. Such steps used to stop after some hundreds, without end."""
    here = {**os.environ, "TESSERA_DEVICES": "2", "PYTHONPATH": str(SOAK.parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, SOAK / "queued.py", "2", "400"],
        env=here, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 7


STARTS = "import tessera as ts\nts.ones((2,)).numpy()"


@pytest.mark.parametrize("asked", ["rocm", "nonsense"])
def test_a_backend_that_does_not_start_is_an_error_of_ours(asked: str) -> None:
    here = {**os.environ, "JAX_PLATFORMS": asked, "PYTHONPATH": str(SOAK.parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env=here, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (
        f"BackendError: start: the engine's backend does not start\n  JAX_PLATFORMS : {asked}\n"
        in (done.stderr)
    )
    assert "or take the CPU: JAX_PLATFORMS=cpu" in done.stderr


@pytest.mark.parametrize(
    "said, fix",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying", "use smaller tensors"),
        ("NOT_FOUND: All configs failed during profiling", "too little memory to try kernels"),
        ("NOT_FOUND: Failed to get configs for: 2 out of 3", "too little memory to try kernels"),
        ("INTERNAL: cuDNN", "the text above is the engine's own report"),
    ],
)
def test_what_the_engine_says_comes_with_a_way_out(said: str, fix: str) -> None:
    error = failed("step", RuntimeError(said + "\nmore of it"), [("tensor", "f32[2]")])
    first, *_, last = str(error).splitlines()
    assert first == f"step: the engine failed: {said}" and last.startswith(f"  fix    : {fix}")


def maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def test_programs_of_many_shapes_come_and_go(few_maps: int) -> None:
    """A process has a limit of memory maps; programs released for it are compiled again when
    used."""

    @ts.jit
    def step(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
        return w - 0.1 * ts.grad((ts.tanh(x @ w) ** 2).mean(), w)

    w = ts.tensor(np.ones((4, 4), np.float32))
    found = []
    for n in range(1, 11):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ts.TraceWarning)
            new = step(w, ts.tensor(np.ones((n, 4), np.float32))).numpy()
        found.append(maps())
        # A released program is compiled again, and the last used one is still cached.
        assert (step(w, ts.tensor(np.ones((n, 4), np.float32))).numpy() == new).all()
    assert (step(w, ts.tensor(np.ones((1, 4), np.float32))).numpy() == new).all()
    assert max(found[4:]) <= max(found[:4]) + 16, found


@pytest.fixture
def few_maps() -> Iterator[int]:
    """Sets a cache budget of one byte, in which no two programs fit."""
    book = program_cache.BOOK
    before = book.most_maps, book.most_bytes
    ts.set_program_cache(bytes=1)
    yield 1
    ts.set_program_cache(maps=before[0], bytes=before[1])


def test_what_keeps_changing_is_named_once() -> None:
    @ts.jit
    def scaled(x: ts.Tensor, by: float) -> ts.Tensor:
        return x * by

    def called(n: int, by: float) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            scaled(ts.tensor(np.ones(n, np.float32)), by)
        return [str(w.message).partition("): ")[2] for w in found]

    told = [called(n, 2.0) for n in range(1, 6)]
    assert told == [[], [], [
        "x was f32[1], then f32[2], then f32[3]; give tensors of few shapes, such as lengths that"
        " are padded"
    ], [], []]  # fmt: skip
    scaled._recordings = 0
    scaled._entries.clear()
    told = [called(1, by) for by in (0.5, 1.5, 2.5)]
    assert told[2] == ["by was 0.5, then 1.5, then 2.5; pass a number that changes as a tensor,"
                       " ts.tensor(x)"]  # fmt: skip


@pytest.mark.parametrize("layout", ["[8, 4]", "[8@dp, 4]"])
def test_a_first_call_compiles_once(layout: str) -> None:
    """It is compiled before it runs, so that the heap is in order at the run, but only once."""
    mesh = ts.dist.Mesh(("dp",), shape={"dp": 8}) if "@" in layout else None
    x = ts.tensor(np.ones((8, 4), np.float32), mesh=mesh, layout=layout)

    def step(by: float) -> Any:
        @ts.jit(donate=("w",))
        def step(w: ts.Tensor, x: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
            return ts.tanh(w * x).sum(), w + x * by

        return step(x + by, x)

    step(0.25)[0].numpy()  # compiles what every program needs
    with compilations() as compiled:
        new = step(0.5)
    assert len(compiled) == 1
    assert (new[1].numpy() == 2).all()


THREADS = """
import os
import numpy as np
import tessera as ts

before = os.sched_getscheduler(0)
ts.tensor(np.ones(4, np.float32)).numpy()
orders = []
for thread in os.listdir("/proc/self/task"):
    try:
        if "XLA" in open(f"/proc/self/task/{thread}/comm").read():
            orders.append(os.sched_getscheduler(int(thread)))
    except OSError:  # it ended
        pass
assert orders and set(orders) == {os.SCHED_BATCH}, orders
assert os.sched_getscheduler(0) == before
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="of Linux alone")
@pytest.mark.parametrize(
    "first", ["", "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"]
)
def test_threads_of_the_engine_do_not_interrupt_each_other(first: str) -> None:
    """The user's own threads keep their order."""
    code = THREADS.replace("before =", f"{first}\nbefore =")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
