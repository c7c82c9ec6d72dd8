"""Loops, branches and scans against JAX: values and gradients, on any layout, compiled and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tessera as ts
from tessera import dist, nn, op
from tessera.core.layout import parse_type
from tests.cases import grid
from tests.quickly import quickly

RNG = np.random.default_rng(5)
X = RNG.normal(size=(8, 4)).astype(np.float32)
W = (0.5 * RNG.normal(size=(4, 4))).astype(np.float32)
LAYOUTS = [("", ""), ("[8@dp, 4]", "[4, 4@tp]"), ("[8@tp, 4@dp]", "[4@dp, 4]")]
Function = Callable[[Any, Any, Any, Any], Any]  # of x, w, the namespace and its control flow


class Lax:
    """JAX's functions under the names of `ts`."""

    cond, switch, scan, fori_loop, map = lax.cond, lax.switch, lax.scan, lax.fori_loop, lax.map
    while_loop = lax.while_loop

    @staticmethod
    def associative_scan(fn: Any, xs: Any, reverse: bool = False, dim: int = 0) -> Any:
        return lax.associative_scan(fn, xs, reverse, dim)


def branch(x: Any, w: Any, m: Any, c: Any) -> Any:
    y = x @ w
    return c.cond(m.sum(y) > 0, lambda y: m.tanh(y) @ w, lambda y: y * x, y)


def other_branch(x: Any, w: Any, m: Any, c: Any) -> Any:
    return branch(-x, w, m, c)


def one_sided(x: Any, w: Any, m: Any, c: Any) -> Any:
    return c.cond(m.sum(x) < 0, lambda: m.exp(x) @ w, lambda: m.ones((8, 4)) * 2.0)


def nested(x: Any, w: Any, m: Any, c: Any) -> Any:
    def inner(v: Any) -> Any:
        return c.cond(m.sum(v) > 100, lambda v: v * 2, lambda v: m.sin(v @ w), v)

    return c.cond(m.sum(x * x) > 0, inner, lambda v: v, x)


def many_ways(x: Any, w: Any, m: Any, c: Any) -> Any:
    ways = [lambda v: v, lambda v: v @ w, lambda v: m.exp(v) * 0.1, lambda v: -v, lambda v: v * v]
    every = [c.switch(m.argmax(x[0]) + k, ways, x) for k in (-3, 0, 1, 5)]
    return every[0] + every[1] * every[2] + every[3]


def branch_in_a_loop(x: Any, w: Any, m: Any, c: Any) -> Any:
    def body(h: Any, row: Any) -> Any:
        h = c.cond(m.sum(h) > 0, lambda h: m.tanh(h @ w) - row, lambda h: h * row + 0.1, h)
        return h, m.sum(h)

    end, sums = c.scan(body, x[0], x)
    return end, sums


def loop_in_a_branch(x: Any, w: Any, m: Any, c: Any) -> Any:
    def looped(v: Any) -> Any:
        return c.scan(lambda h, row: (m.tanh(h @ w) + row, ()), v[0], v)[0]

    return c.cond(m.sum(x) < 1e6, looped, lambda v: v[0], x)


def recurrent(x: Any, w: Any, m: Any, c: Any, **how: Any) -> Any:
    return c.scan(lambda h, row: (m.tanh(h @ w + row), h * row), x[0], x, **how)


def powers(x: Any, w: Any, m: Any, c: Any) -> Any:
    def step(h: Any, nothing: Any) -> Any:
        return m.tanh(h @ w), m.sum(h)

    return c.scan(step, x, None, length=5)


def numbered(x: Any, w: Any, m: Any, c: Any) -> Any:
    return c.fori_loop(2, 7, lambda i, v: m.sin(v @ w) + i * 0.1, x)


def mapped(x: Any, w: Any, m: Any, c: Any) -> Any:
    return c.map(lambda row: m.tanh(row @ w) * m.sum(row), x)


def mapped_in_batches(x: Any, w: Any, m: Any, c: Any) -> Any:
    return c.map(lambda row: m.tanh(row @ w) * m.sum(row), x, batch_size=3)


def prefixes(x: Any, w: Any, m: Any, c: Any) -> Any:
    return c.associative_scan(lambda a, b: a + b + a * b, 0.3 * x)


def affine(x: Any, w: Any, m: Any, c: Any) -> Any:
    """A linear recurrence h = a * h + b."""

    def joined(p: Any, q: Any) -> Any:
        return q[0] * p[0], q[0] * p[1] + q[1]

    return c.associative_scan(joined, (m.tanh(x), x @ w))


