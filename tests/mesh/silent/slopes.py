"""Gradients summed by hand over devices in a local body, and trees of constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, op
from tests.mesh.silent.rows import row

X = np.arange(8, dtype=np.float32)
WANT = float((2 * X * (2 * X - 1)).mean())  # the derivative of the mean of (w * x - 1)**2 at w = 2


def slope(
    take: Callable[..., Any], after: Callable[[Any], Any], decorate: Any = op.kernel, **loss: Any
) -> float:
    """Returns `take` of a device's loss with respect to a replicated weight, followed by
    `after`."""

    @decorate
    def body(w: Any, x: Any) -> Any:
        mean = ((w * x - 1) ** 2).mean()
        return after(take(dist.all_reduce(mean, "dp", **loss) if loss else mean, w))

    mesh = dist.Mesh(("dp",), devices=4)
    return body(ts.tensor(2.0, mesh=mesh), ts.tensor(X, mesh=mesh, layout="[8@dp]")).item()


def whole(g: Any) -> Any:
    return dist.all_reduce(g, "dp")


def mean(g: Any) -> Any:
    return dist.all_reduce(g, "dp", op="mean")


def twice(value: Callable[[], Any]) -> Any:
    """The sum over two iterations of a loop."""
    return ts.scan(lambda c, _: (c + value(), None), ts.tensor(0.0), ts.arange(2))[0]


by_rows = ts.distribute(strategy="data_parallel", batch="x")


@row("a pending gradient in a local body, added up by hand")
def _() -> None:
    assert slope(op.autodiff, whole) == 4 * WANT
    assert slope(op.autodiff, mean) == WANT
    assert slope(op.autodiff, whole, op="mean") == WANT
    assert slope(op.autodiff, whole, by_rows) == WANT
    assert slope(op.autodiff, lambda g: g, by_rows) == WANT
    assert slope(op.autodiff, lambda g: twice(lambda: mean(g))) == 2 * WANT


@row("a pending gradient in a local body, scattered by hand")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=4)

    @op.kernel
    def body(w: Any, x: Any) -> Any:
        g = op.autodiff(((w * x.sum() - 1) ** 2).mean(), w)
        return dist.reduce_scatter(g, "dp")

    w = np.arange(4, dtype=np.float32)
    got = body(ts.tensor(w, mesh=mesh), ts.tensor(X, mesh=mesh, layout="[8@dp]")).numpy()
    sums = X.reshape(4, 2).sum(1)
    np.testing.assert_allclose(got, sum(2 * (w * s - 1) * s / 4 for s in sums), rtol=1e-6)


@row("a gradient of the whole batch, summed and averaged by hand")
def _() -> None:
    for take in (ts.grad, op.autodiff):
        for after in (mean, whole, lambda g: g):
            assert slope(take, after, by_rows) == WANT
    assert slope(ts.grad, mean, op="mean") == WANT


TWICE: dict[str, Any] = {"warns": ts.StrategyWarning, "says": "the sum over 'dp' already"}


@row("a gradient in a kernel, averaged by hand as in DDP", **TWICE)
def _() -> None:
    slope(ts.grad, mean)


@row("a gradient in a kernel, summed by hand and divided", **TWICE)
def _() -> None:
    slope(ts.grad, lambda g: whole(g) / 4)


@row("a gradient in a kernel, averaged in a loop", **TWICE)
def _() -> None:
    slope(ts.grad, lambda g: twice(lambda: mean(g)))


@row("a pending gradient in a kernel, scaled before it is added up", **TWICE)
def _() -> None:
    slope(op.autodiff, lambda g: whole(g * 0.5))


@row("a gradient in a kernel, scattered by hand", **TWICE)
def _() -> None:
    slope(ts.grad, lambda g: whole(dist.reduce_scatter(g * ts.ones(4), "dp").sum()))


@row("weights after a step in a kernel, averaged by hand as in local SGD", **TWICE)
def _() -> None:
    slope(lambda loss, w: w - 0.1 * ts.grad(loss, w), mean)


@row("a tree of weights behind ts.stop_gradient, as of a target")
def _() -> None:
    def slope(params: Any) -> Any:
        held = ts.stop_gradient(params)
        assert held["n"] == 2
        return ts.grad(ts.sum(params["w"][0] * held["w"][0]) * held["n"], params["w"])

    params = {"w": [ts.tensor(X)], "n": 2}
    for of in (slope, ts.jit(slope)):
        np.testing.assert_array_equal(of(params)[0].numpy(), 2 * X)
