"""`dist.inspect`: a report of a tensor, a layer of experts, or a compiled function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from ..core.checks import shown, unfit
from ..core.errors import warn_no_effect
from ..core.layout import TensorType
from ..core.topology import Topology
from ..ir.graph.node import Graph
from ..ir.graph.oracle import dim_index, dim_valid, every_coords
from ..ir.schedule.schedule import Schedule
from ..lang.jit.jit import Jit
from ..lang.parallel.pipelines.pipe import Pipe
from ..lang.program.training_step import TrainingStep
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor
from ..nn.experts.layer import MoE, moe_inspection
from ..nn.experts.transport import MoEInspection, reports_of
from .inspect_schedule import ScheduleInspection, inspect_schedule

MOST_DRAWN, LISTED = 64, 8  # devices
WIDTH = 100  # columns
Fn = Jit[Any, Any] | TrainingStep[Any, Any] | Pipe


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
            rows += self._who()
        return "\n".join([*rows, *map(str, self.experts)])

    __repr__ = __str__

    def _who(self) -> list[str]:
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
    the requested one; for a result of `op.moe` that too. For a compiled function: its collectives
    with algorithms, rounds and bytes, times on `topology`, its transports, and the sends of a
    pipeline.
    """
    if isinstance(t, MoE):
        return moe_inspection(t)
    compiled: Any = t
    if not isinstance(t, Pipe):
        compiled = getattr(t, "compiled", t)  # of a training step or a captured function
    if isinstance(compiled, Jit | Pipe):
        return inspect_schedule(compiled, topology)
    if callable(t) or isinstance(t, Schedule | Graph):
        raise unfit(
            "inspect",
            "what is looked at",
            t,
            "give a tensor, or a function of ts.jit that was called; of a plan: print(plan.text)",
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
