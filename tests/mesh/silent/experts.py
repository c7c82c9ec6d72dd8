"""Causal experts: no dependence on later tokens, and the loss of one device, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.train.accumulate import accumulated

from .rows import row

RNG = np.random.default_rng(0)


def causal(context: str, capacity: float | None) -> None:
    """Asserts that a GPT with experts depends on no later token, and gives one device's logits."""
    ids = RNG.integers(0, 32, (2, 16)).astype(np.int32)
    other = ids.copy()
    other[:, 12:] = (ids[:, 12:] + 1 + RNG.integers(0, 30, (2, 4))) % 32

    def logits(context: str | None, mesh: dist.Mesh | None) -> list[np.ndarray[Any, Any]]:
        ts.seed(0)
        config = nn.GPTConfig(
            32, 16, 16, 1, 2, experts=4, capacity=capacity, context=context, loop=False
        )
        model = nn.GPT(config) if mesh is None else dist.place(nn.GPT(config), None, mesh)
        run = ts.jit(lambda ids: model(ids))
        return [run(x).numpy() for x in (ids, other)]

    first, second = logits(context, dist.Mesh.parse("cp=2"))
    np.testing.assert_array_equal(first[:, :12], second[:, :12])
    assert np.abs(first[:, 12:] - second[:, 12:]).max() > 0.1
    for got, want in zip((first, second), logits(None, None), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@row("experts with a capacity under ring attention: are their logits causal?")
def ring() -> None:
    causal("ring", 0.5)


@row("experts with more room under ring attention")
def ring_with_room() -> None:
    causal("ring", 1.25)


@row("experts with a capacity where heads are exchanged for the sequence")
def exchanged() -> None:
    causal("all_to_all", 0.5)


@row(
    "the auxiliary loss of experts in a pipeline of microbatches",
    warns=pipeline.PipelineWarning,
    says="the auxiliary loss of experts is that of each microbatch",
)
def microbatches() -> None:
    mesh = dist.Mesh.parse("pp=2")
    ts.seed(0)
    config = nn.GPTConfig(16, 4, 8, 2, 2, experts=2, loop=False, stacked=False)
    model = dist.place(nn.GPT(config), None, mesh)
    stages = pipeline.run(("pp",), "1F1B", 4, mesh=mesh)(lambda model, ids: model.features(ids))

    loss = ts.jit(lambda model, ids: model.loss_of(stages(model, ids), ids))
    loss(model, RNG.integers(0, 16, (8, 4)).astype(np.int32))


def looped() -> nn.GPT:
    ts.seed(0)
    return nn.GPT(nn.GPTConfig(16, 4, 8, 2, 2, experts=2, loop=True))


@row("the auxiliary loss of experts in a loop over layers, under accumulated")
def accumulated_layers() -> None:
    def step(model: nn.GPT, ids: ts.Tensor, count: int) -> Any:
        def loss(batch: Any, weights: Any) -> ts.Tensor:
            return model.loss(batch["ids"], batch["ids"])

        return accumulated(loss, {"ids": ids}, model.trainable_parameters(), count)

    model, ids = looped(), RNG.integers(0, 16, (8, 4)).astype(np.int32)
    (got, grads), (want, wanted) = (ts.jit(step)(model, ids, count) for count in (2, 1))
    np.testing.assert_allclose(got.item(), want.item(), rtol=1e-5)
    for name, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[name].numpy(), rtol=1e-4, atol=1e-5)


@row(
    "the auxiliary loss of experts in a local body",
)
def local_layers() -> None:
    mesh = dist.Mesh(("dp",), devices=2)
    model, ids = looped(), RNG.integers(0, 16, (8, 4)).astype(np.int32)
    body = ts.distribute(
        lambda model, ids: model.loss(ids, ids), strategy="data_parallel", mesh=mesh
    )
    want = ts.jit(lambda model, ids: model.loss(ids, ids))(model, ids)
    np.testing.assert_allclose(ts.jit(body)(model, ids).item(), want.item(), rtol=1e-5)
