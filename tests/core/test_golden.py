"""Golden Graph IR files of a training step on several meshes, as it is scheduled.

`pytest tests/core/test_golden.py --refresh-golden` writes them anew; `git diff tests/golden` shows
the effect of a change on layouts and collectives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tessera as ts
from tessera import dist, graph
from tessera.core.layout import TensorType, plain
from tessera.lang.parallel.strategy import Strategy

GOLDEN = Path(__file__).parent.parent / "golden"
DP, TP = dist.strategy("data_parallel"), dist.strategy("tensor_parallel")
ZERO_3 = dist.strategy("zero_redundancy_optimizer", stage=3)
CASES: dict[str, tuple[dict[str, int], Strategy | None]] = {
    "one": ({}, None),
    "dp2": ({"dp": 2}, DP),
    "tp4": ({"tp": 4}, TP),
    "dp2_tp4": ({"dp": 2, "tp": 4}, DP + TP),
    "zero3_dp4": ({"dp": 4}, DP + ZERO_3),
}


def step(model: Any, ids: ts.Tensor, labels: ts.Tensor) -> Any:
    """The loss and the new weights after a step of gradient descent."""
    loss = model.loss(ids, labels)
    weights = model.parameters()
    grads = ts.grad(loss, weights)
    return loss, {k: w - 0.1 * grads[k] for k, w in weights.items()}


def recorded(case: str) -> Any:
    axes, plan = CASES[case]
    mesh = dist.Mesh(tuple(axes), shape=axes) if axes else None
    model = ts.nn.GPT(ts.nn.GPTConfig(vocab=64, seq=16, d=32, layers=1, heads=4))
    batch: TensorType = plain(ts.int32, (8, 16), mesh)
    if mesh is not None and plan is not None:
        model = dist.place(model, plan, mesh)
        batch = plan.batch(batch)
    return graph.trace(step, model, batch, batch)


@pytest.mark.parametrize("case", CASES)
def test_the_step_is_what_was_reviewed(case: str, request: pytest.FixtureRequest) -> None:
    text = recorded(case).stages["simplified"].text
    file = GOLDEN / f"gpt_step_{case}.txt"
    if request.config.getoption("--refresh-golden"):
        file.write_text(text)
    assert text == file.read_text()
    assert graph.parse(text).text == text


def test_tensor_parallelism_costs_two_all_reduces_a_sublayer_pair_each_way() -> None:
    """Megatron's count: per layer, two all_reduces of activations forward and two backward."""
    big = [
        n
        for n, _ in recorded("tp4").stages["simplified"].collectives()
        if n.op == "all_reduce" and n.type.size == 8 * 16 * 32
    ]
    # one layer (2 + 2), the embedding's lookup and the gradient of the head's input
    assert len(big) == 6
