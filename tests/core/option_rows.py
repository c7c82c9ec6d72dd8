"""The table of public options: a row calls a function with its defaults, and with each option
changed. `seen` is the visible part of the result.

`row("tessera.sum", lambda **k: ts.sum(X, **k), dim=0)` says that `dim=0` changes the result. The
options `given` are passed in each call, for options that need another one to have an effect.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, graph, nn, op, optim, pipeline, schedule
from tessera.core.context import replaced, settings
from tessera.core.environment import number
from tessera.core.ranks import rank_of
from tessera.lang.program.schedule import options
from tessera.lang.value.tensor import Tensor
from tessera.train import recipe

RNG = np.random.default_rng(0)
A = RNG.normal(size=(3, 4)).astype(np.float32)
SQUARE = RNG.normal(size=(4, 4)).astype(np.float32)
IDS = np.array([0, 2], np.int32)
IMAGE = RNG.normal(size=(1, 4, 8, 8)).astype(np.float32)
PLACES = RNG.integers(0, 4, (4, 4)).astype(np.int32)
LINE = RNG.normal(size=(1, 4, 8)).astype(np.float32)
HEADS = RNG.normal(size=(1, 2, 4, 4)).astype(np.float32)
MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
OTHER = dist.Mesh(("tp", "dp"), shape={"tp": 2, "dp": 4})


@dataclass(frozen=True)
class Row:
    run: Callable[..., Any]
    changes: Mapping[str, Any]
    given: Mapping[str, Any]


ROWS: dict[str, Row] = {}


def row(name: str, run: Callable[..., Any], given: Any = None, /, **changes: Any) -> None:
    """Adds a row for the function `name`; `run(**options)` calls it and returns the visible
    result."""
    assert name not in ROWS, name
    ROWS[name] = Row(run, changes, given or {})


def seen(x: Any) -> Any:
    """The visible part of `x`, for comparison: values with types and names, text, members."""
    if isinstance(x, Tensor):
        try:
            values = x.numpy().tobytes()
        except ts.TesseraError:
            values = b""
        return str(x.type), x.name, str(x.mesh.text() if x.mesh else ""), values
    if isinstance(x, np.ndarray):
        return x.shape, x.tobytes()
    if isinstance(x, Mapping):
        return {str(k): seen(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [seen(v) for v in x]
    if isinstance(x, nn.Module):
        return seen(x.parameters()), repr(x)
    if is_dataclass(x) and not isinstance(x, type) and type(x).__str__ is object.__str__:
        return type(x).__name__, [seen(getattr(x, f.name)) for f in fields(x)]
    return str(x)


def sharded(layout: str = "[8@dp, 8@tp]") -> ts.Tensor:
    data = np.arange(64, dtype=np.float32).reshape(8, 8)
    return ts.tensor(data, mesh=MESH, layout=layout)


# -- functions on tensors --------------------------------------------------------------------------
for name in ("sum", "mean", "max", "min", "prod", "logsumexp"):
    row(f"tessera.{name}", lambda name=name, **k: getattr(ts, name)(A, **k), dim=0, keepdims=True)
for name in ("sum", "mean", "max", "min", "any", "all"):
    row(f"tessera.Tensor.{name}", lambda name=name, **k: getattr(ts.tensor(A), name)(**k),
        dim=0, keepdims=True)  # fmt: skip
for name in ("var", "std"):
    row(f"tessera.Tensor.{name}", lambda name=name, **k: getattr(ts.tensor(A), name)(**k),
        dim=0, keepdims=True, correction=1)  # fmt: skip
row("tessera.Tensor.transpose", lambda **k: ts.tensor(A).transpose(**k), {"a": 0, "b": 1},
    a=1, b=0)  # fmt: skip
row("tessera.var", lambda **k: ts.var(A, **k), dim=0, keepdims=True, correction=1)
for name in ("argmax", "argmin"):
    row(f"tessera.{name}", lambda name=name, **k: getattr(ts, name)(A, **k), dim=0, keepdims=True)
for name in ("sort", "argsort"):
    row(f"tessera.{name}", lambda name=name, **k: getattr(ts, name)(A, **k), dim=0, descending=True)
row("tessera.arange", lambda **k: ts.arange(3, **k), dtype=ts.f32)
row("tessera.concat", lambda **k: ts.concat([A, A], **k), dim=1)
row("tessera.stack", lambda **k: ts.stack([A, A], **k), dim=1)
row("tessera.split", lambda **k: ts.split(SQUARE, 2, **k), dim=1)
row("tessera.cumsum", lambda **k: ts.cumsum(A, **k), dim=0)
row("tessera.flip", lambda **k: ts.flip(A, **k), dim=0)
row("tessera.eye", lambda **k: ts.eye(3, **k), columns=2, dtype=ts.bf16)
row("tessera.full", lambda **k: ts.full(3, 1.0, **k), dtype=ts.bf16)
row("tessera.ones", lambda **k: ts.ones(3, **k), dtype=ts.bf16)
row("tessera.zeros", lambda **k: ts.zeros(3, **k), dtype=ts.bf16)
row("tessera.one_hot", lambda **k: ts.one_hot(IDS, 3, **k), dtype=ts.bf16)
row("tessera.gather", lambda **k: ts.gather(SQUARE, IDS.reshape(2, 1), **k), dim=0)
row("tessera.take", lambda **k: ts.take(SQUARE, IDS, **k), dim=1)
row("tessera.scatter_add", lambda **k: ts.scatter_add(SQUARE, PLACES, SQUARE, **k), dim=0)
row("tessera.round", lambda **k: ts.round(A, **k), decimals=1)
row("tessera.topk", lambda **k: ts.topk(A, 2, **k), dim=0, largest=False)
row("tessera.tril", lambda **k: ts.tril(SQUARE, **k), k=1)
row("tessera.triu", lambda **k: ts.triu(SQUARE, **k), k=1)
for name in ("norm", "vector_norm"):
    row(f"tessera.linalg.{name}", lambda name=name, **k: getattr(ts.linalg, name)(SQUARE, **k),
        ord=1, dim=0, keepdims=True)  # fmt: skip
row("tessera.linalg.matrix_norm", lambda **k: ts.linalg.matrix_norm(SQUARE, **k), {"ord": 1},
    ord=2, dim=(1, 0), keepdims=True)  # fmt: skip
row("tessera.linalg.solve_triangular",
    lambda **k: ts.linalg.solve_triangular(SQUARE, SQUARE, **k), lower=False)  # fmt: skip
CUBE = RNG.normal(size=(3, 3, 3)).astype(np.float32)
row("tessera.diagonal", lambda **k: ts.diagonal(CUBE, **k), offset=1, dim1=0, dim2=0)


def tensor_of(**k: Any) -> ts.Tensor:
    return ts.tensor(np.ones((8, 8)), **k)


row("tessera.tensor", tensor_of, {"mesh": MESH}, mesh=OTHER, layout="[8@dp, 8]", dtype=ts.bf16,
    name="w")  # fmt: skip


def drawn(draw: Any, *args: Any) -> Callable[..., Any]:
    def run(**k: Any) -> Any:
        ts.seed(0)
        return draw(*args, **k)

    return run


row("tessera.random.uniform", drawn(ts.random.uniform, (8,)), low=-1.0, high=2.0, dtype=ts.bf16,
    like=ts.tensor(np.ones(8), mesh=MESH, layout="[8@dp]").type)  # fmt: skip
row("tessera.random.normal", drawn(ts.random.normal, (3,)), mean=1.0, std=2.0, dtype=ts.bf16)

# -- layers and the functions behind them ----------------------------------------------------------
row("tessera.nn.cross_entropy", lambda **k: nn.cross_entropy(A[:2], IDS, **k), ignore_index=2,
    weight=np.arange(4, dtype=np.float32), label_smoothing=0.1)  # fmt: skip
row("tessera.nn.linear_cross_entropy",
    lambda **k: graph.trace(lambda x: nn.linear_cross_entropy(x, SQUARE, IDS, **k), A[:2]).text,
    ignore_index=2, rows=1, class_weight=np.arange(4, dtype=np.float32),
    label_smoothing=0.1)  # fmt: skip
row("tessera.nn.layer_norm", lambda **k: nn.layer_norm(A, **k), weight=A[0], bias=A[0], eps=0.5)
row("tessera.nn.rms_norm", lambda **k: nn.rms_norm(A, **k), weight=A[0], eps=0.5)
row("tessera.nn.linear", lambda **k: nn.linear(A, SQUARE, **k), bias=A[0])
row("tessera.nn.gelu", lambda **k: nn.gelu(A, **k), approximate="none")
row("tessera.nn.softmax", lambda **k: nn.softmax(A, **k), dim=0)
row("tessera.nn.log_softmax", lambda **k: nn.log_softmax(A, **k), dim=0)
row("tessera.nn.dropout", drawn(nn.dropout, A, 0.5), training=False)
row("tessera.nn.attention", lambda **k: nn.attention(HEADS, HEADS, HEADS, **k), causal=True,
    scale=2.0, bias=HEADS[0, :, 0], mask=np.tri(4, dtype=bool))  # fmt: skip
row("tessera.nn.group_norm", lambda **k: nn.group_norm(IMAGE, 2, **k), weight=A[0], bias=A[0],
    eps=0.5)  # fmt: skip


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def __call__(self, x: Any, by: float = 0.0) -> Any:
        return super().__call__(ts.tensor(x)) + by


KERNEL = RNG.normal(size=(4, 4, 3, 3)).astype(np.float32)
GROUPED = {"groups": 2}
row("tessera.nn.conv2d",
    lambda groups=1, **k: nn.conv2d(IMAGE, KERNEL[:, : 4 // groups], groups=groups, **k),
    bias=A[0], stride=2, padding=1, dilation=2, groups=2)  # fmt: skip
row("tessera.nn.conv1d",
    lambda groups=1, **k: nn.conv1d(LINE, KERNEL[:, : 4 // groups, 0], groups=groups, **k),
    bias=A[0], stride=2, padding=1, dilation=2, groups=2)  # fmt: skip
row("tessera.nn.conv_transpose2d",
    lambda groups=1, **k: nn.conv_transpose2d(IMAGE, KERNEL, groups=groups, **k), {"stride": 2},
    bias=A[0], stride=3, padding=1, output_padding=1, dilation=2, groups=2)  # fmt: skip
VOLUME = RNG.normal(size=(1, 4, 5, 5, 5)).astype(np.float32)
row("tessera.nn.conv3d",
    lambda groups=1, **k: nn.conv3d(VOLUME, KERNEL[:, : 4 // groups, None], groups=groups, **k),
    bias=A[0], stride=2, padding=1, dilation=2, groups=2)  # fmt: skip
row("tessera.nn.conv_transpose1d",
    lambda groups=1, **k: nn.conv_transpose1d(LINE, KERNEL[..., 0], groups=groups, **k),
    {"stride": 2}, bias=A[0], stride=3, padding=1, output_padding=1, dilation=2,
    groups=2)  # fmt: skip
row("tessera.nn.functional_call",
    lambda args=A, **k: nn.functional_call(Shifted(), {"weight": SQUARE}, args, **k),
    args=(A[:2],), kwargs={"by": 1.0})  # fmt: skip
for name in ("max_pool1d", "avg_pool1d"):
    row(f"tessera.nn.{name}", lambda name=name, **k: getattr(nn, name)(LINE, 2, **k), stride=1,
        padding=1)  # fmt: skip
for name in ("max_pool2d", "avg_pool2d"):
    row(f"tessera.nn.{name}", lambda name=name, **k: getattr(nn, name)(IMAGE, 2, **k), stride=1,
        padding=1)  # fmt: skip
row("tessera.nn.interpolate", lambda **k: nn.interpolate(IMAGE, (16, 16), **k), mode="bilinear")


# -- optimizers ------------------------------------------------------------------------------------
def stepped(kind: Any) -> Callable[..., Any]:
    """Two steps of an optimizer on a weight and a bias."""

    def run(**k: Any) -> Any:
        made = kind(**{"lr": 0.1, **k})
        w: Any = {"w": ts.tensor(SQUARE), "b": ts.tensor(A[0])}
        if k.get("master"):
            w = {n: t.to(ts.bf16) for n, t in w.items()}
        state, grads = made.init(w), {"w": ts.tensor(SQUARE[::-1].copy()), "b": ts.tensor(A[1])}
        for _ in range(2):
            w, state = made.update(w, grads, state)
        return w, state

    return run


DECAY = {"weight_decay": 0.1}
COMMON: dict[str, Any] = {"lr": 0.2, "weight_decay": 0.5, "mask": "b$", "master": True}
row("tessera.optim.SGD", stepped(optim.SGD), DECAY, **COMMON)
row("tessera.optim.Momentum", stepped(optim.Momentum), DECAY, **COMMON, momentum=0.5,
    nesterov=True)  # fmt: skip
row("tessera.optim.Adam", stepped(optim.Adam), DECAY, **COMMON, betas=(0.5, 0.5), eps=0.1)
row("tessera.optim.AdamW", stepped(optim.AdamW), DECAY, **COMMON, betas=(0.5, 0.5), eps=0.1)
row("tessera.optim.Lion", stepped(optim.Lion), DECAY, **COMMON, betas=(0.5, 0.1))


def rates(make: Any) -> Callable[..., Any]:
    return lambda **k: [make(**k)(i).item() for i in range(8)]


row("tessera.optim.cosine", rates(lambda **k: optim.cosine(1.0, 6, **k)), end=0.5)
row("tessera.optim.warmup_cosine", rates(lambda **k: optim.warmup_cosine(1.0, 2, 6, **k)),
    end=0.5, start=0.2)  # fmt: skip
row("tessera.optim.warmup_linear", rates(lambda **k: optim.warmup_linear(1.0, 2, 6, **k)),
    end=0.5, start=0.2)  # fmt: skip


# -- schedules and pipelines -----------------------------------------------------------------------
def body(w: Any, x: Any) -> Any:
    """A training step with partial sums, gathers of weights and gradients to be summed."""
    h = x
    for _ in range(2):
        h = ts.tanh(ts.tanh(h @ w["up"]) @ w["down"])
    loss = (h * h).mean()
    return loss, ts.grad(loss, w)


def planned(chosen: Mapping[str, Any], fn: Any = body) -> Any:
    # Weights are stored split over dp, and gathered before their use.
    w = {"up": sharded("[8@dp, 8@tp]"), "down": sharded("[8@(tp,dp), 8]")}
    with replaced(schedule=options(**chosen)):
        made = ts.jit(fn)
        s = made.plan(w, sharded("[8@dp, 8]"))
    bare = s.text.replace(f"  options {s.options.text()}", "")  # its listing is no effect
    return bare, str(dist.inspect(made)).replace(s.hash, "")


@ts.kernel(grid="i=M//BM", x="in f32[M] tiles [BM]", y="out f32[M] tiles [BM]", tune={"BM": 4},
           speed={"warps": 8})  # fmt: skip
def doubled(x: Any, y: Any, i: Any) -> None:
    y[i] = x[i] * 2.0


def planned_kernel(**chosen: Any) -> str:
    with replaced(schedule=options(**chosen)):
        s = ts.jit(lambda x: doubled(x)).plan(ts.ones((8,)))
    return str(s.text.partition("\n")[2])  # without the line of options


row("schedule of a kernel", planned_kernel, tile={"BM": 2}, warps=4)


STAGES = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})


def piped() -> Any:
    """A pipeline with gathers and sums in its stages."""
    run = pipeline.run(mesh_axes=("pp",), mesh=STAGES)(
        lambda w, x: functools.reduce(lambda h, w: ts.tanh(h @ w), w.values(), x)
    )

    def step(w: Any, x: Any) -> Any:
        loss = (run(w, x) ** 2).mean()
        return loss, ts.grad(loss, w)

    return step


def pipe_arguments() -> tuple[Any, Any]:
    """Returns two weights for each stage, stored split over dp, and a batch."""
    names = ("up", "down", "up2", "down2")
    w = {k: ts.tensor(np.ones((8, 8)), mesh=STAGES, layout="[8@dp, 8]") for k in names}
    return w, ts.tensor(np.ones((32, 8)), mesh=STAGES, layout="[32@dp, 8]")


def planned_pipe(**chosen: Any) -> Any:
    with replaced(schedule=options(**chosen)):
        text: str = ts.jit(piped()).plan(*pipe_arguments()).text
    return text.partition("\n")[2]  # without the line of options


row("schedule", lambda **k: planned(k), {"bucket_bytes": 1 << 20}, overlap=True, bucket_bytes=64,
    prefetch=1, algorithm="ring", topology="h100", comm_backend="nccl")  # fmt: skip


def planned_at_rest(**chosen: Any) -> Any:
    zero = dist.strategy("zero_redundancy_optimizer", stage=3)
    w = {"up": sharded("[8, 8]"), "down": sharded("[8, 8]")}
    with replaced(schedule=options(**chosen)):
        plan = ts.jit(body).plan(dist.place(w, zero, w["up"].mesh), sharded("[8@dp, 8]"))
    return plan.text.partition("\n")[2]


row("schedule of weights at rest", planned_at_rest, reshard_after_forward=False)
row("schedule of a pipeline", planned_pipe, {}, overlap=False, bucket_bytes=1 << 20, prefetch=1,
    algorithm="ring", microbatches=8, pipeline=False)  # fmt: skip
row("tessera.pipeline.pipeline_table",
    lambda **k: pipeline.pipeline_table("Interleaved1F1B", 2, 4, **k), chunks=3)  # fmt: skip
row("tessera.pipeline.simulate",
    lambda **k: [
        f(pipeline.simulate(pipeline.pipeline_table("ZB-H1", 2, 4), **k))
        for f in (lambda t: t.start_s, lambda t: t.end_s, lambda t: t.peak_activations)
    ],
    forward_s=2, backward_input_s=2, backward_weight_s=2, send_s=1, activation=2,
    kept_for_weight=0.5)  # fmt: skip
row("tessera.pipeline.pipeline_text",
    lambda **k: pipeline.pipeline_text(pipeline.pipeline_table("1F1B", 4, 16), **k), width=50,
    unit_s=2.0)  # fmt: skip


def stated(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives the options in force after `call`."""

    def run(**k: Any) -> str:
        with MESH:
            call(**k)
            said = str(settings().program)
        schedule.reset()
        return said

    return run


