"""Private names of jax, all in one file; the service in coordinator.py needs jaxlib alone.

A new version of jax may move these names: then only this file changes.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax._src import cache_key, compilation_cache, compiler, distributed, source_info_util
from jax._src.array import ArrayImpl
from jaxlib import _jax  # type: ignore[attr-defined]  # its stub hides it

from ..core.errors import PACKAGE
from .processes.coordinator import HEARTBEAT_S

__all__ = [
    "LEAVES",
    "ArrayImpl",
    "Compilation",
    "around_compile",
    "asks",
    "block_copy",
    "connect",
    "cpu_collectives",
    "give_up",
    "gone",
    "keep_programs",
    "key_functions",
    "place",
    "service",
    "user_line",
]
Array = Any
Copy = Callable[[Sequence[Array], Sequence[Any]], Sequence[Array]]


def gone(arrays: Sequence[Array]) -> bool:
    """Returns whether one of these arrays was donated; host values never are."""
    try:
        return any(map(ArrayImpl.is_deleted, arrays))
    except TypeError:
        return any(isinstance(a, ArrayImpl) and a.is_deleted() for a in arrays)


def give_up(arrays: Iterable[Array]) -> None:
    """Deletes donated arrays that the program did not take over. From jax 0.11 on, jax copies an
    array on several devices that NumPy has read, and leaves the original."""
    for a in arrays:
        if isinstance(a, ArrayImpl) and not a.is_deleted():
            a.delete()


# Whether a program may leave a donated argument alive.
LEAVES = jax.__version_info__ >= (0, 11)


def service() -> Any:
    """Returns the processes' shared store; None in a single process."""
    return distributed.global_state.client


def place() -> tuple[int, int]:
    """Returns (index, count) of this process among those that the user started together; known
    before the backend runs."""
    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1


def connect(address: str, size: int, rank: int) -> None:
    """Makes this process number `rank` of `size`, before the backend runs, as
    `jax.distributed.initialize` does, but with a service in any process."""
    state = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=60, heartbeat_timeout=HEARTBEAT_S, use_compression=True
    )
    client.connect()
    state.client, state.process_id, state.num_processes = client, rank, size
    state.coordinator_address = address


def cpu_collectives() -> str:
    """Returns the library of collectives between processes of CPUs: "gloo", "mpi", "none"."""
    return str(jax.config.jax_cpu_collectives_implementation or "none")  # type: ignore[attr-defined]


def block_copy() -> Copy:
    """Returns the private function that `jax.device_put` calls to copy arrays to shardings. Raises
    ImportError or AttributeError if this version of jax has none."""
    from jax._src.interpreters.pxla import shard_args
    from jax._src.lib import xla_client  # type: ignore[attr-defined]  # its stub hides it

    reuse = xla_client.ArrayCopySemantics.REUSE_INPUT

    def copy(xs: Sequence[Array], where: Sequence[Any]) -> Sequence[Array]:
        n = len(xs)
        return shard_args(where, [None] * n, [reuse] * n, xs)

    return copy


def asks(frame: FrameType) -> str:
    """Returns the kind of the caller that reads `__jax_array__` from `frame`: "array" for
    `jnp.asarray`, "compiled" for a call of a jitted function or of `jax.lax`; "" for others, such
    as operators."""
    mine = str(frame.f_globals.get("__name__", "")).startswith("jax.")
    who = frame.f_code.co_name
    if not mine or who not in ("array", "shaped_abstractify", "typeof"):
        return ""
    return "array" if who == "array" else "compiled"


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (number of constants, number of carries) of a `scan` with these `params`."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    fixed, carry, _ = map(len, params["ft_in"].unpack())  # JAX 0.11
    return fixed, carry


def key_functions(dtype: Any) -> Any:
    """Returns the implementation of random keys of this dtype: `seed`, `split`, `random_bits` and
    `fold_in` on their data, and `key_shape`."""
    return dtype._impl


def user_line(equation: Any) -> str:
    """Returns the "file:line" where the user wrote an equation, outside of installed libraries if
    there is such a line; "" if it is not known."""
    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    frames = [f for f in frames if not f.file_name.startswith(PACKAGE)]
    own = [f for f in frames if "site-packages" not in f.file_name]
    at = next(iter((*own, *frames)), None)
    return f"{at.file_name.rpartition('/')[2]}:{at.start_line}" if at is not None else ""


