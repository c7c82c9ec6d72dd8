"""The reference GPT training step: plain JAX with `shard_map`, written by hand.

It is kept straightforward: `jnp` operations, `jax.grad`, AdamW written out, one `psum` of the
gradients over the data axis `dp`, and Megatron's split of every layer over the tensor axis `tp`
(columns of qkv and of the MLP's first matrix, rows of the second ones, the vocabulary of the head).
Nothing in it is blocked, tiled or recomputed.

Run it: `python bench/peers/jax_gpt.py --dp 2 --steps 5` prints one line of JSON.

Shape suffixes: B batch, S sequence, D width, H heads, K width of a head, V vocabulary, F 4·D.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
AXES = ("dp", "tp")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model and of the batch, and the optimizer's constants."""

    width: int = 256
    layers: int = 4
    heads: int = 8
    vocab: int = 4096
    seq: int = 256
    batch: int = 16
    tied: bool = False
    bias: bool = False  # biases of the linear maps; layer norms always have gain and bias
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    bf16: bool = False  # products of bf16; weights, norms and the loss are f32
    fused: bool = False  # attention by the kernel of cuDNN

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape, in the order of use."""
        d, f = self.width, 4 * self.width
        out: dict[str, tuple[int, ...]] = {"wte": (self.vocab, d), "wpe": (self.seq, d)}
        for i in range(self.layers):
            out |= {
                f"h{i}.ln1.g": (d,),
                f"h{i}.ln1.b": (d,),
                f"h{i}.qkv.w": (d, 3, d),
                f"h{i}.out.w": (d, d),
                f"h{i}.ln2.g": (d,),
                f"h{i}.ln2.b": (d,),
                f"h{i}.up.w": (d, f),
                f"h{i}.down.w": (f, d),
            }
            if self.bias:
                out |= {
                    f"h{i}.qkv.b": (3, d),
                    f"h{i}.out.b": (d,),
                    f"h{i}.up.b": (f,),
                    f"h{i}.down.b": (d,),
                }
        out |= {"lnf.g": (d,), "lnf.b": (d,)}
        if not self.tied:
            out["head.w"] = (d, self.vocab)
        return out


def init(config: GPTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """f32 weights: normal(0.02), the two maps into the residual scaled by 1/sqrt(2·layers).

    >>> sorted(init(GPTConfig(layers=0, vocab=8, seq=4)))
    ['head.w', 'lnf.b', 'lnf.g', 'wpe', 'wte']
    """
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in config.shapes().items():
        if name.endswith(".g"):
            out[name] = np.ones(shape, np.float32)
        elif name.endswith(".b"):
            out[name] = np.zeros(shape, np.float32)
        else:
            residual = name.endswith(("out.w", "down.w"))
            scale = 0.02 / np.sqrt(2 * config.layers) if residual else 0.02
            out[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return out


def batch(config: GPTConfig, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and the same tokens shifted by one: two i32[B, S] arrays."""
    rng = np.random.default_rng(seed)
    stream = rng.integers(0, config.vocab, (config.batch, config.seq + 1), dtype=np.int32)
    return stream[:, :-1], stream[:, 1:]


def spec_of(name: str, config: GPTConfig) -> P:
    """The PartitionSpec of a parameter over `tp`; no parameter is split over `dp`."""
    match name.split(".")[-2:]:
        case ["qkv", "w"]:
            return P(None, None, "tp")
        case ["qkv" | "up", _]:
            return P(None, "tp") if name.endswith(("qkv.b", "up.w")) else P("tp")
        case [("out" | "down"), "w"]:
            return P("tp", None)
        case ["head", "w"]:
            return P(None, "tp")
        case ["wte"] if config.tied:
            return P("tp", None)
    return P()


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * gain + bias


def narrow(x: jax.Array, config: GPTConfig) -> jax.Array:
    return x.astype(jnp.bfloat16) if config.bf16 else x


def embed(p: Params, tokens_BS: jax.Array, config: GPTConfig) -> jax.Array:
    if not config.tied:
        return p["wte"][tokens_BS] + p["wpe"]
    # The table's rows are split over tp: each device looks up its own, and a sum over tp adds them.
    rows = p["wte"].shape[0]
    local = tokens_BS - lax.axis_index("tp") * rows
    here = (local >= 0) & (local < rows)
    x_BSD = jnp.where(here[..., None], p["wte"][jnp.where(here, local, 0)], 0.0)
    return lax.psum(x_BSD, "tp") + p["wpe"]


