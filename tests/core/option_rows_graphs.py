"""Rows of the option table: recording, gradients, schedules, pipelines, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, graph, op, optim, pipeline, schedule
from tessera.core.context import settings
from tessera.core.options import ProgramOptions, ScheduleOptions
from tessera.core.topology import cluster
from tests.core.option_rows import (
    COMMON,
    LINE,
    MESH,
    OTHER,
    RNG,
    SQUARE,
    STAGES,
    A,
    drawn,
    row,
    seen,
    sharded,
    stepped,
)
from tests.core.option_rows_models import said
from tests.core.option_rows_programs import composed, of_eight, run_plan, traced

# -- tensors and random numbers --------------------------------------------------------------------
row("tessera.arange of bounds", lambda **k: ts.arange(3, **k), {"stop": 9}, stop=7, step=2)
row("tessera.Tensor.flatten", lambda **k: ts.tensor(LINE).flatten(**k), start_dim=1, end_dim=1)
row("tessera.Tensor.squeeze", lambda **k: ts.tensor(LINE[:, :1]).squeeze(**k), dim=0)
SPLIT = ts.tensor(np.ones(8), mesh=MESH, layout="[8@dp]").type
for name, args in (("bernoulli", ((8,), 0.5)), ("normal", ((8,),)), ("randint", ((8,), 0, 9))):
    row(f"tessera.random.{name} on a mesh", drawn(getattr(ts.random, name), *args), like=SPLIT)
row("tessera.random.randint of a dtype", drawn(ts.random.randint, (8,), 0, 9), dtype="u8")
row("tessera.random.multinomial", drawn(ts.random.multinomial, np.ones(9, np.float32), 9),
    replacement=True)  # fmt: skip
row("tessera.mesh.auto of a shape", of_eight(lambda **k: ts.mesh.auto(**k).text()),
    {"axes": ("dp", "tp"), "shape": (2, 4)}, shape=(4, 2))  # fmt: skip

# -- gradients -------------------------------------------------------------------------------------
TYPES = sharded("[8@dp, 8]").type, sharded("[8, 8@tp]").type


def slopes(how: Callable[..., Any], **k: Any) -> str:
    """The program of a loss and of its gradients with respect to the selected `weights`."""

    def run(x: Any, w: Any) -> Any:
        by = {"both": [x, w], "one": w}[k.pop("weights", "one")]
        return how((x @ w).sum(), by, **k)

    return traced(run, *TYPES)


LAYOUTS = {"layout": sharded("[8@dp, 8@tp]").type, "weights": "both"}
row("tessera.grad of weights", lambda **k: slopes(ts.grad, **k), **LAYOUTS)
row("tessera.graph.backward", lambda **k: slopes(graph.backward, **k), **LAYOUTS,
    reduce_partial=False)  # fmt: skip
row("tessera.op.autodiff", lambda **k: said(lambda: slopes(op.autodiff, **k)), **LAYOUTS,
    reduce_partial=True)  # fmt: skip


# -- compiled functions ----------------------------------------------------------------------------
def jitted(**k: Any) -> Any:
    """The plan of a function, with its donated arguments and its padding."""
    made = ts.jit(lambda x, w: (x @ w).sum(0), **k)
    return made.plan(sharded("[8@dp, 8@tp]"), sharded("[8@tp, 8]")).text


PADS = ts.Pad(0, (4,), 0.0)


def padded(**k: Any) -> list[int]:
    met = []

    @ts.jit(**k)
    def run(x: Any) -> Any:
        met.append(x.shape[0])
        return x * 2.0

    for n in (3, 4):
        run(np.ones((n, 2), np.float32))
    return met


row("tessera.jit", jitted, reduce_partial=False)
row("tessera.jit of sizes", padded, pad={"x": PADS})


def by_decorator(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that names the type that `decorate` returns."""

    def run(fn: Any = None, **k: Any) -> str:
        return type(decorate(fn, **k) if fn is not None else decorate(**k)).__name__

    return run


def doubled(x: Any) -> Any:
    return x * 2.0


row("tessera.jit as a decorator", by_decorator(ts.jit), fn=doubled)
row("tessera.strict", lambda **k: said(lambda: strictly(**k)), enabled=False)


def strictly(**k: Any) -> str:
    with ts.strict(**k):
        return traced(lambda x, w: x @ w, sharded("[8, 8@dp]").type, sharded("[8@tp, 8]").type)


