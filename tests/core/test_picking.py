"""Indexing `x[...]` against NumPy and PyTorch, on one device and in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import nn
from tests.core.numpy_engine import Oracle

X = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
I, J, K = np.array([0, -1, 2]), np.array([[1], [-4]]), np.array([4, 0, -5])  # noqa: E741
ROWS, CELLS = X[:, 0, 0] > 10, X % 7 == 0
KEYS: list[Any] = [
    1, -1, (1, -2), slice(1, 3), (slice(None), slice(None, None, 2)), (..., 0),
    (None, 1, ..., None), [0, -1], (slice(None), [3, -4]), I, (slice(None), J), (I, I), (I, J),
    (I, J, K), (I, slice(1, 3), K), (1, J, K), (I, 2, K), (I, None, J), (slice(None), I, J),
    (slice(None), [0, 1], slice(None, None, 2)),
    (I, ...), (..., I, K), (None, I, J, 0), ROWS, (ROWS, 1), CELLS, (slice(0, 2), X[0] % 2 == 0),
    (1, X[1] > 27), [True, False, True], (ROWS, slice(None), [0, -1]), (..., X[0, 0] % 2 == 1),
]  # fmt: skip


def named(key: Any) -> str:
    return " ".join(repr(key).split())


def torched(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(torched, key))
    return torch.tensor(key) if isinstance(key, (list, np.ndarray)) else key


@pytest.mark.parametrize("key", KEYS, ids=named)
def test_it_gives_what_pytorch_gives(key: Any, oracle: Oracle) -> None:
    x = ts.tensor(X)
    theirs = torch.tensor(X, requires_grad=True)
    want = theirs[torched(key)]
    got = x[key]
    np.testing.assert_array_equal(got.numpy(), want.detach().numpy())
    weights = np.arange(want.numel(), dtype=np.float32).reshape(want.shape)
    (want * torch.tensor(weights)).sum().backward()
    assert theirs.grad is not None
    np.testing.assert_array_equal(
        ts.grad((got * ts.tensor(weights)).sum(), x).numpy(), theirs.grad.numpy()
    )


def test_ids_that_the_host_does_not_know_are_checked_each(oracle: Oracle) -> None:
    x, one = ts.tensor(X), ts.tensor([1])
    for i, j in ((2, 4), (-4, 0), (0, -5)):  # out of range, though inside the two dims flattened
        got = x[ts.tensor([i]) * one, ts.tensor([j]) * one]
        assert np.isnan(got.numpy()).all()
    with pytest.raises(ts.ShapeError, match="id 4 at "):
        x[[0], [4]]


def test_a_mask_of_truths_that_only_a_program_knows_is_refused() -> None:
    with pytest.raises(ts.UsageError, match="not known in a recorded function"):
        ts.graph.trace(lambda x: x[x > 3], ts.tensor(X))
    with pytest.raises(ts.ShapeError, match=r"a mask of shape \(4,\) stands on dim 0"):
        ts.tensor(X)[np.ones(4, bool)]


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: ts.gather(X, 1, ts.tensor(I)), ts.UsageError, "ts.gather(x, ids, dim)"),
        (lambda: ts.take(X, 0, [1, 2]), ts.UsageError, "ts.take(x, ids, dim)"),
        (lambda: ts.scatter_add(X, 0, I, X), ts.UsageError, "ts.scatter_add(x, ids, updates, dim)"),
        (lambda: ts.scatter_add(X[0], [1, 2], X[0, :2]), ts.ShapeError, "give dim=0"),
        (lambda: ts.scatter_add([0, 0], [1, 0], [True, True]), ts.DTypeError, "cast with .to("),
        (lambda: nn.embedding(X[0], ts.tensor(I)), ts.DTypeError, "nn.embedding(ids, table)"),
        (lambda: ts.gather(X, X), ts.DTypeError, "gather: ids must be integers"),
    ],
)
def test_the_order_of_pytorch_is_told(
    call: Any, kind: type[ts.TesseraError], says: str, oracle: Oracle
) -> None:
    with pytest.raises(kind) as error:
        call()
    assert says in str(error.value)


def test_truths_go_backwards(oracle: Oracle) -> None:
    np.testing.assert_array_equal(ts.tensor(CELLS)[:, ::-1].numpy(), CELLS[:, ::-1])


def test_flip_takes_several_dims_each_once() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for dims in ((0, 1), [1], None):
        want = np.flip(x, None if dims is None else tuple(dims))
        assert (ts.flip(ts.tensor(x), dims).numpy() == want).all()
    for f in (ts.flip, ts.sum):
        with pytest.raises(ts.ShapeError, match=r"dim -2 is named twice"):
            f(ts.tensor(x), (0, -2))
