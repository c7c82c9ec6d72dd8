"""Pipelines: the batch is split into microbatches whatever its name, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tests.mesh.silent.rows import row

MESH = dist.Mesh(("pp",), devices=2)
ROWS = 8  # the size of the batch, and of each weight
RNG = np.random.default_rng(5)


def real(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.5).astype(np.float32)


PARAMS = {"first": real(ROWS, ROWS), "second": real(ROWS, ROWS)}
X, BANK, MASK = real(ROWS, ROWS), real(ROWS, ROWS), (real(ROWS, 1) > 0).astype(np.float32)
LABELS = RNG.integers(0, ROWS, ROWS).astype(np.int32)


def layers(p: dict[str, Any], x: Any) -> Any:
    return ts.tanh(x @ p["first"]) @ p["second"]


def named(weights: dict[str, Any]) -> dict[str, Any]:
    return {k: ts.tensor(w, name=k) for k, w in weights.items()}


def piped(body: Callable[..., Any]) -> Any:
    return pipeline.run(mesh_axes=("pp",), schedule="GPipe", microbatches=4, mesh=MESH)(body)


def same(step: Callable[[Callable[..., Any]], Callable[..., Any]], body: Any, *args: Any) -> None:
    """Asserts that a step gives the same with a pipeline as with the plain function."""
    got, want = ts.jit(step(piped(body)))(*args), ts.jit(step(body))(*args)
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-6)


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (dict, tuple, list)):
        return [x for t in (tree.values() if isinstance(tree, dict) else tree) for x in leaves(t)]
    return [tree]


@row("a pipeline's arguments under other names, weights with as many rows as the batch")
def _() -> None:
    def one(model: Any) -> Any:
        def step(weights: Any, state: Any, batch: Any) -> Any:
            loss = nn.cross_entropy(model(weights, batch["x"]), batch["y"])
            grads = ts.grad(loss, weights)
            state = {k: 0.9 * state[k] + g for k, g in grads.items()}
            return loss, {k: w - 0.1 * state[k] for k, w in weights.items()}, state

        return step

    def other(model: Any) -> Any:
        def step(inputs: Any, x: Any, weights: Any) -> Any:
            return one(model)(inputs, x, weights)

        return step

    zeros = {k: np.zeros_like(w) for k, w in PARAMS.items()}
    same(other, layers, PARAMS, zeros, {"x": X, "y": LABELS})


@row("a pipeline called with plain arrays as weights, under the name of a batch")
def _() -> None:
    def body(batch: Any, weights: Any) -> Any:
        return layers(batch, weights)

    np.testing.assert_allclose(
        piped(body)(PARAMS, X).numpy(), ts.jit(body)(PARAMS, X).numpy(), rtol=2e-5, atol=1e-6
    )


@row("a mask of the batch called params, and a table with as many rows called inputs")
def _() -> None:
    def attended(p: Any, x: Any, inputs: Any) -> Any:
        return nn.softmax(layers(p, x) @ inputs.T) @ inputs

    def step(model: Any) -> Any:
        def run(p: Any, x: Any, params: Any, inputs: Any) -> Any:
            out = model(p, x, inputs) * params
            return (out * out).mean(), ts.grad((out * out).mean(), p), out

        return run

    same(step, attended, PARAMS, X, MASK, BANK)


@row("a pipeline whose batch is read through a closure", error=ts.UsageError,
     says="no argument of the pipeline holds a batch to cut")  # fmt: skip
def _() -> None:
    x = ts.tensor(X)
    model = piped(lambda p: layers(p, x))
    ts.jit(lambda p: ts.grad(model(p).mean(), p))(named(PARAMS))


# -- results of a pipeline -------------------------------------------------------------------------
def pairs(o: Any) -> Any:
    return o.reshape(-1, 2, ROWS).mean(1)


for what, result in (
    ("rows less their mean", lambda o: o - o.mean(0, keepdims=True)),
    ("losses of rows with a penalty on their mean",
     lambda o: (o**2).mean(-1) + 0.1 * (o**2).mean()),
    ("rows beside their mean", lambda o: ts.concat([o, o.mean(0, keepdims=True) + o * 0], 1)),
    ("pairs of rows behind pairs of others", lambda o: ts.concat([pairs(o), pairs(o * 2)], 0)),
    ("columns, as many as a microbatch has rows", lambda o: o[:, : ROWS // 4].T),
):  # fmt: skip

    @row(f"{what}, as a result of a pipeline")
    def _(result: Callable[[Any], Any] = result) -> None:
        same(lambda model: lambda p, x: result(model(p, x)), layers, PARAMS, X)


@row("the mean of a pipeline over x.shape[0], with a penalty on weights")
def _() -> None:
    def step(model: Any) -> Any:
        def run(p: Any, x: Any) -> Any:
            e = ((model(p, x) - x) ** 2).sum() / x.shape[0]
            loss = 0.5 * e + 0.1 * sum((w * w).sum() for w in p.values())
            return loss, ts.grad(loss, p)

        return run

    same(step, layers, PARAMS, X)


@row("a module around a pipeline, its optimizer in the same step")
def _() -> None:
    def losses(model: Callable[[nn.Module, Any], Any]) -> list[float]:
        ts.seed(0)
        net, opt = nn.Linear(ROWS, ROWS), optim.SGD(0.1)

        def run(state: Any, x: Any, y: Any) -> Any:
            loss = nn.cross_entropy(model(net, x), y)
            grads = ts.grad(loss, net.parameters())
            new, state = opt.update(net.parameters(), grads, state)
            net.load_parameters(new)
            return loss, state

        step, state, found = ts.jit(run), opt.init(net.parameters()), []
        for _ in range(2):
            loss, state = step(state, X, LABELS)
            found.append(loss.item())
        return found

    stages = [lambda net, x: (net, net(x)), lambda net, x: ts.tanh(x)]
    model = pipeline.compose(2, stages, mesh=MESH, microbatches=4)
    np.testing.assert_allclose(losses(model), losses(lambda net, x: ts.tanh(net(x))), rtol=1e-5)


@row("weights that are read in slices, within a stage and in several")
def _() -> None:
    weights = {"qkv": real(ROWS, 3, ROWS), "stack": real(4, ROWS, ROWS)}

    def gated(w: dict[str, Any], x: Any) -> Any:
        q, k, v = (x @ w["qkv"][:, i] for i in range(3))
        return (x + q * ts.tanh(k) * v) @ w["stack"][1]

    def stacked(w: dict[str, Any], x: Any) -> Any:
        for i in (0, 1, 2, 3, 1):
            x = ts.tanh(x @ w["stack"][i])
        return x @ w["qkv"][:, 0]

    def step(model: Any) -> Any:
        def one(w: Any, x: Any) -> Any:
            loss = (model(w, x) ** 2).mean()
            return loss, ts.grad(loss, w)

        return one

    same(step, gated, weights, X)
    same(step, stacked, weights, X)


@row("a pipeline that gives its loss, with an argument of other rows that nothing reads")
def _() -> None:
    def body(w: dict[str, Any], x: Any, unread: Any) -> Any:
        return nn.mse_loss(layers(w, x), x)

    def step(model: Any) -> Any:
        return lambda w, x, unread: model(w, x, unread)

    same(step, body, PARAMS, X, real(4, 3))
