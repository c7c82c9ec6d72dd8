"""Disagreement between processes in shared saves, loads and reads: an error in all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs.harness import run_ranks

HEAD = """
from pathlib import Path
from tessera import checkpoint, dist
from tessera.data import create_distributed_dataloader

def w(times=1.0):
    return ts.tensor(np.arange(8.0) * times, mesh=MESH, layout="[8@dp]")
def save(tag, tree, root=None, **how):
    checkpoint.save(tag, tree, root=root or ROOT, async_io=False, quiet=True, **how)
def said(run):
    try:
        run()
    except ts.TesseraError as error:
        lines = [line for line in str(error).splitlines() if not line.startswith("  at")]
        print("\\n".join(lines))
"""
SAVES = """
save("good", {"w": w()}, keep=1)
said(lambda: save(f"run-{RANK}", {"w": w()}, keep=1))
said(lambda: save("a", {"w": w(), f"n{RANK}": w()}))
said(lambda: save("a", {"w": w(), "rank": np.full(2, RANK)}))
said(lambda: save("a", {"w": w()}, root=ROOT.with_name(f"own{RANK}")))
if RANK == 0:
    print(checkpoint.latest(ROOT), sorted(p.name for p in ROOT.iterdir()))
"""
SAVED = """\
checkpoint.save: the processes save one checkpoint, and differ in what it is
  rank 0 : tag: run-0
  rank 1 : tag: run-1
"""
LOADS = """
for i in (1, 2):
    save(f"s{i}", {"w": w(i), "v": w(-i)})
like = {"w": w(0), "v": w(0)}
said(lambda: checkpoint.load(f"s{1 + RANK}", like, root=ROOT))
said(lambda: checkpoint.load("s1", like, root=ROOT, only="wv"[RANK]))
print(checkpoint.load("s1", root=ROOT).tensors["w"].sum().item() if RANK else "")
checkpoint.load("s2", like, root=ROOT)
print(dist.to_host(like["w"]).sum(), dist.to_host(like["v"]).sum())
for file in (ROOT / "s2").glob("data-*-00001-*.bin") if RANK else ():
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
dist.barrier()
try:
    checkpoint.load("s2", like, root=ROOT)  # of which the first has what it needs
except ts.CheckpointError as error:
    print(str(error).splitlines()[0])
    checkpoint.load("s1", like, root=ROOT)
