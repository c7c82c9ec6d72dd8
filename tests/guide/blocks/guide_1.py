"""Guide 1, distributed execution: the reader's values, and the checks of its blocks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, graph, nn, pipeline, schedule

Space = dict[str, Any]
RNG = np.random.default_rng(1)
D, LAYERS, ROWS = 100, 4, 12
BATCH = {"input": RNG.normal(size=(ROWS, 6, D)).astype(np.float32),
         "labels": RNG.integers(0, D, (ROWS, 6))}  # fmt: skip


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


class Blocks(nn.Module):
    def __init__(self) -> None:
        config = nn.GPTConfig(d=D, layers=LAYERS, heads=4, hidden=60)
        self.layers = [nn.TransformerBlock(config) for _ in range(LAYERS)]


def transformer(space: Space) -> Any:
    """Four blocks, with the weight of the text as the head."""
    ts.seed(0)
    model = Blocks()
    model.parameters()  # names them
    dist.place(model, dist.strategy("tensor_parallel"), space["mesh"])
    stages = [graph.stage(f"layer{i}")(block) for i, block in enumerate(model.layers)]

    @graph.pipeline(stages=stages, axis="pp", microbatches=4)
    def transformer(x: ts.Tensor, weight: ts.Tensor) -> ts.Tensor:
        for layer in stages:
            x = layer(x)
        return x @ weight

    return transformer


GIVES = {
    "W_local": lambda s: ts.tensor(normal(64, 64), mesh=s["mesh"], layout="[64, 64@dp]"),
    "X_local": lambda s: ts.tensor(normal(64, 64), mesh=s["mesh"], layout="[64@dp, 64]"),
    "graph": lambda s: graph,
    "schedule": lambda s: schedule,
    "transformer": transformer,
}


def the_mesh(space: Space, shown: str) -> None:
    """it prints the line of the text; 16 devices, each in one place"""
    assert shown == "tp × dp mesh, 4 × 4\n"
    assert sorted(space["mesh"].device_ids) == list(range(16))


def the_shards(space: Space, shown: str) -> None:
    """16 devices hold a block of 256 × 256 each, and together all of it"""
    shards = space["W"].jax().addressable_shards
    assert {s.data.shape for s in shards} == {(256, 256)}
    assert len({tuple(map(str, s.index)) for s in shards}) == 16
    assert str(space["W"].type) == "bf16[1024@tp, 1024@dp]"


def the_sum(space: Space, shown: str) -> None:
    """a product over the split dim is a partial sum over dp, which all_reduce completes"""
    assert space["Y_local"].type.partial_axes == ("dp",)
    assert not space["Y_global"].type.partial_axes
    want = space["W_local"].numpy() @ space["X_local"].numpy()
    np.testing.assert_allclose(space["Y_global"].numpy(), want, atol=1e-3)


def the_3d_mesh(space: Space, shown: str) -> None:
    """tensor × pipeline × data, 6 × 4 × 3; rows over 6 are uneven"""
    assert space["mesh"].topology == "tp × pp × dp mesh, 6 × 4 × 3"
    assert str(space["W"].type) == "f32[100@tp, 100@pp]"
    assert space["W"].type.local_shape == (17, 25)


def the_hybrid_step(space: Space, shown: str) -> None:
    """a plain batch: the loss is NumPy's on the same logits; groups of tp inside of stages, sends
    between them; one warning names dp, and a batch laid out over it gives the same numbers"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grads, metrics = space["step"](BATCH)
    idle = [str(w.message) for w in said if w.category is ts.StrategyWarning]
    assert len(idle) == 1 and "along 'dp' compute the same" in idle[0]
    pipe, w = space["transformer"], space["W"].numpy()
    x = ts.tensor(BATCH["input"])
    for stage in pipe.parts:
        x = stage(x)
    logits = x.numpy().astype(np.float64) @ w
    logits -= logits.max(-1, keepdims=True)
    p = np.take_along_axis(logits, BATCH["labels"][..., None], -1)[..., 0]
    want = (np.log(np.exp(logits).sum(-1)) - p).mean()
    np.testing.assert_allclose(metrics["loss"].item(), want, rtol=1e-4)
    assert "W" in grads and grads["W"].type == space["W"].type and len(grads) > LAYERS
    moved = {(n.op, n.attrs["axes"]) for n, _ in pipe.schedule.collectives()}
    assert ("all_reduce", ("tp",)) in moved
    assert {s.stage for s in pipe.schedule.steps if s.kind == "send"} == {0, 1, 2, 3}
    laid = dist.place(BATCH, dist.strategy("data_parallel"), space["mesh"], kind="batch")
    np.testing.assert_allclose(space["step"](laid)[1]["loss"].item(), want, rtol=1e-4)


def the_schedule(space: Space, shown: str) -> None:
    """programs from now on: a pipeline has 8 microbatches, and a gradient's all_reduce is under way
    while the next is computed"""
    mesh = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})
    pipe = pipeline.compose(2, [ts.tanh, ts.tanh], mesh=mesh)
    assert pipe(normal(16, 4)).shape == (16, 4) and pipe.table.microbatches == 8
    rows = dist.Mesh(("dp",), devices=4)

    def loss(w: Any, x: Any) -> Any:
        return ts.grad(ts.mean(ts.tanh(ts.tanh(x @ w["a"]) @ w["b"])), w)

    w = {k: ts.tensor(normal(8, 8), mesh=rows) for k in "ab"}
    x = ts.tensor(normal(16, 8), mesh=rows, layout="[16@dp, 8]")
    steps = ts.jit(loss).plan(w, x).steps
    first = next(i for i, s in enumerate(steps) if s.kind == "collective")
    later = [s for s in steps[first + 1 :] if s.kind == "compute"]
    assert later and not {*steps[first].writes} & {b for s in later for b in s.reads}
    assert all(first not in s.after for s in later)
    schedule.reset()


CHECKS = {
    "1/7.2/code": the_mesh,
    "1/7.3/code": the_shards,
    "1/7.4/code": the_sum,
    "1/7.6/code": the_3d_mesh,
    "1/7.6/step": the_hybrid_step,
    "1/7.7/code": the_schedule,
}
