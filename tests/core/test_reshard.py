"""Layout changes: the right collectives, which preserve the value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.dtypes import bf16, f32
from tessera.core.errors import LayoutError, MeshError, ShapeError, TesseraError
from tessera.core.layout import TensorType, parse_type, plain
from tessera.core.mesh import Mesh
from tessera.core.reshard import KINDS, Step, completed, gathered, steps_between
from tessera.ir.graph.build import Builder
from tessera.ir.graph.oracle import cut, evaluate_blocks, join, run_blocks
from tessera.ir.graph.verify import verify
from tessera.passes.simplify import simplify
from tests.core.lockstep import run_local
from tests.core.strategies import layouts, meshes, numbered, shapes

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


def on_mesh(text: str) -> TensorType:
    return parse_type(text, MESH)


def steps(a: str, b: str) -> list[tuple[str, tuple[str, ...], int]]:
    return [(s.kind, s.axes, s.wire_bytes) for s in steps_between(on_mesh(a), on_mesh(b))]


# ---- the table of DESIGN, and the bytes by hand ------------------------------------------------
@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        # 4 devices hold 32 of 128 bytes: each receives three blocks.
        ("f32[8, 4@tp]", "f32[8, 4]", [("all_gather", ("tp",), 96)]),
        # The block is 32 bytes, and 8 of them stay.
        ("f32[8, 4@tp]", "f32[8@tp, 4]", [("all_to_all", ("tp",), 24)]),
        # 128 bytes: reduce (3/4) and gather (3/4).
        ("f32[8, 4] +tp", "f32[8, 4]", [("all_reduce", ("tp",), 192)]),
        ("f32[8, 4] max tp", "f32[8, 4]", [("all_reduce", ("tp",), 192)]),
        # Each device ends with 32 bytes and receives them from three others.
        ("f32[8, 4] +tp", "f32[8, 4@tp]", [("reduce_scatter", ("tp",), 96)]),
        ("f32[8, 4]", "f32[8, 4@tp]", [("shard", ("tp",), 0)]),
        ("f32[8, 4]", "f32[8, 4] +tp", [("to_partial", ("tp",), 0)]),
        # Two axes.
        ("f32[8@(dp,tp), 4]", "f32[8, 4]", [("all_gather", ("dp", "tp"), 112)]),
        ("f32[8, 4] +dp +tp", "f32[8, 4]", [("all_reduce", ("dp", "tp"), 224)]),
        (
            "f32[8, 4] +dp max tp",
            "f32[8, 4]",
            [("reduce_scatter", ("dp",), 64), ("all_reduce", ("tp",), 96),
             ("all_gather", ("dp",), 64)],
        ),
        (
            "f32[8, 4] +dp +tp",
            "f32[8@dp, 4@tp]",
            [("reduce_scatter", ("dp",), 64), ("reduce_scatter", ("tp",), 48)],
        ),
        ("f32[8@dp, 4@tp]", "f32[8@(dp,tp), 4]", [("all_to_all", ("tp",), 12)]),
        # Movements below another factor, and mere swaps.
        ("f32[8@dp, 4] +tp", "f32[8, 4@tp]", [
            ("reduce_scatter", ("tp",), 48), ("all_gather", ("dp",), 16)]),
        ("f32[8@(dp,tp)]", "f32[8@(tp,dp)]", [
            ("all_gather", ("tp",), 12), ("all_to_all", ("dp",), 8), ("shard", ("tp",), 0)]),
        ("f32[64@(dp,tp)]", "f32[64@(tp,dp)]", [
            ("all_to_all", ("tp",), 24), ("all_to_all", ("dp",), 16), ("all_to_all", ("tp",), 24)]),
        # Uneven: blocks of ceil(7 / 4) = 2 rows, padding is sent too.
        ("f32[7@tp, 4]", "f32[7, 4]", [("all_gather", ("tp",), 96)]),
        ("f32[8, 4]", "f32[8, 4]", []),
    ],
)  # fmt: skip
def test_the_table_of_changes(
    src: str, dst: str, expected: list[tuple[str, tuple[str, ...], int]]
) -> None:
    assert steps(src, dst) == expected


def test_every_kind_is_in_the_table_above() -> None:
    seen = {
        kind
        for mark in test_the_table_of_changes.pytestmark
        for row in mark.args[1]
        for kind, _, _ in row[2]
    }
    assert seen == set(KINDS)


def test_a_value_without_a_mesh_is_replicated_on_any() -> None:
    got = steps_between(plain(f32, (8,)), on_mesh("f32[8@tp]"))
    assert [s.kind for s in got] == ["shard"]
    assert steps_between(plain(f32, (8,)), on_mesh("f32[8]")) == []


@pytest.mark.parametrize(
    ("src", "dst", "kind", "message"),
    [
        (on_mesh("f32[8]"), on_mesh("f32[4]"), ShapeError, "redistribute: shape and dtype must"),
        (on_mesh("f32[8]"), plain(bf16, (8,), MESH), ShapeError, "redistribute: shape and dtype"),
        (on_mesh("f32[8]"), plain(f32, (8,), Mesh(("q",), devices=2)), MeshError,
         "redistribute: the two layouts are on different meshes"),
        (on_mesh("f32[8]"), on_mesh("f32[8] max dp"), LayoutError,
         "redistribute: a value cannot be made partial under 'max'"),
    ],
)  # fmt: skip
def test_what_is_no_change_of_layout(
    src: TensorType, dst: TensorType, kind: type[TesseraError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        steps_between(src, dst)


def test_completed_and_gathered() -> None:
    t = on_mesh("f32[8@tp, 4] +dp")
    assert completed(t, ["dp"]).text == "f32[8@tp, 4]"
    assert gathered(t, ["tp"]).text == "f32[8, 4] +dp"
    for change in (completed, gathered):
        with pytest.raises(LayoutError, match="axis 'q' is not an axis of the mesh"):
            change(t, ["q"])


# ---- properties --------------------------------------------------------------------------------
@settings(max_examples=100)
@given(st.data())
def test_there_and_back_is_the_identity(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    a, b = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    build = Builder()
    x = build.input(a, "x")
    there = build.redistribute(x, b, "test")
    back = build.redistribute(there, a, "test")
    assert there.type is b and back.type is a
    graph = build.graph([there, back])
    verify(graph)
    value = numbered(shape)
    for got in evaluate_blocks(graph, [value]):
        assert np.array_equal(got, value)


def _filled(t: TensorType, seed: int) -> list[np.ndarray]:
    """Random blocks of `t`: partial sums spread over all devices, garbage in the padding."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(2 if t.partial else 1):
        part = rng.integers(1, 100, t.shape).astype(np.float32)
        cuts = cut(t.complete(), part, fill=1000.0)
        blocks.append(cuts)
    if not t.partial:
        return blocks[0]
    # Each device of a partial axis holds a different part.
    assert t.mesh is not None
    out = []
    for k, _ in enumerate(blocks[0]):
        place = t.mesh.coords(t.mesh.ids[k])
        weight = 1 + sum((i + 1) * place[a] for i, a in enumerate(t.partial_axes))
        out.append(blocks[0][k] + weight * blocks[1][k])
    return out


