"""Idle devices of a mesh: none, or a warning."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, graph, nn

from .rows import row

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(3)
BATCH = {
    "input": RNG.standard_normal((8, 4)).astype(np.float32),
    "labels": RNG.integers(0, 4, 8).astype(np.int32),
}
BOTH = dist.strategy("data_parallel") + dist.strategy("tensor_parallel", rules=[("weight", 1)])


def trained(strategy: Any, batch: Any = BATCH) -> tuple[float, list[str]]:
    """Returns the loss of a step, and the layouts of its batch."""
    ts.seed(0)
    net = dist.place(nn.Linear(4, 8), strategy, MESH)

    @graph.training_step(module="Net", strategy=strategy)
    def step(batch: Any) -> Any:
        loss = nn.cross_entropy(net(batch["input"]), batch["labels"])
        return graph.backward(loss), {"loss": loss}

    losses = [step(batch)[1]["loss"].item() for _ in range(2)]
    assert losses[0] == losses[1]
    return losses[0], [n.type.text for n in step.graph.inputs[:2]]


@row("a NumPy batch in a training step, on a mesh that nothing is split over",
     warns=ts.StrategyWarning, says="all devices along 'dp', 'tp' compute the same")  # fmt: skip
def _() -> None:
    trained(None)


@row("a NumPy batch in a training step that has a strategy")
def _() -> None:
    with MESH:
        loss, layouts = trained(BOTH)
    assert layouts == ["f32[8@dp, 4]", "i32[8@dp]"]
    laid, _ = trained(BOTH, dist.place(BATCH, BOTH, MESH, kind="batch"))
    assert loss == laid
    assert trained(BOTH) == (loss, layouts)  # without an ambient mesh, on that of the weights


@row("a batch in a training step that is laid out otherwise than the strategy says",
     warns=ts.StrategyWarning, says="all devices along 'dp' compute the same")  # fmt: skip
def _() -> None:
    own = {
        k: ts.tensor(v, mesh=MESH, layout=t)
        for (k, v), t in zip(BATCH.items(), ("[8@tp, 4]", "[8@tp]"))
    }
    assert trained(dist.strategy("data_parallel"), own)[1] == ["f32[8@tp, 4]", "i32[8@tp]"]
