"""The local view on the engine: the bodies of tests/core, on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import dist, op
from tests.core.local_cases import CASES, MESH, Case, N
from tests.core.test_local import each_own, expected, whole_type

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_engine_gives_what_the_devices_would(case: Case) -> None:
    t = whole_type(case)
    x = RNG.normal(size=t.shape).astype(np.float32)
    body = each_own(case)
    out = expected(case, x)
    c = RNG.normal(size=out.shape).astype(np.float32)

    @ts.jit
    def run(x: ts.Tensor, c: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        y = body(x)
        return y, ts.grad((y * c).sum(), x)

    y, g = run(ts.tensor(x, mesh=MESH, layout=t), ts.tensor(c, mesh=MESH))
    np.testing.assert_allclose(y.numpy(), out, rtol=2e-5, atol=2e-6)
    step, eps = RNG.normal(size=x.shape), 1e-6
    far = x.astype(np.float64)
    slope = (expected(case, far + eps * step) - expected(case, far - eps * step)) / (2 * eps)
    np.testing.assert_allclose((g.numpy() * step).sum(), (slope * c).sum(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("onto", ["dp=2,tp=2", "dp=1,tp=2", "dp=2,tp=1", "dp=1,tp=1"])
@pytest.mark.parametrize("root", range(4))
def test_a_broadcast_changes_no_bit(root: int, onto: str) -> None:
    """Neither of a negative zero nor of a NaN, on any fold."""
    mesh = MESH.fold(onto)
    odd = np.array([-0.0, np.nan, -np.inf, 1e-42], np.float32)
    x = np.concatenate([np.full((1, 4), i, np.float32) for i in range(4)])
    x[root] = odd
    for dtype in (np.float32, ml_dtypes.bfloat16, np.bool_, np.int32):
        with np.errstate(invalid="ignore"):
            given = x.astype(dtype)
        sent = op.kernel(lambda v: dist.broadcast(v, ("dp", "tp"), root=root))
        got = sent(ts.tensor(given, mesh=mesh, layout="[4@(dp,tp), 4]"))
        assert got.numpy().tobytes() == given[root].tobytes() * (got.shape[0])


TERMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a penalty": lambda m, x, w: m.mean(x @ w) + m.sum(w**2),
    "a number in each row": lambda m, x, w: m.mean(x @ w + m.sum(w)),
    "a scale": lambda m, x, w: m.mean(x @ w) * m.exp(-m.sum(w)) + m.sum(w),
    "an element": lambda m, x, w: m.mean(m.tanh(x @ w)) - w[1] ** 2,
    "a branch": lambda m, x, w: m.mean(x @ w) + m.where(m.sum(w) > 0, m.sum(w) ** 2, 0.0),
    "joined": lambda m, x, w: m.mean(m.stack([m.mean(x @ w), m.max(m.abs(w))])),
}


@pytest.mark.parametrize("strategy", ["data_parallel", "zero_redundancy_optimizer"])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("name", TERMS)
def test_terms_that_are_alike_on_all_devices_have_their_whole_gradient(
    name: str, devices: int, strategy: str
) -> None:
    """As on one device: a term equal on all devices is not divided by their number."""
    x, w = (
        np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32),
        np.float32([0.5, -1.5, 2.0]),
    )
    term = TERMS[name]

    @ts.jit
    @ts.distribute(strategy=strategy)
    def step(batch: Any, weights: Any) -> Any:
        loss = term(ts, batch, weights)
        return loss, ts.grad(loss, weights)

    with dist.Mesh(("dp",), devices=devices):
        loss, g = step(x, w)
    value, want = jax.value_and_grad(lambda w: term(jnp, x, w))(w)
    np.testing.assert_allclose(loss.numpy(), value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(g.numpy(), want, rtol=1e-5, atol=1e-6)


def test_without_a_mean_gradients_are_sums_of_all_devices_terms() -> None:
    x, w = (
        np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32),
        np.float32([0.5, -1.5, 2.0]),
    )
    body = op.kernel(lambda x, w: ts.grad(ts.mean(x @ w) + ts.sum(w**2), w))
    got = body(ts.tensor(x, mesh=MESH, layout="[8@(dp,tp), 3]"), ts.tensor(w, mesh=MESH))
    np.testing.assert_allclose(got.numpy(), x.mean(0) * N + 2 * w * N, rtol=1e-5, atol=1e-6)


def test_how_a_kernel_joins_blocks_of_columns() -> None:
    """As in docs/local-view.md: by rows, unless a name or a layout says otherwise."""
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    there = ts.tensor(x, mesh=MESH, layout="[4, 8@(dp,tp)]")
    alone = op.kernel(lambda x: 2 * x)(there)
    np.testing.assert_array_equal(alone.numpy(), 2 * np.concatenate(np.split(x, N, 1)))
    named = op.kernel(lambda x: {"x": 2 * x})(there)["x"]
    columns = {"return": dist.ShardSpec(("col",), (("dp", "tp"),))}
    said = ts.distribute(layouts=columns)(lambda x: 2 * x)(there)
    for found in (named, said):
        assert found.type == there.type
        np.testing.assert_array_equal(found.numpy(), 2 * x)


def test_only_the_owner_does_the_work() -> None:
    """A branch holds one rank's work: the compiled program selects it on each device."""

    @op.kernel
    def body(x: ts.Tensor) -> ts.Tensor:
        if ts.mesh.current().rank == 0:
            return x @ ts.exp(x)
        return x

    x = ts.tensor(np.eye(8, dtype=np.float32), mesh=MESH, layout="[8@(dp,tp), 8]")
    with pytest.raises(ts.ShapeError):
        body(x)
    square = ts.tensor(np.ones((N * 4, 4), np.float32), mesh=MESH, layout=f"[{N * 4}@(dp,tp), 4]")
    out = body(square).numpy()
    np.testing.assert_allclose(out[:4], 4 * np.e * np.ones((4, 4)), rtol=1e-6)
    np.testing.assert_array_equal(out[4:], 1.0)