def backwards(x: Any, w: Any, m: Any, c: Any) -> Any:
    return c.associative_scan(m.maximum, x @ w, True, 1)


def products(x: Any, w: Any, m: Any, c: Any) -> Any:
    """Of matrices, scaled to a sum of one."""
    y = m.tanh(x)
    positive = m.exp(y[:, :, None] * y[:, None, :])

    def joined(a: Any, b: Any) -> Any:
        both = a @ b
        return both / m.sum(both, (1, 2), keepdims=True)

    return c.associative_scan(joined, positive)


FUNCTIONS: dict[str, Any] = {
    f.__name__: f
    for f in (
        branch, other_branch, one_sided, nested, many_ways, branch_in_a_loop, loop_in_a_branch,
        recurrent, powers, numbered, mapped, mapped_in_batches, prefixes, affine, backwards,
        products,
    )
}  # fmt: skip
for n in (2, 3, 8, True):
    FUNCTIONS[f"recurrent, unrolled {n}"] = lambda *a, n=n: recurrent(*a, unroll=n)
    FUNCTIONS[f"reversed, unrolled {n}"] = lambda *a, n=n: recurrent(*a, unroll=n, reverse=True)


def total(value: Any, m: Any) -> Any:
    leaves = (
        [value]
        if not isinstance(value, tuple)
        else [y for part in value for y in (part if isinstance(part, tuple) else (part,))]
    )
    return sum(m.sum(y * y) for y in leaves)


def same(mine: Any, theirs: Any, tol: float = 3e-4) -> None:
    for a, b in zip(mine, jax.tree.leaves(theirs), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a.numpy(), b, rtol=tol, atol=tol * scale)


def placed(mesh: dist.Mesh, layouts: tuple[str, str]) -> list[Any]:
    pairs = zip((X, W), layouts, strict=True)
    return [ts.tensor(a, mesh, text) if text else ts.tensor(a) for a, text in pairs]


HOW = [(compiled, layouts) for layouts in LAYOUTS for compiled in (False, True)]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


@pytest.mark.parametrize(("name", "how"), grid(FUNCTIONS, HOW))
def test_values_and_gradients_are_those_of_jax(
    name: str, how: tuple[bool, tuple[str, str]], mesh: dist.Mesh
) -> None:
    f, (compiled, layouts) = FUNCTIONS[name], how

    def run(x: Any, w: Any) -> Any:
        loss = total(f(x, w, ts, ts), ts)
        return loss, *ts.grad(loss, [x, w])

    def theirs(x: Any, w: Any) -> Any:
        return total(f(x, w, jnp, Lax), jnp)

    want = theirs(X, W), *jax.grad(theirs, (0, 1))(X, W)
    same((ts.jit(run) if compiled else run)(*placed(mesh, layouts)), want)


# -- vmap -----------------------------------------------------------------------------------------
def of_row(name: str) -> Any:
    def run(x: Any, w: Any, m: Any, c: Any) -> Any:
        return total(FUNCTIONS[name](x, w, m, c), m)

    return run


def collatz(x: Any, w: Any, m: Any, c: Any) -> Any:
    def body(v: Any) -> Any:
        return v[0] * 0.5 + 0.1 * m.sin(v[0]), v[1] + 1

    y, steps = c.while_loop(lambda v: m.sum(m.abs(v[0])) > 1.0, body, (x, 0))
    return m.sum(y) + steps


@pytest.mark.parametrize(("name", "which"), grid([*FUNCTIONS, "while"], ["x", "w", "both"]))
def test_many_rows_at_once(name: str, which: str) -> None:
    f = collatz if name == "while" else of_row(name)
    x, w = (
        np.stack([a, a * 0.5, -a]) if which in (k, "both") else a for k, a in (("x", X), ("w", W))
    )
    dims = tuple(0 if which in (k, "both") else None for k in ("x", "w"))
    mine = ts.vmap(lambda x, w: f(x, w, ts, ts), in_dims=dims)
    theirs = jax.vmap(lambda x, w: f(x, w, jnp, Lax), in_axes=dims)
    same([ts.jit(mine)(ts.tensor(x), ts.tensor(w))], theirs(x, w))
    if name != "while":
        mine = ts.vmap(lambda x, w: ts.grad(f(x, w, ts, ts), [x, w]), in_dims=dims)
        each = jax.vmap(jax.grad(lambda x, w: f(x, w, jnp, Lax), (0, 1)), in_axes=dims)
        same(mine(ts.tensor(x), ts.tensor(w)), each(x, w))


