"""Backend start and devices: virtual CPU devices, visible devices, the JAX mesh of a mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache

import jax
import numpy as np
from jaxlib import version

from ..core import environment, flags
from ..core.errors import BackendError, EngineWarning, caller, lines_up
from ..core.machine.visible import visible_count, visible_ids
from ..core.mesh import Mesh
from ..core.options import ProgramOptions
from ..core.ranks import rank_of
from . import compilation_cache
from .cpu.malloc import keep_pages
from .jax_private import place, service
from .processes.join import gpus, join

# Default number of virtual devices of a CPU backend; with several processes, each has one.
VIRTUAL = 8
_started: list[bool] = []  # not empty if Tessera started the backend, and so chose its devices
# Devices of a described machine in place of this one's, while programs are compiled for it.
DESCRIBED: list[Sequence[jax.Device]] = []


@contextmanager
def wide_numbers(on: bool = True) -> Iterator[None]:
    """Lets the engine make and take numbers of 64 bits inside, which it narrows elsewhere. With
    `on` False nothing changes."""
    if not on:
        yield
        return
    with jax.enable_x64(True):
        yield


def start(needed: int = 1, mesh: Mesh | None = None) -> None:
    """Starts the backend, on a CPU with at least `needed` virtual devices.

    Raises BackendError if it already runs with fewer, or if fewer are visible.
    """
    if DESCRIBED:
        _need_described(needed, mesh)
        return
    join()
    if not flags.engine_runs():
        processes = place()[1]
        own = environment.number(environment.DEVICES, VIRTUAL if processes == 1 else 1)
        count = max(-(-needed // processes), own)
        jax.config.update("jax_num_cpu_devices", _visible() or count)
        _show_only(visible_ids())
        keep_pages()
        try:
            with _batch():
                jax.devices()
        except (RuntimeError, AssertionError) as error:
            raise _not_started(error) from None
        _started.append(True)
    _warn_of_others()
    compilation_cache.folder()
    _see_reductions()
    device_count = len(jax.devices())
    if device_count < needed:
        ids = visible_ids()
        processes = place()[1]
        each = -(-needed // processes)
        cpu = "" if jax.default_backend() == "cpu" else "JAX_PLATFORMS=cpu "
        more = f"{cpu}{environment.DEVICES}={each} (virtual CPU devices" + (
            f" of each process; tessera run --devices {each})" if processes > 1 else ")"
        )
        if not _started:
            asked = f'jax.config.update("jax_num_cpu_devices", {each})'
            more = f"make the mesh, or call {asked}, before the first array of jax"
            more += ", which started the backend"
        raise BackendError(
            f"mesh: needs {needed} devices, this machine has {device_count}",
            rows=[("backend", f"{device_count} x {jax.devices()[0].platform}")]
            + ([("visible", ",".join(map(str, ids)))] if ids else []),
            fix=f"{_smaller(mesh, device_count)}, or "
            f"{'more visible devices' if _visible() else more}",
        )


def _need_described(needed: int, mesh: Mesh | None) -> None:
    if needed > (have := len(DESCRIBED[-1])):
        raise BackendError(
            f"mesh: needs {needed} devices, the described machine has {have}",
            backend=f"{have} x {DESCRIBED[-1][0].device_kind}",
            fix=f"{_smaller(mesh, have)}, or a description of more devices",
        )


def failed(
    operation: str, error: Exception, rows: Sequence[tuple[str, object]] = ()
) -> BackendError:
    """Returns the engine's `error` during `operation` as a BackendError: its first line, and a
    fix."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    fix = next((fix for words, fix in _FIXES.items() if words in first), _ENGINE_REPORT)
    return BackendError(f"{operation}: the engine failed: {first}", rows=rows, fix=fix)


_ENGINE_REPORT = "the text above is the engine's own report"
_LESS = "use smaller tensors, or split them over more devices"
_OTHERS = "nvidia-smi names the programs that hold memory of a GPU"
_FIXES = {
    "RESOURCE_EXHAUSTED": _LESS,
    # A GPU's kernels are autotuned before a program runs, which takes memory, too.
    "configs": f"too little memory to try kernels may be the cause: {_LESS}; {_OTHERS}",
}


def _not_started(error: Exception) -> BackendError:
    asked = os.environ.get("JAX_PLATFORMS")
    said = str(error) or "it has no such backend"  # an empty error: a name only jax.config has
    return BackendError(
        "start: the engine's backend does not start",
        rows=[("JAX_PLATFORMS", asked)] * bool(asked) + [("engine", said.splitlines()[0])],
        fix=("leave JAX_PLATFORMS out, which takes what is there, or " if asked else f"{_OTHERS}; ")
        + "take the CPU: JAX_PLATFORMS=cpu; tessera doctor says what is missing",
    )


