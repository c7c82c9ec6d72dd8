"""Model FLOPs utilization (MFU): the model's FLOPs over time, as a part of the measured GEMM peak.

MFU (Chowdhery et al. 2022) counts the FLOPs that the model needs: three times the matrix products
of its forward pass. Recomputation does not count, so a program cannot look better by computing
more. The peak is measured, not taken from a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..core.checks import number, whole
from ..core.devices import platform
from ..core.dtypes import f32
from ..cost.flops import counted
from ..ir.graph.node import Graph
from ..lang.jit.jit import jit
from ..lang.jit.trace import trace
from ..lang.math.create import tensor
from ..lang.value.tensor import Tensor
from ..passes.plan import prepared

FORWARD_AND_BACKWARD = 3
"""A product's gradient is two products of its size."""


def model_flops(loss: Callable[..., Any], *args: Any) -> int:
    """FLOPs of one training step of `loss(*args)` over all devices: forward products, times three.

    Nothing is computed; `args` may be types.
    """
    return FORWARD_AND_BACKWARD * product_flops(prepared(trace(loss, *args)))


def product_flops(graph: Graph) -> int:
    """FLOPs of the matrix products and convolutions in `graph` over all devices, loops counted."""
    return counted(graph, lambda n: n.flops if n.kind.memory in ("product", "conv") else 0)


@cache
def gemm_peak(size: int | None = None, dtype: Any = f32, seconds: float = 1.0) -> float:
    """The highest FLOP/s that this machine reached in products of `size` x `size` matrices (None:
    1024 on a CPU, elsewhere 8192).

    It runs one program on one device, which on a CPU uses every core: runs of a few milliseconds,
    of which the best within `seconds` counts, as on a busy machine some are undisturbed. It is
    measured once per process.
    """
    on_cpu = platform() == "cpu"
    if size is None:
        size = 1024 if on_cpu else 8192
    count = 1 if on_cpu else 4  # of products in a run: reading a number from a GPU takes time
    whole("gemm_peak", "size", size, 1)
    number("gemm_peak", "seconds", seconds, above=0)

    @jit
    def product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(count):
            x = x @ w
        return x, x[0, 0]

    # A matrix that averages rows: values keep their size over any number of products.
    w = tensor(np.full((size, size), 1.0 / size, np.float32), dtype=dtype)
    x = tensor(np.ones((size, size), np.float32), dtype=dtype)
    product(x, w)[1].item()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        x, one = product(x, w)
        one.item()
        best = min(best, time.perf_counter() - before)
    return 2.0 * size**3 * count / best
