"""Memory plans: persistent bytes against formulas, and lifetimes of buffers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, nn, optim
from tessera.core.layout import TensorType, parse_type
from tessera.core.mesh import Mesh
from tessera.cost import memory
from tessera.cost.liveness import WORKSPACE, Liveness, Occupied
from tessera.cost.memory import memory_plan, stage_plans
from tessera.cost.program import of_graph, of_schedule
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.schedule import Compute, Schedule, Send
from tessera.show.mesh_picture import plain_text
from tessera.show.plan_view import Traffic, planned, planned_memory, render_plan, traffic

KIB = 1024


def zero(stage: int, axis: str) -> Any:
    return dist.strategy("zero_redundancy_optimizer", axis, stage=stage)


def planned_step(
    shapes: dict[str, tuple[int, ...]], plan: Any, mesh: Mesh, optimizer: Any
) -> tuple[Graph, dict[str, Any]]:
    """Records a training step over weights of these shapes, with its persistent values."""
    weights = dist.place({k: nn.Parameter(*s) for k, s in shapes.items()}, plan, mesh)
    state = optimizer.init(weights, plan)
    # One row of the batch per device.
    types = {k: parse_type(f"f32[{mesh.size}]", mesh) for k in shapes}
    x = {k: plan.batch(t) for k, t in types.items()}

    def step(weights: Any, state: Any, x: Any) -> Any:
        loss = sum((w * w).sum() * x[k].mean() for k, w in weights.items())
        grads = ts.grad(loss, weights, layout=plan)
        return optimizer.update(weights, grads, state)

    gradients = {k: plan.gradient(k, w.type) for k, w in weights.items()}
    held = {"weights": weights, "gradients": gradients, "optimizer": state}
    return planned(step, weights, state, x), held


def split_bytes(shape: tuple[int, ...], n: int) -> int:
    """f32 bytes of the largest piece: the largest dim that n divides, or else the largest dim, is
    split into n pieces, rounded up."""
    even = [s for s in shape if s % n == 0]
    cut = max(even or shape)
    return 4 * math.prod(shape) // cut * -(-cut // n)


def check_formulas(
    shapes: dict[str, tuple[int, ...]], plan: Any, mesh: Mesh, stage: int, n: int
) -> None:
    """Asserts W bytes of weights, W of gradients and K·W of state, each divided by n from its ZeRO
    stage on."""
    whole = sum(4 * math.prod(s) for s in shapes.values())
    part = sum(split_bytes(s, n) for s in shapes.values())
    for optimizer, k in ((optim.AdamW(0.1), 2), (optim.Momentum(0.1), 1)):
        graph, held = planned_step(shapes, plan, mesh, optimizer)
        rows = planned_memory(graph, held).persistent_rows
        counter = 4  # bytes of the step count
        assert rows["weights"] == (part if stage >= 3 else whole)
        assert rows["optimizer"] == k * (part if stage >= 1 else whole) + counter
        gradients = sum(t.local_bytes for t in held["gradients"].values())
        assert gradients == (part if stage >= 2 else whole)


# -- formulas -------------------------------------------------------------------------------------
EVEN = {"a": (64, 16), "b": (8, 24), "c": (32,)}
UNEVEN = {"a": (7, 5), "b": (13,), "c": (9, 10), "d": (3, 1, 2)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_zero_over_any_axis_holds_what_the_formulas_say(
    stage: int, axis: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    check_formulas(shapes, zero(stage, axis), mesh, stage, mesh.sizes[axis])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_hybrid_zero_splits_over_one_axis_and_repeats_over_the_other(
    stage: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    mesh = Mesh.parse("out=3,in=4")
    plan = zero(stage, "in") + dist.strategy("data_parallel", "out")
    check_formulas(shapes, plan, mesh, stage, 4)


def test_where_all_divides_zero_3_is_the_textbook_formula() -> None:
    mesh = Mesh.parse("dp=8")
    graph, held = planned_step(EVEN, zero(3, "dp"), mesh, optim.AdamW(0.1))
    w = sum(4 * math.prod(s) for s in EVEN.values())
    rows = planned_memory(graph, held).persistent_rows
    assert rows == {"weights": w // 8, "optimizer": 2 * w // 8 + 4}
    assert sum(t.local_bytes for t in held["gradients"].values()) == w // 8


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(2, 8),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
)
def test_zero_of_any_shapes(sizes: list[list[int]], n: int, r: int, stage: int) -> None:
    shapes = {f"w{i}": tuple(s) for i, s in enumerate(sizes)}
    mesh = Mesh.parse(f"in={n},out={r}")
    plan = zero(stage, "in") + dist.strategy("data_parallel", "out")
    whole = sum(4 * math.prod(s) for s in shapes.values())
    for kind, first in ((plan.weight, 3), (plan.gradient, 2), (plan.optimizer, 1)):
        types = [kind(k, parse_type(f"f32[{', '.join(map(str, s))}]", mesh))
                 for k, s in shapes.items()]  # fmt: skip
        part = sum(split_bytes(s, n) for s in shapes.values())
        assert sum(t.local_bytes for t in types) == (part if stage >= first else whole)


# -- which values hold a buffer -------------------------------------------------------------------
def need(b: Builder, *outs: Node, **how: Any) -> int:
    return Liveness(of_graph(b.graph(list(outs))), **how).peak


def square(b: Builder, n: int = 64, dtype: str = "f32") -> Node:
    """An input of n × n elements: 16 KiB for f32 and n = 64."""
    return b.input(parse_type(f"{dtype}[{n}, {n}]"))


def product(b: Builder, x: Node, y: Node) -> Node:
    return b("contract", x, y, index="a b, b c -> a c")


def total(b: Builder, x: Node) -> Node:
    return b("sum", x, dims=(0, 1))


def test_chains_of_elements_hold_nothing_before_short_sums() -> None:
    for n, size in ((32, 0), (64, 16 * KIB)):
        b = Builder("f")
        x = square(b, n)
        assert need(b, total(b, b("exp", b("mul", b("tanh", x), x)))) == size


def test_dear_work_for_two_readers_is_done_once_and_cheap_work_twice() -> None:
    b = Builder("f")
    y = b("tanh", square(b, 32))
    assert need(b, total(b, y), total(b, b("neg", y))) == 4 * KIB
    b = Builder("f")
    y = b("neg", square(b, 32))
    assert need(b, total(b, y), total(b, b("exp", y))) == 0


def test_what_an_op_works_on_besides_waits_for_no_result() -> None:
    b = Builder("f")
    assert need(b, total(b, b("cumsum", square(b), dim=0))) == 2 * 16 * KIB
    b = Builder("f")
    # The operand is dead after the copy.
    assert need(b, total(b, b("cumsum", product(b, *[square(b)] * 2), dim=0))) == 2 * 16 * KIB


def test_a_product_reads_buffers_and_fills_one() -> None:
    b = Builder("f")
    x = square(b)
    # Its operand needs a buffer, unless only the order of its dims changes.
    assert need(b, total(b, product(b, b("exp", x), x))) == 32 * KIB
    b = Builder("f")
    x = square(b)
    assert need(b, total(b, product(b, b("transpose", x, perm=(1, 0)), x))) == 16 * KIB


def test_a_buffer_is_free_after_its_last_reader() -> None:
    b = Builder("f")
    x = y = square(b)
    for _ in range(5):
        y = product(b, y, x)
    assert need(b, total(b, y)) == 2 * 16 * KIB


def test_what_waits_for_a_late_reader_stays() -> None:
    b = Builder("f")
    x = y = square(b)
    steps = [y := product(b, y, x) for _ in range(5)]
    for z in reversed(steps[:-1]):
        y = product(b, y, z)
    # At the turning point all five are live; then one product and the values that still wait.
    assert need(b, total(b, y)) == (5 + 1) * 16 * KIB


def test_elements_are_written_over_an_operand_that_ends() -> None:
    b = Builder("f")
    x = square(b)
    y = b("tanh", product(b, x, x))
    assert need(b, total(b, product(b, y, x))) == 2 * 16 * KIB


def test_results_are_not_temporary_and_may_hold_what_comes_before_them() -> None:
    b = Builder("f")
    x = square(b)
    out = b("tanh", product(b, x, x))
    assert need(b, out) == 16 * KIB
    assert need(b, out, fresh=True) == 0
    b = Builder("f")
    x = square(b)
    assert need(b, product(b, x, x)) == 0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=60),
)
def test_buffers_are_free_where_no_span_overlaps(spans: list[tuple[int, int]]) -> None:
    buffers = Occupied(41)
    kept: list[list[tuple[int, int]]] = []
    for first, last in map(sorted, spans):
        taken = [any(a <= last and first <= b for a, b in mine) for mine in kept]
        assert [bool(buffers.at(first, last) >> i & 1) for i in range(len(kept))] == taken
        i = (*taken, False).index(False)
        if i == len(kept):
            kept.append([])
        kept[i].append((first, last))
        buffers.take(first, last, 1 << i)


def test_narrow_floats_are_widened_for_products_where_the_device_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = Builder("f")
    x = square(b, dtype="bf16")
    out = total(b, product(b, product(b, x, x), x))
    wide, narrow = need(b, out, widens=True), need(b, out, widens=False)
    assert wide == 2 * 16 * KIB and narrow == 2 * 8 * KIB
    for has, want in ((True, narrow), (False, wide)):
        monkeypatch.setattr(memory, "MULTIPLIES_BF16", has)
        assert memory.memory_plan(b.graph([out])).temporary == want


def test_a_gpu_computes_elementwise_values_again_and_its_products_have_a_workspace() -> None:
    b = Builder("f")
    y = b("exp", square(b))
    shares = b("div", y, b("reshape", b("sum", y, dims=(1,)), shape=(64, 1)))
    assert need(b, total(b, shares)) == 16 * KIB + 64 * 4
    assert need(b, total(b, shares), gpu=True) == 64 * 4 + 4
    b = Builder("f")
    x = square(b, dtype="bf16")
    out = total(b, product(b, product(b, x, x), x))
    graph = b.graph([out])
    assert memory.memory_plan(graph, on="gpu").temporary == 2 * 8 * KIB + WORKSPACE
    assert memory.memory_plan(graph, on="cpu", widens=False).temporary == 2 * 8 * KIB


def test_a_loop_that_runs_once_is_its_body() -> None:
    def loops(x: ts.Tensor, w: ts.Tensor, n: int) -> ts.Tensor:
        def body(h: ts.Tensor, row: ts.Tensor) -> Any:
            return ts.tanh(h @ w) * row, (h @ w).sum()

        y, ys = ts.scan(body, x, ts.ones((n, 64)))
        return ys.sum() + y.sum()

    x = parse_type("f32[64, 64]")
    one, two = (planned(lambda x, w, n=n: loops(x, w, n), x, x) for n in (1, 2))
    assert not [n for n in of_graph(one).nodes if n.op in ("scan", "item")]
    assert [n.op for n in of_graph(two).nodes].count("scan") == 1
    assert Liveness(of_graph(one)).peak == 2 * 16 * KIB + 4  # no carry besides the two products
    assert Liveness(of_graph(two)).peak > 3 * 16 * KIB


def test_a_loop_needs_its_stack_from_the_beginning_and_one_turn_inside() -> None:
    def f(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        def body(h: ts.Tensor, _: Any) -> Any:
            return ts.tanh(ts.exp(h @ w) @ w), ts.exp(h)

        y, ys = ts.scan(body, x, ts.zeros((7,)))
        return ys.sum() + y.sum()

    x = parse_type("f32[64, 64]")
    graph = planned(f, x, x)
    (loop,) = (n for n in graph.nodes if n.op == "scan")
    inner = Liveness(of_graph(loop.attrs["body"]), body=True).peak
    stack = (1 + 7) * 16 * KIB  # the carry and seven rows
    # A product and its operand; then the carry and the row to stack.
    assert inner == 2 * 16 * KIB
    assert Liveness(of_graph(graph)).peak == stack + inner + 7 * 4  # and the scanned values


def test_sums_that_the_compiler_makes_one_hold_all_of_them() -> None:
    mesh = Mesh.parse("dp=4")
    b = Builder("f")
    w = b.input(parse_type("f32[64, 64]", mesh))
    x = b.input(parse_type("f32[64, 64@dp]", mesh))
    parts = []
    for _ in range(3):
        parts.append(product(b, x, b("transpose", x, perm=(1, 0))))
        x = b("exp", x)
    wide = [b.redistribute(g, g.type.complete(), "gradient") for g in parts]
    together = [total(b, b("mul", b("mul", g, g), w)) for g in wide]
    assert need(b, *together) == 3 * 2 * 16 * KIB  # before and after, all three
    # If one is read before the next is ready, they are not merged.
    b = Builder("f")
    w = y = b.input(parse_type("f32[64, 64@dp]", mesh))
    for _ in range(3):
        y = product(b, y, b("transpose", w, perm=(1, 0)))
        y = b.redistribute(y, y.type.complete(), "for the product")
        y = b.redistribute(b("mul", y, y), w.type)
    assert need(b, y) == 2 * 16 * KIB


def test_a_schedule_needs_what_its_graph_needs() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    shapes = {"a": (64, 64), "b": (64, 16)}
    graph, _ = planned_step(shapes, zero(3, "dp"), mesh, optim.AdamW(0.1))
    steps = build_schedule(graph)
    assert len(steps.steps) > 2
    assert Liveness(of_schedule(steps)).peak == Liveness(of_graph(graph)).peak


def test_an_empty_program_needs_nothing() -> None:
    b = Builder("f")
    x = square(b)
    plan = memory_plan(b.graph([x]))
    assert plan.rows == {"batch": 16 * KIB} and plan.peak == 16 * KIB


# -- by category ----------------------------------------------------------------------------------
def test_what_takes_no_arguments_place_is_a_result() -> None:
    b = Builder("f")
    x, w = square(b), square(b)
    graph = b.graph([b("add", x, w), b("exp", total(b, w)), b("cast", x, dtype=ts.bf16)])
    given = {"weights": [w.type]}
    kept = memory_plan(graph, given)
    assert (kept.persistent, kept.batch, kept.results) == (16 * KIB, 16 * KIB, 8 * KIB + 4)
    assert memory_plan(graph, given, donated=False).results == 16 * KIB + 8 * KIB + 4


def test_what_is_handed_back_twice_is_there_twice() -> None:
    b = Builder()
    x = b.input(parse_type("f32[64]"), "x")
    y = b("neg", x)
    for ends, size in (([y, y], 512), ([x, y], 512), ([x, x], 512), ([y], 256)):
        assert memory_plan(b.graph(ends), donated=False).results == size
    for ends, size in (([x, y], 256), ([x], 0), ([x, x], 256), ([y, y], 256)):
        assert memory_plan(b.graph(ends)).results == size


def test_arrays_that_are_held_count_as_such() -> None:
    w, x = {"w": np.ones((8, 4), np.float32)}, np.ones((2, 8), np.float32)
    plan = planned_memory(planned(lambda w, x: (x @ w["w"]).sum(), w, x), {"weights": w})
    assert (plan.rows["weights"], plan.batch) == (128, 64)


def test_what_is_no_program_has_no_plan() -> None:
    g = ts.graph.trace(lambda x: x + 1.0, parse_type("f32[4]"))
    for make, said in (
        (lambda: memory_plan(ts.tanh), "memory_plan: takes a Graph, not a function"),
        (lambda: stage_plans(g), "stage_plans: takes a Schedule, not a Trace"),
        (lambda: planned_memory(g, [g]), "planned_memory: what is held cannot be"),
    ):
        with pytest.raises(ts.UsageError, match=said):
            make()


def test_gradients_and_activations_wait_and_the_rest_is_worked_on() -> None:
    b = Builder("f")
    x, w = b.input(parse_type("f32[128, 64]")), square(b)
    h = b("tanh", b("contract", x, w, index="a b, b c -> a c"))  # kept, 32 KiB
    g = b("contract", x, x, index="a b, a c -> b c")  # as large as the weight, 16 KiB
    big = b("contract", x, x, index="a b, c b -> a c")  # 64 KiB
    out = b("sum", b("contract", big, h, index="a b, b c -> a c"), dims=(0, 1))
    graph = b.graph([out, total(b, b("exp", g))])
    plan = memory_plan(graph, {"weights": [w.type]}, [w.type])
    assert (plan.gradients, plan.activations, plan.working) == (16 * KIB, 0, 128 * KIB)
    unknown = memory_plan(graph, {"weights": [w.type]})
    assert unknown.activations == 16 * KIB and unknown.temporary == plan.temporary


def planned_gpt(config: nn.GPTConfig, plan: Any, mesh: Mesh) -> tuple[Graph, dict[str, Any]]:
    """Records a bf16 training step of one sequence, with its persistent values."""
    model = dist.place(nn.GPT(config), plan, mesh)
    weights = model.parameters()
    ids = dist.place(np.zeros((1, config.seq), np.int32), plan, mesh, kind="batch")
    optimizer = optim.AdamW(0.1)
    state = optimizer.init(weights, plan)

    def step(model: Any, state: Any, ids: Any) -> Any:
        loss = model.loss(ids, ids)
        return optimizer.update(weights, ts.grad(loss, model.parameters(), layout=plan), state)

    with ts.autocast("bf16"):
        graph = planned(step, model, state, ids)
    gradients = {k: plan.gradient(k, w.type) for k, w in weights.items()}
    return graph, {"weights": weights, "gradients": gradients, "optimizer": state}


def test_what_layers_keep_under_recomputation_are_activations() -> None:
    """Llama 3 70B with tensor parallelism: each layer's input is kept, and gradients are
    stacked."""
    layers, seq, d, hidden, tp = 80, 8192, 8192, 28672, 8
    config = nn.GPTConfig(
        vocab=128256, seq=seq, d=d, layers=layers, heads=64, kv_heads=8, hidden=hidden,
        activation="swiglu", norm="rms", positions="rotary", remat=True,
    )  # fmt: skip
    mesh = Mesh.parse(f"tp={tp}")
    graph, held = planned_gpt(config, dist.strategy("tensor_parallel"), mesh)
    plan = planned_memory(graph, held)
    inputs = layers * seq * d * 4  # the residual stream is f32
    a_layer = d * d + 2 * d * 8 * 128 + d * d + 3 * d * hidden
    assert inputs <= plan.activations < 1.03 * inputs
    assert layers * a_layer * 2 // tp <= plan.gradients < 1.1 * layers * a_layer * 2 // tp
    assert plan.working < 0.25 * inputs


# -- pipelines ------------------------------------------------------------------------------------
def two_stages(products: int = 3) -> tuple[Schedule, Mesh, Mesh]:
    """A schedule of two stages: y = x @ x ... + x on stage 0, then y @ y @ y + y on stage 1."""
    mesh = Mesh.parse("pp=2,dp=2")
    first, second = mesh.slice(pp=0), mesh.slice(pp=1)
    kinds: list[TensorType] = [parse_type("f32[64, 64]", m) for m in (first, first, second, second)]

    def step(on: Mesh, count: int) -> Graph:
        b = Builder("stage")
        x = b.input(parse_type("f32[64, 64]", on))
        y = x
        for _ in range(count):
            y = product(b, y, x)
        return b.graph([b("add", y, x)])

    steps = (
        Compute((0,), (1,), step(first, products)),
        Send((1,), (2,), (kinds[2],)),
        Compute((2,), (3,), step(second, 2), stage=1),
    )
    return Schedule("f", mesh, tuple(kinds), (0,), (3,), steps), first, second


def test_each_stage_holds_its_own_buffers_and_what_its_steps_need() -> None:
    schedule, first, second = two_stages()
    plans = stage_plans(schedule, {"weights": [schedule.buffers[0]]})
    # Stage 0: its weight; the buffer of y, used by the first and the last product; and the second.
    assert plans[first].rows == {"weights": 16 * KIB, "temporaries": 32 * KIB}
    # Stage 1 has no donated argument: y, the result, which holds one product, and the other one.
    assert plans[second].rows == {"results": 16 * KIB, "temporaries": 32 * KIB}


def test_what_a_stage_keeps_for_the_way_back_are_activations() -> None:
    x = parse_type("f32[64, 64]")

    def there(x: ts.Tensor, w: ts.Tensor) -> Any:
        return ts.scan(lambda h, _: (ts.tanh(h @ w), h), x, ts.zeros((7,)))

    def back(g: ts.Tensor, w: ts.Tensor, kept: ts.Tensor) -> ts.Tensor:
        return ts.scan(lambda g, h: ((g * h) @ w, ()), g, kept)[0].sum()

    kept = parse_type("f32[7, 64, 64]")
    steps = (
        Compute((0, 1), (2, 3), ts.graph.trace(there, x, x)),
        Compute((2, 1, 3), (4,), ts.graph.trace(back, x, x, kept)),
    )
    schedule = Schedule("f", None, (x, x, x, kept, parse_type("f32[]")), (0, 1), (4,), steps)
    # The loop reads it in place, row by row.
    at_end = stage_plans(replace(schedule, mesh=Mesh.parse("dp=1")), {"weights": [x]})
    (plan,) = at_end.values()
    assert plan.activations == 7 * 16 * KIB


def test_a_result_in_the_place_of_what_was_given_up_adds_nothing() -> None:
    schedule, first, _ = two_stages(products=0)
    held = {"weights": [schedule.buffers[0]]}
    assert stage_plans(schedule, held)[first].rows == {
        "weights": 16 * KIB, "temporaries": 16 * KIB,
    }  # fmt: skip
    given_up = replace(schedule, donated=(0,))
    assert stage_plans(given_up, held)[first].rows == {"weights": 16 * KIB}


def test_the_plan_of_a_pipeline_has_a_column_for_each_stage() -> None:
    schedule, first, _ = two_stages()
    held = {"weights": [schedule.buffers[0]]}
    text = plain_text(render_plan(first, schedule, {}, held)).splitlines()
    sent = 64 * 64 * 4 // 2  # to one of two stages
    assert traffic(schedule) == [Traffic("send", ("pp",), "to another stage", 1, sent)]
    at = text.index("planned peak of a step")
    assert text[at + 1 : at + 9] == [
        "              stage 0   stage 1",
        "───────────────────────────────",
        "weights        16 KiB       0 B",
        "temporaries    32 KiB    32 KiB",
        "results           0 B    16 KiB",
        "",
        "together       48 KiB    48 KiB",
        "",
    ]


def test_what_lies_there_already_is_not_copied() -> None:
    mesh = Mesh.parse("pp=2,dp=2")
    first, second = mesh.slice(pp=0), mesh.slice(pp=1)
    whole = parse_type("f32[64, 64]", mesh)
    kinds = (whole, whole.on(first), whole.on(second))
    steps = tuple(Send((0,), (i,), (kinds[i],)) for i in (1, 2))
    schedule = Schedule("f", mesh, kinds, (0,), (1, 2), steps)
    assert [p.peak for p in stage_plans(schedule).values()] == [16 * KIB, 16 * KIB]


def test_a_schedule_on_one_mesh_is_one_stage() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    graph, held = planned_step(EVEN, zero(1, "dp"), mesh, optim.SGD(0.1))
    plans = stage_plans(
        build_schedule(graph), {"weights": [w.type for w in held["weights"].values()]}
    )
    assert list(plans) == [mesh]
    assert plans[mesh].persistent == sum(4 * math.prod(s) for s in EVEN.values())
