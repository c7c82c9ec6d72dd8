"""optax optimizers: JAX's weights, on one device and with state split over a mesh, or an error."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import dist, nn, optim
from tessera.lang.foreign.jax_program import as_ops

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 4, "tp": 2})
RNG = np.random.default_rng(6)
VALUES = {
    "up": {"weight": RNG.normal(size=(8, 16)).astype(np.float32), "bias": np.zeros(16, np.float32)},
    "down": RNG.normal(size=(16, 4)).astype(np.float32),
}
X = RNG.normal(size=(8, 4)).astype(np.float32)
STEPS = 4
# For each step, the terms of 8 examples in the gradient of each weight.
PARTS = [
    jax.tree.map(lambda v: RNG.normal(size=(8, *v.shape)).astype(np.float32), VALUES)
    for _ in range(STEPS)
]
COSINE = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 6)
MASK = {"up": {"weight": True, "bias": False}, "down": True}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(COSINE, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.05),
    "clipped adamw": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(COSINE, weight_decay=0.1, mask=MASK)
    ),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=4),
    "lion": optax.lion(0.01, weight_decay=0.1),
    "lamb": optax.lamb(0.05),
    "flat": optax.flatten(optax.adam(0.05)),
    "muon": optax.contrib.muon(0.05),
    "rmsprop": optax.rmsprop(optax.exponential_decay(0.1, 2, 0.5, staircase=True)),
    "novograd": optax.novograd(0.05),
    "schedule in the state": optax.inject_hyperparams(optax.adam)(COSINE),
    "several steps": optax.MultiSteps(optax.adam(0.05), 2),
    "finite": optax.apply_if_finite(optax.adam(0.05), 3),
    "by part": optax.partition(
        {"a": optax.adam(0.05), "b": optax.sgd(0.1)}, {"up": "a", "down": "b"}
    ),
}


def by_jax(tx: Any) -> Any:
    params = jax.tree.map(jax.numpy.asarray, VALUES)
    state = tx.init(params)
    step = jax.jit(tx.update)
    for parts in PARTS:
        moves, state = step(jax.tree.map(lambda g: g.sum(0), parts), state, params)
        params = optax.apply_updates(params, moves)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_gives_what_optax_gives(name: str) -> None:
    want, want_state = by_jax(OPTIMIZERS[name])
    zero = dist.strategy("zero_redundancy_optimizer", stage=1)
    opt = optim.from_optax(OPTIMIZERS[name])
    params = dist.place(_tensors(VALUES), zero, MESH)
    state = opt.init(params, zero)
    before = {n: t.type for n, t in opt.state_dict(state).items()}

    @ts.jit
    def step(params: Any, state: Any, parts: Any) -> Any:
        pairs = zip(_leaves(params), _leaves(parts), strict=True)
        loss = sum((ts.sum(w * g) for w, g in pairs), ts.zeros(()))
        return opt.update(params, ts.grad(loss, params), state)

    for parts in PARTS:
        split = dist.place(_tensors(parts), zero, MESH, kind="batch")
        params, state = step(params, state, split)
    for a, b in zip(jax.tree.leaves(want), _leaves(params), strict=True):
        np.testing.assert_allclose(b.numpy(), a, rtol=1e-4, atol=1e-5)
    after = opt.state_dict(state)
    theirs = opt.state_dict(want_state)
    assert theirs.keys() == after.keys()
    for n, a in theirs.items():
        np.testing.assert_allclose(after[n].numpy(), a, rtol=1e-4, atol=1e-5)
    assert {n: t.type for n, t in after.items()} == before
    if name == "adam":  # each device has its part of the state, and sums its part of gradients
        assert str(before["0.1.up.weight"]) == "f32[8, 16@dp]"
        assert str(before["0.0"]) == "i32[]"
        kinds = {n.op for n, _ in step.graph.collectives()}
        assert kinds == {"reduce_scatter", "all_gather"}


def _tensors(tree: Any) -> Any:
    return {k: _tensors(v) for k, v in tree.items()} if isinstance(tree, dict) else ts.tensor(tree)


def _leaves(tree: Any) -> list[ts.Tensor]:
    return [t for _, v in sorted(tree.items())
            for t in (_leaves(v) if isinstance(v, dict) else [v])]  # fmt: skip


def test_a_module_and_its_state_on_disk() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.relu, nn.Linear(4, 1))
    opt = optim.from_optax(optax.adam(0.1))
    state = opt.init(model)
    losses = []
    for _ in range(5):
        loss = ts.mean(model(X) ** 2)
        params, state = opt.update(model, ts.grad(loss, model), state)
        model.load_parameters(params)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    saved = {n: t.numpy() for n, t in opt.state_dict(state).items()}
    again = opt.load_state_dict(opt.init(model), saved)
    for n, t in opt.state_dict(again).items():
        np.testing.assert_array_equal(t.numpy(), saved[n])


def test_what_cannot_be_had_says_so() -> None:
    params = _tensors(VALUES)
    with pytest.raises(ts.UsageError, match=r"tx cannot be .*\n.*\n.*give a GradientTransf"):
        optim.from_optax("adam")
    for asks in (optax.lbfgs(), optax.contrib.reduce_on_plateau()):
        opt = optim.from_optax(asks)
        with pytest.raises(
            ts.UsageError, match=r"with gradients, state and weights alone\n.*value"
        ):
            opt.update(params, params, opt.init(params))
    looked_up = optim.SGD(lr=lambda step: jax.scipy.special.gammaln(step + 1.0))
    for update in (looked_up.update, ts.jit(looked_up.update)):
        with pytest.raises(ts.UsageError, match="schedule: lgamma of JAX has no rule here"):
            update(params, params, looked_up.init(params))
    opt = optim.from_optax(optax.adam(0.1))
    state = opt.init(params)
    with pytest.raises(ts.UsageError, match="params and grads"):
        opt.update(params, {"up": params["up"]}, state)
    adam = optax.adam(0.1)
    adam, clip = optax.adam(0.1), optax.clip_by_global_norm(1.0)
    for direct in (
        lambda p: adam.update(p, adam.init(VALUES)),
        lambda p: clip.update(p, optax.EmptyState()),
        lambda p: optax.apply_updates(p, p),
    ):
        with pytest.raises(ts.TesseraError, match=r"optim\.from_optax"):
            ts.jit(direct)(params)


SCHEDULES = {
    "exponential": optax.exponential_decay(0.1, 1, 0.9),
    "warmup": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6),
    "one cycle": optax.cosine_onecycle_schedule(6, 0.1),
    "joined": optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 2), optax.constant_schedule(0.1)], [2]
    ),
    "constant": optax.constant_schedule(0.1),
    "of jax": lambda step: jax.numpy.where(step < 2, 0.1, 0.05),
    "table": lambda step: jax.numpy.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])[step],
    "half": lambda step: 0.5 * optax.exponential_decay(0.1, 1, 0.9)(step),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_optax_is_one(name: str) -> None:
    rate = SCHEDULES[name]
    w, g = {"w": ts.ones(3)}, {"w": ts.ones(3)}
    opt = optim.SGD(lr=rate)
    for update in (opt.update, ts.jit(opt.update)):
        state, found, params = opt.init(w), [], w
        for _ in range(6):
            new, state = update(params, g, state)
            found.append((params["w"] - new["w"])[0].item())
            params = new
        np.testing.assert_allclose(found, [rate(jax.numpy.int32(i)) for i in range(6)], atol=1e-6)


@pytest.mark.parametrize("turn", ["forward", "reverse", "none"])
def test_a_short_loop_of_jax_is_written_out(turn: str) -> None:
    """As in Muon: the equations of the loop body, once per iteration."""

    def fn(x: Any) -> list[Any]:
        start, rows = jax.numpy.ones(4), None if turn == "none" else x
        carry, outs = jax.lax.scan(
            lambda c, r: (c * 0.9 + (1 if r is None else r), c), start, rows, 3 if rows is None
            else None, reverse=turn == "reverse",
        )  # fmt: skip
        return [carry, outs]

    for ours, theirs in zip(as_ops("test", fn, [ts.tensor(X[:3, :4])]), fn(X[:3, :4]), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6)


def test_at_once_it_works_or_says_what_does() -> None:
    """optax code that only uses operators works on tensors, with JAX arrays as state."""
    w, g = ts.tensor(VALUES["down"]), ts.tensor(X[:4].repeat(4, 0))
    for tx in (optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)):
        state, want = tx.init({"w": w}), tx.init({"w": w.jax()})
        for _ in range(2):
            moves, state = tx.update({"w": g}, state, {"w": w})
            expected, want = tx.update({"w": g.jax()}, want, {"w": w.jax()})
        assert isinstance(moves["w"], ts.Tensor)
        np.testing.assert_allclose(moves["w"].numpy(), expected["w"], rtol=1e-6)
    for tx in (optax.adam(0.1), optax.lion(0.1), optax.clip_by_global_norm(1.0)):
        state = tx.init({"w": w})
        with pytest.raises(ts.TesseraError, match=r"optim\.from_optax\(tx\)"):
            tx.update({"w": g}, state, {"w": w})
    with pytest.raises(ts.TesseraError, match=r"jnp\.asarray\(x\) is the value alone") as said:
        jax.numpy.sqrt(w)
    assert f"at     : {__file__.rpartition('/')[2]}" in str(said.value)
    assert jax.numpy.asarray(w).dtype == np.float32
    assert np.zeros(2, ts.bf16).dtype.name == "bfloat16"


def test_apply_updates_keeps_layouts_or_says_what_does() -> None:
    """JAX arrays are split like the weights; a warning names the layouts that JAX cannot
    represent."""

    def plus(p: Any, u: Any) -> Any:
        return jax.tree.map(lambda p, u: p + u, p, u)

    w = {"w": ts.tensor(VALUES["down"], mesh=MESH, layout="[16@tp, 4@dp]")}
    moved = optax.apply_updates(w, w)
    assert ts.tensor(moved["w"]).type == w["w"].type
    np.testing.assert_array_equal(moved["w"], 2 * VALUES["down"])
    zero = dist.strategy("zero_redundancy_optimizer", stage=3)
    folded = MESH.fold(onto=4)
    for odd in (
        dist.place({"w": ts.tensor(VALUES["down"])}, zero, MESH),
        {"w": ts.tensor(VALUES["down"], mesh=folded, layout="[16@tp, 4@dp]")},
    ):
        with pytest.warns(
            ts.EngineWarning, match=r"whole on one device\n  fix : jax\.tree\.map"
        ) as said:
            whole = optax.apply_updates(odd, odd)
        assert said[0].filename == __file__
        np.testing.assert_array_equal(whole["w"], 2 * VALUES["down"])
        for kept in (plus(odd, odd), ts.jit(plus)(odd, odd)):
            assert kept["w"].type == odd["w"].type
            np.testing.assert_array_equal(kept["w"].numpy(), 2 * VALUES["down"])
    one = ts.ones((3,))
    assert isinstance(jax.numpy.ones(3) + one, ts.Tensor), "operators of JAX leave it to ours"
