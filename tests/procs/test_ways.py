"""Autotuning in several processes: all take the same compile variant."""

from __future__ import annotations

import json
from pathlib import Path

from tests.procs.harness import run_ranks

# One rank finds the older library faster, the other one slower by more, so it is not chosen.
BODY = """
import json
from tessera.core import flags
from tessera.runtime.cpu import autotune
flags._fuses[:] = [True]
own = {"preferred": [2.0, 2.0], "older": [1.0, 5.0], "preferred, least memory": [2.0, 1.0]}
least = 1000, 500  # as much memory as the other way on one rank, half of it on the other
real, names = autotune.Measured._options, []

def options(self, name):
    names.append(name)
    return real(self, name)

def step_s(self, run, arrays):
    real_s(self, run, arrays)
    return own[by_run[id(run)]][RANK]

real_bytes = autotune._temporary

def temporary(run, arrays):
    real_bytes(run, arrays)
    return least[RANK] if by_run[id(run)].endswith("least memory") else 1000

real_s, by_run = autotune.Measured._step_s, {}
real_times = autotune.Measured._times

def times(self, runs, arrays):
    by_run.update({id(run): name for name, run in runs.items()})
    return real_times(self, runs, arrays)

if os.environ.get("TEST_TIMES"):
    autotune.Measured._step_s, autotune.Measured._times = step_s, times
    autotune.Measured._options, autotune._temporary = options, temporary

@schedule(measure=True)
@ts.jit(donate=("w",))
def step(w, x):
    loss = (ts.tanh(x @ w) ** 2).sum()
    return loss, w - 0.1 * ts.grad(loss, w)

w = ts.tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), mesh=MESH)
for _ in range(3):
    loss, w = step(w, X)
found = [[v.name, v.step_s, v.chosen] for v in step.variants]
print(json.dumps([names, found, float(loss)]), flush=True)
"""


def ran(folder: Path, **env: str) -> list[list[object]]:
    ended = run_ranks(BODY, folder, **env)
    assert [e.code for e in ended] == [0, 0], ended
    return [json.loads(e.out.splitlines()[-1]) for e in ended]


def test_all_processes_take_the_way_whose_slowest_process_is_the_quickest(
    everything: bool, tmp_path: Path
) -> None:
    cache = {"TESSERA_PROGRAM_CACHE": str(tmp_path / "kept")}
    first, second = ran(tmp_path, TEST_TIMES="1", **cache)
    assert first == second
    assert first[0] == ["preferred", "older", "preferred, least memory"]
    assert first[1] == [
        ["preferred", 2.0, True], ["older", 5.0, False], ["preferred, least memory", 2.0, False],
    ]  # fmt: skip
    again = ran(tmp_path, TEST_TIMES="1", **cache)  # the choice is cached
    assert [said[0] for said in again] == [["preferred"]] * 2 and again[0][1:] == first[1:]
    if not everything:
        return
    each = ran(tmp_path, TESSERA_PROGRAM_CACHE="off")  # with real times
    assert each[0] == each[1] and abs(float(str(each[0][2])) - float(str(first[2]))) < 1e-4
