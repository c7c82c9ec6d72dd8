"""Data loaders: each sample once, in one order for any number of loaders, and resumption."""

from __future__ import annotations

import gc
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.core.mesh import Mesh
from tessera.data import (
    LoaderWarning,
    TokenSource,
    create_dataloader,
    create_distributed_dataloader,
)
from tessera.data.ahead import Ahead
from tessera.data.split import host_rows
from tests.core.loaders import S, flat, loader, samples, seen, text_of

pytestmark = pytest.mark.usefixtures("oracle")


# ---- the run -----------------------------------------------------------------------------------
def test_one_for_is_one_epoch_and_the_next_has_another_order() -> None:
    with loader(20) as data:
        first, second = seen(data), seen(data)
    assert len(first) == len(data) == 5
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(20))
    assert first != second


def test_epochs_are_counted_or_never_end() -> None:
    with loader(epochs=2) as data:
        assert len(seen(data)) == 10
        with pytest.raises(ts.UsageError, match="it has ended: its epochs=2 were given out"):
            seen(data)
    with loader(epochs=math.inf) as data:
        assert len(seen(data, 23)) == 23
        assert data.state_dict()["epoch"] == 4


def test_a_broken_off_for_goes_on_where_it_was() -> None:
    want = seen(loader())
    data = loader()
    assert seen(data, 2) + seen(data) == want
    data = loader(20, shuffle=False)
    first = seen(data, 2)
    with pytest.warns(LoaderWarning, match="goes on at sample 8, where the last one was broken"):
        second = seen(data, 2)
    assert second[0] == [8, 9, 10, 11] != first[0]
    seen(data)  # and no second warning


def test_a_loader_says_where_it_stands() -> None:
    data = loader(np.int64(20), seed=np.int64(5), hosts=[0, 2])
    next(data)
    assert repr(data) == (
        "TokenLoader(2 rows of 4 × 4 tokens, 5 batches an epoch, at sample 4 of epoch 0)"
    )
    state = data.state_dict()
    assert json.loads(json.dumps(state)) == state


def test_without_shuffle_the_order_is_the_data_s() -> None:
    assert seen(loader(9, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_last_batch_is_dropped_or_filled_up() -> None:
    assert seen(loader(9, shuffle=False, drop_last=False)) == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, -1, -1, -1],
    ]  # fmt: skip
    assert len(loader(9, drop_last=False)) == 3
    short = loader(2, drop_last=False, pad_token=3)
    assert len(short) == 1
    assert (next(short)["input_ids"].numpy()[2:] == 3).all()


@given(st.integers(0, 2**40), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
def test_the_global_order_is_the_same_for_any_number_of_loaders(
    seed: int, hosts: int, prefetch: int
) -> None:
    want = seen(loader(50, batch_size=8, seed=seed, prefetch=0))
    parts = [
        seen(loader(50, batch_size=8, seed=seed, prefetch=prefetch, hosts=(i, hosts)))
        for i in range(hosts)
    ]
    assert [flat(rows) for rows in zip(*parts, strict=True)] == want


orders: dict[str, list[int]] = {}  # by packing: the order of one loader with one row per batch


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 8), st.sampled_from([8, 16, 40])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["concat", "documents"]),
    st.integers(0, 2),
)
def test_a_run_that_changes_its_loaders_sees_every_sample_once(
    stages: list[tuple[int, int, int]], packing: str, prefetch: int
) -> None:
    """Stops, and resumes with other numbers of loaders and other batch sizes, over epochs."""
    count, length = 96, 4
    common = {
        "data": TokenSource([np.arange(count * length + 1)], np.append(
            np.arange(1, count + 1) * length, count * length + 1)),
        "sequence_length": length, "packing": packing, "epochs": math.inf, "seed": 11,
        "prefetch": prefetch,
    }  # fmt: skip

    def ids(batch: Any) -> list[int]:
        first: list[int] = batch["input_ids"].numpy()[:, 0].tolist()
        return first

    if packing not in orders:
        with create_dataloader({**common, "batch_size": 1}) as one:
            orders[packing] = flat(ids(next(one)) for _ in range(50 * count))
        for epoch in range(50):
            assert len(set(orders[packing][epoch * count : (epoch + 1) * count])) == count
    order = orders[packing]
    state, at = None, (0, 0)
    for hosts, steps, size in stages:
        loaders = [
            create_dataloader({**common, "batch_size": size, "hosts": (i, hosts)})
            for i in range(hosts)
        ]
        for each in loaders:
            if state is not None:
                each.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            epoch, sample = at if count - at[1] >= size else (at[0] + 1, 0)
            start = epoch * count + sample
            assert flat(ids(next(each)) for each in loaders) == order[start : start + size]
            at = (epoch, sample + size) if sample + 2 * size <= count else (epoch + 1, 0)
            assert loaders[0].state_dict()["sample"] == at[1]
        state = loaders[0].state_dict()
        assert all(each.state_dict() == state for each in loaders)
        for each in loaders:
            each.close()
        at = (state["epoch"], state["sample"])


