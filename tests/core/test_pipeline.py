"""Pipelines: early errors, and the partition of graphs into stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, graph, optim, pipeline
from tessera.core.context import replaced
from tessera.core.layout import parse_type
from tessera.core.options import ScheduleOptions
from tessera.ir.graph.oracle import evaluate
from tessera.ir.schedule.algorithms.check import adjacent_pairs
from tessera.ir.schedule.pipelines import pipeline as builder
from tessera.ir.schedule.pipelines.merge import merged
from tessera.ir.schedule.pipelines.pipeline import Totals
from tessera.ir.schedule.pipelines.stages import balanced
from tessera.ir.schedule.schedule import Compute, Region, Schedule, Send
from tessera.ir.schedule.text import parse
from tessera.ir.schedule.verify import verify_schedule
from tests.messages import Golden

MESH = dist.Mesh.parse("dp=2 pp=2")
W = {k: np.ones((8, 8), np.float32) for k in "abc"}
X = np.ones((16, 8), np.float32)


def layer(k: str) -> Callable[..., Any]:
    return lambda w, x: (w, ts.tanh(x @ w[k]))


def last(w: Any, x: Any) -> Any:
    return x @ w["c"]


PARTS = [layer("a"), layer("b"), last]


def piped(parts: Any = PARTS, **options: Any) -> pipeline.Pipe:
    return pipeline.compose(2, parts, **{"mesh": MESH, "microbatches": 4, **options})


PIPE = piped()


def called(model: Any, x: Any = X, w: Any = W) -> None:
    ts.jit(lambda weights, x: model(weights, x))(w, x)


def trained(model: Any, loss: Callable[[Any], Any], after: Callable[[Any, Any], Any]) -> None:
    def step(weights: Any, x: Any) -> Any:
        out = model(weights, x)
        value = loss(out)
        return after(ts.grad(value, weights), out)

    ts.jit(step)(W, X)


def backwards() -> None:
    """The function calls the second stage before the first."""
    a = graph.stage("a")(lambda w, x: ts.tanh(x @ w["a"]))
    b = graph.stage("b")(lambda w, x: ts.tanh(x @ w["b"]))
    model = graph.pipeline([a, b], MESH, "pp")(lambda w, x: a(w, b(w, x)))
    called(model)


def twice() -> None:
    one, two = piped(), piped()
    called(lambda w, x: two(w, one(w, x)))


def in_a_loop() -> None:
    model = piped()
    called(lambda w, x: ts.scan(lambda c, _: (model(w, c), ()), x, x)[0])


def split_over_pp() -> None:
    called(piped(), x=ts.tensor(X, mesh=MESH, layout="[16@pp, 8]"))


ERRORS: dict[str, Callable[[], Any]] = {
    "axis missing": lambda: called(piped(axis="stage")),
    "no mesh": lambda: called(piped(mesh=None)),
    "fewer parts than stages": lambda: called(
        pipeline.compose(2, PARTS[:2], mesh=dist.Mesh.parse("pp=4"), microbatches=8)
    ),
    "fewer functions than stages": lambda: pipeline.compose(4, PARTS),
    "a stage that needs a later one": backwards,
    "a batch split over the axis of the stages": split_over_pp,
    "two pipelines": twice,
    "in a loop": in_a_loop,
    "a root of a mean": lambda: trained(
        piped(), lambda out: ts.sqrt((out * out).mean()), lambda g, out: g
    ),
    "no batch": lambda: ts.jit(lambda weights, x: PIPE(weights, x))(
        {k: ts.tensor(w, name=k) for k, w in W.items()}, ts.tensor(X, name="x")
    ),
    "a table that cannot run": lambda: called(
        piped(
            schedule=pipeline.Table.from_csv(
                "0F0,0B0,0F1,0B1,0F2,0B2,0F3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3", name="short"
            )
        )
    ),
    "an unknown schedule": lambda: piped(schedule="2F2B"),
    "two axes": lambda: pipeline.run(("pp", "dp")),
    "asked before the first call": lambda: piped().place(W),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_refused(name: str, golden: Golden) -> None:
    with pytest.raises(ts.TesseraError) as found:
        ERRORS[name]()
    golden(found.value)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_slowest_stage_costs_as_little_as_can_be(parts: int) -> None:
    rng = np.random.default_rng(parts)
    for _ in range(20):
        costs = rng.integers(1, 30, 7).tolist()

        def slowest(starts: Any, costs: Any = costs) -> float:
            ends = [*starts[1:], len(costs)]
            return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))

        every = [(0, *c) for c in combinations(range(1, len(costs)), parts - 1)]
        assert slowest(balanced(costs, parts)) == min(map(slowest, every))


def test_traced_it_is_a_plain_function() -> None:
    """Recording without a run sees the stages in sequence."""

    model = piped()
    traced = graph.trace(lambda weights, x: model(weights, x), W, X)
    assert "contract" in str(traced)


@given(turns=st.integers(1, 20).flatmap(lambda n: st.permutations(range(n))))
def test_sums_over_microbatches_have_one_order_whatever_comes_first(turns: list[int]) -> None:
    def added(paired: bool) -> Any:
        totals: Totals[Any] = Totals(len(turns), paired)
        for m in turns:
            total: Any = m
            earlier, place = totals.earlier("weight", m)
            for other in earlier:  # a + b equals b + a, bit for bit
                total = tuple(sorted((other, total), key=str))
            totals.waiting[place] = total
        (whole,) = totals.waiting.values()
        return whole

    def ordered(x: Any) -> Any:
        return tuple(sorted(map(ordered, x), key=str)) if isinstance(x, tuple) else x

    assert added(paired=True) == ordered(adjacent_pairs(len(turns)))
    assert str(added(paired=False)).count("(") == len(turns) - 1


def residual(k: str) -> Callable[..., Any]:
    return lambda w, x: (w, x + ts.tanh(x @ w[k]))


def test_a_chain_of_steps_of_one_graph_is_not_merged_twice() -> None:
    """The second of three steps of one graph is in two pairs, of which only one can be merged."""
    half = MESH.slice(pp=0)
    kind = parse_type("f32[4]", half)
    first, then, again, last = (
        graph.trace(fn, kind)
        for fn in (lambda x: x + 1.0, lambda x: x * 2.0, lambda x: x * x, lambda x: x - 3.0)
    )
    chain = [first, then, again, again, again, last]
    steps = tuple(Compute((i,), (i + 1,), g, stage=0) for i, g in enumerate(chain))
    many = Schedule("chain", MESH, (kind,) * (len(chain) + 1), (0,), (len(chain),), steps)
    made = merged(many)
    there = {*made.inputs, *(b for step in made.steps for b in step.writes)}
    assert there.issuperset(b for step in made.steps for b in step.reads)
    value = np.arange(4, dtype=np.float32)
    for step in made.steps:
        (value,) = evaluate(step.graph, [value])
    np.testing.assert_array_equal(value, ((np.arange(4) + 1.0) * 2.0) ** 8 - 3.0)


def schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Returns the schedule of a training step with one step per unit, and the merged one that
    runs."""
    seen: list[Any] = []
    monkeypatch.setattr(builder, "merged", lambda s: seen.append(s) or merged(s))
    parts = [residual("a"), residual("b"), residual("d"), lambda w, x: x @ w["c"]]
    mesh = dist.Mesh.parse("pp=2")
    model = pipeline.compose(2, parts, mesh=mesh, schedule=name, microbatches=4)

    def step(weights: Any, x: Any) -> Any:
        loss = (model(weights, x) ** 2).mean()
        grads = ts.grad(loss, weights)
        return loss, {k: w - 0.1 * grads[k] for k, w in weights.items()}

    made = ts.jit(step).plan(dict.fromkeys("abcd", W["a"]), X)
    return seen[-1], made


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("name", pipeline.SCHEDULES)
def test_steps_are_one_where_nothing_has_to_wait_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, one = schedules(name, monkeypatch)
    if name != "GPipe":  # its stages wait for others after each step
        assert len(one.steps) < len(apart.steps)
        assert len({s.graph for s in one.steps}) < len({s.graph for s in apart.steps})
    verify_schedule(one)
    assert parse(one.text).text == one.text
    rng = np.random.default_rng(3)
    given = [rng.normal(size=apart.buffers[b].shape).astype(np.float32) for b in apart.inputs]
    for a, b in zip(results(apart, given), results(one, given), strict=True):
        np.testing.assert_array_equal(a, b)

    def waits(s: Any) -> list[set[str]]:
        """The table's units that each send waits for. Each rank runs its steps in order."""
        made = {b: i for i, step in enumerate(s.steps) for b in step.writes}
        before: list[set[str]] = []
        last: dict[Any, int] = {}
        for i, step in enumerate(s.steps):
            needs = {made[b] for b in step.reads if b in made}
            if not isinstance(step, Send):
                needs |= {last[m] for m in [step.graph.mesh] if m in last}
                last[step.graph.mesh] = i
            before.append(set(step.note.split()).union(*(before[k] for k in needs)))
        return [x for x, step in zip(before, s.steps, strict=True) if isinstance(step, Send)]

    assert waits(one) == waits(apart)


