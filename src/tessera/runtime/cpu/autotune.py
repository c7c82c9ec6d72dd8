"""Compile variants for CPUs, and the choice of one: by rules, or by autotuning.

Two choices are open. The first is the library. The engine's preferred one uses one core for a
convolution with a small kernel, however large the images are; the older one uses all cores, and
more processor time. The second is the order of instructions: as early as possible, so that some run
at once, or for least memory. By default rules decide: the older library for small kernels on a
device with two cores or more (a residual network of 32 to 128 channels then takes 0.7 of the time,
and the same with one core), least memory in a process with one core (bench/RESULTS.md has the
processor).

`@schedule(measure=True)` has each variant timed on the program itself, with the arguments of its
first call: a product alone tells little of its time in a program, which fuses the producers of its
factors with it. The result is cached on disk with the compiled programs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from ...core import flags
from ...core.compile_variants import CompileVariant
from ...core.errors import warn_no_effect
from ...core.limits import limits
from ...core.mesh import Mesh
from ...ir.graph.node import Graph, Node
from ...ir.schedule.schedule import Region, Schedule
from ...ops.conv import conv
from .. import compilation_cache
from ..processes.exchange import gather
from ..processes.flight import flight
from ..processes.program_consistency import processes_of

Options = dict[str, Any]
SMALL = 1 << 17  # elements of a kernel from which the preferred library takes several cores
# Operations of the preferred library: all that it can do, single products but no convolutions, or
# none.
PREFERRED: Options = {}
PRODUCTS: Options = {flags.FUSION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
OLDER: Options = {flags.FUSION: ""}
LIBRARIES = {"preferred": PREFERRED, "products": PRODUCTS, "older": OLDER}
LEAST_MEMORY: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
# On a GPU: products by the vendor's library alone. Else XLA compiles and times its own kernels for
# each product: the first step of a GPT on an H100 took 98 s with them, 58 without.
CUBLAS: Options = {"xla_gpu_enable_triton_gemm": False}
ROUNDS, FEW, LONG_S = 7, 3, 10.0  # timed steps per variant; FEW if ROUNDS would exceed LONG_S
LIKE = 1.02  # times within this factor count as equal: then less memory decides
LESS = 0.9  # memory within this factor counts as equal
_asked = count(1)


def usual(schedule: Schedule, fast: bool) -> Options:
    """Returns the compiler options for `schedule` by rules. At levels above "fast" the library is
    the engine's own choice: bits may not depend on the number of cores."""
    if jax.default_backend() == "gpu":
        return CUBLAS
    if jax.default_backend() != "cpu":
        return {}
    # All processes of a program must compile it alike, so that their collectives are in one order.
    least = LEAST_MEMORY if cores() == 1 and len(processes_of(schedule.mesh)) == 1 else {}
    return {**(_library(schedule) if fast else PREFERRED), **least}


def _library(schedule: Schedule) -> Options:
    if not flags.fuses() or cores_of_a_device(schedule.mesh) < 2:
        return PREFERRED
    sizes = [
        (n.kind.flops(tuple(a.type for a in n.args), n.types, n.attrs), n.args[1].type.local_shape)
        for n in _nodes(schedule)
        if n.op == conv.name
    ]
    small = sum(flops for flops, kernel in sizes if math.prod(kernel) < SMALL)
    return PRODUCTS if 2 * small > sum(flops for flops, _ in sizes) else PREFERRED


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


# -- by measurement -------------------------------------------------------------------------------
def why_not(schedule: Schedule, fast: bool, stepped: bool) -> str:
    """Returns why no variant of `schedule` is measured; "" if they are."""
    if jax.default_backend() != "cpu":
        return f"the engine measures kernels of a {jax.default_backend()} by itself"
    if not fast:
        return "at this level of determinism results do not depend on a measurement"
    if stepped:
        return "its steps are programs of their own"
    group = processes_of(schedule.mesh)
    return "only some processes run it" if 1 < len(group) < jax.process_count() else ""


def warn(schedule: Schedule, why: str) -> None:
    """Warns that `schedule` is not measured."""
    warn_no_effect(
        f"schedule: measure=True of {schedule.name}",
        why,
        means="the ways to compile a program are timed at its first call",
        fix="leave it out",
    )


