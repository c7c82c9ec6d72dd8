"""Which dtype crosses wires inside `ts.autocast`? Products' results do so in the narrow one, also
where they have become f32; what is added up in f32 on a device stays f32."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn
from tessera.core.layout import parse_type
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.passes.simplify import simplify

MESH = dist.Mesh.parse("dp=2,tp=2")
BATCH, SEQ, WIDTH = 8, 16, 32
ACTIVATION = (BATCH, SEQ, WIDTH)
X = parse_type("bf16[8@dp, 16@tp]", MESH)
W = parse_type("bf16[16@tp, 32]", MESH)


def sent(g: Graph) -> list[str]:
    return [str(n.type) for n, _ in g.collectives()]


# -- what one sum is made of -----------------------------------------------------------------------
def traced(run: Any, *types: Any) -> list[str]:
    return sent(simplify(graph.trace(run, *types)))


def test_a_product_that_became_f32_and_was_scaled_is_sent_as_it_was_made() -> None:
    def run(x: ts.Tensor, w: ts.Tensor, scale: ts.Tensor) -> ts.Tensor:
        y = (x @ w).to(ts.f32) * scale
        return dist.all_reduce(y - y.mean(-1, keepdims=True), "tp")

    scale = parse_type("f32[32]", MESH)
    assert traced(run, X, W, scale) == ["bf16[8@dp, 32]"]
    g = graph.trace(run, X, W, scale)
    values = [np.random.default_rng(i).normal(size=t.shape).astype(t.dtype.numpy)
              for i, t in enumerate((X, W, scale))]  # fmt: skip
    (whole,), (blocks,) = evaluate(g, values), evaluate_blocks(g, values)
    y = values[0].astype("f4") @ values[1].astype("f4") * values[2]
    for found in (whole, blocks):
        np.testing.assert_allclose(found, y - y.mean(-1, keepdims=True), rtol=0.02, atol=0.15)


def wide_beside(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    y = (x @ w).to(ts.f32)
    return dist.all_reduce(y + x.to(ts.f32) @ w.to(ts.f32), "tp")


def rows_first(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(ts.sum((x @ w).to(ts.f32) * 2.0, 0))


def asked_to_be_wide(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(ts.sum(x.to(ts.f32), 1), "tp")


@pytest.mark.parametrize(
    ("run", "want"),
    [
        (wide_beside, ["f32[8@dp, 32]"]),
        (rows_first, ["f32[32]"]),
        (asked_to_be_wide, ["f32[8@dp]"]),
    ],
)
def test_other_terms_stay_wide(run: Any, want: list[str]) -> None:
    assert traced(run, X, W) == want


def test_a_loop_gives_what_its_body_made_narrow() -> None:
    def run(xs: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        _, ys = ts.scan(lambda c, x: (c, (x @ w).to(ts.f32) * 2.0), ts.zeros(()), xs)
        return dist.all_reduce(ys, "tp")

    assert traced(run, parse_type("bf16[4, 8@dp, 16@tp]", MESH), W) == ["bf16[4, 8@dp, 32]"]


@pytest.mark.parametrize("level", ["run_to_run", "mesh_invariant"])
def test_only_the_same_bits_on_every_mesh_need_wide_sums(level: str) -> None:
    def run(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce((x @ w).to(ts.f32) * 2.0, "tp")

    with dist.deterministic(level=level):
        found = traced(run, X, W)
    assert found == ["f32[8@dp, 32]" if level == "mesh_invariant" else "bf16[8@dp, 32]"]


# -- a whole step ----------------------------------------------------------------------------------
def step(strategies: tuple[str, ...], narrow: bool) -> Graph:
    """A training step's forward and backward pass on dp=2 x tp=2, and its bytes on wires."""
    parts = {
        "dp": dist.strategy("data_parallel"),
        "zero_3": dist.strategy("zero_redundancy_optimizer", stage=3),
        "tp": dist.strategy("tensor_parallel"),
    }
    first, *others = (parts[name] for name in strategies)
    plan = sum(others, start=first)
    config = nn.GPTConfig(vocab=64, seq=SEQ, d=WIDTH, layers=2, heads=4)
    model = dist.place(nn.GPT(config), plan, MESH)
    batch = dist.place((np.zeros((BATCH, SEQ), np.int32),) * 2, plan, MESH, kind="batch")

    def gradients(model: Any, x: Any, y: Any) -> Any:
        with ts.autocast(ts.bf16) if narrow else nullcontext():
            loss = model.loss(x, y)
        return loss, ts.grad(loss, model.parameters(), layout=plan)

    return simplify(graph.trace(gradients, model, *batch))


def received(g: Graph) -> int:
    return sum(n.wire_bytes * times for n, times in g.collectives())


@pytest.mark.parametrize("strategies", [("dp", "tp"), ("zero_3", "tp")], ids=" ".join)
def test_activations_of_tensor_parallelism_are_sent_narrow(strategies: tuple[str, ...]) -> None:
    plain, narrow = (step(strategies, on) for on in (False, True))
    found = Counter[str]()
    for n, times in narrow.collectives():
        if n.type.shape == ACTIVATION and "tp" in n.attrs["axes"]:
            found[str(n.type.dtype)] += times
    # Of two layers: two results and two gradients each; the head's gradient. The embedding is f32.
    assert found == {"bf16": 9, "f32": 1}
    assert received(narrow) < 0.66 * received(plain)
