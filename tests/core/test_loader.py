"""Does a loader give every sample once, in one order, to any number of loaders, and go on?"""

from __future__ import annotations

import gc
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
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
from tessera.data.config import KEYS, LEGAL
from tessera.data.create import host_rows
from tessera.data.packing import Packed, Windows, best_fit
from tessera.data.peer_keys import PEER_KEYS
from tessera.data.prefetch import Ahead
from tessera.data.shuffle import Order, permuted
from tessera.train.config import ALIASES
from tessera.train.config import KEYS as TRAINING_KEYS

pytestmark = pytest.mark.usefixtures("oracle")
S = 4


def samples(count: int) -> np.ndarray:
    """Tokens whose window k of S begins with k * S."""
    return np.arange(count * S + 1, dtype=np.int32)


def loader(count: int = 20, **config: Any) -> Any:
    return create_dataloader(
        {"data": samples(count), "batch_size": 4, "sequence_length": S, **config}
    )


def seen(batches: Any, most: int = 10**6) -> list[list[int]]:
    """Which samples each batch holds; -1 for a row that is filled up."""
    found = []
    for batch in itertools.islice(batches, most):
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        empty = (labels == -100).all(1)
        assert (labels[~empty] == ids[~empty] + 1).all()
        found.append(np.where(empty, -1, ids[:, 0] // S).tolist())
    return found


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def text_of(call: Callable[[], Any], kind: type[Exception] = ts.UsageError) -> str:
    """An error's text without the line in which it was raised."""
    with pytest.raises(kind) as caught:
        call()
    lines = [" ".join(x.split()) for x in str(caught.value).splitlines()]
    return "\n".join(x for x in lines if not x.startswith("at : "))


# ---- the order ---------------------------------------------------------------------------------
@given(st.integers(1, 3000), st.integers(-(2**63), 2**64), st.integers(0, 50))
def test_every_sample_comes_once_an_epoch(n: int, seed: int, epoch: int) -> None:
    order = permuted(np.arange(n), n, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(n))
    some = np.arange(0, n, 7)[::-1]
    assert np.array_equal(permuted(some, n, seed, epoch), order[some])


@pytest.mark.parametrize("n", [2, 3, 5, 6, 16, 100])
def test_each_sample_is_as_likely_at_each_place(n: int) -> None:
    epochs = 2000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), permuted(np.arange(n), n, 3, epoch)] += 1
    chi = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    free = (n - 1) ** 2
    assert abs(chi - free) < 4 * math.sqrt(2 * free)


def test_the_order_does_not_change_between_releases() -> None:
    """Golden: a change here changes what every recorded run was trained on."""
    places = np.array([0, 1, 2, 10**11])
    assert permuted(places, 10**12, 1234, 5).tolist() == [
        446987330338, 722520009846, 389170232562, 653952345421,
    ]  # fmt: skip


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    order = permuted(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (permuted(np.arange(1000), 1000, 0, 1) == order[:1000]).mean() < 0.01


@given(st.integers(1, 9000), st.integers(0, 9000), st.integers(1, 5000), st.booleans())
def test_an_order_asked_in_blocks_is_the_order(n: int, at: int, size: int, shuffle: bool) -> None:
    order = Order(n, 5, shuffle)
    at = min(at, n - 1)
    places = np.arange(at, at + size)
    want = np.full(size, -1)
    inside = places[places < n]
    want[: inside.size] = permuted(inside, n, 5, 2) if shuffle else inside
    assert np.array_equal(order(2, at, at + size), want)


# ---- packing -----------------------------------------------------------------------------------
def test_windows_are_the_stream_and_joints_are_told_by_segments() -> None:
    tokens = [1, 0, 2, 3, 0, 4, 5, 6, 7, 8, 0, 9]
    rows = Windows(TokenSource([np.array(tokens)], eos=0), 5, segments=True).rows(np.array([1, 0]))
    assert rows["input_ids"].tolist() == [[4, 5, 6, 7, 8], [1, 0, 2, 3, 0]]
    assert rows["labels"].tolist() == [[5, 6, 7, 8, 0], [0, 2, 3, 0, 4]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 2, 2, 2]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert all(x.dtype == np.int32 for x in rows.values())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 12))
