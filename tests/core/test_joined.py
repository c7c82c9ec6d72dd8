"""Gradients of adjacent slices of one value, concatenated without communication."""

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph
from tessera.ir.graph.oracle import evaluate

MESH = dist.Mesh.parse("dp=2 tp=4")
X = np.arange(1.0, 97.0, dtype=np.float32).reshape(8, 12)


def thirds(x):
    return (x[:, :4] * 2 + x[:, 4:8] * 3 * x[:, 8:]).sum()


def out_of_order(x):
    return (x[6:] * 2).sum() + (x[2:6] * x[2:6]).sum()


def with_a_gap(x):
    return (x[:2] * x[4:6]).sum()


def overlapping(x):
    return (x[:5] * x[3:]).sum()


def a_twice_read_slice(x):
    part = x[:4]
    return (part * part + part + x[4:]).sum()


def of_both_dims(x):
    return (x[:4] ** 2).sum() + (x[:, 6:] ** 3).sum() + (x[4:] ** 2).sum()


def with_the_whole(x):
    return (x[:4] * x[4:]).sum() + (x * x).sum()


CASES = {
    thirds: lambda x: np.concatenate([0 * x[:, :4] + 2, 3 * x[:, 8:], 3 * x[:, 4:8]], 1),
    out_of_order: lambda x: np.concatenate([0 * x[:2], 2 * x[2:6], 0 * x[6:] + 2]),
    with_a_gap: lambda x: np.concatenate([x[4:6], 0 * x[:2], x[:2], 0 * x[:2]]),
    overlapping: lambda x: np.concatenate([x[3:], 0 * x[:3]]) + np.concatenate([0 * x[:3], x[:5]]),
    a_twice_read_slice: lambda x: np.concatenate([2 * x[:4] + 1, 0 * x[4:] + 1]),
    of_both_dims: lambda x: 2 * x + np.concatenate([0 * x[:, :6], 3 * x[:, 6:] ** 2], 1),
    with_the_whole: lambda x: 2 * x + np.concatenate([x[4:], x[:4]]),
}
JOINED = {thirds, out_of_order, a_twice_read_slice, of_both_dims, with_the_whole}
LAYOUTS = ["[8, 12]", "[8@dp, 12@tp]", "[8, 12@tp]", "[8@tp, 12]"]


def traced(fn, layout):
    def both(x):
        return ts.value_and_grad(fn)(x)[1]

    return graph.trace(both, ts.tensor(X, mesh=MESH, layout=layout))


@pytest.mark.parametrize("fn", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_the_sum_of_those_of_the_slices(fn, layout):
    made = traced(fn, layout)
    (got,) = evaluate(made, [X])
    np.testing.assert_allclose(got, CASES[fn](X), rtol=1e-6)


@pytest.mark.parametrize("fn", CASES)
def test_what_lies_side_by_side_is_joined_and_nothing_else(fn):
    ops = [n.op for n in traced(fn, "[8, 12]").nodes]
    assert ("concat" in ops) == (fn in JOINED)


def test_parts_that_are_split_alike_are_joined_where_they_lie():
    """The gradient of fused q, k and v needs no collective."""
    fused = ts.tensor(np.ones((4, 3, 8), np.float32), mesh=MESH, layout="[4, 3, 8@tp]")

    def loss(x):
        return (x[:, 0] * x[:, 1] * x[:, 2]).sum(1).sum()

    made = graph.trace(lambda x: ts.value_and_grad(loss)(x)[1], fused)
    (joined,) = [n for n in made.nodes if n.op == "concat"]
    assert str(joined.type) == "f32[4, 3, 8@tp]"
    after = made.nodes[made.nodes.index(joined) :]
    assert not [n for n in after if n.wire_bytes]