def test_the_position_counts_what_was_given_out_not_what_is_prepared() -> None:
    data = loader(40, prefetch=8)
    want = seen(loader(40))
    assert seen(data, 3) == want[:3]
    deadline = time.monotonic() + 10
    while len(data._ahead._shared.ready) < 7 and time.monotonic() < deadline:
        time.sleep(0.005)
    state = data.state_dict()
    assert (state["epoch"], state["sample"]) == (0, 12)
    data.load_state_dict(state)
    assert seen(data) == want[3:]


def test_a_state_at_the_end_of_all_epochs_is_an_end() -> None:
    data = loader(epochs=1)
    seen(data)
    again = loader(epochs=1)
    again.load_state_dict(data.state_dict())
    assert seen(again) == []


def test_validation_is_apart_and_comes_back_the_same() -> None:
    data = loader(40, validation_fraction=0.25)
    held = data.validation()
    train, val = set(flat(seen(data))), set(flat(seen(held)))
    assert val - {-1} == set(range(30, 40))
    assert len(train) == 28
    assert train < set(range(29))  # the cut falls into window 29
    first = seen(held)
    assert first == seen(held)
    assert seen(held, 1) == seen(held, 1) == first[:1]
    next(held)
    state = held.state_dict()
    again = data.validation()
    again.load_state_dict(state)
    assert seen(again) == first[2:] and seen(again) == first
    with pytest.raises(ts.UsageError, match="no data are set aside for validation"):
        loader().validation()


def test_validation_begins_with_a_document() -> None:
    ends = np.arange(1, 11) * 10
    source = TokenSource([np.arange(100)], ends)
    config = {"data": source, "batch_size": 1, "sequence_length": 10, "packing": "documents"}
    held = create_dataloader({**config, "validation_fraction": 0.25}).validation()
    assert [batch["input_ids"].numpy()[0, 0] for batch in held] == [80, 90]


def test_a_state_of_something_else_is_refused_by_name() -> None:
    state = loader(seed=1).state_dict()
    other = loader(21, seed=2, sequence_length=5)
    assert text_of(lambda: other.load_state_dict(state)) == (
        "dataloader: the state was taken with other data or another order\n"
        f"data : '{state['data']}' in the state, '{other.state_dict()['data']}' here\n"
        "tokens : 81 in the state, 85 here\n"
        "samples : 20 in the state, 16 here\n"
        "sequence_length : 4 in the state, 5 here\n"
        "seed : 1 in the state, 2 here\n"
        "fix : make the loader with the data and the settings of the run that goes on"
    )
    assert text_of(lambda: other.load_state_dict({})) == (
        "dataloader: the state cannot be {}\nfix : give what loader.state_dict() returned"
    )
    for bad in (-1, 20, None, 1.5):
        wrong = {**state, "sample": bad}
        assert text_of(lambda: loader(seed=1).load_state_dict(wrong)).startswith(  # noqa: B023
            f"dataloader: there is no sample {bad} of epoch 0"
        )