@pytest.mark.parametrize("by_rank", [False, True], ids=["alike", "by rank"])
def test_a_body_takes_from_a_list_and_puts_containers_into_its_arguments(by_rank: bool) -> None:
    @op.kernel
    def body(state: dict[str, Any]) -> ts.Tensor:
        if by_rank and ts.mesh.current().rank == 0:
            state["x"] = state["x"] + 1.0
        elif not by_rank:
            state["none"], state["new"] = None, {"w": state["x"] * 2.0}
        del state["gone"]
        return state["many"].pop(0)

    state: dict[str, Any] = {k: ts.tensor(3.0, mesh=MESH) for k in ("x", "none", "gone")}
    state["many"] = [ts.tensor(float(i), mesh=MESH) for i in range(3)]
    if by_rank:
        state["many"] = state["many"][:1]
    assert body(state).item() == 0.0
    assert [t.item() for t in state["many"]] == ([] if by_rank else [1.0, 2.0])
    assert state["x"].item() == 3.0 + by_rank and "gone" not in state
    if not by_rank:
        assert state["none"] is None and state["new"]["w"].item() == 6.0


def test_reading_a_number_of_the_whole_batch_cuts_the_program() -> None:
    @ts.distribute(strategy="data_parallel")
    def step(batch: ts.Tensor, weights: dict[str, ts.Tensor]) -> tuple[ts.Tensor, float]:
        loss = (batch * weights["w"]).sum()
        total = dist.all_reduce(loss, "dp", op="mean")
        return (loss if total > 0 else -loss), float(total)

    with dist.Mesh(("dp",), devices=4):
        for sign in (1.0, -1.0):
            loss, total = ts.jit(step)(ts.ones((8,)) * sign, {"w": ts.ones((1,))})
            assert (loss.item(), total) == (8.0, 8.0 * sign)