# -- graphs ----------------------------------------------------------------------------------------
SMALL = graph.trace(lambda x: ts.tanh(ts.exp(x)), A)
LOOPED = graph.trace(lambda x: ts.scan(lambda h, r: (ts.tanh(h + r), ()), x[0], x)[0], A)
CHOSEN = ProgramOptions(schedule=ScheduleOptions(overlap=True))
FIRST, SECOND = SMALL.nodes[-2:]


def copy(g: graph.Graph, **k: Any) -> graph.Graph:
    return graph.Graph(g.name, g.nodes, g.inputs, g.outputs, **k)


row("tessera.graph.Graph", lambda **k: copy(SMALL, **k).text, options=CHOSEN)
row("tessera.graph.parse", lambda **k: graph.parse(SMALL.text, **k).options.text(), around=CHOSEN)
row("tessera.graph.Graph.part", lambda **k: SMALL.part(SMALL.inputs, [SECOND], **k).text,
    swap={FIRST: SMALL.inputs[0]})  # fmt: skip
row("tessera.graph.Graph.rewrite",
    lambda **k: LOOPED.rewrite(None, **k).text,
    bodies=lambda body: graph.trace(lambda h, r: (h, r), A[0], A[0]))  # fmt: skip
row("tessera.graph.verify",
    lambda **k: said(lambda: graph.verify(graph.Graph("bad", (), (), SMALL.outputs), **k)),
    after="fuse")  # fmt: skip


def planned_step(**k: Any) -> Any:
    """The weights of a training step that creates its own model, and its text."""

    @graph.training_step(**k)
    def step(x: Any) -> Any:
        y = op.transformer_block(x, heads=2)
        return (y * y).mean()

    step(ts.tensor(RNG.normal(size=(8, 4, 8)).astype(np.float32), mesh=MESH))
    return [(n, str(w.type)) for n, w in step.parameters.items()]


row("tessera.graph.training_step", planned_step, module="net",
    strategy=dist.strategy("zero_redundancy_optimizer", stage=3))  # fmt: skip

# -- schedules -------------------------------------------------------------------------------------
WRITTEN: dict[str, Any] = {
    "algorithm": (("", "ring"),), "backend": "nccl", "bucket_bytes": 64, "epoch": "hard",
    "microbatches": 8, "overlap": True, "pipeline": False, "prefetch": 1, "scope_depth": 2,
    "topology": cluster("h100"), "choices": (("library", "older"),), "reshard_after_forward": False,
    "tile": (("BM", 128),), "warps": 8,
}  # fmt: skip
row("tessera.schedule.ScheduleOptions", lambda **k: schedule.ScheduleOptions(**k).text(),
    **WRITTEN)  # fmt: skip
PLAIN = ts.jit(lambda x: (ts.tanh(x),)).plan(A)


def schedule_of(**k: Any) -> str:
    s = PLAIN
    made = schedule.Schedule(s.name, s.mesh, s.buffers, s.inputs, s.outputs, s.steps, **k)
    return made.text


row("tessera.schedule.Schedule", schedule_of, options=CHOSEN, donated=(0,), table="1F1B")
row("schedule of experts", lambda **k: settings_of(schedule(**k)), epoch="hard")


def settings_of(chosen: Any) -> str:
    found: list[str] = []
    chosen(lambda: found.append(settings().program.schedule.text()))()
    return found[0]


# -- pipelines -------------------------------------------------------------------------------------
EIGHT = dist.Mesh(("dp", "pp"), shape={"dp": 4, "pp": 2})
LINES = dist.Mesh(("pp", "dp"), shape={"dp": 2, "pp": 2})
row("tessera.pipeline.run on a mesh", lambda **k: said(lambda: run_plan(**k)),
    {"mesh": STAGES, "schedule": "Interleaved1F1B"}, mesh_axes=("dp",), mesh=EIGHT,
    chunks=3)  # fmt: skip
FOUR: dict[str, Any] = {"mesh": STAGES, "axis": "pp", "schedule": "Interleaved1F1B"}
for name, make in (
    ("tessera.pipeline.compose of chunks", lambda parts, **k: pipeline.compose(4, parts, **k)),
    ("tessera.graph.pipeline", lambda parts, **k: in_turn(parts, graph.pipeline(parts, **k))),
):
    more = {"mesh": LINES, "microbatches": 8, "schedule": "GPipe"} if "graph" in name else {}
    row(name, lambda make=make, **k: said(lambda: composed(make)(**k)), FOUR, axis="dp", chunks=1,
        **more)  # fmt: skip


def in_turn(parts: Any, decorate: Any) -> Any:
    """A model that calls its stages in sequence."""

    def model(x: Any) -> Any:
        for part in parts:
            x = part(x)
        return x

    return decorate(model)


