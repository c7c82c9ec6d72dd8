"""JAX functions as ops: values, layouts and gradients equal JAX's, and errors name the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.ir.graph.verify import verify
from tessera.ops import user

RNG = np.random.default_rng(9)
X = RNG.normal(size=(4, 6, 8)).astype(np.float32)
W = RNG.normal(size=(8,)).astype(np.float32)
MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


def gated_(x: Any, w: Any) -> Any:
    return jnp.tanh(x) * w


def halves_(x: Any) -> Any:
    """Returns the sum of each row's exponentials, and their quotients."""
    total = jnp.sum(jnp.exp(x), -1)
    return total, jnp.exp(x) / total[..., None]


def product_(x: Any, w: Any) -> Any:
    return x @ w


gated = ts.op(index="b s d, d -> b s d")(gated_)
halves = ts.op(index="... d -> ..., ... d")(halves_)
product = ts.op(index="... k, k n -> ... n", reduces="sum")(product_)


def check(fn: Callable[..., Any], theirs: Callable[..., Any], *xs: Any, layouts: Any = ()) -> Any:
    """Compares value, gradient and second derivative with JAX, eager and compiled."""
    vs = [RNG.normal(size=x.shape).astype(np.float32) for x in xs]

    def ours(*a: ts.Tensor) -> Any:
        loss = fn(*a)
        grads = ts.grad(loss, a)
        dot = ts.sum(ts.stack([ts.sum(g * ts.tensor(v)) for g, v in zip(grads, vs, strict=True)]))
        return loss, grads, dot

    def along(*a: Any) -> Any:
        return sum(map(jnp.vdot, jax.grad(theirs, tuple(range(len(a))))(*a), vs))

    every = tuple(range(len(xs)))
    given = [ts.tensor(x, mesh=MESH, layout=on) for x, on in zip(xs, layouts)]
    given = given or [ts.tensor(x) for x in xs]
    compiled = ts.jit(lambda *a: (*ours(*a)[:2], ts.grad(ours(*a)[2], a)))
    loss, grads, again = compiled(*given)
    np.testing.assert_allclose(loss.item(), theirs(*xs), rtol=1e-4)
    for got, want in zip(grads, jax.grad(theirs, every)(*xs), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-3, atol=1e-4)
    for got, want in zip(again, jax.grad(along, every)(*xs), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-3, atol=2e-3)
    for a, b in zip(ours(*given)[1], grads, strict=True):  # eager gradients
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-4)
    text = compiled.graph.text
    assert graph.parse(text).text == text
    verify(graph.parse(text))
    return compiled.graph


def test_alone() -> None:
    check(lambda x, w: ts.sum(gated(x, w) ** 2), lambda x, w: (gated_(x, w) ** 2).sum(), X, W)


@pytest.mark.parametrize(
    ("x_on", "moved"),
    [("[4@dp, 6, 8@tp]", False), ("[4@tp, 6@dp, 8]", False), ("[4, 6@tp, 8]", True)],
)
def test_letters_may_be_split(x_on: str, moved: bool) -> None:
    """An uneven split is gathered first, since a function never sees padding."""
    g = check(
        lambda x, w: ts.sum(gated(x, w) ** 2),
        lambda x, w: (gated_(x, w) ** 2).sum(),
        X,
        W,
        layouts=[x_on, "[8]"],
    )
    node = next(n for n in g.nodes if n.op == "user")
    assert (node.args[0].op == "all_gather") is moved


def test_a_letter_that_is_reduced_is_whole() -> None:
    def loss(x: Any, like: Any) -> Any:
        a, b = halves(x) if like is ts else halves_(x)
        return like.sum(like.log(a)) + like.sum(b * b * b)

    g = check(
        lambda x: loss(x, ts), lambda x: loss(x, jnp), X, layouts=["[4@dp, 6, 8@tp]"]
    )  # fmt: skip
    node = next(n for n in g.nodes if n.op == "user")
    assert [str(t) for t in node.types] == ["f32[4@dp, 6]", "f32[4@dp, 6, 8]"]
    assert node.args[0].op == "all_gather" and node.args[0].note == "for user"