@pytest.mark.usefixtures("oracle")
def test_what_moves_inside_of_stages_and_between_them_is_told() -> None:
    mesh = dist.Mesh.parse("pp=2,tp=2")
    parts = [lambda w, x: (w, ts.tanh(x @ w["a"])), lambda w, x: x @ w["b"]]
    model = pipeline.compose(2, parts, mesh=mesh, schedule="1F1B", microbatches=4)

    def step(weights: Any, x: Any) -> Any:
        return ts.grad((model(weights, x) ** 2).mean(), weights)

    where = {"a": "[8@tp, 8]", "b": "[8, 8@tp]"}
    weights = {k: ts.tensor(W[k], mesh=mesh, layout=t) for k, t in where.items()}
    made = ts.jit(step).plan(weights, X)
    lines = [line.split(":")[1].split() for line in graph.comm_trace(made)]
    sends = [s for s in made.steps if isinstance(s, Send)]
    # No transfer from the whole mesh to its slice: the slice already holds its part.
    moved = [t for s in sends for b, t in zip(s.reads, s.types) if made.buffers[b].mesh != mesh]
    assert sum(len(s.types) for s in sends) - len(moved) == 3  # two weights and the batch
    assert [line[:2] for line in lines].count(["send", "pp"]) == len(moved)
    moved = Counter(n.op for n, times in made.collectives() for _ in range(times))
    assert moved == Counter(line[0] for line in lines if line[0] != "send")
    assert moved["all_reduce"] >= 4  # at least one per microbatch
    assert {s.kind for s in made.steps} == {"compute", "region", "send"}
    assert {s.kind for r in made.steps if isinstance(r, Region) for s in r.body.steps} == {
        "compute", "collective",
    }  # fmt: skip
    again = parse(made.text)
    assert again.text == made.text and again.hash == made.hash
    verify_schedule(again)


