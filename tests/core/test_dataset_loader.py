"""Loaders of any data set: order, batches, resumption on other numbers of hosts, streams."""

from __future__ import annotations

import gc
import itertools
import json
import math
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.core.mesh import Mesh
from tessera.data import DataLoader, LoaderWarning
from tests.core.loaders import flat, text_of

pytestmark = pytest.mark.usefixtures("oracle")


class Squares:
    """A map-style data set; `read` are the numbers that were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.read.append(i)
        return {"id": i, "square": np.float32(i * i)}


class Counter:
    """An iterable of numbers whose state is the next one."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.loaded, self.read = count, 0, False, 0

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.loaded else 0
        self.loaded = False
        while self.at < self.count:
            self.at += 1
            self.read += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loaded = state["at"], True


class Letters:
    """An iterable without state."""

    def __init__(self, count: int) -> None:
        self.count, self.epochs = count, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def padded(samples: list[list[int]]) -> dict[str, Any]:
    longest = max(map(len, samples))
    return {
        "ids": np.array([s + [0] * (longest - len(s)) for s in samples]),
        "lengths": np.array([len(s) for s in samples]),
    }


LONG = [[i] * (i % 5 + 1) for i in range(1, 30)]


def ids(batches: Any, most: int = 10**6) -> list[list[int]]:
    """The numbers of the samples in each batch."""
    found = []
    for batch in itertools.islice(batches, most):
        x = batch["id"] if isinstance(batch, dict) else batch
        found.append(x.numpy().tolist())
    return found


# ---- batches -----------------------------------------------------------------------------------
def test_samples_are_stacked_in_their_trees() -> None:
    Point = namedtuple("Point", "x y")
    rows = [({"a": i, "b": [i, 2.5]}, Point(np.full(3, i), True), f"text {i}") for i in range(4)]
    (batch,) = DataLoader(rows, batch_size=4)
    assert isinstance(batch, tuple) and type(batch[1]) is Point
    assert {k: str(t.type) for k, t in batch[0].items()} == {"a": "i32[4]", "b": "f32[4, 2]"}
    assert [str(t.type) for t in batch[1]] == ["i32[4, 3]", "bool[4]"]
    assert batch[2] == ["text 0", "text 1", "text 2", "text 3"]
    assert batch[0]["b"].numpy().tolist() == [[i, 2.5] for i in range(4)]


def test_a_list_of_arrays_is_a_batch_of_several() -> None:
    """As PyTorch's loader gives them; a list of numbers is an array."""
    batches = [[np.arange(4.0), np.arange(4)], [np.arange(4.0) + 4, np.arange(4) + 4]]
    for host in range(2):
        x, y = next(DataLoader(batches, None, hosts=(host, 2)))
        assert [str(t.type) for t in (x, y)] == ["f32[2]", "i32[2]"]
        assert x.numpy().tolist() == y.numpy().tolist() == [2 * host, 2 * host + 1]
    (batch,) = DataLoader([[np.zeros(3), {"y": i}] for i in range(2)], batch_size=2)
    assert [batch[0].shape, batch[1]["y"].numpy().tolist()] == [(2, 3), [0, 1]]


@pytest.mark.parametrize("kind", ["array", "dict", "tuple", "map"])
def test_each_sample_once_an_epoch_in_another_order(kind: str) -> None:
    x = np.arange(23)
    data = {"array": x, "dict": {"id": x, "more": x[:, None]}, "tuple": (x, x), "map": Squares(23)}
    loader = DataLoader(data[kind], batch_size=4, shuffle=True, seed=3)
    loops = [[b[0] if isinstance(b, tuple) else b for b in loader] for _ in range(2)]
    first, second = (ids(loop) for loop in loops)
    assert [len(b) for b in first] == [4, 4, 4, 4, 4, 3] and len(loader) == 6
    every = [flat(epoch) for epoch in (first, second)]
    assert sorted(every[0]) == sorted(every[1]) == x.tolist()
    assert every[0] != every[1] and every[0] != sorted(every[0])
    dropped = DataLoader(data[kind], batch_size=4, shuffle=True, seed=3, drop_last=True)
    assert ids(b[0] if isinstance(b, tuple) else b for b in dropped) == first[:5]
    assert len(dropped) == 5


def test_an_array_and_a_list_of_its_rows_have_one_order() -> None:
    rows = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    how: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    for a, b in zip(DataLoader(rows, **how), DataLoader(list(rows), **how), strict=True):
        assert (a.numpy() == b.numpy()).all()


