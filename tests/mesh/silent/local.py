"""The local view: names of arguments, and means of means."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, op
from tests.mesh.silent.rows import row

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=s).astype(np.float32) for s in ((8, 8), (8, 5)))
LABELS = RNG.integers(0, 5, 8).astype(np.int32)
MASK = np.array([1, 1, 0, 0, 1, 0, 1, 1], np.float32)
# Argument names that are right, neutral, and misleading.
NAMES = [("x", "labels", "weights"), ("a", "b", "c"), ("weights", "params", "batch")]


def mesh() -> dist.Mesh:
    return dist.Mesh(("dp",), devices=4)


def named(text: str, names: tuple[str, ...], **options: Any) -> Any:
    """The function of the source `text` with its arguments renamed to `names`."""
    space: dict[str, Any] = {"ts": ts, "nn": nn, "dist": dist}
    for k, name in zip("XLW", names, strict=True):
        text = text.replace(k, name)
    exec(text, space)
    return ts.distribute(space["f"], strategy="data_parallel", mesh=mesh(), **options)


@row("a local body's batch is called weights, its weights batch")
def _() -> None:
    step = """def f(X, L, W):
    loss = nn.cross_entropy(X @ W, L)
    return loss, ts.grad(loss, W), X"""
    want = ts.jit(lambda w: (s := nn.cross_entropy(ts.tensor(X) @ w, LABELS), ts.grad(s, w)))(W)
    for names in NAMES:
        loss, grad, x = named(step, names)(X, LABELS, W)
        np.testing.assert_allclose(loss.numpy(), want[0].numpy(), rtol=1e-6)
        np.testing.assert_allclose(grad.numpy(), want[1].numpy(), atol=1e-6)
        assert str(x.type) == "f32[8@dp, 8]"


@row("a kernel, or a table, that a local body does not train")
def _() -> None:
    for names in NAMES:
        y = named("def f(X, L, W): return X @ W", names)(X, 0, W)
        assert str(y.type) == "f32[8@dp, 5]"
        y = named("def f(X, L, W): return W[L]", names)(0, LABELS, W)
        assert str(y.type) == "f32[8@dp, 5]"
        np.testing.assert_array_equal(y.numpy(), W[LABELS])


@row("a local body keeps optimizer state of as many rows as the batch")
def _() -> None:
    step = """def f(X, L, W):
    loss = nn.cross_entropy(X @ W["w"], L)
    m = 0.9 * W["m"] + ts.grad(loss, W["w"])
    return loss, m"""
    want = ts.jit(lambda w: ts.grad(nn.cross_entropy(ts.tensor(X) @ w, LABELS), w))(W).numpy()
    for names in NAMES:
        _, m = named(step, names)(X, LABELS, {"w": W, "m": W * 0.1})
        np.testing.assert_allclose(m.numpy(), 0.09 * W + want, atol=1e-6)


@row("a local body that is told which argument holds the batch")
def _() -> None:
    text = "def f(X, L, W): return W - 0.1 * X"
    both = named(text, ("a", "b", "c"), batch=("a", "c"))(W, 0, W)
    none = named(text, ("a", "b", "c"), batch=())(W, 0, W)
    assert str(both.type) == "f32[8@dp, 5]" and str(none.type) == "f32[8, 5]"


@row("the slope of a mean along a direction, in a local body")
def _() -> None:
    def slope(x: Any, w: Any) -> Any:
        return ts.jvp(lambda w: ((x @ w) ** 2).mean(), (w,), (ts.ones(W.shape),))[1]

    spread = ts.distribute(slope, strategy="data_parallel", mesh=mesh(), batch="x")
    want = slope(ts.tensor(X), ts.tensor(W)).item()
    np.testing.assert_allclose(spread(X, W).item(), want, rtol=1e-5)


@row("a masked mean whose sums are combined first")
def _() -> None:
    text = """def f(X, L, W):
    rows = ((X @ W).sum(-1) - L["labels"]) ** 2 * L["mask"]
    loss = dist.all_reduce(rows.sum(), "dp") / dist.all_reduce(L["mask"].sum(), "dp")
    return loss, ts.grad(loss, W)"""
    loss, grad = named(text, ("x", "y", "w"))(X, {"labels": LABELS, "mask": MASK}, W)

    def alone(w: ts.Tensor) -> Any:
        rows = ((ts.tensor(X) @ w).sum(-1) - LABELS) ** 2 * MASK
        return (s := rows.sum() / MASK.sum()), ts.grad(s, w)

    want, wanted = ts.jit(alone)(W)
    np.testing.assert_allclose(loss.numpy(), want.numpy(), rtol=1e-5)
    np.testing.assert_allclose(grad.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5)


@row("tensor parallelism of a local body whose rules know none of the arguments",
     warns=ts.StrategyWarning, says="cuts none of the arguments")  # fmt: skip
def _() -> None:
    body = ts.distribute(
        lambda x, first: dist.all_reduce(x @ first, "tp"), strategy="tensor_parallel",
        mesh=dist.Mesh(("tp",), devices=4),
    )  # fmt: skip
    body(X, W)


COLUMN, ROW = (dist.ShardSpec((part,), ("tp",)) for part in ("col", "row"))


def by_hand(complete: bool, graded: bool = False, **options: Any) -> Any:
    """Two layers with weights split over tp, in a data-parallel body."""

    def loss(x: Any, up: Any, down: Any) -> Any:
        y = ts.tanh(x @ up) @ down
        value = ((dist.all_reduce(y, "tp") if complete else y) ** 2).mean()
        return ts.grad(value, down) if graded else value

    both = dist.Mesh(("dp", "tp"), shape=(2, 4))
    say = {"mesh_axes": ("dp", "tp"), "mesh": both, "layouts": {"up": COLUMN, "down": ROW}}
    return ts.distribute(loss, strategy="data_parallel", **(say | options))


@row("layers split over tp in a data-parallel body")
def _() -> None:
    down = RNG.normal(size=(8, 5)).astype(np.float32)
    want = ((np.tanh(X @ X) @ down) ** 2).mean()
    np.testing.assert_allclose(by_hand(True)(X, X, down).numpy(), want, rtol=1e-5)
    wide = {"mesh_axes": ("data", "tp"), "mesh": dist.Mesh(("data", "tp"), shape=(2, 4))}
    np.testing.assert_allclose(by_hand(True, **wide)(X, X, down).numpy(), want, rtol=1e-5)


@row("a sum over tp that is left out", error=ts.ShapeError,
     says="returns a number that differs between devices")  # fmt: skip
def _() -> None:
    by_hand(False)(X, X, X)


@row("a gradient of a sum over tp that is left out", warns=ts.StrategyWarning,
     says="a loss differs along 'tp'")  # fmt: skip
def _() -> None:
    by_hand(False, graded=True)(X, X, X)


@row("a strategy's name that layouts leave no axis", error=ts.StrategyError,
     says="over which axis does 'data_parallel' go")  # fmt: skip
def _() -> None:
    spec = dist.ShardSpec(("row",), ("data",))
    by_hand(True, layouts={"x": spec, "up": COLUMN, "down": ROW}, mesh_axes=("data", "tp"))


@row("each device of a kernel drops elements of its own")
def _() -> None:
    ones = ts.ones((4, 64))
    for spec in (dist.ShardSpec((0,), ("dp",)), dist.ShardSpec((1,), ("dp",))):
        drop = ts.distribute(lambda x: nn.dropout(x, 0.5), mesh=mesh(), layouts={"x": spec})
        seen = drop(ones).numpy().reshape(-1)
        parts = np.split(seen, 4)
        assert len({p.tobytes() for p in parts}) == 4 and 0.35 < (seen == 0).mean() < 0.65
    same = ts.op.kernel(lambda x: nn.dropout(x, 0.5), mesh=mesh())(ones).numpy()
    assert same.shape == (4, 64)  # all devices drop the same elements of a replicated value


def averaged(loss: Any) -> Any:
    """The loss of X @ W with rows split over the devices."""
    body = ts.distribute(lambda x, w: loss(x @ w), strategy="data_parallel", mesh=mesh(), batch="x")
    return body(X, W)


@row("rows that are brought together first")
def _() -> None:
    z = X @ W
    got = averaged(lambda z: ts.logsumexp(z @ dist.all_gather(z, "dp").transpose(), -1).mean())
    want = np.logaddexp.reduce(z @ z.T, -1).mean()
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)
    for power in (1, 2):
        got = averaged(lambda z: ((z @ dist.all_gather(z, "dp").transpose(0, 1)) ** power).mean())  # noqa: B023
        np.testing.assert_allclose(got.numpy(), ((z @ z.T) ** power).mean(), rtol=1e-5)
    got = averaged(lambda z: ((z - dist.all_reduce(z.sum(0), "dp") / 8) ** 2).mean())
    np.testing.assert_allclose(got.numpy(), ((z - z.mean(0)) ** 2).mean(), rtol=1e-5)
    got = averaged(lambda z: ((dist.all_reduce(z.transpose() @ z, "dp") / 8) ** 2).mean())
    np.testing.assert_allclose(got.numpy(), ((z.T @ z / 8) ** 2).mean(), rtol=1e-5)


@row("statistics that a kernel sets, other ones on each device", error=ts.UsageError,
     says="BatchNorm.running_mean is set in a local body")  # fmt: skip
def _() -> None:
    norm = nn.BatchNorm(8)
    ts.op.kernel(lambda x: norm(x), mesh=mesh())(ts.tensor(X, mesh=mesh(), layout="[8@dp, 8]"))


@row("a loss in blocks is differentiated in a local body, and outside of it")
def _() -> None:
    labels = np.int32([0, -100, -100, -100, 1, 2, 3, 4])
    loss = nn.linear_cross_entropy
    want = ts.jit(lambda w: (v := loss(X, w, labels), ts.grad(v, w)))(W)
    plan: Any = {"strategy": "data_parallel", "mesh": mesh(), "batch": ("x", "y")}
    inside = ts.distribute(lambda x, y, w: (v := loss(x, w, y), ts.grad(v, w)), **plan)
    local = ts.distribute(lambda x, y, w: loss(x, w, y), **plan)
    outside = ts.jit(lambda x, y, w: (v := local(x, y, w), ts.grad(v, w)))
    for run in (inside, outside):
        for a, b in zip(run(X, labels, W), want, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


@row("a sum of rows that is completed")
def _() -> None:
    got = averaged(lambda z: dist.all_reduce((z**2).sum(), "dp"))
    np.testing.assert_allclose(got.numpy(), ((X @ W) ** 2).sum(), rtol=1e-5)


@row("what a data-parallel body draws, by rows and for all of them")
def _() -> None:
    shapes = [lambda x: (1,), lambda x: (8, 5), lambda x: x.shape, lambda x: (), lambda x: (4,)]
    for shape in shapes:
        found = []
        for wrap in (lambda f: f, lambda f: ts.distribute(
            f, strategy="data_parallel", mesh=mesh(), batch="x")):  # fmt: skip

            def noisy(x: Any, shape: Any = shape) -> Any:
                drawn = ts.random.uniform(shape(x))
                wide = x[:, :1] * drawn.reshape(-1)[:4].sum() if drawn.shape == (8, 5) else x * 2.0
                return wide * (drawn if drawn.ndim == 0 or drawn.shape == (1,) else 1.0) + (
                    drawn if drawn.shape == x.shape else 0.0
                )

            ts.seed(5)
            found.append(ts.jit(wrap(noisy))(X).numpy())
        np.testing.assert_allclose(*found, rtol=1e-6)


def rows_of(body: Any) -> Any:
    return ts.distribute(body, strategy="data_parallel", mesh=mesh(), batch="x")(X)


@row("rows by themselves, and such that had those of all")
def _() -> None:
    got = rows_of(lambda x: x - dist.all_reduce(x.mean(0), "dp", op="mean"))
    np.testing.assert_allclose(got.numpy(), X - X.mean(0), atol=1e-6)
    np.testing.assert_allclose(rows_of(nn.softmax).numpy(), nn.softmax(X).numpy(), rtol=1e-5)


@row("a sum still to be completed, taken from outside")
def _() -> None:
    r = ts.tensor(W, mesh=mesh(), layout="[8@dp, 5]")
    a = ts.tensor(X[:5], mesh=mesh(), layout="[5, 8@dp]")
    b = ts.tensor(X, mesh=mesh(), layout="[8@dp, 8]")
    whole = X[:5] @ X
    for f, want in {
        lambda r, y: r @ y: W @ whole,
        lambda r, y: r + y.sum(1): W + whole.sum(1),
        lambda r, y: r + dist.all_reduce(y, "dp").sum(1): W + 4 * whole.sum(1),
    }.items():

        @ts.jit
        def run(r: Any, a: Any, b: Any, f: Any = f) -> Any:
            y = a @ b
            return op.kernel(lambda r: f(r, y))(r)

        np.testing.assert_allclose(run(r, a, b).numpy(), want, rtol=1e-5, atol=1e-5)


@row("a layout along an axis that is not local")
def _() -> None:
    both = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
    x = ts.tensor(X, mesh=both, layout="[8@dp, 8]")
    w = ts.tensor(W)
    h = np.tanh(X)
    for layout in ("[8@dp, 8@tp]", "[8@(dp,tp), 8]", None):

        @ts.distribute(strategy="data_parallel", mesh=both, mesh_axes="dp", batch="x")
        def body(x: Any, w: Any, layout: Any = layout) -> Any:
            h = dist.redistribute(ts.tanh(x), layout)
            return h, ts.grad(((h @ w) ** 2).mean(), w)

        got, grad = ts.jit(body)(x, w)
        np.testing.assert_allclose(got.numpy(), h, rtol=1e-6)
        np.testing.assert_allclose(grad.numpy(), 2 * h.T @ (h @ W) / 40, rtol=1e-5, atol=1e-6)


@row("a layout along the axis that is local", error=ts.LayoutError, says="'dp' is local here")
def _() -> None:
    there = ts.tensor(X, mesh=mesh(), layout="[8@dp, 8]")
    op.kernel(lambda x: dist.redistribute(x, "[2@dp, 8]"))(there)