# -- devices of their own -------------------------------------------------------------------------
def test_devices_that_choose_together_may_wait_for_each_other(mesh: dist.Mesh) -> None:
    @op.kernel
    def body(x: Any) -> Any:
        all_of_them = dist.all_reduce(ts.sum(x), axis="dp")
        summed = lambda v: dist.all_reduce(v, axis="dp")  # noqa: E731
        y = ts.cond(all_of_them > 1e6, lambda v: v, lambda v: summed(v) * v, x)
        return y, ts.grad(ts.sum(y), x)

    def theirs(x: Any) -> Any:
        both = x.reshape(2, 4, 4)
        return (both.sum(0) * both).reshape(8, 4)

    y, dx = body(ts.tensor(X, mesh, "[8@dp, 4]"))
    same((y, dx), (theirs(X), jax.grad(lambda x: jnp.sum(theirs(x)))(X)))


def test_each_device_may_choose_a_branch_without_collectives(mesh: dist.Mesh) -> None:
    @op.kernel
    def body(x: Any, w: Any) -> Any:
        y = ts.cond(ts.sum(x) > 0, lambda v: ts.tanh(v @ w), lambda v: v * 3.0, x)
        return {"x": y, "dx": ts.grad(ts.sum(y * y), x), "dw": ts.grad(ts.sum(y * y), w)}

    def theirs(x: Any, w: Any) -> Any:
        halves = [jnp.where(jnp.sum(v) > 0, jnp.tanh(v @ w), v * 3.0) for v in (x[:4], x[4:])]
        return jnp.concatenate(halves)

    x = X + np.where(np.arange(8) < 4, 1.0, -1.0).astype(np.float32)[:, None]
    got = body(ts.tensor(x, mesh, "[8@dp, 4]"), ts.tensor(W, mesh))
    dx, dw = jax.grad(lambda x, w: jnp.sum(theirs(x, w) ** 2), (0, 1))(x, W)
    same((got["x"], got["dx"], got["dw"]), (theirs(x, W), dx, dw))


def test_a_bool_of_each_device_cannot_choose_a_collective(mesh: dist.Mesh) -> None:
    @op.kernel
    def body(x: Any) -> Any:
        return ts.cond(ts.sum(x) > 0, lambda v: dist.all_reduce(v, axis="dp"), lambda v: v, x)

    with pytest.raises(ts.LayoutError, match=r"their own bools") as found:
        body(ts.tensor(X, mesh, "[8@dp, 4]"))
    assert "decide together" in str(found.value) and "test_control_flow.py" in str(found.value)


# -- programs -------------------------------------------------------------------------------------
def loops(f: Any) -> list[int]:
    f(ts.tensor(X), ts.tensor(W))
    return [n.attrs["length"] for n in f.graph.nodes if n.op == "scan"]


def test_unrolled_loops_have_fewer_turns() -> None:
    def run(n: Any) -> list[int]:
        return loops(ts.jit(lambda x, w: recurrent(x, w, ts, ts, unroll=n)))

    assert [run(n) for n in (1, 2, 3, 8, True)] == [[8], [4], [2], [], []]


@pytest.mark.parametrize("unroll", [2, 3, True])
def test_random_numbers_do_not_depend_on_unrolling(unroll: Any) -> None:
    def run(n: Any) -> Any:
        ts.seed(4)
        return ts.scan(lambda h, r: (h, nn.dropout(r, 0.5)), 0.0, ts.tensor(X), unroll=n)[1].numpy()

    np.testing.assert_array_equal(run(unroll), run(1))


def test_branches_draw_numbers_of_their_own() -> None:
    def run(way: bool) -> Any:
        ts.seed(4)
        draw = lambda: ts.random.normal((64,))  # noqa: E731
        return ts.jit(lambda p: ts.cond(p, draw, lambda: draw() + draw()))(ts.tensor(way)).numpy()

    yes, no = run(True), run(False)
    assert 0.7 < yes.std() < 1.3 and 1.1 < no.std() < 1.8 and not np.allclose(yes, no)


