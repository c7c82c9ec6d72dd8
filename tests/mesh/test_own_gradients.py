"""Gradients of the user's own for each row, and gradients by row in local bodies, against JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist, op

RNG = np.random.default_rng(6)
X = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=4).astype(np.float32)


@ts.custom_gradient
def scaled(r: Any, w: Any) -> Any:
    """A row times w, with a gradient that is not its derivative."""
    y = ts.sum(r * w)
    return y, lambda g: (2.0 * g * w, ts.tanh(g) * r + y)


@jax.custom_vjp
def theirs(r: Any, w: Any) -> Any:
    return jnp.sum(r * w)


def _forward(r: Any, w: Any) -> Any:
    y = theirs(r, w)
    return y, (r, w, y)


def _backward(saved: Any, g: Any) -> Any:
    r, w, y = saved
    return 2.0 * g * w, jnp.tanh(g) * r + y


theirs.defvjp(_forward, _backward)


def same(mine: Any, want: Any) -> None:
    for a, b in zip(mine, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["", "[8@dp, 4]", "[8, 4@tp]"])
@pytest.mark.parametrize("dims", [(0, None), (0, 0), (None, 0)], ids=str)
def test_rows_have_the_gradient_of_the_user(dims: Any, layout: str, mesh: dist.Mesh) -> None:
    args = [X if d == 0 else W for d in dims]

    def mine(a: Any, b: Any) -> Any:
        return ts.grad(ts.sum(ts.vmap(scaled, in_dims=dims)(a, b) ** 2), [a, b])

    want = jax.grad(lambda a, b: jnp.sum(jax.vmap(theirs, in_axes=dims)(a, b) ** 2), (0, 1))(*args)
    placed = [ts.tensor(a, mesh, layout) if layout and a.ndim == 2 else ts.tensor(a) for a in args]
    same(mine(*placed), want)
    run = ts.jit(mine)
    same(run(*placed), want)
    assert not any(n.op == "scan" for n in run.graph.nodes)


def test_rows_of_a_device_have_it_too(mesh: dist.Mesh) -> None:
    @op.kernel
    def body(x: Any, w: Any) -> Any:
        y = ts.vmap(scaled, in_dims=(0, None))(x, w)
        dx, dw = ts.grad(ts.sum(y**2), [x, w])
        return {"x": dx, "w": dw}

    got = body(ts.tensor(X, mesh, "[8@dp, 4]"), ts.tensor(W, mesh))
    want = jax.grad(lambda a, b: jnp.sum(jax.vmap(theirs, in_axes=(0, None))(a, b) ** 2), (0, 1))
    same((got["x"], got["w"]), want(X, W))


def test_a_gradient_by_row_is_not_summed_over_devices(mesh: dist.Mesh) -> None:
    """The gradient of a weight that all devices have, for each row of a device."""

    @op.kernel
    def body(x: Any, w: Any) -> Any:
        return ts.vmap(lambda r: ts.grad(ts.sum(ts.tanh(r * w)), w))(x)

    each = jax.vmap(lambda r: jax.grad(lambda w: jnp.sum(jnp.tanh(r * w)))(W))(X)
    same([body(ts.tensor(X, mesh, "[8@dp, 4]"), ts.tensor(W, mesh))], [each])


def test_a_value_that_devices_sum_has_a_gradient_of_the_user(mesh: dist.Mesh) -> None:
    @op.kernel
    def body(x: Any) -> Any:
        @ts.custom_gradient
        def total(v: Any) -> Any:
            return dist.all_reduce(v, axis="dp"), lambda g: 3.0 * g

        return {"x": ts.grad(ts.sum(total(x) * x), x)}

    both = X[:4] + X[4:]
    want = np.concatenate([both * 4.0, both * 4.0])  # once as the factor, three times by the rule
    same([body(ts.tensor(X, mesh, "[8@dp, 4]"))["x"]], [want])
