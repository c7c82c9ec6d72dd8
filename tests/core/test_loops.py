"""Loops against their unrolled iterations: values, gradients and second-order gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tessera.core.dtypes import f32, int32
from tessera.core.errors import LayoutError, ShapeError
from tessera.core.layout import TensorType, parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.text import parse, to_text
from tessera.ir.graph.verify import verify
from tessera.passes.differentiate import differentiate
from tessera.passes.simplify import simplify
from tests.core.strategies import numbered

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
POLICIES = ("save", "recompute", "together")
# An iteration's arguments are a builder, the constants, the carries and a row of each scanned
# value. Its results are the next carries and the values to stack.
Iteration = Callable[[Builder, list[Node], list[Node], list[Node]], tuple[list[Node], list[Node]]]


def scanned(
    b: Builder,
    iteration: Iteration,
    consts: Sequence[Node],
    carries: Sequence[Node],
    xs: Sequence[Node],
    policy: str = "save",
    reverse: bool = False,
    length: int = 0,
) -> list[Node]:
    """Returns `iteration` as a loop: the last carries, then the stacked values."""
    inner = Builder("iteration")
    inner.loc = ""
    c = [inner.input(n.type) for n in consts]
    s = [inner.input(n.type) for n in carries]
    r = [inner.input(n.type.with_dims(n.type.dims[1:])) for n in xs]
    ends, ys = iteration(inner, c, s, r)
    ends = [inner.redistribute(e, n.type, "for scan") for e, n in zip(ends, s, strict=True)]
    run = b(
        "scan", *consts, *carries, *xs, body=inner.graph([*ends, *ys]),
        length=length or xs[0].type.shape[0], consts=len(consts), carries=len(carries),
        reverse=reverse, policy=policy,
    )  # fmt: skip
    return [b("item", run, index=i) for i in range(len(run.types))]


def unrolled(
    b: Builder,
    iteration: Iteration,
    consts: Sequence[Node],
    carries: Sequence[Node],
    xs: Sequence[Node],
    policy: str = "",
    reverse: bool = False,
    length: int = 0,
) -> list[Node]:
    """The unrolled iterations of the same loop."""
    count = length or xs[0].type.shape[0]
    state, rows = list(carries), []
    for i in reversed(range(count)) if reverse else range(count):
        state, ys = iteration(b, list(consts), state, [_row(b, x, i) for x in xs])
        rows.append(ys)
    if reverse:
        rows.reverse()
    return [*state, *(_stacked(b, column) for column in zip(*rows, strict=True))]


def _row(b: Builder, x: Node, i: int) -> Node:
    rest = x.type.shape[1:]
    part = b("slice", x, starts=(i, *(0,) * len(rest)), stops=(i + 1, *rest),
             steps=(1,) * (len(rest) + 1))  # fmt: skip
    return b("reshape", part, shape=rest)


def _stacked(b: Builder, column: Sequence[Node]) -> Node:
    parts = [b("reshape", y, shape=(1, *y.type.shape)) for y in column]
    return b("concat", *parts, dim=0)


# ---- iterations
# -------------------------------------------------------------------------------------
def layers(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
    """A residual layer with a weight per iteration, and a shared scale."""
    h = b("tanh", b("contract", s[0], x[0], index="m k, k n -> m n"))
    out = b("add", s[0], b("mul", h, c[0]))
    return [out], [b("sum", out, dims=(1,))]


def kept(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
    """`layers` with `save_for_backward` on the expensive value."""
    h = b("save_for_backward", b("tanh", b("contract", s[0], x[0], index="m k, k n -> m n")))
    return [b("add", s[0], b("mul", h, c[0]))], []


def recurrent(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
    """A shared weight, two carries that depend on each other, a counter, and no stacked results."""
    h = b("tanh", b("contract", s[0], c[0], index="m k, k n -> m n"))
    one = b("full", dtype=int32, shape=(), value=1)
    scale = b("cast", s[2], dtype=f32)
    return [b("add", h, s[1]), b("mul", s[0], scale), b("add", s[2], one)], []


def losses(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
    """A sum over blocks of rows, for the policy `together`."""
    logits = b("contract", x[0], c[0], index="m k, k n -> m n")
    part = b("sum", b("mul", logits, b("mul", logits, x[1])), dims=(0, 1))
    return [b("add", s[0], part)], []


def entangled(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
    """A scalar sum of terms that depend on another carry: not for `together`."""
    h = b("tanh", b("contract", s[1], c[0], index="m k, k n -> m n"))
    return [b("add", s[0], b("sum", h, dims=(0, 1))), h], []


def shrinking(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
    """A scalar carry that is multiplied, not only added to: not for `together` either."""
    part = b("sum", b("mul", x[0], c[0]), dims=(0,))
    return [b("mul", s[0], part)], []


def texts(*types: str) -> list[str]:
    return list(types)


CASES: dict[str, tuple[Iteration, list[str], list[str], list[str], int]] = {
    "layers": (layers, texts("f32[]"), texts("f32[4, 3]"), texts("f32[5, 3, 3]"), 0),
    "layers on a mesh": (
        layers, texts("f32[]"), texts("f32[4@dp, 8]"), texts("f32[3, 8, 8@tp]"), 0),
    "kept": (kept, texts("f32[]"), texts("f32[4@dp, 4]"), texts("f32[3, 4, 4@tp]"), 0),
    "recurrent": (recurrent, texts("f32[3, 3]"), texts("f32[2, 3]", "f32[2, 3]", "i32[]"), [], 3),
    "recurrent on a mesh": (
        recurrent, texts("f32[4@tp, 4]"), texts("f32[5@dp, 4]", "f32[5@dp, 4]", "i32[]"), [], 3),
    "losses": (
        losses, texts("f32[3, 5]"), texts("f32[]"), texts("f32[3, 4, 3]", "f32[3, 4, 5]"), 0),
    "losses on a mesh": (
        losses, texts("f32[4, 8@tp]"), texts("f32[] +dp +tp"),
        texts("f32[3, 4@dp, 4]", "f32[3, 4@dp, 8]"), 0),
    "entangled": (entangled, texts("f32[3, 3]"), texts("f32[]", "f32[2, 3]"), [], 3),
    "shrinking": (shrinking, texts("f32[4]"), texts("f32[]"), texts("f32[3, 4]"), 0),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def typed(texts_: Sequence[str]) -> list[TensorType]:
    types = [parse_type(t, MESH) for t in texts_]
    return types


def built(
    case: str, run: Callable[..., list[Node]], policy: str = "save", reverse: bool = False
) -> tuple[Builder, list[Node], list[Node]]:
    """Returns (builder, inputs, results) of a case, as a loop or unrolled."""
    iteration, consts, carries, xs, length = CASES[case]
    b = Builder(case.replace(" ", "_"))
    b.loc = ""
    parts = [[b.input(t) for t in typed(group)] for group in (consts, carries, xs)]
    results = run(b, iteration, *parts, policy=policy, reverse=reverse, length=length)
    return b, [n for group in parts for n in group], results


def data(inputs: Sequence[Node], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        rng.uniform(-0.8, 0.8, n.type.shape).astype(np.float32)
        if n.type.dtype.is_float
        else np.full(n.type.shape, 2, np.int32)
        for n in inputs
    ]


def close(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def both_ways(graph: Graph, values: list[Any]) -> list[Any]:
    """Evaluates `graph` whole. Asserts the same in blocks, simplified, and parsed from its text."""
    verify(graph, "build")
    whole = evaluate(graph, values)
    close(evaluate_blocks(graph, values), whole)
    small = simplify(graph)
    verify(small, "simplify")
    close(evaluate_blocks(small, values), whole)
    text = to_text(small)
    assert to_text(parse(text)) == text
    return whole


def seeds(b: Builder, results: Sequence[Node]) -> list[tuple[Node, Node]]:
    """The float results, each with a seed gradient that is not uniform."""
    pairs = []
    for k, n in enumerate(results):
        if n.type.dtype.is_float:
            g = b("full", dtype=f32, shape=n.type.shape, value=1.0 + k)
            if n.type.rank:
                ramp = b("iota", dtype=f32, shape=n.type.shape, dim=n.type.rank - 1)
                g = b("add", g, b("mul", ramp, b("full", dtype=f32, shape=(), value=0.25)))
            pairs.append((n, g))
    return pairs


def floats(inputs: Sequence[Node]) -> list[Node]:
    return [n for n in inputs if n.type.dtype.is_float]


# ---- values ------------------------------------------------------------------------------------
@every_case
@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_computes_its_iterations(case: str, reverse: bool) -> None:
    b, inputs, results = built(case, scanned, reverse=reverse)
    values = data(inputs)
    got = both_ways(b.graph(results), values)
    b, _, results = built(case, unrolled, reverse=reverse)
    close(got, evaluate(b.graph(results), values))


def test_flops_and_bytes_count_every_iteration() -> None:
    b, _, results = built("layers on a mesh", scanned)
    graph = b.graph(results)
    scan = next(n for n in graph.nodes if n.op == "scan")
    assert graph.flops == 3 * scan.attrs["body"].flops > 0
    iterations = {times for n, times in graph.collectives()}
    assert iterations == {3}
    assert graph.wire_bytes == 3 * scan.attrs["body"].wire_bytes > 0


# ---- gradients ---------------------------------------------------------------------------------
def gradients(case: str, run: Callable[..., list[Node]], **how: Any) -> tuple[Graph, list[Node]]:
    b, inputs, results = built(case, run, **how)
    found = differentiate(b, seeds(b, results), floats(inputs))
    assert all(g is not None for g in found)
    kept = [b.redistribute(g, n.type.complete(), "end")
            for g, n in zip(found, floats(inputs), strict=True) if g is not None]  # fmt: skip
    return b.graph([*results, *kept]), inputs


@every_case
@every_policy
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_those_of_the_iterations(case: str, policy: str, reverse: bool) -> None:
    graph, inputs = gradients(case, scanned, policy=policy, reverse=reverse)
    values = data(inputs)
    got = both_ways(graph, values)
    whole, _ = gradients(case, unrolled, reverse=reverse)
    close(got, evaluate(whole, values))


def only_loss(case: str, policy: str, by: Sequence[int]) -> tuple[Graph, list[Node]]:
    b, inputs, results = built(case, scanned, policy=policy)
    one = b("full", dtype=f32, shape=(), value=1.0)
    found = differentiate(b, [(results[0], one)], [inputs[i] for i in by])
    return b.graph([results[0], *(g for g in found if g is not None)]), inputs


def scans(graph: Graph) -> list[Node]:
    return [n for n in simplify(graph).nodes if n.op == "scan"]


def test_together_is_one_loop_and_the_others_are_two() -> None:
    for policy, loops in (("together", 1), ("recompute", 2), ("save", 2)):
        graph, _ = only_loss("losses", policy, [0, 2])
        assert len(scans(graph)) == loops, policy
    # If the sum has another use, `together` falls back to two loops.
    for case in ("entangled", "shrinking"):
        assert len(scans(only_loss(case, "together", [0])[0])) == 2


def test_what_is_kept_follows_the_policy() -> None:
    kept = {}
    for policy in ("save", "recompute"):
        graph, _ = gradients("layers", scanned, policy=policy)
        forward, backward = scans(graph)
        assert not forward.attrs["reverse"] and backward.attrs["reverse"]
        kept[policy] = len(forward.types)
        ops = [n.op for n in backward.attrs["body"].nodes]
        assert ("tanh" in ops) == (policy == "recompute")
    assert kept["save"] > kept["recompute"]


def test_what_is_marked_is_kept() -> None:
    forward, backward = scans(gradients("kept", scanned, policy="recompute")[0])
    assert "tanh" in [n.op for n in forward.attrs["body"].nodes]
    assert "tanh" not in [n.op for n in backward.attrs["body"].nodes]


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    asked, _ = only_loss("losses", "together", [0])
    everything, _ = only_loss("losses", "together", [0, 2, 3])
    assert simplify(asked).flops < simplify(everything).flops
    b, _, results = built("losses", scanned)
    alone = b.input(plain(f32, ()), "alone")
    one = b("full", dtype=f32, shape=(), value=1.0)
    assert differentiate(b, [(results[0], one)], [alone]) == [None]


# ---- second derivatives ------------------------------------------------------------------------
def curvature(case: str, run: Callable[..., list[Node]], **how: Any) -> tuple[Graph, list[Node]]:
    """The gradient of Σ |gradient|²."""
    b, inputs, results = built(case, run, **how)
    by = floats(inputs)
    first = differentiate(b, seeds(b, results), by)
    total: Node | None = None
    for g in first:
        assert g is not None
        term = b("sum", b("mul", g, g), dims=tuple(range(g.type.rank)))
        total = term if total is None else b("add", total, term)
    assert total is not None
    one = b("full", dtype=f32, shape=(), value=1.0)
    second = differentiate(b, [(total, one)], by)
    # A loop does not know that the gradient of a carry is constant; unrolled, the gradient is None.
    zeros = [b("full", dtype=f32, shape=n.type.shape, value=0.0) for n in by]
    return b.graph([total, *(z if g is None else g for g, z in zip(second, zeros))]), inputs


@pytest.mark.parametrize("case", ["layers", "layers on a mesh", "losses", "recurrent"])
@every_policy
def test_second_derivatives_are_those_of_the_iterations(case: str, policy: str) -> None:
    graph, inputs = curvature(case, scanned, policy=policy)
    values = data(inputs, 1)
    got = both_ways(graph, values)
    whole, _ = curvature(case, unrolled)
    close(got, evaluate(whole, values))


# ---- loops in loops ----------------------------------------------------------------------------
def nest(outer: Callable[..., list[Node]], inner: Callable[..., list[Node]], policies: Any) -> Any:
    """A stack of blocks, each a recurrence over the same rows."""

    def block(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
        def step(b: Builder, c: list[Node], s: list[Node], x: list[Node]) -> Any:
            h = b("tanh", b("add", b("mul", s[0], c[0]), x[0]))
            return [h], [b("mul", h, h)]

        end, ys = inner(b, step, [x[0]], [s[0]], [c[0]], policy=policies[1])
        return [b("add", s[0], b("sum", ys, dims=(0,)))], [end]

    b = Builder("nest")
    b.loc = ""
    inputs = [b.input(plain(f32, shape)) for shape in ((4, 3), (3,), (2, 3))]
    results = outer(b, block, [inputs[0]], [inputs[1]], [inputs[2]], policy=policies[0])
    found = differentiate(b, seeds(b, results), inputs)
    return b.graph([*results, *(g for g in found if g is not None)]), inputs


@pytest.mark.parametrize("policies", list(itertools.product(["save", "recompute"], repeat=2)))
def test_loops_in_loops(policies: tuple[str, str]) -> None:
    graph, inputs = nest(scanned, scanned, policies)
    values = data(inputs, 2)
    got = both_ways(graph, values)
    assert len(got) == 5
    whole, _ = nest(unrolled, unrolled, policies)
    close(got, evaluate(whole, values))


# ---- what a loop refuses -----------------------------------------------------------------------
def test_a_body_must_fit() -> None:
    inner = Builder("iteration")
    c = inner.input(parse_type("f32[4@dp]", MESH))
    body = inner.graph([inner.redistribute(c, parse_type("f32[4@tp]", MESH))])
    rest: dict[str, Any] = {"consts": 0, "reverse": False, "policy": "save", "length": 2}
    b = Builder()
    x = b.input(parse_type("f32[4@dp]", MESH))
    with pytest.raises(LayoutError, match="scan: the carry changes its type"):
        b("scan", x, body=body, carries=1, **rest)
    with pytest.raises(ShapeError, match="scan: the body takes 1 values that do not fit the 2"):
        b("scan", x, x, body=body, carries=1, **rest)
    with pytest.raises(ShapeError, match="scanned values carry the length as their first dim"):
        b("scan", x, body=body, carries=0, **rest)


def test_an_argument_is_moved_to_what_the_body_takes() -> None:
    inner = Builder("iteration")
    c = inner.input(parse_type("f32[4@dp]", MESH))
    body = inner.graph([inner("neg", c)])
    b = Builder()
    x = b.input(parse_type("f32[4@tp]", MESH))
    run = b("scan", x, body=body, length=3, consts=0, carries=1, reverse=False, policy="save")
    graph = b.graph([b("item", run, index=0)])
    verify(graph)
    assert run.args[0].type.text == "f32[4@dp]" and run.args[0].note == "for scan"
    assert evaluate_blocks(graph, [numbered((4,))])[0].tolist() == [-1, -2, -3, -4]


def test_straight_through_has_one_values_number_and_the_others_gradient() -> None:
    b = Builder("straight_through")
    x = b.input(plain(f32, (3,)))
    total = b("sum", b("straight_through", b("floor", x), b("mul", x, x)), dims=(0,))
    one = b("full", dtype=f32, shape=(), value=1.0)
    (g,) = differentiate(b, [(total, one)], [x])
    value, slope = evaluate(b.graph([total, g]), [np.array([0.5, 1.5, 2.5], np.float32)])
    assert value == 3.0
    np.testing.assert_allclose(slope, [1.0, 3.0, 5.0])
