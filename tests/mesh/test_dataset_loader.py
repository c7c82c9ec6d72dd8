"""Loaders of any data set: batches on meshes, and PyTorch's and Grain's loaders beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist
from tessera.data import DataLoader

ROWS = {"x": np.arange(60, dtype=np.float32).reshape(20, 3), "id": np.arange(20)}


@pytest.mark.parametrize("mesh", ["dp=8", "dp=2 tp=4", "tp=8", "dp=2 fsdp=2 tp=2", "dp=3"])
@pytest.mark.parametrize("size", [6, 16])
def test_each_device_gets_its_rows_also_of_a_shorter_batch(mesh: str, size: int) -> None:
    where = dist.Mesh.parse(mesh)
    axes = [a for a in where.axes if a in ("dp", "fsdp")]
    on = DataLoader(ROWS, size, mesh=where, shuffle=True)
    plain = DataLoader(ROWS, size, shuffle=True)
    for batch, want in zip(on, plain, strict=True):
        for name in ROWS:
            assert batch[name].mesh == where
            assert set(batch[name].type.split_axes) == set(axes)
            np.testing.assert_array_equal(batch[name].numpy(), want[name].numpy())


def test_rows_of_a_padded_batch_lie_on_the_mesh() -> None:
    where = dist.Mesh.parse("dp=4 tp=2")
    texts = [[i] * (i + 1) for i in range(8)]

    def pad(rows: list[list[int]]) -> tuple[Any, Any]:
        return np.array([r + [0] * (max(map(len, rows)) - len(r)) for r in rows]), len(rows)

    ids, count = next(DataLoader(texts, 4, collate_fn=pad, mesh=where))
    assert (str(ids.type), str(count.type)) == ("i32[4@dp, 4]", "i32[]")
    assert count.mesh == where


def test_a_loader_goes_on_on_another_mesh() -> None:
    loader = DataLoader(ROWS, 4, mesh=dist.Mesh.parse("dp=4"), shuffle=True, seed=1)
    found = [next(loader)["id"].numpy()]
    loader.resize(dist.Mesh.parse("dp=2"))
    batch = next(loader)
    assert str(batch["id"].type) == "i32[4@dp]" and batch["id"].mesh.size == 2
    other = DataLoader(ROWS, 4, mesh=dist.Mesh.parse("dp=8"), shuffle=True, seed=1)
    assert other._split.axes == ("dp",)
    want = [next(other)["id"].numpy() for _ in range(2)]
    np.testing.assert_array_equal([*found, batch["id"].numpy()], want)


# ---- PyTorch -----------------------------------------------------------------------------------
class Pairs:
    """A data set of PyTorch: tuples of tensors, numbers and texts in dicts."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> Any:
        import torch

        return torch.full((2, 3), float(i)), {"n": i, "f": i / 4, "t": str(i)}, (np.eye(2) * i, i)


@pytest.mark.parametrize(
    ("size", "drop_last"), [(1, False), (4, False), (4, True), (11, True), (None, False)]
)
def test_batches_are_those_of_pytorch(size: int | None, drop_last: bool) -> None:
    data = pytest.importorskip("torch.utils.data")
    rows = Pairs()
    if size is None:
        rows = [np.full((3, 2), i) for i in range(4)]  # type: ignore[assignment]
    theirs = list(data.DataLoader(rows, size, drop_last=drop_last))
    ours = list(DataLoader(rows, size, drop_last=drop_last))
    assert len(ours) == len(theirs) == len(DataLoader(rows, size, drop_last=drop_last))

    def same(a: Any, b: Any) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for k in a:
                same(a[k], b[k])
        elif isinstance(a, (list, tuple)):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                same(x, y)
        elif isinstance(a, ts.Tensor):
            np.testing.assert_array_equal(a.numpy(), np.asarray(b))
        else:
            assert a == b

    same(ours, theirs)


# ---- Grain and datasets ------------------------------------------------------------------------
def test_a_pipeline_of_grain_goes_on() -> None:
    grain = pytest.importorskip("grain", reason="pip install grain")

    def rows() -> Any:
        return grain.MapDataset.range(20).shuffle(seed=3).map(lambda i: {"id": i}).to_iter_dataset()

    def ids(loader: Any) -> list[list[int]]:
        return [batch["id"].numpy().tolist() for batch in loader]

    want = ids(DataLoader(rows(), 4))
    first = DataLoader(rows(), 4)
    seen = [next(first)["id"].numpy().tolist() for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["data_state"] == {"next_index": 8}
    for count in (1, 2, 4):
        hosts = [DataLoader(rows(), 4, hosts=(i, count)) for i in range(count)]
        for each in hosts:
            each.load_state_dict(state)
        parts = [ids(each) for each in hosts]
        assert seen + [sum(x, []) for x in zip(*parts, strict=True)] == want  # noqa: RUF017
    assert ids(DataLoader(grain.MapDataset.range(6).map(lambda i: {"id": i}), 4)) == [
        [0, 1, 2, 3], [4, 5],
    ]  # fmt: skip


STREAM = """
import json, datasets, sys
from tessera.data import DataLoader
def rows():
    table = datasets.Dataset.from_dict({"id": list(range(40))})
    return table.to_iterable_dataset(num_shards=4)
ids = lambda loader: [batch["id"].numpy().tolist() for batch in loader]
want = ids(DataLoader(rows(), 4))
first = DataLoader(rows(), 4)
seen = [next(first)["id"].numpy().tolist() for _ in range(3)]
other = DataLoader(rows(), 4)
other.load_state_dict(json.loads(json.dumps(first.state_dict())))
assert seen + ids(other) == want and first.state_dict()["data_state"]
print("same")
"""


def test_an_iterable_of_datasets_goes_on_and_the_process_ends_well() -> None:
    """Loaders are left open: their threads are in C++ code when the process ends."""
    pytest.importorskip("datasets")
    ended = subprocess.run(
        [sys.executable, "-c", STREAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "same\n"), ended.stderr
