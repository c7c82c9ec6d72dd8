"""Function → graph → schedule → executable, on one page: read this first.

`lang/jit/jit.py` records a user's function into a Graph (ir/graph); ir/graph/build.py settles
layouts and inserts collectives on the way, with the rules in ops/. The options in force become the
graph's. This module takes the graph through the passes (passes/plan.py) to a schedule, lowers that
to one XLA program (runtime/lower.py) or to one for each step (runtime/stepped_executor.py), and
wraps it as a function from device arrays to device arrays. It is the engine of
`lang/value/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import starmap
from types import FrameType
from typing import Any

import jax
import numpy as np

from .core.devices import LOST, need_devices, set_device_provider
from .core.errors import (
    DonatedError,
    TesseraError,
    caller,
    warn_no_effect,
)
from .core.layout import TensorType
from .core.mesh import Mesh
from .core.options import ProgramOptions
from .core.public import not_callable
from .ir.graph.node import Graph
from .ir.schedule.comm_trace import trace_lines
from .ir.schedule.donation import aliases_in
from .ir.schedule.schedule import Schedule
from .lang.value.engine import Parts, Program
from .passes.plan import prepared, scheduled
from .runtime import (
    arrays,
    compile_options,
    devices,
    fused_attention,
    jax_keys,
    jax_private,
    jaxprs,
    offload,
    program_cache,
    pytrees,
)
from .runtime.lower import NONE, lower
from .runtime.offload import Lowered
from .runtime.picked import picked
from .runtime.processes import exchange, first_process
from .runtime.processes.call_order import compare_calls
from .runtime.processes.flight import flight
from .runtime.processes.program_consistency import guarded, processes_of
from .runtime.processes.replica_consistency import compare_facts, compare_values
from .runtime.send import mover
from .runtime.stepped_executor import Stepped
from .runtime.transports import transports


class Executable:
    """A compiled schedule. `types` are the results' types, on the program's mesh. `donate` maps
    each donated argument to the result that reuses its memory."""

    def __init__(self, schedule: Schedule, donate: Mapping[int, int] = NONE) -> None:
        self.schedule = schedule
        mesh = schedule.mesh
        types = [t if t.mesh is not None else t.on(mesh) for t in schedule.buffers]
        self.types = tuple(types[b] for b in schedule.outputs)
        self.wants = tuple(types[b] for b in schedule.inputs)
        self._is_stepped = schedule.is_staged or schedule.options.executor == "stepped"
        self.donate = donate
        # Empty for the stepped executor, which copies an array that is passed twice.
        self.donated_args: Sequence[int] = () if self._is_stepped else tuple(donate)

    def start(self) -> None:
        devices.start_for(self.schedule.mesh)

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The function from device arrays to a list of device arrays. It is made at its first use,
        since a program that is only planned needs no device."""
        self.start()
        s = self.schedule
        options, under = self.options()
        if self._is_stepped:
            return guarded(Stepped(s, options=options, under=under), s, False)
        return guarded(lower(s, self.donate, options, under), s, True)

    def options(self) -> tuple[dict[str, Any] | None, ProgramOptions]:
        """Returns (compiler options, the options that this backend keeps)."""
        s = self.schedule
        ordered = any("order" in n.attrs for n, _ in s.collectives())
        base, under = determinism_of(s.options, ordered)
        chosen = compile_options.compiler_options(s, under.determinism == "fast")
        return {**(base or {}), **chosen} or None, under

    def __call__(
        self,
        args: Sequence[Any],
        arg_types: Sequence[TensorType] | None,
        done: list[list[Any]] | None = None,
    ) -> list[Any]:
        if LOST and self.schedule.mesh is not None:
            need_devices(self.schedule.name, self.schedule.mesh.physical.ids)
        if jax_private.gone(args):
            arrays.alive(args, self.wants)
        if self.donated_args and len({*map(id, args)}) < len(args):
            self._see_twice(args)
        if arg_types is not None and arg_types != self.wants:
            copy = mover()
            if jax.process_count() > 1:
                args = [  # a value without a mesh is in each process, on any device
                    np.asarray(a) if h.mesh is None and h is not w else a
                    for a, h, w in zip(args, arg_types, self.wants, strict=True)
                ]
                rows = zip(args, self.wants, strict=True)
                compare_values(
                    [(a, arrays.sharding(w)) for a, w in rows if _is_number(a)], caller()
                )
            args = [
                a if h is w or _is_number(a) else copy([a], [arrays.sharding(w)])[0]
                for a, h, w in zip(args, arg_types, self.wants, strict=True)
            ]
        try:
            done = [] if done is None else done
            # No bytecode between the run and the list, so that an interrupt loses no result.
            done.extend(starmap(self.run, (args,)))
            if jax_private.LEAVES and self.donated_args:
                jax_private.give_up(args[i] for i in self.donated_args)
            return done[0]
        except TesseraError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._explained(error, args) from None

    def _see_twice(self, args: Sequence[Any]) -> None:
        ids = [*map(id, args)]
        if any(ids.count(ids[i]) > 1 for i in self.donated_args):
            raise self._twice()

    def _twice(self) -> DonatedError:
        return DonatedError(
            f"{self.schedule.name}: a tensor that is donated is given a second time",
            fix="pass it once, or leave out donate= for it",
        )

    def _explained(self, error: Exception, args: Sequence[Any]) -> TesseraError:
        """Returns the engine's `error` as one of Tessera's: a donated argument, too little memory,
        or the engine's own text."""
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "deleted" in first:  # before this call; a failed call has deleted its donations, too
            arrays.alive(args, self.wants)
        if "donated" in first or "donate the same buffer" in first:
            return self._twice()
        return devices.failed(self.schedule.name, error)


