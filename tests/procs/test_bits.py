"""Bits of results for any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs.harness import line_of, run_ranks
from tests.quickly import FLAGS

BENCH = Path(__file__).resolve().parents[2] / "bench"
HEAD = f"""\
import os, sys
import jax
sys.path.insert(0, {str(BENCH)!r})
jax.distributed.initialize(
    os.environ["TEST_ADDRESS"], int(os.environ["TEST_SIZE"]), int(os.environ["TEST_RANK"]),
    initialization_timeout=60,
)
"""
# Dropout, clipping, AdamW: programs of `make prove`, for two steps.
TRAINED = """
from prove import Placement, hashes
program, onto, zero, pipe = os.environ["RUN"].split()
print(*hashes(Placement(program, onto, int(zero), pipe=pipe.strip("-")), 2, "f32"))
"""
READ = """
import numpy as np
import tessera as ts
from tessera import dist
x = ts.tensor(np.arange(4.0), mesh=dist.Mesh.parse("dp=2"), layout="[4@dp]")
total = x.sum()
print(dist.redistribute(x, "[4]").numpy().tolist(), dist.all_reduce(total).item(), flush=True)
for y in (total, x):
    try:
        y.numpy()  # read
    except ts.BackendError as error:
        print(error)
"""
# Sums large enough for recursive halving.
SUMS = """
import hashlib
import numpy as np
import tessera as ts
from tessera import dist
mesh = dist.Mesh.parse("dp=4").fold(onto=int(os.environ["ONTO"]))
rng = np.random.default_rng(0)
x = rng.normal(size=(4, 1 << 18)) * 10.0 ** rng.integers(-45, 38, (1, 1 << 18))
x[:, :999] = rng.choice([0.0, -0.0], (4, 999))
for dtype in (ts.f32, ts.bf16):
    terms = ts.tensor(x, dtype=dtype, mesh=mesh, layout="[4@dp, 262144]")
    total = dist.all_reduce(terms.sum(0), deterministic=True)
    print(hashlib.sha256(total.numpy().tobytes()).hexdigest())
"""

# A pipeline on the devices of both processes, and functions that use its weights without it.
STAGED = """
import hashlib
import numpy as np
import tessera as ts
from tessera import dist, nn, optim, pipeline
mesh = dist.Mesh.parse("pp=2 dp=1")
rng = np.random.default_rng(0)
w = {f"w{i}": rng.normal(size=(8, 8)).astype(np.float32) / 3 for i in range(4)}
x, y = rng.normal(size=(16, 8)).astype(np.float32), rng.integers(0, 8, 16).astype(np.int32)

def layers(w, x):
    for i in range(4):
        x = ts.tanh(x @ w[f"w{i}"])
    return x

model = pipeline.run(mesh_axes=("pp",), microbatches=4, mesh=mesh)(layers)
slopes = ts.jit(lambda w, x, y: ts.grad(nn.cross_entropy(model(w, x), y), w))
opt = optim.AdamW(0.1)

@ts.jit
def apply(w, g, state):
    g, norm = optim.clip_by_global_norm(g, 0.1)
    return *opt.update(w, g, state), norm

slopes.plan(w, x, y)
w = model.place(w)
state = opt.init(w)
for _ in range(3):
    w, state, norm = apply(w, slopes(w, x, y), state)
    print(norm.item())
