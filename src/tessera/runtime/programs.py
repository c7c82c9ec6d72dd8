"""Which compiled programs are kept? Those that were used last, within so many maps and bytes.

The engine maps each program into memory in pieces, some hundred for a training step, and a process
may hold only so many of them: beyond that the compiler ends it. So there is one book of all
programs. What is let go of is compiled again when it is called.
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

from ..core.mesh import Mesh
from ..core.turns import LAUNCH
from . import malloc
from .jax_private import gone
from .throttle import LARGE, queue_of

MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
FASTEST = 16_384  # maps a second, more than a compiler makes
ASKING = 50  # so much more time goes into compiling than into asking for the size of the heap
UNTIDY_S = 1.0  # of compiling leave so much behind that to tidy the heap is worth its 0.05 s
_clock = count()


class Program:
    """A jitted program that is compiled when it is called, over `mesh`. What it takes of a CPU's
    memory for a while, and what for its results, is `large` where the first is much. The programs
    of stages run at once, each on `some` devices: they do not wait until one has ended."""

    __slots__ = ("__weakref__", "_make", "_queue", "_run", "_some", "bytes", "large", "used")

    def __init__(self, make: Callable[[], Any], mesh: Mesh | None, some: bool = False) -> None:
        self._make, self._queue, self._run, self._some = make, queue_of(mesh), None, some
        self.large: tuple[int, int] | None = None
        self.bytes = self.used = 0

    def __call__(self, *arrays: Any) -> Any:
        self.used = next(_clock)
        if not self.used % malloc.LAUNCHES:
            malloc.look()
        run = self._run or BOOK.compile(self, arrays)  # others may let go of it from here on
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
                raise RuntimeError("Array has been deleted")  # by now, by another thread
            return run(*arrays)

    def trace(self, *arrays: Any) -> Any:
        return (self._run or self._make()).trace(*arrays)

    def lower(self, *arrays: Any) -> Any:
        return (self._run or self._make()).lower(*arrays)

    @property
    def is_compiled(self) -> bool:
        """Whether a call runs it at once."""
        return self._run is not None

    def compile(self, arrays: Sequence[Any]) -> Any:
        """Compiles what a call with `arrays` runs, and gives it; finds out whether it needs much
        memory."""
        run = self._run = self._run or self._make()
        compiled = run.lower(*arrays).compile()
        if self._queue is None or self._some:
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
    """All programs that are compiled, and how many maps and bytes they may take."""

    def __init__(self) -> None:
        self._live: WeakSet[Program] = WeakSet()
        self._lock = Lock()
        self._seen = self._floor = 0  # maps, when they were counted last, and of others
        self._spent_s = 0.0  # on compiling since then
        self._compiling_s = self._asking_s = 0.0  # on all compiling; on asking for the heap's size
        self._untidy_s = 0.0  # on compiling since the heap was tidied
        self._grown, self._asked_s = 0, 0.0  # bytes and seconds of those for which it was asked
        self.most_maps = _number(MOST_MAPS, 65530) // 2
        self.most_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8

    def compile(self, program: Program, arrays: tuple[Any, ...]) -> Any:
        """Compiles `program`, and gives what runs it; what the heap grew by is the program's.
        Asking for that takes long where the heap is large, so some are estimated by how long they
        compile."""
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
        """Sets how many maps the process and how many bytes the programs may take; None: as is."""
        self.most_maps = self.most_maps if maps is None else maps
        self.most_bytes = self.most_bytes if size is None else size
        self._seen = self._floor = 0

    def drop(self) -> None:
        """Lets go of all programs."""
        with self._lock:
            for program in self._live:
                program.drop()
            self._live.clear()

    def _keep(self, last: Program) -> None:
        """Lets go of the programs that were used least lately, until the rest is in the budget."""
        others = sorted((p for p in self._live if p is not last), key=lambda p: p.used)
        spare = last.bytes + sum(p.bytes for p in others) - self.most_bytes
        while spare > 0 and others:
            spare -= others[0].bytes
            self._drop(others.pop(0))
        most = max(self.most_maps, self._floor)
        if self._spent_s * FASTEST < most - self._seen:
            return  # nobody needs to count: there is room for all that was compiled since
        maps = self._look()
        while maps > most and others:
            # Some maps are nobody's here, so this is too few rather than too many.
            for p in others[: max(len(others) * (maps - most * 7 // 8) // maps, 1)]:
                self._drop(p)
                others.remove(p)
            maps = self._look()
        if maps > most:  # they are not ours: programs that are needed at once must fit
            self._floor = maps + 4096

    def _look(self) -> int:
        self._spent_s = 0.0
        self._seen = MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0
        return self._seen

    def _drop(self, program: Program) -> None:
        program.drop()
        self._live.discard(program)


def _number(path: Path, default: int) -> int:
    return int(path.read_text()) if path.exists() else default


BOOK = Book()
