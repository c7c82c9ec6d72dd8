"""User-defined gradients and their gradients, with NumPy and without the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import graph, nn, op
from tessera.core.layout import plain
from tessera.ir.graph.verify import verify
from tests.core.numpy_engine import Oracle

RNG = np.random.default_rng(11)


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


pytestmark = pytest.mark.usefixtures("oracle")


def run(fn: Callable[..., Any], *values: np.ndarray) -> list[np.ndarray]:
    """Returns the results of `fn` by NumPy. Verifies its graph and its text."""
    compiled = ts.jit(fn)
    out = compiled(*map(ts.tensor, values))
    text = compiled.graph.text
    verify(graph.parse(text))
    assert graph.parse(text).text == text
    return [t.numpy() for t in (out if isinstance(out, (tuple, list)) else [out])]


# -- custom gradients -----------------------------------------------------------------------------
@ts.custom_gradient
def scaled(x: ts.Tensor, y: ts.Tensor) -> Any:
    """x * y with gradients that are 10 times too large for x, and None for y."""

    def backward(g: ts.Tensor) -> tuple[ts.Tensor, None]:
        return g * y * 10.0, None

    return x * y, backward


@ts.custom_gradient
def both(x: ts.Tensor, scale: float) -> Any:
    """(sin, cos) with a backward that reads a value of the forward."""
    s, c = ts.sin(x), ts.cos(x)

    def backward(gs: tuple[ts.Tensor, ts.Tensor]) -> ts.Tensor:
        return scale * (gs[0] * c - gs[1] * s)

    return (s, c), backward


def test_the_gradient_is_what_backward_says() -> None:
    x, y = real(3), real(3)
    value, gx, gy = run(
        lambda x, y: (scaled(x, y), *ts.grad(ts.sum(scaled(x, y) ** 2), (x, y))), x, y
    )
    np.testing.assert_allclose(value, x * y, rtol=1e-6)
    np.testing.assert_allclose(gx, 2 * x * y * y * 10, rtol=1e-5)
    assert not gy.any()


def test_several_values_static_arguments_and_values_nobody_reads() -> None:
    x = real(4)
    (g,) = run(lambda x: ts.grad(ts.sum(both(x, 3.0)[0] * both(x, 2.0)[1]), x), x)
    np.testing.assert_allclose(g, 3 * np.cos(x) ** 2 - 2 * np.sin(x) ** 2, rtol=1e-4, atol=1e-6)
    (g,) = run(lambda x: ts.grad(ts.sum(both(x, 1.0)[1]), x), x)
    np.testing.assert_allclose(g, -np.sin(x), rtol=1e-5)


def test_a_custom_gradient_is_differentiated_again() -> None:
    x = real(4)

    def second(x: ts.Tensor) -> Any:
        first = ts.grad(ts.sum(both(x, 1.0)[0]), x)
        return first, ts.grad(ts.sum(first * first), x)

    first, again = run(second, x)
    np.testing.assert_allclose(first, np.cos(x), rtol=1e-5)
    np.testing.assert_allclose(again, -2 * np.cos(x) * np.sin(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_inside_a_loop(policy: str) -> None:
    rows, w = real(3, 4), real(4)

    def loss(rows: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        def body(h: ts.Tensor, row: ts.Tensor) -> Any:
            return h + scaled(row * w, row), ()

        return ts.sum(ts.scan(body, ts.zeros(4), rows, policy=policy)[0])

    rows_g, w_g = run(lambda r, w: ts.grad(loss(r, w), (r, w)), rows, w)
    np.testing.assert_allclose(w_g, (rows * rows * 10).sum(0), rtol=1e-5)
    np.testing.assert_allclose(rows_g, rows * w * 10, rtol=1e-5)


def test_nested_and_around_a_loop() -> None:
    @ts.custom_gradient
    def outer(x: ts.Tensor) -> Any:
        y = scaled(x, x)
        total, _ = ts.scan(lambda h, row: (h + row, ()), ts.tensor(0.0), y)

        def backward(g: ts.Tensor) -> ts.Tensor:
            inner = ts.grad(ts.sum(scaled(x, x)), x)  # 10 x
            back, _ = ts.scan(lambda h, row: (h + 0.0 * row, ()), g, x)
            return back * inner

        return total, backward

    x = real(5)
    value, g = run(lambda x: (outer(x), ts.grad(outer(x), x)), x)
    np.testing.assert_allclose(value, (x * x).sum(), rtol=1e-5)
    np.testing.assert_allclose(g, 10 * x, rtol=1e-5)


def test_trees_and_a_value_that_is_the_argument_itself() -> None:
    @ts.custom_gradient
    def clipped(tree: dict[str, ts.Tensor]) -> Any:
        return tree, lambda g: {"a": ts.minimum(g["a"], 1.0)}

    def grads(a: ts.Tensor, b: ts.Tensor) -> Any:
        out = clipped({"a": a, "b": b})
        return ts.grad(ts.sum(out["a"] * 5.0) + ts.sum(out["b"] * 5.0), (a, b))

    ga, gb = run(grads, real(2), real(3))
    assert ga.tolist() == [1.0, 1.0]
    assert not gb.any()


def test_on_the_tape_and_compiled_agree(oracle: Oracle) -> None:
    x, y = ts.tensor(real(3)), ts.tensor(real(3))

    def f(x: ts.Tensor, y: ts.Tensor) -> Any:
        loss = ts.sum(scaled(x, y) ** 2 + both(y, 1.0)[1])
        return ts.grad(loss, (x, y))

    before = oracle.compiled
    scaled(x, y)
    programs = oracle.compiled - before
    assert programs == 1  # the product alone: values passed through need no program
    for a, b in zip(f(x, y), ts.jit(f)(x, y), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)


def test_what_is_not_a_custom_gradient_is_said_so() -> None:
    def error(fn: Any, kind: type[ts.TesseraError] = ts.UsageError) -> str:
        with pytest.raises(kind) as caught:
            graph.trace(
                lambda x: ts.grad(ts.sum(ts.custom_gradient(fn)(x)), x), plain(ts.f32, (3,))
            )
        return str(caught.value).splitlines()[0]

    def ints(x: ts.Tensor) -> Any:
        return ts.cast(x, ts.int32), lambda g: g

    def many(x: ts.Tensor) -> Any:
        return x * 1.0, lambda g: (g, g)

    def shape(x: ts.Tensor) -> Any:
        return x * 1.0, lambda g: ts.sum(g)

    def draws(x: ts.Tensor) -> Any:
        return x * 1.0, lambda g: g * ts.random.normal((3,))

    def alone(x: ts.Tensor) -> Any:
        return x * 1.0

    def named(x: ts.Tensor) -> Any:
        return x * 1.0, lambda g: {"x": g}

    assert "gave a value that is no float tensor" in error(ints)
    assert "2 gradients for 1 arguments" in error(many)
    assert "does not fit argument '0'" in error(shape, ts.ShapeError)
    assert "draws random numbers" in error(draws)
    assert "not a value and a function" in error(alone)
    assert "where no float tensor was given" in error(named)


def test_arguments_by_name_and_arrays_have_their_places() -> None:
    x, y = real(3), real(3)

    @ts.custom_gradient
    def times(x: Any, y: Any, *, by: float = 1.0) -> Any:
        return by * (y * x), lambda g: [g * y * 10.0, g * x * 20.0]

    calls: list[Callable[[ts.Tensor, ts.Tensor], ts.Tensor]] = [
        lambda x, y: times(x, y),
        lambda x, y: times(x, y=y),
        lambda x, y: times(y=y, x=x, by=1.0),
    ]
    for call in calls:
        gx, gy = run(lambda x, y, call=call: ts.grad(ts.sum(call(x, y)), (x, y)), x, y)
        np.testing.assert_allclose(gx, y * 10, rtol=1e-6)
        np.testing.assert_allclose(gy, x * 20, rtol=1e-6)
    t = ts.tensor(y)  # outside of a compiled function a NumPy array is not converted
    np.testing.assert_allclose(ts.grad(ts.sum(times(x, t)), t).numpy(), x * 20, rtol=1e-6)


@pytest.mark.parametrize(("call", "said"), [
    (lambda x: ts.custom_gradient(lambda x, y: (x, lambda g: (g, g)))(x), "<lambda>: y is missing"),
    (lambda x: ts.custom_gradient(lambda x: (x, lambda g: g))(x, x), "2 arguments by place"),
    (lambda x: ts.custom_gradient(lambda x: (x, lambda g: g))(z=x), "there is no argument 'z'"),
    (lambda x: ts.custom_gradient(lambda x: (x, lambda g, h: g))(x), "<lambda>: h is missing"),
    (lambda x: ts.custom_gradient(lambda x, y: (x, lambda g: g))(x, y=x), "1 gradients for 2"),
    (lambda x: graph.stage("s")(lambda x: x)(), "<lambda>: x is missing"),
])  # fmt: skip
def test_calls_that_do_not_fit_are_said_so(call: Any, said: str) -> None:
    with pytest.raises(ts.UsageError, match=said):
        call(ts.ones(3))


def test_a_gradient_where_none_is_kept_says_why() -> None:
    x = ts.ones(3)
    with ts.no_grad(), pytest.raises(ts.GraphError, match=r"ts.no_grad\(\) is in force here"):
        ts.grad(ts.sum(x * x), x)


# -- value_and_grad, vjp --------------------------------------------------------------------------
@pytest.mark.parametrize(("call", "said"), [
    (lambda x: ts.value_and_grad(lambda v: v.sum(), argnums=1)(x), "its gradient is by argument 1"),
    (lambda x: ts.value_and_grad(lambda v: v.sum(), argnums="v")(x), "argnums cannot be 'v'"),
    (lambda x: ts.value_and_grad(lambda v: v.sum(), argnums=())(x), r"argnums cannot be \(\)"),
    (lambda x: ts.value_and_grad(lambda v: v.sum(), has_aux=True)(x), r"it is \(loss, more\)"),
    (lambda x: ts.value_and_grad(lambda v: v.sum(), has_aux=1)(x), "has_aux cannot be 1"),
    (lambda x: ts.value_and_grad(lambda v: v.sum())(), "its gradient is by argument 0"),
])  # fmt: skip
def test_value_and_grad_of_what_it_cannot_take(call: Any, said: str, oracle: Oracle) -> None:
    with pytest.raises(ts.UsageError, match=said):
        call(ts.ones(2))


def test_value_and_grad_and_vjp(oracle: Oracle) -> None:
    w, x = {"w": ts.tensor(real(3, 2))}, ts.tensor(real(4, 3))

    def loss(w: dict[str, ts.Tensor], x: ts.Tensor) -> ts.Tensor:
        return ts.sum(ts.tanh(x @ w["w"]))

    for f in (ts.value_and_grad(loss), ts.jit(ts.value_and_grad(loss))):
        value, g = f(w, x)
        t = np.tanh(x.numpy() @ w["w"].numpy())
        np.testing.assert_allclose(value.item(), t.sum(), rtol=1e-5)
        np.testing.assert_allclose(g["w"].numpy(), x.numpy().T @ (1 - t * t), rtol=1e-4, atol=1e-5)
    _, (gw, gx) = ts.value_and_grad(loss, argnums=[0, 1])(w, x)
    np.testing.assert_allclose(gw["w"].numpy(), g["w"].numpy(), rtol=1e-5)
    assert gx.shape == x.shape
    _, pull = ts.vjp(lambda a, b: (a @ b, ts.sum(a)), x, w["w"])
    g = real(4, 2)
    ga, gb = pull((ts.tensor(g), ts.tensor(2.0)))
    np.testing.assert_allclose(ga.numpy(), g @ w["w"].numpy().T + 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gb.numpy(), x.numpy().T @ g, rtol=1e-4, atol=1e-5)
    for a, b in zip(pull(ts.tensor(g), ts.tensor(2.0)), (ga, gb), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    with pytest.raises(ts.ShapeError, match="not like the value"):
        pull((ts.tensor(g), ts.tensor([2.0])))


# -- gradients of gradients -----------------------------------------------------------------------
def second_by_differences(f: Callable[[ts.Tensor], ts.Tensor], x: np.ndarray, v: np.ndarray) -> Any:
    """The derivative of the gradient of `f` along `v`, by central differences."""
    first, e = ts.jit(lambda x: ts.grad(f(x), x)), np.float32(1e-2)
    up, down = (first(ts.tensor(x + s * v)).numpy().astype(np.float64) for s in (e, -e))
    return (up - down) / (2 * e)


IDS = np.array([0, 2, 1], np.int32)
W = real(4, 3)


def looped(policy: str) -> Callable[[ts.Tensor], ts.Tensor]:
    def loss(x: ts.Tensor) -> ts.Tensor:
        c = ts.tensor(W[:, 0])
        return ts.sum(
            ts.scan(lambda h, r: (ts.tanh(h * c + r), h * r), ts.ones(4), x, policy=policy)[1] ** 2
        )

    return loss


SECOND: dict[str, Callable[[ts.Tensor], ts.Tensor]] = {
    "fourth power": lambda x: ts.sum(x**4),
    "mlp": lambda x: ts.sum(ts.tanh(ts.tanh(x @ W) @ W.T) ** 2),
    "softmax": lambda x: ts.sum(op.softmax(x) ** 2),
    "cross entropy": lambda x: op.cross_entropy(x, IDS),
    "norms": lambda x: ts.sum(op.layer_norm(x) ** 3) + ts.sum(op.rms_norm(x) ** 3),
    "activations": lambda x: ts.sum(op.gelu(x) * op.silu(x)),
    "blocks of rows": lambda x: ts.sum(ts.map_chunks(lambda r: ts.tanh(r @ W), x, rows=1) ** 2),
    "loss in blocks": lambda x: nn.linear_cross_entropy(x, ts.tensor(W), IDS, rows=1),
    "loop, saved": looped("save"),
    "loop, recomputed": looped("recompute"),
    "indexing": lambda x: ts.sum(ts.take(x, ts.tensor(IDS), 0) ** 3) + ts.sum(x[1:, ::2] ** 3),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_hessian_vector_product_equals_differences_of_the_gradient(name: str) -> None:
    f, x, v = SECOND[name], real(3, 4), real(3, 4)

    def product(x: ts.Tensor, v: ts.Tensor) -> ts.Tensor:
        return ts.grad(ts.sum(ts.grad(f(x), x) * v), x)  # type: ignore[no-any-return]

    (got,) = run(product, x, v)
    np.testing.assert_allclose(got, second_by_differences(f, x, v), rtol=2e-2, atol=2e-2)


def test_derivatives_of_a_power_up_to_the_fourth() -> None:
    def down(x: ts.Tensor) -> list[ts.Tensor]:
        found, y = [], x**4
        for _ in range(4):
            y = ts.grad(ts.sum(y), x)
            found.append(y)
        return found

    x = np.array([1.0, -2.0], np.float32)
    for got, want in zip(run(down, x), (4 * x**3, 12 * x**2, 24 * x, 24 + 0 * x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("name", SECOND)
def test_the_tape_gives_the_same_second_derivative(name: str) -> None:
    f, x, v = SECOND[name], ts.tensor(real(3, 4)), ts.tensor(real(3, 4))

    def product(x: ts.Tensor, v: ts.Tensor) -> ts.Tensor:
        return ts.grad(ts.sum(ts.grad(f(x), x) * v), x)  # type: ignore[no-any-return]

    want = ts.jit(product)(x, v).numpy()
    np.testing.assert_allclose(product(x, v).numpy(), want, rtol=1e-3, atol=1e-4)