def test_packing_loses_no_token_and_joins_no_documents(sizes: list[int], length: int) -> None:
    ends = np.cumsum(sizes)
    source = TokenSource([np.arange(ends[-1]) + 1000], ends)
    packed = Packed(source, length, pad=7, segments=True)
    rows = packed.rows(np.arange(packed.count))
    ids, labels, segments = rows["input_ids"], rows["labels"], rows["segment_ids"]
    # A token is the label of exactly one place, but for the first of each document.
    labelled = labels != -100
    firsts = np.concatenate([[0], ends[:-1]]) + 1000
    assert sorted(labels[labelled]) == sorted(set(range(1000, 1000 + ends[-1])) - set(firsts))
    assert (labels[labelled] == ids[labelled] + 1).all()
    assert (ids[segments == 0] == 7).all()
    assert not labelled[segments == 0].any()
    # A segment is of one document, and places count within it.
    document = np.searchsorted(ends, ids - 1000, "right")
    for row in range(packed.count):
        for segment in range(1, segments[row].max() + 1):
            here = segments[row] == segment
            assert len(set(document[row][here])) == 1
            assert rows["positions"][row][here].tolist() == list(range(here.sum()))


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(30, 40))
def test_best_fit_is_best_fit_decreasing(sizes: list[int], length: int) -> None:
    room: list[int] = []
    for size in sorted(sizes, reverse=True):  # one at a time, as the textbook has it
        fitting = [(left, k) for k, left in enumerate(room) if left >= size]
        if fitting:
            room[min(fitting)[1]] -= size
        else:
            room.append(length - size)
    window = best_fit(np.array(sizes, np.int64), length)
    used = np.bincount(window, np.array(sizes, np.float64), len(room)) if sizes else np.zeros(0)
    assert sorted(length - used) == sorted(room)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.sampled_from([1, 2, 3]))
def test_padded_documents_have_the_shortest_length_that_holds_a_batch(
    sizes: list[int], hosts: int
) -> None:
    ends = np.cumsum(sizes)
    source = TokenSource([np.arange(1, ends[-1] + 1)], ends)
    config = {
        "data": source, "batch_size": 6, "sequence_length": 16, "packing": "padded",
        "sequence_buckets": [4, 8], "drop_last": False, "pad_token": 0, "prefetch": 0,
    }  # fmt: skip
    if not any(n > 1 for n in sizes):  # no label in all of it
        return
    parts = [[*ts.data.create_dataloader({**config, "hosts": (i, hosts)})] for i in range(hosts)]
    seen: list[int] = []
    for batch in zip(*parts, strict=True):
        ids = np.concatenate([b["input_ids"].numpy() for b in batch])
        labels = np.concatenate([b["labels"].numpy() for b in batch])
        longest = (ids > 0).sum(1).max()
        assert ids.shape == (6, next(n for n in (4, 8, 16) if n >= longest))
        assert (labels[ids == 0] == -100).all()
        assert (labels[labels > 0] == ids[labels > 0] + 1).all()
        seen += labels[labels > 0].tolist()
    assert sorted(seen) == sorted({*range(1, int(ends[-1]) + 1)} - {1, *(ends[:-1] + 1).tolist()})


def test_packing_finds_documents_by_the_token_that_closes_them() -> None:
    source = TokenSource([np.array([1, 2, 0, 3]), np.array([4, 0, 0, 5], np.uint16)], eos=0)
    assert source.document_ends().tolist() == [3, 6, 7, 8]
    assert source.part(1, 6).document_ends().tolist() == [2, 5]
    with pytest.raises(ts.UsageError, match="not known where documents end"):
        Packed(TokenSource([np.arange(5)]), 4)
    with pytest.raises(ts.UsageError, match="needs to know where documents end"):
        Windows(TokenSource([np.arange(5)]), 4, segments=True)


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
        "DataLoader(2 rows of 4 × 4 tokens, 5 batches an epoch, at sample 4 of epoch 0)"
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