def test_one_changed_token_is_other_data() -> None:
    tokens = np.arange(5000)
    state = create_dataloader({"data": tokens, "batch_size": 1, "sequence_length": 8}).state_dict()
    tokens = tokens.copy()
    tokens[2500] = 1
    data = create_dataloader({"data": tokens, "batch_size": 1, "sequence_length": 8})
    assert text_of(lambda: data.load_state_dict(state)).splitlines()[1].startswith("data :")


def test_a_fingerprint_is_of_tokens_not_of_files() -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 3_000_000)
    whole = TokenSource([tokens])
    split = TokenSource([tokens[:1_000_001].astype(np.uint16), tokens[1_000_001:]])
    assert whole.fingerprint() == split.fingerprint()
    assert whole.fingerprint() != whole.part(0, 2_999_999).fingerprint()


# ---- the thread --------------------------------------------------------------------------------
def workers() -> int:
    return sum(t.name == "tessera-data" for t in threading.enumerate())


def gone(most: int = 0) -> bool:
    deadline = time.monotonic() + 10
    while workers() > most and time.monotonic() < deadline:
        time.sleep(0.005)
    return workers() <= most


@pytest.fixture
def no_threads() -> Iterator[None]:
    gc.collect()
    assert gone()
    yield
    gc.collect()
    assert gone()


@pytest.mark.usefixtures("no_threads")
def test_closing_and_dropping_end_the_thread() -> None:
    data = loader(prefetch=1)
    next(data)
    assert workers() == 1
    data.close()
    data.close()
    assert gone()
    assert len(seen(data)) == 4  # and it can be used again
    del data
    gc.collect()
    assert gone()


@pytest.mark.usefixtures("no_threads")
def test_never_more_than_asked_for_is_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for k in itertools.count():
            made.append(k)
            yield k

    with Ahead(items(), depth=3) as ahead:
        for k in range(5):
            assert next(ahead) == k
        time.sleep(0.05)
        assert len(made) <= 5 + 3
        deadline = time.monotonic() + 10
        while len(made) < 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(made) == 8
    assert gone()


