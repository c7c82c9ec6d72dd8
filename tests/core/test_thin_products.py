"""Gradients of thin factors: equal to those by the large gradient between, and cheaper."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tessera import dist
from tessera.core.dtypes import bf16
from tessera.core.layout import parse_type
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.passes.differentiate import differentiate
from tessera.passes.simplify import simplify

MESH = dist.Mesh.parse("dp=2,tp=2")
ROWS, COLUMNS, OUT, R = 64, 48, 64, 2


def large_products(g: Graph) -> int:
    """The products that are as large as the weight."""
    return sum(n.op == "contract" and n.type.shape == (COLUMNS, OUT) for n in g.nodes)


def gradients(
    x: str = f"f32[{ROWS}, {COLUMNS}]", a: str = f"f32[{COLUMNS}, {R}]",
    c: str = f"f32[{R}, {OUT}]", dy: str = f"f32[{ROWS}, {OUT}]", *, form: str = "plain",
) -> tuple[Graph, dict[str, Any]]:  # fmt: skip
    """The graph of the gradients of A and C in y = x·(W + A·C), and values of its inputs."""
    b = Builder()
    w = f"f32[{COLUMNS}, {OUT}]"
    nodes = {
        k: b.input(parse_type(t, MESH), k)
        for k, t in {"x": x, "w": w, "a": a, "c": c, "dy": dy}.items()
    }
    wrt = [nodes["a"], nodes["c"]]
    read = b("contract", *wrt, index="i r, r o -> i o")
    if form == "split":  # a head's dims, merged for the product
        split = b("reshape", nodes["c"], shape=(R, 4, OUT // 4))
        whole = b("contract", nodes["a"], split, index="i r, r h k -> i h k")
        read = b("reshape", whole, shape=(COLUMNS, OUT))
    if form == "two":
        second = b("contract", nodes["a"], nodes["c"], index="i r, r o -> i o")
        read = b("add", read, second)
    if form == "read":  # the weight's own gradient is wanted, too
        wrt.append(nodes["w"])
    total = b("add", nodes["w"], read)
    left = nodes["x"]
    if form == "narrow":
        left, total = b("cast", left, dtype=bf16), b("cast", total, dtype=bf16)
    y = b("contract", left, total, index="m i, i o -> m o")
    g = nodes["dy"] if form != "narrow" else b("cast", nodes["dy"], dtype=bf16)
    found = differentiate(b, [(y, g)], wrt)
    made = [b.redistribute(n, n.type.complete(), "") for n in found if n is not None]
    graph = simplify(b.graph(made))
    verify(graph)
    draw = np.random.default_rng(0)
    return graph, {k: draw.normal(size=n.type.shape).astype(np.float32) for k, n in nodes.items()}


def expected(v: dict[str, Any]) -> list[Any]:
    dw = v["x"].T @ v["dy"]
    return [dw @ v["c"].T, v["a"].T @ dw]


@pytest.mark.parametrize("form", ["plain", "split", "two", "narrow"])
def test_the_large_gradient_is_not_formed(form: str) -> None:
    graph, values = gradients(form=form)
    assert not large_products(graph)
    for one, want in zip(evaluate(graph, [*values.values()]), expected(values), strict=True):
        want = want * 2 if form == "two" else want
        bound = 2e-2 * abs(want).max() if form == "narrow" else 3e-4
        np.testing.assert_allclose(np.asarray(one, np.float32), want, rtol=0, atol=bound)


@pytest.mark.parametrize("rows, columns, out", [*product(["", "@dp"], ["", "@tp"], ["", "@tp"])])
def test_in_any_layout(rows: str, columns: str, out: str) -> None:
    x, dy = f"f32[{ROWS}{rows}, {COLUMNS}{columns}]", f"f32[{ROWS}{rows}, {OUT}{out}]"
    a, c = f"f32[{COLUMNS}{columns}, {R}]", f"f32[{R}, {OUT}{out}]"
    graph, values = gradients(x, a, c, dy)
    assert not large_products(graph)
    inputs = [values[n.attrs["name"]] for n in graph.inputs]
    for one, want in zip(evaluate_blocks(graph, inputs), expected(values), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=3e-4)


def test_the_large_gradient_is_formed_where_it_is_read_or_cheaper() -> None:
    assert large_products(gradients(form="read")[0]) == 1
    wide = gradients(a=f"f32[{COLUMNS}, 40]", c=f"f32[40, {OUT}]")[0]
    assert large_products(wide) == 1
