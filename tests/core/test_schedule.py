"""Schedules: equality with their graph, text, validation, and the requested order."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, schedule
from tessera.core.context import settings
from tessera.core.layout import TensorType, parse_type
from tessera.core.options import ProgramOptions, ScheduleOptions
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import cut, join, run_blocks
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.schedule import Collective, Compute, Schedule, Step
from tessera.ir.schedule.text import parse
from tessera.ir.schedule.verify import verify_schedule
from tessera.passes.simplify import simplify
from tests.core.scheduled import scheduled

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
RNG = np.random.default_rng(4)
LAYERS = 3


def net(w: dict[str, ts.Tensor], x: ts.Tensor) -> Any:
    h = x
    for i in range(LAYERS):
        with ts.named_scope(f"layer{i}"):
            h = ts.tanh(ts.tanh(h @ w[f"up{i}"]) @ w[f"down{i}"])
    return (h * h).mean()


def step(w: dict[str, ts.Tensor], x: ts.Tensor) -> Any:
    loss = net(w, x)
    return loss, ts.grad(loss, w, layout=dist.strategy("zero_redundancy_optimizer"))


def types(zero3: bool = False) -> tuple[dict[str, TensorType], TensorType]:
    row = "@dp" if zero3 else ""
    w = {}
    for i in range(LAYERS):
        w[f"up{i}"] = parse_type(f"f32[8{row}, 12@tp]", MESH)
        w[f"down{i}"] = parse_type(f"f32[12@tp, 8{row}]", MESH)
    return w, parse_type("f32[4@dp, 8]", MESH)


def looped(x: ts.Tensor, w: ts.Tensor) -> Any:
    """A loop with collectives in its body."""
    end, rows = ts.scan(lambda h, row: (ts.tanh(h @ w) @ w.T + row, h), x[0], x)
    return end, rows


GRAPHS = {
    "step": simplify(graph.trace(step, *types())),
    "zero 3": simplify(graph.trace(step, *types(zero3=True))),
    "loop": simplify(
        graph.trace(looped, parse_type("f32[3, 4@dp, 8]", MESH), parse_type("f32[8, 6@tp]", MESH))
    ),
    "no collectives": simplify(graph.trace(lambda x: ts.exp(x) + 1.0, types()[1])),
    "nothing": graph.trace(lambda x: x, types()[1]),
}
OPTIONS = [
    ScheduleOptions(),
    ScheduleOptions(overlap=True),
    ScheduleOptions(overlap=False),
    ScheduleOptions(bucket_bytes=1 << 20),
    ScheduleOptions(overlap=True, bucket_bytes=300),
    ScheduleOptions(prefetch=0),
    ScheduleOptions(prefetch=1, overlap=True),
    ScheduleOptions(scope_depth=1),
]


def run(s: Schedule, blocks: list[Any]) -> list[Any]:
    """Runs the steps on blocks by the oracle; dead buffers are dropped."""
    env = dict(zip(s.inputs, blocks, strict=True))
    for i, st in enumerate(s.steps):
        outs = run_blocks(st.graph, [env[b] for b in st.reads], s.mesh)
        env.update(zip(st.writes, outs, strict=True))
        for b in s.freed[i]:
            del env[b]
    return [env[b] for b in s.outputs]


@pytest.mark.parametrize("o", OPTIONS, ids=lambda o: o.text() or "as it comes")
@pytest.mark.parametrize("name", GRAPHS)
def test_a_schedule_computes_its_graph_and_reads_back(name: str, o: ScheduleOptions) -> None:
    g = GRAPHS[name]
    s = scheduled(g, o)
    verify_schedule(s)
    again = parse(s.text)
    assert again.text == s.text and again.hash == s.hash
    verify_schedule(again)
    given = [RNG.normal(size=n.type.shape).astype(np.float32) for n in g.inputs]
    blocks = [cut(n.type.on(g.mesh), x) for n, x in zip(g.inputs, given, strict=True)]
    want = run_blocks(g, blocks, g.mesh)
    for found in (run(s, blocks), run(again, blocks)):
        for n, a, b in zip(g.outputs, found, want, strict=True):
            t = n.type.on(g.mesh)
            np.testing.assert_allclose(join(t, a), join(t, b), rtol=1e-5, atol=1e-6)

    # Kinds, axes and bytes of all collectives are the graph's.
    def kinds(found: Any) -> list[Any]:
        return sorted((n.op, n.attrs["axes"], n.wire_bytes, k) for n, k in found)

    assert kinds(s.collectives()) == kinds(g.collectives()) == kinds(again.collectives())


def word(st: Step) -> str:
    return st.op if isinstance(st, Collective) else st.kind


def place(s: Schedule, loc: str, op: str) -> int:
    return next(
        i for i, st in enumerate(s.steps) for n in st.nodes if n.op == op and n.scope == loc
    )


def test_overlap_moves_sums_to_where_they_are_ready() -> None:
    late = build_schedule(GRAPHS["step"])
    early = scheduled(GRAPHS["step"], ScheduleOptions(overlap=True))
    tail = [word(st) for st in late.steps[-6:]]
    assert tail.count("reduce_scatter") >= 5  # all at the end, where the user asked for gradients
    kinds = [word(st) for st in early.steps]
    first = kinds.index("reduce_scatter")
    assert "compute" in kinds[first + 1 :]
    # The next compute step does not wait for it.
    after = next(i for i in range(first + 1, len(kinds)) if kinds[i] == "compute")
    assert first not in early.waits[after]
    # Sums of one kind keep their order; otherwise they would be one sum at the end.
    sums = [i for i, kind in enumerate(kinds) if kind == "reduce_scatter"]
    assert all(a in early.waits[b] for a, b in pairwise(sums))


def test_without_overlap_each_step_waits_for_the_one_before() -> None:
    s = scheduled(GRAPHS["step"], ScheduleOptions(overlap=False))
    assert all(i - 1 in s.waits[i] for i in range(1, len(s.steps)))


def test_buckets_hold_what_fits() -> None:
    alone = build_schedule(GRAPHS["step"])
    most = max(c.args[0].type.local_bytes for c, _ in alone.collectives())
    for room in (2 * most, 1 << 20):
        s = scheduled(GRAPHS["step"], ScheduleOptions(bucket_bytes=room))
        buckets = [st.nodes for st in s.steps if isinstance(st, Collective)]
        sizes = [[c.args[0].type.local_bytes for c in nodes] for nodes in buckets]
        assert any(len(x) > 1 for x in sizes)
        assert all(sum(x) <= room for x in sizes if len(x) > 1)
        same = [{(c.op, c.attrs["axes"]) for c in nodes} for nodes in buckets]
        assert all(len(kinds) <= 1 for kinds in same)


def test_gathers_come_as_far_ahead_as_asked() -> None:
    held = []
    for distance in (0, 1, LAYERS * 2):
        s = scheduled(GRAPHS["zero 3"], ScheduleOptions(prefetch=distance))
        kinds = [word(st) for st in s.steps]
        run_of = 0
        while kinds[run_of] == "all_gather":
            run_of += 1
        assert run_of == min(distance + 1, LAYERS * 2) if distance < LAYERS else run_of >= LAYERS
        held.append(s.peak_bytes)
    assert held[0] <= held[1] <= held[2]


def test_scopes_cut_compute_steps() -> None:
    s = scheduled(GRAPHS["step"], ScheduleOptions(scope_depth=1))
    heads = [
        {n.scope.split("/")[0] for n in st.nodes if n.args}
        for st in s.steps
        if isinstance(st, Compute)
    ]
    assert all(len(h) == 1 for h in heads if h)


def test_lifetimes_and_bytes() -> None:
    s = build_schedule(GRAPHS["no collectives"])
    assert s.lifetimes == ((-1, 0), (0, 1)) and s.freed == ((),)
    assert s.peak_bytes == s.held_bytes[0] == 2 * s.buffers[0].local_bytes
    empty = build_schedule(GRAPHS["nothing"])
    assert empty.steps == () and empty.peak_bytes == empty.buffers[0].local_bytes


TEXT = """\
schedule <lambda>  v1  mesh dp=2 tp=2  options overlap=False
  b0 : f32[4@dp, 8]  # given to s0, 64 B a device
  b1 : f32[8] +dp  # s0 to s1, 32 B a device
  b2 : f32[8]  # s1 to s2, 32 B a device
  b3 : f32[8]  # s2 to returned, 32 B a device
  s0 compute stage=0 (b0) -> (b1)
    graph "<lambda>"  v1  mesh dp=2 tp=2
      %0 = input "b0"     : f32[4@dp, 8]
      %1 = sum %0 dims=(0,) : f32[8] +dp  # test_schedule.py:LINE
      return %1
  s1 collective stage=0 (b1) -> (b2) after s0
    graph "<lambda>"  v1  mesh dp=2 tp=2
      %0 = input "b1"                 : f32[8] +dp
      %1 = all_reduce %0 axes=("dp",) : f32[8]  # test_schedule.py:LINE  NOTE
      return %1
  s2 compute stage=0 (b2) -> (b3) after s1
    graph "<lambda>"  v1  mesh dp=2 tp=2
      %0 = input "b2" : f32[8]
      %1 = exp %0     : f32[8]  # test_schedule.py:LINE
      return %1
  return b3""".replace("NOTE", "inserted for exp; receives 32 B a device")


def test_the_text_whole() -> None:
    fn = lambda x: ts.exp(x.sum(0))  # noqa: E731  # one line
    g = simplify(graph.trace(fn, types()[1]))
    text = scheduled(g, ScheduleOptions(overlap=False)).text
    line = str(fn.__code__.co_firstlineno)
    squeezed = [" ".join(row.split()) for row in text.replace(f":{line}", ":LINE").split("\n")]
    assert squeezed == [" ".join(row.split()) for row in TEXT.split("\n")]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("schedule <lambda>  v1", "schedule <lambda>  v9", "a schedule begins with"),
        ("s1 collective", "s7 collective", "expected step s1"),
        ("  b1 : ", "  b4 : ", "expected b1, found b4"),
        ("    graph", "    grph", "expected 'graph'"),
        ("  return b3", "", "the text ends before"),
        ("  return b3", "  return c3", "expected buffers: return b3 b4"),
        ("  return b3", "  returns b3", "expected buffers: return b3 b4"),
        ("  return b3", "  return b3\n  return b2", "the schedule has ended above"),
        ("(b1) -> (b2)", "(b1) to (b2)", "expected step s1"),
        ("(b1) -> (b2)", f"(b{'9' * 5000}) -> (b2)", "expected step s1"),
        ("  b1 : ", f"  b{'9' * 5000} : ", "expected step s0"),
        ("  return b3", f"  return b{'9' * 5000}", "expected buffers: return b3 b4"),
        ("sum %0", f"sum %{'9' * 5000}", "cannot read"),
    ],
)
def test_bad_text_is_named_with_its_line(old: str, new: str, why: str) -> None:
    good = TEXT.replace("LINE", "1")
    assert parse(good).text.split() == good.split()
    with pytest.raises(ts.GraphError, match="schedule text, line") as caught:
        parse(good.replace(old, new).rstrip("\n"))
    assert why in str(caught.value)


OTHER = ProgramOptions("run_to_run")


def broken() -> list[tuple[str, Schedule, str]]:
    """Invalid schedules, one for each rule, which only this rule rejects."""
    s = parse(TEXT.replace("LINE", "1"))
    a, b, c = s.steps

    def change(**new: Any) -> Schedule:
        return replace(s, **new)

    def computes(x: Step) -> Step:
        return Compute(x.reads, x.writes, x.graph, after=x.after)

    def moves(x: Step) -> Step:
        return Collective(x.reads, x.writes, x.graph, after=x.after)

    return [
        ("read early", change(steps=(b, a, c)), "before that is filled"),
        ("filled twice", change(steps=(a, b, replace(c, writes=(2,)))), "filled already"),
        ("never filled", change(steps=(a, b), outputs=(2,)), "b3 is never filled"),
        ("returned", change(steps=(a, b)), "is returned and never filled"),
        ("type", change(buffers=(*s.buffers[:3], s.buffers[0])), "which is"),
        ("read type", change(buffers=(s.buffers[2], *s.buffers[1:])), "which is"),
        ("numbers", change(steps=(a, b, replace(c, reads=(2, 2)))), "other numbers of values"),
        ("no buffer", change(steps=(a, b, replace(c, reads=(9,)))), "b9 does not exist"),
        ("after", change(steps=(a, replace(b, after=(2,)), c)), "which is not before it"),
        ("compute", change(steps=(a, computes(b), c)), "a compute step holds"),
        ("options", change(options=OTHER), "recorded under other options: overlap=False"),
        ("collective", change(steps=(moves(a), b, c)), "what is no collective"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("(b1 b2 b0) ->", "(b1 b2) ->", "other numbers of values than it reads"),
        ("gives=0,1", "gives=0,7", "a result that its body lacks"),
        ("gives=0,1", "gives=0", "other numbers of values than it reads and fills"),
    ],
)
def test_a_loop_that_its_body_does_not_fit_is_named(old: str, new: str, why: str) -> None:
    text = build_schedule(GRAPHS["loop"]).text
    assert old in text
    with pytest.raises(ts.GraphError, match=why):
        verify_schedule(parse(text.replace(old, new)))


def test_a_text_without_comments_is_the_same_schedule() -> None:
    s = parse(TEXT.replace("LINE", "1"))
    again = parse(re.sub("  #.*", "", s.text))
    verify_schedule(again)
    assert (again.buffers, again.outputs) == (s.buffers, s.outputs)
    assert [st.kind for st in again.steps] == [st.kind for st in s.steps]


def test_a_step_shares_what_a_step_of_its_kind_runs() -> None:
    text = TEXT.replace("LINE", "1").replace(
        "s1 collective stage=0 (b1) -> (b2) after s0", "s1 collective stage=0 (b1) -> (b2) as s0"
    )
    with pytest.raises(ts.GraphError, match="no collective step s0 is above"):
        parse(text)


@pytest.mark.parametrize(
    ("name", "s", "why"), broken(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_rule_rejects_what_breaks_it(name: str, s: Schedule, why: str) -> None:
    with pytest.raises(ts.GraphError, match="the schedule is not valid") as caught:
        verify_schedule(s)
    assert why in str(caught.value)


# -- the face -------------------------------------------------------------------------------------
def test_statements_hold_from_here_on() -> None:
    with MESH:
        schedule.all_reduce_overlap(True)
        schedule.pipeline_microbatches(8)
        schedule.bucket_bytes(4096)
        schedule.prefetch(2)
        assert settings().program.schedule == ScheduleOptions(
            overlap=True, microbatches=8, bucket_bytes=4096, prefetch=2
        )
        schedule.reset()
        assert schedule.current() == ScheduleOptions()
    schedule.reset()


def test_one_collective_is_left_to_the_engine() -> None:
    with MESH:
        schedule.algorithm("ring")
        schedule.algorithm(None, "all_gather")
        assert schedule.current().text() == "algorithm=ring,all_gather:engine"
        schedule.algorithm(None)
        assert schedule.current() == ScheduleOptions()


@pytest.mark.parametrize("name", ["step", "loop"])
def test_a_graph_and_a_schedule_are_copied_sent_and_saved(name: str) -> None:
    g = GRAPHS[name]
    s = build_schedule(g)
    assert pickle.loads(pickle.dumps(g)).text == g.text
    assert pickle.loads(pickle.dumps(s)).hash == s.hash
    assert copy.deepcopy(g) is g and copy.deepcopy(s) is s
    assert parse(s.text.replace("\n", "\r\n")).hash == s.hash  # with Windows line ends


@pytest.mark.parametrize("onto", ["dp=2,tp=1", dist.Mesh(("dp", "tp"), [5, 3], (2, 1))])
def test_the_text_of_a_folded_program_is_read_back(onto: Any) -> None:
    folded = MESH.fold(onto)
    w = parse_type("f32[8, 12@tp]", folded)
    s = build_schedule(
        simplify(graph.trace(lambda x, w: (x @ w).sum(), parse_type("f32[4@dp, 8]", folded), w))
    )
    again = parse(s.text)
    verify_schedule(again)
    assert again.mesh == folded and again.hash == s.hash


@pytest.mark.parametrize("name", ["<lambda>", "two words", 'a "b" #c', "a  v1"])
def test_any_name_is_read_back(name: str) -> None:
    s = replace(build_schedule(GRAPHS["step"]), name=name)
    assert parse(s.text).name == name and parse(s.text).hash == s.hash


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"tile": {"BM": 0}}, "tile cannot be {'BM': 0}"),
        ({"tile": (128, 128)}, "tile cannot be (128, 128)"),
    ],
)
def test_choices_that_are_none(choices: dict[str, Any], why: str) -> None:
    with pytest.raises(ts.UsageError) as caught:
        schedule(**choices)
    assert why in str(caught.value)


def test_bad_statements() -> None:
    for call in (
        lambda: schedule.all_reduce_overlap("yes"),  # type: ignore[arg-type]
        lambda: schedule.pipeline_microbatches(0),
        lambda: schedule.bucket_bytes(-1),
        lambda: schedule.prefetch(-1),
        lambda: schedule.parse(3),  # type: ignore[arg-type]
        lambda: schedule.verify("text"),  # type: ignore[arg-type]
        lambda: schedule.algorithm("ring", ["all_reduce"]),  # type: ignore[arg-type]
        lambda: schedule.algorithm(None, "allreduce"),
        lambda: schedule(overlap=True)(3),
    ):
        with pytest.raises(ts.UsageError):
            call()


def test_the_graph_type_is_untouched() -> None:
    g = GRAPHS["step"]
    assert isinstance(g, Graph) and build_schedule(g).inputs == tuple(range(len(g.inputs)))