row("tessera.schedule.all_reduce_overlap", stated(schedule.all_reduce_overlap), on=False)
row("tessera.schedule.algorithm", stated(lambda **k: schedule.algorithm("ring", **k)),
    topology="h100")  # fmt: skip


# -- experts ---------------------------------------------------------------------------------------
EP = dist.Mesh(("ep", "dp"), shape={"ep": 4, "dp": 2})
EXPERTS = {
    "router": RNG.normal(size=(8, 4)).astype(np.float32),
    "up": RNG.normal(size=(4, 8, 4)).astype(np.float32),
    "down": RNG.normal(size=(4, 4, 8)).astype(np.float32),
}
TOKENS = RNG.normal(size=(8, 4, 8)).astype(np.float32)


def experts(**k: Any) -> Any:
    """The program and the report of `op.moe` with the options `k`."""
    made = ts.jit(lambda x: op.moe(x, EXPERTS, **{"mesh": EP, **k}))
    return made.plan(TOKENS).text, str(dist.inspect(made))


row("tessera.nn.moe", experts, {"capacity": 1.0}, router="sigmoid", k=1, deterministic=True,
    capacity=2.0, groups=2, normalize=False, activation="relu", axis="dp", stats=True,
    mesh=dist.Mesh(("ep",), devices=2), zigzag=2,
    placement=nn.place_experts(4, [3, 2, 1, 0]))  # fmt: skip