def test_without_a_batch_size_each_sample_is_a_batch() -> None:
    batches = [{"x": np.full((4, 2), i)} for i in range(3)]
    assert [b["x"].shape for b in DataLoader(batches, None)] == [(4, 2)] * 3
    halves = [DataLoader(batches, None, hosts=(i, 2)) for i in range(2)]
    assert [b["x"].shape for b in halves[1]] == [(2, 2)] * 3
    made = DataLoader([2, 3], None, collate_fn=lambda n: np.zeros(n))
    assert [x.shape for x in made] == [(2,), (3,)]


def test_a_data_set_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    table = datasets.Dataset.from_dict({
        "image": [pil.fromarray(np.full((4, 4, 3), i, np.uint8)) for i in range(6)],
        "id": list(range(6)), "box": [[i, i + 1.0] for i in range(6)],
        "text": [f"t{i}" for i in range(6)],
    })  # fmt: skip
    for made in (table, table.with_format("numpy"), table.with_format("torch")):
        first = next(DataLoader(made.select_columns(["id", "box", "text"]), batch_size=3))
        assert first["box"].numpy().tolist() == [[0, 1], [1, 2], [2, 3]]
        assert (str(first["id"].type), first["text"]) == ("i32[3]", ["t0", "t1", "t2"])
    for batch in DataLoader(table, batch_size=3, shuffle=True):
        assert str(batch["image"].type) == "u8[3, 4, 4, 3]"
        assert (batch["image"].numpy()[:, 0, 0, 0] == batch["id"].numpy()).all()


