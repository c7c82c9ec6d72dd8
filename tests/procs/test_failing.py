"""A failing rank without our launcher: the others end with its error."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs.launched import END_S, HEAD, LIMIT_S, others, until, wrote

# The others can learn of the failure only from the engine's store; the thread keeps the rank alive.
# It fails when all are ready: rank 0 ends the others at once, also one about to report ready.
PROGRAM = """
import threading
total = dist.all_reduce(X.sum()).item()
open(f"ready{RANK}", "w").close()
if str(RANK) == os.environ["FAILS"]:
    while not all(os.path.exists(f"ready{k}") for k in range(SIZE)):
        time.sleep(0.01)
    threading.Thread(target=time.sleep, args=(20.0 * RANK,)).start()
    raise ValueError("as the test asks\\nin two lines")
print(ts.jit(lambda x: x.max())(X).item())
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=LONG)])
def test_an_error_in_one_rank_ends_those_that_wait_for_it(rank: int, tmp_path: Path) -> None:
    started = others(tmp_path, 3, HEAD + PROGRAM, FAILS=str(rank))
    try:
        until(lambda: all((tmp_path / f"ready{k}").exists() for k in range(3)), folder=tmp_path)
        began_s = time.monotonic()
        codes = [p.wait(LIMIT_S) for p in started]
        assert time.monotonic() - began_s < END_S
    finally:
        for p in started:
            p.kill()
            p.wait(10)
    assert codes.pop(rank) == 1
    assert codes == [113, 113]
    said = rf"tessera: rank {rank} \(process {started[rank].pid} on .*\) failed: ValueError: as the"
    for k in {0, 1, 2} - {rank}:
        err = (tmp_path / f"err{k}").read_text()
        assert re.search(said + " test asks, so this rank ends too\n", err), err


# One rank's program ends without an error, so the others' next collective cannot run.
ENDS = """
ends, how = os.environ["ENDS"].split()
same = ts.jit(lambda x: x.max())
print(ts.ones(2).sum().item())  # of this rank alone: it has joined
if how != "early":
    same(X).item()
if str(RANK) == ends:
    sys.exit(3)
if how == "dispatched":
    same(X).item()
else:
    ts.jit(lambda x: x.min())(X).item()
"""


ENDINGS = [
    "1 compared",
    *(pytest.param(e, marks=LONG) for e in ("0 compared", "1 dispatched", "0 early")),
]


@pytest.mark.parametrize("ends", ENDINGS)
def test_a_rank_that_ends_early_is_not_waited_for(ends: str, tmp_path: Path) -> None:
    rank = int(ends[0])
    started = others(tmp_path, 2, HEAD + ENDS, ENDS=ends)
    try:
        codes = [p.wait(END_S * 2) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait(10)
    assert codes.pop(rank) == 3
    assert codes != [0]
    err = (tmp_path / f"err{1 - rank}").read_text()
    said = f"take place: rank {rank} ended without it\n"
    assert said in err and "/jax/" not in err, wrote(tmp_path)
