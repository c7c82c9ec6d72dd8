"""Is a user of PyTorch, and no one else, told that a maximum has no ids and a gradient no tuple?"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tests.core.numpy_engine import Oracle

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def unpacked(x: ts.Tensor) -> ts.Tensor:
    values, _ = ts.max(x, 1)
    return values


PAIRS: dict[str, Callable[[ts.Tensor], Any]] = {
    "the values": lambda x: x.max(1)[0],
    "the ids": lambda x: ts.min(x, dim=-1)[1],
    "of a value": lambda x: x.max(1)[0].item(),
    "in a program": ts.jit(lambda x: x.max(1)[0]),
    "two rows": lambda x: unpacked(x[:2]),
}
OTHERS: dict[str, Callable[[ts.Tensor], Any]] = {
    "rows by name": lambda x: (lambda values: values[0])(x.max(1)),
    "the only row": lambda x: x[:1].max(1)[0],
    "another row": lambda x: x.max(1)[2],
    "a slice": lambda x: x.max(1)[:1],
    "of several dims": lambda x: x[None].max((0, 1))[0],
    "of ids": lambda x: ts.argmax(x, 1)[0],
    "of a function that takes a maximum": lambda x: nn.softmax(x, 1)[0] + ts.logsumexp(x, 1)[0],
    "as NumPy": lambda x: np.max(x, axis=1)[0],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_told(name: str, oracle: Oracle) -> None:
    with pytest.warns(UserWarning, match=r"gives \(values, ids\)"):
        PAIRS[name](ts.tensor(X))


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is(name: str, oracle: Oracle) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OTHERS[name](ts.tensor(X))


def slope(x: ts.Tensor) -> ts.Tensor:
    (found,) = ts.grad((x * x).sum(), x)
    return found


@pytest.mark.parametrize(
    "call", [lambda x: ts.grad((x * x).sum(), x)[0], ts.jit(lambda x: slope(x[:1]))]
)
def test_a_tuple_of_a_gradient_is_told(call: Callable[[ts.Tensor], Any], oracle: Oracle) -> None:
    with pytest.warns(UserWarning, match=r"ts.grad\(loss, \[x\]\)"):
        call(ts.tensor(X))


def test_what_a_tuple_of_gradients_is_and_what_cannot_be_one(oracle: Oracle) -> None:
    x = ts.tensor(X)
    with pytest.raises(ts.UsageError, match="by one tensor it gives its gradient, no tuple"):
        slope(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = ts.grad((x * x).sum(), [x])
        np.testing.assert_array_equal(found.numpy(), ts.grad((x * x).sum(), [x])[0].numpy())
        np.testing.assert_array_equal(found.numpy(), 2 * X)


def test_what_cannot_be_a_pair_is_an_error(oracle: Oracle) -> None:
    with pytest.raises(ts.UsageError, match=r"ts.argmax\(x, dim\) for their ids"):
        unpacked(ts.tensor(X))
    with pytest.raises(ts.UsageError, match=r"ts.minimum\(x, y\)"):
        ts.min(ts.tensor(X), ts.tensor(X))
