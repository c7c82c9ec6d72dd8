"""Does a run that moves to other devices go on with the same bits?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.elastic.fitting import folded_to_fit
from tests.cases import LONG

RNG = np.random.default_rng(11)
X, Y = (RNG.normal(size=(5, 24, 6)).astype(np.float32) for _ in range(2))


class Dense(nn.Module):
    """Two layers; the first has 10 columns, which 4 devices share unevenly."""

    def __init__(self) -> None:
        self.up, self.down = nn.Parameter(6, 10), nn.Parameter(10, 6)

    def __call__(self, x: Any) -> Any:
        return nn.dropout(ts.tanh(x @ self.up), 0.1) @ self.down


class Mixture(nn.Module):
    def __init__(self) -> None:
        self.moe = nn.MoE(6, 8, 4, capacity=2.0)

    def __call__(self, x: Any) -> Any:
        return self.moe(x.reshape((4, 6, 6))).reshape((24, 6))


def staged(model: Dense, x: Any) -> Any:
    return nn.relu(x @ model.up) @ model.down


@dataclass(frozen=True)
class Case:
    mesh: str
    plan: Any
    model: Any = Dense
    stages: bool = False


of = dist.strategy
CASES = {
    "dp": Case("dp=24", of("data_parallel")),
    "zero-1": Case("dp=6", of("zero_redundancy_optimizer", stage=1)),
    "zero-3": Case("dp=8", of("zero_redundancy_optimizer", stage=3)),
    "tp": Case("dp=2 tp=4", of("data_parallel") + of("tensor_parallel")),
    "experts": Case("dp=2 ep=4", of("data_parallel") + of("expert_parallel"), Mixture),
    "pipeline": Case("dp=2 pp=2", of("data_parallel"), stages=True),
}

REST = ("dp", "zero-1", "tp", "experts")


def trained(case: Case, sizes: Iterable[Any]) -> list[bytes]:
    """Weights and state after as many steps as there are `sizes`, each on so many devices."""
    ts.seed(5)
    whole, plan = dist.Mesh.parse(case.mesh), case.plan
    features: Any = pipeline.run(("pp",), "1F1B", 4)(staged) if case.stages else case.model.__call__
    optimizer = optim.Adam(1e-2)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        loss = ((features(model, x) - y) ** 2).mean()
        grads = ts.grad(loss, model.parameters(), layout=plan)
        new, made = optimizer.update(model.parameters(), grads, state)
        model.load_parameters(new)
        state.update(made)
        return loss

    mesh = folded_to_fit(whole, range(8))
    model = dist.place(case.model(), plan, mesh)
    state = optimizer.init(model.parameters(), plan)
    for i, devices in enumerate(sizes):
        mesh = folded_to_fit(whole, devices if isinstance(devices, list) else range(devices))
        model, state = dist.resize(mesh, model, state)
        assert {t.mesh.physical.size for t in model.parameters().values()} <= {
            mesh.physical.size, mesh.physical.size // mesh.physical.sizes.get("pp", 1)
        }  # fmt: skip
        x, y = (dist.place(v[i], plan, mesh, kind="batch") for v in (X, Y))
        if case.stages and i == 0:
            with mesh:
                step.plan(model, state, x, y)
            model = features.place(model)
            state = optimizer.init(model.parameters(), plan)
        with mesh:
            step(model, state, x, y)
    kept = [*model.parameters().values(), state["step"]]
    kept += [t for slot in state.values() if isinstance(slot, dict) for t in slot.values()]
    return [ts.tensor(t).numpy().tobytes() for t in kept]


@pytest.mark.parametrize(
    "name", ["zero-3", "pipeline", *(pytest.param(n, marks=LONG) for n in REST)]
)
def test_a_run_that_moves_gives_the_bits_of_one_that_does_not(name: str) -> None:
    with dist.deterministic(level="mesh_invariant"):
        moving = trained(CASES[name], [8, 6, 2, [1, 2, 3, 4, 5, 7]])
        assert moving == trained(CASES[name], [4] * 4)


def test_what_moves_keeps_its_layout_and_its_values() -> None:
    mesh = dist.Mesh.parse("dp=4 tp=2")
    x = RNG.normal(size=(10, 6)).astype(np.float32)
    tree = {"a": ts.tensor(x, mesh=mesh, layout="[10@dp, 6@tp]"), "b": ts.tensor(x), "n": 3}
    moved, again = dist.resize(dist.Mesh.parse("dp=3"), tree, [tree["a"]])
    assert moved["a"].layout == "[10@dp, 6]" and moved["a"].type.local_shape == (4, 6)
    assert moved["b"] is tree["b"] and moved["n"] == 3 and again[0].layout == "[10@dp, 6]"
    np.testing.assert_array_equal(moved["a"].numpy(), x)
    layer = dist.place(nn.Linear(4, 6), mesh=mesh)  # without values, which come on the new mesh
    assert dist.resize(mesh.fold(onto=1), layer) is layer
    assert layer.weight.mesh.physical.size == 1


def test_what_cannot_move_is_said() -> None:
    mesh = dist.Mesh.parse("dp=4")
    one, other = (ts.tensor(X[0], mesh=m) for m in (mesh, dist.Mesh(["dp"], [6, 7])))
    with pytest.raises(ts.MeshError, match="several meshes, and one of them is no slice"):
        dist.resize(mesh.fold(onto=2), [one, other])
    with pytest.raises(ts.UsageError, match="nothing to move"):
        dist.resize(mesh)
    with pytest.raises(ts.UsageError, match="resize between two calls"):
        ts.jit(lambda x: dist.resize(mesh.fold(onto=2), x))(one)
