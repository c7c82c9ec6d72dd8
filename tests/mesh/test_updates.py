"""Gradients after an optimizer update: the new weight is a constant for other values, but not for
those in its update, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import nn, optim
from tessera.train.accumulate import accumulated
from tests.cases import grid

D, G = np.float32([0.5, -0.3]), np.float32([0.7, 0.2])
OPTIMIZERS: dict[str, Any] = {
    "ours": optim.SGD(0.1),
    "optax's": optim.from_optax(optax.sgd(0.1)),
}


def first(d: Any, g: Any, of: Any) -> Any:
    return of.tanh(d * g).sum() + (d**2).sum()


def second(d: Any, g: Any, of: Any) -> Any:
    return (of.tanh(d * g) ** 2).sum()


def moved(d: Any, g: Any) -> Any:
    return d - 0.1 * jax.grad(first)(d, g, jnp)


class Holder(nn.Module):
    def __init__(self, w: Any) -> None:
        self.w = nn.Parameter(ts.tensor(w))


def by_modules(opt: Any) -> Any:
    def step(d: Any, g: Any, state: Any) -> Any:
        new, state = opt.update(d, ts.grad(first(d.w, g.w, ts), d), state)
        d.load_parameters(new)
        return ts.grad(second(d.w, g.w, ts), g)["w"]

    d = Holder(D)
    return step, (d, Holder(G), opt.init(d))


def by_trees(opt: Any) -> Any:
    def step(d: Any, g: Any, state: Any) -> Any:
        new, state = opt.update(d, ts.grad(first(d["w"], g["w"], ts), d), state)
        return ts.grad(second(new["w"], g["w"], ts), g)["w"]

    d = {"w": ts.tensor(D)}
    return step, (d, {"w": ts.tensor(G)}, opt.init(d))


def by_hand(opt: Any) -> Any:
    def step(d: Any, g: Any) -> Any:
        d.w = d.w - 0.1 * ts.grad(first(d.w, g.w, ts), d)["w"]
        return ts.grad(second(d.w, g.w, ts), g)["w"]

    return step, (Holder(D), Holder(G))


def by_accumulation(opt: Any) -> Any:
    def step(d: Any, g: Any, state: Any) -> Any:
        batch = {"one": ts.ones((4,))}

        def loss(part: Any, d: Any) -> Any:
            return first(d.w, g.w, ts) * part["one"].mean()

        new, state = opt.update(d, accumulated(loss, batch, d, 2)[1], state)
        d.load_parameters(new)
        return ts.grad(second(d.w, g.w, ts), g)["w"]

    d = Holder(D)
    return step, (d, Holder(G), opt.init(d))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("way", "opt"),
    grid([by_modules, by_trees, by_hand, by_accumulation], [*OPTIMIZERS],
         lambda v: getattr(v, "__name__", v)),
)  # fmt: skip
def test_two_players_in_one_step(way: Callable[[Any], Any], opt: str, compiled: bool) -> None:
    step, given = way(OPTIMIZERS[opt])
    new = moved(D, G)
    want = jax.grad(lambda g: second(new, g, jnp))(jnp.asarray(G))
    got = (ts.jit(step) if compiled else step)(*given)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_a_gradient_through_an_update(opt: str, compiled: bool) -> None:
    """With respect to the weights before one update, or before two in a recorded function."""
    tx, count = OPTIMIZERS[opt], 2 if compiled else 1

    def steps(d: Any, g: Any) -> Any:
        new, state = d, tx.init(d)
        for _ in range(count):
            slope = ts.grad(first(new["w"], g["w"], ts), new)
            new, state = tx.update(new, slope, state)
        return ts.grad(second(new["w"], g["w"], ts), d)["w"]

    def peers(d: Any) -> Any:
        for _ in range(count):
            d = moved(d, G)
        return second(d, G, jnp)

    want = jax.grad(peers)(jnp.asarray(D))
    got = (ts.jit(steps) if compiled else steps)({"w": ts.tensor(D)}, {"w": ts.tensor(G)})
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_by_what_a_weight_is_moved_by(compiled: bool) -> None:
    """Also through forty ops between the value and the weight."""

    def shift(z: Any, of: Any) -> Any:
        for _ in range(40):
            z = of.tanh(z) + 0.1
        return z

    def step(d: Any, g: Any, z: Any) -> Any:
        d.w = (d.w if compiled else d.w.numpy()) + shift(z, ts)
        return ts.grad(second(d.w, g.w, ts), z)

    want = jax.grad(lambda z: second(D + shift(z, jnp), G, jnp))(jnp.asarray(G))
    got = (ts.jit(step) if compiled else step)(Holder(D), Holder(G), ts.tensor(G))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4)


def test_a_gradient_by_a_learning_rate() -> None:
    @ts.jit
    def step(d: Any, g: Any, rate: Any) -> Any:
        d.w = d.w - rate * ts.grad(first(d.w, g.w, ts), d)["w"]
        return ts.grad(second(d.w, g.w, ts), rate)

    slope = jax.grad(first)(D, G, jnp)
    want = jax.grad(lambda rate: second(D - rate * slope, G, jnp))(0.1)
    got = step(Holder(D), Holder(G), ts.tensor(0.1))
    np.testing.assert_allclose(got.item(), want, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("opt", [optim.SGD(0.1), optim.Momentum(0.1), optim.AdamW(0.1)])
def test_a_model_on_no_mesh_trains_with_a_batch_that_lies_on_one(opt: Any, compiled: bool) -> None:
    mesh, rows = ts.dist.Mesh(("dp",), devices=2), np.arange(12, dtype=np.float32).reshape(4, 3)

    def losses(x: Any) -> list[float]:
        ts.seed(0)
        model = nn.Linear(3, 2)
        state = opt.init(model)

        def step(model: Any, state: Any, x: Any) -> Any:
            loss = (model(x) ** 2).mean()
            weights, new = opt.update(model, ts.grad(loss, model), state)
            model.load_parameters(weights)
            state.update(new)
            return loss

        run: Any = ts.jit(step) if compiled else step
        return [run(model, state, x).item() for _ in range(3)]

    placed = ts.dist.place(rows, ts.dist.strategy("data_parallel"), mesh, kind="batch")
    np.testing.assert_allclose(losses(placed), losses(rows), rtol=1e-4)
