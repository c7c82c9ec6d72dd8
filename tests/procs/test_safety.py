"""Errors of processes that run different programs, or wait for one that never arrives."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs.harness import HEAD, line_of, run_ranks

# Each case is a function that both ranks call; errors are collected, and the ranks continue.
CASES = """
import json
CASES = []
def case(fn):
    CASES.append(fn)

def run(fn, *args):
    return ts.jit(fn)(*args)

@case
def same():
    def f(x):
        return ts.tanh(x.sum(0)) @ ts.ones((2, 3))
    compiled = ts.jit(f)
    for _ in range(2):
        y = compiled(X)
    return compiled.schedule.hash, y.numpy().tolist()

@case
def elsewhere():
    if RANK == 0:
        f = lambda x: x.sum()
    else:
        f = lambda x: x.sum()
    return float(run(f, X).numpy())

@case
def kind():
    def f(x):
        if RANK == 0:
            y = x.sum(0)  # kind 0
        else:
            y = x.max(0)  # kind 1
        return ts.tanh(y)
    run(f, X)

@case
def program():
    def train(x):
        return x.sum()  # program 0
    def check(x):
        return x.mean()  # program 1
    run(train if RANK == 0 else check, X)

@case
def order():
    def f(x):
        a, b = x.sum(0), x.max(0)
        y, z = (a, b) if RANK == 0 else (b, a)
        return ts.tanh(y) + 2 * ts.tanh(z)  # order 0 # order 1
    run(f, X)

@case
def dtype():
    def f(x):
        return (x.to(ts.bf16) if RANK else x).sum(0)  # dtype 0 # dtype 1
    run(f, X)

@case
def shape():
    def f(x):
        return x[:, : 1 + RANK].sum(0)  # shape 0 # shape 1
    run(f, X)

@case
def turns():
    def f(x):
        for _ in range(1 + RANK):
            x = ts.tanh(x - x.sum(0))  # turns 0 # turns 1
        return x
    run(f, X)

@case
def missing():
    def f(x):
        y = x * 2
        return y.sum(0) if RANK else y  # missing 1
    run(f, X)

@case
def layout():
    x = X if RANK else dist.redistribute(X, "[4, 2]")  # layout 0
    run(lambda x: x.sum(0), x)  # layout 1

@case
def algorithm():
    def f(x):
        return x.sum()  # algorithm 0 # algorithm 1
    schedule(algorithm="ring" if RANK else "tree")(f)(X)

@case
def again():
    def f(x):
        return x.sum() if RANK else x.max()  # again 0 # again 1
    compiled = ts.jit(f)
    try:
        compiled(X)
    except ts.UsageError:
        compiled(X)  # what was not agreed on never runs

for fn in CASES:
    try:
        found = fn()
    except ts.TesseraError as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps([fn.__name__, found]), flush=True)
