"""`vmap`: a function of one row, on all rows at once and on each alone. `jvp`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn
from tessera.core.errors import ShapeError, TesseraError, UsageError
from tessera.core.layout import parse_type
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.lang.record.operands import as_tensor, emit_many
from tessera.lang.record.tree import flatten
from tests.core.numpy_engine import Oracle
from tests.core.table import ROWS, Row

RNG = np.random.default_rng(3)
COUNT = 3
# Ops without a batched form for arguments that all have rows: they run row by row, in a loop.
IN_A_LOOP = {
    "conv", "unstack", "take", "put", "ragged_dot", "ragged_contract", "kernel", "contract_fp8",
}  # fmt: skip


def rows_of(x: Any) -> Any:
    """Stacked variants of `x` that the op accepts: ids stay in range, definite matrices
    definite."""
    return np.stack([np.flip(x), x, np.flip(x)])


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_every_op_of_rows_is_that_of_each(row: Row) -> None:
    ins = [np.asarray(x) for x in row.ins]

    def call(*xs: Any) -> Any:
        return tuple(emit_many(row.op, *map(as_tensor, xs), **row.attrs))

    for which in itertools.product((True, False), repeat=len(ins)):
        if not any(which):
            continue
        given = [rows_of(x) if w else x for x, w in zip(ins, which, strict=True)]
        g = graph.trace(ts.vmap(call, tuple(0 if w else None for w in which)), *given)
        verify(g)
        if all(which) or len(ins) == 1:
            assert ("scan" in {n.op for n in g.nodes}) == (row.op in IN_A_LOOP)
        alone = graph.trace(call, *ins)
        each = []
        for i in range(COUNT):
            own = [x[i] if w else x for x, w in zip(given, which, strict=True)]
            each.append(evaluate(alone, own))
        for found, want in zip(evaluate(g, given), zip(*each, strict=True), strict=True):
            want = np.stack(want)
            assert found.shape == want.shape and found.dtype == want.dtype
            wide = np.complex128 if np.iscomplexobj(want) else np.float64
            np.testing.assert_allclose(found.astype(wide), want.astype(wide), rtol=2e-5, atol=2e-5)


X, W = RNG.normal(size=(COUNT, 4, 5)).astype(np.float32), RNG.normal(size=(5, 5)).astype("f4")
IDS = RNG.integers(0, 5, (COUNT, 4)).astype(np.int32)


@ts.custom_gradient
def halved(x: Any) -> Any:
    return x * 1.0, lambda g: g * 0.5


def looped(x: Any) -> Any:
    def body(h: Any, row: Any) -> Any:
        h = ts.tanh(h + row @ W)
        return h, ts.sum(h)

    end, ys = ts.scan(body, x[0], x)
    return end, ys


def normed(x: Any) -> Any:
    return nn.layer_norm(x, W[0], W[1]).sum(0)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "product": lambda x: ts.tanh(x @ W) + W[0],
    "attention": lambda x: nn.attention(x[None], x[None], x[None], causal=True),
    "norm": normed,
    "gradient": lambda x: ts.grad(ts.sum(nn.gelu(x @ W) ** 2), x),
    "gradient of a weight": lambda x: ts.grad(ts.sum(nn.gelu(x @ ts.tensor(W)) ** 2), x),
    "loop": looped,
    "gradient of a loop": lambda x: ts.grad(ts.sum(looped(x)[1]), x),
    "custom": lambda x: ts.grad(ts.sum(halved(x) ** 2), x),
    "sort": lambda x: (ts.sort(x, 1), ts.topk(x, 2)[1], ts.argmax(x, 0)),
    "constant": lambda x: (ts.ones((2,)), x[0, 0]),
    "index": lambda x: x[1:, ::2],
    "cross": lambda x: nn.cross_entropy(x, IDS[0]),
    "matrices": lambda x: ts.linalg.norm(x, 2),
    "rows in rows": lambda x: ts.vmap(lambda r: r * ts.sum(r @ W))(x),
    "many": lambda x: {"a": x.sum(), "b": [x.T, x.max(1)]},
    "branches": lambda x: ts.cumsum(ts.where(x > 0, x, ts.exp(x)), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, oracle: Oracle) -> None:
    fn = PROGRAMS[name]
    want = [flatten(fn(ts.tensor(x)))[0] for x in X]
    for made in (ts.vmap(fn)(ts.tensor(X)), ts.vmap(fn, 1)(X.swapaxes(0, 1)),
                 ts.jit(ts.vmap(fn, -1))(np.moveaxis(X, 0, -1))):  # fmt: skip
        for found, each in zip(flatten(made)[0], zip(*want, strict=True), strict=True):
            np.testing.assert_allclose(
                found.numpy(), np.stack([e.numpy() for e in each]), rtol=1e-5, atol=1e-5
            )


def test_gradients_of_each_row_and_through_all(oracle: Oracle) -> None:
    w = ts.tensor(W)

    def loss(x: Any, w: Any) -> Any:
        return ts.sum(ts.tanh(x @ w) ** 2)

    each = ts.vmap(lambda x, w: ts.grad(loss(x, w), w), (0, None))(X, w)
    for i, x in enumerate(X):
        alone = ts.grad(loss(ts.tensor(x), w), w)
        np.testing.assert_allclose(each.numpy()[i], alone.numpy(), rtol=1e-5, atol=1e-6)
    total = ts.grad(ts.vmap(loss, (0, None))(X, w).sum(), w)
    np.testing.assert_allclose(total.numpy(), each.numpy().sum(0), rtol=1e-5, atol=1e-5)


def test_dims_of_trees_and_results(oracle: Oracle) -> None:
    def fn(pair: Any, by: Any, scale: float = 1.0) -> Any:
        return pair["x"] @ by * scale, by

    given = {"x": X.swapaxes(0, 2), "y": 7}
    y, same = ts.vmap(fn, ({"x": 2, "y": None}, None), (1, None))(given, W[0, :4], scale=2.0)
    want = np.stack([X[i].T @ W[0, :4] * 2 for i in range(COUNT)], 1)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-5)
    assert same.shape == (4,)
    table = ts.tensor(W)
    for dims, ids in ((0, IDS), (None, IDS[0])):
        found = ts.vmap(lambda t, i: ts.take(t, i, 1), (0, dims))(
            np.broadcast_to(W, (COUNT, 5, 5)), ids
        )
        for i in range(COUNT):
            np.testing.assert_array_equal(found.numpy()[i], W[:, ids[i] if dims == 0 else ids])
    assert ts.vmap(lambda i: nn.embedding(i, table))(IDS).shape == (COUNT, 4, 5)


def test_rows_that_are_split_stay_split() -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 4, "tp": 2})
    x, w = parse_type("f32[8@dp, 6]", mesh), parse_type("f32[6, 4@tp]", mesh)

    def one(x: Any, w: Any) -> Any:
        return ts.grad(ts.sum(ts.tanh(x @ w)), w)

    g = graph.simplify(graph.trace(ts.vmap(one, (0, None)), x, w))
    assert str(g.outputs[0].type) == "f32[8@dp, 6, 4@tp]"
    assert not list(g.collectives())


WRONG: list[tuple[Any, type[TesseraError], str]] = [
    (lambda: ts.vmap(3), UsageError, "vmap: the function cannot be 3"),
    (lambda: ts.vmap(ts.sum, None)(X), UsageError, "vmap: no argument is taken apart"),
    (lambda: ts.vmap(ts.sum, 3)(X), ShapeError, "vmap: there is no dim 3 to take apart"),
    (lambda: ts.vmap(lambda a, b: a, (0, 0))(X, W), ShapeError,
     "vmap: the dims that are taken apart have 3, 5 rows"),
    (lambda: ts.vmap(lambda a, b: a, (0,))(X, W), UsageError, "vmap: in_dims does not fit"),
    (lambda: ts.vmap(ts.sum, 0, None)(X), UsageError, "vmap: a result differs between rows"),
    (lambda: ts.vmap(ts.sum, 0, 2)(X), ShapeError, "vmap: out_dims 2 is not a dim of a result"),
    (lambda: ts.vmap(lambda x: nn.dropout(x, 0.5))(X), UsageError,
     "vmap: the function draws random numbers"),
    (lambda: ts.vmap(lambda x: x.sum().item())(X), UsageError, "a value cannot be read here"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "said"), WRONG)
def test_what_is_refused(call: Any, error: type[TesseraError], said: str, oracle: Oracle) -> None:
    with pytest.raises(error) as e:
        call()
    assert said in str(e.value)


# -- slopes along a direction ---------------------------------------------------------------------
def rolled(x: Any) -> Any:
    return ts.scan(lambda h, r: (ts.tanh(h + r @ W), h * 2.0), x[0], x)


CURVES: dict[str, Callable[..., Any]] = {
    "power": lambda x: x**3,
    "attention": lambda x: nn.attention(x[None], x[None], x[None], causal=True),
    "gelu of a product": lambda x: nn.gelu(x @ W),
    "loop": rolled,
    "several": lambda x: {"a": ts.exp(x), "b": (x.sum(), x[0])},
}


@pytest.mark.parametrize("name", CURVES)
def test_jvp_is_the_slope_along_the_tangent(name: str, oracle: Oracle) -> None:
    fn, x, along = CURVES[name], X[0], X[1]
    eps = 1e-2
    ends = [flatten(fn(ts.tensor(x + s * eps * along)))[0] for s in (1, -1)]
    for call in (ts.jvp, ts.jit(lambda p, t: ts.jvp(fn, p, t))):
        value, slope = call(fn, (x,), (along,)) if call is ts.jvp else call((x,), (along,))
        for a, b in zip(flatten(value)[0], flatten(fn(ts.tensor(x)))[0], strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
        for s, up, down in zip(flatten(slope)[0], *ends, strict=True):
            want = (up.numpy().astype(float) - down.numpy()) / (2 * eps)
            np.testing.assert_allclose(s.numpy(), want, rtol=0.02, atol=0.02)


def test_jvp_of_many_directions_at_once_is_the_jacobian(oracle: Oracle) -> None:
    x, eye = ts.tensor(W[0]), np.eye(5, dtype=np.float32)
    columns = ts.vmap(lambda t: ts.jvp(lambda x: ts.tanh(x @ W), (x,), (t,))[1], out_dims=1)(eye)
    rows = ts.vmap(lambda g: ts.vjp(lambda x: ts.tanh(x @ W), x)[1](g)[0])(eye)
    want = (1 - np.tanh(W[0] @ W) ** 2)[:, None] * W.T
    np.testing.assert_allclose(columns.numpy(), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows.numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["[4@dp, 5]", "[4@(dp,tp), 5]"])
def test_jvp_of_what_is_split_over_devices(layout: str) -> None:
    mesh = dist.Mesh.parse("dp=2,tp=2")
    t = parse_type(f"f32{layout}", mesh)
    g = ts.graph.trace(lambda x, along: ts.jvp(lambda x: (ts.tanh(x @ W), x**3), (x,), (along,))[1],
                       t, t)  # fmt: skip
    x, along = (np.random.default_rng(i).normal(size=(4, 5)).astype("f4") for i in range(2))
    want = [(1 - np.tanh(x @ W) ** 2) * (along @ W), 3 * x**2 * along]
    for found, slope in zip(evaluate_blocks(g, [x, along, W]), want, strict=True):
        np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-5)


def test_tangents_that_do_not_fit_are_refused(oracle: Oracle) -> None:
    for primals, tangents, error, said in (
        (X, (X,), UsageError, "jvp: primals cannot be"),
        ((X,), (X[0],), ShapeError, "jvp: the tangents are not like the primals"),
        ((X,), (X, X), ShapeError, "jvp: the tangents are not like the primals"),
        (({"a": X},), ({"b": X},), ShapeError, "where    : 0: dict of a, then of b"),
        ((X, X), (X, X[0]), ShapeError, "where    : 1: f32[3, 4, 5], then f32[4, 5]"),
    ):
        with pytest.raises(error) as e:
            ts.jvp(ts.exp, primals, tangents)  # type: ignore[arg-type]
        assert said in str(e.value)


@pytest.mark.parametrize(
    "call", [lambda x: ts.jvp(ts.abs, (x,), (x,)), lambda x: ts.vjp(ts.abs, x)], ids=["jvp", "vjp"]
)
def test_what_is_said_is_of_the_function_called(
    call: Any, request: pytest.FixtureRequest, oracle: Oracle
) -> None:
    with pytest.raises(UsageError, match=f"^{request.node.callspec.id}: the function gave a value"):
        call(ts.tensor([1, 2]))


def test_tangents_and_gradients_fit_by_name(oracle: Oracle) -> None:
    def twice_and_thrice(d: dict[str, ts.Tensor]) -> dict[str, ts.Tensor]:
        return {"x": d["a"] * 2, "y": d["b"] * 3}

    one, none = ts.tensor(1.0), ts.tensor(0.0)
    _, slope = ts.jvp(twice_and_thrice, ({"a": one, "b": one},), ({"b": none, "a": one},))
    assert {n: t.item() for n, t in slope.items()} == {"x": 2.0, "y": 0.0}
    _, pull = ts.vjp(twice_and_thrice, {"a": one, "b": one})
    (g,) = pull({"y": none, "x": one})
    assert {n: t.item() for n, t in g.items()} == {"a": 2.0, "b": 0.0}
    with pytest.raises(ShapeError, match="where : dict of x, y, then of x"):
        pull({"x": one})


def own(backward: Callable[..., Any]) -> Callable[[Any], Any]:
    """Sine with a user-defined backward, called with (the gradient, x)."""
    return ts.custom_gradient(lambda x: (ts.sin(x), lambda g: backward(g, x)))


LINEAR: dict[str, Callable[..., Any]] = {
    "factor": lambda g, x: g * ts.cos(x),
    "quotient": lambda g, x: g / (1 / ts.cos(x)),
    "mask": lambda g, x: ts.where(x > -9, g, 0.0) * ts.cos(x),
    "parts": lambda g, x: ts.concat([g[:2], g[2:]]) * ts.cos(x),
    "sums": lambda g, x: (g.reshape(1, 4, 5) @ ts.eye(5)).sum(0) * ts.cos(x),
    "dtypes": lambda g, x: (g.to(ts.f32) + g) / 2 * ts.cos(x),
    "rows": lambda g, x: ts.take(g, ts.tensor([0, 1, 2, 3]), 0) * ts.cos(x),
    "places": lambda g, x: ts.gather(g, ts.argsort(x, 1) * 0 + ts.arange(5), 1) * ts.cos(x),
    "running sums": lambda g, x: (
        (ts.cumsum(g, 0) - ts.cumsum(ts.pad(g, (0, 0, 1, 0))[:4], 0)) * ts.cos(x)
    ),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "clipped": lambda g, x: ts.clip(g, -0.1, 0.1),
    "sign": lambda g, x: ts.sign(g),
    "square": lambda g, x: g * g,
    "shifted": lambda g, x: g + 1.0,
    "by itself": lambda g, x: ts.where(g > 0, g, 0.0),
    "constant": lambda g, x: ts.stop_gradient(g),
    "below": lambda g, x: 1.0 / g,
    "places by itself": lambda g, x: ts.gather(x, ts.argsort(g, 1), 1),
}


@pytest.mark.parametrize("around", ["", "jit", "twice", "loop"])
@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_jvp_of_a_gradient_of_ones_own(name: str, around: str, oracle: Oracle) -> None:
    """`jvp` works with a linear backward; others fail, as in JAX."""
    f = own((LINEAR | OTHERS)[name])
    fn: Callable[[Any], Any] = f
    if around == "twice":
        fn = ts.jit(f)
    if around == "loop":
        fn = lambda x: ts.scan(lambda x, _: (f(x), x), x, ts.ones(1))[0]  # noqa: E731
    run = lambda p, t: ts.jvp(fn, (p,), (t,))[1]  # noqa: E731
    run = ts.jit(run) if around in ("jit", "twice") else run
    x, along = ts.tensor(X[0][:4]), ts.tensor(X[1][:4])
    if name in LINEAR:
        np.testing.assert_allclose(run(x, along).numpy(), np.cos(X[0][:4]) * X[1][:4], rtol=1e-5)
        return
    with pytest.raises(ts.GraphError, match="is not linear in the gradient"):
        run(x, along)
    # Values before the argument are not differentiated.
    assert ts.jvp(ts.exp, (f(x),), (along,))[1].shape == (4, 5)
