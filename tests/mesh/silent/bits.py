"""Reproducible bits, and clipping with NaN: no row may break either silently."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import torch

import tessera as ts
from tessera import dist, optim

from .rows import row

TRAINED = """
import numpy as np, tessera as ts
from tessera import dist, optim
rng = np.random.default_rng(0)
W = (rng.normal(size=(12, 12)) / 4).astype(np.float32)
X = rng.normal(size=(16, 12)).astype(np.float32)
def trained(zero):
    mesh, plan = dist.Mesh.parse("dp=4"), dist.strategy("data_parallel")
    if zero:
        plan = plan + dist.strategy("zero_redundancy_optimizer", stage=zero)
    w = dist.place({name: ts.tensor(W) for name in "abc"}, plan, mesh)
    opt = optim.Adafactor(1e-2, factor_from=4)
    state = opt.init(w, plan)
    @ts.jit
    def step(w, state, x):
        h = ts.tanh(x @ w["a"].T) @ (w["b"] * 0.3 + w["c"] @ w["c"])
        loss = (h * h).mean() + 1e-2 * sum((v * v).sum() for v in w.values())
        w, state = opt.update(w, ts.grad(loss, w, layout=plan), state)
        return w, state, loss
    x = dist.place(X, plan, mesh, kind="batch")
    for _ in range(2):
        w, state, loss = step(w, state, x)
    return b"".join(v.numpy().tobytes() for v in w.values())
assert trained(0) == trained(3), "ZeRO-3 has other bits"
"""


@row("Adafactor, x @ w.T, w * 0.3, a @ b and a penalty of weights under ZeRO-3: the bits of ZeRO-0")
def zero() -> None:
    env = {**os.environ, "TESSERA_DETERMINISTIC": "1", "TESSERA_DEVICES": "4"}
    command = [sys.executable, "-c", TRAINED]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def clipped(bad: float) -> None:
    """Clipping by norm with one gradient element `bad`, against PyTorch."""
    grads = {"a": np.array([3.0, bad], np.float32), "b": np.array([1.0, -2.0], np.float32)}
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in grads]
    for p, g in zip(params, grads.values(), strict=True):
        p.grad = torch.tensor(g)
    want = torch.nn.utils.clip_grad_norm_(params, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got, norm = optim.clip_by_global_norm({k: ts.tensor(g) for k, g in grads.items()}, 1.0)
        np.testing.assert_array_equal(norm.numpy(), want.detach().numpy())
        for p, g in zip(params, got.values(), strict=True):
            np.testing.assert_array_equal(np.abs(g.numpy()), np.abs(p.grad.numpy()))


@row("clipping gradients one of which is NaN: all become NaN, as in PyTorch")
def nan() -> None:
    clipped(float("nan"))


@row("clipping gradients one of which is infinite: the others become 0, as in PyTorch")
def infinite() -> None:
    clipped(float("inf"))


@row("a gradient that is spread over rows that do not divide, at rest split")
def _() -> None:
    mesh, plan = dist.Mesh("dp", devices=4), dist.strategy("zero_redundancy_optimizer", stage=3)
    for shape in ((3, 8), (5, 3, 7), (3, 7)):
        start = np.ones(shape, np.float32)
        w = dist.place({"w": ts.tensor(start, name="w")}, plan, mesh)

        def step(w: dict[str, ts.Tensor]) -> tuple[ts.Tensor, ts.Tensor]:
            g = ts.grad(w["w"].mean(0).sum(), w)["w"]
            return g, w["w"] - 0.1 * g

        with dist.deterministic(level="mesh_invariant"):
            g, new = ts.jit(step)(w)
        assert g.type == w["w"].type == new.type
        np.testing.assert_allclose(new.numpy(), start - 0.1 / shape[0], rtol=1e-6)