def test_results_of_blocks_add_up_where_it_is_said() -> None:
    w = RNG.normal(size=(8, 4)).astype(np.float32)
    g = check(
        lambda x, w: ts.sum(ts.tanh(product(x, w))),
        lambda x, w: jnp.tanh(x @ w).sum(),
        X,
        w,
        layouts=["[4@dp, 6, 8@tp]", "[8@tp, 4]"],
    )
    node = next(n for n in g.nodes if n.op == "user")
    assert str(node.type) == "f32[4@dp, 6, 4] +tp"


def test_whole_new_letters_dtypes_and_integers() -> None:
    @ts.op(index="b d, i -> b k, b", whole="d", sizes={"k": 3}, dtype=("f32", ts.int32))
    def picked(x: Any, at: Any) -> Any:
        top = jnp.sort(x, -1)[:, -3:]
        return top * at[0].astype(x.dtype), jnp.argmax(x, -1).astype(jnp.int32)

    x, at = X[:, 0], np.array([2], np.int32)
    t = ts.tensor(x, mesh=MESH, layout="[4@dp, 8@tp]")
    top, ids = picked(t, at)
    np.testing.assert_allclose(top.numpy(), 2 * np.sort(x, -1)[:, -3:], rtol=1e-6)
    assert np.array_equal(ids.numpy(), x.argmax(-1))
    assert (top.layout, ids.layout, ids.dtype) == ("[4@dp, 3]", "[4@dp]", ts.int32)
    g = ts.grad(ts.sum(picked(t, at)[0]), t).numpy()
    assert np.array_equal(g != 0, x >= np.sort(x, -1)[:, -3:-2])


def test_a_gradient_of_ones_own() -> None:
    @ts.op(index="b d, d -> b d", grad=lambda g, x, w: (3 * g, None))
    def odd(x: Any, w: Any) -> Any:
        return x * w

    x = ts.tensor(X[0], mesh=MESH, layout="[6@dp, 8@tp]")
    gx, gw = ts.jit(lambda x, w: ts.grad(ts.sum(odd(x, w)), (x, w)))(x, ts.tensor(W))
    assert (gx.numpy() == 3).all() and not gw.numpy().any()
    assert str(gx.type) == "f32[6@dp, 8@tp]"

    @ts.op(index="b -> b", grad=lambda g, x: (g, g))
    def many(x: Any) -> Any:
        return x

    with pytest.raises(ts.UsageError, match="grad= gave 2 gradients for 1 arguments"):
        ts.jit(lambda x: ts.grad(ts.sum(many(x)), x))(ts.ones(3))


