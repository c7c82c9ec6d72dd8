"""Compiler options of a program: by its choices, else by rules.

Two choices are open. The first is the library. On a CPU the engine's preferred one uses one core
for a convolution with a small kernel, however large the images are; the older one uses all cores,
and more processor time. The second is the order of instructions: as early as possible, so that some
run at once, or for least memory. The rules take the older library for small kernels on a device
with two cores or more (a residual network of 32 to 128 channels then takes 0.7 of the time, and the
same with one core), least memory in a process with one core (bench/RESULTS.md has the processor).
"""

from __future__ import annotations

import math
import os
import platform as python_platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from ..core import flags
from ..core.mesh import Mesh
from ..core.version import VERSION
from ..ir.graph.node import Graph, Node
from ..ir.schedule.schedule import Region, Schedule
from ..ops.conv import conv
from ..ops.redistribute import all_gather, all_reduce, reduce_scatter
from .compile_once import processor
from .devices import platform
from .processes.program_consistency import processes_of

Options = dict[str, Any]
SMALL = 1 << 17  # elements of a kernel from which the preferred library takes several cores
# By choice: all that the preferred library can do, single products but no convolutions, or none. On
# a GPU: products by the vendor's library alone, or also by kernels that XLA compiles and times for
# each product. The first step of a GPT on an H100 took 98 s with them, 58 without.
LIBRARIES: dict[str, Options] = {
    "preferred": {},
    "products": {flags.FUSION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
    "older": {flags.FUSION: ""},
    "vendor": {"xla_gpu_enable_triton_gemm": False},
    "engine": {},
}
# On a GPU each collective stays the one that the schedule has. Else XLA merges several into one,
# which begins when the last operand is there and holds all results at once.
SEPARATE_COLLECTIVES: Options = {
    f"xla_gpu_{op.name}_combine_threshold_bytes": 0
    for op in (all_gather, all_reduce, reduce_scatter)
}
LEAST_MEMORY: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def compiler_options(schedule: Schedule, fast: bool) -> Options:
    """Returns the compiler options for `schedule`. By the rules, at levels above "fast" the library
    is the engine's own: bits may not depend on the number of cores."""
    chosen = dict(schedule.options.schedule.choices or ())
    backend = platform()
    if backend == "gpu":
        separate = SEPARATE_COLLECTIVES if _is_ordered(schedule) else {}
        return {**LIBRARIES[chosen.get("library", "vendor")], **separate}
    if backend != "cpu":
        return {}
    library = chosen.get("library") or (_library(schedule) if fast else "preferred")
    # All processes of a program must compile it alike, so that their collectives are in one order.
    least = cores() == 1 and len(processes_of(schedule.mesh)) == 1
    if "instruction_order" in chosen:
        least = chosen["instruction_order"] == "least_memory"
    return {**LIBRARIES[library], **(LEAST_MEMORY if least else {})}


def open_choices(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Returns the choices that this module reads for `schedule`, with the values besides those of
    the rules."""
    backend = platform()
    if backend == "gpu":
        return {"library": ("engine",)}
    if backend != "cpu":
        return {}
    libraries = ["preferred", "older"]
    if any(n.op == conv.name for n in _nodes(schedule)):
        libraries.insert(1, "products")
    rule = _library(schedule)
    others = tuple(k for k in libraries if k != rule) if flags.fuses() else ()
    return {"library": others, "instruction_order": ("least_memory",)}


def machine(mesh: Mesh | None) -> dict[str, str]:
    """Returns the facts that timings on `mesh` depend on besides the program, as text.

    The engine has as many threads as cores, or as devices if there are more of those.
    """
    backend = jax.default_backend()
    arch = jax.devices()[0].device_kind
    if backend == "cpu":
        own = f"{cores()} cores, {cores_of_a_device(mesh)} a device"
        kind = f"{python_platform.machine()} {processor()[:12]}"
        arch = f"{kind}, {own}, {jax.local_device_count()} devices"
        arch += "" if flags.fuses() else ", without library fusions"
    versions = f"tessera {VERSION}, jax {jax.__version__}, jaxlib {jaxlib.version.__version__}"
    return {"arch": arch, "backend": backend, "versions": versions}


def memory_bytes() -> int:
    """Returns the bytes of memory for one of this process's devices; 0 if unknown."""
    if jax.default_backend() == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") if Path("/proc/meminfo").exists() else 0
        return pages * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def _is_ordered(schedule: Schedule) -> bool:
    """Returns whether the order of its collectives is chosen, or bounds the memory of weights that
    are gathered again."""
    o = schedule.options.schedule
    asked = o.overlap is not None or o.prefetch is not None or bool(o.bucket_bytes)
    return asked or any(n.attrs.get("again") for n, _ in schedule.collectives())


def _library(schedule: Schedule) -> str:
    if not flags.fuses() or cores_of_a_device(schedule.mesh) < 2:
        return "preferred"
    sizes = [
        (n.kind.flops(tuple(a.type for a in n.args), n.types, n.attrs), n.args[1].type.local_shape)
        for n in _nodes(schedule)
        if n.op == conv.name
    ]
    small = sum(flops for flops, kernel in sizes if math.prod(kernel) < SMALL)
    return "products" if 2 * small > sum(flops for flops, _ in sizes) else "preferred"


@cache
def cores() -> int:
    """Returns the number of cores that this process may use."""
    there = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if there else os.cpu_count() or 1


def cores_of_a_device(mesh: Mesh | None) -> int:
    """Returns the number of this process's cores for each of its devices in `mesh`."""
    devices = mesh.physical.size if mesh is not None else 1
    return cores() // max(1, devices // jax.process_count())


def _nodes(schedule: Schedule) -> Iterator[Node]:
    for step in schedule.steps:
        if isinstance(step, Region):
            yield from _nodes(step.body)
        else:
            yield from _of(step.graph)


def _of(graph: Graph) -> Iterator[Node]:
    """Yields the nodes of `graph`, those of bodies included."""
    for n in graph.nodes:
        yield n
        for body in n.attrs.values():
            if isinstance(body, Graph):
                yield from _of(body)
