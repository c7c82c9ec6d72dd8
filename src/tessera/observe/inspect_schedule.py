"""`dist.inspect` of a compiled function: its collectives, with algorithms, rounds and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..core.topology import Topology, cluster
from ..core.wording import columns
from ..cost.schedule_collectives import CollectiveCost, collective_costs
from ..ir.graph.text import size_text
from ..ir.schedule.schedule import Schedule, Send
from ..lang.jit.jit import Jit
from ..lang.parallel.pipelines.pipe import Pipe
from ..nn.experts.transport import CARRIERS, TRANSPORTS, MoEInspection, reports_of


@dataclass(frozen=True)
class ScheduleInspection:
    """The collectives of a schedule; `str()` is the table, `.rows` its lines."""

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

    def __str__(self) -> str:
        where = f", priced on {self.topology.name}" if self.topology is not None else ""
        head = f"{self.schedule.name}  hash {self.schedule.hash}{where}"
        if self.backend is not None:
            requested = TRANSPORTS.get(self.backend, "its own collectives")
            moves = self.rows or self.sent[0]
            served = f"XLA's collectives {CARRIERS}" if moves else "nothing: nothing moves"
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
            what = f"{r.op} {', '.join(r.axes)}"
            what += f" ×{r.count}" if r.count > 1 else ""
            what += f", {r.times} times" if r.times > 1 else ""
            line = [f"s{r.step}", what, r.algorithm, str(r.rounds)]
            line += [size_text(r.size_bytes), size_text(r.sent_bytes)]
            if r.time_s is not None:
                line.append(f"{r.time_s * 1e6:.1f}")
            table.append([*line, r.at])
        lines = columns(table, len(table[0]))
        return "\n".join([head, *("  " + line for line in lines), *map(str, self.experts)])

    __repr__ = __str__


def inspect_schedule(
    fn: Jit[Any, Any] | Pipe, topology: Topology | str | None
) -> ScheduleInspection:
    """The collectives of the last recording of `fn`, priced on `topology`, or else on the topology
    that its algorithms were chosen for."""
    where = None if topology is None else cluster(topology)
    if isinstance(fn, Pipe):
        return ScheduleInspection(fn.schedule, where, tuple(collective_costs(fn.schedule, where)))
    schedule = fn.schedule
    chosen = schedule.options.schedule
    where = where or chosen.topology
    costs = tuple(collective_costs(schedule, where))
    found = reports_of(fn.builder.reports if fn.builder is not None else ())
    return ScheduleInspection(schedule, where, costs, chosen.backend, found)