print(dist.to_host(like["w"]).sum())
"""
LOADED = """\
checkpoint.load: the processes of a mesh differ
  rank 0 : checkpoint: s1 (id {}
  rank 1 : checkpoint: s2 (id {}
"""
OWN = """
mine = dist.Mesh(("tp",), devices=[RANK])
x = {"x": ts.tensor(np.arange(4.0) + RANK, mesh=mine)}
x["x"].numpy()  # the engine starts in both
root = ROOT.with_name(f"own{RANK}")
if RANK == 0 or WAITS:
    save("t", x, root=root)
    print(checkpoint.load("t", {"x": x["x"] * 0}, root=root).tensors["x"].numpy()[0])
if RANK == 0:
    save("t", x)
    save("t", x)  # its own
    Path(ROOT.with_name("first")).touch()
else:
    for _ in range(1200):
        if not ROOT.with_name("first").exists():
            time.sleep(0.05)
    said(lambda: save("t", x))
"""
LOADERS = """
def batches(**how):
    config = {"data": np.arange(4000), "sequence_length": 4, "batch_size_per_gpu": 4} | how
    return iter(create_distributed_dataloader(config, MESH))
def first(**how):
    with_skip = batches(**how)
    return [next(with_skip) for _ in range(2)]
said(lambda: first(seed=RANK))
said(lambda: first(data=np.arange(4000 + 500 * RANK)))
said(lambda: first(batch_size_per_gpu=4 + 4 * RANK))
one = batches()
one.load_state_dict({**one.state_dict(), "sample": 8 * RANK})
said(lambda: next(one))
print(len(first()))
"""
OBJECTS = """
import pickle
said(lambda: pickle.dumps({"x": X}))
assert pickle.loads(pickle.dumps(dist.to_host(X))).sum() == 28.0
print(dist.all_gather_object({"rank": RANK, "took_s": np.float32(1.5), "at": (1, 2)}))
said(lambda: dist.all_gather_object(object()))
print(dist.all_reduce(2.0), dist.all_reduce(X.sum()).item())
said(lambda: dist.all_reduce(float(RANK)))
said(lambda: dist.all_gather(np.arange(8.0) * RANK))
if RANK:
    said(lambda: dist.all_gather_object(1))
else:
    said(lambda: dist.all_gather_object(2))
"""
SECTION = """
print("== {name}", flush=True)
ROOT = Path(os.environ["ROOT"], "{name}", "root")
ROOT.parent.mkdir(parents=True, exist_ok=True)
"""
PROGRAM = {"saves": SAVES, "loads": LOADS, "own": "WAITS = True\n" + OWN, "loaders": LOADERS,
           "objects": OBJECTS}  # fmt: skip


def both(program: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """Returns for each section of a program what two processes say, which must succeed."""
    body = "".join(SECTION.format(name=name) + text for name, text in program.items())
    ended = run_ranks(HEAD + body, folder, ROOT=str(folder))
    assert [e.code for e in ended] == [0, 0], ended
    found: dict[str, list[str]] = {name: [] for name in program}
    for e in ended:
        for part in e.out.split("== ")[1:]:
            name, _, text = part.partition("\n")
            found[name].append(text)
    return found


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return both(PROGRAM, tmp_path_factory.mktemp("alike"))


def test_what_they_save_as_one_is_one(say: dict[str, list[str]]) -> None:
    """A failed save removes no existing checkpoint."""
    first, second = say["saves"]
    for out in (first, second):
        assert out.startswith(SAVED)
        assert "rank 0 : tensors: 2: w f32[8], n0 f32[8] (checksum " in out
        assert "values of no mesh: " in out
        assert "is not where the first process writes\n" in out
    assert first.endswith("good ['good']\n")


def test_what_they_load_as_one_is_one(say: dict[str, list[str]]) -> None:
    for k, out in enumerate(say["loads"]):
        for want, line in zip(LOADED.splitlines(), out.splitlines()):
            assert line.startswith(want.partition("{")[0])
        assert "rank 0 : names: 1: w (checksum " in out and "rank 1 : names: 1: v (" in out
        wrong = "checkpoint: 's2' is damaged" if k else LOADED.splitlines()[0]
        assert out.endswith(f"{'28.0' if k else ''}\n56.0 -56.0\n{wrong}\n28.0\n"), out


def own(first: str, second: str) -> None:
    assert first == "0.0\n"
    assert second.removeprefix("1.0\n").startswith(
        "checkpoint.save: another process of this run has saved 't' there\n"
    )


def test_what_lies_on_one_process_is_saved_by_it_alone(say: dict[str, list[str]]) -> None:
    own(*say["own"])


@LONG
def test_so_is_that_of_a_process_which_saves_first(tmp_path: Path) -> None:
    own(*both({"own": "WAITS = False\n" + OWN}, tmp_path)["own"])


def test_the_batches_of_one_loader_are_alike(say: dict[str, list[str]]) -> None:
    for out in say["loaders"]:
        for rows in (("seed: 0", "seed: 1"), ("rows of a batch: 8", "rows of a batch: 16"),
                     ("sample: 0", "sample: 8")):  # fmt: skip
            assert f"  rank 0 : {rows[0]}\n  rank 1 : {rows[1]}\n" in out, out
        assert "tokens: 4000" in out and "tokens: 4500" in out and out.endswith("2\n")


def test_each_hears_what_the_others_have(say: dict[str, list[str]]) -> None:
    """A collective of tensors without a mesh, which each process has for itself, is an error."""
    for out in say["objects"]:
        assert out.startswith("read: other processes hold a part of the tensor\n")
        lines = out.partition("dist.to_host(x)\n")[2].splitlines()
        assert lines[0] == str([{"rank": k, "took_s": 1.5, "at": [1, 2]} for k in range(2)])
        assert "2.0 28.0\n" in out and "value cannot be " in lines[1]
        assert "  rank 0 : value: 0\n  rank 1 : value: 1\n" in out
        assert "  rank 1 : value: 0, 1, 2, … (checksum " in out
        assert "dist.all_gather_object(x)" in out and "are not at the same call\n" in out
