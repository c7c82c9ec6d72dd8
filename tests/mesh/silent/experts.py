"""Do experts see the future, or another loss than one device has? They must not, or must say so."""

from __future__ import annotations

import numpy as np

import tessera as ts
from tessera import dist, nn, pipeline

from .rows import row

RNG = np.random.default_rng(0)


@row("experts with a capacity under ring attention: are their logits causal?")
def ring() -> None:
    ids = RNG.integers(0, 32, (2, 16)).astype(np.int32)
    other = ids.copy()
    other[:, 12:] = (ids[:, 12:] + 1 + RNG.integers(0, 30, (2, 4))) % 32
    ts.seed(0)
    config = nn.GPTConfig(32, 16, 16, 1, 2, experts=4, capacity=0.5, context="ring", loop=False)
    model = dist.place(nn.GPT(config), None, dist.Mesh.parse("cp=2"))
    logits = ts.jit(lambda ids: model(ids))
    first, second = (logits(x).numpy() for x in (ids, other))
    np.testing.assert_array_equal(first[:, :12], second[:, :12])
    assert np.abs(first[:, 12:] - second[:, 12:]).max() > 0.1


@row(
    "the auxiliary loss of experts in a pipeline of microbatches",
    warns=pipeline.PipelineWarning,
    says="auxiliary loss of experts is taken of each of 4 microbatches",
)
def microbatches() -> None:
    mesh = dist.Mesh.parse("pp=2")
    ts.seed(0)
    config = nn.GPTConfig(16, 4, 8, 2, 2, experts=2, loop=False, stacked=False)
    model = dist.place(nn.GPT(config), None, mesh)
    stages = pipeline.run(("pp",), "1F1B", 4, mesh=mesh)(lambda model, ids: model.features(ids))

    loss = ts.jit(lambda model, ids: model.loss_of(stages(model, ids), ids))
    loss(model, RNG.integers(0, 16, (8, 4)).astype(np.int32))