def results(s: Any, given: list[Any]) -> list[Any]:
    """The results of the steps of `s` in sequence, by NumPy."""
    env = dict(zip(s.inputs, given, strict=True))
    for step in s.steps:
        values = [env[b] for b in step.reads]
        env.update(zip(step.writes, evaluate(step.graph, values), strict=True))
    return [env[b] for b in s.outputs]


@pytest.mark.usefixtures("oracle")
def test_what_two_nodes_give_to_an_earlier_stage_is_added_up_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, made = schedules("GPipe", monkeypatch)
    back = [t.shape for s in made.steps if isinstance(s, Send) and s.stage for t in s.types]
    assert back == [(4, 8)] * 4  # x + f(x) has two gradients


# -- gradients are reduced while other stages work -------------------------------------------------
DP_PP = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 4})


def reduced(kind: str, overlap: bool | None, clip: bool = False) -> Schedule:
    """The schedule of a training step with its batch split over dp."""
    model = pipeline.run(mesh_axes=("pp",), schedule=kind, microbatches=8, mesh=DP_PP)(deep)

    def step(w: Any, x: Any) -> Any:
        loss = (model(w, x) ** 2).mean()
        grads = ts.grad(loss, w)
        if clip:
            grads = optim.clip_by_global_norm(grads, 1.0)[0]
        return loss, {k: v - 0.1 * grads[k] for k, v in w.items()}

    x = ts.tensor(np.ones((32, 8), np.float32), mesh=DP_PP, layout="[32@dp, 8]")
    weights = {f"w{i}": np.ones((8, 8), np.float32) for i in range(8)}
    with replaced(schedule=ScheduleOptions(overlap=overlap)):
        return ts.jit(step).plan(weights, x)


