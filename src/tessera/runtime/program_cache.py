"""In-memory cache of compiled programs: least recently used, limited in memory maps and bytes.

The engine maps each program into memory in pieces (a few hundred for a training step), and a
process may have only so many maps: beyond that the compiler ends it. So one book holds all
programs. A dropped program is compiled again when it is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

from ..core.locks import LAUNCH
from ..core.mesh import Mesh
from ..core.messages import progress
from .cpu import malloc
from .cpu.throttle import LARGE, queue_of
from .devices import wide_numbers
from .jax_private import gone

MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
FASTEST = 16_384  # upper bound of maps that a second of compiling makes
ASKING = 50  # least ratio of compile time to time for reading the heap's size
UNTIDY_S = 1.0  # after this much compile time, tidying the heap is worth its 0.05 s
_clock = count()


class Program:
    """A jitted program over `mesh`, compiled at its first call.

    `large` is (bytes of temporaries, bytes of results) if the temporaries reach LARGE on a CPU,
    else None. With `is_stage`, the program is one of a pipeline's stages on part of the devices:
    these run at the same time, so they never wait for each other's memory. With `is_wide` it has
    numbers of 64 bits.
    """

    __slots__ = (
        "__weakref__", "_is_stage", "_make", "_queue", "_run", "_wide", "bytes", "large", "used",
    )  # fmt: skip

    def __init__(
        self,
        make: Callable[[], Any],
        mesh: Mesh | None,
        is_stage: bool = False,
        is_wide: bool = False,
    ) -> None:
        self._wide = is_wide
        self._make, self._queue, self._run, self._is_stage = make, queue_of(mesh), None, is_stage
        self.large: tuple[int, int] | None = None
        self.bytes = self.used = 0

    def __call__(self, *arrays: Any) -> Any:
        if not self._wide:
            return self._called(arrays)
        with wide_numbers():
            return self._called(arrays)

    def _called(self, arrays: Sequence[Any]) -> Any:
        self.used = next(_clock)
        if not self.used % malloc.LAUNCHES:
            malloc.look()
        run = self._run or BOOK.compile(
            self, tuple(arrays)
        )  # another thread may drop `_run` after this
        if self._queue is None:
            return run(*arrays)
        if self.large is None:
            self._queue.enter()
        else:
            self._queue.enter_alone(*self.large)
        if not self._queue.is_shared:
            return run(*arrays)
        with LAUNCH:
            if gone(arrays):
                raise RuntimeError("Array has been deleted")  # by another thread, after the call
            return run(*arrays)

    def trace(self, *arrays: Any) -> Any:
        with wide_numbers(self._wide):
            return (self._run or self._make()).trace(*arrays)

    def lower(self, *arrays: Any) -> Any:
        with wide_numbers(self._wide):
            return (self._run or self._make()).lower(*arrays)

    @property
    def is_compiled(self) -> bool:
        """Returns whether a call runs the program without compiling it."""
        return self._run is not None

    def compile(self, arrays: Sequence[Any]) -> Any:
        """Compiles the program for `arrays`; returns the jitted function. Sets `large`."""
        run = self._run = self._run or self._make()
        with progress(f"compiling {getattr(run, '__name__', 'a program')}"):
            compiled = run.lower(*arrays).compile()
        if self._queue is None or self._is_stage:
            return run
        found, outs = compiled.memory_analysis(), compiled.output_shardings
        devices = max((len(x.addressable_devices) for x in outs), default=1)
        temporary = found.temp_size_in_bytes * devices
        if temporary >= LARGE:
            new = found.output_size_in_bytes - found.alias_size_in_bytes
            self.large = temporary, max(new, 0) * devices
        return run

    def drop(self) -> None:
        self._run = None


class Book:
    """All compiled programs, and the limits of their maps and bytes."""

    def __init__(self) -> None:
        self._live: WeakSet[Program] = WeakSet()
        self._lock = Lock()
        self._mapped_count = self._floor = 0  # maps at the last count; maps that other code holds
        self._spent_s = 0.0  # compile time since the last count
        self._compiling_s = self._asking_s = 0.0  # total time: compiling; reading the heap's size
        self._untidy_s = 0.0  # compile time since the heap was tidied
        self._grown, self._asked_s = 0, 0.0  # bytes, compile time of programs with measured bytes
        self.most_maps = _number(MOST_MAPS, 65530) // 2
        self.most_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8

    def compile(self, program: Program, arrays: tuple[Any, ...]) -> Any:
        """Compiles `program`; returns its jitted function. The growth of the heap counts as the
        program's bytes. Reading the heap's size is slow for a large heap, so for some programs the
        bytes are estimated from the compile time."""
        asks = self._asking_s * ASKING <= self._compiling_s
        before, begin_s = self._used() if asks else 0, time.perf_counter()
        run = program.compile(arrays)
        took_s = time.perf_counter() - begin_s
        malloc.give_if_short()
        if asks:
            program.bytes = max(self._used() - before, 0)
            self._grown, self._asked_s = self._grown + program.bytes, self._asked_s + took_s
        else:
            program.bytes = int(took_s * self._grown / max(self._asked_s, took_s))
        with self._lock:
            self._compiling_s += took_s
            self._untidy_s += took_s
            self._live.add(program)
            self._spent_s += took_s
            self._keep(program)
            if self._untidy_s > UNTIDY_S or program.large:
                malloc.close_holes()
                self._untidy_s = 0.0
        return run

    def _used(self) -> int:
        begin_s = time.perf_counter()
        size = malloc.used_bytes()
        self._asking_s += time.perf_counter() - begin_s
        return size

    def limit(self, maps: int | None, size: int | None) -> None:
        """Sets the limits of the process's maps and of the programs' bytes; None keeps a limit."""
        self.most_maps = self.most_maps if maps is None else maps
        self.most_bytes = self.most_bytes if size is None else size
        self._mapped_count = self._floor = 0

    def drop(self) -> None:
        """Drops all programs."""
        with self._lock:
            for program in self._live:
                program.drop()
            self._live.clear()

    def _keep(self, last: Program) -> None:
        """Drops the least recently used programs until the others fit the limits."""
        others = sorted((p for p in self._live if p is not last), key=lambda p: p.used)
        spare = last.bytes + sum(p.bytes for p in others) - self.most_bytes
        while spare > 0 and others:
            spare -= others[0].bytes
            self._drop(others.pop(0))
        most = max(self.most_maps, self._floor)
        if self._spent_s * FASTEST < most - self._mapped_count:
            return  # no count needed: at most FASTEST maps a second were added since the last one
        maps = self._look()
        while maps > most and others:
            # Some maps belong to no program, so this drops too few rather than too many.
            for p in others[: max(len(others) * (maps - most * 7 // 8) // maps, 1)]:
                self._drop(p)
                others.remove(p)
            maps = self._look()
        if maps > most:  # other code holds them: leave room for the program of this call
            self._floor = maps + 4096

    def _look(self) -> int:
        self._spent_s = 0.0
        self._mapped_count = MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0
        return self._mapped_count

    def _drop(self, program: Program) -> None:
        program.drop()
        self._live.discard(program)


def _number(path: Path, default: int) -> int:
    return int(path.read_text()) if path.exists() else default


BOOK = Book()
