"""Functions of JAX on tensors: values and gradients of JAX, on one device and split over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tessera as ts
from tessera.train.memory import program_bytes
from tests.quickly import quickly

MESH = ts.dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(11)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


# -- functions of (weights, rest), with the layouts of both on the mesh ----------------------------
def mlp(w: Any, x: Any, labels: Any) -> Any:
    h = jax.nn.relu(x @ w["up"] + w["bias"])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h @ w["down"]), labels[:, None], 1))


def attention(w: Any, x: Any) -> Any:
    q, k, v = jnp.moveaxis((x @ w["qkv"]).reshape(*x.shape[:2], 3, 4, 4), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", p, v) ** 2)


def rnn(w: Any, x: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = jnp.tanh(row @ w["in"] + h @ w["hidden"])
        return h, h

    last, every = lax.scan(step, jnp.zeros((x.shape[0], 16)), jnp.swapaxes(x, 0, 1))
    return jnp.sum(last**2) + jnp.mean(every)


def branches(w: Any, x: Any) -> Any:
    y = lax.cond(jnp.sum(x) > 0, lambda v: jnp.sin(v @ w), lambda v: (v @ w) ** 2, x)
    return jnp.sum(lax.switch(jnp.int32(1), [jnp.exp, jnp.cos], y))


def again(w: Any, x: Any) -> Any:
    layer = jax.checkpoint(
        lambda h: jnp.tanh(h @ w) + h, policy=jax.checkpoint_policies.dots_saveable
    )
    return jnp.sum(jax.checkpoint(lambda h: jnp.exp(layer(layer(h))))(x))


def images(w: Any, x: Any) -> Any:
    y = lax.conv_general_dilated(
        x, w["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = lax.reduce_window(jax.nn.gelu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(y.reshape(x.shape[0], -1) @ w["out"])


def tables(w: Any, ids: Any) -> Any:
    rows = w[ids]
    seen = jnp.zeros((16, 8)).at[ids].add(rows).at[ids[0, 0]].set(1.0)
    return jnp.sum(seen * seen) + jnp.sum(jnp.sort(rows, -1)[..., :3])


FUNCTIONS: dict[str, tuple[Callable[..., Any], Any, list[Any], Any, list[str]]] = {
    "mlp": (mlp, {"up": floats(8, 16), "bias": floats(16), "down": floats(16, 8)},
            [floats(8, 8), RNG.integers(0, 8, 8).astype(np.int32)],
            {"up": "[8, 16@tp]", "bias": "[16@tp]", "down": "[16@tp, 8]"}, ["[8@dp, 8]", "[8@dp]"]),
    "attention": (attention, {"qkv": floats(16, 48)}, [floats(4, 6, 16)],
                  {"qkv": "[16@tp, 48]"}, ["[4@dp, 6, 16]"]),
    "rnn": (rnn, {"in": floats(8, 16), "hidden": floats(16, 16) / 4}, [floats(4, 5, 8)],
            {"in": "[8, 16@tp]", "hidden": "[16, 16@tp]"}, ["[4@dp, 5, 8]"]),
    "branches": (branches, floats(8, 8), [floats(4, 8)], "[8, 8@tp]", ["[4@dp, 8]"]),
    "again": (again, floats(8, 8), [floats(4, 8)], "[8, 8@tp]", ["[4@dp, 8]"]),
    "images": (images, {"kernel": floats(3, 3, 4, 8), "out": floats(32, 4)}, [floats(4, 8, 8, 4)],
               {"kernel": "[3, 3, 4, 8@tp]", "out": "[32, 4]"}, ["[4@dp, 8, 8, 4]"]),
    "tables": (tables, floats(16, 8), [RNG.integers(0, 16, (4, 6)).astype(np.int32)],
               "[16@tp, 8]", ["[4@dp, 6]"]),
}  # fmt: skip


def same(ours: Any, theirs: Any, tol: float = 1e-4) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        largest = float(np.abs(b).max(initial=1.0))
        np.testing.assert_allclose(a.numpy(), b, rtol=tol, atol=tol * largest)


@pytest.mark.parametrize("how", ["at once", "jit", "mesh"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_jax(name: str, how: str) -> None:
    fn, w, rest, w_layout, rest_layouts = FUNCTIONS[name]
    mesh = MESH if how == "mesh" else None

    def put(x: Any, layout: Any) -> Any:
        if isinstance(x, dict):
            return {k: put(v, layout[k]) for k, v in x.items()}
        return ts.tensor(x, mesh=mesh, layout=layout if mesh else None)

    ours = ts.from_jax_function(fn)
    both = ts.value_and_grad(ours)
    run = both if how == "at once" else ts.jit(both)
    value, slope = run(put(w, w_layout), *map(put, rest, rest_layouts))
    want, want_slope = jax.value_and_grad(fn)(jax.tree.map(jnp.asarray, w), *rest)
    np.testing.assert_allclose(value.item(), want, rtol=1e-4)
    same(slope, want_slope)


def test_a_loop_of_unknown_length() -> None:
    def newton(x: Any) -> Any:
        return lax.while_loop(
            lambda v: jnp.max(jnp.abs(v * v - x)) > 1e-5, lambda v: 0.5 * (v + x / v), x
        )

    x = np.abs(floats(8)) + 0.5
    for mesh in (None, MESH):
        t = ts.tensor(x, mesh=mesh, layout="[8@dp]" if mesh else None)
        same(ts.jit(ts.from_jax_function(newton))(t), np.sqrt(x))


def test_random_numbers_are_those_of_jax() -> None:
    def draws(key: Any, x: Any) -> Any:
        first, second = jax.random.split(key)
        keep = jax.random.bernoulli(first, 0.5, x.shape)
        return jnp.where(keep, x / 0.5, 0), jax.random.normal(second, x.shape)

    x, raw = floats(8, 8), jax.random.PRNGKey(42)
    want = jax.jit(draws)(raw, x)
    ours = ts.from_jax_function(draws)
    split = ts.tensor(x, mesh=MESH, layout="[8@dp, 8@tp]")
    for got in (ours(raw, x), ts.jit(ours)(ts.tensor(raw), split), ours(jax.random.key(42), x)):
        np.testing.assert_array_equal(got[0].numpy(), want[0])
        np.testing.assert_allclose(got[1].numpy(), want[1], rtol=1e-6, atol=1e-6)


def test_trees_numbers_and_other_arguments() -> None:
    calls = []

    def fn(x: Any, how: Any, scale: float = 1.0, *, flag: bool) -> Any:
        calls.append(how["name"])
        return {"y": (x * scale,), "none": None} if flag else [x]

    ours = ts.from_jax_function(fn)
    x = ts.tensor([1.0, 2.0])
    assert ours(x, {"name": "a"}, 3.0, flag=True)["y"][0].numpy().tolist() == [3.0, 6.0]
    assert ours(x, {"name": "a"}, 3.0, flag=True)["none"] is None
    assert calls == ["a"]  # traced once for these arguments
    assert isinstance(ours(x, {"name": "a"}, flag=False), list)
    assert ours(ts.tensor([1, 2]), {"name": "b"}, 2, flag=True)["y"][0].dtype is ts.int32
    assert calls == ["a", "a", "b"]


def test_a_gradient_rule_of_the_user_is_kept() -> None:
    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    x = ts.tensor(floats(4))
    fn = ts.from_jax_function(lambda x: jnp.sum(rounded(x) * 3.0))
    assert ts.grad(fn(x), x).numpy().tolist() == [3.0] * 4
    assert ts.jit(lambda x: ts.grad(fn(x), x))(x).numpy().tolist() == [3.0] * 4


def test_vmap_of_a_function() -> None:
    fn, x = lambda r: jnp.cumsum(jax.nn.softmax(r)) * r[::-1], floats(5, 6)
    same(ts.vmap(ts.from_jax_function(fn))(ts.tensor(x)), jax.vmap(fn)(x))


def test_what_cannot_be_had_says_so() -> None:
    def whole_numbers(a: Any) -> Any:
        a = a.astype(int).reshape(1, 1, 2, 2)
        return lax.conv(a, a, (1, 1), "SAME")

    x = ts.tensor(floats(4))
    with pytest.raises(ts.UsageError, match=r"scatter_apply of JAX has no rule"):
        ts.from_jax_function(lambda x: x.at[1].apply(jnp.sin))(ts.ones(3))
    with pytest.raises(ts.UsageError, match=r"lgamma of JAX has no rule here") as said:
        ts.from_jax_function(jax.scipy.special.gammaln)(x)
    assert "ts.interop.jax_rule('lgamma')" in str(said.value)
    with pytest.raises(ts.UsageError, match=r"the JAX function raised TypeError: .*same shape"):
        ts.from_jax_function(lambda a: a @ jnp.ones((3, 2)))(x)
    with pytest.raises(ts.UsageError, match=r"the function"):
        ts.from_jax_function(3)
    with pytest.raises(ts.TesseraError, match=r"in +: conv_general_dilated, test_from_jax\.py:\d+"):
        ts.from_jax_function(whole_numbers)(x)


def test_a_rule_of_the_user() -> None:
    from tessera.lang.foreign.jax_rules import RULES

    try:
        ts.interop.jax_rule("lgamma")(lambda x, **_: x * 2)
        assert ts.from_jax_function(lax.lgamma)(ts.tensor([3.0])).item() == 6.0
    finally:
        del RULES.table["lgamma"]


def test_what_jax_computes_again_is_computed_again() -> None:
    def memory(wrap: Any) -> int:
        def layers(w: Any, x: Any) -> Any:
            for _ in range(8):
                x = wrap(lambda h: jnp.tanh(jnp.sin(h @ w) * h))(x)
            return jnp.sum(x**2)

        f = ts.from_jax_function(layers)

        @ts.jit
        def step(w: Any, x: Any) -> Any:
            return ts.grad(f(w, x), w)

        step(ts.ones((32, 32)), ts.ones((512, 32)))
        return program_bytes(step).temporary

    assert memory(jax.checkpoint) < 0.6 * memory(lambda f: f)
