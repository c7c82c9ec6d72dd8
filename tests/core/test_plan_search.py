"""The search for the fastest mesh, strategy and options: its prices, its rows, and its layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.core.devices import recorded_for
from tessera.core.errors import UsageError
from tessera.plan.candidates import Candidate
from tessera.plan.machines import as_machine, cluster_of
from tessera.plan.scaled import Scaled
from tessera.plan.search import _choices_of, _Search
from tessera.plan.simulate import simulate
from tessera.plan.weight_layouts import layouts, rules_of

pytestmark = pytest.mark.filterwarnings("ignore::tessera.core.errors.StrategyWarning")
SIZES: dict[str, Any] = {
    "vocab": 8192, "seq": 1024, "d": 1024, "heads": 16, "hidden": 2816, "norm": "rms",
    "activation": "swiglu", "positions": "rotary",
}  # fmt: skip
ROWS = 256


def made(mesh: Any, strategy: Any, loss_of: Any = nn.GPT.loss, **how: Any) -> Any:
    """A training step of a small Llama with AdamW, and its arguments."""
    model = nn.GPT(nn.GPTConfig(**{**SIZES, "layers": 4, **how})).to(ts.bf16)
    model = dist.place(model, strategy, mesh)
    optimizer = optim.AdamW(3e-4)
    state = optimizer.init(model.parameters(), strategy)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: Any) -> Any:
        loss, weights = loss_of(model, ids, ids), model.parameters()
        grads = ts.grad(loss, weights, layout=strategy)
        weights, new = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    ids = dist.place(dist.tensor((ROWS, 1024), dtype=ts.int32), strategy, mesh, kind="batch")
    return step, (model, state, ids)


def build(mesh: Any, strategy: Any, *, remat: Any, sequence_parallel: Any) -> Any:
    return made(mesh, strategy, remat=remat, sequence_parallel=sequence_parallel)


def _rank(x: Any) -> Any:
    return np.argsort(np.argsort(x))


def search(how: Callable[..., Any], cluster: Any, **choices: Any) -> _Search:
    machine = cluster_of(cluster)
    return _Search(how, machine, _choices_of(how, choices), 60.0)


def test_scaled_prices_rank_as_the_simulation() -> None:
    s = search(build, "h100x64")
    fast, full, memory, planned = [], [], [], []
    with as_machine(s.machine):
        for remat, sp, zero in product((False, True), (None, "tp"), (1, 3)):
            choices = (("remat", remat), ("sequence_parallel", sp))
            kind = Candidate((("dp", 8), ("tp", 8)), zero, choices)
            points = [
                (order, {"dp": 64 // tp, "tp": tp})
                for tp in (2, 4, 8)
                for order in (("dp", "tp"), ("tp", "dp"))
            ]
            meshes = [dist.Mesh(order, shape={a: p[a] for a in order}) for order, p in points]
            sizes = {a: np.array([float(p[a]) for _, p in points]) for a in ("dp", "tp")}
            scaled = Scaled(s.record(kind)[0], s.machine, sizes)
            fast += list(scaled.step_s(meshes))
            memory += list(scaled.memory_bytes())
            for order, p in points:
                row = s.row(replace(kind, axes=tuple((a, p[a]) for a in order)), 0.0)
                full.append(row.step_s)
                planned.append(row.memory_bytes)
    assert len(fast) == 48
    assert np.corrcoef(_rank(fast), _rank(full))[0, 1] > 0.95
    assert np.corrcoef(_rank(memory), _rank(planned))[0, 1] > 0.9
    assert np.abs(np.log(np.array(fast) / np.array(full))).max() < 0.2


def test_the_recorded_mesh_has_its_simulated_time() -> None:
    s = search(build, "h100x16")
    kind = Candidate((("dp", 4), ("tp", 4)), 3, (("remat", True), ("sequence_parallel", "tp")))
    with as_machine(s.machine):
        schedule = s.record(kind)[0]
    scaled = Scaled(schedule, s.machine, {"dp": np.array([4.0]), "tp": np.array([4.0])})
    (step_s,) = scaled.step_s([kind.mesh])
    assert step_s == pytest.approx(simulate(schedule, s.machine).step_s, rel=1e-4)
    assert scaled.least_s([kind.mesh])[0] < step_s


def test_ten_rows_and_the_best_runs_as_planned() -> None:
    found = ts.plan.best(build, cluster="h100x16", choices={"remat": (False, True)})
    assert len(found.rows) == 10 and all(r.fits for r in found.rows)
    assert not found.best.why and all(r.why for r in found.rows[1:])
    times = [r.step_s for r in found.rows]
    assert min(times) == found.best.step_s
    assert found.priced > 50 and str(found) == found.text
    # the user's own code, on the machine's kind of device
    with recorded_for("gpu", 16):
        step, args = build(found.mesh, found.strategy, **found.choices)
        step = ts.schedule(**found.options)(step) if found.options else step
        assert step.plan(*args).hash == found.best.hash


def test_what_does_not_fit_is_dropped() -> None:
    machine = cluster_of("h100x8")
    assert machine.chip is not None
    roomy = ts.plan.best(build, cluster=machine)
    limit = min(r.memory_bytes for r in roomy.rows) - 1
    small = replace(machine, chip=replace(machine.chip, memory_bytes=limit))
    found = ts.plan.best(build, cluster=small)
    assert found.dropped["they do not fit in memory"] > 10
    assert found.best.memory_bytes <= limit and found.best.step_s > roomy.best.step_s
    tiny = replace(machine, chip=replace(machine.chip, memory_bytes=1e7))
    with pytest.raises(UsageError, match="no candidate fits"):
        ts.plan.best(build, cluster=tiny)


def test_bounds_drop_what_computes_longer() -> None:
    found = ts.plan.best(build, cluster="h100x64")
    assert found.dropped["they take longer without communication over dp"] > 0


def test_bounds_of_stage_3_hold_for_the_other_stages() -> None:
    s = search(build, "h100x16")
    choices = (("remat", False), ("sequence_parallel", None))
    axes = (("dp", 8), ("tp", 2))
    with as_machine(s.machine):
        list(s._price(Candidate(axes, 3, choices)))
        grid = s.grids[axes, choices]
        for zero in (2, 1, 0):
            scaled = s._scaled(s.record(Candidate(axes, zero, choices))[0], grid.points)
            meshes = [p.mesh(Candidate(axes, zero, choices)) for p in grid.points]
            assert (grid.least_s <= scaled.step_s(meshes) * 1.001).all()
            assert (grid.least_bytes[zero] <= scaled.memory_bytes() * 1.001).all()
    several = np.array([dict(p.axes)["dp"] > 1 for p in grid.points])
    assert ((grid.least_bytes[0] > grid.least_bytes[1]) == several).all()
    assert ((grid.least_bytes[1] > grid.least_bytes[3]) == several).all()


def test_no_products_are_computed_again_that_have_room() -> None:
    s = search(build, "h100x16", sequence_parallel=(None,))
    axes, recorded = (("dp", 8), ("tp", 2)), list[Any]()
    record = s.record
    s.record = lambda c: (recorded.append(c), record(c))[1]  # type: ignore[method-assign]
    with as_machine(s.machine):
        for remat in ("products", True):
            kind = Candidate(axes, 3, (("remat", remat), ("sequence_parallel", None)))
            priced = list(s._price(kind))
            assert bool(priced) is (remat == "products")
    assert len(recorded) == 1
    assert s.dropped["they compute products again that have room"] == s.priced


def staged(mesh: Any, strategy: Any, *, remat: Any, pipeline: Any, microbatches: int) -> Any:
    loss_of: Any = nn.GPT.loss
    if pipeline:
        loss_of = cut(("pp",), pipeline, microbatches, mesh=mesh)(loss_of)
    return made(mesh, strategy, loss_of, stacked=not pipeline, remat=remat)


cut = pipeline.run


def test_stages_are_searched_where_build_names_a_pipeline() -> None:
    s = search(staged, "h100x8", microbatches=(8,), remat=(False,))
    with as_machine(s.machine):
        priced = list(s._price(next(s._structures())))
    meshes = [dict(p.candidate.axes) for p in priced if p.staged]
    assert {m["pp"] for m in meshes} == {2, 4, 8}
    assert all(dict(p.candidate.choices)["pipeline"] == "1F1B" for p in priced if p.staged)
    assert all(dict(p.candidate.choices)["microbatches"] == 8 for p in priced if p.staged)


@pytest.mark.filterwarnings("ignore::tessera.ir.schedule.pipelines.simulate.PipelineWarning")
def test_prices_of_pipelines_rank_as_the_simulation() -> None:
    s = search(staged, "h100x16", microbatches=(8, 16))
    fast, full = [], []
    with as_machine(s.machine):
        for remat, zero in ((False, 0), (True, 3)):
            kind = Candidate(
                (("dp", 8), ("tp", 2)), zero,
                (("remat", remat), ("pipeline", None), ("microbatches", 1)),
            )  # fmt: skip
            for p in s._price(kind):
                if p.staged and p.candidate.axes[0][0] == "pp" and p.candidate.axes[-1][1] < 8:
                    row = s.row(p.candidate, p.step_s)
                    fast.append(p.step_s)
                    full.append(row.step_s)
    assert len(fast) >= 16
    assert np.corrcoef(_rank(fast), _rank(full))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("wrong", "choices", "match"),
    [
        (3, {}, "is no function"),
        (lambda mesh, strategy, *, depth: None, {}, "depth: a choice without values"),
        (build, {"depth": (1,)}, "depth: build has no such keyword argument"),
        (lambda mesh, strategy: 3, {}, "build returned"),
    ],
)
def test_mistakes(wrong: Any, choices: Any, match: str) -> None:
    with pytest.raises(UsageError) as error:
        ts.plan.best(wrong, cluster="h100x8", choices=choices)
    assert match in f"{error.value} {error.value.__cause__}"


@pytest.mark.parametrize("tp", [4, 8])
def test_megatrons_layout_is_found_from_none(tp: int) -> None:
    def block(mesh: Any, strategy: Any) -> Any:
        return made(mesh, strategy, layers=1)

    s = search(block, "h100x8")
    named = Candidate((("dp", 1), ("tp", tp)), 0, ())
    with as_machine(s.machine):
        split = s._weights(named)
        whole = {name: (rank, None) for name, (rank, _) in split.items()}
        start, megatron = s.row(replace(named, rules=()), 0.0), s.row(named, 0.0)
        found = layouts(lambda c: s.row(c, 0.0), start, whole)
    assert found.step_s <= megatron.step_s and found.wire_bytes <= megatron.wire_bytes
    want = rules_of({n: dim for n, (_, dim) in split.items()}, split)
    mine = {r[0]: r[1] for r in found.candidate.rules or ()}
    for name, dim, *_ in want:
        if "embed" not in name:
            assert mine[name] == dim, (name, found.candidate.rules)


def test_experts_are_split_over_an_axis_of_their_own() -> None:
    def with_experts(mesh: Any, strategy: Any, *, expert_parallel: Any) -> Any:
        return made(mesh, strategy, experts=8, layers=2)

    found = ts.plan.best(with_experts, cluster="h100x16", choices={"expert_parallel": ("ep",)})
    sizes = {dict(r.candidate.axes)["ep"] for r in found.rows}
    assert min(sizes) > 1 and len(sizes) > 1
    fast, full = ([f(r) for r in found.rows] for f in (lambda r: r.fast_s, lambda r: r.step_s))
    assert np.abs(np.log(np.array(fast) / np.array(full))).max() < 0.2
    s = search(with_experts, "h100x16")
    with as_machine(s.machine):
        assert s.record(found.best.candidate)[0].hash == found.best.hash
    both = ts.plan.best(with_experts, cluster="h100x16")
    assert both.best.step_s <= 1.001 * found.best.step_s


def test_values_in_host_memory_win_where_there_is_no_other_room() -> None:
    """Their copies run beside the layers."""

    def build(mesh: Any, strategy: Any, *, remat: Any) -> Any:
        return made(mesh, strategy, remat=remat)

    machine = cluster_of("h100x8")
    assert machine.chip is not None
    fast = replace(machine, chip=replace(machine.chip, host_bytes_per_s=1e12))
    times, needs = {}, {}
    for m in (machine, fast):
        s = search(build, m)
        with as_machine(m):
            for remat in (False, True, "offload", 2):
                row = s.row(Candidate((("dp", 8),), 3, (("remat", remat),)), 0.0)
                times[m is fast, remat], needs[remat] = row.step_s, row.memory_bytes
    assert times[True, False] == times[False, False]
    assert times[True, "offload"] < times[False, "offload"]
    assert needs["offload"] < 0.8 * needs[False] and needs[True] < needs[2] < needs[False]
    assert times[False, False] < times[False, 2] < times[False, True]
    chip = replace(fast.chip, memory_bytes=1.02 * needs["offload"])  # type: ignore[type-var]
    found = ts.plan.best(build, cluster=replace(fast, chip=chip))
    assert found.choices["remat"] == "offload"
    s = search(build, fast)
    with as_machine(fast):
        kind = Candidate((("dp", 8),), 3, (("remat", "offload"),))
        scaled = Scaled(s.record(kind)[0], fast, {"dp": np.array([8.0])})
        assert scaled.step_s([kind.mesh])[0] == pytest.approx(times[True, "offload"], rel=0.1)