@dataclass(frozen=True)
class Compilation:
    """One program that the engine is about to compile.

    `key` is equal in all processes with the same processor; `processes` own the program's devices.
    `compile` makes its executable here; `packed` serializes it, and `unpacked` loads it in another
    process. An executable from jax's own cache packs as b"", since the engine's copy of it is
    incomplete.
    """

    key: str
    processes: tuple[int, ...]
    compile: Callable[[], Any]
    packed: Callable[[], bytes]
    unpacked: Callable[[bytes], Any]


_COMPILE = ("backend", "computation", "devices", "compile_options", "host_callbacks",
            "executable_devices", "pgle_profiler")  # fmt: skip
_HASH = ("hash_obj", "accelerators")


def around_compile(share: Callable[[Compilation], Any], alike: str) -> bool:
    """Makes `share` compile each CPU program of several processes, once for all of them.

    `alike` is equal for equal processors. It also replaces this process's device ids in the keys of
    jax's own cache, so that each process finds there the programs that the first has written.
    Returns False, without an effect, if this version of jax compiles differently.
    """
    compile, hash_devices = compiler.compile_or_get_cached, cache_key._hash_accelerator_config
    for function, names in ((compile, _COMPILE), (hash_devices, _HASH)):
        if tuple(inspect.signature(function).parameters) != names:
            return False

    hits = 0

    def hash_alike(hash_obj: Any, accelerators: Any) -> None:
        if len({d.process_index for d in accelerators.flat}) == 1 or _kind(accelerators) != "cpu":
            return hash_devices(hash_obj, accelerators)
        hash_obj.update(alike.encode())

    def compile_once(
        backend: Any, computation: Any, devices: Any, options: Any, callbacks: Any, *more: Any
    ) -> Any:
        arguments = (backend, computation, devices, options, callbacks, *more)
        processes = tuple(sorted({d.process_index for d in np.asarray(devices).flat}))
        if len(processes) == 1 or callbacks or _kind(devices) != "cpu":
            return compile(*arguments)
        key = cache_key.get(computation, devices, options, backend)
        executable: Any = None
        before = hits

        def compile_locally() -> Any:
            nonlocal executable
            executable = compile(*arguments)
            return executable

        return share(
            Compilation(
                hashlib.sha256(key.encode()).hexdigest(),
                processes,
                compile_locally,
                lambda: backend.serialize_executable(executable) if hits == before else b"",
                lambda data: backend.deserialize_executable(data, more[0], options),
            )
        )

    def hear(event: str, **_: Any) -> None:
        nonlocal hits
        hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(hear)
    cache_key._hash_accelerator_config = hash_alike
    compiler.compile_or_get_cached = compile_once  # type: ignore[assignment]  # it hands all on
    return True


def _kind(devices: Any) -> str:
    return str(np.asarray(devices).flat[0].platform)


# Before jax 0.11 the writer takes `host_callbacks`, as programs with callbacks are never stored;
# since then the reader takes it, to give it to the loaded program.
_READ = ("module_name", "cache_key", "compile_options", "backend", "executable_devices")
_WRITE = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")
_CALLBACKS = "host_callbacks"


def keep_programs(cache: Any, least_s: float) -> bool:
    """Makes jax look up each program in `cache` (`get`, `put` and `_path`, a Path) before it
    compiles it, and store there each program that took at least `least_s` seconds.

    Unlike jax's own cache folder, each process writes its programs, not only the first one; and
    errors of reading or writing are ignored and the program is compiled. Returns False, without an
    effect, if this version of jax has another cache interface.
    """
    read, write = compiler._cache_read, compiler._cache_write
    signatures = tuple(tuple(inspect.signature(f).parameters) for f in (read, write))
    if signatures not in (((*_READ, _CALLBACKS), _WRITE), (_READ, (*_WRITE, _CALLBACKS))):
        return False
    of_jax = compilation_cache.get_file_cache

    def open_(path: str) -> Any:
        return (cache, path) if path == str(cache._path) else of_jax(path)

    def taken(name: str, key: str, options: Any, backend: Any, *more: Any) -> Any:
        try:
            return compilation_cache.get_executable_and_time(key, options, backend, *more)
        except Exception:  # for example written by another build of the engine
            return None, None

    def put_program(
        key: str, s: float, name: str, backend: Any, executable: Any, *callbacks: Any
    ) -> None:
        if not any(callbacks) and s >= least_s:
            with suppress(Exception):
                compilation_cache.put_executable_and_time(key, name, executable, backend, int(s))

    compilation_cache.get_file_cache = open_
    compiler._cache_read = taken  # type: ignore[assignment]  # their names are longer
    compiler._cache_write = put_program  # type: ignore[assignment]
    jax.config.update("jax_compilation_cache_dir", str(cache._path))
    return True
