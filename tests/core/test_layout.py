"""The algebra of layouts: canonical forms, texts, and movements between layouts."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.dtypes import bf16, f32
from tessera.core.errors import LayoutError, TesseraError
from tessera.core.layout import (
    Factor,
    TensorType,
    dim_text,
    parse_dim,
    parse_type,
    plain,
    same_type,
    split_dims,
)
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Node
from tessera.ir.graph.oracle import cut, evaluate, evaluate_blocks, join
from tessera.ir.graph.text import parse, to_text
from tessera.ir.graph.verify import verify
from tessera.passes.simplify import simplify
from tests.core.strategies import layouts, meshes, numbered, shapes
from tests.messages import Golden

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
GRID = Mesh(("y", "x"), shape={"y": 2, "x": 3})


# ---- canonical forms ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("f32[8@dp]", "f32[8@dp]"),
        ("f32[(2@dp·4)]", "f32[8@dp]"),
        ("f32[(2@dp·4@tp)]", "f32[8@(dp,tp)]"),
        ("f32[(2·4)]", "f32[8]"),
        ("f32[(2·4@tp)]", "f32[(2·4@tp)]"),
        ("f32[(1·8@dp)]", "f32[8@dp]"),
        ("f32[(3·4@tp·16)]", "f32[(3·64@tp)]"),
        ("f32[(8@dp·512@tp)]", "f32[(8@dp·512@tp)]"),
        ("f32[(5@dp·2)]", "f32[(5@dp·2)]"),
        ("f32[(2·5@dp·3)]", "f32[(2·5@dp·3)]"),
        ("f32[7@(dp,tp)]", "f32[7@(dp,tp)]"),
        ("f32[] +tp +dp", "f32[] +dp +tp"),
        ("f32[4] max tp +dp", "f32[4] +dp max tp"),
    ],
)
def test_two_ways_to_write_one_layout_are_one_type(text: str, canonical: str) -> None:
    assert parse_type(text, MESH).text == canonical
    assert parse_type(text, MESH) is parse_type(canonical, MESH)


def test_an_axis_of_size_one_splits_nothing() -> None:
    mesh = Mesh(("dp", "tp"), shape={"dp": 1, "tp": 2})
    assert parse_type("f32[8@dp, 4@(dp,tp)] +dp", mesh) is parse_type("f32[8, 4@tp]", mesh)


@pytest.mark.parametrize(
    ("text", "local", "padded"),
    [
        ("f32[8@dp, 4096@tp]", (4, 1024), ()),
        ("f32[(8@dp·512@tp), 3]", (512, 3), ()),
        ("f32[7@tp]", (2,), (0,)),
        ("f32[3@(dp,tp), 5]", (1, 5), (0,)),
        ("f32[(3·5@tp), 2@dp]", (6, 1), (0,)),
        ("f32[9]", (9,), ()),
    ],
)
def test_a_block_has_ceil_sizes(text: str, local: tuple[int, ...], padded: tuple[int, ...]) -> None:
    t = parse_type(text, MESH)
    assert t.local_shape == local
    assert t.padded_dims == padded
    assert t.local_bytes == 4 * math.prod(local)


def test_types_are_values() -> None:
    t = parse_type("bf16[8@dp, 4] +tp", MESH)
    assert pickle.loads(pickle.dumps(t)) is t
    assert t.with_dtype(f32).with_dtype(bf16) is t
    assert t.complete() is parse_type("bf16[8@dp, 4]", MESH)
    assert t.replicated() is plain(bf16, (8, 4), MESH)
    assert t.nbytes == 64 and t.size == 32
    assert t.partial_axes == ("tp",) and t.split_axes == ("dp",)
    assert repr(t) == t.text


def test_a_type_without_a_mesh_stands_for_the_replicated_one() -> None:
    here, nowhere = plain(f32, (4,), MESH), plain(f32, (4,))
    assert same_type(here, nowhere) and same_type(nowhere, here)
    assert nowhere.on(MESH) is here
    assert not same_type(nowhere, parse_type("f32[4@tp]", MESH))
    assert not same_type(here, plain(f32, (4,), GRID))


# ---- reshape -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "shape", "result"),
    [
        ("f32[8@dp, 512@tp, 1024]", (4096, 1024), "f32[(8@dp·512@tp), 1024]"),
        ("f32[(8@dp·512@tp), 1024]", (8, 512, 1024), "f32[8@dp, 512@tp, 1024]"),
        ("f32[4096, (3·16@tp·64)]", (4096, 3, 16, 64), "f32[4096, 3, 16@tp, 64]"),
        ("f32[8@dp, 4]", (2, 4, 4), "f32[2@dp, 4, 4]"),
        ("f32[8@(dp,tp)]", (2, 4), "f32[2@dp, 4@tp]"),
        ("f32[8@(tp,dp)]", (2, 4), "f32[2, (2·2@dp)]"),  # tp's 4 shards do not fit a dim of 2
        ("f32[6@dp]", (3, 2), "f32[3, 2]"),
        ("f32[5@dp, 4]", (20,), "f32[(5@dp·4)]"),
        ("f32[5@dp, 4]", (10, 2), "f32[(5@dp·2), 2]"),
        ("f32[4, 6@tp]", (2, 2, 6), "f32[2, 2, 6@tp]"),
        ("f32[4, 1@tp]", (4,), "f32[4]"),
        ("f32[12] +tp", (3, 4), "f32[3, 4] +tp"),
        ("f32[1]", (), "f32[]"),
    ],
)
def test_reshape_regroups_digits(text: str, shape: tuple[int, ...], result: str) -> None:
    before, after = parse_type(text, MESH).before_reshape(shape)
    assert after.text == result
    assert parse_type(text, MESH).reshape(shape) is after
    value = numbered(before.shape)
    assert np.array_equal(
        join(after, [b.reshape(after.local_shape) for b in cut(before, value)]),
        value.reshape(shape),
    )


# ---- text --------------------------------------------------------------------------------------
@given(st.data())
def test_the_text_of_a_type_parses_back(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    dtype = data.draw(st.sampled_from([f32, bf16]))
    t = data.draw(layouts(mesh, data.draw(shapes()), dtype))
    assert parse_type(t.text, mesh) is t
    assert parse_type(t.text.replace("·", "*"), mesh) is t
    assert tuple(parse_dim(dim_text(d)) for d in t.dims) == t.dims


def test_split_dims_respects_brackets() -> None:
    assert split_dims("8@(y,x), (2·4@x), 1") == ["8@(y,x)", " (2·4@x)", " 1"]
    assert split_dims("") == []


@pytest.mark.parametrize(
    "text", ["f32", "f32[8@dp, x]", "f32[8@pp]", "f32[8@dp] +dp", "f32[8@dp, 4@dp]", "q7[8]"]
)
def test_what_is_no_type_says_why(text: str, golden: Golden) -> None:
    with pytest.raises(TesseraError) as error:
        parse_type(text, MESH)
    golden(error.value)


def test_an_axis_without_a_mesh_is_an_error() -> None:
    with pytest.raises(LayoutError, match="axis 'dp' is named but there is no mesh"):
        TensorType(f32, [(Factor(8, ("dp",)),)])


# ---- closedness --------------------------------------------------------------------------------
def _grouped(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Draws another shape of as many elements: two dims merged, or one split."""
    if len(shape) > 1 and draw(st.booleans()):
        i = draw(st.integers(0, len(shape) - 2))
        return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    if not shape:
        return (1,)
    i = draw(st.integers(0, len(shape) - 1))
    d = draw(st.sampled_from([d for d in range(1, shape[i] + 1) if shape[i] % d == 0]))
    return (*shape[:i], d, shape[i] // d, *shape[i + 1 :])


@st.composite
def moved(draw: st.DrawFn, b: Builder, x: Node, value: np.ndarray) -> tuple[Node, np.ndarray]:
    """Applies a drawn movement to `x`, in the graph and in NumPy."""
    t = x.type
    match draw(st.sampled_from(["reshape", "split", "transpose", "join", "redistribute"])):
        case "reshape":
            shape = _grouped(draw, t.shape)
            return b("reshape", x, shape=shape), value.reshape(shape)
        case "split" if t.rank:
            dim = draw(st.integers(0, t.rank - 1))
            n = t.shape[dim]
            parts = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
            k = draw(st.integers(0, parts - 1))
            start = tuple(k * n // parts if i == dim else 0 for i in range(t.rank))
            stop = tuple((k + 1) * n // parts if i == dim else m for i, m in enumerate(t.shape))
            part = b("slice", x, starts=start, stops=stop, steps=(1,) * t.rank)
            return part, value[tuple(slice(a, z) for a, z in zip(start, stop, strict=True))]
        case "transpose":
            perm = tuple(draw(st.permutations(range(t.rank))))
            return b("transpose", x, perm=perm), value.transpose(perm)
        case "join" if t.rank and t.size <= 256:
            dim = draw(st.integers(0, t.rank - 1))
            return b("concat", x, x, dim=dim), np.concatenate([value, value], dim)
        case _:
            assert t.mesh is not None
            to = draw(layouts(t.mesh, t.shape))
            return b.redistribute(x, to), value


@settings(max_examples=100)
@given(st.data())
def test_any_chain_of_movements_equals_numpy(data: st.DataObject) -> None:
    mesh = data.draw(meshes(12))
    b = Builder("chain")
    t = data.draw(layouts(mesh, data.draw(shapes())))
    x = b.input(t, "x")
    given_ = value = numbered(t.shape)
    values: list[tuple[Node, np.ndarray]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        x, value = data.draw(moved(b, x, value))
        values.append((x, value))
    graph = b.graph([n for n, _ in values])
    verify(graph)
    for got, blocks, (n, want) in zip(
        evaluate(graph, [given_]), evaluate_blocks(graph, [given_]), values, strict=True
    ):
        assert n.type.shape == want.shape
        assert np.array_equal(got, want)
        assert np.array_equal(blocks, want)
    text = to_text(graph)
    assert to_text(parse(text)) == text
    small = simplify(graph)
    verify(small, "simplify")
    for blocks, (_, want) in zip(evaluate_blocks(small, [given_]), values, strict=True):
        assert np.array_equal(blocks, want)
