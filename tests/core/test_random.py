"""Random numbers: Threefry's known answers, and the same values in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.core.dtypes import uint32
from tessera.core.errors import ShapeError
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph import xp_numpy
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.text import parse, to_text
from tessera.ir.graph.verify import verify
from tessera.ops.random import GOLDEN, threefry
from tests.core.numpy_engine import Oracle
from tests.core.strategies import layouts, meshes, shapes

ONES = 0xFFFFFFFF
KEY = np.array([7, 11], np.uint32)


def word(value: int) -> np.ndarray:
    return np.full((), value, np.uint32)


# The known answers that the authors publish with Random123 (kat_vectors, threefry 2x32 20).
@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int], answer: tuple[int, int]
) -> None:
    got = threefry(xp_numpy, (word(key[0]), word(key[1])), (word(counter[0]), word(counter[1])))
    assert tuple(int(x) for x in got) == answer


def bits(shape: tuple[int, ...], stream: int = 0, mesh: Mesh | None = None) -> Graph:
    b = Builder("bits")
    key = b.input(plain(uint32, (2,), mesh), "key")
    return b.graph([b("random_bits", key, shape=shape, stream=stream)])


def test_the_counter_is_the_index_in_the_whole_tensor() -> None:
    got = evaluate(bits((3, 5), stream=2), [KEY])[0]
    stream = (2 * GOLDEN) & ONES
    for i in range(3):
        for j in range(5):
            want = threefry(xp_numpy, (word(7), word(11 ^ stream)), (word(5 * i + j), word(0)))
            assert got[i, j] == want[0]
    assert got.dtype == np.uint32


def test_streams_keys_and_shapes_differ_as_they_should() -> None:
    one = evaluate(bits((64,)), [KEY])[0]
    assert np.array_equal(one, evaluate(bits((8, 8)), [KEY])[0].ravel())
    other = evaluate(bits((64,), stream=1), [KEY])[0]
    third = evaluate(bits((64,)), [KEY + np.uint32(1)])[0]
    for a, b in ((one, other), (one, third), (other, third)):
        assert not np.any(a == b)
    assert evaluate(bits(()), [KEY])[0] == one[0]


def test_bits_are_even() -> None:
    got = evaluate(bits((1 << 14,)), [KEY])[0]
    assert abs(np.mean(got / 2.0**32) - 0.5) < 0.01
    ones = np.unpackbits(got.view(np.uint8)).reshape(-1, 8).mean(0)
    assert np.all(abs(ones - 0.5) < 0.01)
    assert len(np.unique(got)) > (1 << 14) - 3


@given(st.data())
def test_values_do_not_depend_on_the_layout(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    want = evaluate(bits(shape, 3), [KEY])[0]
    b = Builder("bits")
    made = b("random_bits", b.input(plain(uint32, (2,), mesh), "key"), shape=shape, stream=3)
    there = b.redistribute(made, data.draw(layouts(mesh, shape, uint32, partial=False)))
    graph = b.graph([made, there])
    verify(graph)
    assert {n.op for n in graph.nodes} == {"input", "random_bits"}, "made in place, never moved"
    for got in evaluate_blocks(graph, [KEY]):
        assert np.array_equal(got, want)
    assert to_text(parse(to_text(graph))) == to_text(graph)


def test_the_key_is_two_words() -> None:
    b = Builder()
    for bad in (plain(uint32, (3,)), plain(uint32, ())):
        with pytest.raises(ShapeError, match=r"random_bits: the key is u32\[2\]"):
            b("random_bits", b.input(bad), shape=(4,), stream=0)


def test_a_block_of_a_draw_has_the_bits_that_its_elements_have_there() -> None:
    whole = evaluate(bits((2, 12, 3), stream=2), [KEY])[0]
    # 12 rows on two devices: blocks of 3 rows each, divided into blocks of 1 row each.
    rows = np.arange(12).reshape(2, 2, 3)[:, 1][:, [2]].ravel()
    mesh = Mesh.parse("dp=2")
    for layout in (plain(uint32, (2, 2, 3), mesh), parse_type("u32[2, 2@dp, 3]", mesh)):
        b = Builder("bits")
        key, inner, outer = (b.input(plain(uint32, s, mesh)) for s in ((2,), (), ()))
        made = b(
            "random_bits", key, inner, outer, shape=(2, 2, 3), stream=2, layout=layout,
            blocks=(1, 3, 1, 1, 2, 3),
        )  # fmt: skip
        graph = b.graph([made])
        verify(graph)
        for got in evaluate_blocks(graph, [KEY, np.uint32(2), np.uint32(1)]):
            np.testing.assert_array_equal(got, whole[:, rows])
        assert to_text(parse(to_text(graph))) == to_text(graph)


def test_each_block_has_a_number() -> None:
    b = Builder()
    key, count = b.input(plain(uint32, (2,))), b.input(plain(uint32, (1,)))
    for numbers in ((), (count,)):
        with pytest.raises(ShapeError, match=r"random_bits: the number of a block is u32\[\]"):
            b("random_bits", key, *numbers, shape=(4,), stream=0, blocks=(0, 2, 4))


def test_cost_is_above_zero() -> None:
    assert bits((4, 4)).flops == 80 * 16


def test_a_normal_number_is_that_of_box_and_muller(oracle: Oracle) -> None:
    ts.seed(5)
    u = [ts.random.uniform((100_000,)).numpy().astype(np.float64) for _ in range(2)]
    ts.seed(5)
    got = ts.random.normal((100_000,), mean=1.0, std=2.0).numpy()
    want = 1 + 2 * np.sqrt(-2 * np.log(1 - u[0])) * np.cos(2 * np.pi * u[1])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
