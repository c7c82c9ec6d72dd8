"""Reports of schedules on a toy machine, whose numbers are computed by hand."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.core.devices import device_count, platform, recorded_for
from tessera.core.layout import parse_type
from tessera.core.machine.chip import Chip, Products
from tessera.core.machine.machine import Machine
from tessera.core.mesh import Mesh
from tessera.core.options import ScheduleOptions
from tessera.core.topology import Level, Link, Topology
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.schedule import Schedule
from tessera.passes.plan import plan
from tessera.plan import Report, report
from tessera.plan.changes import BUCKET_BYTES, model_flops, recomputed, rewritten, without
from tessera.plan.flat import flat, trace_events
from tessera.plan.machines import cluster_of
from tessera.plan.simulate import simulate
from tessera.plan.timeline import Event
from tests.core.scheduled import scheduled

MB = 1_000_000
# 1 TFLOP/s of products, memory that takes no time, links of 1 GB/s and 4 GB/s without latency.
CHIP = Chip("toy", (Products("f32", 1e12), Products("bf16", 4e12)), 64 * MB, 1e30)
LEVELS = (Level(2, Link("out", 0.0, 1e9)), Level(4, Link("in", 0.0, 4e9)))
TOY = Machine("toy", Topology("toy", LEVELS), ("node", "gpu"), (2, 1), chip=CHIP)
MESH = Mesh.parse("dp=2 tp=4")


def graph() -> Graph:
    """A product of 1 ms, a sum of 1 MB over the four of a node, which waits for it, and a sum of 1
    MB over the two nodes, which does not."""
    b = Builder("step")
    x = b.input(parse_type("f32[1000@dp, 1000]", MESH))
    w = b.input(parse_type("f32[1000, 1000@tp] +dp", MESH))
    y = b("contract", x, b.input(parse_type("f32[1000, 1000]", MESH)), index="a b, b c -> a c")
    z = b.input(parse_type("f32[1000@tp, 1000]", MESH))
    part = b("contract", y, z, index="a b, b c -> a c")
    done = b("all_reduce", part, axes=("tp",)) if part.type.partial else part
    return b.graph([done, b("all_reduce", w, axes=("dp",))])


def made(overlap: bool | None = None, **how: Any) -> Report:
    return report(scheduled(graph(), ScheduleOptions(overlap=overlap)), cluster=TOY, **how)


def test_times_tokens_and_money() -> None:
    r = made(tokens=1000, budget_tokens=1e9, price_per_device_hour=2.0)
    line = simulate(scheduled(graph(), ScheduleOptions()), TOY)
    assert r.step_s == line.step_s > 1e-3
    assert r.tokens_per_s == pytest.approx(1000 / line.step_s)
    assert r.days == pytest.approx(1e6 * line.step_s / 86400)
    assert r.cost == pytest.approx(1e6 * line.step_s / 3600 * 8 * 2.0)
    assert r.model_flops == 2 * 10**9 * 2  # of all devices, replicated work once
    assert r.mfu == pytest.approx(4e9 / (line.step_s * 8 * 1e12))
    assert r.hidden_s == pytest.approx(sum(t.hidden_s for t in line.traffic))
    assert made().tokens is made().tokens_per_s is made().days is made().cost is None


def test_memory_against_the_limit() -> None:
    (m,) = made().memory
    assert m.limit == 64 * MB and m.peak == sum(m.rows.values()) < m.limit
    assert made().fits
    small = replace(TOY, chip=replace(CHIP, memory_bytes=4 * MB))
    tight = report(plan(graph()), cluster=small)
    assert not tight.fits and "memory does not fit" in tight.text


def test_the_dearest_have_their_sums() -> None:
    r = made()
    line = r.timeline
    assert sum(s.time_s for s in r.layers) == pytest.approx(line.compute_s)
    assert sum(s.time_s for s in r.collectives) == pytest.approx(
        sum(t.time_s for t in line.traffic)
    )
    assert sum(s.exposed_s for s in r.collectives) == pytest.approx(line.exposed_s)
    assert {s.what for s in r.collectives} == {"all_reduce dp", "all_reduce tp"}


# ---- what to change ----------------------------------------------------------------------------
def test_gains_are_simulated() -> None:
    r = made(overlap=False)
    gains = [c.gain for c in r.changes]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    found = {c.what: c for c in r.changes}
    overlap = found["communication that overlaps with work"]
    assert overlap.step_s == pytest.approx(made(overlap=True).step_s)
    assert overlap.gain == pytest.approx(1 - overlap.step_s / r.step_s)
    for i, name in enumerate(("node", "gpu")):
        level = replace(LEVELS[i], link=replace(LEVELS[i].link, bytes_per_s=2 * (1e9, 4e9)[i]))
        levels = (level, LEVELS[1]) if i == 0 else (LEVELS[0], level)
        fast = replace(TOY, topology=Topology("toy", levels))
        step = scheduled(graph(), ScheduleOptions(overlap=False))
        what = f"links of level {name!r} twice as fast"
        assert found[what].step_s == pytest.approx(simulate(step, fast).step_s)
    assert "sums over devices in bf16" in found and "products of f32 in bf16" in found


def test_sums_in_bf16_have_half_the_bytes() -> None:
    found = {c.what: c for c in made(overlap=False).changes}
    r = made(overlap=False)
    saved_s = r.step_s - found["sums over devices in bf16"].step_s
    assert saved_s == pytest.approx(r.timeline.exposed_s / 2)


def test_an_option_in_force_is_not_proposed() -> None:
    how = ScheduleOptions(overlap=True, bucket_bytes=BUCKET_BYTES, reshard_after_forward=False)
    r = report(scheduled(graph(), how), cluster=TOY)
    assert not [c for c in r.changes if "@schedule" in c.how]


def planned(remat: Any) -> Schedule:
    model = nn.GPT(nn.GPTConfig(vocab=64, seq=32, d=32, layers=3, heads=2, remat=remat))
    ids = np.zeros((4, 32), np.int32)

    def step(model: Any, ids: Any) -> Any:
        loss = model.loss(ids, ids)
        return loss, ts.grad(loss, model.parameters())

    return ts.jit(step).plan(model, ids)


def test_recomputation_is_no_work_of_the_model() -> None:
    kept, again = planned(False), planned(True)
    assert not recomputed(kept).layers and recomputed(again).layers
    assert model_flops(again) == pytest.approx(model_flops(kept), rel=0.02)
    less = rewritten(again, lambda g: without(g, recomputed(again).layers))
    assert simulate(less, TOY.of(2)).flops < simulate(again, TOY.of(2)).flops


@pytest.mark.filterwarnings("ignore::tessera.ir.schedule.pipelines.simulate.PipelineWarning")
def test_a_pipeline() -> None:
    mesh = dist.Mesh(("pp", "tp"), shape={"pp": 2, "tp": 4})
    weights = {f"w{i}": np.ones((256, 256), np.float32) for i in range(2)}
    layers = [lambda w, x, i=i: (w, ts.tanh(x @ w[f"w{i}"])) for i in range(2)]
    pipe = pipeline.compose(2, layers, mesh=mesh, schedule="1F1B", microbatches=4)

    @ts.jit(donate="weights")
    def step(weights: Any, x: Any) -> Any:
        loss = (pipe(weights, x)[1] ** 2).mean()
        return loss, {
            k: w - g for (k, w), g in zip(weights.items(), ts.grad(loss, weights).values())
        }

    r = report(step, weights, np.ones((256, 256), np.float32), cluster=TOY)
    assert [m.stage for m in r.memory] == [0, 1] == [s.stage for s in r.timeline.stages]
    found = {c.what: c for c in r.changes}
    idle_s = min(s.bubble_s for s in r.timeline.stages)
    half = found["half the bubble: twice the microbatches"]
    assert half.step_s == pytest.approx(r.step_s - idle_s / 2)
    assert {s.stage for s in r.layers} == {0, 1}
    assert report(pipe, cluster=TOY).step_s == pytest.approx(r.step_s, rel=0.5)


# ---- the forms ---------------------------------------------------------------------------------
def test_text_json_page_and_trace(tmp_path: Path) -> None:
    r = made(tokens=1000, budget_tokens=1e9, price_per_device_hour=2.0)
    assert str(r) == repr(r) == r.text
    for words in ("step", "tokens/s", "MFU", "bubble", "memory fits", "dearest layers",
                  "dearest collectives", "what to change", "bytes by link"):  # fmt: skip
        assert words in r.text
    found = json.loads(r.json())
    assert found["step_s"] == r.step_s and found["link_bytes"] == r.timeline.link_bytes
    assert found["memory"][0]["peak"] == r.memory[0].peak
    assert len(found["changes"]) == len(r.changes)
    r.save_json(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == found
    r.save_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "__DATA__" not in page and "http" not in page.replace("http-equiv", "")
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["step_s"] == r.step_s
    r.save_trace(tmp_path / "t.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    done = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in done) == pytest.approx(r.step_s * 1e6)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"stage 0", "compute", "node", "gpu"}
    with pytest.raises(ts.UsageError, match="cannot be written"):
        r.save_html(tmp_path / "r.json" / "r.html")


def test_loops_are_unrolled_up_to_a_limit() -> None:
    inner = tuple(Event(n, "compute", 0, ("compute",), i, i + 1.0) for i, n in enumerate("ab"))
    loop = Event("loop", "loop", 0, ("compute",), 1.0, 7.0, times=3, inside=inner)
    region = Event("F0", "region", 2, ("compute",), 10.0, 17.0, inside=(loop,))
    rows = flat([loop, region])
    assert [e.what for e, _ in rows] == ["a", "b"] * 6
    assert [e.start_s for e, _ in rows] == [1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16]
    assert [e.stage for e, _ in rows] == [0] * 6 + [2] * 6
    assert rows[-1][1] == "F0, loop 3 of 3"
    few = flat([loop, region], most=7)
    assert [e.what for e, _ in few] == ["a", "b"] * 3 + ["F0"]
    assert trace_events(simulate(plan(graph()), TOY))


# ---- what is given -----------------------------------------------------------------------------
def test_a_function_and_its_arguments_by_type() -> None:
    mesh = dist.Mesh(("dp",), devices=1024)
    model = nn.GPT(nn.GPTConfig(vocab=64, seq=32, d=32, layers=2, heads=2))
    optimizer = optim.AdamW(1e-3)
    state = optimizer.init(model.parameters())

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: Any) -> Any:
        loss, weights = model.loss(ids, ids), model.parameters()
        weights, new = optimizer.update(weights, ts.grad(loss, weights), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    ids = parse_type("int32[2048@dp, 32]", mesh)
    r = report(step, model, state, ids, cluster="h100x1024")
    assert r.tokens == 2048 * 32 and r.timeline.devices == 1024
    rows = r.memory[0].rows
    size = sum(4 * p.size for p in model.parameters().values())
    assert rows["weights"] == size and rows["optimizer"] == 2 * size + 4
    assert rows["batch"] == 2 * 32 * 4
    kinds = {e.kind for e in r.timeline.events}
    assert kinds >= {"compute", "collective"}


def test_clusters() -> None:
    assert cluster_of(TOY) is TOY
    assert cluster_of("a100x16").device == cluster_of("dgx_a100:16").device
    assert cluster_of("dgx_h100", 256).size == 256
    with pytest.raises(ts.MeshError, match="dgx_x200"):
        cluster_of("x200x8")
    with pytest.raises(ts.UsageError, match="toy has 4 devices, and the program is for 8"):
        report(plan(graph()), cluster=TOY.of(1))
    with pytest.raises(ts.UsageError, match="int is no step"):
        report(3, cluster=TOY)
    with pytest.raises(ts.UsageError, match="tokens cannot be 0"):
        made(tokens=0)
    with recorded_for("gpu", 77):
        assert (device_count(), platform()) == (77, "gpu")
    assert platform() == "cpu"
