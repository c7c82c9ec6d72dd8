"""Plans and traces: a step's memory and traffic, and a name for each collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tessera as ts
from tessera import dist, nn
from tessera.core.layout import parse_type
from tessera.core.mesh import Mesh
from tessera.cost.flops import device_flops
from tessera.cost.memory import memory_plan
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.comm_trace import trace_lines
from tessera.show.mesh_picture import plain_text
from tessera.show.plan_view import Traffic, local_bytes, planned, render_plan, traffic
from tessera.train.throughput import model_flops, product_flops

MESH = Mesh.parse("dp=2,tp=4")


def column_then_row() -> Graph:
    """Two matrix products with weights split over tp, and a partial sum to complete."""
    texts = ("f32[16@dp, 64]", "f32[64, 256@tp]", "f32[256@tp, 64]")
    x, up, down = (parse_type(t, MESH) for t in texts)
    return planned(lambda x, up, down: ts.sum((x @ up) @ down, 0), x, up, down)


# ---- traffic -----------------------------------------------------------------------------------
def test_traffic_is_grouped_and_counts_loops() -> None:
    def body(carry: ts.Tensor, x: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        return carry, dist.all_gather(x, "tp")

    def step(xs: ts.Tensor, g: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        _, ys = ts.scan(body, ts.zeros(()), xs)
        return ys, dist.all_reduce(g)

    xs, g = parse_type("f32[5, 8@tp]", MESH), parse_type("f32[512, 1024@tp] +dp", MESH)
    graph = planned(step, xs, g)
    assert traffic(graph) == [
        Traffic("all_reduce", ("dp",), "as written", 1, 512 * 1024),
        # 5 iterations; each receives 3 blocks of 2 numbers from other devices.
        Traffic("all_gather", ("tp",), "as written", 5, 5 * 3 * 2 * 4),
    ]
    assert sum(r.wire_bytes for r in traffic(graph)) == graph.wire_bytes


def test_what_has_another_reason_is_another_row() -> None:
    b = Builder("step")
    x = b.input(parse_type("f32[8, 8] +tp", MESH))
    y = b.input(parse_type("f32[8, 8] +tp", MESH))
    done = [
        b.redistribute(n, n.type.complete(), why) for n, why in ((x, "gradient"), (y, "for add"))
    ]
    assert [(r.reason, r.times) for r in traffic(b.graph(done))] == [
        ("gradient", 1),
        ("for add", 1),
    ]


# ---- the plan ----------------------------------------------------------------------------------
def test_a_plan_counts_what_changes_in_the_arguments() -> None:
    def step(state: dict[str, ts.Tensor], g: ts.Tensor) -> ts.Tensor:
        state["w"] = dist.all_reduce(g)  # not a result of the function
        return ts.sum(g * 0.0)

    w, g = parse_type("f32[8, 8]", MESH), parse_type("f32[8, 8] +dp", MESH)
    graph = planned(step, {"w": w}, g)
    assert graph.name == "step"
    assert ("dp",) in [r.axes for r in traffic(graph) if r.wire_bytes == 8 * 8 * 4]


def test_a_plan_shows_mesh_memory_and_wires() -> None:
    graph = column_then_row()
    weights = {"up": graph.inputs[1].type, "down": graph.inputs[2].type}
    assert local_bytes(weights) == 2 * 64 * 64 * 4
    held = {"weights": weights, "gradients": list(weights.values())}
    text = plain_text(render_plan(MESH, graph, weights, held, model_flops=2_000_000), 100)
    assert text.splitlines() == [
        "dp × tp mesh, 2 × 4 · 8 devices",
        "┌──────┬──────┬──────┬──────┬──────┐",
        "│      │ tp 0 │ tp 1 │ tp 2 │ tp 3 │",
        "├──────┼──────┼──────┼──────┼──────┤",
        "│ dp 0 │  0   │  1   │  2   │  3   │",
        "├──────┼──────┼──────┼──────┼──────┤",
        "│ dp 1 │  4   │  5   │  6   │  7   │",
        "└──────┴──────┴──────┴──────┴──────┘",
        "",
        "32,768 parameters in 2 tensors",
        "name   layout            a device",
        "─────────────────────────────────",
        "up     f32[64, 256@tp]     16 KiB",
        "down   f32[256@tp, 64]     16 KiB",
        "",
        "memory",
        "              whole   a device   all devices",
        "────────────────────────────────────────────",
        "weights     128 KiB     32 KiB       256 KiB",
        "gradients   128 KiB     32 KiB       256 KiB",
        "",
        "together    256 KiB     64 KiB       512 KiB",
        "",
        "planned peak of a step",
        "              a device",
        "──────────────────────",
        "weights         32 KiB",
        "batch            2 KiB",
        "results          256 B",
        "temporaries      4 KiB",
        "",
        "together      38.2 KiB",
        "",
        "1 collective a step: a device receives 448 B",
        "kind         axes     times   receives   reason",
        "───────────────────────────────────────────────────────",
        "all_reduce   dp, tp       1      448 B   for the result",
        "",
        "1.0 MFLOP a step, 131.6 KFLOP on a device; the model's own products are 2.0 MFLOP",
    ]


def test_a_plan_of_one_device_has_no_wires_and_long_lists_are_cut() -> None:
    mesh = Mesh("dp", 1)
    types = {f"w{i}": parse_type("f32[4]", mesh) for i in range(30)}
    graph = planned(lambda **w: list(w.values()), *[])
    text = plain_text(render_plan(mesh, graph, types, {"weights": types}))
    assert "no collectives: nothing crosses a wire" in text
    assert "w23 " in text and "w24 " not in text and "… and 6 more" in text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda g, w: render_plan(MESH, g, nn.Linear(2, 2), {}), "render_plan: weights cannot be"),
        (lambda g, w: render_plan(MESH, g, {"a": 1}, {}), "render_plan: weights['a'] cannot be 1"),
        (lambda g, w: render_plan(MESH, ts.sum, w, {}), "memory_plan: takes a Graph"),
        (lambda g, w: traffic(ts.sum), "traffic: takes a Graph"),
        (lambda g, w: memory_plan(g, [w]), "memory_plan: what is held cannot be"),
        (lambda g, w: memory_plan(g, {"a": MESH}), "memory_plan: held['a'] cannot be Mesh"),
        (lambda g, w: memory_plan(g, {"a": w["up"]}), "memory_plan: held['a'] cannot be f32[64"),
        (
            lambda g, w: memory_plan(g, {"a": [ts.ones((2,))]}),
            "memory_plan: held['a'] cannot be [<Tensor f32[2]>]",
        ),
        (lambda g, w: memory_plan(g, {}, w), "memory_plan: gradients cannot be"),
    ],
)
def test_what_is_no_plan_is_said(make: Callable[..., Any], says: str) -> None:
    graph = column_then_row()
    with pytest.raises(ts.UsageError) as error:
        make(graph, {"up": graph.inputs[1].type})
    assert says in str(error.value)


def test_a_plan_for_a_folded_mesh_says_what_devices_hold() -> None:
    mesh = MESH.fold(onto="dp=1,tp=2")
    x, w = parse_type("f32[16@dp, 64]", mesh), parse_type("f32[64, 256@tp]", mesh)
    graph = planned(lambda x, w: (x @ w).sum(), x, w)
    lines = plain_text(render_plan(mesh, graph, {"w": w}, {"weights": w}), 100).splitlines()
    said = [" ".join(line.split()) for line in lines]
    assert "w f32[64, 256@tp] 32 KiB" in said  # half of it on each of two devices
    assert "weights 64 KiB 32 KiB 64 KiB" in said
    assert said[said.index("planned peak of a step") + 1] == "one place"
    assert "1 collective a step: a device receives 4 B" in said
    assert said[-1].endswith(", 66.0 KFLOP on one place")


# ---- FLOPs -------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=4"])
def test_the_models_flops_are_those_of_the_formula_on_every_mesh(mesh: str) -> None:
    batch, seq, d, layers, vocab = 4, 16, 32, 3, 64
    plan = dist.strategy("data_parallel")
    if "tp" in mesh:
        plan = plan + dist.strategy("tensor_parallel")
    model = nn.GPT(nn.GPTConfig(vocab, seq, d, layers, heads=4, positions="rotary"))
    dist.place(model, plan, Mesh.parse(mesh))
    ids = parse_type(f"i32[{batch}@dp, {seq}]", Mesh.parse(mesh))
    a_token = layers * (12 * d * d + 2 * seq * d) + d * vocab  # multiply-adds
    assert model_flops(model.loss, ids, ids) == 3 * 2 * batch * seq * a_token


def test_products_in_loops_count_each_turn() -> None:
    def loop(x: ts.Tensor) -> ts.Tensor:
        return ts.scan(lambda c, _: (c @ c, ()), x, ts.zeros((7,)))[0]  # type: ignore[no-any-return]

    graph = planned(loop, parse_type("f32[10, 10]"))
    assert product_flops(graph) == 7 * 2 * 10**3


@pytest.mark.parametrize(
    "x, w, share",
    [
        ("f32[16, 64]", "f32[64, 32]", 1),  # all devices compute the same
        ("f32[16@dp, 64]", "f32[64, 32]", 2),
        ("f32[16, 64@tp]", "f32[64@tp, 32]", 4),
        ("f32[16@dp, 64]", "f32[64, 32@tp]", 8),
    ],
)
def test_what_devices_compute_alike_each_of_them_computes(x: str, w: str, share: int) -> None:
    graph = planned(lambda x, w: x @ w, parse_type(x, MESH), parse_type(w, MESH))
    flops = 2 * 16 * 64 * 32
    assert (graph.flops, flops_in(graph, 5)) == (flops, (flops // share, 5 * flops // share))


def flops_in(graph: Graph, turns: int) -> tuple[int, int]:
    """Returns the FLOPs of a device in `graph`, and in a loop of `turns` iterations around it."""
    ends = [n.type for n in graph.inputs]

    def loop(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return ts.scan(lambda c, _: (c, x @ w), ts.zeros(()), ts.zeros((turns,)))[1]  # type: ignore[no-any-return]

    return device_flops(graph), device_flops(planned(loop, *ends))


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_the_local_view_counts_the_products_of_all_devices(turns: int) -> None:
    """Loops in the local view count them too."""

    @ts.distribute(strategy="data_parallel", mesh_axes=("dp", "tp"), mesh=MESH, batch="x")
    def local(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        for _ in range(turns == 0):
            x = x @ w
        x, _ = ts.scan(lambda c, _: (c @ w, ()), x, ts.zeros((turns,)))
        return x.mean()

    graph = planned(local, parse_type("f32[64@(dp,tp), 32]", MESH), parse_type("f32[32, 32]", MESH))
    products = max(1, turns) * 2 * 64 * 32 * 32
    assert product_flops(graph) == products
    assert products <= graph.flops <= 1.1 * products
    assert products / 8 <= device_flops(graph) <= 1.1 * products / 8


# ---- the trace ---------------------------------------------------------------------------------
def test_a_trace_line_names_kind_axes_bytes_line_and_scope() -> None:
    def step(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        with ts.named_scope("mlp"):
            return ts.exp(x @ w)

    x, w = parse_type("f32[16@dp, 256@tp]", MESH), parse_type("f32[256@tp, 64]", MESH)
    (line,) = trace_lines(planned(step, x, w))
    at = step.__code__.co_firstlineno + 2
    assert line == (
        "step: all_reduce  tp  receives 3 KiB  : f32[16@dp, 64]"
        f"  # test_plan_view.py:{at}  mlp  inserted for exp"
    )


def test_a_trace_counts_turns_and_is_empty_without_collectives() -> None:
    def step(xs: ts.Tensor) -> ts.Tensor:
        return ts.scan(lambda c, x: (c, dist.all_gather(x, "tp")), ts.zeros(()), xs)[1]  # type: ignore[no-any-return]

    (line,) = trace_lines(planned(step, parse_type("f32[5, 8@tp]", MESH)))
    assert line.startswith("step: all_gather  tp  receives 5 x 24 B  : f32[8]")
    assert trace_lines(planned(lambda x: x + 1.0, parse_type("f32[5, 8@tp]", MESH))) == []