# Rank 0 is the coordinator: it leaves last.
from jax._src import distributed
distributed.global_state.client.wait_at_barrier("reported", 20_000)
time.sleep(3 * (RANK == 0))
sys.stdout.flush()
os._exit(0)
"""
FIX = "run the same function with the same shapes, layouts and options on every rank"
REDUCE = '%1 = all_reduce %0 axes=("dp",)'
# For each case: the step that differs, and each rank's text there.
ROWS = {
    "kind": ("s0", "s0 %1 = sum %0 dims=(0,) : f32[2] +dp",
             "s0 %1 = max %0 dims=(0,) : f32[2] max dp"),
    "program": ("s0", f"s1 {REDUCE} : f32[]",
                "s0 %2 = full dtype=f32 shape=() value=0.125 : f32[]"),
    "order": ("s1", f"s1 {REDUCE} : f32[2]", f"s1 {REDUCE} : f32[2]", "f32[2] +dp",
              "f32[2] max dp"),
    "dtype": ("s0", "s0 %1 = sum %0 dims=(0,) : f32[2] +dp",
              "s0 %1 = cast %0 dtype=bf16 : bf16[4@dp, 2]"),
    "shape": ("s0", "s0 %1 = slice %0 starts=(0, 0) stops=(4, 1) steps=(1, 1) : f32[4@dp, 1]",
              "s0 %1 = sum %0 dims=(0,) : f32[2] +dp"),
    "turns": ("s2", "nothing more", "s2 %4 = sum %3 dims=(0,) : f32[2] +dp"),
    "missing": ("s0", "nothing more", "s0 %3 = sum %2 dims=(0,) : f32[2] +dp"),
    "layout": ("s0", 's0 %1 = all_gather %0 axes=("dp",) dim=0 : f32[4, 2]',
               "s0 %1 = sum %0 dims=(0,) : f32[2] +dp"),
    "algorithm": ("s1", f's1 {REDUCE} algorithm="tree" : f32[]',
                  f's1 {REDUCE} algorithm="ring" : f32[]'),
    "again": ("s0", "s0 %1 = max %0 dims=(0, 1) : f32[] max dp",
              "s0 %1 = sum %0 dims=(0, 1) : f32[] +dp"),
}  # fmt: skip
NAMES = {"program": "train", "layout": "redistribute"}


def at(mark: str) -> str:
    """` at prog.py:N` for the line with `# mark`."""
    lines = (HEAD + CASES).split("\n")
    (n,) = [i for i, line in enumerate(lines, 1) if f"# {mark}" in line]
    return f" at prog.py:{n}"


NEVER = """
from tessera.core.context import put
put(executor="EXECUTOR")

@ts.jit
def step(x):
    return x.sum(0)  # sum

def go():
    for turn in range(5):
        if RANK == 1 and turn == 3:
            time.sleep(90)  # asleep
        y = step(X)
        y.numpy()
    print("done")

go()
"""


def test_processes_that_differ_are_named_and_nothing_runs(tmp_path: Path) -> None:
    ended = run_ranks(CASES, tmp_path)
    assert [e.code for e in ended] == [0, 0], [e.out + e.err for e in ended]
    first, second = ([json.loads(line) for line in e.out.splitlines()] for e in ended)
    assert first == second
    found = dict(first)
    code, total = found.pop("same")
    assert re.fullmatch(r"[0-9a-f]{16}", code) and total == pytest.approx([2.0] * 3)
    assert found.pop("elsewhere") == 28.0
    assert found.keys() == ROWS.keys()
    for name, (step, *said) in ROWS.items():
        rows = [
            text + ("" if text == "nothing more" else at(f"{name} {r}"))
            for r, text in enumerate(said[:2])
        ]
        rows = [f"{row}, of {of}" for row, of in zip(rows, said[2:])] or rows
        place = re.search(r"of the (\d+th|3rd) program", found[name])
        assert place is not None
        assert found[name] == (
            f"UsageError: processes hold different schedules: step {step} {place[0]},"
            f" {NAMES.get(name, 'f')}, differs\n  rank 0 : {rows[0]}\n  rank 1 : {rows[1]}\n"
            f"  fix    : {FIX}"
        )


def never(executor: str, folder: Path) -> str:
    ended = run_ranks(NEVER.replace("EXECUTOR", executor), folder,
                      TESSERA_COLLECTIVE_LIMIT="2", limit_s=80)  # fmt: skip
    assert ended[0].code == 1, ended[0].out + ended[0].err
    assert ended[0].took_s < 70
    return ended[0].err


def test_who_never_arrives_is_named_fused(tmp_path: Path) -> None:
    err = never("fused", tmp_path)
    at = line_of("sum", NEVER)
    assert "step: a collective took longer than 2 s: rank 1 did not arrive" in err
    asleep = line_of("asleep", NEVER)
    assert f"rank 1 : did last step: one all_reduce at {at}; now at {asleep}" in err
    assert f"rank 0 : at step: one all_reduce at {at}" in err
    (dump,) = tmp_path.glob("tessera-flight-0-*.json")
    told = json.loads(dump.read_text())
    assert told["missing"] == [1] and told["stuck"]["place"] == 6
    shown = subprocess.run(
        [sys.executable, "-m", "tessera.launch.cli", "flight", str(dump)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "rank 1 did not arrive" in shown and at in shown


ALONE = """
@ts.jit
def step(x):
    return x.sum()

