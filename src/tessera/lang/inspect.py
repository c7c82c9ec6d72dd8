"""What is this tensor, and who holds what? `dist.inspect(t)`."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.layout import TensorType
from ..ir.graph.oracle import dim_index, dim_valid, every_coords
from .tensor import Tensor, as_tensor


@dataclass(frozen=True)
class Inspection:
    """A tensor's type in numbers; `str()` is the report, `.holds` the blocks per device id.

    `holds[device]` gives, per dim, the runs [start, stop) of global indices on that device.
    """

    type: TensorType
    name: str
    holds: dict[int, tuple[tuple[tuple[int, int], ...], ...]]

    def __str__(self) -> str:
        t = self.type
        rows = [f"{self.name or 'tensor'} : {t}", f"  global    {t.shape}, {t.nbytes:,} bytes"]
        if t.mesh is not None:
            rows.append(f"  mesh      {t.mesh.text()}")
            rows.append(f"  a device  {t.local_shape}, {t.local_bytes:,} bytes")
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
            for device, dims in list(self.holds.items())[:8]:
                parts = ", ".join("+".join(f"{a}:{b}" for a, b in runs) for runs in dims)
                rows.append(f"  device {device:<3} {f'[{parts}]' if all(dims) else 'nothing'}")
            if len(self.holds) > 8:
                rows.append(f"  ... and {len(self.holds) - 8} devices more")
        return "\n".join(rows)

    __repr__ = __str__


def inspect(t: Tensor) -> Inspection:
    """The layout of `t` in words and numbers, without touching its data."""
    t = as_tensor(t)
    holds = {}
    if t.mesh is not None:
        for device, coords in zip(t.mesh.device_ids, every_coords(t.mesh), strict=True):
            holds[device] = tuple(_runs(t.type, i, coords) for i in range(t.ndim))
    return Inspection(t.type, t.name, holds)


def _runs(t: TensorType, dim: int, coords: object) -> tuple[tuple[int, int], ...]:
    at = dim_index(t, dim, coords)[dim_valid(t, dim, coords)]  # type: ignore[arg-type]
    runs: list[tuple[int, int]] = []
    for i in at.tolist():
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return tuple(runs)
