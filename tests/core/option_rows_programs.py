"""Rows of the option table: layers, meshes, recording, pipelines, loss scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, optim, pipeline
from tessera.core import devices
from tests.core.option_rows import (
    COMMON,
    DECAY,
    EP,
    HEADS,
    IDS,
    IMAGE,
    LINE,
    MESH,
    OTHER,
    RNG,
    SQUARE,
    STAGES,
    TOKENS,
    VOLUME,
    A,
    drawn,
    row,
    seen,
    sharded,
    stepped,
)  # fmt: skip

# -- layers ----------------------------------------------------------------------------------------
X16 = RNG.normal(size=(4, 4)).astype(np.float32)


def layer(kind: Any, *args: Any, on: Any = X16) -> Callable[..., Any]:
    """Returns a function that gives the weights and the result of a layer."""

    def run(**k: Any) -> Any:
        ts.seed(0)
        made = kind(*args, **k)
        return made.parameters(), made(on)

    return run


row("tessera.nn.Linear", layer(nn.Linear, 4, 4), bias=False, std=0.3)
row("tessera.nn.Embedding", layer(nn.Embedding, 4, 3, on=IDS), std=0.5)
row("tessera.nn.LayerNorm", layer(nn.LayerNorm, 4), eps=0.5)
row("tessera.nn.RMSNorm", layer(nn.RMSNorm, 4), eps=0.5)
row("tessera.nn.GroupNorm", layer(nn.GroupNorm, 2, 4, on=IMAGE), eps=0.5)
row("tessera.nn.Conv1d", layer(nn.Conv1d, 4, 4, 3, on=LINE), stride=2, padding=1, dilation=2,
    groups=2, bias=False)  # fmt: skip
row("tessera.nn.Conv2d", layer(nn.Conv2d, 4, 4, 3, on=IMAGE), stride=2, padding=1, dilation=2,
    groups=2, bias=False)  # fmt: skip
row("tessera.nn.Conv3d", layer(nn.Conv3d, 4, 4, 2, on=VOLUME), stride=2, padding=1, dilation=2,
    groups=2, bias=False)  # fmt: skip
for kind, x in ((nn.ConvTranspose1d, LINE), (nn.ConvTranspose2d, IMAGE)):
    row(f"tessera.nn.{kind.__name__}", layer(kind, 4, 4, 3, on=x), {"stride": 3}, stride=2,
        padding=1, output_padding=1, dilation=2, groups=2, bias=False)  # fmt: skip


def batch_normed(**k: Any) -> Any:
    made = nn.BatchNorm(4, **k)
    return made(IMAGE), made.state_dict()


row("tessera.nn.BatchNorm", batch_normed, momentum=0.5, eps=0.5)
row("tessera.nn.Parameter", lambda **k: nn.Parameter(3, 4, **k), {"init": "ones"},
    init="zeros", dtype=ts.bf16, name="w")  # fmt: skip
row("tessera.nn.rotary", lambda **k: nn.rotary(HEADS, **k), base=100.0,
    positions=np.arange(4)[::-1].copy())  # fmt: skip
row("tessera.nn.mlp", lambda **k: graph.trace(
    lambda x, w: nn.mlp(x, w, w, **k), A, SQUARE).text, up_bias=A[0], down_bias=A[0],
    activation=nn.relu, rows=1)  # fmt: skip
row("tessera.nn.flash_attention", lambda **k: graph.trace(
    lambda x: nn.flash_attention(x, x, x, **k), np.tile(HEADS, (4, 1, 1, 1))).text,
    causal=True, scale=2.0, rows=1, bias=HEADS[0, :, 0], mask=np.tri(4, dtype=bool),
    implementation="sequences")  # fmt: skip
row("tessera.nn.zigzag", lambda **k: nn.zigzag(CUBE8, 2, **k), dim=0)
row("tessera.nn.unzigzag", lambda **k: nn.unzigzag(CUBE8, 2, **k), dim=0)
CUBE8 = RNG.normal(size=(8, 8, 8)).astype(np.float32)
row("tessera.nn.MoE", layer(nn.MoE, 4, 4, 4, on=TOKENS[..., :4]), {"capacity": 1.0}, k=1,
    router="sigmoid", gated=True, shared=4, activation="relu", capacity=2.0, groups=2,
    normalize=False, mesh=EP)  # fmt: skip

# -- meshes and collectives ------------------------------------------------------------------------
row("tessera.dist.Mesh", lambda **k: dist.Mesh(("dp", "tp"), **k), {"devices": 8},
    devices=4, shape={"dp": 8, "tp": 1})  # fmt: skip


def of_eight(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run` with a device count of eight, so that no engine starts to count devices."""

    def counted(**k: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "_providers", [(lambda: 8, lambda: 1)])
            return run(**k)

    return counted


