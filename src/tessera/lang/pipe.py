"""Pipelines: a model whose stages lie on slices of the mesh, run microbatch by microbatch.

A function that calls one is recorded for one microbatch, on the mesh of a stage. Its losses and
gradients mean their averages over the microbatches; what it does with the gradients happens once,
after all of them. The schedule (ir/schedule/pipeline.py) plays a table of actions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..core.context import settings
from ..core.errors import GraphError, MeshError, ShapeError, UsageError, fail
from ..core.layout import Factor, TensorType, ways
from ..core.mesh import Mesh
from ..ir.graph.node import Node, reachable
from ..ir.schedule.build import FREE
from ..ir.schedule.orders import known_schedule, pipeline_table
from ..ir.schedule.pipeline import Plan, Recorded, pipeline_schedule
from ..ir.schedule.simulate import warn_if_few
from ..ir.schedule.stages import balanced
from ..ir.schedule.tables import Table
from ..ops.op import OPS
from .checks import axes_of, function_of, shown, whole
from .record import Recorder, current, scope
from .strategy import holds_weights
from .tensor import Tensor

MICROBATCHES = 2  # for each stage, where nobody says how many


class NeedsPipe(Exception):
    """The function being recorded calls a pipeline: it is recorded anew, for one microbatch."""

    def __init__(self, pipe: Pipe, mesh: Mesh, rows: int) -> None:
        self.pipe, self.mesh, self.rows = pipe, mesh, rows


@dataclass(eq=False)
class PipeState:
    """What a recording for one microbatch knows."""

    pipe: Pipe
    mesh: Mesh  # the whole
    template: Mesh  # of one stage, whichever
    count: int
    rows: int
    batch: dict[Node, TensorType] = field(default_factory=dict)
    sums: dict[Node, Node] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)  # where each part was recorded
    homes: dict[Node, int] = field(default_factory=dict)
    # Gradients of weights that lie on the whole mesh; they come back there.
    whole_results: set[Node] = field(default_factory=set)

    @staticmethod
    def begin(need: NeedsPipe) -> PipeState:
        pipe, mesh = need.pipe, need.mesh
        count = pipe.microbatches(mesh.sizes[pipe.axis])
        if need.rows % count:
            raise fail(
                ShapeError,
                f"{pipe.name}: a batch of {need.rows} does not divide into {count} microbatches",
                fix="choose a number that divides it: microbatches=",
            )
        return PipeState(pipe, mesh, mesh.slice(**{pipe.axis: 0}), count, need.rows)

    def type_of(self, t: Tensor, path: Sequence[object] = ("weights",)) -> TensorType:
        """The type of `t` in the recording: one microbatch's part of a batch, on a stage's mesh."""
        kind = t.type
        if kind.mesh is None or kind.mesh == self.mesh:
            if self.pipe.axis in kind.split_axes:
                raise fail(
                    MeshError,
                    f"{self.pipe.name}: a tensor is split over {self.pipe.axis!r}, which the stages"
                    " lie along",
                    [("tensor", kind)],
                    fix="leave it replicated there: each stage keeps what it uses",
                )
        elif kind.mesh not in self.slices:
            raise fail(
                MeshError,
                f"{self.pipe.name}: a tensor lies on another mesh",
                [("tensor", f"{kind} on {kind.mesh.text()}"), ("mesh", self.mesh.text())],
                fix="put it on the mesh, or on a stage's slice of it",
            )
        here = self.on_stage(kind)
        if not self.is_batch(t, path):
            return here
        first = here.dims[0]
        n = ways((a for f in first for a in f.axes), here.sizes)
        if len(first) > 1 or (self.rows // n) % self.count or self.rows % n:
            raise fail(
                ShapeError,
                f"{self.pipe.name}: the rows of a batch do not divide into {self.count}"
                " microbatches on each device",
                [("batch", kind)],
                fix="choose a number that divides them: microbatches=",
            )
        part = (Factor(self.rows // self.count, first[0].axes),)
        return here.with_dims((part, *here.dims[1:]))

    def on_stage(self, t: TensorType) -> TensorType:
        """`t`, of the mesh or of a stage's slice of it, on the mesh that is recorded on."""
        if t.mesh is None:
            return t
        return TensorType(t.dtype, t.dims, t.partial, self.template)

    def is_batch(self, t: Tensor, path: Sequence[object]) -> bool:
        return bool(t.shape) and t.shape[0] == self.rows and not holds_weights(t.name, path)

    def met(self, node: Node, t: Tensor, path: Sequence[object] = ("weights",)) -> None:
        """Notes the input `node` for `t`."""
        if self.is_batch(t, path):
            self.batch[node] = self.whole(t)
        if t.type.mesh in self.slices:
            self.homes[node] = self.slices.index(t.type.mesh)

    def whole(self, t: Tensor) -> TensorType:
        """The type in which `t` is given to the program."""
        return t.type if t.type.mesh is not None else t.type.on(self.mesh)

    @cached_property
    def slices(self) -> list[Mesh]:
        n = self.mesh.sizes[self.pipe.axis]
        return [self.mesh.slice(**{self.pipe.axis: r}) for r in range(n)]

    def accumulated(self, recorder: Recorder, found: Sequence[Node]) -> list[Node]:
        """What stands for the sums of `found` over all microbatches."""
        b = recorder.builder

        def sum_of(n: Node) -> Node:
            if n.op == "add" and n not in b.origins:  # of a weight that several stages use
                return b("add", *map(sum_of, n.args))
            made = b.input(n.type, f"sum{len(self.sums)}")
            self.sums[made] = n
            return made

        return [sum_of(n) for n in found]


