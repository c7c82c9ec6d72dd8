"""The fused and the stepped executor against the graph, and the order promised by the schedule's
text."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, pipeline, schedule
from tessera.core.context import replaced
from tessera.core.options import PLAIN, ProgramOptions, ScheduleOptions
from tessera.ir.schedule.schedule import Schedule
from tessera.runtime.arrays import array_shape, sharding
from tessera.runtime.lower import lower
from tessera.runtime.stepped_executor import Stepped
from tests.cases import LONG
from tests.compilations import compilations
from tests.core.scheduled import scheduled
from tests.core.test_overlap import schedules
from tests.core.test_schedule import GRAPHS, MESH, OPTIONS, looped, step, types
from tests.issued import compiled_collectives, planned

RNG = np.random.default_rng(4)


def abstract(s: Schedule) -> list[jax.ShapeDtypeStruct]:
    """Arguments of `s` as types without values."""
    types = [s.buffers[b] for b in s.inputs]
    return [
        jax.ShapeDtypeStruct(array_shape(t), t.dtype.numpy, sharding=sharding(t)) for t in types
    ]


def values() -> tuple[dict[str, ts.Tensor], ts.Tensor]:
    w, x = types()
    made = {k: RNG.normal(size=t.shape).astype(np.float32) * 0.3 for k, t in w.items()}
    xs = RNG.normal(size=x.shape).astype(np.float32)
    return (
        {k: ts.tensor(v, mesh=MESH, layout=w[k]) for k, v in made.items()},
        ts.tensor(xs, mesh=MESH, layout=x),
    )


@pytest.mark.parametrize(
    "o",
    [
        pytest.param(o, marks=[LONG] * (i % 2), id=o.text() or "as it comes")
        for i, o in enumerate(OPTIONS)
    ],
)
def test_fused_and_stepped_agree_under_all_options(o: Any) -> None:
    w, x = values()
    loss, grads = ts.jit(step)(w, x)
    for executor in ("fused", "stepped"):
        with replaced(schedule=o, executor=executor):
            same, others = ts.jit(step)(w, x)
        np.testing.assert_allclose(same.numpy(), loss.numpy(), rtol=1e-6)
        for k, g in grads.items():
            np.testing.assert_allclose(others[k].numpy(), g.numpy(), rtol=1e-5, atol=1e-6)
            assert others[k].type is g.type


@pytest.mark.parametrize("name", ["experts, buckets=4, trains=True", "ring, cp=4, trains=True"])
def test_overlap_changes_no_result(name: str) -> None:
    plain, early = schedules(name)
    rng = np.random.default_rng(6)
    args = [
        jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding)
        for x in abstract(plain)
    ]
    want = lower(plain)(*args)
    for found in (lower(early)(*args), Stepped(early)(*args)):
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_loops_with_collectives_step_by_step() -> None:
    x = ts.tensor(RNG.normal(size=(3, 4, 8)).astype(np.float32), mesh=MESH, layout="[3, 4@dp, 8]")
    w = ts.tensor(RNG.normal(size=(8, 6)).astype(np.float32), mesh=MESH, layout="[8, 6@tp]")

    def trained(x: ts.Tensor, w: ts.Tensor) -> Any:
        end, rows = looped(x, w)
        return end, rows, ts.grad((end * end).sum() + rows.sum(), w)

    want = ts.jit(trained)(x, w)
    with replaced(executor="stepped"):
        found = ts.jit(trained)(x, w)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-5)


def test_the_stepped_executor_reads_random_numbers_and_values_alike() -> None:
    @ts.jit
    def fn(x: ts.Tensor) -> Any:
        y = x + ts.random.normal(x.shape)
        total = y.sum()
        return y * 2.0 if total > -1e9 else y

    _, x = values()
    ts.seed(5)
    want = fn(x).numpy()
    with replaced(executor="stepped"):
        ts.seed(5)
        np.testing.assert_allclose(fn(x).numpy(), want, rtol=1e-6)


# -- promises -------------------------------------------------------------------------------------
def paths(text: str) -> dict[str, set[str]]:
    """For each value of a StableHLO body, all values on which it depends."""
    depends: dict[str, set[str]] = {}
    for line in text.splitlines():
        m = re.match(r"\s*(%\w+)(?::(\d+))? = (.*)", line)
        if m is None:
            continue
        used = set(re.findall(r"%\w+", m[3]))
        depends[m[1]] = used.union(*(depends.get(u, set()) for u in used))
    return depends


@pytest.mark.parametrize("under", [PLAIN, ProgramOptions("mesh_invariant")], ids=str)
@pytest.mark.parametrize("o", OPTIONS[1:3], ids=lambda o: o.text())
def test_what_runs_turn_by_turn_keeps_the_order_of_the_text_too(
    o: Any, under: ProgramOptions
) -> None:
    g = GRAPHS["step"]
    s = scheduled(g, o)
    made = {b: i for i, st in enumerate(s.steps) for b in st.writes}
    late = [st for st in s.steps if {*st.after} - {made[b] for b in st.reads if b in made}]
    given = [jax.ShapeDtypeStruct(array_shape(n.type), n.type.dtype.numpy) for n in g.inputs]
    text = lower(s, under=under).lower(*given).as_text()
    assert text.count("optimization_barrier") == len(late) > 0


@pytest.mark.parametrize("o", OPTIONS[:5], ids=lambda o: o.text() or "as it comes")
def test_what_the_text_promises_is_a_path_in_the_program(o: Any) -> None:
    s = scheduled(GRAPHS["step"], o)
    text = lower(s).lower(*abstract(s)).as_text()
    depends = paths(text)
    # The collectives in program order, which is the order of the steps.
    order = [
        m[1]
        for line in text.splitlines()
        if (m := re.match(r'\s*(%\w+)(?::\d+)? = "stablehlo\.(?:all_reduce|reduce_scatter)"', line))
    ]
    comm = [i for i, st in enumerate(s.steps) if st.kind == "collective"]
    assert len(order) == len(comm)
    for b, later in enumerate(comm):
        for a, earlier in enumerate(comm[:b]):
            if earlier in s.waits[later]:
                assert order[a] in depends[order[b]], (earlier, later)


@pytest.mark.parametrize("name", ["step", "zero 3", "loop"])
def test_a_compiled_program_holds_what_is_planned(name: str) -> None:
    for o in (ScheduleOptions(), ScheduleOptions(overlap=True, bucket_bytes=300)):
        s = scheduled(GRAPHS[name], o)
        text = lower(s).lower(*abstract(s)).compile().as_text()
        assert compiled_collectives(text) == planned(s.steps, results=True)


def test_a_trace_prints_what_moves_and_nothing_for_programs_where_nothing_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})

    @pipeline.run(mesh_axes=("pp",), microbatches=4, mesh=mesh)
    def model(x: ts.Tensor) -> ts.Tensor:
        for _ in range(2):
            x = ts.tanh(x * 1.23)
        return ts.mean(x)

    rows = ts.tensor(np.ones((8, 4), np.float32), mesh=mesh, layout="[8@dp, 4]")
    with replaced(comm_trace=True):
        alone = ts.tensor([1.0]) * 2.5 + 1.25
        assert alone.item() == 3.75 and capsys.readouterr().out == ""
        model(rows)
    told = capsys.readouterr().out.splitlines()
    assert told == graph.comm_trace(model.schedule)
    assert {tuple(line.split()[1:3]) for line in told} == {("send", "pp"), ("all_reduce", "dp")}


# -- profile --------------------------------------------------------------------------------------
def test_a_profile_tells_transfer_from_compute(tmp_path: Path) -> None:
    w, x = values()
    fn = ts.jit(step)
    want = fn(w, x)[0].numpy()
    with dist.profile() as p:
        for _ in range(3):
            np.testing.assert_allclose(fn(w, x)[0].numpy(), want, rtol=1e-6)
    rows = {(r.what, r.where): r for r in p.rows}
    assert p.runs == 3
    forward = rows["all_reduce tp", "layer0"]
    assert forward.transfer_s > 0 and forward.compute_s == 0 and forward.received_bytes > 0
    compute = [r for r in p.rows if r.what == "compute"]
    assert {r.where.split(" ")[0] for r in compute} >= {"layer0", "layer1", "layer2"}
    assert all(r.compute_s > 0 and r.transfer_s == 0 for r in compute)
    # Per run: the same number of collectives and bytes as in the graph.
    comm = [r for r in p.rows if r.transfer_s]
    assert sum(r.count for r in comm) == sum(k for _, k in fn.graph.collectives())
    assert sum(r.received_bytes for r in comm) == fn.graph.wire_bytes
    text = str(p)
    assert text.splitlines()[0].split() == [
        "what", "where", "times", "receives", "transfer", "wait", "compute", "at"
    ]  # fmt: skip
    assert repr(p) == text and "3 measured" in text and "% of it transfer" in text

    p.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    p.save(tmp_path / "trace.json.gz")
    packed = gzip.decompress((tmp_path / "trace.json.gz").read_bytes())
    assert json.loads(packed)["traceEvents"] == trace
    assert {e["pid"] for e in trace} == set(MESH.device_ids)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    steps = [e for e in trace if e["ph"] != "M"]
    assert all(e["dur"] >= 0 and e["ph"] == "X" for e in steps)
    assert all(names[e["pid"], e["tid"]] == e["cat"] for e in steps)  # each row is named
    assert {e["args"]["name"] for e in trace if e["name"] == "process_name"} == {
        f"device {d}" for d in MESH.device_ids
    }
    with pytest.raises(ts.UsageError, match="cannot be written"):
        p.save(tmp_path / "trace.json" / "below-a-file.json")


def test_a_profile_of_a_call_and_of_nothing() -> None:
    w, x = values()
    p = dist.profile(ts.jit(step), w, x, runs=2)
    assert p.runs == 2 and p.totals_s["transfer"] > 0
    with dist.profile() as empty:
        pass
    with dist.profile() as beside:
        fn = ts.jit(step)
        loss, _ = fn(w, x)
        for _ in range(3):
            loss = loss + 1.0
    moved = [r for r in beside.rows if r.transfer_s]
    assert beside.runs == 1 and sum(r.received_bytes for r in moved) == fn.graph.wire_bytes
    assert str(empty) == "profile: nothing was measured; call a compiled function inside it"
    assert empty.events() == [] and empty.rows == []
    for bad in ((3,), (step, w, x)):
        with pytest.raises(ts.UsageError):
            dist.profile(*bad, runs=0 if len(bad) > 1 else 3)


def test_a_profile_of_one_call_measures_no_compilation() -> None:
    """Neither of a program's steps, nor of a pipeline's stages and sends."""
    mesh = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})
    w, x = values()

    @pipeline.run(mesh_axes=("pp",), microbatches=4, mesh=mesh)
    def model(x: ts.Tensor) -> ts.Tensor:
        for _ in range(2):
            x = ts.tanh(x * 1.23)
        return ts.mean(x)

    rows = ts.tensor(np.ones((8, 4), np.float32), mesh=mesh, layout="[8@dp, 4]")
    with compilations() as compiled_s, dist.profile() as p:
        ts.jit(step)(w, x)
        model(rows)
    spans = [(t.start_s, t.end_s) for t in p.timed]
    assert compiled_s and p.runs == 1  # two programs, each once
    assert not [c for c in compiled_s for a, b in spans if a <= c <= b]
    moved = {r.what for r in p.rows if r.transfer_s}
    assert {"send", "all_reduce dp", "all_reduce tp"} <= moved
    assert all(not r.compute_s and r.count == int(r.count) for r in p.rows if r.what in moved)


def test_the_decorator_compiles_under_its_choices() -> None:
    w, x = values()

    @schedule(overlap=True, bucket_bytes=1 << 16, comm_backend="nccl", epoch="soft")
    def scheduled(w: Any, x: Any) -> Any:
        return step(w, x)

    with pytest.warns(ts.OptionWarning) as said:
        loss, _ = scheduled(w, x)
    (m,) = said
    assert str(m.message).startswith("schedule: comm_backend='nccl' has no effect: it joins NVIDIA")
    assert m.filename == __file__
    np.testing.assert_allclose(loss.numpy(), ts.jit(step)(w, x)[0].numpy(), rtol=1e-6)
    assert str(scheduled.compiled.schedule.options) == (
        "overlap=True bucket_bytes=65536 backend=nccl epoch=soft"
    )
    plain = ts.jit(step)
    plain(w, x)
    assert plain.schedule.text != scheduled.compiled.schedule.text


def test_a_pipeline_takes_its_choices_or_says_that_it_has_its_own() -> None:
    mesh, x = dist.Mesh(("pp",), devices=2), np.ones((16, 8), np.float32)

    def run(own: int | None = None, **choices: Any) -> tuple[Any, Any]:
        parts = [lambda x: x * 2.0, lambda x: x + 1.0]
        model = pipeline.compose(2, parts, mesh=mesh, microbatches=own)
        made = schedule(**choices)(lambda x: model(x))
        return made(x).numpy(), made.compiled.schedule

    y, staged = run(pipeline=True, microbatches=8)
    assert staged.table.endswith("microbatches=8")
    whole, one = run(pipeline=False)
    assert not one.is_staged
    with pytest.warns(ts.OptionWarning, match="made with its own: pipeline=1F1B microbatches=4"):
        again, staged = run(own=4, microbatches=8)
    assert staged.table.endswith("microbatches=4")
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_array_equal(y, again)
