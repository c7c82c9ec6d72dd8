"""Checkpoints saved by several processes together: one, or none if a process fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint
from tests.cases import LONG
from tests.procs.harness import run_ranks
from tests.procs.torture import trials, why_not

WRITTEN = """
from tessera import checkpoint
root = os.environ["ROOT"]
mesh = dist.Mesh.parse("pp=2 dp=2")
plan = dist.strategy("zero_redundancy_optimizer", stage=3)
x = ts.tensor(np.arange(24.0).reshape(4, 6), mesh=mesh.slice(pp=0), layout="[4@dp, 6]")
y = ts.tensor(np.arange(10.0), mesh=mesh.slice(pp=1))
z = ts.tensor(np.arange(6.0), mesh=mesh, layout="[6@dp]")
for _ in range(2):
    checkpoint.save("t", {"x": x, "y": y, "z": z}, root=root, quiet=True)
checkpoint.wait()
other = ts.tensor(np.zeros((4, 6)), mesh=mesh.slice(pp=1), layout="[4, 6@dp]")
found = checkpoint.load("t", {"x": other, "y": y, "z": z}, root=root)
print(dist.to_host(found.tensors["x"]).sum(), found.tensors["x"].type)
"""
# The second process cannot write: its folder differs from the first one's.
REFUSED = """
from tessera import checkpoint
from tessera.checkpoint.storage import Storage
root = os.environ["ROOT"]
if RANK == 1:
    def write(self, key, value):
        raise ts.CheckpointError("no space is left", at="")
    Storage.write = write
x = ts.tensor(np.arange(4.0), mesh=MESH, layout="[4@dp]")
try:
    checkpoint.save("t", {"x": x}, root=root, async_io=False)
except ts.CheckpointError as error:
    print(error)
"""
# Each of two processes reads half. Measured: the memory of NumPy and Python, and the bytes read.
HALVES = """
import tracemalloc
from tessera import checkpoint
from tessera.checkpoint.storage import Storage
checkpoint.pieces.READ_CACHE_BYTES = KEPT = 2 << 20
read, asked = Storage.read, []
def counted(self, key, most=None):
    found = read(self, key, most)
    asked.append(len(found) if key.endswith(".bin") else 0)
    return found
Storage.read = counted
for layout in ("[2048@dp, 2048]", "[2048, 2048@dp]", "[2048, (4·512@dp)]"):
    for dtype in ("f32", "bf16"):
        like = ts.tensor(np.zeros((2048, 2048)), mesh=MESH, layout=layout, dtype=dtype)
        checkpoint.load(None, {"w": like}, root=os.environ["ROOT"])  # which imports what it needs
        asked.clear()
        tracemalloc.start()
        new = checkpoint.load(None, {"w": like}, root=os.environ["ROOT"]).tensors["w"]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        here = np.asarray(new._data.addressable_shards[0].data, np.float32)
        say = [layout, dtype, most, sum(asked), here.min().item(), here.max().item()]
        print(json.dumps(say))
"""


def test_two_processes_write_one_checkpoint_that_one_reads(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ended = run_ranks(WRITTEN, tmp_path, ROOT=str(root), TESSERA_DEVICES="2")
    assert [e.code for e in ended] == [0, 0], ended
    assert [e.out for e in ended] == ["276.0 f32[4, 6@dp]\n"] * 2
    found = checkpoint.load(root=root).tensors
    assert {k: v.shape for k, v in found.items()} == {"x": (4, 6), "y": (10,), "z": (6,)}
    np.testing.assert_array_equal(found["x"].numpy(), np.arange(24.0).reshape(4, 6))
    manifest = json.loads((root / "t" / "manifest.json").read_text())
    files = {p["file"] for t in manifest["tensors"].values() for p in t["pieces"]}
    assert {f.split("-")[2] for f in files} == {"00000", "00001"}  # both have written
    assert files | {"manifest.json"} == {p.name for p in (root / "t").iterdir()}


def test_a_process_holds_and_reads_no_more_than_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a tensor that was whole on one device: half of it, and a few files of 256 KiB."""
    monkeypatch.setattr("tessera.checkpoint.pieces.FILE_BYTES", 256 << 10)
    w = np.arange(2048 * 2048, dtype=np.float32).reshape(2048, 2048) % 256
    checkpoint.save("t", {"w": w}, root=tmp_path / "root", async_io=False, quiet=True)
    ended = run_ranks("import json\n" + HALVES, tmp_path, ROOT=str(tmp_path / "root"))
    assert [e.code for e in ended] == [0, 0], ended
    for e in ended:
        for layout, dtype, most, read, low, high in map(json.loads, e.out.splitlines()):
            half = w.nbytes // 2 if dtype == "f32" else w.nbytes // 4
            assert half <= most < half + (3 << 20), (layout, dtype)
            assert read == (w.nbytes // 2 if layout.startswith("[2048@") else w.nbytes), layout
            assert (low, high) == (0, 255)


@LONG
def test_where_one_process_cannot_write_there_is_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ended = run_ranks(REFUSED, tmp_path, ROOT=str(root))
    assert [(e.code, e.out) for e in ended] == [(0, "rank 1: no space is left\n")] * 2, ended
    assert checkpoint.latest(root) is None
    with pytest.raises(ts.CheckpointError):
        checkpoint.load("t", root=root)


@pytest.mark.skipif(bool(why_not()), reason=f"torture: {why_not()}")
def test_a_save_that_is_killed_leaves_whole_checkpoints(everything: bool, tmp_path: Path) -> None:
    count = 60 if everything else 30
    _, killed, losses = trials(count, tmp_path, seed=1)
    assert not losses and killed == count
