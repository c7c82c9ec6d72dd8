"""Weights on a pipeline's stages in functions without a pipeline: as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.ir.schedule.schedule import Send

RNG = np.random.default_rng(0)
WEIGHTS = {f"w{i}": RNG.normal(size=(8, 8)).astype(np.float32) / 3 for i in range(4)}
X = RNG.normal(size=(16, 8)).astype(np.float32)
LABELS = RNG.integers(0, 8, 16).astype(np.int32)
MESHES: dict[str, dict[str, int]] = {
    "pp": {"pp": 2}, "dp pp": {"dp": 2, "pp": 2}, "pp tp dp": {"pp": 2, "tp": 2, "dp": 2},
    "pp of four": {"pp": 4, "dp": 2},
}  # fmt: skip


def layers(weights: Any, x: Any) -> Any:
    for i in range(4):
        x = ts.tanh(x @ weights[f"w{i}"])
    return x


def loss_of(model: Callable[..., Any], weights: Any, x: Any = X, labels: Any = LABELS) -> Any:
    return nn.cross_entropy(model(weights, x), labels)


def stages(name: str) -> tuple[Any, dict[str, ts.Tensor], dict[str, ts.Tensor]]:
    """Returns (a pipelined model, its weights on their stages, their gradients there)."""
    sizes = MESHES[name]
    mesh = dist.Mesh(tuple(sizes), shape=sizes)
    model = pipeline.run(mesh_axes=("pp",), microbatches=2 * sizes["pp"], mesh=mesh)(layers)
    train = ts.jit(lambda w, x, labels: ts.grad(loss_of(model, w, x, labels), w))
    like = "[8, 8@tp]" if "tp" in sizes else "[8, 8]"
    weights = {k: ts.tensor(w, mesh=mesh, layout=like) for k, w in WEIGHTS.items()}
    train.plan(weights, X, LABELS)
    weights = model.place(weights)
    assert len({t.mesh for t in weights.values()}) == sizes["pp"]
    return model, weights, train(weights, X, LABELS)


@functools.cache
def alone() -> tuple[dict[str, ts.Tensor], dict[str, ts.Tensor]]:
    weights = {k: ts.tensor(w) for k, w in WEIGHTS.items()}
    return weights, ts.value_and_grad(lambda w: loss_of(layers, w))(weights)[1]


def adam(w: Any, g: Any) -> Any:
    opt = optim.AdamW(0.1)
    state = opt.init(w)
    for _ in range(2):
        w, state = opt.update(w, g, state)
    return w


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda w, g: optim.global_norm(g),
    "clip": lambda w, g: optim.clip_by_global_norm(g, 0.01),
    "update": lambda w, g: {k: w[k] - 0.1 * g[k] for k in w},
    "adam": adam,
    "penalty": lambda w, g: sum((v**2).sum() for v in w.values()),
    "average": lambda w, g: {k: 0.9 * w[k] + 0.1 * ts.stop_gradient(g[k]) for k in w},
    "model": lambda w, g: layers(w, X),
    "tied": lambda w, g: layers({**w, "w0": w["w3"]}, X) @ w["w0"].T,
}
COMPILED: dict[str, Callable[[Any, Any], Any]] = {
    "gradients": lambda w, g: ts.grad(loss_of(layers, w), w),
    "step": lambda w, g: {
        k: w[k] - 0.1 * s for k, s in ts.grad(loss_of(layers, w), w).items()
    },
    "dropped": lambda w, g: nn.dropout(layers(w, X), 0.5),
}  # fmt: skip


@functools.cache
def wanted(what: str) -> Any:
    """The result of a function on one device."""
    ts.seed(3)
    return ts.jit((FUNCTIONS | COMPILED)[what])(*alone())


def compare(found: Any, want: Any) -> None:
    for ours, theirs in zip(
        ts.lang.record.tree.flatten(found)[0], ts.lang.record.tree.flatten(want)[0]
    ):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_what_comes_after_a_pipeline_is_as_on_one_device(name: str, everything: bool) -> None:
    """Without --long each function runs as it is written on one mesh in turn."""
    _, weights, gradients = stages(name)
    compare(gradients, alone()[1])
    for i, (what, fn) in enumerate((FUNCTIONS | COMPILED).items()):
        want = wanted(what)
        ts.seed(3)
        found = ts.jit(fn)(weights, gradients)
        compare(found, want)
        if what in FUNCTIONS and (everything or i % len(MESHES) == [*MESHES].index(name)):
            compare(fn(weights, gradients), want)
        found = found[0] if what == "clip" else found
        if isinstance(found, dict):  # each on the stage of its weight
            assert all(t.mesh == weights[k].mesh for k, t in found.items()), what
            assert all(t.layout == weights[k].layout for k, t in found.items()), what


def test_a_step_and_its_optimizer_in_two_functions_train_as_one() -> None:
    model, weights, _ = stages("dp pp")
    opt = optim.AdamW(0.1)

    def apply(w: Any, g: Any, state: Any) -> Any:
        g, norm = optim.clip_by_global_norm(g, 0.1)
        return *opt.update(w, g, state), norm

    slopes = ts.jit(lambda w, x, labels: ts.grad(loss_of(model, w, x, labels), w))
    run, seen = ts.jit(apply, donate=("w", "state")), []
    state, want = opt.init(weights), alone()[0]
    other = opt.init(want)
    for _ in range(4):
        weights, state, norm = run(weights, slopes(weights, X, LABELS), state)
        g = ts.value_and_grad(lambda w: loss_of(layers, w))(want)[1]
        want, other, expected = apply(want, g, other)
        np.testing.assert_allclose(norm.item(), expected.item(), rtol=1e-5)
        compare(weights, want)
        seen.append(run.schedule)
    assert seen[1] is seen[3]  # the step's results have its arguments' types
    sends = [s for s in seen[3].steps if isinstance(s, Send)]
    assert sends and all(t.size == 1 for s in sends for t in s.types)  # only the terms of the norm


def test_a_penalty_may_come_before_the_pipeline() -> None:
    model, weights, _ = stages("dp pp")

    def by(model: Any) -> Any:
        def step(w: Any, x: Any, labels: Any) -> Any:
            penalty = sum((v**2).sum() for v in w.values())
            loss = loss_of(model, w, x, labels) + 0.01 * penalty
            return loss, ts.grad(loss, w)

        return ts.jit(step)

    compare(by(model)(weights, X, LABELS), by(layers)(alone()[0], X, LABELS))


def test_what_rests_on_the_whole_mesh_meets_what_lies_on_its_slices() -> None:
    _, weights, gradients = stages("dp pp")
    mesh = dist.Mesh(("dp", "pp"), shape=MESHES["dp pp"])
    rate = ts.tensor(0.1, mesh=mesh, layout="[]")
    split = {k: ts.tensor(w, mesh=mesh, layout="[8@pp, 8@dp]") for k, w in WEIGHTS.items()}
    for run in (lambda f: f, ts.jit):
        found = run(lambda w, g, old: {k: w[k] - rate * g[k] + old[k] for k in w})(
            weights, gradients, split
        )
        want, slopes = alone()
        compare(found, {k: w - 0.1 * slopes[k] + w for k, w in want.items()})


def test_other_meshes_than_slices_of_one_and_strict_programs_are_refused() -> None:
    _, weights, _ = stages("dp pp")
    total = FUNCTIONS["penalty"]
    other = ts.ones((8, 8)) + ts.tensor(X[:8], mesh=dist.Mesh(("dp",), devices=4))
    for run in (total, ts.jit(total)):
        with pytest.raises(ts.MeshError, match="different meshes"):
            run({**weights, "w4": other}, None)
        with ts.strict(), pytest.raises(ts.MeshError, match="different meshes"):
            run(weights, None)
    with pytest.raises(ts.UsageError, match="return the value, and read it after the call"):
        ts.jit(lambda w: ts.ones(()) if total(w, None).item() > 1 else None)(weights)
