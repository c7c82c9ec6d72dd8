"""Layer stacks: equal results looped or unrolled, stacked or separate, saved or recomputed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import graph, nn
from tessera.core.dtypes import dtype_of
from tessera.core.layout import plain
from tessera.ir.graph.oracle import evaluate
from tessera.nn.stack import Stack
from tessera.passes.simplify import simplify

LAYERS = 3
IDS, LABELS = np.random.default_rng(0).integers(0, 13, (2, 2, 6)).astype(np.int32)


def model_of(experts: int, **how: Any) -> nn.GPT:
    return nn.GPT(
        nn.GPTConfig(vocab=13, seq=6, d=8, layers=LAYERS, heads=2, experts=experts, **how)
    )


@cache
def weights(experts: int) -> dict[str, np.ndarray]:
    """Weights of the stacked model, large enough that each has a visible effect."""
    rng = np.random.default_rng(1)
    shapes = {k: t.shape for k, t in model_of(experts).state_dict().items()}
    return {k: (0.4 * rng.normal(size=s) + ("norm" in k)).astype(np.float32)
            for k, s in shapes.items()}  # fmt: skip


def loss_and_gradients(experts: int, **how: Any) -> tuple[float, dict[str, np.ndarray]]:
    model = model_of(experts, **how)
    names, learned = list(model.state_dict()), list(model.parameters())
    given = weights(experts)

    def values(name: str) -> np.ndarray:
        before, apart, rest = name.partition(".layers.")
        i, _, rest = rest.partition(".")
        return given[f"{before}.block.{rest}"][int(i)] if apart else given[name]

    def step(ids: Any, labels: Any, *ws: Any) -> Any:
        held = dict(zip(names, ws, strict=True))
        model.load_parameters(held)
        loss = model.loss(ids, labels)
        return [loss, *ts.grad(loss, {k: held[k] for k in learned}).values()]

    arrays = [IDS, LABELS, *map(values, names)]
    made = graph.trace(step, *(plain(dtype_of(a.dtype), a.shape) for a in arrays))
    loss, *grads = evaluate(simplify(made), arrays)
    found = dict(zip(learned, grads, strict=True))
    for k in given:
        if (
            k.replace(".block.", ".layers.0.") in found and k not in found
        ):  # the weights of each layer
            found[k] = np.stack(
                [found.pop(k.replace(".block.", f".layers.{i}.")) for i in range(LAYERS)]
            )
    return float(loss), found


@pytest.mark.parametrize("experts", [0, 2])
@pytest.mark.parametrize(
    "how",
    [
        {"loop": True}, {"loop": True, "remat": "recompute"}, {"loop": False, "remat": "products"},
        {"stacked": False}, {"stacked": False, "remat": True},
        {"stacked": False, "remat": "products"},
    ],
    ids=lambda how: "-".join(f"{k}={v}" for k, v in how.items()),
)  # fmt: skip
def test_layers_compute_the_same(experts: int, how: dict[str, Any]) -> None:
    loss, grads = loss_and_gradients(experts, **how)
    expected, others = loss_and_gradients(experts, loop=False)
    assert abs(loss - expected) < 1e-5
    assert set(grads) == set(others)
    for k, g in grads.items():
        np.testing.assert_allclose(g, others[k], rtol=1e-4, atol=1e-5, err_msg=k)
    assert any(np.abs(g).max() > 1e-3 for k, g in grads.items() if "layers" in k or "block" in k)


def test_a_loss_of_experts_has_a_part_for_their_balance() -> None:
    with_it, without = (loss_and_gradients(2, aux_weight=w)[0] for w in (0.5, 0.0))
    # The balance loss is 1 for even choices, and larger otherwise.
    assert 0.5 <= with_it - without < 1.0


def test_a_loop_needs_stacked_weights() -> None:
    with pytest.raises(ts.UsageError, match="Stack: a loop needs the weights of all layers in one"):
        Stack(nn.RMSNorm(4), 2, loop=True, stacked=False)
