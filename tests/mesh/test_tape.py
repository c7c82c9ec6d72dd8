"""The gradient tape outside of compiled functions: released when no gradient can need it, and not
before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import optim
from tessera.lang.autodiff.tape import history
from tessera.lang.record.tree import flatten
from tests.compilations import compilations

RNG = np.random.default_rng(0)


def weight() -> ts.Tensor:
    return ts.tensor(np.linspace(0.1, 0.4, 4, dtype=np.float32))


def loss_of(w: ts.Tensor) -> ts.Tensor:
    return (ts.tanh(w) * w).sum()


def test_a_plain_loop_of_updates_holds_one_step() -> None:
    w, x = weight(), ts.ones((4,))
    m, olds = w * 0.0, []
    for _ in range(12):
        g = ts.grad(loss_of(w * x), w)
        olds += [ref(w), ref(m), ref(g)]
        m = 0.9 * m + g
        w = w - 0.1 * m
    assert sum(r() is not None for r in olds) <= 6  # only weights of the last two steps are alive
    assert w._history is not None


def set_data(layer: ts.nn.Module, new: dict[str, ts.Tensor]) -> None:
    for name, p in layer.parameters().items():
        p.data = new[name]


@pytest.mark.parametrize("optimizer", [
    optim.Momentum(0.1), optim.AdamW(0.1), optim.from_optax(optax.MultiSteps(optax.adam(0.1), 2)),
])  # fmt: skip
@pytest.mark.parametrize("put", [ts.nn.Module.load_parameters, set_data])
def test_a_loop_that_sets_parameters_holds_one_step(optimizer: Any, put: Any) -> None:
    layer, scaler, olds = ts.nn.Linear(3, 2), optim.LossScale(growth_interval=2), []
    x, state, scale = ts.ones((4, 3)), optimizer.init(layer), scaler.init()
    for _ in range(8):
        grads = ts.grad(scaler.scale((layer(x) ** 2).mean(), scale), layer)
        grads, finite = scaler.unscale(grads, scale)
        new, state = optimizer.update(layer, grads, state)
        put(layer, new)
        scale = scaler.update(finite, scale)
        olds += [ref(t) for t in (*flatten(state)[0], *scale.values(), *grads.values(), finite)]
    alive = sum(r() is not None for r in olds)
    assert alive <= 5 * len(olds) // 16, f"{alive} of {len(olds)}"


def test_a_gradient_that_is_kept_stays_whole_when_parameters_are_set() -> None:
    layer, x = ts.nn.Linear(3, 2), ts.ones((4, 3))
    old = layer.weight.now()
    slope = ts.grad((layer(x) ** 3).sum(), layer)["weight"]
    moment = 0.9 * slope
    layer.weight = layer.weight - 0.1 * moment
    ts.grad((layer(x) ** 2).sum(), layer)
    assert ts.grad(slope.sum(), old).numpy().any()
    with pytest.raises(ts.GraphError, match="was let go of, by an earlier gradient"):
        ts.grad(moment.sum() + old.sum(), old)


@pytest.mark.parametrize("how", ["stop_gradient", "detach", "no_grad", "decorated"])
def test_what_was_cut_is_let_go_of(how: str) -> None:
    decorated = ts.no_grad()(lambda w, g: w - 0.1 * g)

    def updated(w: ts.Tensor, g: ts.Tensor) -> ts.Tensor:
        if how == "decorated":
            return decorated(w, g)  # type: ignore[no-any-return]
        if how == "no_grad":
            with ts.no_grad():
                w = w - 0.1 * g
            return w
        new = w - 0.1 * g
        return new.detach() if how == "detach" else ts.stop_gradient(new)

    w, g, olds = weight(), ts.ones((4,)), []
    for _ in range(6):
        olds.append(ref(w))
        w = updated(w, g)
    assert not any(r() is not None for r in olds)
    np.testing.assert_allclose(w.numpy(), weight().numpy() - 0.6, rtol=1e-5)


def test_gradients_of_gradients_and_through_one_update_stay() -> None:
    w = weight()
    g = ts.grad((w**3).sum(), w)
    np.testing.assert_allclose(ts.grad(g.sum(), w).numpy(), 6 * w.numpy(), rtol=1e-5)
    new = w - 0.1 * ts.grad((w**3).sum(), w)
    want = 2 * new.numpy() * (1 - 0.6 * w.numpy())
    np.testing.assert_allclose(ts.grad((new**2).sum(), w).numpy(), want, rtol=1e-5)
    h = w * 2  # the gradient by an activation, then by the weight behind it
    loss = (h**2).sum()
    np.testing.assert_allclose(ts.grad(loss, h).numpy(), 2 * h.numpy(), rtol=1e-5)
    np.testing.assert_allclose(ts.grad(loss, w).numpy(), 4 * h.numpy(), rtol=1e-5)


def test_a_gradient_by_a_tensor_and_by_what_it_is_made_of() -> None:
    def both(w: ts.Tensor) -> Any:
        h = w * 2
        k = h * 3
        return ts.grad((h * k + w).sum(), [k, w, h])

    for run in (both, ts.jit(both)):
        for got, want in zip(run(weight()), (2, 25, 12), strict=True):
            by = weight().numpy()
            np.testing.assert_allclose(
                got.numpy(), want * by if want != 25 else 24 * by + 1, rtol=1e-5
            )


def test_a_gradient_through_a_cut_is_an_error_and_never_a_part_of_it() -> None:
    first = weight()
    second = first - 0.1 * ts.grad(loss_of(first), first)
    ts.grad(loss_of(second), second)
    for loss in (loss_of(second), loss_of(second) + loss_of(first)):
        with pytest.raises(ts.GraphError, match="was let go of, by an earlier gradient"):
            ts.grad(loss, first)
    ts.grad(loss_of(second) + loss_of(first), [first, second])  # two separate losses in one call

    def both(w: ts.Tensor) -> ts.Tensor:
        new = w - 0.1 * ts.grad(loss_of(w), w)
        ts.grad(loss_of(new), new)
        return ts.grad(loss_of(new), w)

    assert ts.jit(both)(first).numpy().all()


SET: dict[str, Callable[[Any, Any], Any]] = {
    "load_parameters": lambda m, w: m.load_parameters(w),
    "load_state_dict": lambda m, w: m.load_state_dict(w),
    "attributes": lambda m, w: (setattr(m, "weight", w["weight"]), setattr(m, "bias", w["bias"])),
}


@pytest.mark.parametrize("how", SET)
def test_a_gradient_flows_through_weights_that_are_set(how: str) -> None:
    layer, x = ts.nn.Linear(3, 2), RNG.normal(size=(4, 3)).astype(np.float32)

    def slopes(w: dict[str, ts.Tensor]) -> Any:
        SET[how](layer, {name: v * 2.0 for name, v in w.items()})
        loss = ts.tanh(layer(x)).sum()
        return ts.grad(loss, w), ts.grad(loss, layer)

    given = {name: ts.tensor(RNG.normal(size=t.shape)) for name, t in layer.parameters().items()}
    once, compiled = slopes(given), ts.jit(slopes)(given)
    for name in given:
        for mine, theirs in zip(once, compiled, strict=True):
            np.testing.assert_allclose(mine[name].numpy(), theirs[name].numpy(), rtol=1e-5)
        np.testing.assert_allclose(once[0][name].numpy(), 2 * once[1][name].numpy(), rtol=1e-5)


def test_what_a_weight_was_before_is_behind_a_cut() -> None:
    layer, x = ts.nn.Linear(3, 2), RNG.normal(size=(4, 3)).astype(np.float32)
    w = {name: ts.tensor(RNG.normal(size=t.shape)) for name, t in layer.parameters().items()}
    layer.load_parameters(w)
    slopes = ts.grad(ts.tanh(layer(x)).sum(), layer)
    layer.load_parameters({name: t - 0.1 * slopes[name] for name, t in layer.parameters().items()})
    with pytest.raises(ts.GraphError, match="as weights were set"):
        ts.grad(ts.tanh(layer(x)).sum() + sum((t * t).sum() for t in w.values()), w)
    assert set(ts.grad(ts.tanh(layer(x)).sum(), layer)) == set(w)


def test_a_copy_of_another_modules_weights_is_a_constant() -> None:
    online, target = ts.nn.Linear(3, 2), ts.nn.Linear(3, 2)
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    for share in (1.0, 0.1):
        old = target.parameters()
        new = online.parameters() if share == 1 else {
            name: share * t + (1 - share) * old[name] for name, t in online.parameters().items()
        }  # fmt: skip
        target.load_parameters(new)
        goal = ts.stop_gradient(target(x))
        want = ts.grad(((online(x) - goal - 1.0) ** 2).sum(), online)
        got = ts.grad(((online(x) - target(x) - 1.0) ** 2).sum(), online)
        for name in want:
            np.testing.assert_array_equal(got[name].numpy(), want[name].numpy())


def test_weights_that_follow_others_hold_no_past() -> None:
    average, layer = ts.nn.Linear(3, 2), ts.nn.Linear(3, 2)
    for _ in range(5):
        old = average.parameters()
        new = {name: 0.9 * old[name] + 0.1 * t for name, t in layer.parameters().items()}
        average.load_parameters(new)
        layer.load_parameters({name: t * 1.1 for name, t in layer.parameters().items()})
    for module in (average, layer):
        assert all(len(history(t.now())) == 1 for t in module.parameters().values())


def test_constants_are_constants_everywhere() -> None:
    w = weight()

    def f(w: ts.Tensor) -> ts.Tensor:
        with ts.no_grad():
            c = w * w
        return ts.grad((c * w + ts.stop_gradient(w * 3)).sum(), w)

    np.testing.assert_allclose(f(w).numpy(), w.numpy() ** 2, rtol=1e-6)
    np.testing.assert_allclose(ts.jit(f)(w).numpy(), w.numpy() ** 2, rtol=1e-6)
    assert not ts.grad(ts.stop_gradient(w * 3).sum(), w).numpy().any()
    with ts.no_grad():
        lost = loss_of(w)
    with pytest.raises(ts.GraphError, match="does not depend on any of the weights"):
        ts.grad(lost, w)


SECOND: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda np, x: np.sin(x) * x,
    "cos": lambda np, x: np.cos(x) * np.sin(x) + np.sin(x),
    "tanh": lambda np, x: np.tanh(x) * np.exp(x),
    "log": lambda np, x: np.log(x) * np.sqrt(x) / x,
    "sums": lambda np, x: np.sin(x).sum() * np.cos(x).sum() * x,
    "products": lambda np, x: np.sin(x[:, None] * x[None]) @ np.cos(x),
    "pow": lambda np, x: np.sin(x) ** 3 + np.cos(x) ** 2,
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_outside_of_compiled_functions_are_those_of_jax(name: str) -> None:
    """Two ops of one argument are two values: the gradient of the sine reads sine and cosine."""
    f = SECOND[name]
    given, along = np.array([0.5, 1.0, 1.5], np.float32), np.array([1.0, 2.0, -1.0], np.float32)
    x, t = ts.tensor(given), ts.tensor(along)
    _, want = jax.jvp(lambda x: f(jnp, x), (given,), (along,))
    np.testing.assert_allclose(ts.jvp(lambda x: f(ts, x), (x,), (t,))[1].numpy(), want, rtol=1e-4)
    first = ts.grad((f(ts, x) * t).sum(), x)
    again = jax.grad(lambda x: (jax.grad(lambda x: (f(jnp, x) * along).sum())(x) ** 2).sum())
    np.testing.assert_allclose(ts.grad((first**2).sum(), x).numpy(), again(given), rtol=1e-3)


def test_numbers_that_change_compile_no_gradient_anew() -> None:
    x = ts.tensor(np.linspace(0.5, 2.0, 6, dtype=np.float32).reshape(3, 2))

    def ours(scale: float, row: int, least: float) -> np.ndarray[Any, Any]:
        y = ts.maximum(x * scale, least) ** (1.0 + scale)
        return np.asarray(ts.grad(y[row].sum() + ts.where(x > least, x, scale).mean(), x).numpy())

    def theirs(x: Any, scale: float, row: int, least: float) -> Any:
        y = jnp.maximum(x * scale, least) ** (1.0 + scale)
        return y[row].sum() + jnp.where(x > least, x, scale).mean()

    ours(3.0, 2, 1.0)
    with compilations() as compiled:
        found = [ours(*how) for how in ((2.0, 0, 1.2), (0.5, 1, 0.1))]
    assert not compiled
    for how, got in zip(((2.0, 0, 1.2), (0.5, 1, 0.1)), found, strict=True):
        np.testing.assert_allclose(got, jax.grad(theirs)(x.numpy(), *how), rtol=1e-5)