row("tessera.mesh.auto", of_eight(lambda **k: ts.mesh.auto(**k).text()), axes=("dp", "tp"))
row("tessera.dist.tensor", drawn(dist.tensor, (8, 8)), {"mesh": MESH}, mesh=OTHER,
    layout="[8@dp, 8]", dtype=ts.bf16, name="w", init="zeros")  # fmt: skip
row("tessera.dist.redistribute", lambda **k: dist.redistribute(sharded(), **k),
    {"layout": "[8, 8]"}, layout="[8@dp, 8]")  # fmt: skip
row("tessera.dist.all_gather", lambda **k: dist.all_gather(sharded(), **k), {"axis": "dp"},
    axis="tp")  # fmt: skip
row(
    "tessera.dist.strategy",
    lambda **k: dist.strategy("zero_redundancy_optimizer", **k),
    axis="tp",
    stage=1,
)
row("tessera.dist.inspect", lambda **k: dist.inspect(compiled(), **k), topology="h100")


def compiled() -> Any:
    made = ts.jit(lambda x: x.sum())
    made.plan(sharded())
    return made


# -- recording -------------------------------------------------------------------------------------
def traced(fn: Any, *args: Any) -> str:
    return graph.trace(fn, *args).text


row("tessera.autocast", lambda **k: traced(under(lambda: ts.autocast(**k)), A, SQUARE),
    dtype=ts.f16, enabled=False)  # fmt: skip


def under(context: Any) -> Any:
    def run(x: Any, w: Any) -> Any:
        with context():
            return x @ w

    return run


def looped(**k: Any) -> str:
    def run(w: Any, x: Any) -> Any:
        return ts.grad(ts.scan(lambda h, r: (ts.tanh(h * w + r), h), w, x, **k)[0].sum(), w)

    return traced(run, A[0], A)


row("tessera.scan", looped, reverse=True, policy="recompute", name="layers", unroll=2)
row("tessera.scan without rows", lambda **k: traced(
    lambda x: ts.scan(lambda h, _: (ts.tanh(h), ()), x, **k)[0], A), {"length": 3},
    length=2, xs=A)  # fmt: skip
row("tessera.fori_loop", lambda **k: traced(
    lambda x: ts.grad(ts.fori_loop(0, 4, lambda i, h: ts.tanh(h), x, **k).sum(), x), A),
    policy="recompute", unroll=2)  # fmt: skip
row("tessera.map", lambda **k: traced(
    lambda x: ts.grad(ts.map(lambda r: ts.tanh(ts.exp(r)), x, **k).sum(), x), A),
    policy="recompute", batch_size=2)  # fmt: skip
row("tessera.associative_scan", lambda **k: seen(
    ts.associative_scan(lambda a, b: a * 0.5 + b, ts.tensor(SQUARE), **k)),
    reverse=True, dim=1)  # fmt: skip
row("tessera.remat", lambda **k: traced(
    lambda x, w: ts.grad(ts.remat(lambda r: ts.tanh(r @ w), **k)(x).sum(), w), A, SQUARE),
    policy="everything")  # fmt: skip
