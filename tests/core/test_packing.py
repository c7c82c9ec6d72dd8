"""Sample order and packing: each sample once an epoch in a fixed order, and no token lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.data import (
    TokenSource,
)
from tessera.data.packing import Packed, Windows, best_fit
from tessera.data.shuffle import Order, permuted

pytestmark = pytest.mark.usefixtures("oracle")


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
    """Golden values: a change here changes the training data of every recorded run."""
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
    # A token is the label of exactly one place, except for the first of each document.
    labelled = labels != -100
    firsts = np.concatenate([[0], ends[:-1]]) + 1000
    assert sorted(labels[labelled]) == sorted(set(range(1000, 1000 + ends[-1])) - set(firsts))
    assert (labels[labelled] == ids[labelled] + 1).all()
    assert (ids[segments == 0] == 7).all()
    assert not labelled[segments == 0].any()
    # A segment is one document, and positions count within it.
    document = np.searchsorted(ends, ids - 1000, "right")
    for row in range(packed.count):
        for segment in range(1, segments[row].max() + 1):
            here = segments[row] == segment
            assert len(set(document[row][here])) == 1
            assert rows["positions"][row][here].tolist() == list(range(here.sum()))


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(30, 40))
def test_best_fit_is_best_fit_decreasing(sizes: list[int], length: int) -> None:
    room: list[int] = []
    for size in sorted(sizes, reverse=True):  # one at a time, as in the textbook
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
    if not any(n > 1 for n in sizes):  # a file without any label
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
