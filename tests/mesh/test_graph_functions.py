"""Training steps, stages and custom gradients on a mesh: equal numbers in the requested layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tests.cases import LONG

RNG = np.random.default_rng(5)
X = RNG.normal(size=(4, 8, 16)).astype(np.float32)
LABELS = RNG.integers(0, 16, (4, 8)).astype(np.int32)
DP, TP = dist.strategy("data_parallel"), dist.strategy("tensor_parallel")
ZERO_2 = dist.strategy("zero_redundancy_optimizer")
ZERO_3 = dist.strategy("zero_redundancy_optimizer", stage=3)


def made(plan: Any = None, recorded: list[int] | None = None) -> Any:
    """The training step of guide 3, section 4.5, with stages and weights of its own."""
    ts.seed(0)
    note = ([] if recorded is None else recorded).append

    @graph.stage("encoder")
    def encoder(x: ts.Tensor) -> ts.Tensor:
        return op.transformer_block(x, depth=2, heads=4)

    @graph.stage("decoder")
    def decoder(x: ts.Tensor) -> ts.Tensor:
        return op.transformer_block(x, heads=4)

    @graph.training_step(module="DistTransformer", strategy=plan)
    def step(batch: dict[str, ts.Tensor]) -> Any:
        note(1)
        out = decoder(encoder(batch["input"]))
        loss = op.cross_entropy(out, batch["labels"])
        grads = graph.backward(loss)
        return grads, {"loss": loss}

    return step


def batch_on(mesh: Any, plan: Any) -> Any:
    batch = {"input": X, "labels": LABELS}
    return batch if mesh is None else dist.place(batch, plan, mesh, kind="batch")


def trained(step: Any, batch: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        grads, metrics = step(batch)
        losses.append(metrics["loss"].item())
        step.parameters = {k: w - 0.5 * grads[k] for k, w in step.parameters.items()}
    return losses


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        pytest.param("dp=2", DP + ZERO_2, id="zero2", marks=LONG),
        pytest.param("dp=2 tp=4", DP + TP + ZERO_3, id="all"),
    ],
)
def test_training_is_the_same_under_every_strategy(sizes: str, plan: Any) -> None:
    mesh = dist.Mesh.parse(sizes)
    alone, spread = made(), made(plan)
    want = trained(alone, batch_on(None, None))
    got = trained(spread, batch_on(mesh, plan))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert got[2] < got[0]
    grads, _ = spread(batch_on(mesh, plan))
    for name, w in spread.parameters.items():
        plain = w.type.replicated()
        assert w.type == plan.weight(name, plain), name
        assert grads[name].type == plan.gradient(name, plain), name
        np.testing.assert_allclose(
            w.numpy(), alone.parameters[name].numpy(), rtol=1e-3, atol=1e-4, err_msg=name
        )


def test_first_values_do_not_depend_on_the_layout(mesh: dist.Mesh) -> None:
    plan = DP + TP + ZERO_3
    plain = graph.parameters(made(), batch_on(None, None))
    spread = graph.parameters(made(plan), batch_on(mesh, plan))
    for name, w in plain.items():
        np.testing.assert_allclose(w.numpy(), spread[name].numpy(), atol=1e-6)


def test_a_weight_is_made_block_by_block(mesh: dist.Mesh) -> None:
    found = graph.parameters(made(TP), batch_on(mesh, TP))
    up = found["DistTransformer.encoder.block0.mlp.up"]
    assert up.layout == "[2, 16, 64@tp]"
    assert {s.data.shape for s in up.jax().addressable_shards} == {(2, 16, 16)}


def test_the_ambient_mesh_is_where_weights_are_replicated(mesh: dist.Mesh) -> None:
    step = made()
    with mesh:
        batch = {"input": ts.tensor(X), "labels": ts.tensor(LABELS)}
        with pytest.warns(ts.StrategyWarning, match="along 'dp', 'tp' compute the same"):
            grads, _ = step(batch)
        step(batch)  # this gives one warning
    for k, w in step.parameters.items():
        assert w.mesh == mesh and not w.type.split_axes
        assert grads[k].type == w.type


def test_a_training_loop_with_an_optimizer_records_once(mesh: dist.Mesh) -> None:
    recorded: list[int] = []
    plan, optimizer = DP + TP, ts.optim.AdamW(lr=1e-2)
    step, batch = made(plan, recorded), batch_on(mesh, plan)
    state = optimizer.init(graph.parameters(step, batch))
    recorded.clear()

    @ts.jit(donate=("weights", "state"))
    def update(weights: Any, grads: Any, state: Any) -> Any:
        return optimizer.update(weights, grads, state)

    losses = []
    for _ in range(5):
        grads, metrics = step(batch)
        step.parameters, state = update(step.parameters, grads, state)
        losses.append(metrics["loss"].item())
    assert losses == sorted(losses, reverse=True)
    assert recorded == [1]


def test_hybrid_training_of_guide_1(mesh: dist.Mesh) -> None:
    """Section 7.6: a user-created weight, split over two axes, beside those of the step."""
    w = dist.tensor((16, 16), dist.ShardSpec(("row", "col"), ("tp", "dp")), mesh, name="W")

    @graph.training_step(module="Transformer")
    def step(batch: Any) -> Any:
        out = op.transformer_block(batch["input"], heads=4) @ w
        loss = op.cross_entropy(out, batch["labels"])
        grads = graph.backward(loss)
        return grads, {"loss": loss}

    losses = trained(step, batch_on(mesh, DP))
    assert losses == sorted(losses, reverse=True)
    assert step.parameters["W"].layout == "[16@tp, 16@dp]"


def test_one_set_of_weights_on_two_meshes(mesh: dist.Mesh) -> None:
    part = graph.stage("part")(lambda x: op.transformer_block(x, heads=4))
    other = dist.Mesh(("a",), shape={"a": 4})
    want = ts.jit(lambda x: part(x))(ts.tensor(X)).numpy()
    for m in (mesh, other, mesh):
        on = ts.jit(lambda x: part(x))(ts.tensor(X, mesh=m))
        np.testing.assert_allclose(on.numpy(), want, rtol=1e-4, atol=1e-5)


def test_a_stage_of_twelve_layers(mesh: dist.Mesh) -> None:
    deep = graph.stage("encoder")(lambda x: op.transformer_block(x, depth=12, heads=4))
    plan = DP + TP
    found = graph.parameters(
        graph.training_step("M", plan)(lambda x: graph.backward(ts.mean(deep(x) ** 2))),
        dist.place(X, plan, mesh, kind="batch"),
    )
    assert found["M.encoder.block0.attention.qkv"].layout == "[12, 16, 3, 4@tp, 4]"


def test_capture_on_a_mesh(mesh: dist.Mesh) -> None:
    x = ts.tensor(X, mesh=mesh, layout="[4@dp, 8, 16]")
    runs = graph.capture(lambda x: ts.sum(x * x), x)
    np.testing.assert_allclose(runs.result.item(), (X * X).sum(), rtol=1e-4)
    np.testing.assert_allclose(runs(x * 2.0).item(), 4 * (X * X).sum(), rtol=1e-4)
    assert "all_reduce dp" in str(dist.inspect(runs))
    with pytest.raises(ts.UsageError, match=r"given f32\[4, 8@tp, 16\]"):
        runs(dist.redistribute(x, "[4, 8@tp, 16]"))


# -- gradients ------------------------------------------------------------------------------------
@ts.custom_gradient
def squashed(x: ts.Tensor, w: ts.Tensor) -> Any:
    y = ts.tanh(x @ w)

    def backward(g: ts.Tensor) -> Any:
        d = g * (1.0 - y * y)
        return d @ w.T, 2.0 * (x.T @ d)

    return y, backward


@pytest.mark.parametrize(
    ("x_on", "w_on"),
    [("[8@dp, 16]", "[16, 4]"), ("[8@dp, 16@tp]", "[16@tp, 4]"), ("[8, 16]", "[16, 4@tp]")],
)
def test_a_custom_gradient_on_a_mesh(mesh: dist.Mesh, x_on: str, w_on: str) -> None:
    x, w = RNG.normal(size=(8, 16)).astype(np.float32), RNG.normal(size=(16, 4)).astype(np.float32)

    def f(x: ts.Tensor, w: ts.Tensor) -> Any:
        return ts.grad(ts.sum(squashed(x, w) ** 2), (x, w))

    d = 2 * np.tanh(x @ w) * (1 - np.tanh(x @ w) ** 2)
    a = ts.tensor(x, mesh=mesh, layout=x_on)
    b = ts.tensor(w, mesh=mesh, layout=w_on)
    for got in (f(a, b), ts.jit(f)(a, b)):
        np.testing.assert_allclose(got[0].numpy(), d @ w.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got[1].numpy(), 2 * x.T @ d, rtol=1e-4, atol=1e-4)
        assert [g.layout for g in got] == [x_on, w_on]


def mlp(np_like: Any, x: Any, w1: Any, w2: Any) -> Any:
    return ((np_like.tanh(np_like.tanh(x @ w1) @ w2)) ** 2).sum()


def entropy(x: ts.Tensor, w1: ts.Tensor, w2: ts.Tensor) -> ts.Tensor:
    return op.cross_entropy(ts.tanh(x @ w1) @ w2, LABELS[0] % 4)


def jax_entropy(x: Any, w1: Any, w2: Any) -> Any:
    logits = jax.nn.log_softmax(jnp.tanh(x @ w1) @ w2)
    return -jnp.mean(logits[jnp.arange(8), LABELS[0] % 4])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(lambda *a: mlp(ts, *a), lambda *a: mlp(jnp, *a)), (entropy, jax_entropy)],
    ids=["mlp", "cross entropy"],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_hessian_vector_product_equals_jax(
    mesh: dist.Mesh, ours: Callable[..., Any], theirs: Callable[..., Any], split: bool
) -> None:
    shapes = [(8, 16), (16, 8), (8, 4)]
    xs, vs = ([RNG.normal(size=s).astype(np.float32) for s in shapes] for _ in range(2))
    layouts = ["[8@dp, 16]", "[16, 8@tp]", "[8@tp, 4]"]

    def product(*a: ts.Tensor) -> Any:
        grads = ts.grad(ours(*a), a)
        along = [ts.sum(g * ts.tensor(v)) for g, v in zip(grads, vs, strict=True)]
        return ts.grad(along[0] + along[1] + along[2], a)

    def along(*a: Any) -> Any:
        return sum(map(jnp.vdot, jax.grad(theirs, (0, 1, 2))(*a), vs))

    want = jax.grad(along, (0, 1, 2))(*xs)
    given = [
        ts.tensor(x, mesh=mesh, layout=on) if split else ts.tensor(x)
        for x, on in zip(xs, layouts, strict=True)
    ]
    for got, w in zip(ts.jit(product)(*given), want, strict=True):
        np.testing.assert_allclose(got.numpy(), w, rtol=2e-3, atol=2e-4)


class Slots:
    __slots__ = ("w",)


def test_a_tensor_of_dist_tensor_is_read_at_each_call_wherever_it_is() -> None:
    hidden = [Slots()]
    hidden[0].w = dist.tensor((2,), init="ones", name="w")

    @ts.jit
    def double(x: ts.Tensor) -> ts.Tensor:
        y = x * hidden[0].w
        hidden[0].w.put(hidden[0].w * 2)
        return y

    assert [double(ts.ones(2)).numpy()[0] for _ in range(3)] == [1, 2, 4]
    hidden[0].w.put(ts.full((2,), 5.0))
    assert double(ts.ones(2)).numpy().tolist() == [5, 5]
    assert hidden[0].w.numpy().tolist() == [10, 10]
    with pytest.raises(ts.ShapeError, match="put: the new value has another shape"):
        hidden[0].w.put(ts.ones(3))
