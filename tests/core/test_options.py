"""Program options in graphs and schedules: carried, written, parsed and compared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, graph
from tessera.core.context import replaced
from tessera.core.layout import parse_type
from tessera.core.options import (
    EXECUTORS,
    LEVELS,
    ORDERS,
    PLAIN,
    ProgramOptions,
    ScheduleOptions,
    parse_options,
)
from tessera.core.topology import Level, Link, Topology, cluster
from tessera.ir.graph.node import Graph
from tessera.ir.graph.text import parse
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.text import parse as parse_schedule
from tessera.lang.program.schedule import options

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
X, W = parse_type("f32[8@dp, 64]", MESH), parse_type("f32[64@tp, 12]", MESH)
NAMES = ("ring", "tree/4", "double_tree", "cheapest", "hierarchical(2:ring x 4:halving)")
WIRES = st.builds(
    lambda name, speed, wiring, shared: Level(2, Link(name, 1e-6, speed), wiring, shared),
    st.sampled_from(["wire", "a # wire", 'a "wire"']),
    st.sampled_from([1e9, 12.5e9]),
    st.sampled_from(["all", "ring", "line"]),
    st.booleans(),
)
TOPOLOGIES = st.one_of(
    st.sampled_from([cluster("h100"), cluster("h100").of(2), cluster("tpu_v4").of(2, 4, 8)]),
    st.builds(Topology, st.just("h100"), st.lists(WIRES, min_size=1, max_size=3).map(tuple)),
)


def maybe(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | value


CHOICES = st.builds(
    ScheduleOptions,
    overlap=maybe(st.booleans()),
    bucket_bytes=maybe(st.integers(1, 1 << 30)),
    prefetch=maybe(st.integers(0, 3)),
    reshard_after_forward=maybe(st.booleans()),
    microbatches=maybe(st.integers(1, 64)),
    pipeline=maybe(st.booleans()),
    backend=maybe(st.sampled_from(["nccl", "auto"])),
    epoch=maybe(st.sampled_from(["soft", "hard"])),
    scope_depth=maybe(st.integers(1, 3)),
    algorithm=maybe(
        st.lists(
            st.tuples(st.sampled_from(["", "all_reduce", "all_gather"]), st.sampled_from(NAMES)),
            min_size=1,
            max_size=3,
        ).map(tuple)
    ),
    topology=maybe(TOPOLOGIES),
    choices=maybe(st.just((("block_rows", 64), ("library", "older")))),
)
PROGRAMS = st.builds(
    ProgramOptions,
    st.sampled_from(LEVELS),
    st.sampled_from(ORDERS),
    st.sampled_from(EXECUTORS),
    CHOICES,
)


@given(PROGRAMS)
def test_the_text_of_options_is_read_back(o: ProgramOptions) -> None:
    text = o.text()
    assert parse_options(text) == o and (text == "") == (o == PLAIN)
    assert "\n" not in text and "#" not in text


@pytest.mark.parametrize(
    "text",
    ["colour=red", "overlap", "determinism=most", "executor=both", "topology=moon(3)",
     "prefetch=(1,",
     "topology=[1]", "overlap=", "=3"],
)  # fmt: skip
def test_what_are_no_options(text: str) -> None:
    with pytest.raises(ts.UsageError, match="options: cannot read"):
        parse_options(text)
    head = f"graph step  v1  options {text}\n  return"
    with pytest.raises(ts.GraphError, match="line 1: options: cannot read"):
        parse(head)
    with pytest.raises(ts.GraphError, match="line 1: options: cannot read"):
        parse_schedule(f"schedule step  v1  options {text}\n  return")


# -- what is recorded carries them -----------------------------------------------------------------
def body(x: ts.Tensor, w: ts.Tensor) -> Any:
    """A loop with a sum over devices in its body, the loop's gradient, and a sum."""

    def loss(w: ts.Tensor) -> ts.Tensor:
        whole = dist.redistribute(x, "[8, 64]")
        h = ts.scan(lambda h, r: (h + ts.tanh(r @ w), ()), ts.zeros((12,)), whole)[0]
        return h.sum()

    return ts.grad(loss(w), w), x @ w


def graphs(g: Graph) -> list[Graph]:
    inner = [v for n in g.nodes for v in n.attrs.values() if isinstance(v, Graph)]
    return [g, *(each for v in inner for each in graphs(v))]


CHOSEN = {
    "mesh_invariant": {"determinism": "mesh_invariant"},
    "in a ring": {"determinism": "mesh_invariant", "order": "ring"},
    "step by step": {"executor": "stepped"},
    "scheduled": {"schedule": options(overlap=True, algorithm="ring", topology="h100")},
    "all": {
        "determinism": "run_to_run",
        "executor": "stepped",
        "schedule": options(bucket_bytes=4096, prefetch=1),
    },
}


@pytest.mark.parametrize("how", CHOSEN)
def test_graphs_bodies_steps_and_texts_carry_them(how: str) -> None:
    with replaced(**CHOSEN[how]):  # type: ignore[arg-type]
        made = graph.trace(body, X, W)
    want = ProgramOptions(**CHOSEN[how])  # type: ignore[arg-type]
    assert len(graphs(made)) > 2  # a loop and its gradient
    for g in (made, made.stages["simplified"]):
        assert {each.options for each in graphs(g)} == {want}
        assert f"  options {want.text()}\n" in g.text and g.text.count("  options ") == 1
        again = parse(g.text)
        assert again.text == g.text and {each.options for each in graphs(again)} == {want}
    s = made.schedule  # outside of the context, under default options
    assert s.options == want and {st.graph.options for st in s.steps} == {want}
    assert s.text.count("  options ") == 1
    again = parse_schedule(s.text)
    assert again.options == want and again.text == s.text and again.hash == s.hash
    assert {st.graph.options for st in again.steps} == {want}
    assert s.hash != build_schedule(graph.trace(body, X, W)).hash


def test_who_watches_a_program_does_not_change_its_text() -> None:
    plain = graph.trace(body, X, W)
    with replaced(comm_trace=True):
        watched = graph.trace(body, X, W)
    assert watched.options != plain.options and watched.options.comm_trace
    assert watched.schedule.hash == plain.schedule.hash
    assert "  options " not in watched.text


def test_no_mesh_may_change_the_bits_of_what_was_recorded_so() -> None:
    with dist.deterministic():
        g = graph.trace(lambda x: ts.Tensor.sum(x), parse_type("f32[8@dp]", MESH))
    fast = graph.trace(lambda x: ts.Tensor.sum(x), parse_type("f32[8@dp]", MESH))
    with dist.deterministic():  # earlier recordings keep their options
        assert fast.schedule.options == PLAIN
    assert g.schedule.options.mesh_invariant
