"""`jacfwd`, `jacrev`, `hessian` and `linearize` against JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op
from tests.quickly import quickly

RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 3)).astype(np.float32)
W = RNG.normal(size=(3, 2)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


def vector(x: Any, w: Any, m: Any) -> Any:
    return m.tanh(x @ w) * m.sum(x)


def scalar(x: Any, w: Any, m: Any) -> Any:
    return m.sum(m.exp(0.3 * (x @ w)) * m.sin(x[:, :2]))


def looped(x: Any, w: Any, m: Any) -> Any:
    scan = ts.scan if m is ts else jax.lax.scan
    return scan(lambda h, row: (m.tanh(h * row), h), x[0], x)[1] @ w


def branched(x: Any, w: Any, m: Any) -> Any:
    cond = ts.cond if m is ts else jax.lax.cond
    return cond(m.sum(x) > 1e3, lambda: x @ w, lambda: m.sin(x @ w))


def trees(x: Any, w: Any, m: Any) -> Any:
    return {"a": x @ w, "b": (m.sum(x), m.exp(w))}


FUNCTIONS = {f.__name__: f for f in (vector, scalar, looped, branched, trees)}
LAYOUTS = [("", ""), ("[4@dp, 3]", "[3, 2@dp]"), ("[4@tp, 3]", "[3, 2]")]


def placed(mesh: dist.Mesh, layouts: tuple[str, str]) -> list[Any]:
    return [ts.tensor(a, mesh, t) if t else ts.tensor(a) for a, t in zip((X, W), layouts)]


def same(mine: Any, theirs: Any) -> None:
    assert jax.tree.structure(theirs) == jax.tree.structure(
        jax.tree.map(lambda _: 0, mine, is_leaf=lambda t: isinstance(t, ts.Tensor))
    )
    leaves = jax.tree.leaves(mine, is_leaf=lambda t: isinstance(t, ts.Tensor))
    for a, b in zip(leaves, jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-4, atol=2e-4 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("way", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_derivatives_are_those_of_jax(
    name: str, way: str, argnums: Any, layouts: tuple[str, str], mesh: dist.Mesh
) -> None:
    f = FUNCTIONS[name]
    mine = getattr(ts, way)(lambda x, w: f(x, w, ts), argnums)
    want = getattr(jax, way)(lambda x, w: f(x, w, jnp), argnums)(X, W)
    same((mine if argnums else ts.jit(mine))(*placed(mesh, layouts)), want)


@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=str)
@pytest.mark.parametrize("name", ["scalar", "vector", "looped"])
def test_second_derivatives_are_those_of_jax(name: str, argnums: Any, mesh: dist.Mesh) -> None:
    f = FUNCTIONS[name]
    want = jax.hessian(lambda x, w: f(x, w, jnp), argnums)(X, W)
    same(ts.jit(ts.hessian(lambda x, w: f(x, w, ts), argnums))(*placed(mesh, LAYOUTS[1])), want)
    same(ts.jacfwd(ts.jacrev(lambda x, w: f(x, w, ts), argnums), argnums)(*map(ts.tensor, (X, W))),
         want)  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_derivative_is_called_many_times(name: str, compiled: bool, mesh: dist.Mesh) -> None:
    f = FUNCTIONS[name]
    dx, dw = RNG.normal(size=X.shape).astype(np.float32), W * 0.5

    def run(x: Any, w: Any, dx: Any, dw: Any) -> Any:
        y, slope = ts.linearize(lambda x, w: f(x, w, ts), x, w)
        many = ts.vmap(slope, in_dims=(0, None))(ts.stack([dx, -dx]), dw)
        return y, slope(dx, dw), many

    def theirs(x: Any, w: Any) -> Any:
        y, slope = jax.linearize(lambda x, w: f(x, w, jnp), x, w)
        return y, slope(dx, dw), jax.vmap(slope, in_axes=(0, None))(np.stack([dx, -dx]), dw)

    args = [*placed(mesh, LAYOUTS[1]), ts.tensor(dx), ts.tensor(dw)]
    same((ts.jit(run) if compiled else run)(*args), theirs(X, W))


def test_the_function_is_computed_once() -> None:
    @ts.jit
    def run(x: Any) -> Any:
        y, slope = ts.linearize(lambda x: ts.exp(x) * x, x)
        return y, [slope(x), slope(x + 1.0), slope(x * 2.0)]

    run(ts.tensor(X))
    assert [n.op for n in run.graph.nodes].count("exp") == 1
    jac = ts.jit(ts.jacrev(lambda x: ts.tanh(x) * 2.0))
    jac(ts.tensor(X))
    assert [n.type.shape for n in jac.graph.nodes if n.op == "tanh"] == [X.shape]


def test_a_gradient_flows_through_all_derivatives() -> None:
    def mine(x: Any) -> Any:
        return ts.grad(ts.sum(ts.jacrev(lambda x: ts.sin(x) * ts.sum(x))(x) ** 2), x)

    want = jax.grad(lambda x: jnp.sum(jax.jacrev(lambda x: jnp.sin(x) * jnp.sum(x))(x) ** 2))(X)
    same(mine(ts.tensor(X)), want)
    same(ts.jit(mine)(ts.tensor(X)), want)


def test_inside_of_vmap_and_local_bodies(mesh: dist.Mesh) -> None:
    f = lambda m: lambda r: m.sum(m.sin(r) * r[0])  # noqa: E731
    want = jax.vmap(jax.hessian(f(jnp)))(X)
    same(ts.vmap(ts.hessian(f(ts)))(ts.tensor(X)), want)

    @op.kernel
    def body(x: Any) -> Any:
        return ts.vmap(ts.jacrev(f(ts)))(x)

    same(body(ts.tensor(X, mesh, "[4@dp, 3]")), jax.vmap(jax.jacrev(f(jnp)))(X))


ERRORS: dict[str, tuple[Any, str]] = {
    "no such argument": (lambda x: ts.jacrev(lambda x: x, 2)(x), "by place"),
    "integers": (lambda x: ts.jacfwd(lambda i: i * 1.0)(ts.arange(3)), "no float tensor"),
    "a result that is no float": (lambda x: ts.jacrev(lambda x: x > 0)(x), "float"),
    "other tangents": (lambda x: ts.linearize(ts.sin, x)[1](x[0]), "not like the primals"),
    "a shown value": (lambda x: ts.jacrev(shown)(x), "shows or records"),
}


def shown(x: Any) -> Any:
    ts.debug.print(x)
    return x * 2.0


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_to_do(name: str) -> None:
    run, text = ERRORS[name]
    with pytest.raises(ts.TesseraError, match=text):
        run(ts.tensor(X))


def test_a_draw_is_the_same_in_the_value_and_the_derivative() -> None:
    y, slope = ts.linearize(lambda x: nn.dropout(x, 0.5), ts.ones(64))
    np.testing.assert_array_equal(slope(ts.ones(64)).numpy(), y.numpy())
    assert 0 < (y.numpy() == 0).sum() < 64


COMPLEX = {
    "analytic": lambda z, m: m.exp(z * (1 - 0.5j)) * z,
    "not analytic": lambda z, m: z * m.conj(z) + m.real(z) * 2j,
    "to real numbers": lambda z, m: m.abs(z) ** 2 + m.imag(z * z),
    "of real numbers": lambda z, m: m.real(z) * (1 + 2j),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_derivatives_of_complex_numbers(name: str, mesh: dist.Mesh) -> None:
    f = COMPLEX[name]
    z, dz, g = (RNG.normal(size=(3, 4, 2)) @ np.array([1, 1j])).astype(np.complex64)
    y = np.asarray(f(z, jnp))
    g = g if np.iscomplexobj(y) else g.real

    def mine(z: Any, dz: Any, g: Any) -> Any:
        along = lambda z: f(z, ts)  # noqa: E731
        return ts.jvp(along, (z,), (dz,)), ts.vjp(along, z)[1](g), ts.linearize(along, z)[1](dz)

    along = lambda z: f(z, jnp)  # noqa: E731
    slopes = jax.jvp(along, (z,), (dz,))
    want = slopes, jax.vjp(along, z)[1](g), slopes[1]
    same(mine(*map(ts.tensor, (z, dz, g))), want)
    same(ts.jit(mine)(*(ts.tensor(x, mesh, "[4@dp]") for x in (z, dz, g))), want)
    if not np.iscomplexobj(y):
        same(ts.jacrev(lambda z: f(z, ts))(ts.tensor(z)), jax.jacrev(along)(z))
