"""Measurement of the machine at hand: rates of products and of memory, launches, and links.

The result is a machine like any other: `simulate` takes it, and a file holds it. Each figure is the
best of some runs, as other programs only make them slower. On a CPU all devices share one chip: its
rates are those of the whole, measured on one device, which uses all cores.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.devices import device_count, platform
from ..core.machine.chip import Chip, Products
from ..core.machine.machine import Machine
from ..core.mesh import auto
from ..core.topology import Level, Link, Topology
from ..cost.step_time import EXPENSIVE
from ..lang.jit.jit import jit
from ..lang.math.create import tensor
from ..lang.math.functions import einsum, tanh
from ..lang.math.functions import sum as total
from ..lang.parallel.collectives import all_reduce
from ..lang.value.engine import engine

SHAPES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (2048, 2048, 1024), (1024, 64, 64), (1024, 64, 1024), (64, 1024, 1024), (1024, 1024, 64),
    (2048, 256, 256), (2048, 1024, 256), (2048, 256, 1024), (256, 1024, 2048), (256, 256, 2048),
    (4096, 512, 128), (128, 512, 4096), (512, 4096, 512), (4096, 4096, 64), (32, 2048, 2048),
)  # fmt: skip
"""The measured products, as m, n and k."""
COLUMNS = (
    (256, 1024, 4096), (1024, 256, 2048), (512, 512, 512), (512, 1024, 2048), (256, 256, 4096),
)  # fmt: skip
"""The measured products, as m, n and k, of a left operand that is read along its columns."""
LARGE, SMALL = 1 << 22, 1 << 8  # elements of f32 on a device
CHAIN = 64  # kernels that follow each other
Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured machine, and the measurements of products behind it: seconds by dtype and by m,
    n and k."""

    machine: Machine
    products: dict[tuple[str, Sizes], float]

    @property
    def error(self) -> float:
        """The root mean square of the relative errors of the chip's times of products."""
        chip = self.machine.chip
        assert chip is not None
        errors = [
            chip.product_s(dtype, 1, *sizes) / took_s - 1
            for (dtype, sizes), took_s in self.products.items()
        ]
        return math.sqrt(sum(e * e for e in errors) / len(errors))