@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_in_a_loop_and_under_a_custom_gradient(policy: str) -> None:
    @ts.custom_gradient
    def twice(x: ts.Tensor, w: ts.Tensor) -> Any:
        def backward(g: ts.Tensor) -> Any:
            return 2.0 * g * w * (1.0 - ts.tanh(x) ** 2), ts.sum(g * ts.tanh(x), 0)

        return gated(x.reshape(1, *x.shape), w).reshape(*x.shape), backward

    def loss(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        h, _ = ts.scan(lambda h, r: (h + twice(r, w), ()), ts.zeros((6, 8)), x, policy=policy)
        return ts.sum(h)

    x = ts.tensor(X, mesh=MESH, layout="[4, 6@dp, 8@tp]")
    gx, gw = ts.jit(lambda x, w: ts.grad(loss(x, w), (x, w)))(x, ts.tensor(W, mesh=MESH))
    np.testing.assert_allclose(gx.numpy(), 2 * W * (1 - np.tanh(X) ** 2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gw.numpy(), np.tanh(X).sum((0, 1)), rtol=1e-4, atol=1e-4)


def test_flops() -> None:
    def flops(fn: Any, *xs: Any) -> int:
        return graph.trace(fn, *xs).flops

    @ts.op(index="b d -> b d", flops=1000)
    def told(x: Any) -> Any:
        return x

    w = RNG.normal(size=(8, 4)).astype(np.float32)
    assert flops(lambda x, w: gated(x, w), X, W) == X.size
    assert flops(lambda x, w: product(x, w), X, w) == 2 * X.size * 4
    assert flops(lambda x: told(x), X[0]) == 1000


def test_a_name_that_is_taken_stays_what_it_was() -> None:
    def make(k: float) -> Any:
        @ts.op(index="b -> b", name="same")
        def f(x: Any) -> Any:
            return x * k

        return f

    first, second = make(2.0), make(3.0)
    x = ts.ones(2)
    assert [f(x).numpy()[0] for f in (first, second, first)] == [2.0, 3.0, 2.0]
    assert repr(first) != repr(second)


# -- errors ---------------------------------------------------------------------------------------
def error(call: Callable[[], Any], kind: type[ts.TesseraError] = ts.UsageError) -> list[str]:
    with pytest.raises(kind) as caught:
        call()
    lines = [line.strip() for line in str(caught.value).splitlines()]
    return [line for line in lines if not line.startswith("fix")]


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: ts.jit(lambda x: f(x))])
def test_a_function_that_does_not_keep_its_word(
    wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user, "FUNCTIONS", {})

    @ts.op(index="b d -> b")
    def shape(x: Any) -> Any:
        return x

    @ts.op(index="b d -> b", dtype=ts.int32)
    def dtype(x: Any) -> Any:
        return x.sum(-1)

    @ts.op(index="b d -> b, b")
    def count(x: Any) -> Any:
        return x.sum(-1)

    @ts.op(index="b d -> b")
    def nothing(x: Any) -> Any:
        return None

    @ts.op(index="b d -> b")
    def raises(x: Any) -> Any:
        raise ValueError("no luck\ntoday")

    x = ts.tensor(X[0], mesh=MESH, layout="[6@dp, 8]")

    def said(f: Any) -> list[str]:
        return error(lambda: wrap(f)(x))

    said_of_shape = said(shape)
    assert said_of_shape[:4] == [
        "shape: result 0 of the function is not what its index string says",
        "arg 0    : f32[6@dp, 8]",
        "expected : float32[3] on each device",
        "found    : float32[3, 8]",
    ]
    assert said_of_shape[4].startswith("at       : test_user_op.py:")
    assert said(dtype)[2:4] == [
        "expected : int32[3] on each device", "found    : float32[3]",
    ]  # fmt: skip
    assert said(count)[0] == "count: the function gave 1 results where its index has 2"
    assert said(nothing)[3] == "found    : a NoneType"
    of_raise = said(raises)
    assert of_raise[0] == "raises: the function raised ValueError: no luck"
    line = raises.__wrapped__.__code__.co_firstlineno + 2
    assert of_raise[-1] == f"at    : test_user_op.py:{line}"


def test_an_error_in_the_gradient_says_so() -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x

    def backward(saved: Any, g: Any) -> Any:
        raise RuntimeError("backwards")

    f.defvjp(lambda x: (x, None), backward)
    mine = ts.op(index="b -> b", name="mine")(f)
    said = error(lambda: ts.jit(lambda x: ts.grad(ts.sum(mine(x)), x))(ts.ones(3)))
    assert said[0] == "mine (gradient): the function raised RuntimeError: backwards"


