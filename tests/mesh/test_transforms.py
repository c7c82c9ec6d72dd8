"""Transforms of control flow, of writes and of regions, one in another, held against JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tessera as ts
from tessera import dist, op
from tests.cases import grid
from tests.quickly import quickly

RNG = np.random.default_rng(11)
X = RNG.normal(size=(8, 4)).astype(np.float32)
IDS = np.array([1, 0, 3, 2, 1, 1, 0, 2], np.int32)
LAYOUTS = ("", "[8@dp, 4]", "[8@dp, 4@tp]")
# JAX under the names of `ts`.
JAX = SimpleNamespace(
    cond=lax.cond, switch=lax.switch, scan=lax.scan, fori_loop=lax.fori_loop, map=lax.map,
    associative_scan=lax.associative_scan, remat=jax.checkpoint, vmap=jax.vmap, hessian=jax.hessian,
    jacfwd=jax.jacfwd, jacrev=jax.jacrev, linearize=jax.linearize, sum=jnp.sum, sin=jnp.sin,
    exp=jnp.exp, tanh=jnp.tanh, nonzero=jnp.nonzero, grad=jax.grad,
)  # fmt: skip


def slope(m: Any, f: Callable[..., Any], *args: Any) -> Any:
    """The gradient of the sum of squares of `f(*args)` by the first argument."""

    def total(x: Any) -> Any:
        return m.sum(f(x, *args[1:]) ** 2)

    return m.grad(total)(args[0]) if m is JAX else m.grad(total(args[0]), args[0])


# Functions of a row, its number, and the namespace.
def branch(r: Any, i: Any, m: Any) -> Any:
    return m.cond(m.sum(r) > 0, lambda r: m.sin(r) * r[0], lambda r: r * r, r)


def many(r: Any, i: Any, m: Any) -> Any:
    return m.switch(i, [lambda r: r, lambda r: r * r, m.sin, lambda r: m.exp(r) * 0.1], r)


def counted(r: Any, i: Any, m: Any) -> Any:
    return m.fori_loop(0, 3, lambda k, h: m.sin(h) * r + k, r)


def scanned(r: Any, i: Any, m: Any) -> Any:
    return m.scan(lambda h, _: (m.tanh(h) * r, h), r, None, length=4, unroll=2)[0]


def mapped(r: Any, i: Any, m: Any) -> Any:
    return m.map(lambda e: m.sin(e) * e, r)


def prefixes(r: Any, i: Any, m: Any) -> Any:
    return m.associative_scan(lambda a, b: a + b + 0.1 * a * b, r)


def region(r: Any, i: Any, m: Any) -> Any:
    return m.remat(lambda r: m.sin(r) * m.tanh(r))(r)


def written(r: Any, i: Any, m: Any) -> Any:
    r = r.at[i].set(2.0 * r[0]).at[1].mul(r[3])
    return r.at[2].max(0.3).at[i].add(r[1]).at[0].min(m.sum(r))


def masked(r: Any, i: Any, m: Any) -> Any:
    return r[m.nonzero(r > 0, size=3, fill_value=0)[0]] * r[0]


def steps(f: Any) -> dict[str, Any]:
    """Transforms of the function of a row `f`."""
    return {
        "grad": lambda r, i, m: slope(m, lambda r: f(r, i, m), r),
        "jacfwd": lambda r, i, m: m.jacfwd(lambda r: f(r, i, m))(r),
        "jacrev": lambda r, i, m: m.jacrev(lambda r: f(r, i, m))(r),
        "hessian": lambda r, i, m: m.hessian(lambda r: m.sum(f(r, i, m) ** 2))(r),
        "linearize": lambda r, i, m: m.linearize(lambda r: f(r, i, m), r)[1](2.0 * r),
    }


ROWS = (branch, many, counted, scanned, mapped, prefixes, region, written, masked)
CASES: dict[str, Any] = {
    f"{name} of {f.__name__}": of for f in ROWS for name, of in steps(f).items()
}
WAYS = [
    *((view, text, compiled) for view in ("global",) for text in LAYOUTS for compiled in (0, 1)),
    ("local", "[8@dp, 4]", 0), ("local", "[8@dp, 4]", 1),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


@pytest.mark.parametrize(("name", "way"), grid(CASES, WAYS))
def test_transforms_of_rows_are_those_of_jax(name: str, way: Any, mesh: dist.Mesh) -> None:
    view, layout, compiled = way
    f = CASES[name]

    def rows(x: Any, ids: Any) -> Any:
        return ts.vmap(lambda r, i: f(r, i, ts))(x, ids)

    run: Any = op.kernel(rows) if view == "local" else rows
    run = ts.jit(run) if compiled else run
    ids = ts.tensor(IDS, mesh, "[8@dp]") if layout else ts.tensor(IDS)
    x = ts.tensor(X, mesh, layout) if layout else ts.tensor(X)
    want = jax.vmap(lambda r, i: f(r, i, JAX))(X, IDS)
    np.testing.assert_allclose(run(x, ids).numpy(), want, rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("f", [branch, counted, prefixes, region], ids=lambda f: f.__name__)
def test_transforms_of_whole_tensors_are_those_of_jax(
    f: Any, name: str, layout: str, mesh: dist.Mesh
) -> None:
    x = ts.tensor(X, mesh, layout) if layout else ts.tensor(X)
    got = ts.jit(lambda x: getattr(ts, name)(lambda x: f(x, 0, ts))(x))(x)
    want = getattr(jax, name)(lambda x: f(x, 0, JAX))(X)
    np.testing.assert_allclose(got.numpy(), want, rtol=3e-4, atol=3e-5)