class Torn(np.ndarray):
    """A row whose second half raises OSError."""

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and (at.stop or 0) > 40:
            raise OSError("input/output error")
        return super().__getitem__(at)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_in_the_thread_is_raised_where_the_batch_is_asked_for(prefetch: int) -> None:
    data = loader(20, shuffle=False, prefetch=prefetch)
    data._samples.source.pieces = (samples(20).view(Torn),)
    assert seen(data, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for _ in range(2):  # its position is the same, so it raises the same error again
        assert text_of(lambda: next(data), ts.BackendError) == (
            "dataloader: the batch at sample 8 of epoch 0 could not be made: OSError: input/output "
            "error\ndata : TokenSource('array', 81 tokens)\nfix : are the files still there and "
            "whole? The loader stands where it stood"
        )
    assert data.state_dict()["sample"] == 8


@pytest.mark.usefixtures("no_threads")
def test_our_own_errors_come_through_the_thread_as_they_are() -> None:
    tokens = np.arange(200)
    good = create_dataloader({"data": tokens, "batch_size": 1, "sequence_length": 4})
    tokens[:] = -5
    assert text_of(lambda: next(good)).startswith("array: tokens from -5 to -5 near place")


def test_a_loader_whose_thread_died_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a forked process: it has the object, but not the thread."""

    from tessera.data import ahead as prefetch

    monkeypatch.setattr(prefetch, "_LOOK_S", 0.01)
    monkeypatch.setattr(prefetch, "_work", lambda items, shared: None)
    data = loader(prefetch=2)
    assert text_of(lambda: next(data), ts.BackendError) == (
        "dataloader: the thread that makes batches is gone\n"
        "fix : make the loader in the process that uses it, or say prefetch=0"
    )


# ---- meshes ------------------------------------------------------------------------------------
@given(
    st.sampled_from(["dp=4 tp=2", "tp=2 dp=4", "dp=8", "tp=4", "dp=2 fsdp=2 tp=2", "pp=2 dp=3"]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
)
def test_a_host_makes_the_rows_that_its_devices_hold(text: str, each: int, hosts: int) -> None:
    mesh = Mesh.parse(text)
    axes = tuple(a for a in mesh.axes if a in ("dp", "fsdp"))
    ways = math.prod(mesh.sizes[a] for a in axes)
    size = each * ways
    for host in range(hosts):
        want = set()
        for device in mesh.ids:
            if device * hosts // mesh.size == host:
                part = 0
                for axis in axes:
                    part = part * mesh.sizes[axis] + mesh.coords(device)[axis]
                want |= set(range(part * each, (part + 1) * each))
        assert host_rows(mesh, axes, size, host, hosts).tolist() == sorted(want)


def test_global_batches_and_their_layout() -> None:
    config = {"data": samples(50), "sequence_length": S, "batch_size": 2, "prefetch": 0}

    def layout(mesh: str, **more: Any) -> str:
        data = create_distributed_dataloader({**config, **more}, Mesh.parse(mesh))
        return str(next(data)["labels"].type)

    assert layout("dp=4") == "i32[8@dp, 4]"
    assert layout("dp=2 tp=4") == "i32[4@dp, 4]"
    assert layout("tp=4") == "i32[2, 4]"
    assert layout("dp=2 fsdp=2") == "i32[8@(dp,fsdp), 4]"
    assert layout("x=2 y=2", data_axes="y") == "i32[4@y, 4]"
    assert layout("dp=2", global_batch_size=6) == "i32[6@dp, 4]"
    assert layout("dp=2", batch_size_per_gpu=5) == "i32[10@dp, 4]"
    # As in the guide: the batch per GPU times all devices, also those that share rows.
    assert layout("dp=2 tp=2", global_batch_size=8, batch_size_per_gpu=2) == "i32[8@dp, 4]"
    assert text_of(lambda: layout("dp=2", global_batch_size=8, batch_size_per_gpu=3)) == (
        "dataloader: global_batch_size=8 is not batch_size_per_gpu=3 times 2 devices\n"
        "mesh : dp=2\nsplit_over : dp\nfix : leave one of them out"
    )
    assert text_of(lambda: layout("x=2 y=2")) == (
        "dataloader: it is not known which axes of the mesh split the batch\nmesh : x=2 y=2\n"
        'fix : say so in the config, e.g. "data_axes": ("x",)'
    )
    assert text_of(lambda: layout("dp=3", hosts=(0, 2))).startswith(
        "dataloader: 3 devices do not divide over 2 hosts"
    )
    with pytest.raises(ts.MeshError, match="there is no mesh"):
        create_distributed_dataloader(config, None)  # type: ignore[arg-type]


def test_hosts_of_a_mesh_read_their_own_rows_alone() -> None:
    config = {"data": samples(64), "sequence_length": S, "batch_size": 2, "seed": 4}
    mesh = Mesh.parse("dp=4 tp=2")
    want = seen(create_distributed_dataloader(config, mesh))
    parts = [create_distributed_dataloader({**config, "hosts": (i, 4)}, mesh) for i in range(4)]
    assert [flat(rows) for rows in zip(*map(seen, parts), strict=True)] == want


def test_importing_the_loaders_needs_no_engine_and_no_table_library() -> None:
    code = (
        "import sys, tessera.data as d; d.create_dataloader; "
        "print([m for m in ('jax', 'pyarrow', 'datasets', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"


def test_a_batch_has_no_number() -> None:
    with (
        create_dataloader({"sequence_length": 4, "batch_size": 2}) as loader,
        pytest.raises(ts.UsageError, match=r"wanted : 0\n.*\n.*\n  fix    : take the next"),
    ):
        loader[0]
