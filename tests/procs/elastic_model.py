"""The model and training step of runs that lose devices.

`elastic_program.py` imports it from its own folder, so it imports nothing of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tessera as ts
from tessera import nn


class Dense(nn.Module):
    """Two layers; the first has 10 columns, which 4 devices share unevenly."""

    def __init__(self) -> None:
        self.up, self.down = nn.Parameter(6, 10), nn.Parameter(10, 6)

    def __call__(self, x: Any) -> Any:
        return nn.dropout(ts.tanh(x @ self.up), 0.1) @ self.down


def step_of(plan: Any, optimizer: Any, features: Callable[..., Any] | None = None) -> Any:
    """Returns a training step under `plan`; `features` replaces the model's call."""

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        out = model(x) if features is None else features(model, x)
        loss = ((out - y) ** 2).mean()
        grads = ts.grad(loss, model.parameters(), layout=plan)
        new, made = optimizer.update(model.parameters(), grads, state)
        model.load_parameters(new)
        state.update(made)
        return loss

    return step
