"""Planned peak memory against XLA's figures, and the exact part of the plan."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.compile import Engine, Executable
from tessera.core.layout import parse_type
from tessera.cost.memory import stage_plans
from tessera.ir.schedule.schedule import Schedule
from tessera.lang.jit.trace import trace
from tessera.passes.simplify import simplify
from tessera.runtime import arrays
from tessera.runtime.stepped_executor import Stepped
from tessera.show.plan_view import planned_memory
from tessera.train.memory import ProgramBytes
from tests.cases import LONG, short

DOCS = Path(__file__).resolve().parents[2] / "docs"
BOUND = 0.2
# The cases of the table outside of the rules' bounds, as the page states.
MISSED = {"GPT, ring attention", "MLP, ZeRO-3", "ConvNet", "ConvNet, wide, dp"}
ROW = re.compile(
    r"^\| (.+?)(†?) \| `(.+?)` \| ([\d.]+) \| ([\d.]+) \| ([+-]?\d+)% \|", re.MULTILINE
)


def grid() -> Any:
    spec = importlib.util.spec_from_file_location("memory_plan_grid", DOCS / "memory_plan_grid.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


CASES = grid().CASES
# One of each kind; the script compiles all of them.
HERE = (
    "GPT", "GPT, bf16 products", "GPT, recompute", "GPT, dp tp", "GPT, ZeRO-1", "GPT, ZeRO-3, tp",
    "GPT, uneven vocabulary and heads, dp tp", "GPT, uneven ZeRO-3", "GPT, ZeRO-3 in, dp out",
    "MLP, dp", "MLP, deep, ZeRO-1", "ConvNet, dp",
)  # fmt: skip
DEFAULT = ("GPT", "GPT, recompute", "GPT, ZeRO-3 in, dp out", "MLP, dp", "MLP, deep, ZeRO-1")


@pytest.mark.parametrize("name", short(HERE, *DEFAULT))
def test_a_plan_is_what_xla_says_of_the_program(name: str) -> None:
    plan, xla = CASES[name].measure()
    assert plan.persistent + plan.batch == xla.arguments
    # XLA counts a pointer for each result, in addition to the results.
    assert 0 <= xla.results - xla.reused - plan.results <= 8 * 100
    assert abs(plan.temporary / xla.temporary - 1) <= BOUND
    assert abs(plan.peak / xla.peak - 1) <= BOUND


def test_the_table_of_the_page_has_every_case_within_its_bound() -> None:
    rows = {m[1]: m for m in ROW.finditer((DOCS / "memory-plan.md").read_text())}
    assert list(rows) == list(CASES)
    for name, row in rows.items():
        case, planned, xla, error = CASES[name], float(row[4]), float(row[5]), int(row[6])
        assert (row[3], row[2] == "†") == (case.mesh, not case.fitted)
        assert abs(100 * (planned / xla - 1) - error) < 6  # computed from rounded numbers
        assert (abs(error) <= 100 * BOUND) != (name in MISSED)


def test_the_counted_bytes_are_those_of_the_arrays() -> None:
    case = CASES["GPT, uneven ZeRO-3"]
    _, held, _ = case.record()
    for tree in (held["weights"], held["optimizer"]):
        tensors = [t for t in jax.tree.leaves(tree) if isinstance(t, ts.Tensor)]
        assert len(tensors) > 5
        for t in tensors:
            assert {s.data.nbytes for s in t.stored.addressable_shards} == {t.type.local_bytes}


# -- ops by themselves ----------------------------------------------------------------------------
def redistributed(to: str) -> Any:
    return lambda x, w: dist.redistribute(x, to) @ w


# Programs with the peak inside one op, and the types of their arguments.
OPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "argsort": (lambda x, w: ts.argsort(x).to(ts.f32) @ w, ("f32[512, 512]", "f32[512, 4]")),
    "sort": (lambda x, w: ts.sort(x)[0] @ w, ("f32[512, 512]", "f32[512, 4]")),
    "gradient of sort": (
        lambda x: (ts.grad((ts.sort(x)[0] ** 2).sum(), x) ** 2).sum(), ("f32[512, 512]",)
    ),
    "cumsum": (lambda x, w: ts.cumsum(x, 1) @ w, ("f32[512, 512]", "f32[512, 4]")),
    "cumsum of bf16": (lambda x: ts.cumsum(x, 0).sum(), ("bf16[512, 512]",)),
    "cumsum of a few": (lambda x, w: ts.cumsum(x, 1) @ w, ("f32[8192, 16]", "f32[16, 4]")),
    "scatter_add": (
        lambda x, ids, w: ts.scatter_add(ts.zeros((512, 512)), ids, x, 1) @ w,
        ("f32[512, 512]", "i32[512, 512]", "f32[512, 4]"),
    ),
    "cholesky": (lambda x, w: ts.linalg.cholesky(x) @ w, ("f32[256, 256]", "f32[256, 4]")),
    "solve": (lambda x, w: ts.linalg.solve(x, x) @ w, ("f32[256, 256]", "f32[256, 4]")),
    "mean square": (lambda x, y: ((x - y) ** 2).mean(), ("f32[512, 512]", "f32[512, 512]")),
    "largest": (lambda x: ts.tanh(x).max(1), ("f32[512, 512]",)),
    "sums of a few": (lambda x: (x * x).sum(2), ("f32[128, 128, 16]",)),
    "gradient of softmax": (
        lambda x: (ts.grad((nn.softmax(x) ** 2).sum(), x) ** 2).sum(), ("f32[512, 512]",)
    ),
    "gather": (redistributed("[512, 256]"), ("f32[512@dp, 256]", "f32[256, 4]")),
    "uneven gather": (redistributed("[511, 256]"), ("f32[511@dp, 256]", "f32[256, 4]")),
    "gather of columns": (redistributed("[512, 256]"), ("f32[512, 256@dp]", "f32[256, 4]")),
    "exchange": (redistributed("[512, 256@dp]"), ("f32[512@dp, 256]", "f32[256, 4]")),
    "scatter of columns": (
        lambda x, y, w: dist.redistribute(x @ y, "[512, 256@dp]") @ w,
        ("f32[512, 512@dp]", "f32[512@dp, 256]", "f32[256@dp, 4]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_what_an_op_needs_inside_is_in_the_plan(name: str) -> None:
    f, types = OPS[name]
    mesh = dist.Mesh(("dp",), devices=8 if any("@" in t for t in types) else 1)
    args = []
    for t in (parse_type(text, mesh) for text in types):
        args.append(ts.tensor(np.zeros(t.shape), mesh, t.text.removeprefix(t.dtype.name), t.dtype))
    graph = simplify(trace(f, *args))
    engine = Engine()
    xla = ProgramBytes(**engine.program_bytes(engine.compile(graph, range(len(args)))))
    plan = planned_memory(graph, {})
    assert abs(plan.peak / xla.peak - 1) <= 0.06
    assert abs(plan.temporary - xla.temporary) <= 0.06 * xla.peak


@pytest.mark.parametrize("stacked", [False, True])
def test_recomputed_layers_need_less_memory_than_kept_ones(stacked: bool) -> None:
    found = []
    for remat in (False, True):
        config = nn.GPTConfig(64, 64, 64, 4, 4, stacked=stacked, remat=remat)
        model, ids = nn.GPT(config), np.zeros((32, 64), np.int32)
        graph = trace(
            lambda model, ids: ts.grad(model.loss(ids, ids), model.parameters()), model, ids
        )
        engine = Engine()
        xla = ProgramBytes(**engine.program_bytes(engine.compile(simplify(graph))))
        found.append(xla.temporary)
        # Loops inside of a layer that is written out begin later than the plan says.
        bound = 0.3 if remat and not stacked else BOUND
        assert abs(planned_memory(simplify(graph), {}).temporary / xla.temporary - 1) <= bound
    kept, again = found
    assert again < 0.8 * kept


# -- pipelines ------------------------------------------------------------------------------------
class Caught(Exception):
    """Raised to get a pipeline's program from the call that would run it."""


