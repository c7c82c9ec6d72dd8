"""Resumed runs under another strategy, ZeRO stage, mesh or number of devices.

Each place trains two steps, saves, and makes one more step. Each other place loads the checkpoint
and makes that step. Places of one group have one logical mesh, so `mesh_invariant` promises the
bits of the step; sums of different groups differ in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist, nn, optim, pipeline
from tests.cases import LONG

STEPS = 2
CONFIG = nn.GPTConfig(32, 8, 16, 2, 4)
TOKENS = np.random.default_rng(1).integers(0, 32, (STEPS + 1, 8, 9)).astype(np.int32)
OPTIMIZER = optim.AdamW(1e-2)


def zero(stage: int) -> Any:
    return dist.strategy("zero_redundancy_optimizer", stage=stage)


PLAIN, TP = dist.strategy("data_parallel"), dist.strategy("tensor_parallel")


@dataclass(frozen=True)
class Place:
    """A logical mesh, its fold, and the strategy on it."""

    mesh: str
    onto: str
    plan: Any
    microbatches: int = 0

    @property
    def devices(self) -> int:
        return self.here.physical.size

    @property
    def here(self) -> dist.Mesh:
        whole = dist.Mesh.parse(self.mesh)
        return whole.fold(onto=self.onto) if self.onto else whole


PLACES = {
    "dp4 tp2 on 8, ZeRO-3": Place("dp=4 tp=2", "", zero(3) + TP),
    "dp4 tp2 on 4, ZeRO-1": Place("dp=4 tp=2", "dp=4,tp=1", zero(1) + TP),
    "dp4 tp2 on 2, ZeRO-2": Place("dp=4 tp=2", "dp=1,tp=2", zero(2) + TP),
    "dp4 tp2 on 1": Place("dp=4 tp=2", "dp=1,tp=1", PLAIN + TP),
    "dp8 on 8, ZeRO-2": Place("dp=8", "", zero(2)),
    "dp8 on 2, ZeRO-3": Place("dp=8", "dp=2", zero(3)),
    "dp8 on 1, ZeRO-1": Place("dp=8", "dp=1", zero(1)),
    "tp4 on 4": Place("tp=4", "", TP),
    "one device": Place("dp=1", "", PLAIN),
    "dp2 pp2 on 4": Place("dp=2 pp=2", "", PLAIN, microbatches=4),
    "dp2 pp2 on 2, ZeRO-1": Place("dp=2 pp=2", "dp=1,pp=2", zero(1), microbatches=4),
}


def features(model: Any, ids: Any) -> Any:
    return model(ids)


class Runner:
    """The training step of a place, compiled once for all weights."""

    def __init__(self, place: Place) -> None:
        self.place, plan = place, place.plan
        run = functools.partial(pipeline.run, ("pp",), "1F1B", place.microbatches)
        self.staged: Any = run()(features) if place.microbatches else features

        @ts.jit
        def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
            loss = nn.cross_entropy(self.staged(model, ids), labels)
            weights = model.parameters()
            weights, new = OPTIMIZER.update(weights, ts.grad(loss, weights, layout=plan), state)
            model.load_parameters(weights)
            state.update(new)
            return loss

        self.step = step

    def batch(self, i: int) -> Any:
        pair = TOKENS[i][:, :-1], TOKENS[i][:, 1:]
        return dist.place(pair, self.place.plan, self.place.here, kind="batch")

    def fresh(self, seed: int) -> tuple[Any, Any]:
        """A model and its state with random weights from `seed`."""
        ts.seed(seed)
        plan = self.place.plan
        with self.place.here as mesh:
            model = dist.place(nn.GPT(CONFIG), plan, mesh)
            state = OPTIMIZER.init(model.parameters(), plan)
            if self.place.microbatches:
                self.step.plan(model, state, *self.batch(0))
                model = self.staged.place(model)
                state = OPTIMIZER.init(model.parameters(), plan)
        return model, state

    def trained(self, model: Any, state: Any, steps: range) -> list[float]:
        with self.place.here:
            return [self.step(model, state, *self.batch(i)).item() for i in steps]


def bits(model: Any, state: Any) -> dict[str, bytes]:
    kept = {"step": state["step"]}
    for kind, tree in {"w": model.state_dict(), "m": state["m"], "v": state["v"]}.items():
        kept |= {f"{kind} {name}": t for name, t in tree.items()}
    return {name: np.asarray(t.numpy()).tobytes() for name, t in kept.items()}


@functools.cache
def runner(name: str) -> Runner:
    return Runner(PLACES[name])


@dataclass(frozen=True)
class Went:
    """A run's checkpoint, and its next step: the loss, and the bits before and after."""

    root: Path
    saved: dict[str, bytes]
    loss: float
    after: dict[str, bytes]