@settings(max_examples=100)
@given(st.data())
def test_the_local_code_of_every_step_keeps_the_value(data: st.DataObject) -> None:
    """Runs the engine's local code by NumPy, without the oracle's cut and join."""
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    a, b = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    build = Builder()
    x = build.input(a, "x")
    build.redistribute(x, b, "test")
    graph = build.graph([x])
    blocks = _filled(a, data.draw(st.integers(0, 99)))
    want = join(a, blocks)
    for node in graph.nodes[1:]:
        blocks = run_local(node, blocks, mesh)
        for block in blocks:
            assert block.shape == node.type.local_shape, node
        assert np.array_equal(join(node.type, blocks), want), node
    assert graph.nodes[-1].type is b or a is b


@settings(max_examples=60)
@given(st.data())
def test_a_plan_sends_no_more_than_gathering_everything(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    a = data.draw(layouts(mesh, shape, partial=False))
    b = data.draw(layouts(mesh, shape, partial=False))
    whole = sum(s.wire_bytes for s in steps_between(a, a.replicated()))
    assert sum(s.wire_bytes for s in steps_between(a, b)) <= whole


def test_swapping_two_axes_of_one_dim() -> None:
    mesh = Mesh(("y", "x"), shape={"y": 2, "x": 3})
    build = Builder()
    x = build.input(parse_type("f32[12@(y,x)]", mesh), "x")
    out = build.redistribute(x, parse_type("f32[12@(x,y)]", mesh))
    graph = build.graph([out])
    value = numbered((12,))
    blocks = run_blocks(graph, [cut(x.type, value)], mesh)[0]
    # y major: device (y, x) held block 3y + x; now it holds block 2x + y.
    assert [b.tolist() for b in cut(x.type, value)] == [
        [1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]  # fmt: skip
    assert [b.tolist() for b in blocks] == [
        [1, 2], [5, 6], [9, 10], [3, 4], [7, 8], [11, 12]]  # fmt: skip


def test_steps_are_values() -> None:
    assert steps_between(on_mesh("f32[8]"), on_mesh("f32[8@tp]")) == [
        Step("shard", ("tp",), -1, 0, on_mesh("f32[8@tp]"), 0)
    ]


def test_a_value_without_a_mesh_enters_one() -> None:
    build = Builder()
    x = build.input(plain(f32, (8,)), "x")
    there = build.redistribute(x, on_mesh("f32[8]"))
    cut_up = build.redistribute(x, on_mesh("f32[8@tp]"))
    graph = build.graph([there, cut_up])
    verify(graph)
    assert [n.op for n in graph.nodes] == ["input", "to_mesh", "to_mesh", "shard"]
    assert there.type is on_mesh("f32[8]") and graph.wire_bytes == 0
    for got in evaluate_blocks(graph, [numbered((8,))]):
        assert np.array_equal(got, numbered((8,)))


# ---- a broadcast moves before it grows ---------------------------------------------------------
@pytest.mark.parametrize(
    ("src", "shape", "to", "kinds"),
    [
        ("f32[1, 6]", (8, 5, 6), "f32[8@dp, 5@tp, 6]", []),
        ("f32[1, 6] +dp", (8, 5, 6), "f32[8@dp, 5, 6]", ["all_reduce"]),
        ("f32[5, 6@tp]", (8, 5, 6), "f32[8@dp, 5, 6@tp]", []),
        ("f32[5, 6@tp]", (8, 5, 6), "f32[8@tp, 5, 6]", ["all_gather"]),
        ("f32[5, 6]", (8, 5, 6), "f32[8@dp, 5, 6@tp]", ["shard"]),
        ("f32[1@dp, 6]", (8, 6), "f32[8@dp, 6]", ["all_gather"]),
        ("f32[]", (7, 3), "f32[7@dp, 3@tp]", []),
        ("f32[] max tp", (7, 3), "f32[7, 3@(dp,tp)]", ["all_reduce"]),
    ],
)
def test_a_broadcast_is_made_where_it_is_wanted(
    src: str, shape: tuple[int, ...], to: str, kinds: list[str]
) -> None:
    build = Builder()
    x = build.input(on_mesh(src), "x")
    big = build("broadcast_to", x, shape=shape)
    there = build.redistribute(big, on_mesh(to), "test")
    graph = build.graph([there])
    verify(graph)
    assert there.op == "broadcast_to" and there.type is on_mesh(to)
    moves = [n for n in simplify(graph).nodes if n.op in KINDS]
    assert [n.op for n in moves] == kinds
    assert all(n.type.size == x.type.size for n in moves), "only the small value moves"
    value = numbered(x.type.shape)
    assert np.array_equal(evaluate_blocks(graph, [value])[0], np.broadcast_to(value, shape))


def test_a_broadcast_into_open_sums_is_planned_as_any_value() -> None:
    build = Builder()
    big = build("broadcast_to", build.input(on_mesh("f32[1]"), "x"), shape=(8,))
    there = build.redistribute(big, on_mesh("f32[8] +dp"))
    assert there.op == "to_partial"


def test_the_layout_of_a_broadcast_yields_to_its_argument() -> None:
    build = Builder()
    x = build.input(on_mesh("f32[6@dp]"), "x")
    made = build("broadcast_to", x, shape=(8, 6), layout=on_mesh("f32[8@(dp,tp), 6]"))
    assert made.type.text == "f32[(2·4@tp), 6@dp]"
    graph = build.graph([made])
    verify(graph)
    want = np.broadcast_to(numbered((6,)), (8, 6))
    assert np.array_equal(evaluate_blocks(graph, [numbered((6,))])[0], want)


def test_a_maximum_of_halves_goes_as_32_bits() -> None:
    """The engine sends 32 bits so that no transport drops a NaN."""
    mesh = Mesh(("dp",), shape={"dp": 4})
    for text, count in (("f32[8] max dp", 48), ("bf16[8] max dp", 48), ("f16[8] min dp", 48),
                        ("bf16[8] +dp", 24), ("i8[8] max dp", 12)):  # fmt: skip
        t = parse_type(text, mesh)
        assert [s.wire_bytes for s in steps_between(t, t.complete())] == [count]