def deep(w: Any, x: Any) -> Any:
    for i in range(8):
        x = ts.tanh(x @ w[f"w{i}"])
    return x


def ends(s: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """Returns, by stage, its last microbatch step, and the step that reduces its accumulated
    gradients."""
    last: dict[int, int] = {}
    for i, step in enumerate(s.steps):
        for stage, _ in re.findall(r"\b(\d+)([FBIW])\d+\b", step.note):
            last[int(stage)] = i
    reduces = {}
    for stage, i in last.items():
        read = [k for k in range(i, len(s.steps)) if "sum" in s.steps[k].note.split()
                and (k == i or {*s.steps[k].reads} & {*s.steps[i].writes})]  # fmt: skip
        reduces[stage] = read[0]
        moved = {n.op for n in s.steps[read[0]].nodes if n.is_collective}
        assert "all_reduce" in moved, (stage, moved)
    return last, reduces


@pytest.mark.parametrize("kind", pipeline.SCHEDULES)
def test_gradients_of_a_stage_are_reduced_while_others_work(kind: str, oracle: Any) -> None:
    s = reduced(kind, None, clip=kind == "1F1B")
    last, reduces = ends(s)
    for stage, i in reduces.items():
        # A rank runs its steps in the given order, without another step between these.
        between = s.steps[last[stage] + 1 : i]
        own = [x for x in between if x.stage == s.steps[i].stage and not isinstance(x, Send)]
        assert not own, (stage, [x.note for x in own])
        # A reader of the stage's last step gets its values before the reduction begins.
        late = [x for x in s.steps[i:] if isinstance(x, Send) and x.note != "back"]
        assert not any({*x.reads} & {*s.steps[last[stage]].writes} for x in late)
    assert len(last) in (4, 8) and sum(i < max(last.values()) for i in reduces.values()) >= 3
    s = reduced(kind, False)
    last, reduces = ends(s)
    assert min(reduces.values()) >= max(last.values())  # the reductions come after all stages


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize(
    ("axes", "devices"), [(("pp", "dp"), "512..1023"), (("dp", "pp"), "1..1023:2")]
)
def test_texts_of_a_wide_mesh_name_their_devices_as_ranges(
    axes: tuple[str, str], devices: str
) -> None:
    """Texts of 1,024 devices, 512 per stage; all are parsed back."""
    mesh = dist.Mesh(axes, shape={"pp": 2, "dp": 512})
    model = pipeline.compose(2, [layer("a"), last], mesh=mesh, microbatches=4)
    rows = parse_type("f32[2048@dp, 8]", mesh)
    made = graph.trace(lambda w, x: ts.mean(model(w, x)), W, rows).schedule
    assert f"stage 1 on devices {devices}: " in model.plan_text()
    assert max(map(len, made.text.splitlines())) < 400
    assert f"devices={devices}" in made.text and f'devices="{devices}"' in made.text
    again = parse(made.text)
    assert again.text == made.text and again.hash == made.hash
