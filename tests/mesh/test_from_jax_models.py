"""Models of Flax, Equinox and Haiku as modules: values and gradients of their own, and state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tests.quickly import quickly

linen: Any = pytest.importorskip("flax.linen", reason="pip install flax")
nnx: Any = pytest.importorskip("flax.nnx", reason="pip install flax")
eqx: Any = pytest.importorskip("equinox", reason="pip install equinox")
from tests.jax_models import EQUINOX, LINEN, Autoencoder, Cnn, Mlp, NnxNet, dotted, floats  # noqa: E402

MESH = ts.dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


def loss(y: Any) -> Any:
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))


def compared(model: Any, x: Any, want: Any, slopes: dict[str, Any]) -> None:
    """The result and the gradients by all weights, at once and recorded with a split batch."""
    total = ts.from_jax_function(loss)
    for mesh in (None, MESH):
        layout = f"[{x.shape[0]}@dp, {', '.join(map(str, x.shape[1:]))}]" if mesh else None
        t = ts.tensor(x, mesh=mesh, layout=layout)

        def run(model: Any, t: Any) -> Any:
            y = model(t)
            return y, ts.grad(total(y), model)

        y, g = (ts.jit(run) if mesh else run)(model, t)
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-4)
        assert set(g) == set(slopes)
        largest = max(float(jnp.abs(slope).max()) for slope in slopes.values())
        for name, slope in slopes.items():
            limit = 1e-4 * max(float(jnp.abs(slope).max()), 1e-2 * largest)
            np.testing.assert_allclose(g[name].numpy(), slope, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("name", LINEN)
def test_linen(name: str) -> None:
    make, x = LINEN[name]
    module = make()
    variables = module.init(jax.random.key(1), x)

    def total(params: Any) -> tuple[Any, Any]:
        y = module.apply({**variables, "params": params}, x, mutable=["batch_stats"])[0]
        return loss(y), y

    slopes, want = jax.grad(total, has_aux=True)(variables["params"])
    model = ts.from_jax_model(module, variables)
    assert set(model.parameters()) == set(dotted(variables["params"]))
    compared(model, x, want, dotted(slopes))


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox(name: str) -> None:
    make, x = EQUINOX[name]
    net = make()
    slopes = eqx.filter_grad(lambda m: loss(m(jnp.asarray(x))))(net)
    compared(ts.from_jax_model(net), x, net(jnp.asarray(x)), dotted(slopes))


def test_nnx() -> None:
    x = floats(8, 8)
    net = NnxNet()
    model = ts.from_jax_model(net)
    assert set(dict(model.named_buffers())) >= {"norm.mean", "norm.var"}
    slopes = nnx.to_pure_dict(nnx.grad(lambda m: loss(m(jnp.asarray(x))))(NnxNet()))
    compared(model, x, net(jnp.asarray(x)), dotted(slopes))


def test_batch_statistics_are_written_back() -> None:
    module, x = Cnn(), floats(8, 8, 8, 3)
    variables = module.init(jax.random.key(1), x)
    model = ts.from_jax_model(module, variables)
    for call in (model, ts.jit(lambda m, x: m(x))):
        _, new = module.apply(variables, x, mutable=["batch_stats"])
        _ = call(x) if call is model else call(model, ts.tensor(x))
        variables = {**variables, **new}
        for name, want in dotted(new).items():
            np.testing.assert_allclose(model.state_dict()[name].numpy(), want, rtol=1e-5, atol=1e-6)
    want = module.apply(variables, x, train=False)
    np.testing.assert_allclose(model(x, train=False).numpy(), want, rtol=1e-4, atol=1e-4)


def test_the_tree_comes_back_and_goes_in() -> None:
    module, x = Mlp(), floats(2, 6)
    one, two = (module.init(jax.random.key(i), x) for i in (1, 2))
    model = ts.from_jax_model(module, one)
    model.load_jax_tree(two)
    back = model.jax_tree()
    assert jax.tree.structure(back) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, back, two)
    model.load_state_dict(dotted(one["params"]))
    np.testing.assert_allclose(model(x).numpy(), module.apply(one, x), rtol=1e-4, atol=1e-5)
    net = ts.from_jax_model(Autoencoder())
    y = floats(3, 8)
    np.testing.assert_allclose(net.jax_tree()(jnp.asarray(y)), net(y).numpy(), rtol=1e-4, atol=1e-5)


def test_keys_for_dropout() -> None:
    drop, x = linen.Dropout(0.5, deterministic=False), np.ones((8, 16), np.float32)
    model = ts.from_jax_model(drop, {"params": {}}, rngs=("dropout",))
    ts.seed(1)
    first, second = model(x).numpy(), model(x).numpy()
    assert set(np.unique(first)) == {0.0, 2.0} and (first != second).any()
    key = jax.random.PRNGKey(4)
    want = drop.apply({"params": {}}, x, rngs={"dropout": key})
    np.testing.assert_array_equal(model(x, rngs={"dropout": key}).numpy(), want)


def test_haiku_and_plain_functions() -> None:
    x = floats(4, 6)
    plain = ts.from_jax_model(lambda p, x: x @ p["w"] + p["b"][0], {"w": floats(6, 2), "b": [0.5]})
    assert list(plain.state_dict()) == ["w"]
    assert plain(x).shape == (4, 2)
    counted = ts.from_jax_model(lambda p, s, x: (x * p, s + 1), jnp.float32(2), jnp.int32(0))
    counted(x), counted(x)
    assert counted.state_dict()["state"].item() == 2
    assert counted.params.item() == 2
    hk = pytest.importorskip("haiku", reason="pip install dm-haiku")
    net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), True))
    params, state = net.init(jax.random.key(0), x)
    model = ts.from_jax_model(net, params, state)
    want, new = net.apply(params, state, None, x)
    np.testing.assert_allclose(model(x).numpy(), want, rtol=1e-4, atol=1e-4)
    assert model.state_dict()["state.batch_norm/~/mean_ema.counter"].item() == 1
    drop = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))
    key = jax.random.PRNGKey(3)
    given = ts.from_jax_model(drop, {}, rngs=("any",))
    np.testing.assert_array_equal(given(x, rng=key).numpy(), drop.apply({}, key, x))
    assert (given(x).numpy() != given(x).numpy()).any()
    assert new


def test_what_does_not_fit_says_so() -> None:
    x = floats(2, 6)
    with pytest.raises(ts.UsageError, match=r"module\.init\(key, x\)"):
        ts.from_jax_model(Mlp(), {"w": x})
    with pytest.raises(ts.UsageError, match="give a model of Flax, Equinox or Haiku, or apply"):
        ts.from_jax_model(3)
    with pytest.raises(ts.UsageError, match="give the tree of weights beside the function"):
        ts.from_jax_model(lambda p, x: x)
    with pytest.raises(ts.UsageError, match="'train' is an attribute of modules"):
        ts.from_jax_model(lambda p, x: x, {"train": x})


def test_a_weight_at_the_top_has_an_adapter() -> None:
    model = ts.from_jax_model(lambda p, x: jnp.tanh(x @ p["w"]), {"w": jnp.ones((4, 3))})
    ts.nn.lora(model, 2)
    model.parameters()["w_lora_b"].put(ts.ones((2, 3)))
    a, x = model.parameters()["w_lora_a"].numpy(), np.full((2, 4), 0.1, np.float32)
    want = np.tanh(x @ (1 + a @ np.ones((2, 3), np.float32)))
    np.testing.assert_allclose(model(ts.tensor(x)).numpy(), want, rtol=0, atol=1e-6)
    ts.nn.merge_lora(model)
    np.testing.assert_allclose(model(ts.tensor(x)).numpy(), want, rtol=0, atol=1e-6)
