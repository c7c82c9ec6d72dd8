"""Tuning in several processes: all take the same candidate, and the first one records it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.procs.harness import run_ranks

# One rank finds the older library faster, the other one slower by more, so it is not chosen.
BODY = """
import json
from tessera.core import flags
from tessera.lang.jit.tuner import Tuner
flags._fuses[:] = [True]
own = {"{}": [2.0, 2.0], "{'library': 'older'}": [1.0, 5.0], "{'overlap': True}": [1.5, 1.0]}
real = Tuner._run

def run(self, entry):
    real(self, entry)
    name = next(k for k, e in self._entries.items() if e is entry)
    return own.get(name, [4.0, 4.0])[RANK]

if os.environ.get("TEST_TIMES"):
    Tuner._run = run

@schedule(tune=True)
@ts.jit(donate=("w",))
def step(w, x):
    loss = (ts.tanh(x @ w) ** 2).sum()
    return loss, w - 0.1 * ts.grad(loss, w)

w = ts.tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), mesh=MESH)
for _ in range(3):
    loss, w = step(w, X)
found = [[dict(t.choices), t.step_s, t.chosen] for t in step.timings]
alone = schedule(tune=True)(lambda x: x @ x)
alone(np.ones((2, 2), np.float32))
print(json.dumps([found, float(loss), len(alone.timings)]), flush=True)
"""


def ran(folder: Path, **env: str) -> Any:
    ended = run_ranks(BODY, folder, **env)
    assert [e.code for e in ended] == [0, 0], ended
    return [json.loads(e.out.splitlines()[-1]) for e in ended]


def test_all_processes_take_the_candidate_whose_slowest_process_is_the_fastest(
    tmp_path: Path,
) -> None:
    cache = {"TESSERA_PROGRAM_CACHE": str(tmp_path / "kept")}
    first, second = ran(tmp_path, TEST_TIMES="1", **cache)
    assert first == second
    times = {json.dumps(c): (s, chosen) for c, s, chosen in first[0]}
    assert times['{"overlap": true}'] == (1.5, True)
    assert times["{}"] == (2.0, False) and times['{"library": "older"}'] == (5.0, False)
    assert first[2] == 0  # what each process runs by itself is not tuned
    assert len([*(tmp_path / "kept" / "tuning").glob("*.jsonl")]) == 1
    again = ran(tmp_path, **cache)  # the choice is read, though the real times differ
    assert again[0] == again[1] and [c for c, _, chosen in again[0][0] if chosen] == [
        {"overlap": True}
    ]
    each = ran(tmp_path, TESSERA_PROGRAM_CACHE="off")  # with real times
    assert each[0] == each[1] and abs(each[0][1] - first[1]) < 1e-4
