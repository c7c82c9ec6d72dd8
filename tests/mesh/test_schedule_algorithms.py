"""Collective algorithms in programs: equal values, fused and step by step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op, schedule
from tessera.core.context import replaced
from tessera.ir.graph.oracle import evaluate
from tessera.ir.schedule.algorithms.build import FLAT

# Each algorithm on one mesh; axes of 2, 3, 4 and 6.
ROWS = [
    ("ring", {"dp": 2, "tp": 3}),
    ("line", {"dp": 6, "tp": 1}),
    ("direct", {"dp": 2, "tp": 3}),
    ("halving", {"dp": 6, "tp": 1}),
    ("tree", {"dp": 2, "tp": 3}),
    ("double_tree", {"dp": 2, "tp": 4}),
    ("hierarchical", {"dp": 2, "tp": 3}),
    ("tree/3", {"dp": 2, "tp": 4}),
    ("hierarchical(2:double_tree/4 x 4:halving)", {"dp": 2, "tp": 4}),
]


def step(x: ts.Tensor, w: ts.Tensor) -> Any:
    """A step with every collective: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast,
    over two axes, in a loop."""
    h = x @ w
    moved = dist.redistribute(x, "[12, 24@dp]")
    rows = ts.scan(lambda c, r: (c + r @ w, ()), ts.zeros((24,), dtype=x.dtype), x)[0]
    return {
        "product": h,
        "moved": moved,
        "sum": (x @ w).sum(),
        "most": x.max(0),
        "scattered": dist.redistribute(x @ w, "[12@dp, 24@tp]"),
        "sent": op.kernel(lambda v: dist.broadcast(v, ("dp", "tp"), root=1))(x),
        "rows": rows,
    }


KEYS = ("product", "moved", "sum", "most", "scattered", "sent", "rows")


def inputs(sizes: dict[str, int], dtype: str) -> tuple[ts.Tensor, ts.Tensor]:
    rng = np.random.default_rng(3)
    mesh = dist.Mesh(tuple(sizes), shape=sizes)
    x, w = rng.integers(-9, 9, (12, 24)), rng.integers(-9, 9, (24, 24))
    if dtype == "f32":
        x, w = x + rng.random(x.shape), w / 7
    kind: Any = {"f32": np.float32, "i32": np.int32}[dtype]
    return (
        ts.tensor(x.astype(kind), mesh=mesh, layout="[12@dp, 24]"),
        ts.tensor(w.astype(kind), mesh=mesh, layout="[24@tp, 24]"),
    )


@cache
def expected(sizes: tuple[tuple[str, int], ...], dtype: str) -> dict[str, Any]:
    """The oracle's values."""
    x, w = inputs(dict(sizes), dtype)
    g = graph.trace(step, x, w)
    return dict(zip(KEYS, evaluate(g, [x.numpy(), w.numpy()]), strict=True))


def test_every_algorithm_has_a_row() -> None:
    assert {name for name, _ in ROWS} >= {*FLAT, "hierarchical"}


@pytest.mark.parametrize(("name", "sizes"), ROWS, ids=str)
def test_integers_equal_the_oracle_exactly(name: str, sizes: dict[str, int]) -> None:
    compiled = schedule(algorithm=name)(step)
    found = compiled(*inputs(sizes, "i32"))
    assert 'algorithm="' in compiled.compiled.schedule.text
    for k, truth in expected(tuple(sizes.items()), "i32").items():
        np.testing.assert_array_equal(found[k].numpy(), truth, err_msg=k)


@pytest.mark.parametrize(("name", "executor"), [("ring", "fused"), ("halving", "stepped")])
def test_floats_agree_to_the_last_digits(name: str, executor: str) -> None:
    sizes = {"dp": 2, "tp": 4}
    with replaced(executor=executor):
        found = schedule(algorithm=name)(step)(*inputs(sizes, "f32"))
    for k, truth in expected(tuple(sizes.items()), "f32").items():
        assert np.abs(found[k].numpy() - truth).max() <= 1e-6 * np.abs(truth).max(), k


@pytest.mark.parametrize("executor", ["fused", "stepped"])
def test_a_bucket_goes_by_its_algorithm(executor: str) -> None:
    mesh = dist.Mesh(("dp",), devices=6)
    rng = np.random.default_rng(5)
    xs = [
        ts.tensor(rng.integers(-9, 9, (6, k)).astype(np.int32), mesh=mesh, layout=f"[6@dp, {k}]")
        for k in (3, 6, 12)
    ]

    def sums(*xs: ts.Tensor) -> Any:
        return [x.sum(0) for x in xs]

    made = schedule(algorithm="halving", bucket_bytes=1 << 20)(sums)
    with replaced(executor=executor):
        found = made(*xs)
    (comm,) = [s for s in made.compiled.schedule.steps if s.kind == "collective"]
    assert [n.attrs["algorithm"] for n in comm.nodes] == ["halving"] * 3
    for x, y in zip(xs, found, strict=True):
        np.testing.assert_array_equal(y.numpy(), x.numpy().sum(0))


def test_inspect_lists_what_moves() -> None:
    x, w = inputs({"dp": 2, "tp": 4}, "f32")
    made = schedule(algorithm="cheapest", topology="h100")(lambda x, w: ts.tanh(x @ w).sum())
    made(x, w)
    shown = dist.inspect(made)
    (first, second) = shown.rows
    assert first.op == second.op == "all_reduce" and first.time_s is not None
    assert first.algorithm in str(shown) and "priced on h100" in str(shown)
    assert shown.schedule.hash in str(shown)
