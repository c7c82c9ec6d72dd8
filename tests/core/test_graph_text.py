"""The text of a graph: lossless, and parse errors with their place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.core.dtypes import bf16, f32
from tessera.core.errors import GraphError
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import evaluate
from tessera.ir.graph.text import EXAMPLE, parse, size_text, to_text
from tessera.ir.graph.verify import verify

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


def mlp() -> Graph:
    b = Builder("step")
    b.loc = "model.py:31"
    x = b.input(parse_type("f32[8@dp, 16]", MESH), "x")
    w = b.input(parse_type("f32[16, 32@tp]", MESH), "w")
    v = b.input(parse_type("f32[32@tp, 16]", MESH), "v")
    b.scope = "mlp/up"
    h = b("tanh", b("contract", x, w, index="m k, k n -> m n"))
    b.scope = "mlp/down"
    y = b("contract", h, v, index="m k, k n -> m n")
    return b.graph([b("add", y, x)])


def test_the_text_of_a_small_program() -> None:
    assert to_text(mlp()) == (
        """\
graph step  v1  mesh dp=2 tp=4
  %0 = input "x"                              : f32[8@dp, 16]
  %1 = input "w"                              : f32[16, 32@tp]
  %2 = input "v"                              : f32[32@tp, 16]
  %3 = contract %0 %1 index="m k, k n -> m n" : f32[8@dp, 32@tp]   # model.py:31  mlp/up
  %4 = tanh %3                                : f32[8@dp, 32@tp]   # model.py:31  mlp/up
  %5 = contract %4 %2 index="m k, k n -> m n" : f32[8@dp, 16] +tp  # model.py:31  mlp/down
  %6 = all_reduce %5 axes=("tp",)             : f32[8@dp, 16]      # model.py:31  mlp/down  """
        """inserted for add; receives 384 B a device
  %7 = add %6 %0                              : f32[8@dp, 16]      # model.py:31  mlp/down
  return %7"""
    )
    assert mlp().text == str(mlp()) == to_text(mlp())


def same(a: Graph, b: Graph) -> None:
    """Asserts that two graphs have equal data, with types on the mesh of the graph."""
    place = {n: i for i, n in enumerate(a.nodes)}, {n: i for i, n in enumerate(b.nodes)}
    assert a.name == b.name and a.mesh == b.mesh and len(a.nodes) == len(b.nodes)
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert (x.op, x.loc, x.scope, x.note) == (y.op, y.loc, y.scope, y.note)
        assert [place[0][n] for n in x.args] == [place[1][n] for n in y.args]
        assert [t.text for t in x.types] == [t.text for t in y.types]
        assert list(x.attrs) == list(y.attrs)
        for v, w in zip(x.attrs.values(), y.attrs.values(), strict=True):
            if isinstance(v, Graph):
                same(v, w)
            else:
                assert repr(v) == repr(w) and type(v) is type(w)
    for ns, ms in ((a.inputs, b.inputs), (a.outputs, b.outputs)):
        assert [place[0][n] for n in ns] == [place[1][n] for n in ms]


def test_a_parsed_program_is_the_program() -> None:
    graph = mlp()
    back = parse(to_text(graph))
    same(graph, back)
    verify(back)
    rng = np.random.default_rng(0)
    ins = [rng.normal(size=n.type.shape).astype(np.float32) for n in graph.inputs]
    assert np.array_equal(evaluate(graph, ins)[0], evaluate(back, ins)[0])
    same(parse(EXAMPLE), parse(to_text(parse(EXAMPLE))))


def loop() -> Graph:
    deep = Builder("deep")
    deep.loc = "loop.py:1"
    c, r = deep.input(plain(f32, (4,), MESH), "c"), deep.input(plain(f32, (4,), MESH), "r")
    low = deep.graph([deep("add", c, r)])
    inner = Builder("layer 1")
    inner.loc = "loop.py:2"
    c, rows = (
        inner.input(plain(f32, (4,), MESH), "c"),
        inner.input(plain(f32, (3, 4), MESH), "rows"),
    )
    run = inner("scan", c, rows, body=low, length=3, consts=0, carries=1, reverse=True,
                policy="recompute")  # fmt: skip
    end = inner("item", run, index=0)
    body = inner.graph([end, inner("neg", end)])
    b = Builder("loops")
    b.loc = "loop.py:3"
    c, rows = b.input(plain(f32, (4,), MESH)), b.input(plain(f32, (2, 3, 4), MESH))
    run = b("scan", c, rows, body=body, length=2, consts=0, carries=1, reverse=False, policy="save")
    return b.graph([b("item", run, index=0), b("item", run, index=1)])


