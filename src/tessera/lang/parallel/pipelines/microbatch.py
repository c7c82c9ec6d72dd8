"""The microbatches of a recorded pipeline: the graph of one, and the graph after all of them.

The function is recorded once, for the whole batch, whose rows are split over a mesh axis in time.
Nodes split over that axis belong to a microbatch, and sums over it are accumulated. Nodes that need
all microbatches run after them, or before them if they depend on the batch alone, such as a count
of labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ....core.dtypes import bool_, uint32
from ....core.errors import GraphError, UsageError
from ....core.layout import TensorType, plain
from ....core.mesh import Mesh, in_time
from ....ir.graph.build import Builder
from ....ir.graph.node import Graph, Node, reachable
from ....ir.graph.remat import free_nodes
from ....ir.graph.time_axis import (
    combined,
    depends_on_time,
    on_fewer_axes,
    one_step,
    without_time_axis,
)
from ....ir.schedule.pipelines.pipeline import Recorded
from ....ir.schedule.pipelines.stages import depends, stage_numbers
from ....ir.schedule.pipelines.tables import Table
from ....ops.elementwise import add
from ....ops.movement import concat, pad
from ....ops.redistribute import NAMES, shard, to_mesh
from ....passes.time import StepLoops, lower_time, rested, step_node
from ...record.recorder import KEY_TYPE, Held, Recorder
from ...record.submesh import laid_on, with_two_axes

# Ops that join several gradients of a weight, which was read at several places or in slices.
TOGETHER = (add.name, concat.name, pad.name)


class Pipeline(Protocol):
    """The interface of a pipeline for the recording of a function that calls it."""

    parts: Sequence[Any]
    axis: str
    name: str
    body: Any

    def table_of(self, state: PipeState) -> Table: ...
    def scheduled(
        self, recorder: Recorder, outputs: Sequence[Node], wholes: Sequence[TensorType]
    ) -> Any: ...


@dataclass(eq=False)
class PipeState:
    """The pipeline of a recording: its mesh as `user_mesh`, and `mesh` with at least two axes;
    `count` microbatches of `rows` rows each."""

    pipe: Pipeline
    user_mesh: Mesh
    count: int
    rows: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # each part's range of nodes
    graph: Graph | None = None  # the recorded graph, on the mesh of one stage

    @cached_property
    def mesh(self) -> Mesh:
        return with_two_axes(self.user_mesh)

    @cached_property
    def slices(self) -> list[Mesh]:
        n = self.mesh.sizes[self.pipe.axis]
        return [self.mesh.slice(**{self.pipe.axis: r}) for r in range(n)]

    def on_stage(self, t: TensorType) -> TensorType:
        """Returns `t` on the slice of the first stage, which stands for all, gathered along the
        stages' axis."""
        here = self.slices[0]
        if t.mesh is None or t.mesh in self.slices:
            return t.on(here)
        if t.mesh.time:
            here = in_time(here, {a: t.mesh.sizes[a] for a in t.mesh.time})
        return on_fewer_axes(t, here)

    def whole(self, t: TensorType) -> TensorType:
        """Returns the type in which a value of type `t` is an input of the program."""
        return t if t.mesh in self.slices else laid_on(without_time_axis(t), self.mesh)

    def scheduled(
        self, recorder: Recorder, results: Sequence[Node], held: Held
    ) -> tuple[list[Node], Any]:
        given = recorder.builder.inputs
        types = [KEY_TYPE if t is None else t.type for t in map(held, given)]
        return given, self.pipe.scheduled(recorder, results, [self.whole(t) for t in types])


