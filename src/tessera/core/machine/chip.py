"""A device's chip as data: rates of products and of memory, the cost of a launch; known chips.

A product of [b, m, k] and [b, k, n] has the rate `peak * most * h(b m n; area) * h(k; depth)` with
h(x; half) = x / (x + half): it rises with the elements of the result, which fill the chip, and with
the summed dim, which hides the start and end of each tile.

>>> h100 = CHIPS["h100"]
>>> [f"{h100.efficiency('bf16', 1, n, n, n):.2f}" for n in (256, 1024, 4096)]
['0.10', '0.57', '0.79']
>>> f"{h100.product_s('bf16', 1, 4096, 4096, 4096) * 1e6:.0f} µs"
'175 µs'
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..declared import Flag, NonNegative, Positive, Rate, Scale, String
from ..errors import MeshError
from ..public import checked


@checked
@dataclass(frozen=True, slots=True)
class Products:
    """The rate of products of one dtype: the peak, the largest part of it that large products
    reach, and the two sizes at which half of that is reached."""

    dtype: String
    peak_flops_per_s: Scale
    most: Positive = 1.0
    area: NonNegative = 0.0
    depth: NonNegative = 0.0

    def efficiency(self, b: int, m: int, n: int, k: int) -> float:
        """Returns the part of the peak that a product of [b, m, k] and [b, k, n] reaches."""
        elements = b * m * n
        return self.most * (elements / (elements + self.area)) * (k / (k + self.depth))


@checked
@dataclass(frozen=True, slots=True)
class Chip:
    """The computing part of a device.

    - `products`: rates of products by dtype; a dtype that is not listed has the rate of the widest
      listed one.
    - `memory_bytes` of capacity; `memory_bytes_per_s` is the maker's bandwidth, of which large
      reads and writes reach the part `memory_efficiency`.
    - `host_bytes_per_s`: what is copied from the host's memory, or to it at the same time.
    - `ops_per_s`: elementwise operations outside of products.
    - `attention`: the part of the products' peak that a kernel of attention reaches.
    - `kernel_s`: the launch of one more kernel in a program. `program_s`: of one more program.
      `column_s`: one more element of a left operand that a product reads along its columns.
    - `shared`: all devices are parts of one chip (virtual devices of a processor): they share its
      rates, and nothing overlaps.
    """

    name: String
    products: tuple[Products, ...]
    memory_bytes: Scale
    memory_bytes_per_s: Scale
    memory_efficiency: Positive = 1.0
    ops_per_s: Positive = math.inf
    kernel_s: Rate = 0.0
    program_s: Rate = 0.0
    shared: Flag = False
    attention: Positive = 0.35
    column_s: Rate = 0.0
    host_bytes_per_s: Positive = math.inf

    def __post_init__(self) -> None:
        if not self.products or not all(isinstance(p, Products) for p in self.products):
            raise MeshError(
                f"chip {self.name!r}: it has no rates of products",
                fix='give at least one: Products("bf16", 989e12, most=0.83)',
            )

    def rate(self, dtype: str) -> Products:
        """Returns the rate of products of `dtype`."""
        by_name = {p.dtype: p for p in self.products}
        found = by_name.get(dtype) or by_name.get(_ALIKE.get(dtype, ""))
        return found or min(self.products, key=lambda p: p.peak_flops_per_s)

    def efficiency(self, dtype: str, b: int, m: int, n: int, k: int) -> float:
        """Returns the part of the peak that a product of [b, m, k] and [b, k, n] reaches."""
        return self.rate(dtype).efficiency(b, m, n, k)

    def product_s(self, dtype: str, b: int, m: int, n: int, k: int, moved_bytes: int = 0) -> float:
        """Returns the time of a product without its launch: of its operations, or of `moved_bytes`
        of memory if that is longer."""
        if not b * m * n * k:
            return self.memory_s(moved_bytes)
        p = self.rate(dtype)
        work_s = 2.0 * b * m * n * k / (p.peak_flops_per_s * p.efficiency(b, m, n, k))
        return max(work_s, self.memory_s(moved_bytes))

    def memory_s(self, moved_bytes: float) -> float:
        """Returns the time to read or write `moved_bytes`."""
        return moved_bytes / (self.memory_bytes_per_s * self.memory_efficiency)

    def part(self, devices: int) -> Chip:
        """Returns the chip as each of `devices` sees it that share it at the same time."""
        if not self.shared or devices == 1:
            return self
        return replace(
            self,
            products=tuple(
                replace(p, peak_flops_per_s=p.peak_flops_per_s / devices) for p in self.products
            ),
            memory_bytes_per_s=self.memory_bytes_per_s / devices,
            ops_per_s=self.ops_per_s / devices,
            kernel_s=self.kernel_s * devices,
            column_s=self.column_s * devices,
        )


# Dtypes that have the rate of another one where they are not listed.
_ALIKE = {"f16": "bf16", "bf16": "f16", "f8e5m2": "f8e4m3", "f8e4m3": "f8e5m2"}

# Peaks and memory are those of NVIDIA's data sheets, dense: A100 80GB SXM, H100 SXM, H200 SXM, and
# HGX B200 (a device); so are copies to the host, by PCIe. A GPU multiplies f32 as TF32 only where
# it is allowed; XLA's default on these GPUs allows it. `ops_per_s` is the data sheet's f32 rate
# outside of tensor cores.
#
# H100: `most`, `area`, `depth` and `kernel_s` are fitted to 40 of the bf16 products that XLA has
# measured on sm_90 (xla/service/gpu/model/matmul_interpolator_data.h, 256 to 4096 a side, batches
# of 1 to 4); they return these with an error of 6.4 % (root mean square of the logarithm). TF32's
# `most` is that of the largest there (347 of 495). The other chips have the same part of the peak
# and depth, and an area in proportion to their multiprocessors (108, 132, 148): estimates, as is
# the part of the memory's bandwidth. `attention`: FlashAttention-2 reaches 35 % of an H100's peak
# (Shah et al. 2024); an A100's part is that of its instructions, which reach 63 % of an H100's peak
# (Luo et al. 2024). `tessera calibrate` replaces the others by measurements.
_MOST, _DEPTH, _KERNEL_S, _STREAMS = 0.83, 113.0, 5.7e-6, 0.85


def _gpu(
    name: str, processors: int, memory: float, bandwidth: float, ops: float,
    attention: float = 0.35, host: float = 64e9, **peaks: float,
) -> Chip:  # fmt: skip
    area = 327e3 * processors / 132
    most = {"f32": 0.70}
    products = [Products(d, x, most.get(d, _MOST), area, _DEPTH) for d, x in peaks.items()]
    return Chip(
        name, tuple(products), memory, bandwidth, _STREAMS, ops, kernel_s=_KERNEL_S,
        program_s=20e-6, attention=attention, host_bytes_per_s=host * _STREAMS,
    )  # fmt: skip


CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        _gpu("a100", 108, 80e9, 2039e9, 19.5e12, 0.56, 32e9, bf16=312e12, f32=156e12),
        _gpu("h100", 132, 80e9, 3350e9, 67e12, bf16=989e12, f32=495e12, f8e4m3=1979e12),
        _gpu("h200", 132, 141e9, 4800e9, 67e12, bf16=989e12, f32=495e12, f8e4m3=1979e12),
        _gpu("b200", 148, 180e9, 8000e9, 75e12, bf16=2250e12, f32=1125e12, f8e4m3=4500e12),
    )
}
"""The described chips, by their names."""
