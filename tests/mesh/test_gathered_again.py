"""ZeRO-3 on the engine with weights gathered again for the gradient."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, schedule
from tessera.core.context import replaced
from tessera.train.memory import program_bytes

MESH = dist.Mesh(("dp",), devices=4)
ZERO = dist.strategy("zero_redundancy_optimizer", stage=3)
D, LAYERS = 128, 8
RNG = np.random.default_rng(3)
W = RNG.normal(size=(LAYERS, D, D)).astype(np.float32) / np.sqrt(D).astype(np.float32)
ROWS = 2048  # with spare memory below the peak the engine gathers all weights at once
X = RNG.normal(size=(ROWS, D)).astype(np.float32)


def written_out(w: dict[str, ts.Tensor], x: ts.Tensor) -> ts.Tensor:
    for i in range(LAYERS):
        x = ts.tanh(x @ w[f"w{i}"])
    return (x * x).mean()


def in_a_loop(w: dict[str, ts.Tensor], x: ts.Tensor) -> ts.Tensor:
    x, _ = ts.scan(lambda h, w: (ts.tanh(h @ w), ()), x, w["all"])
    return (x * x).mean()


def by_jax(w: Any, x: Any) -> Any:
    for row in w:
        x = jax.numpy.tanh(x @ row)
    return (x * x).mean()


PROGRAMS: dict[str, Any] = {
    "written out": (written_out, {f"w{i}": W[i] for i in range(LAYERS)}),
    "in a loop": (in_a_loop, {"all": W}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_frees_their_memory_and_changes_no_gradient(program: str) -> None:
    loss, given = PROGRAMS[program]
    w = dist.place({k: ts.tensor(v) for k, v in given.items()}, ZERO, MESH)
    x = ts.tensor(X, mesh=MESH, layout=f"[{ROWS}@dp, {D}]")

    def step(w: dict[str, ts.Tensor], x: ts.Tensor) -> Any:
        return ts.grad(loss(w, x), w, layout=ZERO)

    kept, freed = (schedule(reshard_after_forward=on)(step) for on in (False, None))
    want, found = kept(w, x), freed(w, x)
    saved = program_bytes(kept).temporary - program_bytes(freed).temporary
    assert saved > 0.5 * W.nbytes
    with replaced(executor="stepped"):
        apart = ts.jit(step)(w, x)
    for name in given:
        np.testing.assert_array_equal(found[name].numpy(), want[name].numpy())
        np.testing.assert_allclose(apart[name].numpy(), want[name].numpy(), rtol=1e-4, atol=1e-8)
    peer = jax.grad(by_jax)(W, X)
    mine = np.stack([found[k].numpy() for k in given]).reshape(W.shape)
    np.testing.assert_allclose(mine, peer, rtol=1e-3, atol=1e-7)