def attention(p: Params, i: int, x_BSD: jax.Array, config: GPTConfig) -> jax.Array:
    k_width = config.head_width
    x_BSD = narrow(x_BSD, config)
    qkv = jnp.einsum("bsd,dce->bsce", x_BSD, narrow(p[f"h{i}.qkv.w"], config))
    if config.bias:
        qkv = qkv + p[f"h{i}.qkv.b"]
    b, s, _, e = qkv.shape  # e: the columns of this device's heads
    q, k, v = (qkv[:, :, c].reshape(b, s, e // k_width, k_width) for c in range(3))
    if config.fused:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    else:
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k).astype(np.float32)
        causal = jnp.tril(jnp.ones((s, s), bool))
        scores = jnp.where(causal, scores / np.sqrt(k_width).astype(np.float32), -jnp.inf)
        probs = narrow(jax.nn.softmax(scores, axis=-1), config)
        mixed = jnp.einsum("bhqt,bthk->bqhk", probs, v)
    y = lax.psum(mixed.reshape(b, s, e) @ narrow(p[f"h{i}.out.w"], config), "tp")
    return y + p[f"h{i}.out.b"] if config.bias else y


def mlp(p: Params, i: int, x_BSD: jax.Array, config: GPTConfig) -> jax.Array:
    h_BSF = narrow(x_BSD, config) @ narrow(p[f"h{i}.up.w"], config)
    if config.bias:
        h_BSF = h_BSF + p[f"h{i}.up.b"]
    y = lax.psum(jax.nn.gelu(h_BSF, approximate=True) @ narrow(p[f"h{i}.down.w"], config), "tp")
    return y + p[f"h{i}.down.b"] if config.bias else y


def head_loss(p: Params, x_BSD: jax.Array, labels_BS: jax.Array, config: GPTConfig) -> jax.Array:
    """The mean cross entropy over the local tokens, with the vocabulary split over tp."""
    w_DV = p["wte"].T if config.tied else p["head.w"]
    logits = (narrow(x_BSD, config) @ narrow(w_DV, config)).astype(jnp.float32)
    top = lax.pmax(jnp.max(lax.stop_gradient(logits), -1), "tp")
    logits = logits - top[..., None]
    total = lax.psum(jnp.sum(jnp.exp(logits), -1), "tp")
    columns = logits.shape[-1]
    local = labels_BS - lax.axis_index("tp") * columns
    here = (local >= 0) & (local < columns)
    picked = jnp.take_along_axis(logits, jnp.where(here, local, 0)[..., None], -1)[..., 0]
    picked = lax.psum(jnp.where(here, picked, 0.0), "tp")
    return jnp.mean(jnp.log(total) - picked)


def loss_fn(p: Params, tokens_BS: jax.Array, labels_BS: jax.Array, config: GPTConfig) -> jax.Array:
    x = embed(p, tokens_BS, config)
    for i in range(config.layers):
        x = x + attention(p, i, layer_norm(x, p[f"h{i}.ln1.g"], p[f"h{i}.ln1.b"]), config)
        x = x + mlp(p, i, layer_norm(x, p[f"h{i}.ln2.g"], p[f"h{i}.ln2.b"]), config)
    return head_loss(p, layer_norm(x, p["lnf.g"], p["lnf.b"]), labels_BS, config)


def adamw(p: Params, grads: Params, opt: Params, config: GPTConfig) -> tuple[Params, Params]:
    c = config
    count = opt["count"] + 1
    t = count.astype(jnp.float32)
    fix1, fix2 = 1 - c.beta1**t, 1 - c.beta2**t
    mu = {n: c.beta1 * opt["mu"][n] + (1 - c.beta1) * grads[n] for n in p}
    nu = {n: c.beta2 * opt["nu"][n] + (1 - c.beta2) * jnp.square(grads[n]) for n in p}

    def update(n: str) -> jax.Array:
        step = (mu[n] / fix1) / (jnp.sqrt(nu[n] / fix2) + c.eps)
        decay = c.weight_decay if p[n].ndim > 1 else 0.0
        new: jax.Array = p[n] - c.lr * (step + decay * p[n])
        return new

    return {n: update(n) for n in p}, {"mu": mu, "nu": nu, "count": count}


def train_step(
    p: Params, opt: Params, tokens_BS: jax.Array, labels_BS: jax.Array, *, config: GPTConfig
) -> tuple[jax.Array, Params, Params]:
    """The program of one device: local forward and backward, then one mean over dp."""
    # Marked as varying over dp, the weights give local gradients; the sum below is then explicit.
    local = lax.pcast(p, "dp", to="varying")
    loss, grads = jax.value_and_grad(loss_fn)(local, tokens_BS, labels_BS, config)
    loss, grads = lax.pmean((loss, grads), "dp")
    p, opt = adamw(p, grads, opt, config)
    return loss, p, opt


Placed = tuple[Any, Params, Params, Callable[..., tuple[jax.Array, jax.Array]]]


def make_step(config: GPTConfig, mesh_shape: Mapping[str, int], seed: int = 0) -> Placed:
    """Returns the jitted step and its placed inputs on `mesh_shape`, such as `{"dp": 2}`.

    The result is `(step, params, opt, place_batch)`; `step(params, opt, tokens, labels)` returns
    `(loss, params, opt)` and donates its params and opt.
    """
    if unknown := set(mesh_shape) - set(AXES):
        raise ValueError(f"make_step: mesh axes {sorted(unknown)} are not among {AXES}")
    sizes = tuple(mesh_shape.get(axis, 1) for axis in AXES)
    devices = np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes)
    mesh = Mesh(devices, AXES)
    specs = {n: spec_of(n, config) for n in config.shapes()}
    opt_specs: Params = {"mu": specs, "nu": specs, "count": P()}
    data = P("dp", None)

    def place(tree: Any, spec_tree: Any) -> Any:
        return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, spec_tree)

    weights = init(config, seed)
    params = place(weights, specs)
    zeros = {n: np.zeros_like(a) for n, a in weights.items()}
    opt = place({"mu": zeros, "nu": zeros, "count": np.int32(0)}, opt_specs)

    def place_batch(tokens: np.ndarray, labels: np.ndarray) -> tuple[jax.Array, jax.Array]:
        placed: tuple[jax.Array, jax.Array] = place((tokens, labels), (data, data))
        return placed

    step = jax.jit(
        jax.shard_map(
            partial(train_step, config=config),
            mesh=mesh,
            in_specs=(specs, opt_specs, data, data),
            out_specs=(P(), specs, opt_specs),
        ),
        donate_argnums=(0, 1),
    )
    return step, params, opt, place_batch


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    default = GPTConfig()
    ap.add_argument("--dp", type=int, default=1)
    ap.add_argument("--tp", type=int, default=1)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--layers", type=int, default=default.layers)
    ap.add_argument("--vocab", type=int, default=default.vocab)
    ap.add_argument("--batch", type=int, default=default.batch)
    ap.add_argument("--seq", type=int, default=default.seq)
    ap.add_argument("--tied", action="store_true")
    ap.add_argument("--bias", action="store_true")
    a = ap.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    config = GPTConfig(
        layers=a.layers, vocab=a.vocab, batch=a.batch, seq=a.seq, tied=a.tied, bias=a.bias
    )
    step, p, opt, place_batch = make_step(config, {"dp": a.dp, "tp": a.tp})
    tokens, labels = place_batch(*batch(config))
    start = time.perf_counter()
    compiled = step.lower(p, opt, tokens, labels).compile()
    compile_s = time.perf_counter() - start
    losses, step_s = [], []
    for _ in range(a.steps + 1):
        start = time.perf_counter()
        loss, p, opt = compiled(p, opt, tokens, labels)
        jax.block_until_ready((loss, p, opt))
        step_s.append(time.perf_counter() - start)
        losses.append(float(loss))
    print(
        json.dumps(
            {
                "peer": "jax",
                "mesh": {"dp": a.dp, "tp": a.tp},
                "step_s": statistics.median(step_s[1:]),
                "all_step_s": step_s[1:],
                "trace_and_compile_s": compile_s,
                "losses": losses,
            }
        )
    )


if __name__ == "__main__":
    main()
