"""Compilation of a program once for several processes: the first one compiles it, and hands the
executable to the others through the run's store.

A process that receives no executable compiles by itself, which is always correct: if the processors
differ, or if processes come to a program at very different times.
"""

from __future__ import annotations

import hashlib
import math
import platform
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import jax

from ..core import environment
from ..core.errors import EngineWarning, lines_up
from .jax_private import Compilation, around_compile, service
from .processes.store import wait_for

BEGUN_S = 10.0  # limit for the first process to begin compiling; there is none for the compilation


def start() -> None:
    """Shares compiled programs from now on if `TESSERA_COMPILE_ONCE=1`. Warns if this version of
    jax does not allow it."""
    if not environment.is_on(environment.COMPILE_ONCE):
        return
    if not around_compile(Sharing(), processor()):
        warnings.warn(
            f"{environment.COMPILE_ONCE}: each process compiles all of its programs, as jax"
            f" {jax.__version__} compiles in another way; leave it out, or take another version",
            EngineWarning,
            stacklevel=lines_up(),
        )


@cache
def processor() -> str:
    """Returns a hash that is equal for processors that run each other's machine code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    said = {x for x in lines if x.partition(":")[0].strip() in ("flags", "model name", "Features")}
    text = "\n".join([platform.machine(), platform.processor(), *sorted(said)])
    return hashlib.sha256(text.encode()).hexdigest()


class Sharing:
    """A compile function for all programs: the first process compiles, the others load its
    executable."""

    def __init__(self) -> None:
        self.compiled: set[tuple[str, tuple[int, ...]]] = set()
        self.alone = False  # set when the first process did not begin: it runs other programs

    def __call__(self, program: Compilation) -> Any:
        place = (program.key, program.processes)
        if self.alone or place in self.compiled:  # a recompilation in one process is its own
            return program.compile()
        self.compiled.add(place)
        path = f"tessera/program/{program.key}/{'.'.join(map(str, program.processes))}"
        if jax.process_index() == program.processes[0]:
            return _publish(program, path)
        return self._taken(program, path)

    def _taken(self, program: Compilation, path: str) -> Any:
        first = program.processes[0]
        if wait_for(f"{path}/begun", BEGUN_S, first) is None:
            self.alone = True
            return program.compile()
        data = wait_for(f"{path}/data", math.inf, first)
        if service().key_value_increment(f"{path}/taken", 1) == len(program.processes) - 1:
            service().key_value_delete(path)
        return program.unpacked(zlib.decompress(data)) if data else program.compile()


def _publish(program: Compilation, path: str) -> Any:
    """Compiles, and publishes the executable for the others. Publishes b"" if compilation failed or
    the executable was in jax's own cache: then the others do the same."""
    client, data = service(), b""
    client.key_value_set_bytes(f"{path}/begun", b"1")
    try:
        made = program.compile()
        packed = program.packed()
        data = zlib.compress(packed, 1) if packed else b""
        return made
    finally:
        client.key_value_set_bytes(f"{path}/data", data)