@ts.jit
def check(x):
    return (x * x).mean()

for turn in range(4):
    step(X).item()
    if RANK == 0 and turn == 1:
        try:
            check(X).item()  # alone
        except ts.BackendError as error:
            print(error, flush=True)
            os._exit(1)  # the other one is in the engine, and would be waited for
    elif turn == 1:
        time.sleep(20)  # asleep
"""


def test_a_program_that_one_rank_alone_runs_is_told_from_the_others(tmp_path: Path) -> None:
    first, _ = run_ranks(ALONE, tmp_path, TESSERA_COLLECTIVE_LIMIT="3", limit_s=80)
    assert first.code == 1, first.out + first.err
    assert "check: a collective took longer than 3 s: rank 1 did not arrive" in first.out
    assert f"; now at {line_of('asleep', ALONE)}" in first.out
    assert f"program is compared at {line_of('alone', ALONE)}\n" in first.out
    assert "fix    : run that line in all of them, also where it is the first read" in first.out


THREADS = """
import threading
f = ts.jit(lambda x: x.sum())
ran, go_on = threading.Event(), threading.Event()

def run():
    try:
        print(f(X).item(), flush=True)
    except ts.UsageError as error:
        print(error, flush=True)
    ran.set()

def begun():
    ran.clear()
    thread = threading.Thread(target=lambda: (run(), go_on.wait()), name="other")
    thread.start()
    ran.wait()
    return thread

run()
go_on.set()
begun().join()
run()  # the other has ended
go_on.clear()
thread = begun()
run()
go_on.set()
thread.join()
"""


def test_threads_that_take_turns_in_a_program_of_many_processes_are_refused(tmp_path: Path) -> None:
    ended = run_ranks(THREADS, tmp_path, limit_s=80)
    assert [e.code for e in ended] == [0, 0], [e.out + e.err for e in ended]
    for e in ended:
        *sums, error = e.out.split("\n", 4)
        assert sums == ["28.0"] * 4
        assert "two threads run programs over several processes" in error
        assert "threads : other, MainThread" in error


GIVEN = """
from tessera import nn
import json
PLAN = dist.strategy("data_parallel")
SAME = np.arange(12, dtype=np.float32).reshape(4, 3)

def weights():  # drawn otherwise in each
    w = np.random.default_rng(RANK).normal(size=(2, 3)).astype(np.float32)
    return ts.jit(lambda x, w: (x @ w).sum())(X, w).item()
def rows():  # each one's own in place of the whole batch
    own = np.full((4, 1), 1.0 + RANK, np.float32)
    return dist.place(own, PLAN, MESH, kind="batch").sum().item()
def number():
    return ts.jit(lambda x, rate: (x * rate).sum())(X, ts.tensor(0.1 * (1 + RANK))).item()
def placed():
    return ts.tensor(np.full(2, RANK), mesh=MESH, layout="[2@dp]").sum().item()
def of_jax():
    return ts.tensor(jax.numpy.full(3, RANK), mesh=MESH).sum().item()
def of_jax_here():  # which it has put on a device of its own
    own = jax.device_put(np.full(5, float(RANK)), jax.local_devices()[0])
    return (ts.tensor(np.ones(5), mesh=MESH) * own).sum().item()
def other_sizes():  # which the engine does not compare: it would end the process
    x = ts.tensor(np.ones(2 + RANK), mesh=MESH, layout=f"[{2 + RANK}@dp]")
    return x.sum().item()