def test_totals_alone_are_sent_for_prefixes_along_a_split_dim(mesh: dist.Mesh) -> None:
    @ts.jit
    def run(x: Any) -> Any:
        return ts.associative_scan(lambda a, b: a + b, x)

    x = np.arange(4096, dtype=np.float32).reshape(1024, 4) % 7
    got = run(ts.tensor(x, mesh, "[1024@tp, 4]"))
    np.testing.assert_array_equal(got.numpy(), np.cumsum(x, 0))
    assert got.type == parse_type("f32[1024@tp, 4]", mesh)
    assert run.graph.wire_bytes <= 3 * 4 * 4


def test_a_gradient_of_a_branch_needs_no_collective_inside(mesh: dist.Mesh) -> None:
    """The sum over devices of a weight's gradient stays pending until after the branches."""

    @ts.jit
    def run(x: Any, w: Any) -> Any:
        y = ts.cond(w[0, 0] > 0, lambda: ts.tanh(x @ w), lambda: x * 2.0)
        return ts.grad(ts.sum(y), w)

    run(ts.tensor(X, mesh, "[8@dp, 4]"), ts.tensor(W, mesh))
    assert [n.op for n in run.graph.nodes if n.kind.bodies] == ["cond"]
    assert [n.op for n, _ in run.graph.collectives()] == ["all_reduce"]


def test_an_index_beyond_32_bits_counts_as_the_nearest() -> None:
    ways = [lambda: ts.tensor(0), lambda: ts.tensor(1)]
    for index in (2**32, -(2**32)):
        found = ts.switch(ts.tensor(index, dtype=ts.int64), ways)
        assert found.item() == (index > 0)
    many = [lambda k=k: ts.tensor(k) for k in range(200)]
    assert ts.switch(ts.tensor(5, dtype=ts.int8), many).item() == 5


def test_a_map_over_no_rows() -> None:
    for size in (None, 2):
        doubled, sums = ts.map(lambda r: (r * 2, ts.sum(r)), ts.zeros((0, 3)), batch_size=size)
        assert (doubled.shape, sums.shape) == ((0, 3), (0,))


ERRORS: dict[str, tuple[Any, str]] = {
    "a number": (lambda x: ts.cond(ts.sum(x), lambda: x, lambda: x), "not one bool"),
    "many bools": (lambda x: ts.cond(x > 0, lambda: x, lambda: x), "ts.where"),
    "another dtype": (lambda x: ts.cond(x[0, 0] > 0, lambda: x, lambda: x.to("int32")), "dtypes"),
    "another structure": (lambda x: ts.cond(x[0, 0] > 0, lambda: x, lambda: (x, x)), "structures"),
    "no branch": (lambda x: ts.switch(0, []), "list of functions"),
    "a float index": (lambda x: ts.switch(x[0, 0], [lambda: x]), "not one integer"),
    "no function": (lambda x: ts.cond(x[0, 0] > 0, x, lambda: x), "function"),
    "a shown value": (lambda x: ts.cond(x[0, 0] > 0, lambda: ts.debug.print(x), lambda: None),
                      "shows or records"),
    "no length": (lambda x: ts.scan(lambda h, r: (h, h), x), "length"),
    "another length": (lambda x: ts.scan(lambda h, r: (h, h), x, x, length=3), "other rows than 3"),
    "no unrolling": (lambda x: ts.scan(lambda h, r: (h, h), x, x, unroll=0), "unroll"),
    "unrolling of an unknown loop": (
        lambda x: ts.fori_loop(0, ts.tensor(3), lambda i, v: v, x, unroll=2), "known number"),
    "a bound that is no number": (lambda x: ts.fori_loop(0, x, lambda i, v: v, x), "bound"),
    "other sizes": (lambda x: ts.associative_scan(lambda a, b: a, (x, x[:2])), "differ in size"),
    "another shape": (lambda x: ts.associative_scan(lambda a, b: ts.sum(a), x), "changes"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_to_do(name: str) -> None:
    run, text = ERRORS[name]
    with pytest.raises(ts.TesseraError, match=text) as found:
        ts.jit(run)(ts.tensor(X))
    assert "fix" in str(found.value)


def test_a_python_bool_chooses_while_recording() -> None:
    f = ts.jit(lambda x: ts.cond(x.ndim == 2, lambda: x * 2.0, lambda: x.fail))
    np.testing.assert_array_equal(f(ts.tensor(X)).numpy(), X * 2)
    assert not any(n.op == "cond" for n in f.graph.nodes)
