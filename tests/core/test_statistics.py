"""Statistics of tensors and of the scopes of a function, with NumPy as the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import debug, dist, graph
from tests.core.numpy_engine import Oracle

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
X = np.linspace(-1, 95, 64).reshape(8, 8).astype("f4")


def test_statistics_are_those_of_numpy(oracle: Oracle) -> None:
    r = np.random.default_rng(0)
    tree = {"a": {"w": r.normal(size=(6, 5))}, "b": [r.normal(size=7), np.array([0.0, np.inf])]}
    tree["b"][0][:3] = 0
    layouts = {"a.w": "[6@dp, 5]", "b.0": "[7@tp]", "b.1": "[2]"}
    flat = {"a.w": tree["a"]["w"], "b.0": tree["b"][0], "b.1": tree["b"][1]}
    on = {n: ts.tensor(v.astype("f4"), mesh=MESH, layout=layouts[n]) for n, v in flat.items()}
    placed = {"a": {"w": on["a.w"]}, "b": [on["b.0"], on["b.1"]], "n": ts.tensor([1, 2])}
    found = debug.statistics(placed)
    assert found.names == ("a.w", "b.0", "b.1")
    for name, row in found.rows().items():
        v = flat[name]
        want = {
            "norm": np.linalg.norm(v), "max_abs": np.abs(v).max(), "mean": v.mean(),
            "zeros": (v == 0).mean(), "nonfinite": (~np.isfinite(v)).sum(),
        }  # fmt: skip
        assert row == pytest.approx(want, rel=1e-5)
    assert found.flat("g/")["g/b.0/zeros"] == pytest.approx(3 / 7)
    finite = debug.statistics([on["a.w"], on["b.0"]])
    assert finite.norm.item() == pytest.approx(
        np.hypot(*map(np.linalg.norm, list(flat.values())[:2]))
    )


def test_statistics_exchange_their_sums_together() -> None:
    def f(a: ts.Tensor, b: ts.Tensor, c: ts.Tensor, d: ts.Tensor) -> ts.Tensor:
        return debug.statistics({"a": a, "b": b, "c": c, "d": d}).values

    def made(layout: str) -> ts.Tensor:
        return dist.tensor((8, 4), layout, MESH)

    g = graph.trace(f, made("[8@dp, 4]"), made("[8, 4@tp]"), made("[8@dp, 4]"), made("[8, 4]"))
    kinds = [n.args[0].type.partial for n, _ in g.collectives()]
    assert [k for k in kinds if k[0][1] == "sum"] == [(("dp", "sum"),), (("tp", "sum"),)]
    assert len(kinds) == 5  # and the maximum of each split value


def test_statistics_come_out_of_a_compiled_function(oracle: Oracle) -> None:
    @ts.jit
    def step(w: ts.Tensor) -> Any:
        return debug.statistics({"w": w * 2.0})

    found = step(ts.tensor([3.0, -4.0]))
    assert str(found) == (
        "name  norm  max abs  mean  zeros  not finite\nw       10        8    -1    0 %           0"
    )


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_of_others_count_and_are_checked(library: str, oracle: Oracle) -> None:
    def array(values: list[float]) -> Any:
        made = np.array(values, "f4")
        return made if library == "numpy" else pytest.importorskip("torch").from_numpy(made)

    tree = {"a": ts.tensor([3.0]), "b": array([4.0, 0.0]), "n": 7, "name": np.array(["x"])}
    assert debug.statistics(tree).norm.item() == 5.0
    assert ts.jit(lambda: debug.statistics(tree).norm)().item() == 5.0
    assert debug.check_finite(tree) is tree
    for bad in (array([1.0, np.nan]), {"loss": np.nan}, np.float32("inf")):
        with pytest.raises(ts.GraphError, match="not finite"):
            debug.check_finite(bad)


def test_statistics_need_floats() -> None:
    with pytest.raises(ts.UsageError, match="there is no tensor of floats"):
        debug.statistics({"n": ts.tensor([1, 2])})


def test_activations_are_named_by_scope_occurrence_and_iteration(oracle: Oracle) -> None:
    def f(x: ts.Tensor) -> ts.Tensor:
        for _ in range(2):
            with ts.named_scope("block"):
                with ts.named_scope("up"):
                    x = x * 2.0
                x = x + 1.0

        def body(c: ts.Tensor, k: ts.Tensor) -> tuple[ts.Tensor, Any]:
            with ts.named_scope("iteration"):
                return c * k, ()

        return ts.scan(body, x, ts.tensor([1.0, 0.0]))[0]

    rows = debug.activations(f, np.array([1.0], "f4")).rows()
    assert {name: row["norm"] for name, row in rows.items()} == {
        "block/up": 2.0, "block": 3.0, "block/up #2": 6.0, "block #2": 7.0,
        "iteration[0]": 7.0, "iteration[1]": 0.0,
    }  # fmt: skip
    assert rows["iteration[1]"]["zeros"] == 1.0

    def step(x: ts.Tensor) -> Any:  # a repeated scope; its gradient is no third visit
        y = x
        for factor in (2.0, 3.0):
            with ts.named_scope("scaled"):
                y = y * factor * x
        loss = ts.sum(y)
        return loss, ts.grad(loss, x)

    rows = debug.activations(step, ts.tensor([1.0])).rows()
    assert {n: r["norm"] for n, r in rows.items()} == {"scaled": 2.0, "scaled #2": 6.0}

    def looped(x: ts.Tensor) -> Any:  # its gradient recomputes the values of the body
        def body(c: ts.Tensor, k: ts.Tensor) -> tuple[ts.Tensor, Any]:
            with ts.named_scope("inner"):
                return ts.exp(c * k), ()

        with ts.named_scope("outer"):
            y = ts.sum(ts.scan(body, x, ts.tensor([1.0, 0.0]), policy="recompute")[0])
        return y, ts.grad(y, x)

    def halved(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:  # a gradient leaves the scope as it is
        with ts.named_scope("outer"):
            return ts.grad(ts.sum(x * w), w) * 0.5

    ends = graph.trace(halved, dist.tensor((2, 4), "[2@dp, 4]", MESH), ts.ones(4)).outputs
    assert [n.scope for n in ends] == ["outer"]
    names = debug.activations(looped, ts.tensor([1.0])).names
    assert names == ("outer/inner[0]", "outer/inner[1]", "outer")
    with pytest.raises(ts.UsageError, match="the function has no scopes"):
        debug.activations(lambda x: x * 2.0, X)