def determinism_of(
    by: ProgramOptions, ordered: bool = False
) -> tuple[dict[str, Any] | None, ProgramOptions]:
    """Returns (compiler options, the options that this backend keeps) for a program under `by`;
    `ordered`: it has sums with an order of their own.

    "run_to_run": the same program on the same devices gives the same bits; sums over devices are
    added in the chosen order. "mesh_invariant": so does any fold of its logical mesh. The engine's
    algebraic simplifier treats a program for one device differently from one for many, so it is
    disabled; and a rounding to bf16 must not be skipped when its reader is fused with it. Only a
    CPU keeps that: elsewhere the level is "run_to_run", with one warning. Raises BackendError if a
    required level cannot be kept.
    """
    # A sum of bf16 with a fixed order must be rounded at each addition.
    options: dict[str, Any] = {"xla_allow_excess_precision": False} if ordered else {}
    if by.determinism == "fast":
        return options or None, by
    backend = devices.platform()
    if backend != "cpu":
        if by.mesh_invariant:
            devices.lower_level(backend, by)
            by = replace(by, determinism="run_to_run")
        # Without this XLA chooses kernels by their measured time, which differs from run to run.
        options |= {"xla_gpu_deterministic_ops": True} if backend == "gpu" else {}
        return options or None, by
    if by.determinism == "run_to_run":
        return options or None, by
    devices.need_plain()
    # The reshape mover repeats changes that only the simplifier would undo. A product fused with a
    # transposition sums in another order than one of the transposed array, and whether both are in
    # one program depends on the executor.
    passes = "algsimp,reshape-mover,transpose-folding"
    return {"xla_disable_hlo_passes": passes, "xla_allow_excess_precision": False}, by


def _is_number(a: Any) -> bool:
    """Returns whether `a` is a scalar on the host, which every device takes without a transfer."""
    return isinstance(a, np.ndarray) and not a.ndim


def _buffer(t: TensorType) -> tuple[object, ...]:
    return t.dtype, arrays.array_shape(t)


def _told(s: Schedule) -> Schedule:
    """Prints the collectives and sends of `s` if its options ask for that; returns `s`. Gives an
    OptionWarning if the chosen transport is not available."""
    for line in trace_lines(s) if s.options.comm_trace else ():
        print(line)
    asked = s.options.schedule.backend
    if asked not in (None, "auto", "nvshmem") and not (found := transports()[asked]).available:
        warn_no_effect(
            f"schedule: comm_backend={asked!r}",
            found.why,
            means="what carries data between devices",
            fix=found.fix or "leave it out; ts.distributed.transports() says what is there",
        )
    return s