def later():  # when the values of a line have been compared often
    for i in range(6):
        x = ts.tensor(np.full(4, float(i == 4) * RANK), mesh=MESH).sum().item()
    return x
def later_sizes():
    for i in range(6):
        x = ts.tensor(np.ones(4 + RANK * (i == 4)), mesh=MESH).sum().item()
    return x
def between():  # it is not compared itself, and leaves the weights of the processes apart
    f = ts.jit(lambda x, b: (x.sum() * b).sum())
    for i in range(8):
        f(X, np.full(7, float(i == 5) * RANK)).item()
def at_once():  # a learning rate in an op outside of functions
    w = ts.tensor(np.ones(2), mesh=MESH)
    for _ in range(5):  # by now numbers have been compared often enough elsewhere
        w = w * 2.0
    return (w - 0.1 * (1 + RANK) * w).sum().item()
def clipped():
    return ts.clip(X, 0, 2 + RANK).sum().item()
def seed():
    ts.seed(RANK)
    return dist.place(nn.Linear(4, 2), PLAN, MESH).weight.numpy().shape
def alike():
    ts.seed(3)
    model = dist.place(nn.Linear(3, 2), PLAN, MESH)
    step = ts.jit(lambda m, x: m(x).sum())
    given = [dist.place(SAME + i, PLAN, MESH, kind="batch") for i in range(5)]
    assert np.isnan(dist.to_host(ts.tensor([1.0, np.nan], mesh=MESH, layout="[2@dp]"))[1])
    return [step(model, x).item() for x in given]

for fn in (weights, rows, number, placed, of_jax, of_jax_here, other_sizes, later, later_sizes,
           between, at_once, clipped, seed, alike):
    try:
        found = fn()
    except ts.TesseraError as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps([fn.__name__, found]), flush=True)
"""


def test_a_value_that_differs_between_processes_is_an_error_in_all(tmp_path: Path) -> None:
    ended = run_ranks(GIVEN, tmp_path)
    assert [e.code for e in ended] == [0, 0], [e.out + e.err for e in ended]
    first, second = ([json.loads(line) for line in e.out.splitlines()] for e in ended)
    assert first == second
    found = dict(first)
    assert len(found.pop("alike")) == 5
    for name, text in found.items():
        said = "UsageError: the processes of a mesh gave different values for one tensor\n"
        assert str(text).startswith(said), name
        assert "the same seed, the same numbers, all rows of the batch" in text
    assert "rank 0 : 0.1 (checksum" in found["number"] and "rank 1 : 0.2" in found["number"]
    assert re.search(r"rank 1 : 0, 0, 0, .* \(checksum .*; of those before it ", found["between"])
    assert "rank 0 : float32[2] 1, 1 (checksum" in found["other_sizes"]
    assert "rank 1 : float32[3] 1, 1, 1 (checksum" in found["other_sizes"]


@LONG
def test_who_never_arrives_is_named_step_by_step(tmp_path: Path) -> None:
    err = never("stepped", tmp_path)
    assert "rank 1 did not arrive" in err
    assert re.search(r"rank 0 : at s\d of step: ", err)


GONE = """
w = ts.tensor(np.ones((4, 1), np.float32), mesh=MESH, layout="[4@dp, 1]")
step = ts.jit(lambda w: w - 0.1 * (w * w).sum(), donate="w")
try:
    for turn in range(3):
        if RANK == 1 and turn == 2:
            os._exit(0)
        w = step(w)
        dist.to_host(w)
except ts.TesseraError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""


def test_what_a_lost_rank_ends_is_no_fault_of_the_arguments(tmp_path: Path) -> None:
    """They were donated to the call that failed."""
    first, _ = run_ranks(GONE, tmp_path, TESSERA_COLLECTIVE_LIMIT="20", limit_s=80)
    assert first.out.startswith("BackendError"), first.out + first.err