def test_bodies_stand_below_their_node() -> None:
    graph = loop()
    text = to_text(graph)
    assert [row.split(" :")[0].rstrip() for row in text.split("\n")] == [
        "graph loops  v1  mesh dp=2 tp=4",
        '  %0 = input "x0"',
        '  %1 = input "x1"',
        '  %2 = scan %0 %1 length=2 consts=0 carries=1 reverse=False policy="save"',
        '    body = graph "layer 1"',
        '      %0 = input "c"',
        '      %1 = input "rows"',
        '      %2 = scan %0 %1 length=3 consts=0 carries=1 reverse=True policy="recompute"',
        "        body = graph deep",
        '          %0 = input "c"',
        '          %1 = input "r"',
        "          %2 = add %0 %1",
        "          return %2",
        "      %3 = item %2 index=0",
        "      %4 = neg %3",
        "      return %3, %4",
        "  %3 = item %2 index=0",
        "  %4 = item %2 index=1",
        "  return %3, %4",
    ]
    back = parse(text)
    assert to_text(back) == text
    verify(back)


# ---- anything that is data survives ------------------------------------------------------------
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([f32, bf16]),
    st.sampled_from([plain(f32, (), MESH), parse_type("bf16[8@dp, (2·4@tp)]", MESH),
                     parse_type("f32[7@(tp,dp)]", MESH), parse_type("f32[2] +dp max tp", MESH)]),
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
notes = st.one_of(
    st.sampled_from(
        ["", "for add", "gradient", "x; receives 3 B a device", "for  two", "inserted"]
    ),
    st.text(max_size=10),
)
scopes = st.one_of(
    st.sampled_from(["", "mlp/up", "blocks.3/attn", "a:3", "inserted", "receives", "loc=x"]),
    st.text(max_size=10),
)
locs = st.one_of(st.sampled_from(["", "model.py:31", "my file.py:3", "<x>:1"]), st.text(max_size=9))


@given(
    st.dictionaries(st.from_regex(r"[a-z]\w{0,8}", fullmatch=True), values, max_size=4),
    st.tuples(locs, scopes, notes),
    st.text(max_size=8),
    st.text(max_size=8),
    st.booleans(),
)
def test_every_attribute_and_comment_survives(
    attrs: dict[str, Any], comment: tuple[str, str, str], name: str, title: str, collective: bool
) -> None:
    x = Node("input", (), (parse_type("f32[8@dp, 4] +tp", MESH),), {"name": name}, *comment)
    if collective:
        y = Node("all_reduce", (x,), (parse_type("f32[8@dp, 4]", MESH),),
                 {**attrs, "axes": ("tp",)}, *comment)  # fmt: skip
    else:
        y = Node("made", (x, x), (x.type, plain(bf16, (), MESH)), attrs, *comment)
    graph = Graph(title, (x, y), (x,), (y,))
    text = to_text(graph)
    back = parse(text)
    same(graph, back)
    assert to_text(back) == text


def test_what_is_not_the_rule_is_said() -> None:
    graph = mlp()
    x, w, v = graph.inputs
    turned = replace(graph, inputs=(v, x, w))
    assert "\n  inputs %2, %0, %1\n" in to_text(turned)
    same(turned, parse(to_text(turned)))
    ids = Mesh(("dp",), devices=[5, 3])
    small = Builder("g")
    far = small.graph([small.input(parse_type("f32[8@dp]", ids))])
    assert to_text(far).startswith("graph g  v1  mesh dp=2 devices=(5, 3)\n")
    assert parse(to_text(far)).mesh == ids
    nowhere = Builder("g")
    assert to_text(nowhere.graph([])) == "graph g  v1\n  return"
    assert parse("graph g  v1\n  return").outputs == ()
    axis = Mesh(("devices",), shape={"devices": 2})
    named = Builder("g")
    odd = named.graph([named.input(parse_type("f32[8@devices]", axis))])
    assert parse(to_text(odd)).mesh == axis


