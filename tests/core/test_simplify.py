"""Simplification passes: idle nodes are removed, all others stay."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import GraphError, UsageError
from tessera.core.dtypes import bf16, f32, int32, uint32
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.text import parse, to_text
from tessera.ir.graph.verify import verify
from tessera.ir.schedule.pipelines.stages import on_mesh
from tessera.ops.op import OPS
from tessera.passes.differentiate import differentiate
from tessera.passes.simplify import (
    common_subexpressions,
    dead_code,
    fold,
    fuse_reductions,
    simplify,
)
from tests.core.strategies import layouts, meshes, numbered

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
PASSES = (dead_code, common_subexpressions, fold, fuse_reductions, simplify)


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes if n.op != "input"]


def equal(graph: Graph, small: Graph, *values: Any) -> None:
    """Asserts that `small` is valid and computes the same from the same inputs, whole and in
    blocks."""
    verify(small, "simplify")
    assert small.inputs == graph.inputs
    assert [o.type for o in small.outputs] == [o.type for o in graph.outputs]
    for run in (evaluate, evaluate_blocks):
        for a, b in zip(run(graph, values), run(small, values), strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6
            )


def test_the_part_of_a_graph_begins_at_any_of_its_nodes() -> None:
    b = Builder()
    x, w = b.input(plain(f32, (4,)), "x"), b.input(plain(f32, (4,)), "w")
    y = b("exp", b("mul", x, w))
    graph = b.graph([b("tanh", y)])
    part = graph.part([y], graph.outputs)
    verify(part)
    assert ops(part) == ["tanh"] and part.inputs != (y,)
    np.testing.assert_allclose(evaluate(part, [np.ones(4)])[0], np.tanh(1.0), rtol=1e-6)
    with pytest.raises(UsageError, match=r"need a node that is none of the inputs\n  node : w"):
        graph.part([x], graph.outputs)
    with pytest.raises(UsageError, match="need a node that is none of the inputs"):
        graph.part([x, w], [b("neg", x)])
    with pytest.raises(UsageError, match="part: inputs cannot be <mul"):
        graph.part(y.args[0], graph.outputs)  # type: ignore[arg-type]


def test_an_op_that_does_not_exist_is_not_passed_over() -> None:
    graph = parse('graph g  v1\n  %0 = input "x" : f32[4]\n  %1 = expo %0 : f32[4]\n  return %1')
    for run in (simplify, lambda g: g.flops, verify):
        with pytest.raises(GraphError, match="op 'expo' does not exist"):
            run(graph)


# ---- dead code ---------------------------------------------------------------------------------
def test_what_no_output_needs_goes_and_inputs_stay() -> None:
    b = Builder()
    x, unused = b.input(plain(f32, (4,))), b.input(plain(f32, (2,)))
    y = b("neg", x)
    b("exp", b("tanh", x))
    graph = b.graph([y])
    small = dead_code(graph)
    assert small.nodes == (x, unused, y)
    assert dead_code(small) is small, "nothing to do gives the graph back"


def test_an_op_with_effects_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "tanh", replace(OPS["tanh"], pure=False))
    b = Builder()
    x = b.input(plain(f32, (4,)))
    a, c = b("tanh", x), b("tanh", x)
    graph = b.graph([b("neg", x)])
    assert [n for n in dead_code(graph).nodes if n.op == "tanh"] == [a, c]
    assert ops(common_subexpressions(graph)) == ["tanh", "tanh", "neg"]


# ---- common subexpressions ---------------------------------------------------------------------
def test_equal_nodes_become_the_first() -> None:
    b = Builder()
    b.loc, b.scope = "m.py:1", "one"
    x = b.input(plain(f32, (4, 4)))
    first = b("sum", b("mul", x, x), dims=(0,))
    b.loc, b.scope = "m.py:2", "two"
    second = b("sum", b("mul", x, x), dims=(0,))
    other = b("sum", b("mul", x, x), dims=(1,))
    graph = b.graph([first, second, other, b("add", first, second)])
    small = common_subexpressions(graph)
    assert ops(small) == ["mul", "sum", "sum", "add"]
    assert small.outputs[0] is small.outputs[1] is first
    assert small.outputs[3].args == (first, first)
    assert small.nodes[1].loc == "m.py:1" and small.nodes[1].scope == "one"
    equal(graph, small, numbered((4, 4)))


def test_what_only_looks_equal_stays() -> None:
    b = Builder()
    x = b.input(plain(f32, (4, 4)))
    zero = [b("full", dtype=f32, shape=(), value=v) for v in (0.0, -0.0)]
    types = [b("cast", x, dtype=d) for d in (bf16, f32)]
    key = b.input(plain(uint32, (2,)))
    draws = [b("random_bits", key, shape=(4,), stream=s) for s in (1, 2, 1)]
    graph = b.graph([*(b("div", x, z) for z in zero), *types, *draws])
    small = common_subexpressions(graph)
    assert len(ops(graph)) - len(ops(small)) == 1, "only the third draw repeats one"


def test_an_attribute_that_cannot_be_hashed_is_left_alone() -> None:
    b = Builder()
    x = b.input(plain(f32, (4,)))
    twins = [Node("neg", (x,), x.types, {"q": [1]}) for _ in range(2)]
    graph = Graph("g", (x, *twins), (x,), tuple(twins))
    assert ops(common_subexpressions(graph)) == ["neg", "neg"]


def test_one_body_stays_one() -> None:
    inner = Builder("body")
    c = inner.input(plain(f32, (4,)), "c")
    inner("exp", c)
    body = inner.graph([inner("add", inner("mul", c, c), inner("mul", c, c))])
    b = Builder()
    x = b.input(plain(f32, (4,)))
    rest = {"length": 2, "consts": 0, "carries": 1, "reverse": False, "policy": "save"}
    runs = [b("scan", x, body=body, **rest) for _ in range(2)]
    graph = b.graph([b("item", r, index=0) for r in runs])
    small = simplify(graph)
    assert ops(small) == ["scan", "item"], "two loops over one body are one loop"
    assert ops(small.nodes[1].attrs["body"]) == ["mul", "add"]
    equal(graph, small, np.ones(4, np.float32))


def test_a_rule_reaches_bodies_and_inputs_and_shared_bodies_stay_shared() -> None:
    old, new = (Mesh(("dp",), shape={"dp": 2}, devices=d) for d in ([0, 1], [2, 3]))
    inner = Builder("body")
    c = inner.input(parse_type("f32[4]", old), "c")
    body = inner.graph([inner("neg", c)])
    b = Builder()
    x = b.input(parse_type("f32[4]", old))
    rest = {"length": 2, "consts": 0, "carries": 1, "reverse": False, "policy": "save"}
    runs = [b("scan", x, body=body, **rest) for _ in range(2)]
    graph = b.graph([b("item", r, index=0) for r in runs])
    moved = on_mesh(graph, new)
    verify(moved)
    assert moved.mesh == new and moved.inputs[0].type.mesh == new
    bodies = {n.attrs["body"] for n in moved.nodes if n.op == "scan"}
    assert len(bodies) == 1 and {n.type.mesh for n in bodies.pop().nodes} == {new}
    assert graph.rewrite(lambda was, now, emit: None) is graph


# ---- algebra -----------------------------------------------------------------------------------
def folded(make: Any, *types: str) -> list[str]:
    """The ops that remain of `make(b, *inputs)` after simplification; checks the value too."""
    b = Builder()
    args = [b.input(parse_type(t, MESH)) for t in types]
    graph = b.graph([make(b, *args)])
    verify(graph)
    small = simplify(graph)
    values = [numbered(a.type.shape).astype(a.type.dtype.numpy) for a in args]
    equal(graph, small, *values)
    return ops(small)


def full(b: Builder, value: float, *shape: int, dtype: Any = f32) -> Node:
    return b("full", dtype=dtype, shape=shape, value=value)


X = "f32[8@dp, 4]"


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda b, x: b("reshape", x, shape=(8, 4)), []),
        (lambda b, x: b("reshape", b("reshape", x, shape=(32,)), shape=(8, 4)), []),
        (lambda b, x: b("reshape", b("reshape", x, shape=(32,)), shape=(4, 8)), ["reshape"]),
        (lambda b, x: b("broadcast_to", x, shape=(8, 4)), []),
        (lambda b, x: b("cast", x, dtype=f32), []),
        (lambda b, x: b("cast", b("cast", x, dtype=bf16), dtype=f32), ["cast", "cast"]),
        (lambda b, x: b("cast", b("cast", b("cast", x, dtype=bf16), dtype=f32), dtype=bf16),
         ["cast"]),
        (lambda b, x: b("cast", b("cast", x, dtype=int32), dtype=f32), ["cast", "cast"]),
        (lambda b, x: b("transpose", x, perm=(0, 1)), []),
        (lambda b, x: b("transpose", b("transpose", x, perm=(1, 0)), perm=(1, 0)), []),
        (lambda b, x: b("transpose", b("transpose", b("reshape", x, shape=(8, 2, 2)),
                                       perm=(1, 2, 0)), perm=(1, 0, 2)), ["reshape", "transpose"]),
        (lambda b, x: b("neg", b("neg", x)), []),
        (lambda b, x: b("neg", b("neg", b("neg", x))), ["neg"]),
        (lambda b, x: b("mul", x, full(b, 1.0)), []),
        (lambda b, x: b("mul", full(b, 1.0), x), []),
        (lambda b, x: b("mul", x, full(b, 2.0)), ["full", "mul"]),
        (lambda b, x: b("mul", x, full(b, 1.0, 3, 8, 4)), ["full", "mul"]),
        (lambda b, x: b("add", x, full(b, 0.0, 8, 4)), []),
        (lambda b, x: b("add", full(b, 0.0), x), []),
        (lambda b, x: b("sub", x, full(b, 0.0)), []),
        (lambda b, x: b("sub", full(b, 0.0), x), ["full", "sub"]),
        (lambda b, x: b("div", x, full(b, 1.0)), []),
        (lambda b, x: b("div", full(b, 1.0), x), ["full", "div"]),
        (lambda b, x: b("sum", x, dims=()), []),
        (lambda b, x: b("slice", x, starts=(0, 0), stops=(8, 4), steps=(1, 1)), []),
        (lambda b, x: b("slice", x, starts=(1, 0), stops=(8, 4), steps=(1, 1)),
         ["all_gather", "slice"]),
        (lambda b, x: b("pad", x, starts=(0, 0), steps=(1, 1), shape=(8, 4)), []),
        (lambda b, x: b("concat", x, dim=0), []),
        (lambda b, x: b("mul", x, b("broadcast_to", b("reshape", full(b, 1.0), shape=(1, 1)),
                                    shape=(8, 4))), []),
        (lambda b, x: b("mul", x, b("cast", full(b, 1.0, dtype=bf16), dtype=f32)), []),
        (lambda b, x: b("mul", x, b("cast", full(b, 1, dtype=int32), dtype=f32)),
         ["full", "cast", "mul"]),
        (lambda b, x: b("add", x, b("transpose", full(b, 0.0, 4, 8), perm=(1, 0))), []),
    ],
)  # fmt: skip
def test_what_changes_nothing_goes(make: Any, left: list[str]) -> None:
    assert folded(make, X) == left


def test_a_narrow_constant_is_rounded_where_it_was() -> None:
    b = Builder()
    third = b("cast", full(b, 1 / 3, dtype=bf16), dtype=f32)
    graph = b.graph([third])
    small = simplify(graph)
    assert ops(small) == ["full"]
    assert evaluate(small, [])[0] == evaluate(graph, [])[0] != np.float32(1 / 3)


def test_an_open_sum_of_zeros_adds_nothing() -> None:
    b = Builder()
    x = b.input(parse_type("f32[8] +dp", MESH))
    zeros = b("full", dtype=f32, shape=(8,), value=0.0, layout=parse_type("f32[8] +dp", MESH))
    assert ops(simplify(b.graph([b("add", x, zeros)]))) == []


# ---- reductions --------------------------------------------------------------------------------
def reduced(*outs: str, src: str = "f32[8, 4] +tp", also: bool = False) -> Graph:
    b = Builder()
    whole = b.redistribute(b.input(parse_type(src, MESH)), parse_type("f32[8, 4]", MESH), "first")
    ends = [b.redistribute(whole, parse_type(o, MESH), "then") for o in outs]
    return b.graph([*ends, *([whole] if also else [])])


def test_a_reduction_that_is_only_cut_scatters() -> None:
    graph = reduced("f32[8@tp, 4]")
    assert ops(graph) == ["all_reduce", "shard"]
    small = simplify(graph)
    assert ops(small) == ["reduce_scatter"]
    assert small.wire_bytes < graph.wire_bytes
    assert small.nodes[1].note == "then" and small.nodes[1].loc == graph.nodes[2].loc
    equal(graph, small, numbered((8, 4)))


def test_a_reduction_over_two_axes_scatters_what_it_can() -> None:
    graph = reduced("f32[8@tp, 4]", src="f32[8, 4] +dp +tp")
    small = simplify(graph)
    assert ops(small) == ["reduce_scatter", "all_reduce"]
    assert small.wire_bytes < graph.wire_bytes
    equal(graph, small, numbered((8, 4)))


def test_a_reduction_that_is_cut_along_another_axis_is_cut_first() -> None:
    graph = reduced("f32[8@dp, 4]")
    small = simplify(graph)
    assert ops(small) == ["shard", "all_reduce"]
    assert 2 * small.wire_bytes == graph.wire_bytes
    equal(graph, small, numbered((8, 4)))


@pytest.mark.parametrize(
    "graph",
    [
        reduced("f32[8@tp, 4]", also=True),  # the whole is needed as well
        reduced("f32[8@tp, 4]", "f32[8, 4@tp]"),
        reduced("f32[8@tp, 4]", src="f32[8, 4] max tp"),  # no collective scatters a maximum
    ],
)
def test_a_reduction_stays_where_it_must(graph: Graph) -> None:
    small = simplify(graph)
    assert ops(small) == ops(graph)
    equal(graph, small, numbered((8, 4)))


# ---- all of it ---------------------------------------------------------------------------------
@st.composite
def programs(draw: st.DrawFn) -> tuple[Graph, list[Any]]:
    """Draws a program of square matrices, with gradients."""
    mesh = draw(meshes(8))
    b = Builder("random")
    shape = (4, 4)
    values = [b.input(draw(layouts(mesh, shape))) for _ in range(2)]
    inputs = list(values)
    values += [full(b, v, *shape) for v in (0.0, 1.0)]
    for _ in range(draw(st.integers(1, 8))):
        x, y = (draw(st.sampled_from(values)) for _ in range(2))
        match draw(st.sampled_from(["add", "mul", "sub", "neg", "tanh", "transpose", "contract",
                                    "reshape", "redistribute", "sum"])):  # fmt: skip
            case "neg" | "tanh" as op:
                made = b(op, x)
            case "transpose":
                made = b("transpose", x, perm=(1, 0))
            case "contract":
                made = b("contract", x, y, index="m k, k n -> m n")
            case "reshape":
                made = b("reshape", b("reshape", x, shape=(2, 8)), shape=shape)
            case "redistribute":
                made = b.redistribute(x, draw(layouts(mesh, shape)), "test")
            case "sum":
                total = b("reshape", b("sum", x, dims=(0,)), shape=(1, 4))
                made = b("broadcast_to", total, shape=shape)
            case op:
                made = b(op, x, y)
        values.append(made)
    last = values[-1]
    found = differentiate(b, [(last, full(b, 1.0, *shape))], inputs)
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    ins = [rng.uniform(-0.5, 0.5, shape).astype(np.float32) for _ in inputs]
    return b.graph([last, *(g for g in found if g is not None)]), ins


@settings(max_examples=80)
@given(programs())
def test_each_pass_preserves_what_is_computed(program: tuple[Graph, list[Any]]) -> None:
    graph, ins = program
    verify(graph)
    want = evaluate(graph, ins)
    for blocks, whole in zip(evaluate_blocks(graph, ins), want, strict=True):
        np.testing.assert_allclose(blocks, whole, rtol=1e-4, atol=1e-4)
    for run in PASSES:
        before = to_text(graph)
        small = run(graph)
        verify(small, run.__name__)
        assert to_text(graph) == before, "a pass changes nothing in place"
        assert len(small.nodes) <= len(graph.nodes) or run is fuse_reductions or run is fold
        assert [o.type for o in small.outputs] == [o.type for o in graph.outputs]
        for got in (evaluate(small, ins), evaluate_blocks(small, ins)):
            for value, whole in zip(got, want, strict=True):
                np.testing.assert_allclose(value, whole, rtol=1e-4, atol=1e-4)
    assert simplify(simplify(graph)).wire_bytes <= graph.wire_bytes


def test_simplifying_takes_linear_time() -> None:
    def chain(n: int) -> Graph:
        b = Builder()
        b.loc = ""
        x, w = b.input(parse_type(X, MESH)), b.input(parse_type("f32[4, 4@tp]", MESH))
        for _ in range(n // 7):
            h = b("tanh", b("contract", x, w, index="m k, k n -> m n"))
            x = b("add", x, b("mul", h, b("mul", h, full(b, 1.0))))
        return b.graph([x])

    def calls(graph: Graph) -> int:
        """Counts the calls of functions and methods: a measure of work that machine load cannot
        change."""
        count = 0

        def one(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(one)
        try:
            simplify(graph)
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(chain(1000)), calls(chain(8000))
    assert large < 9 * small, "eight times the nodes"
