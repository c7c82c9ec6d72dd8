"""Random numbers in `map_chunks`: those of the function on all rows, for any block size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera import random as draw
from tests.cases import LONG

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Rows = Callable[[Any], Any]


def in_a_loop(r: Any) -> Any:
    return ts.scan(lambda c, _: (c + draw.uniform(r.shape), draw.normal((2,))), r, ts.arange(3))[0]


FUNCTIONS: dict[str, Rows] = {
    "elements": lambda r: r + draw.normal(r.shape),
    "dropout": lambda r: nn.dropout(r, 0.3),
    "in a layout": lambda r: r * draw.bernoulli(r.shape, 0.5, like=r.type).to(r.dtype),
    "a column": lambda r: r + draw.randint((r.shape[0], 1), 0, 100),
    "rows last": lambda r: r + draw.uniform((8, r.shape[0])).T,
    "rows between": lambda r: r + draw.uniform((3, r.shape[0], 8)).sum(0),
    "ids": lambda r: r + draw.multinomial(ts.abs(r) + 1, 2).to(ts.f32).sum(-1, True),
    "weights": lambda r: r @ draw.normal((8, 8)),
    "weights of as many rows as a block": lambda r: r + draw.normal((4, 8)).sum(0),
    "one number": lambda r: r + draw.uniform(()),
    "several draws": lambda r: (r + draw.uniform(r.shape)) * draw.normal((r.shape[0], 1)),
    "a loop": in_a_loop,
    "a map in it": lambda r: ts.map_chunks(in_a_loop, r, rows=1) + draw.uniform(r.shape),
}  # fmt: skip


FEW = ("elements", "rows last", "weights of as many rows as a block", "a map in it")


def values(
    x: Any, rows: int | None, run: Callable[[Rows], Rows] = ts.jit, names: Any = FUNCTIONS
) -> dict[str, Any]:
    """Results of functions on `x` in blocks of `rows`, and the next random draws."""

    def every(x: Any) -> dict[str, Any]:
        found = {}
        for name in names:
            fn = FUNCTIONS[name]
            found[name] = fn(x) if rows is None else ts.map_chunks(fn, x, rows=rows)
        return {**found, "what follows": draw.uniform(x.shape)}

    ts.seed(5)
    return {name: t.numpy() for name, t in run(every)(x).items()}


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-5, err_msg=name)


@cache
def all_rows() -> dict[str, Any]:
    return values(ts.tensor(X), None)


def test_values_are_those_of_all_rows_at_once() -> None:
    same(values(ts.tensor(X), 4), all_rows())


def test_values_are_those_of_all_rows_outside_of_a_program() -> None:
    want = values(ts.tensor(X), None, lambda f: f, FEW)
    for rows in (1, 4):
        same(values(ts.tensor(X), rows, lambda f: f, FEW), want)


@pytest.mark.parametrize(
    "layout",
    [
        "[16@dp, 8]",
        pytest.param("[16@(dp,tp), 8]", marks=LONG),
        pytest.param("[16@tp, 8@dp]", marks=LONG),
    ],
)
def test_values_are_those_of_all_rows_on_a_mesh(layout: str) -> None:
    x = ts.tensor(X, mesh=dist.Mesh.parse("dp=2,tp=2"), layout=layout)
    same(values(x, 2), all_rows())


def test_values_are_those_of_all_rows_in_a_local_body() -> None:
    x = ts.tensor(X, mesh=dist.Mesh.parse("dp=2"), layout="[16@dp, 8]")

    def run(every: Rows) -> Rows:
        return ts.jit(ts.distribute(every, strategy="data_parallel"))  # type: ignore[no-any-return]

    same(values(x, 4, run, FEW), values(x, None, run, FEW))


@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_the_gradient_has_the_same_numbers(policy: str) -> None:
    x = ts.tensor(X)

    def slope(rows: int | None) -> np.ndarray[Any, Any]:
        def loss(x: Any) -> Any:
            def fn(r: Any) -> Any:
                return ts.tanh(nn.dropout(r, 0.5) * draw.normal(r.shape))

            y = fn(x) if rows is None else ts.map_chunks(fn, x, rows=rows, policy=policy)
            return (y * y).sum()

        ts.seed(5)
        return ts.jit(lambda x: ts.grad(loss(x), x))(x).numpy()  # type: ignore[no-any-return]

    np.testing.assert_allclose(slope(4), slope(None), rtol=0, atol=1e-6)


def test_blocks_draw_no_more_than_their_own_rows() -> None:
    f = ts.jit(lambda x: ts.map_chunks(FUNCTIONS["elements"], x, rows=2))
    f(ts.tensor(X))
    drawn = [n for n in f.graph.nodes if n.op == "random_bits"]
    (loop,) = (n for n in f.graph.nodes if n.op == "scan")
    inside = [n for n in loop.attrs["body"].nodes if n.op == "random_bits"]
    assert not drawn and {n.type.shape for n in inside} == {(2, 8)}
