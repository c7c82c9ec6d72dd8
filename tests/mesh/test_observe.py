"""Inspection on a mesh: a GPT step with a bad weight, its statistics, and the same step on one
device and on eight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import debug, dist, nn, op, optim
from tessera.observe.compare import Comparison
from tests.cases import LONG

TP = dist.strategy("tensor_parallel")
PLAN = dist.strategy("data_parallel") + TP
CONFIG = nn.GPTConfig(vocab=32, seq=8, d=16, layers=2, heads=2, norm="rms", activation="swiglu")


def made(mesh: dist.Mesh, plan: Any, **changed: Any) -> tuple[nn.GPT, ts.Tensor]:
    """A small GPT and a batch on `mesh`, with the same numbers on every mesh."""
    ts.seed(0)
    config = nn.GPTConfig(**{**vars(CONFIG), **changed})
    model = dist.place(nn.GPT(config), plan, mesh)
    ids = np.random.default_rng(0).integers(0, 32, (8, 8))
    return model, dist.place(ids, plan, mesh, kind="batch")


@ts.jit
def step(model: nn.GPT, ids: ts.Tensor) -> Any:
    loss = model.loss(ids, ids)
    grads = ts.grad(loss, model.parameters())
    grads, norm = optim.clip_by_global_norm(grads, 1.0)
    return loss, grads, norm, debug.statistics(grads)


@pytest.mark.parametrize("loop", [pytest.param(False, marks=LONG), True])
def test_a_bad_weight_is_found_in_its_layer(mesh: dist.Mesh, loop: bool) -> None:
    model, ids = made(mesh, PLAN, loop=loop)
    old = model.blocks.block.mlp.up
    bad = old.numpy().copy()
    bad[1] = 1e38  # the weight of the second layer
    model.blocks.block.mlp.up = ts.tensor(bad, mesh=mesh, layout=old.layout)
    found = debug.nan_origin(model.loss, ids, ids)
    assert found is not None and found.loc.startswith("test_observe.py:")
    assert found.scope.endswith("blocks.layers.mlp" if loop else "blocks.1.mlp")
    assert [i for n, i in found.first.iterations][:1] == ([1] if loop else [])
    assert found.first.holds.infs + found.first.holds.nans > 0
    assert all(f.holds.infs + f.holds.nans == 0 for f in found.operands)


def test_a_sound_step_has_none(mesh: dist.Mesh) -> None:
    assert debug.nan_origin(step, *made(mesh, PLAN, layers=1)) is None


def test_a_partial_sum_that_overflows(mesh: dist.Mesh) -> None:
    x = ts.tensor(np.full((4, 8), 1e38, "f4"), mesh=mesh, layout="[4, 8@tp]")

    def f(x: ts.Tensor) -> ts.Tensor:
        return ts.sum(x, dim=1) * 0.5

    found = debug.nan_origin(f, x)
    assert found is not None and found.node.op == "sum"
    assert str(found.first.holds) == "4 inf of 4"


def test_the_weight_of_a_model_that_is_called_is_named() -> None:
    model = ts.nn.Sequential(ts.nn.Linear(3, 4), ts.nn.Linear(4, 2))
    model.parameters()["1.bias"].data = ts.tensor([0.0, np.nan])
    found = debug.nan_origin(model, ts.ones((2, 3)))
    assert found is not None and 'input "model.1.bias"' in found.first.text


@LONG
def test_padding_is_nobodys_nan(mesh: dist.Mesh) -> None:
    x = ts.tensor(np.ones((6, 3), "f4"), mesh=mesh, layout="[6@tp, 3]")  # 2 2 2 0
    assert debug.nan_origin(lambda x: 1.0 / x, x) is None
    row = debug.statistics({"x": 1.0 / x}).rows()["x"]
    assert (row["max_abs"], row["mean"], row["zeros"], row["nonfinite"]) == (1, 1, 0, 0)


def test_what_is_shown_of_an_object_is_its_text() -> None:
    x = ts.ones((2, 4))
    f = ts.jit(lambda x: debug.statistics({"x": x * 2.0}))
    with dist.profile() as profile:
        found = f(x)
    for value in (found, profile, f.graph, f.schedule, ts.graph.trace(lambda x: x + 1.0, x)):
        assert repr(value) == str(value)

    def recorded(x: ts.Tensor) -> None:
        assert repr(debug.statistics(x)) == "statistics in a program that is being recorded"

    ts.jit(recorded)(x)


def test_a_function_of_rows_has_the_scopes_and_lines_of_one() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ts.ones((3, 2, 4))
    rows = debug.activations(ts.vmap(model), x)
    assert rows.names == debug.activations(model, x).names
    np.testing.assert_allclose(rows.values.numpy(), debug.activations(model, x).values.numpy())

    def line(x: ts.Tensor) -> ts.Tensor:
        return ts.exp(x)

    (node,) = [n for n in ts.graph.trace(ts.vmap(line), x).nodes if n.op == "exp"]
    assert node.loc.endswith(f":{line.__code__.co_firstlineno + 1}")


def test_statistics_are_those_of_the_whole_gradient(mesh: dist.Mesh) -> None:
    model, ids = made(mesh, dist.strategy("zero_redundancy_optimizer", stage=3) + TP)
    _, grads, norm, found = step(model, ids)
    for name, row in found.rows().items():
        g = grads[name].numpy().astype(np.float64)
        want = [np.linalg.norm(g), np.abs(g).max(), g.mean(), (g == 0).mean(), 0]
        np.testing.assert_allclose(list(row.values()), want, rtol=1e-4, atol=1e-7)
    assert found.norm.item() == pytest.approx(min(1.0, norm.item()), rel=1e-4)


@pytest.mark.parametrize("loop", [pytest.param(False, marks=LONG), True])
def test_activations_are_the_same_on_every_mesh(mesh: dist.Mesh, loop: bool) -> None:
    one = debug.activations(*made(dist.Mesh(("dp", "tp"), shape=(1, 1)), PLAN, loop=loop))
    many = debug.activations(*made(mesh, PLAN, loop=loop))
    assert one.names == many.names
    assert any("mlp" in name for name in one.names) and "gpt" in one.names
    assert ("gpt/blocks.layers.mlp[1]" if loop else "gpt/blocks.1.mlp") in one.names
    np.testing.assert_allclose(one.values.numpy(), many.values.numpy(), rtol=1e-3, atol=1e-5)


def loss_and_gradients(model: nn.GPT, ids: ts.Tensor) -> Any:
    loss = model.loss(ids, ids)
    return loss, ts.grad(loss, model.parameters())


@LONG
def test_one_step_on_one_device_and_on_eight() -> None:
    plan = dist.strategy("data_parallel")

    def on(n: int, scale: float = 1.0) -> Any:
        model, ids = made(dist.Mesh(("dp",), devices=n), plan, layers=1)
        model.blocks.block.attention.out = model.blocks.block.attention.out * scale
        return loss_and_gradients, (model, ids)

    alike = debug.compare(on(1), on(8), rtol=1e-3)
    assert isinstance(alike, Comparison) and alike.same
    assert len(alike.pairs) > 100
    other = debug.compare(on(1), on(8, 1.5), rtol=1e-3)
    assert isinstance(other, Comparison) and other.first is not None
    assert other.first.a.op == "input"
    assert other.first.a.attrs["name"].endswith("attention.out")
    scopes = other.scopes()
    assert scopes["embed"][1] < scopes["embed"][0]  # the lookup comes first
    assert scopes["blocks.0.mlp"][1] > scopes["blocks.0.mlp"][0] / 2


def test_the_same_run_twice_is_the_same_to_the_bit(mesh: dist.Mesh) -> None:
    model, ids = made(mesh, PLAN, layers=1)
    found = debug.compare(model.loss, model.loss, ids, ids, bitwise=True)
    assert isinstance(found, Comparison) and found.same


UNLIKE: list[tuple[Any, Any, list[str]]] = [
    ({"loss": 1, "x": 2}, {"los": 1, "x": 2}, ["only a has the result 'loss'",
                                               "only b has the result 'los'"]),
    ({"loss": 1, "x": 2}, {"x": 2, "loss": 1}, []),
    ([1, 2], [1], ["only a has the result '1'"]),
    ([1, "mean"], [1, "sum"], ["result '1': 'mean' in a, 'sum' in b"]),
    ([1, (2, 0.5)], [1, (2, 0.5000001)], []),
    ([1, np.arange(1)], [1, np.ones(1, int)], ["result '1': array([0]) in a, array([1]) in b"]),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "unlike"), UNLIKE, ids=[str(i) for i in range(len(UNLIKE))])
def test_results_of_other_names_or_of_other_constants_are_not_the_same(
    a: Any, b: Any, unlike: list[str]
) -> None:
    def of(what: Any) -> Any:
        def run(x: Any) -> Any:  # in the order of names, not of the results
            names = sorted(what) if isinstance(what, dict) else range(len(what))
            made = {n: x * v if isinstance(v := what[n], int) else v for n in names}
            return {n: made[n] for n in what} if isinstance(what, dict) else list(made.values())

        return run

    found = debug.compare(of(a), of(b), np.arange(4, dtype="f4"))
    assert isinstance(found, Comparison)
    assert list(found.unlike) == unlike and found.first is None
    assert found.same == (not unlike) and str(found).startswith(
        "their results differ" if unlike else "the same"
    )


def test_a_while_loop_is_looked_into_turn_by_turn(mesh: dist.Mesh) -> None:
    x = ts.tensor(np.full(8, 3.5, np.float32), mesh=mesh, layout="[8@dp]")

    def grows(x: ts.Tensor) -> ts.Tensor:
        return ts.while_loop(lambda v: v.sum() < 100.0, lambda v: v * 1.5, x)

    def falls(x: ts.Tensor) -> ts.Tensor:
        return ts.while_loop(lambda v: v.sum() > 1.0, lambda v: ts.sqrt(v - 5.0), grows(x))

    found = debug.nan_origin(falls, x)
    assert found is not None and found.node.op == "sqrt"
    (loop, turn), *others = found.first.iterations
    assert (loop.attrs["length"], turn, others) == (2, 1, [])
    # If the loop does not run, it is not the origin.
    found = debug.nan_origin(lambda x: falls(ts.log(-x)), x)
    assert found is not None and found.node.op == "log"


def test_a_function_with_a_per_device_view_is_looked_into(mesh: dist.Mesh) -> None:
    x = ts.tensor(np.arange(8.0, dtype="f4"), mesh=mesh, layout="[8@dp]")

    @ts.distribute(mesh_axes=("dp",))
    def local(x: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce(ts.sum(ts.log(x - 6.0)))

    found = debug.nan_origin(local, x)
    assert found is not None and found.node.op == "log"


def test_counts_of_a_kernel_are_those_of_all_devices() -> None:
    mesh = dist.Mesh(("dp",), devices=2)
    x = ts.tensor(np.arange(-4.0, 4.0), mesh=mesh, layout="[8@dp]")
    found = ts.debug.nan_origin(op.kernel(lambda x: dist.all_reduce(ts.log(x), "dp")), x)
    assert "holds   : 4 NaN and 1 inf of 8, the others 0 to 1.099" in str(found)
    all_bad = ts.debug.nan_origin(
        lambda x: ts.while_loop(lambda v: ts.isfinite(v), lambda v: v * 10.0, x), ts.tensor(1.0)
    )
    assert "the others" not in str(all_bad)