def pipelined(
    pp: int, dp: int, kind: str, count: int, cuts: list[int], donate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Schedule, Stepped]:  # fmt: skip
    """A step of six residual MLP blocks, cut into uneven stages at `cuts`. It returns gradients of
    a large batch, or donates weights and state and returns new ones."""
    d, layers, rows = 64, 6, 64 if donate else 512
    mesh = dist.Mesh(("pp", "dp"), shape={"pp": pp, "dp": dp})
    shapes = {"up": (d, 4 * d), "down": (4 * d, d)}
    weights = [{k: ts.tensor(np.ones(s, np.float32), mesh) for k, s in shapes.items()}
               for _ in range(layers)]  # fmt: skip
    x = ts.tensor(np.ones((rows, d), np.float32), mesh, f"[{rows}@dp, {d}]")
    now: list[Any] = []

    def like(weights: Any) -> Any:
        return [{k: ts.tensor(w.numpy(), mesh) for k, w in x.items()} for x in weights]

    def part(first: int, last: int) -> Any:
        def stage(h: ts.Tensor) -> ts.Tensor:
            for w in now[first:last]:
                h = h + ts.tanh(h @ w["up"]) @ w["down"]
            return h

        return stage

    stages = [part(a, b) for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    pipe = pipeline.compose(len(stages), stages, mesh=mesh, schedule=kind, microbatches=count)

    @ts.jit(donate=("weights", "state") if donate else ())
    def train_step(weights: Any, state: Any, x: ts.Tensor) -> Any:
        now[:] = weights
        y = pipe(x)
        loss = (y * y).mean()
        grads = ts.grad(loss, weights)
        now.clear()
        if not donate:
            return loss, grads
        m, v = ([{k: 0.9 * s[k] + g[k] for k in s} for s, g in zip(kept, grads)] for kept in state)
        steps = [{k: a[k] / (1.0 + b[k] * b[k]) for k in a} for a, b in zip(m, v)]
        return loss, m, v, [{k: w[k] - u[k] for k in w} for w, u in zip(weights, steps)]

    call = Executable.__call__

    def catch(self: Executable, *given: Any) -> Any:
        if self.schedule.is_staged:
            raise Caught(self)
        return call(self, *given)

    monkeypatch.setattr(Executable, "__call__", catch)
    with pytest.raises(Caught) as caught:
        train_step(weights, (like(weights), like(weights)) if donate else (), x)
    program = caught.value.args[0]
    return program.schedule, program.run


def live(env: dict[int, Any]) -> dict[int, int]:
    """The bytes of all buffers by device; memory shared by two arrays counts once."""
    seen: dict[int, dict[int, int]] = {}
    for array in env.values():
        for shard in () if array.is_deleted() else array.addressable_shards:
            here = seen.setdefault(shard.device.id, {})
            if not shard.data.is_deleted():  # a donated buffer has lost its memory
                here[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(sizes.values()) for device, sizes in seen.items()}


def measured(s: Schedule, run: Stepped) -> Iterator[dict[int, int]]:
    """Runs the schedule step by step. Yields the bytes of each device after each step, plus the
    temporaries that XLA reports."""
    env = {
        b: arrays.place(np.zeros(s.buffers[b].shape, np.float32), s.buffers[b]) for b in s.inputs
    }
    inside: dict[Any, int] = {}
    for i, (step, program) in enumerate(zip(s.steps, run.steps, strict=True)):
        ins = [env[b] for b in step.reads]
        own = 0
        if step.kind != "send":
            if step.graph not in inside:
                found: Any = program
                analysis = found.lower(*ins).compile().memory_analysis()
                inside[step.graph] = analysis.temp_size_in_bytes
            own = inside[step.graph]
        outs = program(*ins)
        jax.block_until_ready(outs)
        env.update(zip(step.writes, outs, strict=True))
        mesh = step.graph.mesh or s.mesh
        assert mesh is not None
        busy = set(np.ravel(mesh.array()).tolist())
        yield {d: size + (own if d in busy else 0) for d, size in live(env).items()}
        for b in s.freed[i]:
            del env[b]


@pytest.mark.parametrize(
    ("pp", "dp", "kind", "count", "cuts", "donate"),
    [
        (2, 2, "1F1B", 4, [3], False),
        pytest.param(2, 2, "GPipe", 4, [2], True, marks=LONG),
        (2, 4, "ZB-H1", 4, [1], False),
        (4, 2, "1F1B", 8, [1, 3, 4], True),
        pytest.param(4, 1, "GPipe", 8, [2, 3, 4], False, marks=LONG),
    ],
)
def test_each_stages_peak_is_that_of_the_arrays_that_live(
    pp: int, dp: int, kind: str, count: int, cuts: list[int], donate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    schedule, run = pipelined(pp, dp, kind, count, cuts, donate, monkeypatch)
    plans = stage_plans(schedule)
    assert len(plans) == pp
    peaks: dict[int, int] = {}
    for now in measured(schedule, run):
        peaks.update({d: max(size, peaks.get(d, 0)) for d, size in now.items()})
    for mesh, plan in plans.items():
        given = plan.batch  # weights too: all arguments lie on every device
        for device in np.ravel(mesh.array()).tolist():
            inside = peaks[device] - given
            # The engine chooses its own order for the products of a backward pass.
            assert -0.12 <= (plan.peak - given) / inside - 1 <= 0.2
