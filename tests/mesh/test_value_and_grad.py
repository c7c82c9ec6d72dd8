"""`value_and_grad` against JAX's, also with one tensor as two arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import nn


def test_value_and_grad_takes_the_options_of_jax() -> None:
    a, b = np.float32([1.0, 2.0]), np.float32([3.0, 5.0])

    def loss(x: Any, y: Any, power: int = 2) -> Any:
        return (x**power * y).sum(), {"y": y}

    for at in (0, 1, (0, 1), (1,)):
        (value, aux), grads = ts.value_and_grad(loss, at, has_aux=True)(ts.tensor(a), ts.tensor(b))
        (want, more), slopes = jax.value_and_grad(loss, at, has_aux=True)(a, b)
        assert value.item() == want and (aux["y"].numpy() == more["y"]).all()
        assert jax.tree.structure(slopes) == jax.tree.structure(
            jax.tree.map(lambda t: 0, grads, is_leaf=lambda t: isinstance(t, ts.Tensor))
        )
        for ours, theirs in zip(ts.lang.record.tree.flatten(grads)[0], jax.tree.leaves(slopes)):
            assert (ours.numpy() == theirs).all()


def again(f: Callable[[Any, Any], Any], slope: Any) -> Callable[[Any, Any], Any]:
    """The gradient of `f` with respect to its first argument, which another function's closure
    holds too."""
    return lambda x, y: slope(lambda a: (a * slope(lambda b: (a * f(b, y)).sum())(a)).sum())(x)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "given twice": lambda slope, w: slope(lambda p, ema: ((p - 0.5 * ema) ** 2).sum())(w, w),
    "in the closure": lambda slope, w: slope(lambda a: (a * w).sum())(w),
    "moved in vain": lambda slope, w: slope(lambda a, b: (a**2 * b).sum())(w, w.reshape(w.shape)),
    "a slope within": lambda slope, w: again(lambda b, y: b**2 * y, slope)(w, w),
    "a slope of a slope": lambda slope, w: slope(lambda a: slope(lambda b: (b**3).sum())(a).sum())(
        w
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_slope_is_by_the_argument_and_by_nothing_that_holds_the_same(
    name: str, compiled: bool
) -> None:
    def ours(f: Any) -> Any:
        return lambda *a: ts.value_and_grad(f)(*a)[1]

    w = np.float32([1.0, 2.0])
    want = FUNCTIONS[name](jax.grad, jnp.asarray(w))
    run = ts.jit(lambda w: FUNCTIONS[name](ours, w)) if compiled else partial(FUNCTIONS[name], ours)
    np.testing.assert_allclose(run(ts.tensor(w)).numpy(), want, rtol=1e-6)


def test_pulling_back_and_moving_along_are_by_the_arguments_too() -> None:
    w = ts.tensor([1.0, 2.0])
    one, other = ts.vjp(lambda a, b: a * b, w, w)[1](ts.ones(2))
    assert one.numpy().tolist() == other.numpy().tolist() == [1.0, 2.0]
    slope = ts.jvp(lambda a, b: a * b, (w, w), (ts.ones(2), ts.zeros(2)))[1]
    assert slope.numpy().tolist() == [1.0, 2.0]
    each = ts.value_and_grad(lambda p: (p["a"] * 2 + p["b"] * 3).sum())({"a": w, "b": w})[1]
    assert [each[k].numpy().tolist() for k in "ab"] == [[2.0, 2.0], [3.0, 3.0]]


@ts.jit
def square(x: Any) -> Any:
    return x * x


COMPILED: dict[str, Callable[[Any], Any]] = {
    "a compiled function": square,
    "and more": lambda x: square(x) + x,
    "one in another": ts.jit(lambda x: ts.sin(square(x)) * x),
    "of its result": lambda x: ts.exp(square(square(x)) * -0.1),
    "of a method": lambda x: Model().run(x) * x,
}


class Model:
    @ts.jit
    def run(self, x: Any) -> Any:
        return ts.tanh(x) * 3.0


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_flow_through_compiled_functions(name: str) -> None:
    """As in JAX, where a function may call compiled ones."""
    f, x = COMPILED[name], ts.tensor([0.5, 1.0, 1.5])
    want = ts.jit(lambda x: ts.grad(f(x).sum(), x))(x).numpy()
    np.testing.assert_allclose(ts.value_and_grad(lambda x: f(x).sum())(x)[1].numpy(), want, 1e-6)
    np.testing.assert_allclose(ts.vjp(f, x)[1](ts.ones(3))[0].numpy(), want, 1e-6)
    np.testing.assert_allclose(ts.jvp(f, (x,), (ts.ones(3),))[1].numpy(), want, 1e-6)


def test_a_gradient_that_stops_at_a_program_is_told() -> None:
    x = ts.tensor([1.0, 2.0])
    with pytest.warns(ts.TraceWarning, match="results of square, which is compiled"):
        ts.grad((square(x) + x).sum(), x)
    kernel = ts.op.kernel(lambda x: x * x, mesh=ts.dist.Mesh("dp", devices=2))
    with pytest.warns(ts.TraceWarning, match="which is compiled"):
        ts.grad((kernel(x) + x).sum(), x)
    with pytest.raises(ts.UsageError, match="no gradient goes through it"):
        ts.value_and_grad(lambda x: (kernel(x) + x).sum())(x)
    # Weights that a program returned, and explicit constants, are allowed.
    w, other = square(x), square(x)
    ts.grad((w * other).sum(), w)
    ts.grad((ts.stop_gradient(square(x)) * x).sum(), x)
    with ts.no_grad():
        y = square(x)
    ts.grad((y * x).sum(), x)


def test_buffers_that_a_program_has_set_are_constants(recwarn: pytest.WarningsRecorder) -> None:
    x = ts.tensor(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    for m in (nn.BatchNorm(4), nn.MoE(4, 4, 2, k=1, balance="bias")):
        ts.jit(lambda m, x: m(x))(m, x)  # it is an argument
        ts.grad((m(x) * x).sum(), m)
        ts.jit(lambda x, m=m: m(x))(x)  # it is a closure variable
        ts.value_and_grad(lambda m: (m(x) * x).sum())(m)
    constant = ts.jit(lambda x: ts.stop_gradient(ts.exp(x)))
    ts.grad((constant(x) * x).sum(), x)
    assert not [str(w.message) for w in recwarn]

    class Keeps(nn.Module):
        def __init__(self) -> None:
            self.weight, self.last = nn.Parameter(4), ts.zeros(4)

        def __call__(self, x: ts.Tensor) -> ts.Tensor:
            self.last = self.last + self.weight
            return x * self.last

    keeps = Keeps()
    ts.jit(lambda m, x: m(x))(keeps, x)
    with pytest.warns(ts.TraceWarning, match="which is compiled"):
        ts.grad(keeps(x).sum(), keeps)


def _cube(x: Any) -> Any:
    return (x**3).sum()


SLOPES: dict[str, Callable[[ts.Tensor], Any]] = {
    "value_and_grad": lambda x: ts.value_and_grad(_cube)(x)[1],
    "vjp": lambda x: ts.vjp(_cube, x)[1](ts.ones(()))[0],
    "jvp": lambda x: ts.stack([ts.jvp(_cube, (x,), (e,))[1] for e in ts.eye(2)]),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SLOPES)
def test_a_function_that_takes_gradients_does_so_where_none_goes_through(
    name: str, compiled: bool
) -> None:
    """As with `torch.func.grad`: computed inside of `no_grad`, and constant outside."""
    slope = SLOPES[name]

    def held(x: ts.Tensor) -> Any:
        with ts.no_grad():
            constant = slope(x)
        return constant, ts.grad((constant * x).sum(), x)

    x = ts.tensor([1.0, 2.0])
    for found in (ts.jit(held) if compiled else held)(x):
        np.testing.assert_allclose(found.numpy(), [3.0, 12.0])
    with ts.no_grad():
        np.testing.assert_allclose(slope(x).numpy(), [3.0, 12.0])


@pytest.mark.parametrize("inside", [ts.vmap, ts.jit])
def test_a_pull_in_another_function_than_the_value_says_where_it_goes(inside: Any) -> None:
    x = ts.tensor([1.0, 2.0])
    _, pull = ts.vjp(lambda x: x**2, x)
    with pytest.raises(ts.GraphError, match="call both parts there"):
        inside(lambda g: pull(g)[0])(ts.eye(2) if inside is ts.vmap else x)
    together = ts.vmap(lambda g: ts.vjp(lambda x: x**2, x)[1](g)[0])(ts.eye(2))
    np.testing.assert_allclose(together.numpy(), [[2.0, 0.0], [0.0, 4.0]])


class Settings(nn.Module):
    """A module with all kinds of attributes: functions, numbers, texts, buffers, a frozen weight,
    and a tied one."""

    def __init__(self) -> None:
        self.up, self.act, self.norm = nn.Linear(4, 4), nn.gelu, nn.BatchNorm(4)
        self.scale, self.mode, self.on, self.calls = 3, "wide", True, 0
        self.fixed = nn.Parameter(ts.full((4,), 2.0), requires_grad=False)
        self.tied = self.up.weight

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        assert self.mode == "wide" and self.on is True
        self.calls += 1
        x = self.act(self.norm(self.up(x))) * self.scale * self.fixed
        return x.reshape(-1, 2, self.scale - 1).reshape(-1, 4) @ self.tied


def _made() -> Settings:
    ts.seed(0)
    return Settings()


def _loss(model: Settings, x: ts.Tensor) -> ts.Tensor:
    return (model(x) ** 2).mean()


ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
WAYS: dict[str, Callable[[Settings, ts.Tensor], Any]] = {
    "at once": lambda m, x: ts.value_and_grad(_loss)(m, x)[1],
    "compiled": lambda m, x: ts.jit(ts.value_and_grad(_loss))(m, x)[1],
    "from outside": lambda m, x: ts.jit(lambda x: ts.value_and_grad(_loss)(m, x)[1])(x),
    "in a tree": lambda m, x: ts.value_and_grad(lambda t: _loss(t["m"][0], t["x"]))(
        {"m": (m,), "x": x}
    )[1]["m"][0],
    "with more": lambda m, x: ts.value_and_grad(
        lambda x, m: (_loss(m, x), x), argnums=1, has_aux=True
    )(x, m)[1],
    "pulled back": lambda m, x: ts.vjp(lambda m: _loss(m, x), m)[1](ts.ones(()))[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_of_any_attributes_is_an_argument(way: str) -> None:
    x, one, other = ts.tensor(ROWS), _made(), _made()
    found, want = WAYS[way](one, x), ts.grad(_loss(other, x), other)
    assert [*found] == [*want] == ["up.weight", "up.bias", "norm.weight", "norm.bias"]
    for name, g in want.items():
        np.testing.assert_allclose(found[name].numpy(), g.numpy(), rtol=1e-4, atol=1e-5)
    assert (one.norm.running_mean.numpy() == other.norm.running_mean.numpy()).all()
    assert one.calls == other.calls == 1


def test_a_module_that_is_given_twice_is_an_error() -> None:
    model, x = nn.Linear(4, 4), ts.tensor(ROWS)
    f = ts.value_and_grad(lambda m, other: ((m(x) - 0.5 * other(x)) ** 2).mean())
    with pytest.raises(ts.UsageError, match="arguments 0 and 1 hold the same weight"):
        f(model, model)
    with pytest.raises(ts.UsageError, match="vjp: arguments 0 and 1 hold the same weight"):
        ts.vjp(lambda m, other: m(x) - other(x), model, model)
    mine = copy.deepcopy(model)
    assert np.abs(f(model, mine)[1]["weight"].numpy()).max() > 0


PULLS: dict[str, Any] = {
    "less": lambda vjp, y, pull, w: pull(y - 1.0)[0],
    "the value": lambda vjp, y, pull, w: pull(y)[0],
    "the argument": lambda vjp, y, pull, w: pull(w)[0],
    "twice": lambda vjp, y, pull, w: pull(pull(y)[0])[0],
}


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["at once", "jit"])
@pytest.mark.parametrize("name", PULLS)
def test_what_is_pulled_back_may_be_made_of_the_value(name: str, run: Any) -> None:
    """The cotangent is a constant to the inner gradient, but not to an outer one."""

    def pulled(vjp: Any, m: Any, w: Any) -> Any:
        return PULLS[name](vjp, *vjp(lambda w: m.sin(w) * w, w), w)

    w = np.float32([1, 2, 3])
    want = pulled(jax.vjp, jax.numpy, w)
    np.testing.assert_allclose(run(lambda w: pulled(ts.vjp, ts, w))(ts.tensor(w)).numpy(), want,
                               rtol=1e-5)  # fmt: skip
    again = jax.grad(lambda w: (pulled(jax.vjp, jax.numpy, w) ** 2).sum())(w)
    outer = run(lambda w: ts.value_and_grad(lambda w: (pulled(ts.vjp, ts, w) ** 2).sum())(w)[1])
    np.testing.assert_allclose(outer(ts.tensor(w)).numpy(), again, rtol=1e-4)
