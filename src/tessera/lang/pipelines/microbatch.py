"""What does a recording for one microbatch know? Which inputs have a part for each, what is summed
over all of them, and what must be known before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ...core.checks import divides
from ...core.errors import GraphError, MeshError, ShapeError, UsageError, fail
from ...core.layout import Factor, TensorType, ways
from ...core.mesh import Mesh
from ...core.reshard import completed, gathered
from ...ir.graph.node import Node, reachable
from ...ir.schedule.pipelines.stages import depends
from ...ir.schedule.pipelines.tables import Table
from ...ir.schedule.schedule import Schedule
from ...ops.elementwise import add
from ...ops.movement import concat, pad
from ...ops.redistribute import NAMES
from ..functions import relayout
from ..gradients import Goal, derived, laid
from ..host_outputs import HostOutput, each_microbatch
from ..record import KEY_TYPE, Frame, Held, Recorder, symbolic
from ..slices import laid_on, with_two_axes
from ..tensor import Tensor

# What makes one gradient of several, where a weight is read at several places or in slices.
TOGETHER = (add.name, concat.name, pad.name)


class Pipeline(Protocol):
    """What is asked of a pipeline while a microbatch of it is recorded."""

    parts: Sequence[Callable[..., Any]]
    axis: str
    name: str
    body: Callable[..., Any] | None
    said: set[str]  # what was warned of

    def scheduled(
        self, recorder: Recorder, outputs: Sequence[Node], wholes: Sequence[TensorType]
    ) -> Schedule: ...
    def table_of(self, state: PipeState) -> Table: ...


@dataclass(eq=False)
class PipeState(Frame):
    """What a recording for one microbatch knows; or one that is a trial (batch_inputs.py), of the
    whole batch or of one `trial` times as large. `cut` are the places, among the arguments'
    tensors, of those that hold the batch.
    """

    pipe: Pipeline
    mesh: Mesh  # the whole; of one axis, that and another of size 1, or a stage had none
    given: Mesh  # as the user has it
    template: Mesh  # of one stage, whichever
    count: int
    trial: int
    rows: int
    cut: frozenset[int]
    place: dict[Node, int] = field(default_factory=dict)  # of the inputs among the arguments
    recorder: Recorder | None = None
    taken: list[Node] = field(default_factory=list)  # the pipeline's arguments and results
    results: list[Node] = field(default_factory=list)
    wrt: set[Node] = field(default_factory=set)  # what a trial asks gradients for, and these
    losses: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    asked: list[Node] = field(default_factory=list)
    batch: dict[Node, TensorType] = field(default_factory=dict)
    sums: dict[Node, Node] = field(default_factory=dict)
    called: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list)  # where each part was recorded
    # Inputs that are means over all microbatches, known before the first: of which values.
    ahead: dict[Node, Node] = field(default_factory=dict)
    gradient_of: dict[Node, Node] = field(default_factory=dict)  # to the weights they are of
    resting: set[Node] = field(default_factory=set)  # inputs that lie on the whole mesh
    apart: Set[int] = frozenset()  # which host outputs are of single microbatches, not of the batch
    each: set[Node] = field(default_factory=set)  # their values, with a dim of size 1 in front
    kept_after: list[Node] = field(default_factory=list)  # what modules' attributes were set to

    is_read = False

    @staticmethod
    def begin(
        pipe: Pipeline,
        given: Mesh,
        count: int,
        trial: int,
        rows: int = 0,
        cut: frozenset[int] = frozenset(),
    ) -> PipeState:
        """The state of a recording on the first slice of the mesh along the pipeline's axis, of
        `count` microbatches. Raises UsageError if `rows` do not divide into these."""
        mesh = with_two_axes(given)
        if not trial:
            text = "a batch of {count} does not divide into {parts} microbatches"
            divides(pipe.name, rows, count, text, "choose a number that divides it: microbatches=")
        template = mesh.slice(**{pipe.axis: 0})
        return PipeState(pipe, mesh, given, template, count, trial, rows, cut)

    def type_of(self, t: Tensor, place: int | None = None) -> TensorType:
        """The type of `t` in the recording: one microbatch's part of a batch, on a stage's mesh.
        `place` is its own among the arguments' tensors, None for one from outside."""
        kind = t.type
        if kind.mesh is None or kind.mesh in (self.mesh, self.given):
            if self.pipe.axis in kind.split_axes and place in self.cut and not self.trial:
                raise fail(
                    MeshError,
                    f"{self.pipe.name}: a batch is split over {self.pipe.axis!r}, which the stages"
                    " lie along",
                    [("batch", kind)],
                    fix="leave it replicated there: each stage gets what it uses",
                )
        elif kind.mesh not in self.slices:
            raise fail(
                MeshError,
                f"{self.pipe.name}: a tensor lies on another mesh",
                [("tensor", f"{kind} on {kind.mesh.text()}"), ("mesh", self.mesh.text())],
                fix="put it on the mesh, or on a stage's slice of it",
            )
        here = self.on_stage(kind)
        if place not in self.cut:
            return here
        first = here.dims[0]
        if self.trial and len(first) == 1:
            return here.with_dims(
                ((Factor(self.rows * self.trial, first[0].axes),), *here.dims[1:])
            )
        n = ways((a for f in first for a in f.axes), here.sizes)
        if len(first) > 1 or (self.rows // n) % self.count or self.rows % n:
            raise fail(
                ShapeError,
                f"{self.pipe.name}: the rows of a batch do not divide into {self.count}"
                " microbatches on each device",
                [("batch", kind)],
                fix=f"give a batch whose rows are a multiple of {n * self.count}, or another"
                " number: microbatches=",
            )
        part = (Factor(self.rows // self.count, first[0].axes),)
        return here.with_dims((part, *here.dims[1:]))

    def laid(self, to: TensorType, of: TensorType) -> TensorType:
        return self.on_stage(to)

    @property
    def home(self) -> Mesh:  # type: ignore[override]
        return self.mesh

    def on_stage(self, t: TensorType) -> TensorType:
        """`t`, of the mesh or of a stage's slice of it, on the mesh that is recorded on. What rests
        split over the stages' axis is put together before it is sent to one."""
        return laid_on(t, self.template)

    def together(self, t: Tensor) -> Tensor:
        """`t`, not split over the stages' axis, so that it can be sent to one of them."""
        apart = self.pipe.axis in t.type.split_axes and t._data is not None
        return relayout(t, gathered(t.type, (self.pipe.axis,))) if apart else t

    def met(self, node: Node, t: Tensor, place: int) -> None:
        self.place[node] = place
        if place in self.cut:
            self.batch[node] = self.whole(t)
        if t.mesh in (self.mesh, self.given):
            self.resting.add(node)

    def whole(self, t: Tensor) -> TensorType:
        """The type in which `t` is given to the program."""
        kind = t.type
        return kind if kind.mesh in self.slices else laid_on(kind, self.mesh)

    @cached_property
    def slices(self) -> list[Mesh]:
        n = self.mesh.sizes[self.pipe.axis]
        return [self.mesh.slice(**{self.pipe.axis: r}) for r in range(n)]

    def gradients(
        self,
        recorder: Recorder,
        loss: Node,
        wrt: Sequence[Node],
        weights: Sequence[Tensor],
        goals: Sequence[Goal],
        mean_over: Sequence[str] = (),
    ) -> list[Node]:
        """The sums of the gradients over all microbatches, laid as they are on a stage."""
        b = recorder.builder
        b.gathers_again = False  # all microbatches share what is gathered
        if self.trial:
            found = self._stand_ins(recorder, loss, wrt)
        else:
            raw = derived(b, loss, wrt, [None] * len(wrt), mean_over)
            found = self._accumulated(recorder, loss, raw)
        here = [None if t is None else self.on_stage(t) for t in goals]
        found = [laid(b, g, w, t) for g, w, t in zip(found, wrt, here, strict=True)]
        self.gradient_of.update(zip(found, wrt, strict=True))
        return found

    def row_by_row(self, recorder: Recorder, rows: Sequence[Node]) -> Frame:
        own = self.trial or not self.micro(recorder).isdisjoint(rows)
        return RowOfBatch(self) if own else self

    def ends(self, made_of: Set[Node], wrt: Sequence[Node]) -> tuple[str, str] | None:
        if made_of.isdisjoint((*self.asked, *self.sums)):
            return None
        return (
            "a gradient of a pipeline has no gradient itself",
            "compute second gradients without stages: @schedule(pipeline=False)",
        )

    def scheduled(
        self, recorder: Recorder, results: Sequence[Node], held: Held
    ) -> tuple[list[Node], Schedule]:
        inner = {*self.sums, *self.ahead}
        given = [n for n in recorder.builder.inputs if n not in inner]
        tensors = map(held, given)
        wholes = [KEY_TYPE.on(self.mesh) if t is None else self.whole(t) for t in tensors]
        return given, self.pipe.scheduled(recorder, results, wholes)

    def _stand_ins(self, recorder: Recorder, loss: Node, wrt: Sequence[Node]) -> list[Node]:
        """In a trial, what stands for the gradients of `wrt`: only their types matter."""
        self.losses.append(loss)
        self.wrt.update(wrt)
        made = [recorder.builder.input(n.type.complete(), "gradient") for n in wrt]
        self.asked += made
        return made

    def _accumulated(self, recorder: Recorder, loss: Node, found: Sequence[Node]) -> list[Node]:
        """What stands for the sums of the gradients `found` over all microbatches."""
        b = recorder.builder
        if recorder.parent is not None:
            raise fail(
                UsageError,
                f"{self.pipe.name}: gradients are asked for in a loop of a pipelined function",
                [("loss", loss.type)],
                fix="call ts.grad after the loop",
            )
        micro = self.micro(recorder)
        made: dict[Node, Node] = {}

        def sum_of(n: Node) -> Node:
            if n not in micro:  # the same for each microbatch
                return n
            if n.op in TOGETHER and n not in b.origins:  # of a weight that several stages use
                return b(n.op, *map(sum_of, n.args), **n.attrs)
            if n.op in NAMES and n not in b.origins:  # one of those, on its way to the others
                return b.redistribute(sum_of(n.args[0]), n.type, n.note)
            if n not in made:
                made[n] = b.input(n.type, f"sum{len(self.sums)}")
                self.sums[made[n]] = n
            return made[n]

        return [sum_of(n) for n in found]

    def micro(self, recorder: Recorder) -> set[Node]:
        """What has a value of its own for each microbatch, of what is recorded so far."""
        key = [recorder.key] if recorder.key is not None else []
        return depends(recorder.builder.nodes, [*self.batch, *key])

    def sets(self, node: Node) -> None:
        self.kept_after.append(node)

    def seen(self, recorder: Recorder) -> list[HostOutput]:
        b = recorder.builder
        cut = self.micro(recorder) - depends(b.nodes, self.sums)

        def stacked(t: Tensor) -> Tensor:
            node = recorder.node(t)
            if node not in cut:
                return t
            b.loc = node.loc
            node = b.redistribute(node, completed(node.type, node.type.partial_axes))
            node = b("reshape", node, shape=(1, *node.type.shape))
            b.loc = None
            self.each.add(node)
            return symbolic(node, recorder)

        def of_each(output: HostOutput) -> HostOutput:
            own = [recorder.node(t) in cut for t in output.tensors]
            return each_microbatch(output, self.count, list(map(stacked, output.tensors)), own)

        return [of_each(x) if i in self.apart else x for i, x in enumerate(recorder.host_outputs)]

    def mean_over_batch(self, recorder: Recorder, x: Tensor) -> tuple[Tensor, int]:
        """(the mean of `x`, which follows from the batch, over the microbatches; how many they
        are). What is the same for all of them is its own mean. Raises GraphError if `x` depends on
        what the model computes, or on random numbers."""
        if recorder.parent is not None:
            raise fail(
                UsageError,
                f"{self.pipe.name}: a loss over labels is computed in a loop, where it is unknown"
                " how many labels the other microbatches have",
                [("count", x.type)],
                fix="compute it outside of ts.scan",
            )
        x = relayout(x, completed(x.type, x.type.partial_axes))
        node = recorder.node(x)
        if node not in self.micro(recorder):
            return x, 1
        of = reachable([node])
        drawn = recorder.key is not None and recorder.key in of
        if drawn or any(n.kind.memory == "product" or n.kind.bodies for n in of):
            raise fail(
                GraphError,
                f"{self.pipe.name}: how many labels count depends on"
                f" {'random numbers' if drawn else 'what the model computes'}",
                at=node.loc,
                fix="choose the labels that count before the step, in the batch",
            )
        made = recorder.builder.input(node.type, f"mean{len(self.ahead)}")
        self.ahead[made] = node
        return symbolic(made, recorder), self.count


@dataclass(eq=False)
class RowOfBatch(Frame):
    """One row of a microbatch: gradients of its loss are its own."""

    microbatch: PipeState
    is_read = False

    def laid(self, to: TensorType, of: TensorType) -> TensorType:
        return self.microbatch.on_stage(to)

    @property
    def home(self) -> Mesh:  # type: ignore[override]
        return self.microbatch.home

    def gradients(
        self,
        recorder: Recorder,
        loss: Node,
        wrt: Sequence[Node],
        weights: Sequence[Tensor],
        goals: Sequence[Goal],
        mean_over: Sequence[str] = (),
    ) -> list[Node]:
        here = [None if t is None else self.microbatch.on_stage(t) for t in goals]
        return derived(recorder.builder, loss, wrt, here, mean_over)


def state_of(recorder: Recorder) -> PipeState | None:
    """What is known where `recorder` records one microbatch of a pipeline."""
    frame = getattr(recorder.frame, "outer", recorder.frame)  # behind a local body
    return frame if isinstance(frame, PipeState) else None