row("transport", lambda **k: experts(capacity=1.0, transport=k), {"bucket_bytes": 64},
    type="nvshmem", pack_dtype="bf16", bucket_bytes=None, epoch="hard", multi_qp=True,
    num_qps=2)  # fmt: skip


# -- configurations --------------------------------------------------------------------------------
SMALL = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "sequence_length": 4,
         "batch_size": 4, "total_steps": 9}  # fmt: skip


def configured(**k: Any) -> Any:
    """The weights, the optimizer state and the program of a configuration's training step."""
    config = {**SMALL, **k}
    weights = recipe.initialize_model_weights(config)
    state = recipe.initialize_optimizer_state(weights, config)
    ids = np.zeros((config["batch_size"], config["sequence_length"]), np.int32)
    batch = {"input_ids": ids, "labels": ids}
    model = recipe.make_model(config)
    text = graph.trace(recipe.training_step, model, batch, weights, state, config).text
    first = weights["embed.weight"]
    return text, seen(first), sorted(state), seen(state["loss_scale"])


def configured_over(**k: Any) -> Any:
    """The program of a training step whose weights are placed on a mesh."""
    config = {**SMALL, **k}
    plan = dist.strategy("data_parallel")
    weights = dist.place(recipe.initialize_model_weights(config), plan, MESH)
    state = recipe.initialize_optimizer_state(weights, config, plan)
    ids = np.zeros((config["batch_size"], config["sequence_length"]), np.int32)
    batch = dist.place({"input_ids": ids, "labels": ids}, plan, MESH, kind="batch")
    model = recipe.make_model(config)
    return graph.trace(recipe.training_step, model, batch, weights, state, config).text