class Measured:
    """A program compiled in the variant that its first call found to be the best. `make` compiles
    it with options; `given_up` are the donated arguments."""

    def __init__(
        self,
        schedule: Schedule,
        base: Mapping[str, Any],
        make: Callable[[Options], Any],
        given_up: Sequence[int],
    ) -> None:
        self.schedule, self._base, self._make, self._given_up = schedule, base, make, given_up
        self._run: Any = None
        self._lock = Lock()
        self._together = len(processes_of(schedule.mesh)) > 1
        self.variants: tuple[CompileVariant, ...] = ()

    def __call__(self, *arrays: Any) -> list[Any]:
        if self._run is None:
            self.settle(*arrays)
        found: list[Any] = self._run(*arrays)
        return found

    def lower(self, *arrays: Any) -> Any:
        return (self._run or self._make({**self._base})).lower(*arrays)

    def settle(self, *arrays: Any) -> None:
        """Chooses the variant, by the cached result or by timed steps with `arrays`."""
        with self._lock:  # two threads would distort each other's times
            if self._run is None:
                self._run = self._best(arrays)

    def _best(self, arrays: Sequence[Any]) -> Any:
        kept, key = compilation_cache.folder(), self._key()
        found = None if kept is None else kept.get(key)
        said = None if found is None else json.loads(found)
        if self._together:  # if one of the processes has to measure, all have to
            every = self._gather(said)
            said = said if all(x == said for x in every) else None
        runs: dict[str, Any] = {}
        if said is None:
            runs, said = self._measured(arrays)
            if kept is not None:
                kept.put(key, json.dumps(said).encode())
        self.variants = tuple(CompileVariant(*row) for row in said)
        name = next(w.name for w in self.variants if w.chosen)
        return runs[name] if name in runs else self._make(self._options(name))

    def _key(self) -> str:
        """Returns a hash of everything the result depends on, besides the processor."""
        s = self.schedule
        known = [s.hash, *sorted(self._base.items()), *LIBRARIES, flags.fuses(), cores()]
        # The engine has as many threads as cores, or as devices if there are more of those.
        text = f"{known} {cores_of_a_device(s.mesh)} {jax.local_device_count()}"
        return hashlib.sha256(f"way {jax.__version__} {text}".encode()).hexdigest()

    def _gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes that run the program together."""
        if not self._together:
            return [value]
        return gather(f"way/{next(_asked)}", value, limits().collective_s)

    def _slowest(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Returns the maximum over processes for each variant, so that all decide alike."""
        every = self._gather(dict(mine))
        return {name: max(said[name] for said in every) for name in mine}

    def _options(self, name: str) -> Options:
        library, _, order = name.partition(", ")
        return {**self._base, **LIBRARIES[library], **(LEAST_MEMORY if order else {})}

    def _measured(self, arrays: Sequence[Any]) -> tuple[dict[str, Any], list[list[Any]]]:
        """Returns (the program of each variant, the rows of the variants)."""
        convolves = any(n.op == conv.name for n in _nodes(self.schedule))
        libraries = [k for k in LIBRARIES if k != "products" or convolves]
        names = libraries if all(self._gather(flags.fuses())) else libraries[:1]
        runs = {name: self._make(self._options(name)) for name in names}
        times = self._times(runs, arrays)
        # Then the order of instructions, with the best library. All are timed again, interleaved,
        # so that a slow phase of the machine affects each of them.
        best = next(name for name in names if times[name] <= LIKE * min(times.values()))
        least = f"{best}, least memory"
        runs[least] = self._make(self._options(least))
        times = self._times(runs, arrays)
        bytes_ = self._slowest({name: _temporary(run, arrays) for name, run in runs.items()})
        alike = [name for name in runs if times[name] <= LIKE * min(times.values())]
        best = next(n for n in alike if LESS * bytes_[n] <= min(bytes_[m] for m in alike))
        return runs, [[name, times[name], bytes_[name], name == best] for name in runs]

    def _times(self, runs: Mapping[str, Any], arrays: Sequence[Any]) -> dict[str, float]:
        """Returns the median seconds of a step of each variant; over several processes that of the
        slowest."""
        first = self._slowest({name: self._step_s(run, arrays) for name, run in runs.items()})
        rounds = ROUNDS if sum(first.values()) * ROUNDS < LONG_S else FEW
        each = [
            {name: self._step_s(run, arrays) for name, run in runs.items()} for _ in range(rounds)
        ]
        return self._slowest({name: statistics.median(row[name] for row in each) for name in runs})

    def _step_s(self, run: Any, arrays: Sequence[Any]) -> float:
        """Returns the seconds of a call; compiles the program before, if needed."""
        if not run.is_compiled:
            self._call(run, arrays)
        return self._call(run, arrays)

    def _call(self, run: Any, arrays: Sequence[Any]) -> float:
        own = [
            jnp.copy(x) if i in self._given_up and isinstance(x, jax.Array) else x
            for i, x in enumerate(arrays)
        ]
        jax.block_until_ready(own)
        begin_s = time.perf_counter()
        with self._told(not run.is_compiled) as given:
            outs = run(*own)
            given(outs)
            jax.block_until_ready(outs)
        return time.perf_counter() - begin_s

    @contextmanager
    def _told(self, fresh: bool) -> Iterator[Callable[[list[Any]], None]]:
        """A context that records a timed step of several processes, so that a hang is reported.
        Yields a function to call with the results; `fresh`: the step compiles first."""
        if not self._together:
            yield lambda outs: None
            return
        s = self.schedule
        record = flight().begin(s.name, "", "a timed step", "", processes_of(s.mesh), 0, fresh)
        try:
            yield partial(flight().given, record)
        except Exception as error:
            flight().failed(record, error)
            raise
        flight().finish(record)


def _temporary(run: Any, arrays: Sequence[Any]) -> int:
    """Returns the bytes of temporaries on a device, of a program that was compiled before."""
    return int(run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes)
