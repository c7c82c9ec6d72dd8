"""Inputs of the oracle: accepted if they fit the recorded types, refused otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import graph
from tessera.core.dtypes import f32, int32
from tessera.core.layout import plain

MEAN = graph.trace(lambda x: x.mean(), plain(f32, (4,)))
TWICE = graph.trace(lambda x: x * 2, plain(int32, (2,)))


@pytest.mark.parametrize(
    "given", [[1, 2.0, 3, 6], np.array([1.0, 2, 3, 6]), np.array([1, 2, 3, 6], np.float16)]
)
def test_floats_become_those_of_the_input(given: Any) -> None:
    (got,) = graph.evaluate(MEAN, [given])
    assert got == 3 and got.dtype == np.float32


def test_whole_numbers_become_those_that_hold_them() -> None:
    (got,) = graph.evaluate(TWICE, [np.array([3, -4])])
    assert got.dtype == np.int32 and got.tolist() == [6, -8]


@pytest.mark.parametrize(
    ("made", "given", "error", "says"),
    [
        (MEAN, np.ones(2), ts.ShapeError,
         "evaluate: input 'x' has another shape\n  have  : f32[4]\n  given : f32[2]"),
        (MEAN, np.arange(4), ts.DTypeError,
         "evaluate: input 'x' has another dtype\n  have  : f32[4]\n  given : i32[4]"),
        (TWICE, np.ones(2), ts.DTypeError, "input 'x' has another dtype"),
        (TWICE, [2**31, 0], ts.DTypeError,
         "evaluate: input 'x' does not hold all values that are given\n  have  : i32[2]\n"
         "  given : 0 to 2147483648"),
        (MEAN, "abcd", ts.UsageError, "evaluate: input 'x' cannot be 'abcd'"),
        (MEAN, [[1.0], [2.0, 3.0]], ts.UsageError, "fix : give an array of f32[4]"),
    ],
)  # fmt: skip
def test_what_was_not_recorded_is_refused(
    made: graph.Graph, given: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        graph.evaluate(made, [given])
    assert says in str(caught.value)


@pytest.mark.parametrize(("was", "wrong", "says"), [
    ("mul %1", "mull %1", "op 'mull' does not exist"),
    (" dims=(0,)", "", "lacks its attribute 'dims'"),
    ("dims=(0,)", "dims=(3,)", "its type is f32[] where its rule gives f32[4]"),
    (" : f32[]", " : f32[7]", "its type is f32[7] where its rule gives f32[]"),
])  # fmt: skip
def test_a_graph_that_is_not_valid_is_not_run(was: str, wrong: str, says: str) -> None:
    assert was in MEAN.text
    with pytest.raises(ts.GraphError) as caught:
        graph.evaluate(graph.parse(MEAN.text.replace(was, wrong)), [np.ones(4)])
    assert says in str(caught.value)


@pytest.mark.parametrize("given", [None, np.ones(4), {"x": np.ones(4)}, iter([np.ones(4)])])
def test_inputs_are_a_list(given: Any) -> None:
    with pytest.raises(ts.UsageError, match=r"one array per input, in order: \[x\]"):
        graph.evaluate(MEAN, given)