@pytest.fixture(scope="module")
def went(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Went]:
    @functools.cache
    def run(name: str) -> Went:
        at, root = runner(name), tmp_path_factory.mktemp("run")
        model, state = at.fresh(0)
        at.trained(model, state, range(STEPS))
        checkpoint.save("t", model, state, root=root, step=STEPS, async_io=False, quiet=True)
        saved = bits(model, state)
        (loss,) = at.trained(model, state, range(STEPS, STEPS + 1))
        return Went(root, saved, loss, bits(model, state))

    return run


ALWAYS = {
    ("dp4 tp2 on 8, ZeRO-3", "dp4 tp2 on 2, ZeRO-2"),
    ("dp4 tp2 on 2, ZeRO-2", "tp4 on 4"),
    ("tp4 on 4", "dp4 tp2 on 8, ZeRO-3"),
}
PAIRS = [
    pytest.param(a, b, marks=[LONG] * ((a, b) not in ALWAYS), id=f"{a} - {b}")
    for a in PLACES
    for b in PLACES
]


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_a_run_goes_on_at_any_place(saver: str, loader: str, went: Callable[[str], Went]) -> None:
    at = runner(loader)
    with dist.deterministic(level="mesh_invariant"):
        first = went(saver)
        model, state = at.fresh(9)
        types = {n: t.type for n, t in model.parameters().items()}
        found = checkpoint.load("t", model, state, root=first.root)
        assert found.optimizer is state and found.step == STEPS
        assert bits(model, state) == first.saved
        assert {n: t.type for n, t in model.parameters().items()} == types
        (loss,) = at.trained(model, state, range(STEPS, STEPS + 1))
    if PLACES[saver].mesh == PLACES[loader].mesh:
        assert (loss, bits(model, state)) == (first.loss, first.after)
    else:
        assert loss == pytest.approx(first.loss, rel=1e-5)


def test_a_part_goes_on_elsewhere_in_another_dtype(tmp_path: Path) -> None:
    """Saved by ZeRO-3 in f32, loaded in bf16 with other layouts, and back: no other value
    changes."""
    model, state = runner("dp8 on 2, ZeRO-3").fresh(0)
    checkpoint.save("t", model, state, root=tmp_path, async_io=False, quiet=True)
    other, moments = runner("tp4 on 4").fresh(9)
    other.to(ts.bf16)
    before = other.state_dict()
    checkpoint.load("t", other, root=tmp_path, only=["*attention*", "embed.*"])
    for name, x in other.state_dict().items():
        whole, old = model.state_dict()[name], before[name]
        taken = "attention" in name or name.startswith("embed")
        assert x.dtype is ts.bf16 and x.type == old.type
        want = whole.to(ts.bf16) if taken else old
        assert x.numpy().tobytes() == want.numpy().tobytes(), name
    checkpoint.load("t", None, moments, root=tmp_path, only="m/*norm*")
    for name, m in moments["m"].items():
        same = np.array_equal(m.numpy(), state["m"][name].numpy())
        assert same and m.dtype is ts.f32, name  # none has values yet: all are zeros
    checkpoint.save("narrow", other, root=tmp_path, async_io=False, quiet=True)
    wide, _ = runner("dp4 tp2 on 1").fresh(3)
    checkpoint.load("narrow", wide, root=tmp_path)
    for name, x in wide.state_dict().items():
        assert x.dtype is ts.f32
        np.testing.assert_array_equal(x.numpy(), other.state_dict()[name].to(ts.f32).numpy())