def test_types_are_put_on_the_mesh_of_the_graph() -> None:
    b = Builder("g")
    x = b.input(parse_type("f32[8@dp]", MESH))
    graph = b.graph([b("mul", x, b("full", dtype=f32, shape=(), value=math.inf))])
    back = parse(to_text(graph))
    assert {t.mesh for n in back.nodes for t in n.types} == {MESH}
    assert back.nodes[1].attrs["value"] == math.inf
    verify(back)


def test_an_attribute_that_has_no_text() -> None:
    x = Node("input", (), (plain(f32, ()),), {"name": "x"})
    bad = Node("neg", (x,), (plain(f32, ()),), {"f": object})
    with pytest.raises(GraphError, match="graph text: an attribute cannot be a type"):
        to_text(Graph("g", (x, bad), (x,), (bad,)))
    array = Node("neg", (x,), (plain(f32, ()),), {"n": np.int32(3), "v": np.float32(0.5)})
    assert "n=3 v=0.5" in to_text(Graph("g", (x, array), (x,), (array,)))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (384, "384 B"), (1024, "1 KiB"), (196608, "192 KiB"), (1536 * 1024, "1.5 MiB"),
     (5 * 2**40, "5 TiB"), (2**52, "4096 TiB")],
)  # fmt: skip
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


# ---- errors name the line ----------------------------------------------------------------------
HEAD = "graph g  v1  mesh dp=2\n"
X = '  %0 = input "x" : f32[4]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the text ends before its graph does"),
        ("graph", "line 1: expected a word, found the end of the line"),
        ("graph g v9\n  return", "line 1: this version reads v1, the text is v9"),
        ("graph g v1 mesh dp=0\n  return", "line 1: Mesh: axis 'dp' has size 0"),
        ("graph g v1 mesh dp=two\n  return", "line 1: expected a number, found 'two'"),
        ("graph g v1 what\n  return", "line 1: did not expect 'what'"),
        (HEAD + X, "line 2: the text ends before its graph does"),
        (HEAD + X + "  return %1", "line 3: %1 is not defined above"),
        (HEAD + X + "  return %0\nmore", "line 4: text after the graph's return"),
        (HEAD + X + "  return %0 %0", "line 3: did not expect '%0'"),
        (HEAD + '  %1 = input "x" : f32[4]', "line 2: expected %0, found %1"),
        (HEAD + "  %0 = input x : f32[4]", "line 2: expected a string, found 'x'"),
        (HEAD + '  %0 = input "x"', "line 2: expected ':', found the end of the line"),
        (HEAD + '  %0 = input "x" : f32[4@tp]', "line 2: layout: axis 'tp' is not an axis of"),
        (HEAD + '  %0 = input "x" : q32[4]', "line 2: dtype 'q32' is not known"),
        (HEAD + '  %0 = input "x" : f32[4] 5', "line 2: did not expect '5'"),
        (HEAD + '  %0 = input "\\q" : f32[4]', 'line 2: "\\q" is no JSON string'),
        (HEAD + X + "  %1 = neg %0 k=zz : f32[4]", "line 3: 'zz' is no value"),
        (HEAD + X + "  %1 = neg %0 k=1 k=2 : f32[4]", "line 3: attribute 'k' is given twice"),
        (HEAD + X + "  %1 = neg %0 k=(1 : f32[4]", "line 3: expected ')', found ':'"),
        (HEAD + X + "  %1 = neg %0 ! : f32[4]", "line 3: cannot read '! : f32[4]'"),
        (HEAD + X + f"  %1 = neg %{'9' * 5000} : f32[4]", "line 3: cannot read '%9999"),
        (HEAD + X + f"  %1 = sum %0 dims=({'9' * 5000},) : f32[4]", "line 3: cannot read '9999"),
        (HEAD + X + "  %1 = neg %0 : f32[4]  # what is this",
         "line 3: a comment holds file:line, scope and reason, not 'what is this'"),
        (HEAD + X + "    %1 = neg %0 : f32[4]", "line 3: expected a word, found '%1'"),
    ],
)  # fmt: skip
def test_a_broken_text_says_where(text: str, message: str) -> None:
    with pytest.raises(GraphError) as error:
        parse(text)
    rows = str(error.value).split("\n")
    assert rows[0].startswith(f"graph text, {message}")
    assert rows[1].startswith("  line : ") and rows[-1].startswith("  fix  : write a node as")
