"""The language with NumPy as the engine."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tests.core.numpy_engine import Oracle
from tests.core.test_lang import MESH, real


def test_reads_cut_and_writes_come_back(oracle: Oracle) -> None:
    @ts.jit
    def step(x: ts.Tensor, state: dict[str, ts.Tensor]) -> ts.Tensor:
        total = ts.sum(x)
        if total > 0:
            state["positive"] = state["positive"] + 1.0
            return x * total
        del state["extra"]
        return -x

    for x, positive in (([1.0, 2.0], 1.0), ([1.0, 2.0], 1.0), ([-1.0, 0.0], 0.0)):
        state = {"positive": ts.tensor(0.0), "extra": ts.tensor(9.0)}
        out = step(ts.tensor(x), state)
        want = np.array(x) * sum(x) if positive else -np.array(x)
        np.testing.assert_allclose(out.numpy(), want)
        assert state["positive"].item() == positive
        assert ("extra" in state) == bool(positive)
    before = oracle.compiled
    step(ts.tensor([3.0, 4.0]), {"positive": ts.tensor(0.0), "extra": ts.tensor(0.0)})
    assert oracle.compiled <= before + 2  # a new sum takes a new path, of at most two programs


def test_what_follows_a_read_is_compiled_once_for_all_values(oracle: Oracle) -> None:
    seen: list[float] = []
    note = seen.append  # a write to a list that a recorded function names gives a warning

    @ts.jit
    def step(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
        loss = ts.mean((x @ w) ** 2)
        note(loss.item())
        last, _ = ts.scan(lambda row, x: (row + x, None), x[0], x)  # loop bodies are compared too
        return ts.sum(last) - loss

    w, compiled = ts.tensor(real(4, 2)), []
    for x in (real(3, 4), real(3, 4), -real(3, 4), 0.5 * real(3, 4)):
        got = step(w, ts.tensor(x)).item()
        np.testing.assert_allclose(got, x.sum() + x[0].sum() - seen[-1], rtol=1e-4, atol=1e-5)
        compiled.append(oracle.compiled)
    assert len(set(seen)) == 4 and compiled == [compiled[0]] * 4


class Thing:
    pass


NUMBER = "pass a number that changes as a tensor, ts.tensor(x)"
SHAPES = "give tensors of few shapes, such as lengths that are padded"


@pytest.mark.parametrize(("given", "said"), [
    ([{"k": 1.0}, {"k": 2.0}, {"k": 3.0}], f"more.k was 1.0, then 2.0, then 3.0; {NUMBER}"),
    ([np.float32(1.5), np.int32(2), np.float64(2.5)],
     f"more was float32(1.5), then int32(2), then float64(2.5); {NUMBER}"),
    ([np.ones(n, np.float32) for n in (1, 2, 3)],
     f"more was f32[1], then f32[2], then f32[3]; {SHAPES}"),
    ([ts.tensor([1.0], mesh=dist.Mesh(("dp",), devices=n)) for n in (1, 2, 4)],
     f"more was f32[1] on dp=1, then f32[1] on dp=2, then f32[1] on dp=4; {SHAPES}"),
    ([Thing(), Thing(), Thing()],
     "more was one object of class Thing, then another, then another;"
     " give the same object, or one that is equal to it (a dataclass, say)"),
    ([[1], [1, 2], [1, 2, 3]],
     "the structure of its arguments keeps changing: more had 1, then 2, then 3 leaves;"
     " give as many of each at each call"),
])  # fmt: skip
def test_the_warning_of_a_third_recording_says_what_changes(
    oracle: Oracle, given: list[Any], said: str
) -> None:
    @ts.jit
    def f(x: ts.Tensor, more: Any) -> ts.Tensor:
        return x * 2.0

    f.plan(ts.tensor([1.0]), given[0])
    f.plan(ts.tensor([1.0]), given[1])
    with pytest.warns(ts.TraceWarning) as caught:
        f.plan(ts.tensor([1.0]), given[2])
    assert str(caught[0].message).partition("): ")[2] == said
    assert caught[0].filename == __file__


def test_equal_gradients_outside_a_function_are_compiled_once(oracle: Oracle) -> None:
    w = ts.tensor(real(4, 2))

    def slope(x: ts.Tensor, least: float) -> ts.Tensor:
        return ts.grad(ts.sum(ts.maximum(x @ w, least) ** 2), w)

    compiled, found = [], []
    for least in (0.0, 0.0, -0.0, 0.5):
        x = ts.tensor(real(3, 4))
        found.append(slope(x, least).numpy())
        compiled.append(oracle.compiled)
    assert len(set(compiled)) == 1  # numbers are arguments of a gradient, as of an op
    assert all((a != b).any() for a, b in itertools.pairwise(found))


def test_gradients_on_the_tape_and_in_a_function(oracle: Oracle) -> None:
    x, w = ts.tensor(real(3, 4)), ts.tensor(real(4, 2), mesh=MESH, layout="[4, 2@dp]", name="w")

    def loss(w: ts.Tensor) -> ts.Tensor:
        return ts.mean(ts.tanh(x @ w) ** 2)

    found = ts.grad(loss(w))["w"]
    inside = ts.jit(lambda w: ts.grad(loss(w), w))(w)
    y = np.tanh(x.numpy() @ w.numpy())
    want = x.numpy().T @ (2 * y * (1 - y**2) / y.size)
    for g in (found, inside):
        assert g.layout == w.layout
        np.testing.assert_allclose(g.numpy(), want, rtol=1e-4, atol=1e-6)


def test_a_gpt_learns(oracle: Oracle) -> None:
    ts.seed(1)
    model = nn.GPT(nn.GPTConfig(vocab=16, seq=8, d=16, layers=2, heads=2, kv_heads=1, norm="rms",
                                activation="swiglu", positions="rotary", tied=True))  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 16, (2, 9)).astype(np.int32)

    @ts.jit
    def step(model: nn.GPT, x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        loss = model.loss(x, y)
        weights = model.parameters()
        grads = ts.grad(loss, weights)
        model.load_parameters({k: weights[k] - grads[k] * 0.5 for k in weights})
        return loss

    x, y = ts.tensor(ids[:, :-1]), ts.tensor(ids[:, 1:])
    losses = [step(model, x, y).item() for _ in range(4)]
    assert abs(losses[0] - math.log(16)) < 0.2
    assert losses[3] < losses[2] < losses[1] < losses[0]


def test_initial_values_depend_on_name_and_seed_alone(oracle: Oracle) -> None:
    def made(**how: Any) -> Any:
        ts.seed(4)
        return dist.tensor((64, 64), name="w", **how).numpy()

    first = made()
    np.testing.assert_array_equal(made(mesh=MESH, layout="[64@tp, 64]"), first)
    assert abs(first.std() - 1 / 8) < 0.01
    assert (made(init="ones") == 1).all() and (made(init=0.5) == 0.5).all()
    assert np.abs(made(init="uniform")).max() <= 1 / 8
    saved = ts.random.state()
    a = ts.random.uniform((5,)).numpy()
    ts.random.set_state(saved)
    np.testing.assert_array_equal(ts.random.uniform((5,)).numpy(), a)


def test_collectives_by_hand_are_the_identity(oracle: Oracle) -> None:
    x = ts.tensor(real(8, 4), mesh=MESH, layout="[8@dp, 4]")
    total = ts.sum(x, 0)
    assert dist.all_reduce(total).layout == dist.all_reduce(total, "dp", "sum").layout == "[4]"
    assert dist.reduce_scatter(total, "dp").layout == "[4@dp]"
    assert dist.all_gather(x).layout == "[8, 4]"
    assert dist.shard(x, "dp", 1).layout == "[8, 4@dp]"
    assert (
        dist.redistribute(x, dist.ShardSpec(("row",), (("tp", "dp"),))).layout == "[8@(tp,dp), 4]"
    )
    for t in (dist.all_gather(x), dist.shard(x, "dp", 1), dist.redistribute(x)):
        np.testing.assert_array_equal(t.numpy(), x.numpy())
