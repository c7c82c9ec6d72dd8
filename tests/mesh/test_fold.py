"""Does a program for a logical mesh give the same on fewer devices, each taking several turns?"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim
from tests.cases import grid
from tests.core.local_cases import CASES, MESH, Case
from tests.core.test_local import each_own, expected, whole_type

RNG = np.random.default_rng(5)
FOLDS = ["dp=1", "tp=1", "dp=1,tp=1"]


@pytest.mark.parametrize(("case", "onto"), grid(CASES, FOLDS, lambda c: getattr(c, "name", c)))
def test_local_bodies_and_their_gradients(case: Case, onto: str) -> None:
    mesh, t = MESH.fold(onto), whole_type(case)
    x = RNG.normal(size=t.shape).astype(np.float32)
    out = expected(case, x)
    c = RNG.normal(size=out.shape).astype(np.float32)
    body = each_own(case)

    @ts.jit
    def run(x: ts.Tensor, c: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        y = body(x)
        return y, ts.grad((y * c).sum(), x)

    y, g = run(ts.tensor(x, mesh=mesh, layout=str(t)), ts.tensor(c, mesh=mesh))
    _, want = run(ts.tensor(x, mesh=MESH, layout=str(t)), ts.tensor(c, mesh=MESH))
    np.testing.assert_allclose(y.numpy(), out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(g.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["[6@dp, 5@tp]", "[6, 5@(tp,dp)]", "[(2@tp·3@dp), 5]", "[6, 5]"])
@pytest.mark.parametrize("onto", FOLDS)
def test_values_come_and_go(layout: str, onto: str) -> None:
    x = RNG.normal(size=(6, 5)).astype(np.float32)
    t = ts.tensor(x, mesh=MESH.fold(onto), layout=layout)
    np.testing.assert_array_equal(t.numpy(), x)
    for to in ("[6@(dp,tp), 5]", "[6, 5@dp]", "[6@tp, 5]"):
        moved = dist.redistribute(t, to)
        np.testing.assert_array_equal(moved.numpy(), x)
        np.testing.assert_allclose(ts.sum(moved, dim=0).numpy(), x.sum(0), rtol=1e-5, atol=1e-6)


def trained(mesh: dist.Mesh, zero: int) -> list[float]:
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    if zero:
        plan = plan + dist.strategy("zero_redundancy_optimizer", stage=zero)
    ts.seed(2)
    config = nn.GPTConfig(32, 8, 16, 1, 2, positions="rotary", norm="rms", dropout=0.1)
    model = dist.place(nn.GPT(config), plan, mesh)
    optimizer = optim.AdamW(1e-2)
    state = optimizer.init(model.parameters(), plan)

    @ts.jit
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss = model.loss(ids, labels)
        weights = model.parameters()
        weights, new = optimizer.update(weights, ts.grad(loss, weights, layout=plan), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    tokens = np.random.default_rng(0).integers(0, 32, (3, 8, 9)).astype(np.int32)
    return [
        step(model, state, *dist.place((r[:, :-1], r[:, 1:]), plan, mesh, kind="batch")).item()
        for r in tokens
    ]


@functools.cache
def unfolded(zero: int) -> list[float]:
    return trained(dist.Mesh.parse("dp=2 tp=2"), zero)


@pytest.mark.parametrize(("zero", "onto"), grid([0, 3], ["dp=1", "dp=1,tp=1", "tp=1"]))
def test_a_model_trains_alike(zero: int, onto: str) -> None:
    found = trained(dist.Mesh.parse("dp=2 tp=2").fold(onto), zero)
    np.testing.assert_allclose(found, unfolded(zero), rtol=1e-5)


def test_a_mesh_larger_than_the_machine_says_how_it_fits() -> None:
    mesh = dist.Mesh.parse("dp=16")
    with pytest.raises(ts.BackendError, match=r"fix     : mesh.fold\(onto=8\)"):
        ts.ones((16,)).numpy(), ts.tensor(np.ones(16), mesh=mesh, layout="[16@dp]").numpy()
    folded = mesh.fold(onto=8)
    assert ts.tensor(np.ones(16), mesh=folded, layout="[16@dp]").sum().item() == 16.0


SCRIPT = """
import hashlib
import numpy as np
import tessera as ts
from tessera import dist

def trained(onto):
    mesh = dist.Mesh.parse("dp=4 tp=2").fold(onto)
    rng = np.random.default_rng(0)
    x = ts.tensor(rng.normal(size=(8, 6)), mesh=mesh, layout="[8@dp, 6]")
    w = {"up": ts.tensor(rng.normal(size=(6, 8)), mesh=mesh, layout="[6, 8@tp]"),
         "down": ts.tensor(rng.normal(size=(8, 6)), mesh=mesh, layout="[8@tp, 6]")}

    @ts.jit
    def step(w, x):
        loss = ((ts.tanh(ts.gelu(x @ w["up"]) @ w["down"]) - x) ** 2).mean()
        return loss, {k: v - 0.1 * g for (k, v), g in zip(w.items(), ts.grad(loss, w).values())}

    found = hashlib.sha256()
    for _ in range(3):
        loss, w = step(w, x)
        found.update(loss.numpy().tobytes())
    for v in w.values():
        found.update(v.numpy().tobytes())
    return found.hexdigest()

folds = ("dp=4", "dp=2", "dp=1", "tp=1", "dp=2,tp=1", "dp=1,tp=1")
hashes = {onto: trained(onto) for onto in folds}
assert len(set(hashes.values())) == 1, hashes
print("one hash")
"""


def test_one_hash_on_every_fold() -> None:
    """In a process of its own: the level is set before the backend starts."""
    env = {**os.environ, "TESSERA_DETERMINISTIC": "1"}
    script = SCRIPT.replace("ts.gelu", "ts.nn.gelu")
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=500,
        cwd=Path(__file__).resolve().parents[2], check=False,
    )  # fmt: skip
    assert done.stdout == "one hash\n", done.stderr[-2000:]


def test_a_level_that_is_set_too_late_is_refused() -> None:
    ts.ones((2,)).numpy()
    with (
        pytest.raises(ts.BackendError, match="set after the backend had started"),
        dist.deterministic(),
    ):
        ts.jit(lambda x: x + 1.0)(ts.ones((2,)))
    with (
        pytest.raises(ts.UsageError, match="reduce_tree cannot be 'star'"),
        dist.deterministic("star"),
    ):
        pass
    with pytest.raises(ts.UsageError, match="level cannot be 'always'"):
        dist.set_deterministic(level="always")
