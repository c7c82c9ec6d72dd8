"""Pipelines: a model whose stages lie on slices of the mesh, run microbatch by microbatch.

A function that calls one is recorded once, for the whole batch; the pipeline splits the batch among
its arguments over an axis in time. Nodes that need all microbatches, such as the use of gradients,
run once, after all of them. The schedule (ir/schedule/pipelines/pipeline.py) follows a table of
actions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from ....core.context import replaced, settings
from ....core.errors import MeshError, UsageError
from ....core.layout import TensorType, dim_axes
from ....core.mesh import Mesh
from ....core.reshard import gathered
from ....core.tracebacks import boundary
from ....ir.graph.node import Node, is_in
from ....ir.schedule.pipelines.orders import named_schedule, pipeline_table
from ....ir.schedule.pipelines.tables import Table
from ....ir.schedule.schedule import Schedule
from ...jit.jit import jit
from ...jit.segments import Reads
from ...jit.weight_store import collector
from ...math.functions import relayout
from ...record.mesh_transfer import sent
from ...record.operands import as_tensor
from ...record.parameter import Parameter
from ...record.recorder import WHOLE, Recorder, current, named_scope, open_choice
from ...record.submesh import Slices, laid_on
from ...record.tree import flatten, is_registered, path_name, paths, unflatten
from ...value.checks import bound, signature_of
from ...value.host_data import is_array
from ...value.tensor import Tensor
from ..microbatches import in_microbatches, rows_of
from .microbatch import PipeState
from .program import PipeProgram, pipe_program

MICROBATCHES = 2  # the default number for each stage


@dataclass(eq=False, repr=False)
class Pipe:
    """A pipelined function: `parts` in order, or a single function that is split by cost.

    `graph.pipeline`, `pipeline.compose` and `pipeline.run` make one. Each recording replaces
    `program`, the result of the last one.
    """

    parts: Sequence[Callable[..., Any]]
    axis: str
    mesh: Mesh | None
    kind: Any  # the order in which stages run: its name, a table, a CSV file or a function
    count: int | None  # microbatches
    chunks: int | None  # stages per rank
    name: str
    stages: int | None = None
    body: Callable[..., Any] | None = None  # calls the parts, which have scopes of their names
    batch: tuple[str, ...] | None = None  # the arguments that hold the batch
    cut_at: tuple[str, ...] = field(default=(), init=False)  # modules where a part begins
    warned: set[str] = field(default_factory=set, init=False)  # the warnings that were given
    program: PipeProgram | None = field(default=None, init=False)  # of the last recording
    _jit: Any = field(default=None, init=False)

    @boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            if self._jit is None:
                call = lambda *xs, **named: self(*xs, **named)  # noqa: E731  # needs its own name
                call.__name__ = self.name
                call.__signature__ = inspect.signature(self.body or self.parts[0])  # type: ignore[attr-defined]
                self._jit = jit(call)
            return self._jit.at_once(*args, **kwargs)
        here, known = collector(), recorder.root.stages
        if here is not None:
            here.check_mesh(self.mesh)
        if not recorder.compiles or settings().program.schedule.pipeline is False:
            recorder.root.piped = True
            return self._play(args, kwargs)  # as a plain function
        if recorder.parent is not None or not (
            recorder.frame is WHOLE or isinstance(recorder.frame, Slices)
        ):
            raise UsageError(
                f"{self.name}: a pipeline is called in a loop or a local body",
                fix="call it in the compiled function itself",
            )
        if known is not None:
            raise UsageError(
                f"{self.name}: a function calls pipelines twice",
                fix="put all stages into one pipeline, and call it once in a function",
            )
        if isinstance(recorder.reader, Reads) and recorder.reader.nodes:
            raise UsageError(
                f"{self.name}: a value is read before the pipeline, in the function that calls it",
                fix="return the value, and read it after the call",
            )
        recorder.reader = None  # no value can be read after it either
        tensors = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        mesh = self._mesh(tensors)
        state = PipeState(self, mesh, self.microbatches(mesh.sizes[self.axis]))
        recorder.root.stages, b = state, recorder.builder
        wide = () if state.mesh == mesh else (state.mesh,)
        b.slices, b.whole, b.stages_axis = (*state.slices, *wide), mesh, self.axis
        b.gathers_again = False  # all microbatches share the gathered weights
        near, first = self._batch(args, kwargs)
        if first is not None and self.axis in dim_axes(first.type.dims[0]):
            raise MeshError(
                f"{self.name}: a batch is split over {self.axis!r}, which the stages lie along",
                batch=first.type,
                fix="leave it replicated there: each stage gets what it uses",
            )
        # Without a batch the count stays as requested, and `Microbatch` raises if it is above 1.
        count, state.count = state.count, state.count if first is None else 1
        cut = {id(t): x for t, x in zip(near, in_microbatches(near, count, first, mesh))}
        for x in cut.values():
            if x.mesh is not None and x.mesh.time:
                state.count = x.mesh.sizes[x.mesh.time[0]]
                state.rows = x.shape[0] // state.count

        def split_over_time(arg: Any) -> Any:
            """Returns an argument with its batch split over time; an argument without one, such as
            a module, as it is."""
            leaves, spec = flatten(arg)
            now = [cut.get(id(x), x) for x in leaves]
            return arg if all(map(is_, now, leaves)) else unflatten(spec, now)

        args, kwargs = (
            tuple(map(split_over_time, args)),
            {k: split_over_time(x) for k, x in kwargs.items()},
        )
        return self._play(args, kwargs, state, recorder)

    def _batch(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Tensor | None]:
        """Returns (the tensors that may hold the batch, the first that holds its rows). The tensors
        are those of the arguments `batch`; else tensors that are arguments themselves, integers and
        bools, and tensors of the same argument as the first. A module holds none."""
        each = [[] if _is_module(x) else flatten(x)[0] for x in (*args, *kwargs.values())]
        if self.batch is not None:
            fn = self.body or self.parts[0]
            arguments = bound(self.name, signature_of(self.name, fn), args, kwargs).arguments
            each = [flatten(arguments.get(k))[0] for k in self.batch]
        groups = [[x for x in group if isinstance(x, Tensor)] for group in each]
        alone = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        first = rows_of([x for group in groups for x in group], alone)
        alone_ids = {id(x) for x in alone}
        near = [
            x
            for group in groups
            for x in group
            if self.batch
            or id(x) in alone_ids
            or not x.dtype.is_float
            or any(first is y for y in group)
        ]
        return near, first

    def _play(
        self, args: Any, kwargs: Any, state: PipeState | None = None, recorder: Any = None
    ) -> Any:
        """Runs the stages one after the other, or the body that calls them."""
        if state is None and self.mesh is not None and settings().mesh != self.mesh:
            with replaced(mesh=self.mesh):
                return self._play(args, kwargs)
        if self.body is not None:
            with named_scope(self.name):
                return self.body(*args, **kwargs)
        out: Any = args
        for i, part in enumerate(self.parts):
            first = len(recorder.builder.nodes) if recorder is not None else 0
            with named_scope(f"stage{i}" if len(self.parts) > 1 else self.name):
                if i == 0:
                    out = part(*args, **kwargs)
                elif isinstance(out, tuple):  # each is an argument
                    name = f"{self.name}, stage {i}"
                    bound(name, signature_of(name, part), out, {})
                    out = part(*out)
                else:
                    out = part(out)
            if state is not None:
                state.spans += self._spans(recorder.builder.nodes, first)
        return out

    def _spans(self, nodes: Sequence[Node], first: int) -> list[tuple[int, int]]:
        """The ranges of the parts in the nodes from `first` on: one, unless `cut_at` names more.
        Raises UsageError if it names no module that is called there, in this order."""
        starts = [first]
        for path in self.cut_at:
            later = range(starts[-1], len(nodes))
            found = next((i for i in later if is_in(nodes[i].scope, path)), None)
            if found is None:
                scopes = dict.fromkeys(nodes[i].scope for i in later if nodes[i].scope)
                raise UsageError(
                    f"{self.name}: cut_at: no module {path!r} is called"
                    + (" after those before it" if len(starts) > 1 else ""),
                    scopes=", ".join([*scopes][:8]) or "none",
                    fix="name modules by the ends of their scopes, in the order of their calls",
                )
            starts.append(found)
        pairs = zip(starts, [*starts[1:], len(nodes)], strict=True)
        return [(a, b) for a, b in pairs if b > a]

    # -- the last recording -----------------------------------------------------------------------
    def _recorded(self, method: str) -> PipeProgram:
        if self.program is None:
            raise UsageError(
                f"{self.name}.{method}: the pipeline has not been called yet", fix="call it once"
            )
        return self.program

    def place(self, tree: Any) -> Any:
        """Moves each weight of `tree` (a dict, a module's parameters) to the stage that uses it.

        A weight of several stages goes to the first. The weights then stay on the devices where
        they are used, and a step sends none. They are found by their names in the last recording,
        or by the ends of these names. Raises UsageError before the first call, or if a name is
        unknown or matches several weights.
        """
        return placed(self._recorded("place"), tree)

    def plan_text(self) -> str:
        """The stages as text: devices, number of parts, work of a microbatch, bytes of weights.

        The work is that of a forward and backward pass, the loss included. Raises UsageError before
        the first call.
        """
        return self._recorded("plan_text").text()

    @property
    def schedule(self) -> Schedule:
        """The Schedule of the last recording. Raises UsageError before the first call."""
        return self._recorded("schedule").schedule

    @property
    def table(self) -> Table:
        """The table of actions of the last recording. Raises UsageError before the first call."""
        return self._recorded("table").table

    @property
    def balance(self) -> list[float]:
        """FLOPs of each stage for a microbatch, forward and backward; [] before the first call."""
        return [] if self.program is None else self.program.division.flops

    @property
    def sizes(self) -> list[int]:
        """The number of parts of each stage; [] before the first call."""
        return [] if self.program is None else self.program.division.parts

    # -- from a recording to a schedule -----------------------------------------------------------
    def _mesh(self, leaves: Sequence[Tensor]) -> Mesh:
        theirs = next((x.mesh for x in leaves if x.mesh is not None and self.axis in x.mesh), None)
        mesh = self.mesh or settings().mesh or theirs
        if mesh is None or self.axis not in mesh:
            raise MeshError(
                f"{self.name}: there is no mesh with an axis {self.axis!r} to lay the stages on",
                mesh=mesh.text() if mesh is not None else "none",
                fix="pass mesh=..., or name another axis of the mesh",
            )
        return mesh

    def microbatches(self, ranks: int) -> int:
        """The number of microbatches for `ranks` ranks: as given, as scheduled, or the default."""
        if self.count:
            return self.count
        count = MICROBATCHES * ranks
        open_choice("microbatches", (n for n in (count // 2, count * 2) if n >= ranks))
        return settings().program.schedule.microbatches or count

    def table_of(self, state: PipeState) -> Table:
        """The table of actions for the current recording."""
        ranks = state.mesh.sizes[self.axis]
        chunks = self.chunks
        if chunks is None and isinstance(self.kind, str) and not self.kind.endswith(".csv"):
            known = named_schedule(self.kind).chunks
            chunks = known or max(1, (self.stages or 2 * ranks) // ranks)
        return pipeline_table(self.kind, ranks, state.count, chunks)

    def scheduled(
        self, recorder: Recorder, outputs: Sequence[Node], wholes: Sequence[TensorType]
    ) -> Schedule:
        """The schedule of the recording of `recorder`; `wholes` are the types of its inputs."""
        self.program = pipe_program(recorder, outputs, wholes)
        return self.program.schedule


# Placement of a pipeline's weights on their stages, once instead of in each step.


def _is_module(x: Any) -> bool:
    """Returns whether `x` is an object with weights: its other tensors are its state."""
    return is_registered(type(x)) and any(isinstance(t, Parameter) for t in flatten(x)[0])


def placed(program: PipeProgram, tree: Any) -> Any:
    """Returns `tree` with each weight on the stage where `program` uses it first. Raises UsageError
    if a name is unknown or matches several weights."""
    leaves, spec = flatten(tree)
    at = {
        i: path_name(path)
        for i, (x, path) in enumerate(zip(leaves, paths(tree), strict=True))
        if isinstance(x, Tensor) or is_array(x)  # the rest are settings
    }
    weights = [_together(program, as_tensor(leaves[i])) for i in at]
    new = _sent(program, weights, list(at.values()))
    if all(leaves[i] is t for i, t in zip(at, new, strict=True)):
        return tree
    for i, t in zip(at, new, strict=True):
        leaves[i] = t
    return unflatten(spec, leaves)


def _together(program: PipeProgram, t: Tensor) -> Tensor:
    """Returns `t` gathered over the stages' axis, so that it can be sent to one stage."""
    axis = program.state.pipe.axis
    apart = axis in t.type.split_axes and t._data is not None
    return relayout(t, gathered(t.type, (axis,))) if apart else t


def _sent(program: PipeProgram, weights: list[Tensor], names: list[str]) -> list[Tensor]:
    """Sends `weights` to their stages by one schedule. A weight without data is made there."""
    state = program.state
    to = []
    for t, name in zip(weights, names, strict=True):
        home = program.home(t, name)
        to.append(t.type if home is None else laid_on(t.type, state.slices[home]))
        if t._data is None and t._pending is not None:
            t.type = to[-1]
    return sent(weights, to, state.mesh)
