"""Measurement of an all-reduce between all devices, and a check of its sum."""

from __future__ import annotations

import numpy as np

from ...core.errors import TesseraError
from ...core.mesh import auto
from ...lang.jit.jit import jit
from ...lang.math.create import tensor
from ...lang.math.functions import sum as total
from ...lang.parallel.collectives import all_reduce
from ...lang.value.tensor import Tensor
from .host import first_line, way_out
from .report import Check

SMALL, LARGE = 1, 2**22  # elements of f32 per device
MOST_BYTES = 2**30  # of all devices together


def reduce_checks() -> list[Check]:
    """Returns the latency of an all-reduce of 4 bytes, and the bandwidth of one of 16 MiB."""
    try:
        mesh = auto(("all",))
        if mesh.size == 1:
            return [Check("all_reduce", "note", "one device: there is nothing to reduce between")]
        # The large one first: after a small one, gloo's later ones are slower.
        large = max(min(LARGE, MOST_BYTES // 4 // mesh.size), SMALL)
        times_s = {}
        for elements, times in ((large, 5), (SMALL, 20)):
            took, right = _measured(mesh.size, elements, times)
            if not right:
                return [check_sum(mesh.size, elements)]
            times_s[elements] = took
    except TesseraError as error:
        fix = way_out(error) or "see the checks above"
        return [Check("all_reduce", "fix", first_line(error), fix)]
    return [reduced(mesh.size, times_s[SMALL], 4 * large, times_s[large])]


def _measured(devices: int, elements: int, times: int) -> tuple[float, bool]:
    """Returns the seconds of one all-reduce of `elements` per device, and whether its sum is
    right."""
    from ...runtime.processes.diagnose import took_s  # it loads the engine

    mesh = auto(("all",))
    block = np.arange(elements, dtype=np.float32) % 64
    data = np.broadcast_to(block, (devices, elements))
    x = tensor(data, mesh=mesh, layout=f"[{devices}@all, {elements}]")

    @jit
    def summed(x: Tensor) -> Tensor:
        made: Tensor = all_reduce(total(x, dim=0), axis="all")
        return made

    right = bool((summed(x).numpy() == block * devices).all())
    return took_s(lambda: summed(x), times), right


def check_sum(devices: int, elements: int) -> Check:
    """Returns the check of a wrong sum."""
    return Check(
        "all_reduce", "fix", f"the sum of {elements:,} numbers over {devices} devices is wrong",
        "do not train here: update jaxlib and the driver, and run tessera doctor again",
    )  # fmt: skip


def reduced(devices: int, small_s: float, size: int, large_s: float) -> Check:
    """Returns the check of an all-reduce that works.

    >>> reduced(8, 20e-6, 2**24, 0.01).found
    'right among 8 devices: 20 µs for 4 B; 16 MiB in 10.0 ms, 2.9 GB/s on a ring'
    """
    ring = 2 * (devices - 1) / devices * size / large_s
    return Check(
        "all_reduce", "ok",
        f"right among {devices} devices: {small_s * 1e6:.0f} µs for 4 B; {size / 2**20:g} MiB in "
        f"{large_s * 1e3:.1f} ms, {ring / 1e9:.1f} GB/s on a ring",
        facts={"devices": devices, "latency_s": small_s, "bytes": size, "time_s": large_s,
               "bus_bytes_per_s": ring},
    )  # fmt: skip