class Pipe:
    """A pipelined function: `parts` in order, or one `whole` function that is cut by cost."""

    def __init__(
        self,
        parts: Sequence[Callable[..., Any]],
        axis: str,
        mesh: Mesh | None,
        schedule: Any,
        count: int | None,
        chunks: int | None,
        name: str,
        stages: int | None = None,
    ) -> None:
        self.parts, self.axis, self.mesh, self.kind = list(parts), axis, mesh, schedule
        self.count, self.chunks, self.name, self.stages = count, chunks, name, stages
        self.plan: Plan | None = None
        self.balance: list[float] = []  # FLOPs of each stage's forward pass of a microbatch
        self._jit: Any = None

    def __call__(self, *args: Any) -> Any:
        recorder = current()
        if recorder is None:
            if self._jit is None:
                from .jit import jit

                call = lambda *xs: self(*xs)  # noqa: E731  # jit needs a name of its own
                call.__name__ = self.name
                self._jit = jit(call)
            return self._jit(*args)
        x = next((a for a in args if isinstance(a, Tensor) and a.shape), None)
        if x is None:
            raise fail(
                UsageError,
                f"{self.name}: a pipeline needs a tensor whose dim 0 is the batch",
                fix="give the batch as its first argument",
            )
        state = recorder.pipe
        if state is None:
            raise NeedsPipe(self, self._mesh(x), x.shape[0])
        if state.pipe is not self or state.spans:
            raise fail(
                UsageError,
                f"{self.name}: a function calls pipelines twice",
                fix="put all stages into one pipeline, and call it once in a function",
            )
        out: Any = args
        for i, part in enumerate(self.parts):
            first = len(recorder.builder.nodes)
            with scope(f"stage{i}" if len(self.parts) > 1 else self.name):
                out = part(*out) if isinstance(out, tuple) else part(out)
            state.spans.append((first, len(recorder.builder.nodes)))
        return out

    @property
    def schedule(self) -> Any:
        """The Schedule of the last recording. Raises UsageError before the first call."""
        if self.plan is None:
            raise fail(UsageError, f"{self.name}: it has not been called yet", fix="call it once")
        return self.plan.schedule

    @property
    def table(self) -> Any:
        """The table of actions of the last recording."""
        _ = self.schedule
        assert self.plan is not None
        return self.plan.table

    def _mesh(self, x: Tensor) -> Mesh:
        mesh = self.mesh or settings().mesh or x.mesh
        if mesh is None or self.axis not in mesh:
            raise fail(
                MeshError,
                f"{self.name}: there is no mesh with an axis {self.axis!r} to lay the stages on",
                [("mesh", mesh.text() if mesh is not None else "none")],
                fix="pass mesh=..., or name another axis of the mesh",
            )
        if len(mesh.axes) == 1:
            return Mesh((*mesh.axes, "one"), mesh.array()[..., None])
        return mesh

    # -- from one microbatch to a schedule --------------------------------------------------------
    def microbatches(self, ranks: int) -> int:
        return self.count or settings().schedule.microbatches or MICROBATCHES * ranks

    def compiled(
        self, recorder: Recorder, outputs: Sequence[Node], wholes: Sequence[TensorType]
    ) -> Plan:
        """The pipeline of what was recorded; `wholes` are the types of the inputs as given."""
        state, b = recorder.pipe, recorder.builder
        assert state is not None
        graph = b.graph(outputs)
        new = b.finals
        origins = {new.get(n, n): new.get(o, o) for n, o in b.origins.items()}
        sums = {k: new.get(b.replaced.get(n, n), b.replaced.get(n, n))
                for k, n in state.sums.items()}  # fmt: skip
        micro, late = _depends(graph.nodes, set(state.batch)), _depends(graph.nodes, set(sums))
        for n in graph.nodes:
            if n in late and any(a in micro and a not in late for a in n.args):
                raise fail(
                    GraphError,
                    f"{self.name}: what comes after the gradients needs a value of single"
                    " microbatches",
                    [("value", n.type)],
                    at=n.loc,
                    fix="use gradients, weights and state there; return losses as they are",
                )
        means, rows = set[Node](), set[Node]()
        for o in graph.outputs:
            if o in micro and o not in late:
                self._kind(o, state, means, rows)
        backward = {n for n in sums.values() if n in origins}
        forward = reachable((*means, *rows, *(n for n in sums.values() if n not in backward)))
        table = self._table(state)
        spans = [[new.get(n, n) for n in b.nodes[i:j]] for i, j in state.spans]
        parts = [[n for n in part if n in forward and n.op != "input"] for part in spans]
        groups = self._groups(parts, table.stages, state)
        made = Recorded(
            graph,
            state.batch,
            sums,
            frozenset(means),
            frozenset(rows),
            {n: s for s, group in enumerate(groups) for n in group},
            origins,
            state.homes,
            frozenset(new.get(n, n) for n in state.whole_results),
            recorder.key,
        )
        warn_if_few(table, stacklevel=6)
        self.plan = pipeline_schedule(made, wholes, table, state.slices, state.mesh)
        return self.plan

    def _kind(self, o: Node, state: PipeState, means: set[Node], rows: set[Node]) -> None:
        part = next(iter(state.batch)).type.shape[0]
        if not o.type.rank and o.type.dtype.is_float:
            means.add(o)
        elif o.type.rank and o.type.shape[0] == part:
            rows.add(o)
        else:
            raise fail(
                GraphError,
                f"{self.name}: a result does not separate by microbatch",
                [("result", o.type), *([("made at", o.loc)] if o.loc else [])],
                fix="return losses (float scalars), gradients, or values with the batch as dim 0",
            )

    def _table(self, state: PipeState) -> Table:
        ranks = state.mesh.sizes[self.axis]
        chunks = self.chunks
        if chunks is None and isinstance(self.kind, str) and not self.kind.endswith(".csv"):
            known = known_schedule(self.kind).chunks
            chunks = known or max(1, (self.stages or 2 * ranks) // ranks)
        return pipeline_table(self.kind, ranks, state.count, chunks)

    def _groups(self, parts: list[list[Node]], count: int, state: PipeState) -> list[list[Node]]:
        """The nodes of each of `count` stages."""
        if len(parts) == 1:
            parts = _pieces(parts[0])
        if len(parts) < count:
            raise fail(
                UsageError,
                f"{self.name}: {len(parts)} parts for a pipeline of {count} stages",
                [("axis", f"{self.axis} of {state.mesh.text()}")],
                fix="give a part for each stage, or a smaller axis; one function is cut where one"
                " value passes",
            )
        starts = balanced([_flops(p) for p in parts], count)
        ends = [*starts[1:], len(parts)]
        self.balance = [_flops([n for p in parts[a:b] for n in p]) for a, b in zip(starts, ends)]
        return [[n for p in parts[a:b] for n in p] for a, b in zip(starts, ends, strict=True)]


def _depends(nodes: Sequence[Node], sources: set[Node]) -> set[Node]:
    found = set(sources)
    for n in nodes:
        if any(a in found for a in n.args):
            found.add(n)
    return found


def _flops(nodes: Sequence[Node]) -> float:
    total = 0.0
    for n in nodes:
        ins = n.args[0].types if n.op == "item" else tuple(a.type for a in n.args)
        total += OPS[n.op].flops(ins, n.types, n.attrs) * ways(n.type.per, n.type.sizes)
    return total


def _pieces(nodes: list[Node]) -> list[list[Node]]:
    """`nodes` cut wherever one value crosses."""
    last_use = {a: i for i, n in enumerate(nodes) for a in n.args}
    alive: set[Node] = set()
    cuts = [0]
    for i, n in enumerate(nodes):
        alive.add(n)
        alive = {a for a in alive if last_use.get(a, -1) > i and a.op not in FREE}
        if len(alive) == 1 and next(iter(alive)).type.rank > 1:
            cuts.append(i + 1)
    pairs = zip(cuts, [*cuts[1:], len(nodes)], strict=True)
    return [nodes[a:b] for a, b in pairs if b > a]


# -- the faces' functions -------------------------------------------------------------------------
def _checked(
    name: str, axis: object, microbatches: object, chunks: object, schedule: object
) -> tuple[str, int | None, int | None]:
    axes = axes_of(name, axis)
    if len(axes) != 1:
        raise fail(UsageError, f"{name}: a pipeline lies along one axis", [("axes", axes)],
                   fix='name one: mesh_axes=("pp",)')  # fmt: skip
    count = None if microbatches is None else whole(name, "microbatches", microbatches, 1)
    many = None if chunks is None else whole(name, "chunks", chunks, 1)
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        known_schedule(schedule)
    return axes[0], count, many


def _parts(name: str, stages: object) -> list[Callable[..., Any]]:
    if not isinstance(stages, (list, tuple)) or not stages:
        raise fail(
            UsageError, f"{name}: stages cannot be {shown(stages)}", fix="give a list of functions"
        )
    return [function_of(name, "a stage", s) for s in stages]


def pipeline(
    stages: Sequence[Callable[..., Any]],
    mesh: Mesh | None = None,
    axis: str = "pp",
    *,
    schedule: Any = "1F1B",
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Callable[[Callable[..., Any]], Pipe]:
    """`@graph.pipeline(stages=[encoder, decoder], mesh=mesh, axis="pp")` above the model that calls
    them: the stages lie along `axis`, microbatches go through by `schedule` (guide 3, 4.4).

    `schedule` is a name ("GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZB-H2", "ZBV", "DualPipeV"),
    a table or a CSV file. More stages than the axis has devices are put together by cost. Raises
    UsageError, MeshError.
    """
    axis, count, many = _checked("pipeline", axis, microbatches, chunks, schedule)
    parts = _parts("pipeline", stages)

    def wrap(fn: Callable[..., Any]) -> Pipe:
        function_of("pipeline", "the model", fn)
        made = Pipe(parts, axis, mesh, schedule, count, many, getattr(fn, "__name__", "model"))
        functools.update_wrapper(made, fn, updated=())
        return made

    return wrap


def compose(
    stages: int,
    assign: Sequence[Callable[..., Any]],
    *,
    mesh: Mesh | None = None,
    axis: str = "pp",
    schedule: Any = "1F1B",
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Pipe:
    """The functions `assign` one after the other as a pipeline of `stages` stages (guide 2, 3.3).

    More functions than stages are put together by cost. Raises UsageError.
    """
    axis, count, many = _checked("compose", axis, microbatches, chunks, schedule)
    n = whole("compose", "stages", stages, 1)
    parts = _parts("compose", assign)
    if len(parts) < n:
        raise fail(
            UsageError,
            f"compose: {len(parts)} functions for {n} stages",
            fix="give a function for each stage, or fewer stages",
        )
    return Pipe(parts, axis, mesh, schedule, count, many, "pipe", n)


def run(
    mesh_axes: str | Sequence[str] = ("pp",),
    schedule: Any = "1F1B",
    microbatches: int | None = None,
    *,
    mesh: Mesh | None = None,
    chunks: int | None = None,
) -> Callable[[Callable[..., Any]], Pipe]:
    """`@pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=16)` above a function: it is
    cut into stages of like cost where one value passes (guide 2, 3.3). Raises UsageError."""
    axis, count, many = _checked("run", mesh_axes, microbatches, chunks, schedule)

    def wrap(fn: Callable[..., Any]) -> Pipe:
        function_of("run", "the function", fn)
        made = Pipe([fn], axis, mesh, schedule, count, many, getattr(fn, "__name__", "model"))
        functools.update_wrapper(made, fn, updated=())
        return made

    return wrap
