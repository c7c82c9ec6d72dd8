"""Simulated schedules against times that are computed by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.core.devices import recorded_for
from tessera.core.layout import parse_type
from tessera.core.machine.chip import CHIPS, Chip, Products
from tessera.core.machine.cluster_yaml import read, write
from tessera.core.machine.machine import Machine
from tessera.core.machine.presets import PRESETS, preset
from tessera.core.mesh import Mesh
from tessera.core.options import ScheduleOptions
from tessera.core.topology import Level, Link, Topology
from tessera.cost.collective_time import collective_time
from tessera.cost.collectives import price
from tessera.cost.step_time import kernels, step_time
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.schedule.algorithms.build import build
from tessera.ir.schedule.schedule import Schedule
from tessera.plan.machines import as_machine, machine_from_file, machine_of
from tessera.plan.simulate import simulate
from tessera.plan.timeline import Timeline
from tests.core.scheduled import scheduled

# 1 TFLOP/s of products, memory that takes no time, links of 1 GB/s and 4 GB/s without latency.
CHIP = Chip("toy", (Products("f32", 1e12),), 1e12, 1e30)
OUT, IN = Link("out", 0.0, 1e9), Link("in", 0.0, 4e9)


def machine(shared: bool = False, chip: Chip | None = CHIP) -> Machine:
    levels = (Level(2, OUT, shared=shared), Level(4, IN))
    return Machine("toy", Topology("toy", levels), ("node", "gpu"), (2, 1), chip=chip)


MESH = Mesh.parse("dp=2 tp=4")
MB = 1_000_000


def graph(make: Callable[[Builder, Callable[[str], Node]], list[Node]]) -> Graph:
    b = Builder("step")
    return b.graph(make(b, lambda text: b.input(parse_type(text, MESH))))


def run(g: Graph, overlap: bool | None = None, m: Machine | None = None, **how: Any) -> Timeline:
    return simulate(scheduled(g, ScheduleOptions(overlap=overlap)), m or machine(), **how)


def reduced(b: Builder, x: Node, *axes: str) -> Node:
    return b("all_reduce", x, axes=axes)


def test_collectives_on_one_link_take_turns() -> None:
    """An all-reduce of S bytes over n takes 2 (n - 1) / n S / W: 4 MB over dp take 4 ms."""
    line = run(graph(lambda b, x: [reduced(b, x(f"f32[{MB}] +dp"), "dp") for _ in range(2)]))
    assert line.step_s == pytest.approx(8e-3)
    assert line.exposed_s == pytest.approx(8e-3)
    assert line.link_bytes == {"node": 8 * MB}


def test_collectives_on_two_links_overlap() -> None:
    """16 MB over tp take 2 · 3/4 · 16 / 4000 s = 6 ms, and hide the 4 ms over dp in part."""
    line = run(
        graph(
            lambda b, x: [
                reduced(b, x(f"f32[{MB}] +dp"), "dp"),
                reduced(b, x(f"f32[{4 * MB}] +tp"), "tp"),
            ]
        )
    )
    assert line.step_s == pytest.approx(6e-3)
    waits = {t.axes: (t.time_s, t.exposed_s) for t in line.traffic}
    assert waits["dp",] == pytest.approx((4e-3, 2e-3))
    assert waits["tp",] == pytest.approx((6e-3, 4e-3))


def product(b: Builder, x: Callable[[str], Node]) -> Node:
    """A product of 2e9 FLOPs on a device: 2 ms."""
    return b("contract", x("f32[1000, 1000]"), x("f32[1000, 1000]"), index="a b, b c -> a c")


def test_overlap_hides_what_is_independent() -> None:
    g = graph(lambda b, x: [reduced(b, x(f"f32[{MB}] +dp"), "dp"), product(b, x)])
    hidden, apart, ordered = run(g), run(g, overlap=False), run(g, m=machine())
    assert hidden.step_s == pytest.approx(4e-3)
    assert hidden.exposed_s == pytest.approx(2e-3)
    assert hidden.traffic[0].hidden_s == pytest.approx(2e-3)
    assert apart.step_s == pytest.approx(6e-3)  # by the dependencies of the schedule
    assert ordered.step_s == pytest.approx(4e-3)
    alone = simulate(scheduled(g, ScheduleOptions()), machine(), overlap=False)
    assert alone.step_s == pytest.approx(6e-3)
    assert alone.compute_s == pytest.approx(2e-3)


def test_a_dependent_collective_is_exposed() -> None:
    def dependent(b: Builder, x: Callable[[str], Node]) -> list[Node]:
        rows = x("f32[1000, 1000@dp]"), x("f32[1000@dp, 1000]")
        y = b("contract", *rows, index="a b, b c -> a c")  # 1 ms
        return [reduced(b, y, "dp")]  # 4 ms

    line = run(graph(dependent))
    assert line.step_s == pytest.approx(5e-3)
    assert [(e.what, e.streams) for e in line.events] == [
        ("compute", ("compute",)),
        ("all_reduce", ("node",)),
    ]
    assert line.stages[0].bubble_s == pytest.approx(0.0)
    assert line.utilization(8e9) == pytest.approx(8e9 / (5e-3 * 8 * 1e12))


def test_a_shared_card_divides_its_bandwidth() -> None:
    g = graph(lambda b, x: [reduced(b, x(f"f32[{MB}] +dp"), "dp")])
    assert run(g, m=machine(shared=True)).step_s == pytest.approx(4 * run(g).step_s)


def test_a_ring_over_hosts_uses_every_card() -> None:
    """Over all 8 devices 2 · 7/8 · S pass each host's four cards together: 14 MB at 4 GB/s; inside
    of a host as many bytes pass each port at 4 GB/s."""
    g = graph(lambda b, x: [reduced(b, x(f"f32[{2 * MB}] +dp +tp"), "dp", "tp")])
    line = run(g)
    assert line.step_s == pytest.approx(14e-3 / 4)
    assert line.events[0].streams == ("node", "gpu")


def test_one_switch_is_priced_as_by_the_table() -> None:
    one = Topology("one", (Level(8, Link("wire", 1e-6, 1e9)),))
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        name = "ring" if op != "all_to_all" else "direct"
        by_table = price(build(op, name, 8), one).time_s(1e6)
        assert collective_time(op, 1e6, [range(8)], one).time_s == pytest.approx(by_table)
    named = collective_time("all_reduce", 1e6, [range(8)], one, "halving")
    assert named.time_s == price(build("all_reduce", "halving", 8), one).time_s(1e6)
    assert collective_time("all_reduce", 1e6, [[3]], one).time_s == 0.0


def test_a_loop_takes_its_body_each_time() -> None:
    def loop(n: int) -> Timeline:
        def step(x: Any, w: Any) -> Any:
            return ts.scan(lambda x, w: (ts.tanh(x @ w), None), x, w)[0]

        x = ts.tensor(np.ones((64, 256), np.float32), mesh=MESH, layout="[64@dp, 256@tp]")
        w = ts.tensor(np.ones((n, 256, 256), np.float32), mesh=MESH, layout=f"[{n}, 256@tp, 256]")
        return simulate(ts.jit(step).plan(x, w), machine())

    lines = loop(4), loop(40)
    few, many = ([e for e in x.events if e.kind == "loop"] for x in lines)
    assert many[0].times == 40
    assert {e.kind for e in many[0].inside} == {"compute", "collective"}
    assert many[0].time_s == pytest.approx(10 * few[0].time_s)
    assert many[0].flops == 10 * few[0].flops
    counts = [sum(t.count for t in x.traffic) for x in lines]
    inside = sum(not e.computes for e in many[0].inside)
    assert counts[1] - counts[0] == 36 * inside


# ---- pipelines ---------------------------------------------------------------------------------
def piped(stages: int, microbatches: int, kind: str = "1F1B", m: Machine | None = None) -> Timeline:
    """A pipeline of equal layers, one a stage, and the loss of the last."""
    mesh = dist.Mesh(("pp",), devices=stages)
    weights = {f"w{i}": np.ones((256, 256), np.float32) for i in range(stages)}
    x = np.ones((64 * microbatches, 256), np.float32)

    def layer(i: int) -> Callable[..., Any]:
        return lambda w, x: (w, ts.tanh(x @ w[f"w{i}"]))

    pipe = pipeline.compose(
        stages, [layer(i) for i in range(stages)], mesh=mesh, schedule=kind,
        microbatches=microbatches,
    )  # fmt: skip

    def step(weights: Any, x: Any) -> Any:
        loss = (pipe(weights, x)[1]).mean()
        return loss, ts.grad(loss, weights)

    links = Topology("fast", (Level(stages, Link("wire", 0.0, 1e18)),))
    fast = m or Machine("toy", links, ("gpu",), (1,), chip=CHIP)
    return simulate(ts.jit(step).plan(weights, x), fast)


@pytest.mark.filterwarnings("ignore::tessera.ir.schedule.pipelines.simulate.PipelineWarning")
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubble_of_1f1b(stages: int, microbatches: int) -> None:
    """(p - 1) / m of the computation is the bubble of the last stage, but for the gradient of the
    first stage's input, which nobody needs: a third of that stage's work."""
    line = piped(stages, microbatches)
    last = line.stages[-1]
    assert len(line.stages) == stages
    expected = (stages - 1 - 1 / 3) / microbatches
    assert last.bubble_s / last.compute_s == pytest.approx(expected, rel=0.01)


@pytest.mark.filterwarnings("ignore::tessera.ir.schedule.pipelines.simulate.PipelineWarning")
def test_slow_sends_delay_a_pipeline() -> None:
    slow = Topology("slow", (Level(2, Link("wire", 1e-3, 1e9)),))
    fast, late = piped(2, 4), piped(2, 4, m=Machine("toy", slow, ("gpu",), (1,), chip=CHIP))
    sends = [e for e in late.events if e.kind == "send"]
    assert sends and all(e.axes == ("pp",) and e.time_s > 1e-3 for e in sends)
    assert late.step_s > fast.step_s + 2e-3
    assert late.exposed_s > 2e-3


# ---- many devices ------------------------------------------------------------------------------
def planned_gpt(dp: int, tp: int) -> Schedule:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": dp, "tp": tp})
    strategy = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    model = dist.place(nn.GPT(nn.GPTConfig(layers=2, sequence_parallel="tp")), strategy, mesh)
    state = optim.AdamW(1e-3).init(model.parameters(), strategy)
    ids = dist.place((ts.zeros((dp, 256), ts.int32),) * 2, strategy, mesh, kind="batch")

    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss, weights = model.loss(ids, labels), model.parameters()
        grads = ts.grad(loss, weights, layout=strategy)
        return loss, optim.AdamW(1e-3).update(weights, grads, state)

    return ts.jit(step).plan(model, state, *ids)


def test_the_number_of_devices_costs_nothing() -> None:
    few, many = planned_gpt(8, 8), planned_gpt(2048, 8)
    large = machine_of("dgx_h100", devices=16384)
    begin = time.perf_counter()
    line = simulate(many, large)
    took_s = time.perf_counter() - begin
    assert line.devices == 16384
    assert len(line.events) == len(simulate(few, large).events)
    assert took_s < 3.0  # 0.1 s on a machine that does nothing else


# ---- chips and machines ------------------------------------------------------------------------
def test_a_machine_must_fit() -> None:
    g = graph(lambda b, x: [product(b, x)])
    with pytest.raises(ts.UsageError, match="has no chip"):
        run(g, m=machine(chip=None))
    with pytest.raises(ts.UsageError, match="toy has 4 devices, and the program is for 8"):
        run(g, m=machine().of(1))
    with pytest.raises(ts.MeshError, match="t3000 has no chip"):
        machine_from_file("t3000")


@pytest.mark.parametrize("name", ["dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200", "gb200_nvl72"])
def test_presets_have_chips(name: str) -> None:
    found = PRESETS[name]
    assert found.chip in CHIPS.values()
    assert read(write(found)) == found


def test_a_chip_in_a_file() -> None:
    own = replace(preset("dgx_h100"), chip=replace(CHIPS["h100"], name="mine", shared=True))
    text = write(own)
    assert read(text) == own
    with pytest.raises(ts.MeshError) as caught:
        read(text.replace("most: 0.83", "most: 1.5").replace("memory_gb:", "memory_gib:"))
    told = str(caught.value)
    assert "a chip has no key 'memory_gib'; the nearest is memory_gb, gigabytes" in told
    assert "most cannot be 1.5; give a number above 0 and of at most 1" in told


def test_rates_of_products() -> None:
    chip = CHIPS["h100"]
    rates = [chip.efficiency("bf16", 1, n, n, n) for n in (128, 256, 1024, 4096, 16384)]
    assert rates == sorted(rates) and rates[-1] < 0.83
    assert chip.rate("f16") == chip.rate("bf16")
    assert chip.rate("i32").peak_flops_per_s == min(p.peak_flops_per_s for p in chip.products)
    # Few rows: the time is that of reading the matrix.
    assert chip.product_s("bf16", 1, 1, 4096, 4096, 2 * 4096**2) == chip.memory_s(2 * 4096**2)
    shared = replace(chip, shared=True)
    assert shared.part(4).memory_s(1e9) == pytest.approx(4 * chip.memory_s(1e9))
    assert chip.part(4) is chip


# ---- compute steps -----------------------------------------------------------------------------
SLOW = Chip("slow memory", (Products("f32", 1e30),), 1e12, 1e9, kernel_s=1e-6)


def test_kernels_of_a_graph() -> None:
    """Elementwise ops are fused: a kernel for the sum, which reads x, and one that reads x and the
    sums. A product has its own kernel."""

    def make(b: Builder, x: Callable[[str], Node]) -> list[Node]:
        y = b("tanh", x("f32[1000, 500]"))
        rows = b("reshape", b("sum", y, dims=(1,)), shape=(1000, 1))
        z = b("add", y, b("broadcast_to", rows, shape=(1000, 500)))
        return [b("contract", z, x("f32[500, 10]"), index="a b, b c -> a c")]

    found = kernels(graph(make), SLOW)
    size = 4 * 500_000
    assert [(k.op, k.moved_bytes) for k in found] == [
        ("sum", size + 4000),
        ("add", size + 4000 + size),
        ("contract", size + 4 * 5000 + 4 * 10_000),
    ]
    assert [k.time_s for k in found] == pytest.approx([k.moved_bytes / 1e9 + 1e-6 for k in found])
    assert [k.dtype for k in found] == ["", "", "f32"]


def test_a_slice_reads_its_part() -> None:
    def make(b: Builder, x: Callable[[str], Node]) -> list[Node]:
        part = b("slice", x("f32[1000, 500]"), starts=(0, 0), stops=(10, 500), steps=(1, 1))
        return [b("tanh", part)]

    (k,) = kernels(graph(make), SLOW)
    assert k.moved_bytes == 2 * 4 * 5000


def test_a_device_computes_its_block() -> None:
    def make(b: Builder, x: Callable[[str], Node]) -> list[Node]:
        return [b("contract", x("f32[800@dp, 64]"), x("f32[64, 400@tp]"), index="a b, b c -> a c")]

    found = step_time(graph(make), CHIP)
    assert found.flops == 2 * 400 * 64 * 100
    assert found.time_s == pytest.approx(found.flops / 1e12)
    assert found.dtype == "f32" and found.kernels == 1


def test_a_plan_for_gpus_is_recorded_for_them() -> None:
    """A GPU's attention is a kernel of its library, and not blocks for a CPU's cache."""

    def ops(kind: str) -> set[str]:
        q = ts.zeros((1, 2, 256, 64), ts.bf16)
        with recorded_for(kind):
            s = ts.jit(lambda q: nn.flash_attention(q, q, q, causal=True)).plan(q)
        return {n.op for n in s.graph.nodes}

    assert "attention" in ops("gpu")
    assert "attention" not in ops("cpu")


def test_copies_to_the_host_run_beside_the_layers() -> None:
    """The last layer's values are copied and come back at once: there a step waits."""
    machine = machine_of("dgx_h100", 1)
    config = nn.GPTConfig(vocab=512, seq=2048, d=2048, layers=6, heads=16, remat="offload")

    @ts.jit
    def step(model: Any, ids: Any) -> Any:
        return ts.grad(model.loss(ids, ids), model)

    with as_machine(machine):
        mesh = dist.Mesh(("dp",), devices=1)
        model = dist.place(nn.GPT(config), dist.strategy("data_parallel"), mesh)
        schedule = step.plan(model, dist.tensor((8, 2048), dtype=ts.int32, mesh=mesh))
    line = simulate(schedule, machine)
    (copies,) = [t for t in line.traffic if t.what == "copy"]
    chip = machine.chip
    assert chip is not None
    took_s = copies.bytes / chip.host_bytes_per_s
    assert copies.time_s == pytest.approx(took_s, rel=0.01)
    assert copies.links == ("host",) and copies.exposed_s < 0.7 * copies.time_s
    alone = replace(machine, chip=replace(chip, host_bytes_per_s=1e15))
    least_s = simulate(schedule, alone).step_s
    assert least_s < line.step_s < least_s + took_s