def calibrate(
    shapes: Sequence[Sizes] = SHAPES,
    dtypes: Sequence[str] = ("f32", "bf16"),
    large: int = LARGE,
    rounds: int = 5,
) -> Calibration:
    """Measures this machine: products of `shapes` in `dtypes`, arrays and collectives of `large`
    elements of f32, each the best of `rounds`."""
    rng = np.random.default_rng(0)
    kind, devices = platform(), device_count()

    def best_s(fn: Callable[..., Any], *args: Any) -> float:
        return best(jit(fn), args, rounds)

    x = tensor(rng.normal(size=(SMALL,)).astype(np.float32))
    program_s = best_s(lambda x: x + 1.0, x)

    def chain(x: Any) -> Any:
        for _ in range(CHAIN // 2):
            x = x - total(x, dim=0)  # a sum, and a kernel that reads it
        return x

    kernel_s = max(0.0, best_s(chain, x) - program_s) / CHAIN
    y = tensor(rng.normal(size=(large,)).astype(np.float32))

    def inside_s(fn: Callable[..., Any], *args: Any) -> float:
        """The seconds without the launch, which varies: at least a quarter of what is measured."""
        took_s = best_s(fn, *args)
        return max(took_s - program_s, took_s / 4)

    moved_s = inside_s(lambda y: y * 1.5, y)
    computed_s = inside_s(lambda y: tanh(tanh(tanh(tanh(y)))), y)
    products: dict[tuple[str, Sizes], float] = {}
    for dtype in dtypes:
        for m, n, k in shapes:
            a = tensor(rng.normal(size=(m, k)), dtype=dtype)
            b = tensor(rng.normal(size=(k, n)), dtype=dtype)
            products[dtype, (m, n, k)] = inside_s(lambda a, b: a @ b, a, b)
    laws = tuple(fitted(d, {s: t for (e, s), t in products.items() if e == d}) for d in dtypes)
    chip = Chip(
        kind,
        laws,
        memory_bytes=float(engine().memory_bytes() or 1),
        memory_bytes_per_s=8.0 * large / moved_s,
        ops_per_s=4.0 * EXPENSIVE * large / computed_s,
        kernel_s=kernel_s,
        program_s=program_s,
        shared=kind == "cpu",
    )
    chip = replace(chip, column_s=column_s(inside_s))
    levels = (Level(devices, measured_link(devices, large, rounds)),)
    source = f"measured by tessera calibrate on {devices} devices of kind {kind}"
    machine = Machine(
        kind, Topology("measured", levels), ("device",), (1,), sources=(source,), chip=chip
    )
    return Calibration(machine, products)


def column_s(inside_s: Callable[..., float]) -> float:
    """Returns the time for one more element of a left operand that is read along its columns, at
    least 0: the median of what products of f32 take more than with one that is read along its
    rows."""
    rng, found = np.random.default_rng(0), list[float]()
    for m, n, k in COLUMNS:
        x, b = (tensor(rng.normal(size=(k, size)).astype(np.float32)) for size in (m, n))
        a = tensor(rng.normal(size=(m, k)).astype(np.float32))
        by_columns_s = inside_s(lambda x, b: einsum("km,kn->mn", x, b), x, b)
        found.append((by_columns_s - inside_s(lambda a, b: a @ b, a, b)) / (k * m))
    return max(0.0, statistics.median(found))


def best(fn: Callable[..., Any], args: Sequence[Any], rounds: int, count: int = 0) -> float:
    """Returns the least mean of the seconds of a call in `rounds` series of `count` calls; 0: as
    many as take 20 ms, at most 20. Processes need the same count."""
    from ..runtime.processes.diagnose import took_s  # it loads the engine

    once_s = took_s(lambda: fn(*args), 1)
    count = count or max(1, min(20, int(0.02 / max(once_s, 1e-6))))
    return min(took_s(lambda: fn(*args), count) for _ in range(rounds))


def measured_link(devices: int, large: int, rounds: int) -> Link:
    """Returns the link between `devices` that a ring's all-reduce of a small and of a large array
    shows."""
    if devices == 1:
        return Link("none", 0.0, 1e12)
    took = []
    for elements in (SMALL, large):
        x = tensor(
            np.ones((devices, elements), np.float32),
            mesh=auto(("all",)),
            layout=f"[{devices}@all, {elements}]",
        )
        reduced = jit(lambda x: all_reduce(total(x, dim=0), axis="all"))
        took.append(best(reduced, (x,), rounds, 8))
    moved = 2 * (devices - 1) / devices * 4 * (large - SMALL)
    return Link(
        "measured", took[0] / (2 * (devices - 1)), moved / max(took[1] - took[0], took[1] / 4)
    )


def fitted(dtype: str, times_s: dict[Sizes, float]) -> Products:
    """Returns the rate of products of `dtype` that is nearest to the times by m, n and k: least
    squares of the logarithms, by steps along one constant after the other.

    >>> law = Products("f32", 1e12, 0.8, 5e4, 100.0)
    >>> shapes = [(n, n, k) for n in (64, 512, 4096) for k in (64, 1024)]
    >>> times = {s: 2.0 * math.prod(s) / (1e12 * law.efficiency(1, *s)) for s in shapes}
    >>> found = fitted("f32", times)
    >>> f"{found.peak_flops_per_s * found.most / 1e12:.2f} {found.area:.0f} {found.depth:.0f}"
    '0.80 50000 100'
    """
    peak = max(2.0 * math.prod(s) / t for s, t in times_s.items())

    def error(at: Sequence[float]) -> float:
        law = Products(dtype, at[0], 1.0, at[1], at[2])
        each = (
            math.log(2.0 * math.prod(s) / (law.peak_flops_per_s * law.efficiency(1, *s)) / t)
            for s, t in times_s.items()
        )
        return sum(e * e for e in each)

    # A size beyond the measured ones does not show, and the peak would grow with it.
    area, depth = max(4e5, *(4.0 * m * n for m, n, _ in times_s)), max(4.0 * k for *_, k in times_s)
    limits = (math.inf, area, max(depth, 400.0))
    at, step = [peak, 1e5, 100.0], 2.0
    now = error(at)
    while step > 1 + 1e-6:
        tries = [
            [min(x * f, limits[j]) if i == j else x for j, x in enumerate(at)]
            for i in range(3)
            for f in (step, 1 / step)
        ]
        found = min(tries, key=error)
        if error(found) < now:
            at, now = found, error(found)
        else:
            step = math.sqrt(step)
    most = min(1.0, at[0] / max(peak, at[0]))
    return Products(dtype, max(peak, at[0]), most, at[1], at[2])
