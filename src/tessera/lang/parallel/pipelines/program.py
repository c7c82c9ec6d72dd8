"""`PipeProgram`: the schedule of a pipelined function.

The recording is divided into one microbatch and the nodes after all (microbatch.py), then into
stages (division.py), and scheduled by a table of actions (ir/schedule/pipelines/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....core.errors import UsageError, lines_up
from ....core.layout import TensorType
from ....core.mesh_input import ids_text
from ....ir.graph.node import Node
from ....ir.schedule.pipelines.pipeline import Pipelined, pipelined
from ....ir.schedule.pipelines.simulate import FEWER, LAUNCH_S, warn_if_few
from ....ir.schedule.pipelines.stages import balanced, depends
from ....ir.schedule.pipelines.tables import Table
from ....ir.schedule.schedule import Schedule
from ...record.recorder import Recorder
from ...value.tensor import Tensor
from .microbatch import Microbatch, PipeState


@dataclass(frozen=True)
class PipeProgram:
    """A recorded pipeline: its stages, and the schedule that runs them.

    `homes` has the rank that uses each weight first, by name; None if no stage uses it.
    """

    state: PipeState
    division: Division
    pipelined: Pipelined
    homes: dict[str, int | None]

    @property
    def schedule(self) -> Schedule:
        return self.pipelined.schedule

    @property
    def table(self) -> Table:
        return self.pipelined.table

    def text(self) -> str:
        """The stages: devices, number of parts, work of a microbatch, bytes of weights."""
        state, table, division = self.state, self.table, self.division
        rows = state.rows
        lines = [
            f"{state.pipe.name}: {table.name}, {state.count} microbatches of {rows} rows, along"
            f" {state.pipe.axis} of {state.mesh.text()}"
        ]
        slowest = max(division.flops, default=0.0) or 1.0
        for s, rank in enumerate(table.placement):
            devices = ids_text(state.slices[rank].device_ids, ", ")
            lines.append(
                f"  stage {s} on devices {devices}: {division.parts[s]} part"
                f"{'s' if division.parts[s] != 1 else ''}, {division.flops[s]:.3g} FLOP"
                f" ({division.flops[s] / slowest:.0%} of the slowest),"
                f" {division.weight_bytes[s]:,} bytes of weights a device"
            )
        count = len(self.schedule.steps)
        lines.append(
            f"  {count} steps, about {count * LAUNCH_S * 1e3:.3g} ms to launch: if the slowest"
            f" stage computes for less, {FEWER}"
        )
        return "\n".join(lines)

    def home(self, t: Tensor, name: str) -> int | None:
        """The rank that uses the weight `t` of this name, or of a longer name with this end. Raises
        UsageError if there is no such weight, or if there are several on different stages."""
        ends = [k for k in self.homes if k.endswith(f".{name}")]
        names = [k for k in (t.name, name) if k in self.homes][:1] or ends
        ranks = {self.homes[k] for k in names}
        if len(ranks) != 1:
            raise UsageError(
                f"{self.state.pipe.name}.place: the name {name!r} "
                + ("is on several stages" if ranks else "was not in the last call"),
                known=", ".join(sorted(self.homes)[:8]) or "none",
                fix="give the weights in the structure of the call's arguments",
            )
        return ranks.pop()


def pipe_program(
    recorder: Recorder, outputs: Sequence[Node], wholes: Sequence[TensorType]
) -> PipeProgram:
    """Returns the program of the recording of `recorder`, with the results `outputs`; `wholes` are
    the types of its inputs in the program."""
    m = Microbatch(recorder, outputs)
    state = m.state
    table = state.pipe.table_of(state)
    division = divided(m, table.stages)
    told = f"idle: {table.name}, {table.ranks} ranks, {table.microbatches} microbatches"
    if told not in state.pipe.warned:  # the pipeline is recorded again once weights are placed
        warn_if_few(table, stacklevel=lines_up())
        state.pipe.warned.add(told)
    recorded = m.recorded(division.nodes, outputs)
    pipelined_program = pipelined(recorded, wholes, table, state.slices, state.mesh)
    names = {n: t.name for t, n in recorder.captured}
    homes: dict[str, int | None] = {}
    for n in recorder.builder.inputs:
        name = names.get(n) or str(n.attrs["name"])
        homes[name] = pipelined_program.homes.get(m.one[m.staged[n]])
    return PipeProgram(state, division, pipelined_program, homes)


# Division of a pipeline's nodes into stages.
#
# The parts of the pipeline are grouped, or its one function is cut, so that all stages compute
# about as much.


@dataclass(frozen=True)
class Division:
    """A pipelined function in stages; every list has an entry for each stage."""

    nodes: list[list[Node]]  # the nodes of the forward pass
    parts: list[int]  # the number of parts
    flops: list[float]  # the FLOPs of a microbatch, forward and backward
    weight_bytes: list[int]  # the bytes of weights on a device


def divided(m: Microbatch, count: int) -> Division:
    """Divides `m` into `count` stages. Raises UsageError if it has fewer parts."""
    parts = m.parts
    if len(parts) == 1:
        parts = _pieces(parts[0], m.rows)
    if len(parts) < count:
        pipe = m.state.pipe
        raise UsageError(
            f"{pipe.name}: {len(parts)} parts for a pipeline of {count} stages",
            axis=f"{pipe.axis} of {m.state.mesh.text()}",
            fix="give a part for each stage, or a smaller axis; one function is cut where one"
            " value passes",
        )
    shares = m.shares(parts)
    starts = balanced(list(map(_flops, shares)), count)
    spans = [slice(a, b) for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]
    work = [_joined(shares[s]) for s in spans]
    other = {*m.rows, *m.sums, *m.early}
    return Division(
        [_joined(parts[s]) for s in spans],
        [s.stop - s.start for s in spans],
        list(map(_flops, work)),
        [_weight_bytes(nodes, other) for nodes in work],
    )


def _joined(parts: Sequence[Sequence[Node]]) -> list[Node]:
    return [n for part in parts for n in part]


def _flops(nodes: Sequence[Node]) -> float:
    return float(sum(n.flops for n in nodes))


def _weight_bytes(nodes: Sequence[Node], other: set[Node]) -> int:
    """The bytes of the float inputs of `nodes` that are not among `other`."""
    inputs = {a for n in nodes for a in n.args if a.op == "input"} - other
    return sum(a.type.local_bytes for a in inputs if a.type.dtype.is_float)


def _pieces(nodes: list[Node], rows: Iterable[Node]) -> list[list[Node]]:
    """Cuts `nodes` wherever only one float value other than scalars crosses that is computed from
    `rows` of the batch, if it has two dims or more. Masks and tables of positions do not count."""
    of_rows = depends(nodes, rows)
    last_use = {a: i for i, n in enumerate(nodes) for a in n.args}
    alive: set[Node] = set()
    here = set(nodes)
    cuts = [0]
    for i, n in enumerate(nodes):
        alive.add(n)
        alive = {a for a in alive if last_use.get(a, -1) > i and a in here}
        large = [a for a in alive if a.type.rank and a.type.dtype.is_float and a in of_rows]
        if len(large) == 1 and large[0].type.rank > 1:
            cuts.append(i + 1)
    pairs = zip(cuts, [*cuts[1:], len(nodes)], strict=True)
    return [nodes[a:b] for a, b in pairs if b > a]
