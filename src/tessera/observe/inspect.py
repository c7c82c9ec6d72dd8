"""`dist.inspect`: a report of a tensor, a layer of experts, a compiled function or its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..core.checks import shown, unfit
from ..core.errors import warn_no_effect
from ..core.layout import TensorType
from ..core.topology import Topology, cluster
from ..core.wording import columns
from ..cost.schedule_collectives import CollectiveCost, collective_costs, links_of
from ..ir.graph.node import Graph
from ..ir.graph.oracle import dim_index, dim_valid, every_coords
from ..ir.graph.text import size_text
from ..ir.schedule.algorithms.build import PUTS
from ..ir.schedule.schedule import Schedule, Send
from ..lang.jit.jit import Jit
from ..lang.parallel.pipelines.pipe import Pipe
from ..lang.program.training_step import TrainingStep
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor
from ..nn.experts.layer import MoE, moe_inspection
from ..nn.experts.transport import CARRIERS, TRANSPORTS, MoEInspection, reports_of

MOST_DRAWN, LISTED = 64, 8  # devices
WIDTH = 100  # columns
Fn = Jit[Any, Any] | TrainingStep[Any, Any] | Pipe | Schedule


@dataclass(frozen=True)
class Inspection:
    """A report of a tensor's type; `str()` is its text, `.holds` the blocks per device id.

    `holds[device]` gives, per dim, the runs [start, stop) of global indices on that device.
    """

    type: TensorType
    name: str
    holds: dict[int, tuple[tuple[tuple[int, int], ...], ...]]
    experts: tuple[MoEInspection, ...] = ()  # reports of `op.moe`, for its results

    def __str__(self) -> str:
        t = self.type
        rows = [f"{self.name or 'tensor'} : {t}", f"  global    {t.shape}, {t.nbytes:,} bytes"]
        if t.mesh is not None:
            rows.append(f"  mesh      {t.mesh.text()}")
            one = "a device" if t.mesh.onto is None else "a place "
            rows.append(f"  {one}  {t.local_shape}, {t.local_bytes:,} bytes")
            if t.mesh.onto is not None:
                rows[-2] += f", folded onto {t.mesh.onto.text()}"
                places = t.mesh.size // t.mesh.onto.size
                rows.append(f"  a device  {places} places, {t.device_bytes:,} bytes")
            for i, dim in enumerate(t.dims):
                axes = [a for f in dim for a in f.axes]
                if axes:
                    rows.append(f"  dim {i}     split over {', '.join(axes)}")
            for axis, kind in t.partial:
                rows.append(f"  partial   a {kind} over {axis} is still to be completed")
            used = {*t.split_axes, *t.partial_axes}
            copies = [a for a in t.mesh.axes if a not in used and t.sizes[a] > 1]
            if copies:
                rows.append(f"  copies    replicated over {', '.join(copies)}")
            rows += self._picture()
        return "\n".join([*rows, *map(str, self.experts)])

    __repr__ = __str__

    def _picture(self) -> list[str]:
        """The picture of the blocks by device, or a list if it is too large to draw."""
        from ..show.layout_picture import slice_text, whole_picture  # its library is slow

        assert self.type.mesh is not None
        shape, mesh = self.type.shape, self.type.mesh
        drawn = ""
        if len(self.holds) <= MOST_DRAWN:
            drawn = whole_picture(shape, self.holds, mesh, WIDTH)
        if drawn:
            return drawn.splitlines()
        rows = []
        for device, dims in list(self.holds.items())[:LISTED]:
            rows.append(f"  device {device:<3} {slice_text(shape, dims)}")
        different = len(set(self.holds.values()))
        if len(self.holds) > LISTED:
            rows.append(f"  ... and {len(self.holds) - LISTED} devices more")
        return [*rows, f"  {different} different parts on {len(self.holds)} devices"]


@overload
def inspect(t: MoE) -> MoEInspection: ...
@overload
def inspect(t: Tensor) -> Inspection: ...
@overload
def inspect(t: Fn, *, topology: Topology | str | None = None) -> ScheduleInspection: ...
def inspect(
    t: Tensor | MoE | Fn, *, topology: Topology | str | None = None
) -> Inspection | MoEInspection | ScheduleInspection:
    """A report on `t`. For a tensor: its layout in words and numbers, and a picture by device.

    The data is not read. For an `nn.MoE`: the devices of its experts, and the transport in use for
    the requested one; for a result of `op.moe` that too. For a compiled function, or the Schedule
    that its `plan` returns: its collectives with algorithms, rounds and bytes, its transports, and
    the sends of a pipeline. With links, which are `topology`, or else those that the schedule was
    planned for, or else those of its mesh, each has its time, and the dearest comes first.
    """
    if isinstance(t, MoE):
        return moe_inspection(t)
    compiled: Any = t
    if not isinstance(t, Pipe | Schedule):
        compiled = getattr(t, "compiled", t)  # of a training step or a captured function
    if isinstance(compiled, Jit | Pipe | Schedule):
        return inspect_schedule(compiled, topology)
    if callable(t) or isinstance(t, Graph):
        raise unfit(
            "inspect",
            "what is looked at",
            t,
            "give a tensor, a function of ts.jit that was called, or its plan: f.plan(x)",
        )
    if topology is not None:
        warn_no_effect(
            f"inspect: topology={shown(topology)}",
            "a tensor is looked at, and nothing moves",
            means="the links on which collectives are priced",
            fix="leave it out, or give a function of ts.jit that was called",
        )
    t = as_tensor(t)
    holds = {}
    if t.mesh is not None:
        for device, coords in zip(t.mesh.device_ids, every_coords(t.mesh), strict=True):
            holds[device] = tuple(_runs(t.type, i, coords) for i in range(t.ndim))
    return Inspection(t.type, t.name, holds, reports_of(t._reports))


def _runs(t: TensorType, dim: int, coords: object) -> tuple[tuple[int, int], ...]:
    at = dim_index(t, dim, coords)[dim_valid(t, dim, coords)]  # type: ignore[arg-type]
    runs: list[tuple[int, int]] = []
    for i in at.tolist():
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return tuple(runs)


# `dist.inspect` of a schedule: its collectives, with algorithms, rounds, bytes and times.


@dataclass(frozen=True)
class Traffic:
    """The collectives over `axes` in one run of a schedule: their number, the bytes that the
    busiest rank of each sends, and their time one after the other (None without links)."""

    axes: tuple[str, ...]
    count: int
    sent_bytes: int
    time_s: float | None


@dataclass(frozen=True)
class ScheduleInspection:
    """The collectives of a schedule; `str()` is the table, `.rows` its lines.

    With links the dearest row comes first, else they are in the order of the steps. In the table
    `rounds` and `bytes` are of one run of a collective, `sends` and `µs` of all its runs.
    """

    schedule: Schedule
    topology: Topology | None
    rows: tuple[CollectiveCost, ...]
    backend: str | None = None  # the transport that `@schedule(comm_backend=)` requests
    experts: tuple[MoEInspection, ...] = ()  # of each call of `op.moe` in it

    @property
    def sent(self) -> tuple[int, int]:
        """(number of values sent between meshes, bytes that the device with most of them
        receives)."""
        sends = (s for s in self.schedule.steps if isinstance(s, Send))
        moved = [(z, ids) for s in sends for z, ids in self.schedule.arrivals(s) if z and ids]
        got: Counter[int] = Counter()
        for size, devices in moved:
            got.update(dict.fromkeys(devices, size))
        return len(moved), max(got.values(), default=0)

    @property
    def total(self) -> Traffic:
        """The traffic of all rows. Nothing overlaps in its time, neither compute nor each other."""
        return self._traffic((), self.rows)

    @property
    def by_axis(self) -> dict[str, Traffic]:
        """The traffic by the axes that it goes over ("dp", or "dp, tp"), the dearest first."""
        parts: dict[tuple[str, ...], list[CollectiveCost]] = {}
        for r in self.rows:
            parts.setdefault(r.axes, []).append(r)
        found = [self._traffic(axes, rows) for axes, rows in parts.items()]
        found.sort(key=lambda t: (t.time_s or 0.0, t.sent_bytes), reverse=True)
        return {", ".join(t.axes): t for t in found}

    def __str__(self) -> str:
        where = f", priced on {self.topology.name}" if self.topology is not None else ""
        head = f"{self.schedule.name}  hash {self.schedule.hash}{where}"
        if self.schedule.options.tuned:
            head += f"\n  {self.schedule.options.tuned}"
        if self.backend is not None:
            requested = TRANSPORTS.get(self.backend, "its own collectives")
            moves = self.rows or self.sent[0]
            by = "XLA's collectives"
            if any(r.algorithm in PUTS for r in self.rows):
                by = "kernels with puts (GPUs with NVSHMEM), or permutes"
            served = f"{by} {CARRIERS}" if moves else "nothing: nothing moves"
            head += f"\n  requested {self.backend}: {requested}\n  served by {served}"
        values, size = self.sent
        if values:
            head += f"\n  {values} values go from mesh to mesh, {size_text(size)} to a device"
        if not self.rows:
            return "\n".join([head, "  no collectives", *map(str, self.experts)])
        table = [["step", "collective", "by", "rounds", "bytes", "sends", "at"]]
        if self.topology is not None:
            table[0].insert(6, "µs")
        for r in self.rows:
            operation = f"{r.op} {', '.join(r.axes)}"
            operation += f" ×{r.count}" if r.count > 1 else ""
            operation += f", {r.times} times" if r.times > 1 else ""
            line = [f"s{r.step}", operation, r.algorithm, str(r.rounds), size_text(r.size_bytes)]
            table.append([*line, *self._cells(r.times * r.sent_bytes, r.total_s), r.at])
        over = self.by_axis
        sums = [
            ("total", self.total),
            *((f"over {a}", t) for a, t in over.items() if len(over) > 1),
        ]
        for name, t in sums:
            runs = f"{t.count} runs" if t.count > 1 else "1 run"
            table.append([name, runs, "", "", "", *self._cells(t.sent_bytes, t.time_s), ""])
        lines = columns(table, len(table[0]))
        return "\n".join([head, *("  " + line for line in lines), *map(str, self.experts)])

    def _traffic(self, axes: tuple[str, ...], rows: Sequence[CollectiveCost]) -> Traffic:
        sent = sum(r.times * r.sent_bytes for r in rows)
        time_s = None if self.topology is None else sum(r.total_s or 0.0 for r in rows)
        return Traffic(axes, sum(r.times for r in rows), sent, time_s)

    def _cells(self, sent_bytes: int, time_s: float | None) -> list[str]:
        return [size_text(sent_bytes), *([] if time_s is None else [f"{time_s * 1e6:.1f}"])]

    __repr__ = __str__


def inspect_schedule(
    of: Jit[Any, Any] | Pipe | Schedule, topology: Topology | str | None
) -> ScheduleInspection:
    """The collectives of a schedule, or of the last recording of a function, priced on `topology`,
    or else on the links of the schedule."""
    schedule = of if isinstance(of, Schedule) else of.schedule
    where = links_of(schedule) if topology is None else cluster(topology)
    costs = collective_costs(schedule, where)
    costs.sort(key=lambda r: r.total_s or 0.0, reverse=True)  # those without a time stay in order
    builder = of.builder if isinstance(of, Jit) else None
    found = reports_of(builder.reports if builder is not None else ())
    backend = schedule.options.schedule.backend
    return ScheduleInspection(schedule, where, tuple(costs), backend, found)