def pipe(**k: Any) -> Any:
    parts = [lambda x, i=i: ts.tanh(x * float(i + 2)) for i in range(4)]
    made = pipeline.Pipe(parts, "pp", STAGES, "Interleaved1F1B", None, None, "model", **k)
    return ts.jit(lambda x: made(x)).plan(np.ones((32, 8), np.float32)).text


row("tessera.pipeline.Pipe", lambda **k: said(lambda: pipe(**k)), stages=8,
    body=lambda x: x * 3.0)  # fmt: skip


# Without `batch`, the first argument, the table, would be split.
def of_a_table(make: Any) -> Any:
    parts = [lambda table, x: ts.tanh(x @ table.T), lambda h: ts.tanh(h * 3.0)]

    def run(**k: Any) -> str:
        step = ts.jit(lambda table, x: make(parts, **k)(table, x))
        return step.plan(np.ones((8, 8), np.float32), np.ones((32, 8), np.float32)).text

    return run


def model_of(parts: Any) -> Any:
    return lambda table, x: parts[1](parts[0](table, x))


for name, make, batch in (
    ("tessera.pipeline.compose", lambda p, **k: pipeline.compose(2, p, mesh=STAGES, **k), "x"),
    ("tessera.pipeline.run", lambda p, **k: pipeline.run(mesh=STAGES, **k)(model_of(p)), "x"),
    ("tessera.graph.pipeline", lambda p, **k: graph.pipeline(p, STAGES, **k)(model_of(p)), "x"),
    ("tessera.pipeline.Pipe",
     lambda p, **k: pipeline.Pipe(p, "pp", STAGES, "1F1B", None, None, "model", **k), ("x",)),
):  # fmt: skip
    row(f"{name} of a table", of_a_table(make), batch=batch)
row("tessera.pipeline.Action", lambda **k: repr(pipeline.Action("F", 0, 0, **k)), joined=True)
TABLE = pipeline.pipeline_table("DualPipeV", 2, 8)
row("tessera.pipeline.simulate of pairs", lambda **k: pipeline.simulate(TABLE, **k).end_s,
    joined_s=9)  # fmt: skip
row("tessera.pipeline.pipeline_svg", lambda **k: pipeline.pipeline_svg(TABLE, **k), unit_s=2.0)
CSV = "0F0,0B0\n1F0,1B0\n"
ROWS = [line.split(",") for line in CSV.split()]
row("tessera.pipeline.Table.from_csv", lambda **k: pipeline.Table.from_csv(CSV, **k).name,
    name="mine")  # fmt: skip
row("tessera.pipeline.Table.from_rows", lambda **k: pipeline.Table.from_rows(ROWS, **k),
    name="mine", placement=(1, 0), microbatches=2)  # fmt: skip
row("tessera.pipeline.Table.from_function",
    lambda **k: pipeline.Table.from_function(lambda r, n, m: [f"{r}F0", f"{r}B0"], 2, 1, **k).name,
    name="mine")  # fmt: skip


def piped_jit(**k: Any) -> Any:
    model = pipeline.run(mesh=STAGES)(lambda x: ts.tanh(ts.tanh(x * 2.0) * 3.0))
    return ts.jit(lambda x: model(x), **k).plan(np.ones((32, 8), np.float32)).donated


row("tessera.jit of a pipeline", piped_jit, donate="x")

# -- optimizers ------------------------------------------------------------------------------------
row("tessera.optim.Adafactor of steps", stepped(optim.Adafactor), {"weight_decay": 0.1},
    relative=False)  # fmt: skip


class Descent(optim.Optimizer):
    """A user's optimizer, which accepts the options of every optimizer."""

    def _limits(self) -> Any:
        return []

    def _slots(self, t: Any) -> Any:
        return {}

    def _factors(self, lr: Any, count: Any) -> Any:
        return {"lr": lr}

    def _step(self, w: Any, g: Any, old: Any, k: Any, decays: bool) -> Any:
        return w - k["lr"] * (g + w * self.weight_decay if decays else g), {}


row("tessera.optim.Optimizer", stepped(Descent), {"weight_decay": 0.1},
    **{k: v for k, v in COMMON.items() if k != "lr"})  # fmt: skip
row("tessera.optim.LossScale.init", lambda **k: seen(optim.LossScale().init(**k)["scale"]),
    mesh=MESH)  # fmt: skip
row("tessera.optim.Optimizer.init",
    lambda **k: optim.AdamW().init({"w": ts.tensor(SQUARE, mesh=OTHER)}, **k),
    strategy=dist.strategy("zero_redundancy_optimizer", stage=1))  # fmt: skip
