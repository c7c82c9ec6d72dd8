"""Cost of each collective of a schedule, by its algorithm and the given links.

>>> from tessera.core.layout import parse_type
>>> from tessera.core.mesh import Mesh
>>> from tessera.core.topology import cluster
>>> from tessera.ir.graph.build import Builder
>>> from tessera.ir.schedule.build import build_schedule
>>> b = Builder("total")
>>> x = b.input(parse_type("f32[1024] +dp", Mesh.parse("dp=8")), "x")
>>> s = build_schedule(b.graph([b("all_reduce", x, axes=("dp",))]))
>>> (row,) = collective_costs(s, cluster("h100").of(1))
>>> row.algorithm, row.rounds, row.size_bytes, row.sent_bytes
('engine', 14, 4096, 7168)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from ..core.layout import shard_count
from ..core.reshard import travelling_of_device
from ..core.topology import Topology
from ..ir.graph.node import Node
from ..ir.schedule.algorithms.build import MOST_RANKS, named
from ..ir.schedule.algorithms.table import COLLECTIVES
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..ir.tile.node import mesh_kernel
from ..ops.redistribute import all_gather, all_reduce, reduce_scatter
from .collectives import price


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective of a step, or several that are sent as one buffer (`count`), `times` per run.

    `size_bytes` is a rank's whole tensor (for an all_gather its result), `sent_bytes` the bytes
    that the busiest rank sends each time, `time_s` the time on the topology each time (None without
    a topology). The engine's own collective has the counts of the table that prices it.
    """

    step: int
    op: str
    axes: tuple[str, ...]
    algorithm: str
    count: int
    times: int
    rounds: int
    size_bytes: int
    sent_bytes: int
    time_s: float | None
    at: str

    @property
    def total_s(self) -> float | None:
        """The time of all of its runs; None without a topology."""
        return None if self.time_s is None else self.times * self.time_s


def links_of(s: Schedule) -> Topology | None:
    """Returns the links that `s` is planned for: those of its options, or else of its mesh."""
    return s.options.schedule.topology or (s.mesh.links if s.mesh is not None else None)


def whole_bytes(n: Node) -> int:
    """Returns the S of the formulas: the bytes of a rank's whole tensor as it is sent (for an
    all_gather its result), with the padding of uneven blocks. On a folded mesh a rank is a device,
    which has combined its places."""
    before, axes = n.args[0].type, n.attrs["axes"]
    ranks = 1 if before.mesh is None else shard_count(axes, before.mesh.physical.sizes)
    if n.op == mesh_kernel.name:
        return n.wire_bytes * ranks // max(1, ranks - 1)
    if n.op == all_gather.name:
        return ranks * before.device_bytes
    if n.op == reduce_scatter.name:
        return ranks * n.type.device_bytes
    return travelling_of_device(before, axes) if n.op == all_reduce.name else before.device_bytes


def priced_as(n: Node) -> str:
    """Returns the collective whose formula prices the node: a kernel that puts is priced as if each
    device put its blocks to all others."""
    return "all_to_all" if n.op == mesh_kernel.name else n.op


def collective_costs(s: Schedule, topology: Topology | None = None) -> list[CollectiveCost]:
    """Returns a row for each collective step of `s`, in order, including those in loops and
    regions: `step` is the step of `s` that contains it. Without a topology the links of `s` price
    them.

    Raises UsageError if the topology has fewer devices than the mesh names.
    """
    topology = topology or links_of(s)
    return [row for i, step in enumerate(s.steps) for row in _rows(step, i, 1, topology)]


def _rows(
    step: Step, index: int, times: int, topology: Topology | None
) -> Iterator[CollectiveCost]:
    """Yields a row for each collective in `step`, which is in step `index` of the whole; those of a
    loop's body run `times` its length."""
    match step:
        case Collective():
            yield from _row(index, step.nodes, times, topology)
        case Loop():
            for inner in step.body.steps:
                yield from _rows(inner, index, times * step.times, topology)
        case Region():
            for inner in step.body.steps:
                yield from _rows(inner, index, times, topology)
        case Compute() | Send():
            pass
        case _:
            assert_never(step)


def _row(
    step: int, nodes: list[Node], times: int, topology: Topology | None
) -> Iterator[CollectiveCost]:
    """Yields the cost of the collective or bucket `nodes`; nothing if no table describes it."""
    first = nodes[0]
    t, axes = first.args[0].type, tuple(first.attrs["axes"])
    if t.mesh is None:
        return
    devices = t.mesh.physical
    n = shard_count(axes, devices.sizes)
    if priced_as(first) not in COLLECTIVES or n > MOST_RANKS:
        return
    op, name = first.op, first.attrs.get("algorithm", "engine")
    if op == mesh_kernel.name:
        op, name = first.attrs["kernel"].name, "puts"
    size, table = sum(map(whole_bytes, nodes)), named(priced_as(first), name, n)
    time_s = None
    if topology is not None:
        time_s = price(table, topology, devices.groups(axes)).time_s(size)
    sent = round(max(table.sent(), default=0) * size / table.parts)
    yield CollectiveCost(
        step, op, axes, name, len(nodes), times, table.steps, size, sent, time_s, first.loc
    )