orders: dict[str, list[int]] = {}  # of one loader with one row a batch, by packing


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
    """It stops and goes on with other numbers of loaders and other batches, over epochs."""
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
    """A row whose second half cannot be read."""

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
    for _ in range(2):  # it stands where it stood, so it says the same again
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
    """As in a process that was forked off: the object is there, the thread is not."""

    from tessera.data import prefetch

    monkeypatch.setattr(prefetch, "_LOOK_S", 0.01)
    monkeypatch.setattr(prefetch, "_work", lambda items, shared: None)
    data = loader(prefetch=2)
    assert text_of(lambda: next(data), ts.BackendError) == (
        "dataloader: the thread that makes batches is gone\n"
        "fix : make the loader in the process that uses it, or say prefetch=0"
    )


# ---- configurations ----------------------------------------------------------------------------
def test_the_guide_s_configuration_is_enough() -> None:
    config = {
        "learning_rate": 1e-4, "weight_decay": 0.01, "gradient_clip_norm": 1.0,
        "warmup_steps": 1000, "total_steps": 100000, "batch_size": 2, "sequence_length": 64,
        "mixed_precision": True, "gradient_checkpointing": True,
    }  # fmt: skip
    one, other = (next(create_dataloader(config)) for _ in range(2))
    assert list(one) == ["input_ids", "labels"]
    assert [str(t.type) for t in one.values()] == ["i32[2, 64]"] * 2
    assert (one["input_ids"].numpy() == other["input_ids"].numpy()).all()
    assert bytes(one["input_ids"].numpy()[0].astype(np.uint8)).isascii()


def test_bad_configurations_name_all_that_is_wrong() -> None:
    assert text_of(lambda: loader(shufle=True, sequence_len=4, data_colum="x")) == (
        "dataloader: unknown data keys 'shufle', 'data_colum'\n"
        "shufle : is 'shuffle' meant?\ndata_colum : is 'data_column' meant?\n"
        "fix : the data keys are " + ", ".join(KEYS)
    )
    assert text_of(lambda: loader(prefetch=-1, packing="tight", hosts=(2, 2))) == (
        "dataloader: packing cannot be 'tight', prefetch cannot be -1, hosts cannot be (2, 2)\n"
        'fix : packing is "concat", "documents" or "padded"; prefetch is a whole number from 0 '
        "to 2147483647; "
        "hosts is a pair (which, of how many), e.g. (0, 1)"
    )
    assert text_of(lambda: create_dataloader({"batch_size": 4})).startswith(
        "dataloader: the config has no sequence_length"
    )


@pytest.mark.parametrize(("key", "way_out"), PEER_KEYS.items())
def test_a_key_of_another_loader_says_what_to_write(key: str, way_out: str) -> None:
    """It would be without effect. Keys of a model's sizes may stand beside ours."""
    config = {"data": samples(20), "batch_size": 4, "sequence_length": S, key: 3}
    if way_out == "sequence_length":
        assert len(create_dataloader(config)) == 5
        del config["sequence_length"]
    said = f"is {way_out!r} meant?" if way_out in KEYS else way_out
    assert text_of(lambda: create_dataloader(config)).startswith(
        f"dataloader: unknown data keys {key!r}\n{key} : {said}\nfix : "
    )
    assert key not in TRAINING_KEYS and key not in ALIASES
    assert text_of(lambda: create_dataloader({"sequence_length": 4})).startswith(
        "dataloader: the config has no batch_size"
    )
    assert text_of(lambda: loader(hosts=(0, 3))).startswith(
        "dataloader: a batch of 4 rows does not divide over 3 hosts"
    )
    assert text_of(lambda: loader(3)) == (
        "dataloader: the training data hold 3 rows of 4 tokens, a batch takes 4\n"
        "data : TokenSource('array', 13 tokens)\n"
        "fix : take more data, a smaller batch or shorter rows, or say drop_last=False"
    )