row("config", configured, {},
    vocab_size=16, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=1, intermediate_size=8,
    norm="rms", activation="swiglu", positions="rotary", tie_embeddings=True, dropout=0.1, seed=1,
    batch_size=8, sequence_length=8, optimizer="sgd", learning_rate=1.0, min_learning_rate=1e-5,
    schedule="linear", warmup_steps=2, total_steps=8, betas=(0.5, 0.5), eps=0.1, weight_decay=0.5,
    gradient_clip_norm=0.0, accumulation_steps=2, mixed_precision=True, weight_dtype="bf16",
    loss_scale=8.0, gradient_checkpointing=True)  # fmt: skip
row("config over devices", configured_over, reduce_dtype="bf16")
row("config of a dynamic scale", configured, {"loss_scale": "dynamic"}, loss_scale_interval=3)
row("config of momentum", configured, {"optimizer": "momentum"}, momentum=0.5)
GPT = {"vocab": 8, "seq": 4, "d": 8, "layers": 2, "heads": 2}


def gpt(**k: Any) -> Any:
    """The weights of a GPT and the program of its loss and gradients."""
    ts.seed(0)
    model = nn.GPT(nn.GPTConfig(**{**GPT, **k}))
    weights = model.parameters()
    ids = np.zeros((2, 4), np.int32)

    def step(weights: Any, ids: Any) -> Any:
        model.load_parameters(weights)
        loss = model.loss(ids, ids)
        return loss, ts.grad(loss, weights)

    return {n: str(w.type) for n, w in weights.items()}, graph.trace(step, weights, ids).text


