"""Bitwise reproducible sums: kept by every op or refused. Random numbers in loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn
from tessera.core.context import replaced
from tessera.core.dtypes import f32
from tessera.core.layout import plain
from tessera.passes.plan import need_kept

MESH = dist.Mesh.parse("dp=2 tp=2")


@ts.op(index="b d -> b", reduces="sum")
def lengths(x: Any) -> Any:
    return (x * x).sum(-1)


@ts.op(index="b d, b d -> b d")
def mixed(x: Any, y: Any) -> Any:
    return x * y + y


@ts.op(index="b d, d -> b d")
def scaled(x: Any, w: Any) -> Any:
    return x * w


def x_type(*shape: int) -> Any:
    return plain(f32, shape, MESH)


def test_a_function_that_may_sum_is_refused_with_its_line() -> None:
    def step(x: Any) -> Any:
        return lengths(x)

    with pytest.raises(ts.UsageError) as error:
        need_kept(graph.trace(step, x_type(4, 8)))
    lines = str(error.value).splitlines()
    assert lines[0] == "mesh_invariant: lengths may add up in another order on another mesh"
    assert [line.split(" : ")[0].strip() for line in lines[1:]] == ["arg 0", "index", "at", "fix"]
    assert "test_bits.py" in lines[3]


def test_a_function_of_single_elements_passes_and_so_does_its_gradient() -> None:
    def step(x: Any, y: Any) -> Any:
        return ts.grad(mixed(x, y).sum(), x)

    need_kept(graph.trace(step, x_type(4, 8), x_type(4, 8)))


def test_a_gradient_that_sums_is_refused() -> None:
    # Row by row it is a product; the gradient of a value shared by all rows is a sum over them.
    with pytest.raises(ts.UsageError, match="mesh_invariant: scaled may add up"):
        need_kept(graph.trace(lambda x, w: ts.grad(scaled(x, w).sum(), w), x_type(4, 8), x_type(8)))


def test_bodies_are_looked_into() -> None:
    def step(x: Any) -> Any:
        return ts.scan(lambda c, row: (c + lengths(row), ()), ts.zeros((4,)), x)[0]

    with pytest.raises(ts.UsageError, match="mesh_invariant: lengths"):
        need_kept(graph.trace(step, x_type(3, 4, 8)))


# -- random numbers in loops ----------------------------------------------------------------------
W = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
X = np.ones((4, 8), np.float32)


def layer(h: Any, w: Any) -> Any:
    return nn.dropout(nn.dropout(h @ w, 0.3), 0.2)


def written_out(x: Any, w: Any) -> Any:
    for i in range(3):
        x = layer(x, w[i])
    return x


def looped(policy: str) -> Any:
    return lambda x, w: ts.scan(lambda h, p: (layer(h, p), ()), x, w, policy=policy)[0]


def nested(x: Any, w: Any) -> Any:
    """A loop of which each iteration is a loop of one iteration."""

    def iteration(h: Any, p: Any) -> Any:
        return ts.scan(lambda a, b: (layer(a, b), ()), h, p.reshape(1, 8, 8))[0], ()

    return ts.scan(iteration, x, w, policy="recompute")[0]


def within(x: Any, w: Any) -> Any:
    """A loop of one iteration that contains the loop over all iterations."""
    return ts.scan(lambda h, _: (looped("save")(h, w), ()), x, ts.ones((1,)))[0]


def everything(fn: Any) -> list[Any]:
    """The result, the next random draw and the gradient, by the oracle."""

    def step(x: Any, w: Any) -> Any:
        y = fn(x, w)
        return y, ts.random.uniform((3,)), ts.grad((y * y).sum(), w)

    g = graph.trace(step, X, W)
    given = {"x": X, "w": W, "random_key": np.array([5, 9], np.uint32)}
    values = [given.get(n.attrs["name"], np.ones(n.type.shape, np.float32)) for n in g.inputs]
    return graph.evaluate(g, values)


@pytest.mark.parametrize(
    "fn",
    [looped("save"), looped("recompute"), looped("products"), nested, within],
    ids=["save", "recompute", "products", "nested", "within"],
)
def test_a_loop_draws_what_its_iterations_draw_written_out(fn: Any) -> None:
    want, got = everything(written_out), everything(fn)
    assert 0.2 < (np.asarray(want[0]) == 0).mean() < 0.8
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_iterations_draw_different_numbers() -> None:
    g = graph.trace(lambda x: ts.scan(lambda c, _: (c, ts.random.uniform((5,))), (), x)[1],
                    np.ones((4,), np.float32))  # fmt: skip
    key = np.array([5, 9], np.uint32)
    (rows,) = graph.evaluate(g, [key if n.type.shape == (2,) else X[0, :4] for n in g.inputs])
    assert len(np.unique(rows)) == 20


# -- gradients of weights that are gathered where they are used ------------------------------------
def reductions(zero: int) -> Counter[tuple[Any, str]]:
    """Counts (axes, dtype) of the sums over devices in the gradients of a model with tied
    embeddings."""
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    if zero:
        plan = plan + dist.strategy("zero_redundancy_optimizer", stage=zero)
    config = nn.GPTConfig(64, 16, 32, 1, 4, positions="rotary", norm="rms", tied=True, loop=False)
    model = dist.place(nn.GPT(config), plan, MESH)
    ids = dist.place((np.zeros((8, 16), np.int32),) * 2, plan, MESH, kind="batch")

    def gradients(model: Any, x: Any, y: Any) -> Any:
        with ts.autocast(ts.bf16):
            loss = model.loss(x, y)
        return ts.grad(loss, model.parameters(), layout=plan)

    with replaced(determinism="mesh_invariant"):
        g = graph.simplify(graph.trace(gradients, model, *ids))
    return Counter(_sums(g))


def _sums(g: graph.Graph) -> Iterator[tuple[Any, str]]:
    for n in g.nodes:
        if n.op in ("all_reduce", "reduce_scatter"):
            yield n.attrs["axes"], str(n.type.dtype)
        if "body" in n.attrs:
            yield from _sums(n.attrs["body"])


def test_gradients_are_summed_alike_whether_weights_are_whole_or_gathered() -> None:
    whole = reductions(0)
    assert whole[("dp",), "f32"] and not whole[("dp",), "bf16"]
    assert reductions(2) == whole
    assert reductions(3) == whole