def test_declarations_and_arguments_that_do_not_fit() -> None:
    x, w = ts.tensor(X), ts.tensor(W)
    shape = ts.ShapeError
    assert error(lambda: gated(x), shape)[0] == "gated_: 1 arguments for the 2 of its index"
    assert error(lambda: gated(x, w[:4]), shape)[0] == (
        "gated_: sizes 8 and 4 of 'd' do not match"
    )  # fmt: skip
    assert error(lambda: gated(w, w), shape)[0] == (
        "gated_: the arguments do not fit its index 'b s d, d -> b s d'"
    )
    for index, why in (
        ("a b", "it is no string with an arrow"),
        ("a -> b", "result letter 'b' is in no argument"),
        ("a a -> a", "'a' stands twice in one group"),
        ("a 1 -> a", "'1' is no letter"),
        (3, "it is no string with an arrow"),
    ):
        said = error(lambda index=index: ts.op(index=index), shape)[0]  # type: ignore[misc]
        assert said == f"op: index {index!r} cannot be read: {why}"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"whole": "z"}, "op: whole names 'z', which is no letter of 'a b -> a'"),
        ({"whole": 3}, "op: whole cannot be 3"),
        ({"reduces": "max"}, "op: reduces cannot be 'max'"),
        ({"dtype": ("f32", "f32")}, "op: 2 dtypes for 1 results"),
        ({"sizes": {"k": 0}}, "op: the size of 'k' cannot be 0"),
        ({"sizes": [1]}, "op: sizes cannot be [1]"),
        ({"flops": -1}, "op: flops cannot be -1"),
        ({"grad": 3}, "op: grad cannot be 3"),
        ({"name": 3}, "op: name cannot be 3"),
    ]
    for how, said in bad:
        assert error(lambda how=how: ts.op(index="a b -> a", **how))[0] == said  # type: ignore[misc]
    assert error(lambda: ts.op(index="a -> a")(3))[0] == "op: the function cannot be 3"


def test_arguments_by_name() -> None:
    want = gated(X, W).numpy()
    assert np.array_equal(gated(X, w=W).numpy(), want)
    assert np.array_equal(gated(w=W, x=X).numpy(), want)
    scaled = ts.op(index="b -> b")(lambda x, *, by=2.0: x * by)
    name = repr(scaled).split()[1].rstrip(":")
    assert error(lambda: scaled(W, by=3.0))[0] == f"{name}: by is no argument of its index"
    assert error(lambda: gated(X, b=W))[0] == "gated_: there is no argument 'b'"


def test_the_oracle_and_another_process_know_the_name_only() -> None:
    g = graph.trace(lambda x, w: gated(x, w), X, W)
    assert error(lambda: graph.evaluate(g, [X, W]))[0] == (
        "evaluate: gated_ is a user's JAX function, which NumPy cannot run"
    )
    elsewhere = graph.parse(g.text.replace('"gated_"', '"foreign"'))
    assert error(lambda: graph.evaluate(elsewhere, [X, W]))[0] == (
        "foreign: no function of this name is known, so a graph that calls it cannot run"
    )


def test_the_module_is_the_decorator() -> None:
    assert ts.op is op
    f = op.from_jax(index="b -> b")(lambda x: x + 1)
    assert f(ts.ones(2)).numpy().tolist() == [2.0, 2.0]


RATE, SHIFT = 1.0, np.ones(2, np.float32)


def _scaled(x: Any) -> Any:
    return x * RATE


def test_what_it_finds_outside_of_itself_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its gradient: a number, an array, a variable, in a function that it calls."""
    power = 1

    @ts.op(index="b -> b")
    def moved(x: Any) -> Any:
        return _scaled(x) ** power + SHIFT

    x = ts.tensor([2.0, 3.0])
    here = globals()
    for rate, power, shift in ((1.0, 1, 1.0), (5.0, 1, 1.0), (5.0, 2, 1.0), (5.0, 2, 7.0)):
        monkeypatch.setitem(here, "RATE", rate)
        SHIFT[:] = shift
        want = (x.numpy() * rate) ** power + shift
        np.testing.assert_allclose(moved(x).numpy(), want)
        slope = ts.value_and_grad(lambda x: moved(x).sum())(x)[1]
        np.testing.assert_allclose(slope.numpy(), power * x.numpy() ** (power - 1) * rate**power)