def test_keys_that_the_data_do_not_read_are_errors(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "row.bin")
    np.save(tmp_path / "row.npy", np.arange(40))
    unread = {"data_dtype": "uint16", "data_column": "text", "data_split": "train",
              "tokenizer": list, "pad_token": 0}  # fmt: skip
    both = {"data_axes": ("dp",), "batch_size_per_gpu": 4}
    assert text_of(lambda: loader(**unread, **both)) == (
        "dataloader: data_dtype has no effect, data_column has no effect, data_split has no effect,"
        " tokenizer has no effect, pad_token has no effect, data_axes has no effect,"
        " batch_size_per_gpu has no effect\n"
        "data_dtype : no .bin file is read\ndata_column : no table is read\n"
        "data_split : no data with several splits are read\ntokenizer : no table is read\n"
        "pad_token : the rows of one stream have no empty places\n"
        "data_axes : it is about a mesh: call create_distributed_dataloader(config, mesh)\n"
        "batch_size_per_gpu : it is about a mesh: call create_distributed_dataloader(config, mesh)"
        "\ndata : array\nfix : leave them out, or name other data"
    )
    file, config = tmp_path / "row.bin", {"batch_size": 4, "sequence_length": S}
    for key, value in unread.items():
        with pytest.raises(ts.UsageError, match=f"{key} has no effect"):
            create_distributed_dataloader(
                {**config, "data": tmp_path / "row.npy", key: value}, Mesh.parse("dp=2")
            )
    wide = {**config, "data": file, "data_dtype": "uint16"}
    assert create_dataloader(wide).samples == 9
    assert create_dataloader({**wide, "data": [np.arange(8), file]}).samples == 11
    for more in ({"packing": "padded", "eos_token": 3}, {"drop_last": False},
                 {"validation_fraction": 0.5, "batch_size": 1}):  # fmt: skip
        loader(**{"pad_token": 0, **more})
    assert text_of(lambda: loader(global_batch_size=8)).startswith(
        "dataloader: batch_size=4 and global_batch_size=8 are both the rows of a batch"
    )
    assert next(loader(global_batch_size=4))["labels"].shape == (4, S)


NONSENSE: tuple[Any, ...] = (
    None, "abc", object(), 1.5, -3, 10**12, float("nan"), 1 + 2j, True, [], [1, "x"], {}, (2, 3),
    np.array(["a", "b"]), np.array([], np.float32), np.zeros((2, 0)), np.array([None, 1]), [None],
    lambda *a: 0,
)  # fmt: skip


@pytest.mark.parametrize("key", [*LEGAL, "data", "tokenizer"])
def test_nonsense_is_answered_in_our_own_words(key: str) -> None:
    mesh = Mesh.parse("dp=2")
    for bad in NONSENSE:
        config = {"data": samples(9), "batch_size": 2, "sequence_length": 4, "prefetch": 0}
        for make in (create_dataloader, lambda c: create_distributed_dataloader(c, mesh)):
            try:
                data = make({**config, key: bad})
                next(data)
            except ts.TesseraError as error:
                assert "  fix" in str(error)
            except StopIteration:
                pytest.fail(f"{key}={bad!r}: no batch")
    for bad in NONSENSE:
        for call in (create_dataloader, lambda c: create_distributed_dataloader(c, c)):
            with pytest.raises(ts.TesseraError, match=r"config cannot be|sequence_length"):
                call(bad)


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
    # As the guide computes it: per GPU times all devices, also those that share rows.
    assert layout("dp=2 tp=2", global_batch_size=8, batch_size_per_gpu=2) == "i32[8@dp, 4]"
    assert text_of(lambda: layout("dp=2", global_batch_size=8, batch_size_per_gpu=3)) == (
        "dataloader: global_batch_size=8 is not batch_size_per_gpu=3 times 2 devices\n"
        "mesh : dp=2\nsplit over : dp\nfix : leave one of them out"
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
        pytest.raises(ts.UsageError, match=r"asked for : 0\n.*\n.*\n  fix       : take the next"),
    ):
        loader[0]
