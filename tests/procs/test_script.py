"""One script in one process and in two: equal reads, loads, output and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.procs.harness import line_of, run_ranks

ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
import os, sys
import jax, numpy as np
if int(os.environ["TEST_SIZE"]) > 1:
    jax.distributed.initialize(
        os.environ["TEST_ADDRESS"], int(os.environ["TEST_SIZE"]), int(os.environ["TEST_RANK"]),
        initialization_timeout=60,
    )
import tessera as ts
from tessera import dist
"""
# Two slices of one mesh, one on each of two processes.
SCRIPT = """
import json, warnings
warnings.simplefilter("always", ResourceWarning)
from tessera.data import DataLoader, create_distributed_dataloader
from tessera.train.run import Run
whole = dist.Mesh.parse("pp=2 dp=2")
first, last = whole.slice(pp=0), whole.slice(pp=1)
x = ts.tensor(np.arange(8.0), mesh=first, layout="[8@dp]")
there = ts.tensor(np.arange(6.0).reshape(3, 2), mesh=last, layout="[3, 2@dp]")
moved = dist.place({"x": x}, mesh=last)["x"]
try:
    read = moved.numpy().tolist()  # read
except ts.BackendError as error:
    read = str(error)

tokens = np.arange(200, dtype=np.int32)
config = {"data": tokens, "global_batch_size": 8, "sequence_length": 4, "prefetch": 0}
loader = create_distributed_dataloader(config, dist.Mesh.parse("dp=4"))
batch = next(loader)["input_ids"]
texts = [[i] * (i + 1) for i in range(9)]
pad = lambda rows: np.array([r + [0] * (max(map(len, rows)) - len(r)) for r in rows])
arrays = DataLoader({"x": texts[8], "y": np.eye(9)}, 8, mesh=dist.Mesh.parse("dp=4"))
padded = DataLoader(texts, 8, mesh=dist.Mesh.parse("dp=4"), collate_fn=pad)

with Run(os.environ["OUT"], steps=1, tokens_per_step=1, weights=lambda: {"w": there}) as run:
    with run.step(0) as row:
        row["loss"] = ts.ones(()).item()
run.save_text("sample.txt", "written once")
back = dist.place({"w": there}, mesh=first)["w"]
both = dist.place({"w": there}, dist.strategy("tensor_parallel", axis="dp"), whole)["w"]
same = dist.to_host({"x": x, "moved": moved, "back": back, "both": both, "batch": batch, "n": 3})
same |= {f"{i} {k}": v for i, d in enumerate(map(dist.to_host, arrays)) for k, v in d.items()}
same |= {f"padded {i}": dist.to_host(x) for i, x in enumerate(padded)}
rows = len(loader._split.rows(8))
print(json.dumps([{k: np.asarray(v).tolist() for k, v in same.items()}, read, rows]))
"""
# The choice of programs for a placement must not depend on values read already.
READ_BY_ONE = """
print("== read")
from tessera import nn
mesh, zero = dist.Mesh.parse("dp=4"), dist.strategy("zero_redundancy_optimizer", stage=3)
layer = nn.Linear(4, 8).to(ts.bf16)
given = {"z": ts.zeros((4, 4)), "n": ts.full((), 2.0), "t": ts.tensor(np.arange(4.0))}
given["narrow"] = given["t"].to(ts.bf16)
if dist.process_index() == 0:
    print(*(float(x.numpy().sum()) for x in given.values()))
placed = {**dist.place(given, zero, mesh), **dist.place(layer, zero, mesh).state_dict()}
total = ts.jit(lambda x: {k: v.to(ts.f32).sum() for k, v in x.items()})(placed)
print({k: v.item() for k, v in total.items()}, placed["weight"].type)
"""


def said(folder: Path, size: int) -> list[tuple[list[str], Any, list[str]]]:
    """For each process, the lines of the run, the script's output, and what it reads."""
    folder.mkdir()
    out = folder / "run"
    ended = run_ranks(
        SCRIPT + READ_BY_ONE, folder, size=size, limit_s=120, head=HEAD, OUT=str(out),
        TESSERA_DEVICES=str(4 // size),
    )  # fmt: skip
    assert [e.code for e in ended] == [0] * size, ended
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "metrics.jsonl", "sample.txt", "weights.safetensors",
    ]  # fmt: skip
    assert not any("tessera-run-" in e.err for e in ended), ended  # of the first process only
    parts = [[part.splitlines() for part in e.out.split("== read\n")] for e in ended]
    return [(own[:-1], json.loads(own[-1]), read) for own, read in parts]


def test_a_script_says_the_same_in_two_processes(tmp_path: Path) -> None:
    ((shown, (want, values, rows), read),) = said(tmp_path / "one", 1)
    (first, (one, error, half), begin), (second, (two, same, other), end) = said(
        tmp_path / "two", 2
    )
    assert read[0] == begin[0] == "0.0 2.0 6.0 6.0" and read[1:] == begin[1:] == end
    assert one == two == want and want["moved"] == want["x"] and want["back"] == want["both"]
    assert (len(first), second) == (len(shown), []) and shown  # only one process prints the run
    assert (want["0 x"], want["1 x"]) == ([8] * 8, [8]) and want["1 y"] == [[0] * 8 + [1]]
    assert want["padded 0"][2] == [2, 2, 2, 0, 0, 0, 0, 0] and want["padded 1"] == [[8] * 9]
    assert (rows, half, other) == (8, 4, 4)
    assert values == same == want["x"]
    assert error.splitlines() == [
        "read: other processes hold the tensor",
        "  tensor : f32[8] on dp=2",
        f"  at     : {line_of('read', SCRIPT, HEAD)}",
        "  fix    : read it in all processes: dist.to_host(x)",
    ]


@pytest.mark.long
def test_the_demo_learns_the_same_in_two_processes(tmp_path: Path) -> None:
    body = f"""
import runpy
sys.argv = ["train_gpt.py", "--steps", "4", "--out", os.environ["OUT"], "--sample-tokens", "4"]
runpy.run_path({str(ROOT / "examples" / "train_gpt.py")!r}, run_name="__main__")
"""
    losses = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        ended = run_ranks(
            body, folder, size=size, limit_s=400, head=HEAD, OUT=str(folder / "run"),
            TESSERA_DEVICES=str(8 // size),
        )  # fmt: skip
        assert [e.code for e in ended] == [0] * size, ended
        assert all("median step" in e.out for e in ended[:1])
        assert all("median step" not in e.out for e in ended[1:])
        rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([float(row.split('"loss": ')[1].split(",")[0]) for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