@contextmanager
def _batch() -> Iterator[None]:
    """Gives threads started inside the batch scheduling policy, so that they preempt no computing
    thread. The engine has a thread for each virtual device: with more devices than cores, a step
    takes a tenth less time."""
    if not hasattr(os, "sched_setscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield  # not on Linux, or with a scheduling policy that the user has chosen
        return
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _visible() -> int | None:
    """Returns the number of this machine's devices that this process sees; None if it sees all."""
    there = gpus()
    on_host = there or environment.number(environment.DEVICES, VIRTUAL)
    return visible_count(on_host, virtual=not there)


def _show_only(ids: tuple[int, ...] | None) -> None:
    """Hides the other GPUs of the machine from the engine."""
    if ids is not None:
        for kind in ("cuda", "rocm"):
            jax.config.update(f"jax_{kind}_visible_devices", ",".join(map(str, ids)))


@cache
def _warn_of_others() -> None:
    """Warns once if the backend has other devices than the visible ones. Cached, since programs
    start often and this reads the file system."""
    seen, have = _visible(), len(jax.local_devices())
    if seen and have != seen:
        warnings.warn(
            f"visible devices: {have} and not {seen} ({caller() or 'here'}): the backend of jax ran"
            " before Tessera could choose, or is of a kind whose devices cannot be hidden; use"
            " tessera before the first array of jax",
            EngineWarning,
            stacklevel=lines_up(),
        )


def start_for(mesh: Mesh | None) -> None:
    """Calls `start` with the number of devices that `mesh` needs."""
    start(max(mesh.physical.device_ids) + 1 if mesh is not None else 1, mesh)


@cache
def _see_reductions() -> None:
    """Warns once if the backend miscompiles fused reductions (core/flags.py): it was started by
    other code, without the flag. A compiled program shows this; the backend's flags cannot be read.
    """
    if flags.is_exact() or jax.default_backend() != "cpu":
        return
    rows = jax.ShapeDtypeStruct((1024, 1024), np.float32)  # it does not fuse small reductions
    program = jax.jit(lambda x: x.sum(-1)).lower(rows).compile()
    if "__ynn_fusion" in (program.as_text() or ""):
        warnings.warn(
            f"jaxlib {version.__version__} computes some sums and maxima on a CPU wrongly,"
            f" and its backend runs without the flag that prevents it ({caller() or 'here'}):"
            f" import tessera before the first array of jax, or set XLA_FLAGS={flags.EXACT}",
            EngineWarning,
            stacklevel=lines_up(),
        )


def _smaller(mesh: Mesh | None, device_count: int) -> str:
    """Returns advice that makes `mesh` fit `device_count` devices."""
    if mesh is None or mesh.size <= device_count:
        return f"name devices from 0 to {device_count - 1}"
    onto = max(n for n in range(1, device_count + 1) if mesh.size % n == 0)
    return f"mesh.fold(onto={onto}), a smaller mesh"


def lower_level(backend: str, by: ProgramOptions) -> None:
    """Warns, once for each backend and order, that a program runs at "run_to_run" although it asks
    for "mesh_invariant". Raises BackendError if it requires that level."""
    if by.level_required:
        raise BackendError(
            "mesh_invariant: bits that no mesh changes are kept on a CPU only",
            backend=backend,
            fix='ask for less: level="run_to_run"; dist.deterministic() without a level takes what'
            " the backend keeps",
        )
    _warn_lower(backend, by.order)


@cache
def _warn_lower(backend: str, order: str) -> None:
    warnings.warn(
        f'deterministic: on a {backend} the level is "run_to_run" ({caller() or "here"}): the same'
        f' devices give the same bits, and sums over devices are added in the order "{order}"; a'
        ' folded mesh may give others. level="run_to_run" asks for that without a warning,'
        ' level="mesh_invariant" refuses it',
        EngineWarning,
        stacklevel=lines_up(),
    )


def need_plain() -> None:
    """Raises BackendError if this CPU's backend contracts multiplications and additions: it was
    started by other code without the flag (core/flags.py), or the processor has no other mode."""
    if not _contracts():
        return
    less = 'level="run_to_run" is kept as it is'
    raise BackendError(
        "mesh_invariant: the backend contracts multiplications and additions",
        started=f"with XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}",
        fix=f"import tessera before the first array of jax, or set XLA_FLAGS={flags.PLAIN}; {less}"
        if flags.X86
        else f"{less} on this processor",
    )


@cache
def _contracts() -> bool:
    """Returns whether a program rounds x * x - y once, not twice. Found by a program, since the
    backend's flags cannot be read."""
    x = np.full(64, 1 + 2.0**-12, np.float32)  # the last bit of its square, 2**-24, is rounded off
    return bool(np.asarray(jax.jit(lambda x, y: x * x - y)(x, x * x)).any())


def process_place() -> tuple[int, int]:
    """Returns (index, count) of this process among the run's processes, also before it joins
    them."""
    own = rank_of() if service() is None else None
    return (own.rank, own.size) if own is not None else place()


def platform() -> str:
    """Returns the kind of devices; before the backend starts, the kind that it will take."""
    if DESCRIBED:
        return DESCRIBED[-1][0].platform
    if flags.engine_runs():
        return jax.default_backend()
    return "gpu" if gpus() else "cpu"


def every() -> Sequence[jax.Device]:
    """Returns the devices that programs are compiled for, by number; starts the backend."""
    start()
    return DESCRIBED[-1] if DESCRIBED else jax.devices()


def device_count() -> int:
    """Returns the number of devices of the run; starts the backend."""
    return len(every())


def answers(device: int) -> bool:
    """Returns whether a device computes a small program correctly."""
    value = np.arange(8, dtype=np.float32)
    try:
        there = jax.device_put(value, jax.devices()[device])
        return bool((np.asarray(there + 1) == value + 1).all())
    except RuntimeError:
        return False


@lru_cache(maxsize=256)
def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """Returns the JAX mesh over the devices that run `mesh`. Raises BackendError if they are too
    few."""
    mesh = mesh.physical
    start(max(mesh.device_ids) + 1, mesh)
    there = every()
    grid = np.array([there[i] for i in mesh.device_ids], dtype=object).reshape(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axes)
