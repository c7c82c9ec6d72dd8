"""Are attributes that PyTorch's users set refused, where setting them would change nothing?"""

from __future__ import annotations

import jax
import numpy as np

import tessera as ts
from tessera import nn, optim
from tests.mesh.silent.rows import row


@row("a weight's data is set", error=ts.UsageError, says="model.weight = tensor")
def _() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.data -= 0.1 * layer.weight.data


@row("a gradient is cleared", error=ts.UsageError, says="Tensor.grad cannot be set")
def _() -> None:
    ts.ones(3).grad = None  # type: ignore[attr-defined]


@row("a tensor is to be trained", error=ts.UsageError, says="a weight is nn.Parameter(x)")
def _() -> None:
    ts.ones(3).requires_grad = True  # type: ignore[attr-defined]


@row("a parameter is frozen")
def _() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad = False
    assert [*ts.grad(layer(ts.ones((1, 3))).sum(), layer)] == ["weight"]


@row("JAX traces a function of ours", error=ts.UsageError, says="instead of those of JAX")
def _() -> None:
    jax.jit(lambda x: ts.sin(x))(np.ones(3, np.float32))


@row("an optimizer's pair is taken for its state", error=ts.UsageError, says="params, state =")
def _() -> None:
    weights = {"w": ts.ones((2, 3))}
    rule = optim.AdamW(1e-3)
    both = rule.update(weights, weights, rule.init(weights))
    rule.update(weights, weights, both)  # type: ignore[arg-type]


@row("the state of a smaller model", error=ts.ShapeError, says="m.w : (1, 3), not (2, 3)")
def _() -> None:
    rule, weights = optim.AdamW(1e-3), {"w": ts.ones((2, 3))}
    rule.update(weights, weights, rule.init({"w": ts.ones((1, 3))}))
