"""The stepped executor in one process: an error names the device that raises or hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.observe.flight import load_dump
from tests.cases import LONG, short
from tests.procs.harness import line_of, run_ranks

HEAD = ""
PROGRAM = """
import time
import jax, numpy as np, tessera as ts
from tessera import dist
from tessera.core.context import replaced

def look(v):
    if float(np.ravel(v)[0]) == 2.0:
        WHAT
    return v

@ts.op("a -> a")
def watched(x):
    return jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

@ts.jit
def step(x):
    first = x.sum()
    return watched(x + 0 * first).sum()  # second

mesh = dist.Mesh(("dp",), devices=4)
x = ts.tensor(np.arange(4, dtype=np.float32), mesh=mesh, layout="[4@dp]")
dist.set_collective_timeout(2, records=16)
with replaced(executor="stepped"):
    try:
        step(x)  # call
    except ts.TesseraError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""
ROWS = {
    "raise ValueError('boom')": (
        "step: rank 2 raised before a collective",
        "raised in s{made} of step: compute at {second}: ValueError: boom",
    ),
    "time.sleep(6)": (
        "step: a collective took longer than 2 s: rank 2 did not arrive",
        "is in s{made} of step: compute at {second}",
    ),
}


@pytest.mark.parametrize("what", short(ROWS, "raise ValueError('boom')"))
def test_a_device_is_named(what: str, tmp_path: Path) -> None:
    first, second = ROWS[what]
    body = PROGRAM.replace("WHAT", what)
    (ended,) = run_ranks(body, tmp_path, size=1, head=HEAD, TESSERA_DEVICES="4")
    assert ended.code == 0, ended.err
    (dump,) = tmp_path.glob("tessera-flight-0-*.json")
    places = {k: line_of(k, body, HEAD) for k in ("second", "call")}
    told = load_dump(dump)
    n = int(told.stuck["step"][1:])
    stuck = f"s{n} of step: all_reduce over dp f32[] +dp at {places['second']}"
    assert ended.out == (
        f"BackendError: {first}\n"
        f"  rank 2        : {second.format(made=n - 1, **places)}\n"
        f"  ranks 0, 1, 3 : at {stuck}\n"
        f"  dump          : {dump}\n"
        f"  at            : {places['call']}\n"
        f"  fix           : see what they did last: tessera flight {dump}\n"
    )
    assert told.missing == (2,) and set(told.ranks) == {0, 1, 2, 3}
    # All devices reached the first all_reduce; all but one reached the second.
    assert [r["step"] for r in told.ranks[2]["records"]] == ["s1"]
    assert [r["step"] for r in told.ranks[0]["records"]] == ["s1", f"s{n}"]
    assert told.differs == ["ranks 0, 1, 3 came to the 2nd", "rank 2 came to the 1st"]
    assert json.loads(dump.read_text())["limit_s"] == 2


@LONG
def test_a_profile_does_not_wait_for_ever(tmp_path: Path) -> None:
    body = PROGRAM.replace("WHAT", "time.sleep(5)").replace(
        'replaced(executor="stepped")', "dist.profile()"
    )
    (ended,) = run_ranks(body, tmp_path, size=1, head=HEAD, TESSERA_DEVICES="4")
    assert ended.code == 0, ended.err
    assert ended.out == (
        "BackendError: a step took longer than 2 s: rank 2 did not end\n"
        f"  at  : {line_of('call', body, HEAD)}\n"
        "  fix : see what it computes there, or allow more: dist.set_collective_timeout(seconds)\n"
    )
