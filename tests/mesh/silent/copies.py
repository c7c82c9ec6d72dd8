"""Do copies of weights stay when the weights are donated?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn
from tests.mesh.silent.rows import row


def _decayed(m: nn.Linear, x: np.ndarray) -> None:
    grads = ts.grad((m(x) ** 2).mean(), m)
    m.load_parameters({k: w - 0.1 * grads[k] for k, w in m.parameters().items()})


COPIES: dict[str, Callable[[nn.Linear], Callable[[], np.ndarray]]] = {
    "of a module": lambda m: (c := copy.deepcopy(m)) and c.weight.numpy,
    "of its state": lambda m: copy.deepcopy(m.state_dict())["weight"].numpy,
    "loaded into another": lambda m: _loaded(nn.Linear(3, 3), m),
    "loaded from a copy": lambda m: _loaded(nn.Linear(3, 3), copy.deepcopy(m)),
}


def _loaded(into: nn.Linear, m: nn.Linear) -> Callable[[], np.ndarray]:
    into.load_state_dict(m.state_dict())
    return into.weight.numpy


for name, made in COPIES.items():

    @row(f"a copy of donated weights: {name}")
    def _(made: Any = made) -> None:
        x = np.ones((4, 3), np.float32)
        step = ts.jit(_decayed, donate="m")
        for warm in (0, 1):
            ts.seed(0)
            m = nn.Linear(3, 3)
            for _ in range(warm):
                step(m, x)
            before, kept = m.weight.numpy(), made(m)
            step(m, x)
            np.testing.assert_array_equal(kept(), before)
            assert np.abs(m.weight.numpy() - before).max() > 0


@row("a state that is looked at before the weights are placed and donated")
def _() -> None:
    m = nn.Linear(3, 3)
    seen = m.state_dict()
    mesh = dist.Mesh(("dp",), devices=4)
    dist.place(m, dist.strategy("zero_redundancy_optimizer", stage=3), mesh)
    ts.jit(_decayed, donate="m")(m, np.ones((4, 3), np.float32))
    assert seen["weight"].shape == m.weight.shape and np.isfinite(m.weight.numpy()).all()
    assert np.isfinite(seen["weight"].numpy()).all()