def value_and_slope(has_aux: bool = False, **k: Any) -> Any:
    def loss(x: Tensor, y: Tensor) -> Any:
        return (ts.sum(x * x * y), y) if has_aux else ts.sum(x * x * y)

    return ts.value_and_grad(loss, has_aux=has_aux, **k)(ts.tensor(A), ts.tensor(A))


row("tessera.value_and_grad", value_and_slope, argnums=1, has_aux=True)
row("tessera.nn.GPTConfig", gpt, {}, vocab=16, seq=8, d=16, layers=3, heads=4, kv_heads=1,
    hidden=8, norm="rms", activation="swiglu", positions="rotary", tied=True, dropout=0.1,
    loop=True, remat=True, head_size=8, norm_eps=0.5, biases=("qkv",), experts=2,
    stacked=False)  # fmt: skip
_handle, TOKEN_FILE = tempfile.mkstemp()  # with permissions for its owner only
os.write(_handle, b"from a file")
os.close(_handle)
atexit.register(os.unlink, TOKEN_FILE)
TWO = {"RANK": "1", "WORLD_SIZE": "2", "TESSERA_COORDINATOR": "n1:1"}
row("environment", lambda **k: rank_of(k), TWO, TESSERA_COORDINATOR="n2:1", TESSERA_JOIN="0",
    TESSERA_TOKEN="t", TESSERA_TOKEN_FILE=TOKEN_FILE)  # fmt: skip
row("environment of numbers", lambda **k: number("TESSERA_JOIN_LIMIT", 300, k), {},
    TESSERA_JOIN_LIMIT="5")  # fmt: skip