class Microbatch:
    """One microbatch of the function that `recorder` has recorded, with the results `outputs`.

    `graph` is on the mesh of a stage. It has the nodes of one microbatch and those after all of
    them; `rows`, `sums`, `ahead` and `early` are those of `Recorded`.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Node]) -> None:
        self.recorder, self.state = recorder, recorder.stages
        self.whole, self.staged = self._on_stage(outputs)
        self.state.graph = self.whole
        self.step_loop = self._step_loop()
        self.rows: dict[Node, tuple[Node | None, TensorType]] = {}
        self.sums: dict[Node, tuple[Node, TensorType]] = {}
        self._early: dict[Node, Node] = {}  # nodes of `whole`, computed before: their inputs
        self._after: dict[Node, Node] = {}  # results of all microbatches: their inputs
        self.one: dict[Node, Node] = {}  # nodes of `whole`: the nodes in `graph`
        self.graph = self._divided()
        at = {n: self.one.get(x) for n, x in self.staged.items()}
        of, nodes = recorder.builder.origins, recorder.builder.nodes
        plain = {at.get(n) for n in nodes if n not in of}  # forward nodes that gradients share
        pairs = ((at.get(n), at.get(o)) for n, o in of.items())
        self.origins = {n: o for n, o in pairs if n and o and n not in plain}
        self.parts = self._parts()
        self.ahead = self._ahead()

    @property
    def early(self) -> tuple[Node, ...]:
        return tuple(self._early.values())

    def _on_stage(self, outputs: Sequence[Node]) -> tuple[Graph, dict[Node, Node]]:
        """Returns (the recorded graph on the mesh of a stage, its node for each recorded node)."""
        b, state = self.recorder.builder, self.state
        graph, finals = b.graph(outputs), b.finals
        made, new = Builder(graph.name, graph.options), dict[Node, Node]()
        for n in graph.nodes:
            made.loc, made.scope = n.loc, n.scope
            if n.op == "input":
                new[n] = made.input(state.on_stage(n.type), n.attrs["name"])
            else:
                new[n] = rested(made, n, [new[a] for a in n.args], state.on_stage)
        made.inputs = [new[n] for n in graph.inputs]
        whole = made.graph([new[o] for o in graph.outputs])
        staged = new | {old: new[n] for old, n in finals.items() if n in new}
        staged |= {old: staged[n] for old, n in b.replaced.items() if n in staged}
        return whole, staged

    def _step_loop(self) -> StepLoops | _Once:
        """The nodes that are computed for each microbatch. Raises UsageError if no argument holds a
        batch."""
        meshes = (t.mesh for n in self.whole.nodes for t in n.types if t.mesh is not None)
        mesh = next((m for m in meshes if m.time), None)
        if mesh is not None:
            return StepLoops(self.whole, mesh)
        if self.state.count > 1:
            raise UsageError(
                f"{self.state.pipe.name}: no argument of the pipeline holds a batch to cut",
                fix="hand the batch to the pipeline as an argument of its own; where others have"
                " another number of rows, name it: batch=",
            )
        slopes = {self.staged[g] for g in self.recorder.root.changes.slopes if g in self.staged}
        after = depends(self.whole.nodes, slopes) - slopes
        own = {n for part in self._written(self.staged, self.whole) for n in part}
        inner = depends(self.whole.nodes, own) - after
        return _Once(inner, dict.fromkeys(self.whole.nodes, 0), self.state.slices[0])

    # -- one microbatch, and the nodes after all --------------------------------------------------
    def _divided(self) -> Graph:
        """Returns the graph of one microbatch and of the nodes after all. An input stands for each
        value of the whole batch that a node of the microbatch reads, and for each value of the
        microbatches that a later node reads."""
        turns, b = self.step_loop, Builder(self.whole.name, self.whole.options)
        late = depends(self.whole.nodes, turns.inner) - turns.inner
        before = {n for n in late if turns.phase[n]}
        # Nodes over rows that depend on results of all microbatches are computed after them.
        inner = self.inner = turns.inner - depends(self.whole.nodes, late - before)
        self._accumulate_by_stage()
        number = b.input(plain(uint32, ()), "microbatch")
        self.rows[number] = None, number.type.on(turns.mesh)

        def early(a: Node) -> Node:
            if a not in self._early:
                self._early[a] = b.input(without_time_axis(a.type), f"ahead{len(self._early)}")
            return self._early[a]

        def of_microbatch(a: Node) -> Node:
            if a in inner or a in turns.again:
                return self.one[a]
            if not depends_on_time(a.type):
                return early(a) if a in before else self.one[a]
            source = a
            while source.op in (shard.name, to_mesh.name):  # the same value at rest
                source = source.args[0]
            source = self.one[source] if source.op == "input" else early(source)
            known = next((k for k, v in self.rows.items() if v == (source, a.type)), None)
            if known is None:
                known = b.input(one_step(a.type), f"rows{len(self.rows)}")
                self.rows[known] = source, a.type
            return known

        def of_all(a: Node) -> Node:
            if a in inner:
                if a not in self._after:
                    x, t = self.one[a], a.type
                    if combined(t) not in ("", "same", "sum") or t.dtype is bool_:
                        x = b.redistribute(x, x.type.complete())  # only sums may stay pending
                        t = t.with_partial(tuple(p for p in t.partial if p[0] in turns.mesh.time))
                    made = self._after[a] = b.input(without_time_axis(t), f"sum{len(self.sums)}")
                    self.sums[made] = x, t
                return self._after[a]
            if a in turns.again and depends_on_time(a.type):
                return rested(b, a, [of_all(x) for x in a.args])
            return early(a) if a in before else self.one[a]

        self.one = {n: b.input(n.type, n.attrs["name"]) for n in self.whole.inputs}
        for n in self.whole.nodes:
            b.loc, b.scope = n.loc, n.scope
            if n.op == "input":
                continue
            if n in inner or n in turns.again:
                args = list(map(of_microbatch, n.args))
                x = step_node(n, args, number)
                self.one[n] = x if x in args else b._add(x)
            elif n not in before:
                self.one[n] = rested(b, n, list(map(of_all, n.args)))
        outputs = tuple(map(of_all, self.whole.outputs))
        ends = tuple(b.inputs), outputs
        return Graph(self.whole.name, tuple(b.nodes), *ends, self.whole.options)

    def _accumulate_by_stage(self) -> None:
        """Moves the nodes that join several gradients of a weight behind all microbatches: each
        gradient is accumulated on the stage that computes it."""
        needed = {a for n in self.inner for a in n.args}
        for n in reversed(self.whole.nodes):
            moves = n.op in NAMES and bool(n.args) and n.args[0].op in TOGETHER
            if n not in self.inner or n in needed or not (n.op in TOGETHER or moves):
                continue
            if combined(n.type) == "sum" and all(combined(a.type) == "sum" for a in n.args):
                self.inner.discard(n)
                needed = {a for m in self.inner for a in m.args}

    def _ahead(self) -> Graph | None:
        """The graph of the values `early`. Raises GraphError if they depend on the work of a
        stage."""
        if not self._early:
            return None
        needed = reachable(self._early)
        work = (n for n in needed if n.kind.memory in ("product", "conv") or n.kind.bodies)
        staged = depends(self.whole.nodes, work)
        for n in self.whole.nodes:
            if n in needed and n in staged and n not in self.inner:
                raise GraphError(
                    f"{self.state.pipe.name}: {n.op!r} needs all microbatches of a stage before the"
                    " pipeline can go on with the first",
                    value=n.type,
                    reason=n.note,
                    fix="compute it from the batch alone; or run the stages one after the other, on"
                    " the whole batch: @schedule(pipeline=False); where the batch is another"
                    " argument, name it: batch=",
                    at=n.loc,
                )
        given = [n for n in self.whole.inputs if n in needed]
        return lower_time(self.whole.part(given, [*self._early]))

    # -- its stages -------------------------------------------------------------------------------
    @cached_property
    def free(self) -> frozenset[Node]:
        """The nodes that each stage computes for itself."""
        return free_nodes(self.graph.nodes)

    @cached_property
    def forward(self) -> set[Node]:
        """The nodes of the forward pass."""
        behind = depends(self.graph.nodes, self.origins)
        ends = (x for x, _ in self.sums.values() if x not in behind)
        return reachable(ends) | (set(self.graph.nodes) - behind)

    def _parts(self) -> list[list[Node]]:
        """The forward nodes of each part of the pipeline."""
        at = {n: self.one[x] for n, x in self.staged.items() if x in self.one}
        left = {n for n in self.forward if n.op != "input"} - self.free
        parts = []
        for part in self._written(at, self.graph):
            parts.append([n for n in _with_loops(part) if n in left])
            left -= {*parts[-1]}
        return parts

    def _written(self, at: Mapping[Node, Node], graph: Graph) -> list[list[Node]]:
        """The nodes in `graph` of each part of the pipeline; `at` maps recorded nodes to nodes of
        `graph`."""
        pipe, nodes = self.state.pipe, self.recorder.builder.nodes
        if pipe.body is not None:  # the body calls the parts: their scopes identify the nodes
            scopes = [getattr(p, "name", "") for p in pipe.parts]
            return [[n for n in graph.nodes if s in re.split("[/.]", n.scope)] for s in scopes]
        return [[at[n] for n in nodes[a:b] if n in at] for a, b in self.state.spans]

    def shares(self, parts: Sequence[Sequence[Node]]) -> list[list[Node]]:
        """The nodes that each of `parts` computes for a microbatch, with gradients and with the
        loss."""
        marked = {n: i for i, part in enumerate(parts) for n in part}
        numbers = stage_numbers(self.graph.nodes, marked, self.origins, len(parts) - 1, self.free)
        used = reachable(x for x, _ in self.sums.values())
        out: list[list[Node]] = [[] for _ in parts]
        for n, i in numbers.items():
            if n in used:
                out[i].append(n)
        return out

    def recorded(self, stages: Sequence[Sequence[Node]], outputs: Sequence[Node]) -> Recorded:
        """Returns the input of the scheduler, with the nodes of each of the `stages`. Gradients
        among the results `outputs` are returned to where their weights lie."""
        state, slopes = self.state, self.recorder.root.changes.slopes
        back = {
            made: state.whole(o.type)
            for o, made in zip(outputs, self.graph.outputs, strict=True)
            if o in slopes and o.type.mesh in (state.user_mesh, state.mesh, *state.slices)
        }
        marked = {n: s for s, nodes in enumerate(stages) for n in nodes}
        return Recorded(
            self.graph, self.rows, self.sums, marked, self.origins, back, self.ahead, self.early
        )


@dataclass(frozen=True)
class _Once:
    """A batch in one microbatch, with the fields of `StepLoops`: `inner` has the nodes of the
    stages, with gradients."""

    inner: set[Node]
    phase: Mapping[Node, int]
    mesh: Mesh
    again: frozenset[Node] = frozenset()


def _with_loops(nodes: Iterable[Node]) -> list[Node]:
    """Returns `nodes`, each once, and before each item of a node the node itself: a loop that
    computes its gradient too was made later, in place of another loop."""
    found: dict[Node, None] = {}
    for n in nodes:
        if n.op == "item":
            found.setdefault(n.args[0])
        found.setdefault(n)
    return list(found)
