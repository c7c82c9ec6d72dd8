"""A mesh axis in time, and graphs in turns: equal to the recorded graph."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn
from tessera.core.errors import MeshError
from tessera.core.layout import parse_type
from tessera.core.mesh import Mesh, in_time
from tessera.core.mesh import joined as joined_meshes
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate
from tessera.ir.graph.text import parse
from tessera.ir.graph.time_axis import cut, joined
from tessera.ir.graph.verify import verify
from tessera.passes.simplify import simplify
from tessera.passes.time import lower_time

SPACE = Mesh(("dp",), devices=2)
MESH = SPACE.in_time(mb=4)


# -- the mesh -------------------------------------------------------------------------------------
def test_facts_of_a_mesh_with_an_axis_in_time() -> None:
    assert MESH.axes == ("dp", "mb") and MESH.sizes == {"dp": 2, "mb": 4}
    assert MESH.time == ("mb",) and MESH.space == SPACE
    assert SPACE.time == () and SPACE.space is None
    assert MESH.device_ids == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [(MESH, "dp=2 time(mb=4)"), (in_time(None, {"mb": 3}), "time(mb=3)")],
)
def test_its_text_is_read_back(mesh: Mesh, text: str) -> None:
    assert mesh.text() == text
    assert Mesh.parse(text) == mesh
    assert Mesh.parse(text).space == mesh.space


def test_its_repr_is_the_call_that_builds_it() -> None:
    assert repr(MESH) == "Mesh(('dp',), shape=(2,)).in_time(mb=4)"
    assert eval(repr(MESH)) == MESH


def test_equality() -> None:
    assert Mesh.parse("dp=2").in_time(mb=4) == MESH
    assert hash(Mesh.parse("dp=2").in_time(mb=4)) == hash(MESH)
    others = [SPACE, SPACE.in_time(mb=2), SPACE.in_time(step=4), Mesh.parse("dp=2 mb=4"),
              Mesh(("dp",), devices=[2, 3]).in_time(mb=4), Mesh.parse("dp=4").fold(2).in_time(mb=4),
              Mesh.parse("dp=4").in_time(mb=4)]  # fmt: skip
    assert all(other != MESH for other in others)


@pytest.mark.parametrize("mesh", [MESH, in_time(None, {"mb": 3}), SPACE.fold(1).in_time(mb=4)])
def test_it_travels(mesh: Mesh) -> None:
    for other in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh)):
        assert other == mesh
        assert (other.time, other.space, other.onto) == (mesh.time, mesh.space, mesh.onto)


def test_meshes_are_joined_where_their_devices_and_turns_are_alike() -> None:
    alone = in_time(None, {"mb": 4})
    assert joined_meshes(MESH, SPACE) == joined_meshes(alone, SPACE) == MESH
    assert joined_meshes(MESH, SPACE.in_time(mb=2)) is None
    assert joined_meshes(MESH, Mesh.parse("tp=2")) is None


def failed(call: Callable[[], Any], want: str) -> None:
    with pytest.raises(MeshError) as error:
        call()
    assert str(error.value).startswith(want), str(error.value)


def test_errors() -> None:
    failed(lambda: SPACE.in_time(mb=0), "mesh.in_time: {'mb': 0} is not one axis")
    failed(lambda: SPACE.in_time(mb=2.5), "mesh.in_time: {'mb': 2.5} is not one axis")  # type: ignore[arg-type]
    besides = "mesh.in_time: it cannot have the axis"
    failed(lambda: SPACE.in_time(dp=2), f"{besides} 'dp' in time besides\n  mesh : dp=2\n")
    failed(
        lambda: MESH.in_time(step=2), f"{besides} 'step' in time besides\n  mesh : dp=2 time(mb=4)"
    )
    failed(lambda: Mesh.parse("dp=2 time(mb)"), "Mesh: cannot read 'time(mb)' as axis=size")
    failed(lambda: Mesh.parse("dp=2 time(dp=2)"), "Mesh: axis 'dp' is named twice")


# -- graphs ---------------------------------------------------------------------------------------
def rows(text: str = "f32[16@(dp,mb), 8]") -> Any:
    return parse_type(text, MESH)


W = rows("f32[8, 4]")


def mean(x: Any, w: Any) -> Any:
    loss = (ts.tanh(x @ w) ** 2).mean()
    return loss, ts.grad(loss, w)


def batch_norm(x: Any, w: Any) -> Any:
    h = ts.tanh(x @ w)
    c = h - h.mean(0)
    loss = (c / ts.sqrt((c * c).mean(0) + 1e-5) + h**3).mean()
    return loss, ts.grad(loss, w)


def contrastive(x: Any, w: Any) -> Any:
    h = ts.tanh(x @ w)
    loss = nn.cross_entropy(h @ h.T, ts.arange(16))
    return loss, ts.grad(loss, w), h


def largest(x: Any, w: Any) -> Any:
    h = x @ w
    return ts.max(h, 0), (h > 2).any(), ts.cumsum(h, 0), h[::2], ts.arange(16) * h.sum(1)


CASES = {f.__name__: graph.trace(f, rows(), W) for f in (mean, batch_norm, contrastive, largest)}
CASES["blocks of rows"] = graph.trace(
    lambda x: (x.reshape(2, 2, 4, 2, 8).sum((0, 3)), x.mean(0), x.reshape(32, 2, 4).mean(2)),
    rows("f32[(2·2@dp·4@mb·2), 8]"),
)
each_case = pytest.mark.parametrize("name", CASES)


def drawn(g: Graph) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=n.type.shape).astype(np.float32) for n in g.inputs]


def loops(g: Graph) -> list[int]:
    return [n.attrs["length"] for n in g.nodes if n.op == "scan"]


@each_case
def test_the_text_is_read_back(name: str) -> None:
    recorded = CASES[name]
    back = parse(recorded.text)
    assert "time(mb=4)" in recorded.text and back.text == recorded.text
    assert back.mesh == recorded.mesh == MESH
    verify(back)


@each_case
def test_in_turns_it_computes_the_same(name: str) -> None:
    recorded = simplify(CASES[name])
    lowered = lower_time(recorded)
    verify(lowered)
    assert not any(t.mesh is not None and t.mesh.time for n in lowered.nodes for t in n.types)
    assert 4 in loops(lowered)
    ins = drawn(recorded)
    for x, y in zip(evaluate(recorded, ins), evaluate(lowered, ins), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_loop_ends_where_all_turns_are_needed() -> None:
    counts = {name: len(loops(lower_time(simplify(g)))) for name, g in CASES.items()}
    assert counts["mean"] == 1 and counts["batch_norm"] > 2


def test_where_bits_are_promised_sums_are_those_of_pairs() -> None:
    with dist.deterministic(level="mesh_invariant"):
        recorded = simplify(graph.trace(mean, rows(), W))
    lowered = lower_time(recorded)
    outer = [n for n in lowered.nodes if n.op == "scan"]
    assert outer and all(loops(n.attrs["body"]) == [2] for n in outer) and {*loops(lowered)} == {2}
    ins = drawn(recorded)
    for x, y in zip(evaluate(recorded, ins), evaluate(lowered, ins), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_what_needs_no_axis_in_time_is_left_alone() -> None:
    g = graph.trace(mean, parse_type("f32[16@dp, 8]", SPACE), parse_type("f32[8, 4]", SPACE))
    assert lower_time(g) is g


@pytest.mark.parametrize("text", ["f32[16@(dp,mb), 8]", "f32[3, (2·8@mb·2)]", "f32[4] +mb"])
def test_rows_are_cut_and_joined(text: str) -> None:
    t = rows(text)
    b = Builder("there and back")
    x = b.input(rows(text.replace("@(dp,mb)", "@dp").replace("@mb", "").replace(" +mb", "")))
    turns = cut(b, x, t)
    ends = [turns] if t.partial else [turns, joined(b, turns, t)]
    g = b.graph(ends)
    (given,) = drawn(g)
    got = evaluate(g, [given])
    assert got[0].shape[0] == 4
    np.testing.assert_array_equal(got[0].sum(0) if t.partial else got[1], given)