class Engine:
    """The engine of `lang/value/engine.py`: compiles programs, places and reads tensors."""

    def start(self, mesh: Mesh | None) -> None:
        devices.start_for(mesh)

    def compile(self, graph: Graph, donate: Sequence[int] = ()) -> Executable:
        graph = prepared(graph)
        # Only donations that a result can reuse, as the engine warns of others.
        taken = aliases_in(graph, donate, lambda t: _buffer(t.on(graph.mesh)))
        made = Executable(_told(scheduled(graph)), taken)
        made.start()
        return made

    def step_by_step(self, schedule: Schedule) -> Executable:
        return Executable(_told(scheduled(schedule)))

    def place(self, value: np.ndarray[Any, Any], type: TensorType) -> Any:
        need_devices("a placement", type.mesh.physical.ids if type.mesh is not None else ())
        return arrays.place(value, type)

    def place_blocks(self, fill: Callable[[Parts], None], type: TensorType) -> Any:
        need_devices("a placement", type.mesh.physical.ids if type.mesh is not None else ())
        return arrays.place_blocks(fill, type)

    def blocks(
        self, data: Any, type: TensorType, writer: int
    ) -> list[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
        compare_calls()
        return arrays.blocks(data, type, writer)

    def processes(self, mesh: Mesh) -> tuple[int, ...]:
        self.start(mesh)
        return processes_of(mesh)

    def alike(self, caller: str, mesh: Mesh | None, facts: Mapping[str, Any], fix: str) -> None:
        self.start(mesh)  # `jax.process_count` would start the engine before it joins the run
        group = tuple(range(jax.process_count())) if mesh is None else processes_of(mesh)
        compare_facts(caller, group, facts, fix)

    def barrier(self) -> None:
        exchange.barrier()

    def gather(self, name: str, value: Any, limit_s: float) -> list[Any]:
        return exchange.gather(name, value, limit_s)

    def from_first(self, name: str, number: int, value: Any, limit_s: float, first: int = 0) -> Any:
        return exchange.from_first(name, number, value, limit_s, first)

    def asked(self, name: str, value: Any = None) -> Any:
        return exchange.asked(name, value)

    def last_collectives(self, count: int) -> list[str]:
        return flight().lines(count)

    def local_row_indices(self, type: TensorType) -> np.ndarray[Any, Any]:
        return arrays.local_row_indices(type)

    def fetch(self, data: Any, type: TensorType) -> np.ndarray[Any, Any]:
        compare_calls()
        return arrays.fetch(data, type)

    def picked(
        self, data: Any, type: TensorType, at: Sequence[np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any] | None:
        return picked(data, type, at)

    def by_first(self, name: str, run: Callable[[], Any]) -> Any:
        return first_process.by_first(name, run)

    def alive(self, data: Any, type: TensorType) -> Any:
        compare_calls()
        arrays.alive([data], [type])
        return data

    def offload(self, data: Any, type: TensorType) -> offload.HostCopy:
        return offload.HostCopy(data, type)

    def program_bytes(self, program: Program) -> dict[str, int]:
        assert isinstance(program, Executable)
        return offload.program_bytes(program)

    def lowered(self, program: Program) -> Lowered:
        assert isinstance(program, Executable)
        return Lowered(program)

    def program_cache(self, maps: int | None, size: int | None) -> None:
        program_cache.BOOK.limit(maps, size)

    def delete(self, data: Any) -> None:
        if isinstance(data, jax.Array):
            data.delete()

    def copied(self, data: Any) -> Any:
        return jax.numpy.copy(data) if isinstance(data, jax.Array) else data

    def wait(self, arrays: Sequence[Any]) -> None:
        jax.block_until_ready(arrays)

    def machine(self, mesh: Mesh | None) -> dict[str, str]:
        return compile_options.machine(mesh)

    def memory_bytes(self) -> int:
        return compile_options.memory_bytes()

    def open_choices(self, schedule: Schedule) -> dict[str, tuple[str, ...]]:
        return compile_options.open_choices(schedule)

    def answers(self, device: int) -> bool:
        return devices.answers(device)

    def clear_caches(self) -> None:
        program_cache.BOOK.drop()

    def no_fused_attention(self, causal: bool, *types: TensorType) -> str:
        return fused_attention.why_not(causal, types[0].dtype, *(t.shape for t in types))

    def opened(self, value: object) -> tuple[tuple[Any, ...], list[Any], Any] | None:
        return pytrees.opened(value)

    def program_of(self, caller: str, fn: Callable[..., list[Any]], types: Sequence[Any]) -> Any:
        return jaxprs.program_of(caller, fn, types)

    def key_data(self, value: Any) -> tuple[Any, str]:
        return jax_keys.key_data(value)

    def key_of(self, data: Any, impl: str) -> Any:
        return jax_keys.wrapped(data, impl)

    def adopt(self, data: Any, mesh: Mesh | None) -> TensorType:
        return arrays.adopt(data, mesh)

    def is_array(self, value: object) -> bool:
        return isinstance(value, jax.Array)

    def asks(self, frame: FrameType) -> str:
        return jax_private.asks(frame)


set_device_provider(devices.device_count, devices.process_place, devices.platform)
not_callable(__name__)  # ts.compile(f), of PyTorch