for name in ("jacfwd", "jacrev", "hessian"):
    row(f"tessera.{name}", lambda name=name, **k: seen(getattr(ts, name)(
        lambda x, y: ts.sum(ts.sin(x) * y, -1) if name != "hessian" else ts.sum(ts.sin(x) * y**3),
        **k)(ts.tensor(A), ts.tensor(A))), argnums=1)  # fmt: skip
row("tessera.nonzero", lambda **k: [seen(t) for t in ts.nonzero(ts.tensor(A > 0), **k)],
    {"size": 14}, size=13, fill_value=7)  # fmt: skip
row("tessera.scatter", lambda **k: seen(ts.scatter(
    ts.tensor(SQUARE), ts.tensor([[1, 0, 2, 3]]), ts.tensor(SQUARE[:1] * 9.0), **k)),
    {"dim": 0}, dim=1, op="add")  # fmt: skip
row("tessera.scatter outside", lambda **k: seen(ts.jit(
    lambda i: ts.scatter(ts.zeros(3), i + 3, 1.0, **k))(ts.tensor([1]))), mode="drop")  # fmt: skip
row("tessera.map_chunks", lambda **k: traced(
    lambda x, w: ts.grad(ts.map_chunks(lambda r: ts.tanh(r @ w), x, rows=1, **k).sum(), w),
    A, SQUARE), policy="save")  # fmt: skip
row("tessera.graph.trace", lambda **k: graph.trace(lambda x: ts.sum(x), sharded().type, **k).text,
    reduce_partial=False)  # fmt: skip
row("tessera.grad", lambda **k: traced(
    lambda x, w: ts.grad((x @ w).sum(), w, **k), sharded("[8@dp, 8]").type, sharded("[8, 8]").type),
    reduce_partial=False)  # fmt: skip


row("tessera.pipeline.run", lambda **k: run_plan(**k), {"mesh_axes": ("pp",), "mesh": STAGES},
    schedule="GPipe", microbatches=8)  # fmt: skip


def run_plan(**k: Any) -> str:
    model = pipeline.run(**k)(lambda x: ts.tanh(ts.tanh(ts.tanh(x * 2.0) * 3.0) * 4.0))
    return ts.jit(lambda x: model(x)).plan(np.ones((32, 8), np.float32)).text


def named_plan(**k: Any) -> str:
    def named(x: Any) -> Any:
        with ts.named_scope("first"):
            x = ts.tanh(ts.tanh(ts.tanh(x * 2.0) * 3.0) * 4.0)
        with ts.named_scope("second"):
            return ts.tanh(x * 5.0)

    model = pipeline.run(**k)(named)
    return ts.jit(lambda x: model(x)).plan(np.ones((32, 8), np.float32)).text


row(
    "tessera.pipeline.run of named modules",
    named_plan,
    {"mesh_axes": ("pp",), "mesh": STAGES},
    cut_at="second",
)


def composed(make: Any) -> Callable[..., Any]:
    def run(**k: Any) -> str:
        parts = [lambda x, i=i: ts.tanh(x * float(i + 2)) for i in range(4)]
        model = make(parts, **k)
        return ts.jit(lambda x: model(x)).plan(np.ones((32, 8), np.float32)).text

    return run


row("tessera.pipeline.compose", composed(lambda parts, **k: pipeline.compose(4, parts, **k)),
    {"mesh": dist.Mesh(("dp", "pp"), shape={"dp": 4, "pp": 2}), "axis": "pp",
     "schedule": "Interleaved1F1B"},
    mesh=dist.Mesh(("pp", "dp"), shape={"dp": 2, "pp": 2}), schedule="GPipe",
    microbatches=8)  # fmt: skip


# -- optimizers, the rest --------------------------------------------------------------------------
row("tessera.optim.Adafactor", stepped(optim.Adafactor), DECAY, **COMMON, decay=0.3, eps=0.1,
    clip=0.1, factor_from=2, momentum=0.5, offset=3)  # fmt: skip


