"""Kernels written in Python as functions on tensors: values, layouts, gradients, options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, op, schedule
from tests.core.test_kernel_python import ag_matmul, draw

Array = Any


def slopes(g: Any, x: Any, w: Any, b: Any) -> Any:
    g = g * (x @ w + b > 0).to(g.dtype)
    return g @ w.T, x.T @ g, ts.sum(g, 0)


@ts.kernel(
    grid="i=M//bm j=N//bn",
    x="in [M, K] tiles [bm, bk]",
    w="in [K, N] tiles [bk, bn]",
    b="in f32[N] tiles [bn]",
    y="out [M, N] tiles [bm, bn]",
    tune={"bm": 16, "bn": 16, "bk": 32},
    speed={"warps": 4},
    split="M N",
    grad=slopes,
)
def dense(x, w, b, y, i, j, K, bk, bm, bn):  # type: ignore[no-untyped-def]
    total = ts.kernel.loop(K // bk, lambda k, t: t + x[i, k] @ w[k, j], ts.zeros((bm, bn)))
    y[i, j] = ts.maximum(total + b[j], 0.0).to(y.dtype)


@ts.kernel(
    grid="i=M//bm",
    x="in [M] tiles [bm]",
    y="out [M] tiles [bm]",
    sign="out i32[M] tiles [bm]",
    tune={"bm": 4},
)
def doubled(x, y, sign, i):  # type: ignore[no-untyped-def]
    y[i], sign[i] = x[i] * 2.0, ts.where(x[i] < 0.0, -1, 1)


X, W, B = draw(64, 128), draw(128, 64, seed=1), draw(64, seed=2)
WANT = np.maximum(X @ W + B, 0)


def test_a_kernel_is_a_function_on_tensors() -> None:
    x, w, b = map(ts.tensor, (X, W, B))
    for y in (
        dense(x, w, b), dense(X, w, b=B), ts.jit(lambda x, w, b: dense(x, w, b))(x, w, b),
        dense.under(bm=32, warps=8)(x, w, b), dense(x=x, w=w, b=b),
    ):  # fmt: skip
        np.testing.assert_allclose(y.numpy(), WANT, atol=1e-4)
    narrow = dense(x.to(ts.bf16), w.to(ts.bf16), b)
    assert narrow.dtype is ts.bf16
    y, sign = doubled(ts.tensor([1.0, -2.0, 3.0, 4.0]))
    assert y.numpy().tolist() == [2, -4, 6, 8] and sign.numpy().tolist() == [1, -1, 1, 1]


@pytest.mark.parametrize(
    ("x", "w"), [("[64@dp, 128]", "[128, 64@tp]"), ("[64, 128@tp]", "[128@tp, 64]")]
)
def test_devices_run_it_on_their_blocks(x: str, w: str) -> None:
    @ts.kernel(
        grid="i=M//bm j=N//bn", x="in [M, K] tiles [bm, bk]", w="in [K, N] tiles [bk, bn]",
        y="out [M, N] tiles [bm, bn]", tune={"bm": 16, "bn": 16, "bk": 32}, split="M N K",
    )  # fmt: skip
    def product(x, w, y, i, j, K, bk, bm, bn):  # type: ignore[no-untyped-def]
        start = ts.zeros((bm, bn))
        y[i, j] = ts.kernel.loop(K // bk, lambda k, t: t + x[i, k] @ w[k, j], start)

    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    y = product(ts.tensor(X, mesh, x), ts.tensor(W, mesh, w))
    assert y.layout == ("[64, 64] +tp" if "128@tp" in x else "[64@dp, 64@tp]")
    np.testing.assert_allclose(y.numpy(), X @ W, atol=1e-4)


def test_gradients_are_those_of_the_users_function() -> None:
    x, w, b = map(ts.tensor, (X, W, B))
    got = ts.grad(ts.sum(dense(x, w, b) * 2.0), (x, w, b))
    compiled = ts.jit(lambda x, w, b: ts.grad(ts.sum(dense(x, w, b) * 2.0), (x, w, b)))(x, w, b)
    g = 2.0 * (X @ W + B > 0)
    for found in (got, compiled):
        for t, want in zip(found, (g @ W.T, X.T @ g, g.sum(0)), strict=True):
            np.testing.assert_allclose(t.numpy(), want, atol=1e-4)
    one = ts.tensor(np.ones(8, np.float32))
    with pytest.raises(ts.GraphError, match=r"doubled: .* no gradient .*\n(.*\n)*.*grad="):
        ts.grad(ts.sum(doubled(one)[0]), one)


def test_the_schedule_sets_sizes_and_the_call_overrides_it() -> None:
    def sizes(fn: Any) -> tuple[dict[str, int], dict[str, int]]:
        run = schedule(tile={"bm": 32}, warps=8)(ts.jit(fn))
        np.testing.assert_allclose(run(*map(ts.tensor, (X, W, B))).numpy(), WANT, atol=1e-4)
        found = [n.attrs["kernel"] for n in run.compiled.graph.nodes if "kernel" in n.attrs]
        return dict(found[0].tune), dict(found[0].speed)

    assert sizes(lambda x, w, b: dense(x, w, b)) == ({"bm": 32, "bn": 16, "bk": 32}, {"warps": 8})
    over = sizes(lambda x, w, b: dense.under(bm=8, warps=2)(x, w, b))
    assert over == ({"bm": 8, "bn": 16, "bk": 32}, {"warps": 2})


def test_a_kernel_that_puts_runs_in_a_local_body() -> None:
    ring = dist.Mesh(("x",), shape={"x": 4})
    a, w = draw(64, 32), draw(32, 24, seed=1)
    run = op.kernel(lambda a, w: ag_matmul(a, w), mesh=ring, mesh_axes=("x",))
    y = run(ts.tensor(a, ring, "[64@x, 32]"), ts.tensor(w, ring))
    np.testing.assert_allclose(y.numpy(), np.tile(a @ w, (4, 1)), atol=1e-4)


def test_a_size_that_a_shape_computes_with_is_not_split() -> None:
    @ts.kernel(
        grid="i=M//4 j=C//block", x="in f32[M, C] tiles [4, block]", split="M C",
        s="in f32[M, C//block] tiles [4, 1]", y="out f32[M, C] tiles [4, block]",
    )  # fmt: skip
    def scaled(x, s, y, i, j):  # type: ignore[no-untyped-def]
        y[i, j] = x[i, j] * s[i, j].reshape(4, 1)

    mesh, x, s = dist.Mesh(("dp",), shape={"dp": 4}), draw(8, 32), draw(8, 8, seed=1)
    y = scaled(ts.tensor(x, mesh, "[8, 32@dp]"), ts.tensor(s, mesh, "[8, 8@dp]"), block=4)
    np.testing.assert_array_equal(y.numpy(), x * np.repeat(s, 4, 1))


def test_loops_up_to_the_own_rank_put_and_wait() -> None:
    @ts.kernel(
        mesh={"x": 4}, a="in f32[M] tiles [M]", y="out f32[M] tiles [M]",
        box="sym f32[x, M] tiles [1, M]", got="sig [x]",
    )  # fmt: skip
    def before(a, y, box, got, rank_x, x):  # type: ignore[no-untyped-def]
        ts.kernel.enter("x")

        def send(s: Any) -> None:
            ts.kernel.put(a.at(0), box.at(rank_x, 0), at=s, sig=got[rank_x])

        def add(s: Any, total: Any) -> Any:
            ts.kernel.wait(got[s])
            return total + box[s, 0]

        ts.kernel.loop((rank_x + 1, x), send)
        y[0] = ts.kernel.loop(rank_x, add, a[0])
        ts.kernel.quiet()

    ring, a = dist.Mesh(("x",), shape={"x": 4}), draw(4, 8)
    y = op.kernel(lambda a: before(a), mesh=ring, mesh_axes=("x",))(
        ts.tensor(a.ravel(), ring, "[32@x]")
    )
    np.testing.assert_allclose(y.numpy().reshape(4, 8), np.cumsum(a, 0), atol=1e-5)
