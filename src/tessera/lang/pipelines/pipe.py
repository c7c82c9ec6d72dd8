"""Pipelines: a model whose stages lie on slices of the mesh, run microbatch by microbatch.

A function that calls one is recorded for one microbatch, on the mesh of a stage. Its losses and
gradients mean their averages over the microbatches; what it does with the gradients happens once,
after all of them. The schedule (ir/schedule/pipelines/pipeline.py) plays a table of actions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...core.context import settings
from ...core.errors import GraphError, MeshError, UsageError, fail, lines_up
from ...core.layout import TensorType, ways
from ...core.mesh import Mesh
from ...ir.graph.node import Node, reachable
from ...ir.schedule.pipelines.orders import known_schedule, pipeline_table
from ...ir.schedule.pipelines.pipeline import Plan, Recorded, pipeline_schedule
from ...ir.schedule.pipelines.simulate import FEWER, LAUNCH_S, warn_if_few
from ...ir.schedule.pipelines.stages import balanced, depends, free_nodes, stage_numbers
from ...ir.schedule.pipelines.tables import Table
from ...ir.schedule.schedule import Schedule, Send
from ...ops.op import OPS
from ..engine import engine
from ..host import engine_array
from ..operands import as_tensor
from ..record import Recorder, current, named_scope
from ..tensor import Tensor
from ..tree import flatten, path_name, paths, unflatten
from .means import inseparable
from .microbatch import NeedsPipe, PipeState, laid_on

MICROBATCHES = 2  # for each stage, where nobody says how many


class Pipe:
    """A pipelined function: `parts` in order, or one `whole` function that is split by cost.

    `graph.pipeline`, `pipeline.compose` and `pipeline.run` make one.
    """

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
        body: Callable[..., Any] | None = None,
    ) -> None:
        self.parts, self.axis, self.mesh, self.kind = list(parts), axis, mesh, schedule
        self.count, self.chunks, self.name, self.stages = count, chunks, name, stages
        self.plan: Plan | None = None
        self.said: set[str] = set()  # what was warned of
        self.balance: list[float] = []  # FLOPs of each stage for a microbatch, forth and back
        self.sizes: list[int] = []  # how many parts each stage is made of
        self.weight_bytes: list[int] = []  # of each stage, on a device
        # Weights by name to the rank that uses them first, None where no stage does.
        self.homes: dict[str, int | None] = {}
        self.state: PipeState | None = None  # of the last recording
        self.body = body  # calls the parts, which know themselves by the names of their scopes
        self._jit: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            if self._jit is None:
                from ..jit import jit

                call = lambda *xs, **named: self(*xs, **named)  # noqa: E731  # needs its own name
                call.__name__ = self.name
                call.__signature__ = inspect.signature(self.body or self.parts[0])  # type: ignore[attr-defined]
                self._jit = jit(call)
            return self._jit(*args, **kwargs)
        state = recorder.pipe
        if state is None and not recorder.compiles:
            return self._play(args, kwargs)  # as a plain function: nothing will run
        if recorder.parent is not None:
            raise fail(
                UsageError,
                f"{self.name}: a pipeline is called in a loop or a local body",
                fix="call it in the compiled function itself",
            )
        leaves = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if state is None:
            raise NeedsPipe(self, self._mesh(leaves))
        if state.pipe is not self or state.called:
            raise fail(
                UsageError,
                f"{self.name}: a function calls pipelines twice",
                fix="put all stages into one pipeline, and call it once in a function",
            )
        state.called, state.recorder = True, recorder
        state.taken = [recorder.node(x) for x in leaves]
        out = self._play(args, kwargs, state, recorder)
        state.results = [recorder.node(x) for x in flatten(out)[0] if isinstance(x, Tensor)]
        return out

    def _play(
        self, args: Any, kwargs: Any, state: PipeState | None = None, recorder: Any = None
    ) -> Any:
        """Runs the stages, one after the other, or the body that calls them."""
        if self.body is not None:
            with named_scope(self.name):
                return self.body(*args, **kwargs)
        out: Any = args
        for i, part in enumerate(self.parts):
            first = len(recorder.builder.nodes) if recorder is not None else 0
            with named_scope(f"stage{i}" if len(self.parts) > 1 else self.name):
                if i == 0:
                    out = part(*args, **kwargs)
                else:
                    out = part(*out) if isinstance(out, tuple) else part(out)
            if state is not None:
                state.spans.append((first, len(recorder.builder.nodes)))
        return out

    def place(self, tree: Any) -> Any:
        """Moves each weight of `tree` (a dict, a module's parameters) to the stage that uses it.

        If several stages use it, it goes to the first. The weights then stay on the devices where
        they are used, and a step sends none. They are found by their names in the last recording,
        or by the ends of these names. Raises UsageError before the first call, or if a name is
        unknown or stands for several weights.
        """
        state = self._recorded("place")
        leaves, spec = flatten(tree)
        names = list(map(path_name, paths(tree)))
        at = [i for i, x in enumerate(leaves)  # the rest are a module's settings
              if isinstance(x, (Tensor, np.ndarray)) or engine_array(x)]  # fmt: skip
        tensors = [state.together(as_tensor(leaves[i])) for i in at]
        types, steps, outs = [state.whole(t) for t in tensors], [], []
        options = settings().program
        for i, t in enumerate(tensors):
            home = self._home(t, names[at[i]])
            to = t.type if home is None else laid_on(t.type, state.slices[home])
            if t._data is None and t._pending is not None:
                t.type = types[i] = to  # to be made there
            if t.mesh == to.mesh:
                outs.append(i)
                continue
            outs.append(len(types))
            types.append(to)
            steps.append(Send((i,), (outs[-1],), (to,)))
        if not steps:  # arrays have become tensors that are to be made there
            same = all(leaves[i] is t for i, t in zip(at, tensors, strict=True))
            for i, t in zip(at, tensors, strict=True):
                leaves[i] = t
            return tree if same else unflatten(spec, leaves)
        given = tuple(range(len(tensors)))
        schedule = Schedule(
            "place", state.mesh, tuple(types), given, tuple(outs), tuple(steps), options
        )
        program = engine().step_by_step(schedule)
        data = program([t.data for t in tensors], tuple(t.type for t in tensors))
        for i, d, o, old in zip(at, data, outs, tensors, strict=True):
            leaves[i] = new = Tensor(d, types[o])
            new.name = old.name
        return unflatten(spec, leaves)

    def _home(self, t: Tensor, name: str) -> int | None:
        ends = [k for k in self.homes if k.endswith(f".{name}")]
        names = [k for k in (t.name, name) if k in self.homes][:1] or ends
        ranks = {self.homes[k] for k in names}
        if len(ranks) != 1:
            raise fail(
                UsageError,
                f"{self.name}.place: the name {name!r} "
                + ("is on several stages" if ranks else "was not in the last call"),
                [("known", ", ".join(sorted(self.homes)[:8]) or "none")],
                fix="give the weights in the structure of the call's arguments",
            )
        return ranks.pop()

    def _recorded(self, what: str) -> PipeState:
        if self.state is None:
            raise fail(
                UsageError,
                f"{self.name}.{what}: the pipeline has not been called yet",
                fix="call it once",
            )
        return self.state

    def plan_text(self) -> str:
        """The stages as text: devices, number of parts, work of a microbatch, bytes of weights.

        The work is that of a forward and backward pass, the loss included. Raises UsageError before
        the first call.
        """
        state, table = self._recorded("plan_text"), self.table
        rows = state.rows // state.count
        head = f"{self.name}: {table.name}, {state.count} microbatches of {rows} rows, along "
        lines = [f"{head}{self.axis} of {state.mesh.text()}"]
        slowest = max(self.balance, default=0.0) or 1.0
        for s, rank in enumerate(table.placement):
            devices = ", ".join(str(d) for d in state.slices[rank].device_ids)
            lines.append(
                f"  stage {s} on devices {devices}: {self.sizes[s]} part"
                f"{'s' if self.sizes[s] != 1 else ''}, {self.balance[s]:.3g} FLOP"
                f" ({self.balance[s] / slowest:.0%} of the slowest),"
                f" {self.weight_bytes[s]:,} bytes of weights a device"
            )
        count = len(self.schedule.steps)
        lines.append(
            f"  {count} steps, about {count * LAUNCH_S * 1e3:.3g} ms to launch: if the slowest"
            f" stage computes for less, {FEWER}"
        )
        return "\n".join(lines)

    @property
    def schedule(self) -> Any:
        """The Schedule of the last recording. Raises UsageError before the first call."""
        self._recorded("schedule")
        assert self.plan is not None
        return self.plan.schedule

    @property
    def table(self) -> Any:
        """The table of actions of the last recording. Raises UsageError before the first call."""
        self._recorded("table")
        assert self.plan is not None
        return self.plan.table

    def _mesh(self, given: Sequence[Tensor]) -> Mesh:
        theirs = next((x.mesh for x in given if x.mesh is not None and self.axis in x.mesh), None)
        mesh = self.mesh or settings().mesh or theirs
        if mesh is None or self.axis not in mesh:
            raise fail(
                MeshError,
                f"{self.name}: there is no mesh with an axis {self.axis!r} to lay the stages on",
                [("mesh", mesh.text() if mesh is not None else "none")],
                fix="pass mesh=..., or name another axis of the mesh",
            )
        return mesh

    # -- from one microbatch to a schedule --------------------------------------------------------
    def microbatches(self, ranks: int) -> int:
        """The number of microbatches for `ranks` ranks: as given, as scheduled, or the default."""
        return self.count or settings().program.schedule.microbatches or MICROBATCHES * ranks

    def compiled(
        self, recorder: Recorder, outputs: Sequence[Node], wholes: Sequence[TensorType]
    ) -> Plan:
        """For the recorder: the schedule of a recorded pipeline; `wholes` are the types of its
        inputs."""
        state, b = recorder.pipe, recorder.builder
        assert state is not None
        graph = b.graph(outputs)
        new = b.finals

        def final(n: Node) -> Node:
            n = b.replaced.get(n, n)
            return new.get(n, n)

        origins = {new.get(n, n): final(o) for n, o in b.origins.items()}
        sums = {k: final(n) for k, n in state.sums.items()}
        key = [recorder.key] if recorder.key is not None else []
        micro = depends(graph.nodes, [*state.batch, *key])
        late = depends(graph.nodes, sums)
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
            if o in micro and o not in late and o.op != "input":
                self._kind(o, state, means, rows)
        backward = {n for n in sums.values() if n in origins}
        # And what gradients were derived from: the loss itself may not be a result.
        forward = reachable((*means, *rows, *(n for n in sums.values() if n not in backward)))
        forward |= set(graph.nodes) - depends(graph.nodes, origins)
        table = self._table(state)
        if self.body is not None:
            scopes = [getattr(p, "name", "") for p in self.parts]
            spans = [[n for n in graph.nodes if name in n.scope.split("/")] for name in scopes]
        else:
            spans = [_with_loops(final(n) for n in b.nodes[i:j]) for i, j in state.spans]
        free = free_nodes(graph.nodes)
        parts = [
            [n for n in p if n in forward and n.op != "input" and n not in free] for p in spans
        ]

        used = reachable(n for n in graph.nodes if n in micro and n not in late)

        def shares(parts: list[list[Node]]) -> list[list[Node]]:
            """What falls to each part in a microbatch: gradients too, and the loss."""
            marked = {n: i for i, part in enumerate(parts) for n in part}
            found = stage_numbers(graph.nodes, marked, origins, len(parts) - 1, free)
            out: list[list[Node]] = [[] for _ in parts]
            for n, i in found.items():
                if n in used:
                    out[i].append(n)
            return out

        groups = self._groups(parts, table.stages, state, shares)
        resting = state.resting | {
            n for t, n in recorder.captured if t.mesh in (state.mesh, state.given)
        }
        made = Recorded(
            graph,
            state.batch,
            sums,
            frozenset(means),
            frozenset(rows),
            {n: s for s, group in enumerate(groups) for n in group},
            origins,
            {k: final(n) for k, n in state.ahead.items()},
            {new.get(g, g): w for g, w in state.gradients.items() if w in resting},
            recorder.key,
        )
        warn_if_few(table, stacklevel=lines_up())
        self.plan = pipeline_schedule(made, wholes, table, state.slices, state.mesh)
        names = {n: t.name for t, n in recorder.captured}
        self.state = state
        inner = {*state.batch, *state.sums, *state.ahead}
        self.homes = dict.fromkeys(str(n.attrs["name"]) for n in b.inputs if n not in inner)
        self.homes |= {names.get(n) or str(n.attrs["name"]): r for n, r in self.plan.homes.items()}
        return self.plan

    def _kind(self, o: Node, state: PipeState, means: set[Node], rows: set[Node]) -> None:
        part = next(iter(state.batch)).type.shape[0]
        if not o.type.rank and o.type.dtype.is_float:
            means.add(o)
        elif o.type.rank and o.type.shape[0] == part:
            rows.add(o)
        else:
            raise inseparable(self.name, o)

    def _table(self, state: PipeState) -> Table:
        ranks = state.mesh.sizes[self.axis]
        chunks = self.chunks
        if chunks is None and isinstance(self.kind, str) and not self.kind.endswith(".csv"):
            known = known_schedule(self.kind).chunks
            chunks = known or max(1, (self.stages or 2 * ranks) // ranks)
        return pipeline_table(self.kind, ranks, state.count, chunks)

    def _groups(
        self,
        parts: list[list[Node]],
        count: int,
        state: PipeState,
        shares: Callable[[list[list[Node]]], list[list[Node]]],
    ) -> list[list[Node]]:
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
        every = shares(parts)
        starts = balanced(list(map(_flops, every)), count)
        spans = list(zip(starts, [*starts[1:], len(parts)], strict=True))
        self.sizes = [b - a for a, b in spans]
        work = [[n for p in every[a:b] for n in p] for a, b in spans]
        self.balance = list(map(_flops, work))
        other = {*state.batch, *state.sums, *state.ahead}
        self.weight_bytes = [
            sum(a.type.local_bytes for a in {a for n in nodes for a in n.args}
                if a.op == "input" and a.type.dtype.is_float and a not in other)
            for nodes in work
        ]  # fmt: skip
        return [[n for p in parts[a:b] for n in p] for a, b in spans]


def _with_loops(nodes: Iterable[Node]) -> list[Node]:
    """`nodes`, each once, and before each that is a result of several what gives them: a loop that
    gives its own gradient too was made late, in place of another."""
    found: dict[Node, None] = {}
    for n in nodes:
        if n.op == "item":
            found.setdefault(n.args[0])
        found.setdefault(n)
    return list(found)


def _flops(nodes: Sequence[Node]) -> float:
    total = 0.0
    for n in nodes:
        ins = n.args[0].types if n.op == "item" else tuple(a.type for a in n.args)
        total += OPS[n.op].flops(ins, n.types, n.attrs) * ways(n.type.varying, n.type.sizes)
    return total


def _pieces(nodes: list[Node]) -> list[list[Node]]:
    """`nodes` cut wherever one value crosses, and scalars beside it."""
    last_use = {a: i for i, n in enumerate(nodes) for a in n.args}
    alive: set[Node] = set()
    here = set(nodes)
    cuts = [0]
    for i, n in enumerate(nodes):
        alive.add(n)
        alive = {a for a in alive if last_use.get(a, -1) > i and a in here}
        large = [a for a in alive if a.type.rank]
        if len(large) == 1 and large[0].type.rank > 1:
            cuts.append(i + 1)
    pairs = zip(cuts, [*cuts[1:], len(nodes)], strict=True)
    return [nodes[a:b] for a, b in pairs if b > a]
