"""Small models of Flax and Equinox, each with an input: `LINEN`, `EQUINOX` and `NNX` by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

RNG = np.random.default_rng(5)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


class Mlp(linen.Module):  # type: ignore[misc]  # a class of any type
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(4)(linen.relu(linen.Dense(16)(x)))


class Cnn(linen.Module):  # type: ignore[misc]
    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = linen.Conv(8, (3, 3), strides=(2, 2))(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = linen.avg_pool(linen.max_pool(x, (2, 2), (2, 2)), (2, 2), (1, 1), "SAME")
        return linen.Dense(5)(x.reshape(x.shape[0], -1))


class Encoder(linen.Module):  # type: ignore[misc]
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
        return x + linen.Dense(8)(linen.gelu(linen.Dense(16)(linen.LayerNorm()(x))))


class Recurrent(linen.Module):  # type: ignore[misc]
    cell: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.RNN(self.cell)(x)


class Vit(linen.Module):  # type: ignore[misc]
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(8, (4, 4), (4, 4))(x).reshape(x.shape[0], -1, 8)
        token = self.param("token", linen.initializers.normal(), (1, 1, 8))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 8)), x], 1)
        x = x + self.param("places", linen.initializers.normal(), (1, x.shape[1], 8))
        return linen.Dense(3)(Encoder()(x)[:, 0])


class Residual(linen.Module):  # type: ignore[misc]
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.GroupNorm(2)(linen.Conv(x.shape[-1], (3, 3), kernel_dilation=(2, 2))(x))
        return linen.silu(x + linen.Conv(x.shape[-1], (3, 3), feature_group_count=2)(y))


class Mixer(linen.Module):  # type: ignore[misc]
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = jnp.swapaxes(linen.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(linen.Dense(x.shape[1])(linen.gelu(linen.Dense(12)(y))), 1, 2)
        return x + linen.Dense(x.shape[2])(linen.gelu(linen.Dense(16)(linen.LayerNorm()(x))))


class Decoder(linen.Module):  # type: ignore[misc]
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        embed = linen.Embed(16, 8)
        x, mask = embed(ids), linen.make_causal_mask(ids)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.RMSNorm()(x), mask=mask)
        return embed.attend(linen.LayerNorm()(x))


class Autoencoder(eqx.Module):  # type: ignore[misc]
    down: Any
    up: Any
    norm: Any

    def __init__(self) -> None:
        a, b = jax.random.split(jax.random.key(0))
        self.down = eqx.nn.MLP(8, 2, 16, 2, activation=jnp.tanh, key=a)
        self.up = eqx.nn.Linear(2, 8, key=b)
        self.norm = eqx.nn.LayerNorm(8)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(lambda r: self.norm(self.up(self.down(r))))(x)


class EquinoxNet(eqx.Module):  # type: ignore[misc]
    layers: list[Any]

    def __init__(self) -> None:
        a, b = jax.random.split(jax.random.key(0))
        self.layers = [eqx.nn.Conv2d(3, 4, 3, key=a), eqx.nn.MaxPool2d(2), jnp.ravel,
                       eqx.nn.Linear(36, 2, key=b)]  # fmt: skip

    def __call__(self, x: Any) -> Any:
        def one(r: Any) -> Any:
            for layer in self.layers:
                r = layer(r)
            return r

        return jax.vmap(one)(x)


class EquinoxAttention(eqx.Module):  # type: ignore[misc]
    attention: Any
    norm: Any

    def __init__(self) -> None:
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
        self.norm = eqx.nn.RMSNorm(8)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(lambda r: r + self.attention(*[jax.vmap(self.norm)(r)] * 3))(x)


class NnxNet(nnx.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.norm(self.first(x))))


LINEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "mlp": (Mlp, floats(8, 6)),
    "cnn": (Cnn, floats(8, 8, 8, 3)),
    "encoder": (Encoder, floats(4, 5, 8)),
    "lstm": (lambda: Recurrent(linen.OptimizedLSTMCell(8)), floats(4, 5, 6)),
    "gru": (lambda: Recurrent(linen.GRUCell(8)), floats(4, 5, 6)),
    "vit": (Vit, floats(4, 8, 8, 3)),
    "residual": (Residual, floats(4, 6, 6, 4)),
    "mixer": (Mixer, floats(4, 6, 8)),
    "decoder": (Decoder, RNG.integers(0, 16, (4, 6)).astype(np.int32)),
}
EQUINOX: dict[str, tuple[Callable[[], Any], Any]] = {
    "autoencoder": (Autoencoder, floats(4, 8)),
    "conv": (EquinoxNet, floats(4, 3, 6, 6)),
    "attention": (EquinoxAttention, floats(4, 5, 8)),
}
NNX: dict[str, tuple[Callable[[], Any], Any]] = {"nnx": (NnxNet, floats(8, 8))}
MAKERS = {**LINEN, **EQUINOX, **NNX}


# -- for any of them: their call and gradients ----------------------------------------------------
def dotted(tree: Any) -> dict[str, Any]:
    """The leaves by their paths."""

    def name(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))))

    rows = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(map(name, path)): x for path, x in rows}


def started(model: Any, x: Any) -> tuple[Any, ...]:
    """(run, weights, *arguments of `ts.from_jax_model`): `run(weights)` is the result for `x`."""
    x = jnp.asarray(x)
    if isinstance(model, linen.Module):
        variables = model.init(jax.random.key(1), x)
        rest = {k: v for k, v in variables.items() if k != "params"}

        def run(params: Any) -> Any:
            return model.apply({**rest, "params": params}, x, mutable=["batch_stats"])[0]

        return run, variables["params"], model, variables
    if isinstance(model, nnx.Module):
        graph, params, others = nnx.split(model, nnx.Param, ...)
        return lambda p: nnx.merge(graph, p, others, copy=True)(x), params, model
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    return lambda p: eqx.combine(p, rest)(x), weights, model


def gradients_of(loss: Callable[[Any], Any], weights: Any) -> dict[str, Any]:
    found = jax.grad(loss)(weights)
    return dotted(nnx.to_pure_dict(found) if isinstance(found, nnx.State) else found)
