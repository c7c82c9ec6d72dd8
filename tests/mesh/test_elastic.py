"""Elastic runs: the same bits after a move to other devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, elastic, nn, optim, pipeline
from tessera.core.devices import LOST
from tessera.data import create_dataloader, create_distributed_dataloader
from tessera.elastic import rollback
from tessera.elastic.refold import folded_to_fit
from tessera.runtime import devices
from tests.cases import LONG
from tests.procs.elastic_model import Dense, step_of

RNG = np.random.default_rng(11)
X, Y = (RNG.normal(size=(5, 24, 6)).astype(np.float32) for _ in range(2))


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


def bits(model: Any, state: Any) -> list[bytes]:
    kept = [*model.parameters().values(), state["step"]]
    kept += [t for slot in state.values() if isinstance(slot, dict) for t in slot.values()]
    return [ts.tensor(t).numpy().tobytes() for t in kept]


def trained(case: Case, sizes: Iterable[Any]) -> list[bytes]:
    """Weights and state after one step for each of `sizes`, the number of its devices."""
    ts.seed(5)
    whole, plan = dist.Mesh.parse(case.mesh), case.plan
    features: Any = pipeline.run(("pp",), "1F1B", 4)(staged) if case.stages else case.model.__call__
    optimizer = optim.Adam(1e-2)

    step = step_of(plan, optimizer, features)

    mesh = folded_to_fit(whole, range(8))
    model = dist.place(case.model(), plan, mesh)
    state = optimizer.init(model.parameters(), plan)
    for i, there in enumerate(sizes):
        mesh = folded_to_fit(whole, there if isinstance(there, list) else range(there))
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
    return bits(model, state)


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
    with pytest.warns(ts.StrategyWarning, match=r"lacks is whole[^-]+tp +: split 480 bytes"):
        moved, again = dist.resize(dist.Mesh.parse("dp=3"), tree, [tree["a"]])
    assert moved["a"].layout == "[10@dp, 6]" and moved["a"].type.local_shape == (4, 6)
    assert moved["b"] is tree["b"] and moved["n"] == 3 and again[0].layout == "[10@dp, 6]"
    np.testing.assert_array_equal(moved["a"].numpy(), x)
    layer = dist.place(nn.Linear(4, 6), mesh=mesh)  # its values are first computed on the new mesh
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


# -- loops that go back ---------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def all_devices() -> Iterator[None]:
    yield
    for device in [*LOST]:
        elastic.restore(device)


class Rows:
    """A loader that counts its batches."""

    def __init__(self) -> None:
        self.at = 0

    def next(self) -> tuple[Any, Any]:
        self.at += 1
        return X[(self.at - 1) % 5], Y[(self.at - 1) % 5]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loop(text: str, count: int, events: dict[int, Any], safe_point: Any = 1) -> tuple[Any, Any]:
    """Returns the bits after `count` steps, and the (step, devices) that ran. `events` drop devices
    (-1 - device) or restore them (device), before or during a step."""
    ts.seed(5)
    plan = dist.strategy("zero_redundancy_optimizer", stage=2)
    optimizer = optim.Adam(1e-2)

    train_step = step_of(plan, optimizer)

    model = dist.place(Dense(), plan, elastic.fit(dist.Mesh.parse(text)))
    state = optimizer.init(model.parameters(), plan)
    rows, made, events = Rows(), [], dict(events)
    everything = {"model": model, "optimizer": state, "rows": rows, "seen": 0.0}

    def happen(when: float) -> None:
        for event in events.pop(when, ()):
            elastic.restore(event) if event >= 0 else elastic.drop(-1 - event)

    with dist.elastic(safe_point=safe_point):
        for step in elastic.steps(everything, count):
            with step as i:
                happen(i)
                x, y = (dist.place(v, plan, kind="batch") for v in rows.next())
                happen(i + 0.25)
                loss = train_step(model, state, x, y)
                happen(i + 0.5)
                everything["seen"] += loss.item()
                made.append((i, step.mesh.physical.size))
            happen(i + 0.75)
    return [*bits(model, state), everything["seen"], rows.at], made


def test_a_loop_goes_back_and_on_and_its_bits_are_those_of_one_that_lost_nothing(
    capfd: Any,
) -> None:
    lose, back = (lambda *ids: [-1 - i for i in ids]), lambda *ids: [*ids]
    events = {
        1.5: lose(0, 3, 5, 6),  # after a step ran: 4 are left
        2.25: lose(1, 7),  # before it runs: 2
        3.75: back(0, 1, 3, 5, 6, 7),
    }
    with dist.deterministic(level="mesh_invariant"):
        disturbed, made = loop("dp=8", 5, events)
        said = capfd.readouterr().err
        quiet, plain = loop("dp=8", 5, {})
    assert plain == [(i, 8) for i in range(5)]
    assert made == [(0, 8), (1, 4), (2, 2), (3, 2), (4, 8)]
    assert disturbed == quiet
    assert "elastic: devices 0, 3, 5, 6 are lost in step 1: goes on after 1 step on 4 of 8" in said
    assert "elastic: devices are back after 4 steps: goes on on 8 of 8 devices (dp=8)" in said


def test_a_safe_point_every_third_step_repeats_those_after_it() -> None:
    with dist.deterministic(level="mesh_invariant"):
        disturbed, made = loop("dp=8", 6, {5.5: [-1]}, safe_point=3)
        quiet, _ = loop("dp=8", 6, {})
    assert made == [(i, 8) for i in range(5)] + [(i, 4) for i in (3, 4, 5)]
    assert disturbed == quiet


def test_what_needs_a_lost_device_says_so_and_outside_of_the_context_it_is_raised() -> None:
    mesh = dist.Mesh.parse("dp=8")
    x = ts.tensor(X[0], mesh=mesh, layout="[24@dp, 6]")
    x.numpy()  # places the value on its device; a value on the host would not need it
    elastic.drop(2)
    for use in (lambda: x.numpy(), lambda: x + 1, lambda: ts.tensor(X[0], mesh=mesh) + 1):
        with pytest.raises(ts.DeviceLostError, match="device 2 is lost"):
            use()
    with pytest.raises(ts.DeviceLostError, match="device 2 is lost"):
        dist.resize(mesh.fold(onto=2), x)
    whole = ts.tensor(X[0], mesh=mesh.fold(onto=2), layout="[24@dp, 6]")
    with pytest.raises(ts.DeviceLostError):
        for step in elastic.steps({"x": whole}, 2):
            with step:
                elastic.drop(1)
                _ = whole + 1


def test_other_errors_are_raised_and_a_device_that_does_not_answer_is_lost(
    monkeypatch: Any,
) -> None:
    state = {"x": ts.tensor(X[0], mesh=dist.Mesh.parse("dp=8"), layout="[24@dp, 6]")}
    with pytest.raises(ZeroDivisionError), dist.elastic():
        for step in elastic.steps(state, 2):
            with step:
                _ = 1 / 0
    with pytest.raises(ts.BackendError, match="engine"), dist.elastic():
        for step in elastic.steps(state, 2):
            with step:
                raise ts.BackendError("the engine failed")  # an engine error while all devices work
    monkeypatch.setattr(devices, "answers", lambda i: i != 6)
    with dist.elastic():
        for step in elastic.steps(state, 1):
            with step:
                state["x"] = state["x"] + 1
                if step.mesh.physical.size == 8:
                    raise ts.BackendError("the engine failed")
    assert state["x"].mesh.physical.size == 4
    np.testing.assert_array_equal(state["x"].numpy(), X[0] + 1)


def test_a_safe_point_that_lost_a_part_is_not_used(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.setenv("TESSERA_ELASTIC", str(tmp_path))
    mesh = dist.Mesh.parse("dp=8")

    def begins(stop: int) -> list[int]:
        state, made = {"x": ts.tensor(X[0], mesh=mesh, layout="[24@dp, 6]")}, list[int]()
        monkeypatch.setattr(rollback, "_loops", 0)  # as in a new program with the same loop
        with dist.elastic():
            for step in elastic.steps(state, stop):
                with step as i:
                    state["x"] = state["x"] + 1
                    made.append(i)
        return made

    assert begins(3) == [0, 1, 2] and begins(5) == [3, 4]
    (data,) = tmp_path.glob("loop_*/data-*")
    data.unlink()
    capfd.readouterr()
    assert begins(2) == [0, 1]
    said = capfd.readouterr().err
    assert "elastic: a safe point after 5 steps is not whole on the hosts that are left" in said
    assert not (tmp_path / "loop_0_step_5").exists() and begins(3) == [2]


def test_loops_that_could_not_go_back_are_errors() -> None:
    x = ts.tensor(X[0], mesh=dist.Mesh.parse("dp=8"))
    with pytest.raises(ts.UsageError, match="has no `with` block"):
        for _ in elastic.steps({"x": x}, 2):
            pass
    with pytest.raises(ts.UsageError, match="changed nothing in the state"):
        for step in elastic.steps({"x": x}, 2):
            with step:
                _ = x + 1
    with pytest.raises(ts.UsageError, match="cannot be kept"):
        elastic.steps({"x": x, "draws": np.random.default_rng(0)}, 2)
    with pytest.raises(ts.MeshError, match="lies on a mesh"):
        elastic.steps({"x": ts.tensor(X[0])}, 2)
    with pytest.warns(ts.EngineWarning, match="no loop in it can go back"), dist.elastic():
        pass
    state = {"x": x}
    with pytest.raises(ts.MeshError, match="no device of the mesh is left"), dist.elastic():
        for step in elastic.steps(state, 2):
            with step:
                state["x"] = state["x"] + 1
                for i in range(8):
                    elastic.drop(i)
    with pytest.raises(ts.UsageError, match="is not lost"):
        elastic.restore(9)


@LONG
def test_the_stages_of_a_pipeline_go_back_to_their_slices() -> None:
    def run(events: dict[int, int]) -> tuple[list[bytes], list[str]]:
        ts.seed(5)
        plan, optimizer = dist.strategy("data_parallel"), optim.Adam(1e-2)
        features: Any = pipeline.run(("pp",), "1F1B", 4)(staged)

        train_step = step_of(plan, optimizer, features)

        mesh, made, events = dist.Mesh.parse("dp=2 pp=2"), list[str](), dict(events)
        model = dist.place(Dense(), plan, mesh)
        state = optimizer.init(model.parameters(), plan)
        with mesh:
            train_step.plan(model, state, *(dist.place(v[0], plan, kind="batch") for v in (X, Y)))
        model = features.place(model)
        state = optimizer.init(model.parameters(), plan)
        with dist.elastic():
            for step in elastic.steps({"model": model, "optimizer": state}, 4, mesh):
                with step as i:
                    x, y = (dist.place(v[i], plan, kind="batch") for v in (X, Y))
                    train_step(model, state, x, y)
                    if i in events:
                        elastic.drop(events.pop(i))
                    made.append(step.mesh.physical.text())
        return bits(model, state), made

    with dist.deterministic(level="mesh_invariant"):
        quiet, _ = run({})
        disturbed, made = run({1: 3, 2: 0})
    assert made == ["dp=2 pp=2"] * 2 + ["dp=1 pp=2"] * 4
    assert disturbed == quiet


@pytest.mark.parametrize("devices", [4, 8])
def test_a_loader_on_the_mesh_goes_along(devices: int) -> None:
    """Its training and validation batches lie on the remaining devices."""
    mesh = elastic.fit(dist.Mesh.parse(f"dp={devices}"))
    config = {"data": np.arange(2000), "global_batch_size": 8, "sequence_length": 4}
    loader = create_distributed_dataloader({**config, "validation_fraction": 0.2}, mesh)
    sums, lost = dist.tensor((8,), "[8@dp]", mesh, init="zeros"), False
    state: dict[str, Any] = {"sums": sums, "loader": loader}
    with dist.elastic():
        for step in elastic.steps(state, 6):
            with step as i:
                batch = next(state["loader"])
                state["sums"] = state["sums"] + batch["input_ids"].sum(-1)
                if i == 3 and not lost:
                    lost = True
                    elastic.drop(1)
    plain = create_dataloader(
        {"data": np.arange(2000), "batch_size": 8, "sequence_length": 4, "validation_fraction": 0.2}
    )
    want = sum(next(plain)["input_ids"].numpy().sum(-1) for _ in range(6))
    assert state["sums"].numpy().tolist() == want.tolist()
    (batch, *_) = loader.validation()
    assert len(state["sums"].mesh.physical.ids) == len(batch["labels"].mesh.physical.ids) < devices