# ---- position ----------------------------------------------------------------------------------
def hosts_of(make: Any, count: int, state: Any = None) -> list[DataLoader]:
    loaders = [make(hosts=(i, count)) for i in range(count)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def steps(loaders: list[DataLoader], count: int) -> list[Any]:
    """The rows of each batch over all hosts, as lists."""
    found = []
    for _ in range(count):
        parts = [next(each) for each in loaders]
        parts = [p if isinstance(p, dict) else {"id": p} for p in parts]
        found.append({k: [row for p in parts for row in p[k].numpy().tolist()] for k in parts[0]})
    return found


MADE = {
    "map": lambda **k: DataLoader(Squares(29), **k, shuffle=True, seed=7),
    "arrays": lambda **k: DataLoader({"id": np.arange(29)}, **k, shuffle=True, seed=7),
    "lengths": lambda **k: DataLoader(LONG, **k, shuffle=True, seed=7, collate_fn=padded),
    "stateful": lambda **k: DataLoader(Counter(29), **k),
    "stateless": lambda **k: DataLoader(Letters(29), **k),
}


@pytest.mark.parametrize("kind", MADE)
@given(before=st.integers(0, 12), hosts=st.sampled_from([1, 2, 4]), drop=st.booleans(),
       prefetch=st.sampled_from([0, 2]))  # fmt: skip
def test_a_run_goes_on_exactly_on_other_hosts(
    kind: str, before: int, hosts: int, drop: bool, prefetch: int
) -> None:
    def make(**k: Any) -> DataLoader:
        k = {"batch_size": 4, "drop_last": drop, "prefetch": prefetch, "epochs": math.inf, **k}
        return MADE[kind](**k)

    want = steps([make()], 20)
    one = hosts_of(make, 2)
    seen = steps(one, before)
    states = [each.state_dict() for each in one]
    assert states[0] == states[1]
    seen += steps(hosts_of(make, hosts, json.loads(json.dumps(states[0]))), 20 - before)
    assert seen == want


def test_a_run_goes_on_with_another_batch_size() -> None:
    first = DataLoader(Squares(24), batch_size=6, shuffle=True)
    seen = ids(first, 2)
    other = DataLoader(Squares(24), batch_size=3, shuffle=True)
    other.load_state_dict(first.state_dict())
    assert flat(seen + ids(other)) == flat(ids(DataLoader(Squares(24), 6, shuffle=True)))


def test_each_host_reads_its_own_rows_alone() -> None:
    data = [Squares(16) for _ in range(4)]
    loaders = [DataLoader(d, 8, hosts=(i, 4), epochs=1) for i, d in enumerate(data)]
    assert [flat(ids(loader)) for loader in loaders] == [d.read for d in data]
    assert [d.read for d in data][1] == [2, 3, 10, 11]


def test_a_last_batch_may_leave_a_host_without_rows() -> None:
    found = [[b["id"].shape[0] for b in DataLoader(Squares(9), 8, hosts=(i, 4))] for i in range(4)]
    assert found == [[2, 0], [2, 0], [2, 0], [2, 1]]


def test_the_state_of_a_stream_is_that_of_delivered_batches() -> None:
    data = Counter(40)
    with DataLoader(data, batch_size=4, prefetch=3) as loader:
        assert ids(loader, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        state = loader.state_dict()
    assert (state["sample"], state["data_state"]) == (8, {"at": 8})
    fresh = Counter(40)
    other = DataLoader(fresh, batch_size=4, prefetch=0)
    other.load_state_dict(state)
    assert ids(other, 1) == [[8, 9, 10, 11]]
    assert fresh.read == 4  # the first eight are not read again


def test_a_stream_whose_iterator_has_the_state() -> None:
    class Rows:
        def __iter__(self) -> Any:
            return Row()

    class Row:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            if self.at == 10:
                raise StopIteration
            self.at += 1
            return self.at - 1

        def get_state(self) -> bytes:
            return bytes([self.at])

        def set_state(self, state: bytes) -> None:
            self.at = state[0]

    first = DataLoader(Rows(), batch_size=4)
    assert ids(first, 1) == [[0, 1, 2, 3]]
    other = DataLoader(Rows(), batch_size=3)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ids(other) == [[4, 5, 6], [7, 8, 9]]
    assert ids(other) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


@pytest.mark.parametrize("data", [Squares(9), Counter(9), np.arange(9)])
def test_a_loader_that_is_dropped_ends_its_thread(data: Any) -> None:
    before = threading.active_count()
    loader = DataLoader(data, 2)
    next(loader)
    assert threading.active_count() == before + 1
    del loader
    gc.collect()
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_stream_is_a_list_though_it_has_no_length() -> None:
    assert [x.numpy().tolist() for x in list(DataLoader(Letters(5), 3))] == [[0, 1, 2], [3, 4]]


def test_epochs_of_a_stream() -> None:
    data = Letters(6)
    loader = DataLoader(data, batch_size=4, epochs=2)
    assert ids(loader) == [[0, 1, 2, 3], [4, 5]] * 2
    assert data.epochs[:2] == [0, 1]
    with pytest.raises(ts.UsageError, match="it has ended: its epochs=2 were given out"):
        iter(loader)


# ---- errors ------------------------------------------------------------------------------------
def test_a_broken_off_loop_without_shuffling_warns() -> None:
    loader = DataLoader(Squares(9), 4)
    ids(loader, 1)
    with pytest.warns(LoaderWarning, match="made anew begins again"):
        assert ids(loader, 1) == [[4, 5, 6, 7]]


class Broken(Squares):
    def __getitem__(self, i: int) -> Any:
        raise KeyError("no such file")


def fails(*data: Any, **k: Any) -> str:
    return text_of(lambda: next(DataLoader(*data, **k)))


def test_errors(golden: Any) -> None:
    state = DataLoader(np.arange(10), 2).state_dict()
    once = DataLoader((i for i in range(4)), 4, epochs=2)
    next(once)
    texts = {
        "shapes": fails([[1, 2], [1]], 2),
        "keys": fails([{"a": 1}, {"b": 1}], 2),
        "an object": fails([object(), object()], 2),
        "rows": fails((np.zeros(3), np.zeros(4))),
        "no data set": fails(3),
        "two data sets": fails({"train": Squares(3), "test": Squares(2)}),
        "too few": fails([1, 2], 3, drop_last=True),
        "a batch size": fails([1, 2], 0),
        "hosts": fails(np.arange(9), 3, hosts=(0, 2)),
        "no effect": fails(iter([1]), None, shuffle=True, drop_last=True, data_axes="dp"),
        "other data": text_of(lambda: DataLoader(np.arange(1, 11), 2).load_state_dict(state)),
        "a generator": text_of(lambda: next(once)),
        "a length": text_of(lambda: len(once)),
        "a data set's error": text_of(lambda: next(DataLoader(Broken(3))), ts.BackendError),
        "an argument": text_of(lambda: DataLoader(Squares(3), 1, num_workers=4)),
    }  # fmt: skip
    golden("\n\n".join(f"{k}:\n{v}" for k, v in texts.items()))


def test_rows_of_a_mesh_of_hosts() -> None:
    mesh = Mesh.parse("dp=4 tp=2")
    loaders = [DataLoader(np.arange(8), 8, mesh=mesh, hosts=(i, 2)) for i in range(2)]
    assert [ids(loader) for loader in loaders] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
