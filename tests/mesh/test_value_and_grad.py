"""Do the options of JAX's `value_and_grad` give what they give there?"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

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