def scaled(**k: Any) -> Any:
    scale = optim.LossScale(**k)
    state, said = scale.init(), []
    for finite in (True, True, False, False, False):
        state = scale.update(ts.tensor(finite), state)
        said.append(seen(state["scale"]))
    return said


row("tessera.optim.LossScale", scaled, {"growth_interval": 2}, init_scale=8.0, growth_factor=4.0,
    backoff_factor=0.25, growth_interval=1, min_scale=20000.0, max_scale=33000.0)  # fmt: skip


# -- more functions on tensors ---------------------------------------------------------------------
BOOLS = A > 0
for name in ("all", "any"):
    row(f"tessera.{name}", lambda name=name, **k: getattr(ts, name)(BOOLS, **k), dim=0,
        keepdims=True)  # fmt: skip
for name in ("cummax", "cummin", "cumprod"):
    row(f"tessera.{name}", lambda name=name, **k: getattr(ts, name)(A, **k), dim=0)
row("tessera.std", lambda **k: ts.std(A, **k), dim=0, keepdims=True, correction=2)
row("tessera.clip", lambda **k: ts.clip(A, **k), {"min": -0.1, "max": 0.1}, min=0.0, max=0.0)
row("tessera.roll", lambda **k: ts.roll(A, 1, **k), dims=0)
row("tessera.repeat_interleave", lambda **k: ts.repeat_interleave(A, 2, **k), dim=0)
row("tessera.pad", lambda **k: ts.pad(A, (1, 1), **k), value=1.0, mode="reflect")
row("tessera.squeeze", lambda **k: ts.squeeze(LINE[:, :1], **k), dim=0)
row("tessera.flatten", lambda **k: ts.flatten(LINE, **k), start_dim=1, end_dim=1)
row("tessera.linspace", lambda **k: ts.linspace(0.0, 1.0, 5, **k), dtype=ts.bf16)
row("tessera.nn.elu", lambda **k: nn.elu(A, **k), alpha=2.0)
row("tessera.nn.leaky_relu", lambda **k: nn.leaky_relu(A, **k), negative_slope=0.5)
row("tessera.nn.softplus", lambda **k: nn.softplus(A, **k), beta=2.0)
row("tessera.nn.mse_loss", lambda **k: nn.mse_loss(A, SQUARE[:3], **k), reduction="sum")
row("tessera.nn.kl_div", lambda **k: nn.kl_div(A, np.abs(SQUARE[:3]), **k), log_target=True,
    reduction="sum")  # fmt: skip
row("tessera.nn.binary_cross_entropy_with_logits",
    lambda **k: nn.binary_cross_entropy_with_logits(A, np.abs(SQUARE[:3]), **k),
    weight=np.arange(4, dtype=np.float32), pos_weight=np.arange(4, dtype=np.float32),
    reduction="sum")  # fmt: skip


# -- sums over devices -----------------------------------------------------------------------------
for name in ("all_reduce", "reduce_scatter"):
    row(f"tessera.dist.{name} at the level fast",
        lambda name=name, **k: graph.trace(
            lambda x: getattr(dist, name)(ts.sum(x, 0), "dp", **k), sharded()).text,
        deterministic=True)  # fmt: skip
SPLIT_ROWS = ts.tensor(SQUARE, mesh=MESH, layout="[4@dp, 4]")
for name, gradient in (("grad", ts.grad), ("graph.backward", graph.backward)):
    row(f"tessera.{name} of rows that are split",
        lambda gradient=gradient, **k: graph.trace(
            lambda w, x: gradient((x @ w).sum(), w, **k), ts.ones((4, 4)), SPLIT_ROWS).text,
        reduce_dtype=ts.bf16)  # fmt: skip

row("tessera.vmap", lambda **k: ts.vmap(lambda x: x.sum(0), **k)(CUBE8), in_dims=1, out_dims=1)


def looked_up(**k: Any) -> str:
    def run(table: Any) -> Any:
        with ts.autocast(**k):
            return nn.embedding(IDS, table)

    return traced(run, SQUARE)


row("tessera.autocast of an embedding", looked_up, embeddings=True)