total = ts.jit(lambda w: sum((t**2).sum() for t in w.values()))
print(total(w).item(), ts.jit(lambda w: layers(w, x).mean())(w).item())
eager = optim.global_norm(slopes(w, x, y))
print(dist.to_host(eager).item(), [hashlib.sha256(dist.to_host(t)).hexdigest() for t in w.values()])
"""


FIX = "  fix    : complete it first, in all of them:"


def trained(folder: Path, processes: int, devices: int, run: str) -> set[str]:
    """The hashes of weights and losses that the processes print. Fast compilation is enough to show
    the order of sums; tests/mesh/test_bits.py tests programs compiled as for users."""
    folder.mkdir()
    ended = run_ranks(
        TRAINED, folder, size=processes, limit_s=600, head=HEAD, RUN=run,
        TESSERA_DEVICES=str(devices), XLA_FLAGS=FLAGS, TESSERA_DETERMINISTIC="1",
    )  # fmt: skip
    assert [e.code for e in ended] == [0] * processes, ended
    return {e.out for e in ended}


# A program, its fold, its ZeRO stage and its pipeline schedule: in one process, in two with two
# devices each, in two with one each. In the last fold a stage has devices of both processes.
RUNS = {
    "dense": ("dense dp=1,tp=1 0 -", "dense dp=2,tp=2 3 -", "dense dp=1,tp=2 1 -"),
    "pipeline": (
        "whole dp=1,pp=1,tp=1 0 GPipe",
        "whole dp=2,pp=2,tp=1 3 ZB-H1",
        "whole dp=1,pp=2,tp=1 0 1F1B",
    ),
    "experts": ("experts dp=1,ep=1 0 -", "experts dp=2,ep=2 3 -", "experts dp=1,ep=2 1 -"),
    "ring": ("ring dp=1,cp=1 0 -", "ring dp=2,cp=2 3 -", "ring dp=1,cp=2 1 -"),
}
MORE = ("pipeline", "experts", "ring")


@pytest.mark.parametrize("program", [pytest.param(p, marks=[LONG] * (p in MORE)) for p in RUNS])
def test_two_processes_train_to_the_bits_of_one(
    program: str, everything: bool, tmp_path: Path
) -> None:
    one, four, two = RUNS[program]
    alone = trained(tmp_path / "one", 1, 1, one)
    assert len(alone) == 1
    assert trained(tmp_path / "two of two", 2, 2, four) == alone
    if everything:
        assert trained(tmp_path / "two of one", 2, 1, two) == alone


@LONG
def test_weights_on_stages_of_two_processes_are_taken_by_other_functions(tmp_path: Path) -> None:
    found = set()
    for size, devices in ((1, 2), (2, 1)):
        folder = tmp_path / str(size)
        folder.mkdir()
        ended = run_ranks(
            STAGED, folder, size=size, head=HEAD, limit_s=300, TESSERA_DEVICES=str(devices)
        )
        assert [e.code for e in ended] == [0] * size, ended
        found |= {e.out for e in ended}
    assert len(found) == 1, found


def test_large_sums_have_the_same_bits_in_any_processes(everything: bool, tmp_path: Path) -> None:
    found = set()
    for processes, devices in ((1, 1), (2, 2), *([(1, 4), (4, 1)] * everything)):
        folder = tmp_path / f"{processes} of {devices}"
        folder.mkdir()
        onto = str(processes * devices)
        ended = run_ranks(SUMS, folder, size=processes, limit_s=300, head=HEAD, ONTO=onto,
                          TESSERA_DEVICES=str(devices))  # fmt: skip
        assert [e.code for e in ended] == [0] * processes, ended
        found |= {e.out for e in ended}
    assert len(found) == 1, found


def test_reading_what_lies_on_other_processes_says_what_to_do(tmp_path: Path) -> None:
    for e in run_ranks(READ, tmp_path, head=HEAD):
        assert e.out.splitlines() == [
            "[0.0, 1.0, 2.0, 3.0] 6.0",
            "read: other processes hold a part of the tensor",
            "  tensor : f32[] +dp",
            f"  at     : {line_of('read', READ, HEAD)}",
            f"{FIX} dist.all_reduce(x), or read it there: dist.to_host(x)",
            "read: other processes hold a part of the tensor",
            "  tensor : f32[4@dp]",
            f"  at     : {line_of('read', READ, HEAD)}",
            f'{FIX} dist.redistribute(x, "[4]"), or read it there: dist.to_host(x)',
        ], e
