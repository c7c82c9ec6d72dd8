"""Does `value_and_grad` give what JAX's gives, also where one tensor comes twice?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts


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
        for ours, theirs in zip(ts.lang.tree.flatten(grads)[0], jax.tree.leaves(slopes)):
            assert (ours.numpy() == theirs).all()


def again(f: Callable[[Any, Any], Any], slope: Any) -> Callable[[Any, Any], Any]:
    """The gradient of `f` by its first argument, which is also in the closure of another."""
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
