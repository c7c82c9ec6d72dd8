"""Distributions of random numbers and ids, and invalid weights."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera.lang.math.random import _below
from tests.core.numpy_engine import Oracle

NO_ID = -(2**31)


@pytest.mark.parametrize("count", [1, 7, 2**16, 2**31 + 11, 2**32 - 1, 2**32])
def test_a_draw_below_a_count_is_the_upper_half_of_a_product(count: int, oracle: Oracle) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 999, dtype=np.uint32)
    words[:2] = 0, 2**32 - 1
    got = _below(ts.tensor(words), count).numpy()
    assert got.tolist() == [int(w) * count >> 32 for w in words]


def test_whole_numbers(oracle: Oracle) -> None:
    ts.seed(3)
    x = ts.random.randint((6000,), -2, 4)
    assert x.dtype is ts.int32
    found, counts = np.unique(x.numpy(), return_counts=True)
    assert found.tolist() == [-2, -1, 0, 1, 2, 3]
    assert np.all(np.abs(counts - 1000) < 150)
    for args, error in (((3, 3), ts.UsageError), ((0, 300, ts.uint8), ts.DTypeError)):
        with pytest.raises(error, match="randint"):
            ts.random.randint((2,), *args)
    with pytest.raises(ts.UsageError, match=r"the order is randint\(shape, low, high\)"):
        ts.random.randint(0, 10, (3, 4))  # type: ignore[arg-type]  # PyTorch's order


def test_ids_by_weight(oracle: Oracle) -> None:
    ts.seed(4)
    weights = np.array([[1.0, 0.0, 3.0, 4.0], [5.0, 5.0, 0.0, 0.0]], np.float32)
    ids = ts.random.multinomial(weights, 4000, replacement=True).numpy()
    for row, w in zip(ids, weights, strict=True):
        share = np.bincount(row, minlength=4) / 4000
        np.testing.assert_allclose(share, w / w.sum(), atol=0.04)
        assert np.all(share[w == 0] == 0)


def test_ids_without_replacement(oracle: Oracle) -> None:
    ts.seed(5)
    weights = np.broadcast_to(np.array([1.0, 0.0, 2.0, 1.0], np.float32), (3000, 4))
    ids = ts.random.multinomial(weights, 3).numpy()
    assert np.sort(ids, -1).tolist() == [[0, 2, 3]] * 3000
    # The first two are 2 and then 0 in 1/2 * 1/2 of the rows.
    assert abs(np.mean((ids[:, 0] == 2) & (ids[:, 1] == 0)) - 0.25) < 0.04
    assert np.sort(ts.random.multinomial(weights[:1], 4).numpy()).tolist() == [[NO_ID, 0, 2, 3]]
    for bad in (-1.0, np.nan, np.inf):
        ids = ts.random.multinomial(np.array([1.0, bad], np.float32), 1)
        assert ids.numpy().tolist() == [NO_ID]
    with pytest.raises(ts.ShapeError, match="multinomial: 5 ids of 4 classes"):
        ts.random.multinomial(weights, 5)


def test_draws_do_not_depend_on_the_layout(oracle: Oracle) -> None:
    mesh = ts.dist.Mesh(("a",), shape={"a": 4})
    weights = np.random.default_rng(2).uniform(size=(8, 5)).astype(np.float32)
    found = []
    for layout in ("[8, 5]", "[8@a, 5]"):
        ts.seed(6)
        placed = ts.tensor(weights, mesh=mesh, layout=layout)
        found.append(ts.random.multinomial(placed, 2).numpy().tolist())
    assert found[0] == found[1]
