"""Data-parallel bodies: `jvp` and state updates are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist
from tests.mesh.silent.rows import row

RNG = np.random.default_rng(0)
MESH = dist.Mesh(("dp",), devices=4)
X = RNG.normal(size=(8, 3)).astype(np.float32)
W = RNG.normal(size=(3, 5)).astype(np.float32)


def _rowwise(x: Any, w: Any) -> Any:
    return ts.tanh(x @ w) ** 2


ALONG: dict[str, Callable[..., Any]] = {
    "pulled to rows": lambda x, w: ts.vjp(lambda x: _rowwise(x, w), x)[1](
        ts.ones((x.shape[0], 5))
    )[0],
    "pulled to weights": lambda x, w: ts.vjp(lambda w: _rowwise(x, w), w)[1](
        ts.ones((x.shape[0], 5))
    )[0],
    "pulled from a mean": lambda x, w: ts.vjp(lambda w: _rowwise(x, w).mean(), w)[1](
        ts.ones(())
    )[0],
    "moved by rows": lambda x, w: ts.jvp(lambda x: _rowwise(x, w), (x,), (x,))[1],
    "moved by weights": lambda x, w: ts.jvp(lambda w: _rowwise(x, w), (w,), (w,))[1],
    "a mean moved by weights": lambda x, w: ts.jvp(
        lambda w: _rowwise(x, w).mean(), (w,), (w,)
    )[1],
    "both moved": lambda x, w: ts.jvp(_rowwise, (x, w), (x, w))[1],
}  # fmt: skip

for name, found in ALONG.items():

    @row(f"in a data-parallel body, {name}")
    def _(found: Any = found) -> None:
        w = ts.tensor(W, name="w")
        want = found(ts.tensor(X), w).numpy()
        body = ts.distribute(found, strategy="data_parallel", mesh=MESH, batch="x")
        np.testing.assert_allclose(body(X, w).numpy(), want, rtol=1e-5, atol=1e-5)


SET: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda s, x: s + x.sum(0), "a maximum": lambda s, x: ts.max(x, 0),
    "the first row": lambda s, x: x[0], "a mean": lambda s, x: x.mean(0),
    "an average": lambda s, x: 0.9 * s + 0.1 * x.mean(0),
    "all rows' sum": lambda s, x: s + dist.all_reduce(x.sum(0), "dp"),
}  # fmt: skip

for name, state in SET.items():

    @row(f"a data-parallel body sets an item to {name} of its rows")
    def _(name: str = name, state: Any = state) -> None:
        def body(held: Any, x: Any) -> Any:
            held["s"] = state(held["s"], x)
            return (x**2).mean()

        held = {"s": ts.ones(3)}
        ts.distribute(body, strategy="data_parallel", mesh=MESH, batch="x")(held, X)
        state = SET["a sum"] if name == "all rows' sum" else state
        want = state(ts.ones(3), ts.tensor(X)).numpy()
        np.testing.assert_allclose(held["s"].numpy(), want, rtol=1e-5, atol=1e-6)


def _slopes(rows: Any) -> Callable[[Any, Any], Any]:
    return lambda x, w: rows(lambda r: ts.grad(ts.tanh(r @ w).sum(), r), x)


for name, each in {
    "by vmap": _slopes(lambda f, x: ts.vmap(f)(x)),
    "in a loop": _slopes(lambda f, x: ts.scan(lambda c, r: (c, f(r)), ts.zeros(()), x)[1]),
}.items():

    @row(f"a data-parallel body takes each row's gradient {name}")
    def _(each: Any = each) -> None:
        body = ts.distribute(each, strategy="data_parallel", mesh=MESH, batch="x")
        want = ts.jit(each)(X, W).numpy()
        np.testing.assert_allclose(body(X, W).numpy(), want, rtol=1e-5, atol=1e-6)


@row("a contrastive loss in the rows' places on a device, as of DDP", error=ts.ShapeError,
     says="it returns a number that differs between devices")  # fmt: skip
def _() -> None:
    def body(x: Any) -> Any:
        n = x.shape[0]
        scores = x @ dist.all_gather(x, "dp").transpose()
        return ts.nn.cross_entropy(scores, ts.arange(n) + ts.mesh.current().rank * n)

    ts.distribute(body, strategy="data_parallel", mesh=MESH, batch="x")(X)
