"""glibc settings that keep freed memory in the process, so that CPU steps have no page faults.

By default glibc returns each large temporary to the kernel and faults every page in again at the
next step: 8 to 20 % of a training step. One arena that never shrinks avoids it. A thread that
allocated before the arena limit was set has an arena of its own; engine threads then share that
one, and it maps each large temporary anew. So `share_heap` runs when the package is imported.

Small blocks that stay can take the place of large ones, so the kept memory grows: unused pages are
returned now and then (runtime/cpu/throttle.py). If memory runs short, the keeping ends.

A compilation leaves thousands of free chunks between live ones. glibc would search through them at
each allocation of the engine (30,000 in a step with convolutions) while other threads wait: their
pages are returned, and the chunks are filled ("closed").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

from ...core import environment
from ...core.errors import UsageError

# Parameters of mallopt(3), and their values: KEEPING keeps all memory, GIVING only small blocks.
ARENA_MAX, MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -8, -4, -3, -1, -2
KEEPING = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 256 << 20}
GIVING = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 256 << 20, TOP_PAD: 1 << 20}
LEAST_HOLE, MOST_HOLE = 1 << 10, 1 << 20  # bytes of a free chunk that is closed
STOCK = 32 << 20  # bytes of the chunk that stays free
MOST_CLOSED = 8 << 30  # bytes of address space; their pages are not resident
LAUNCHES, LOOK_S = 16, 0.02  # least number of launches and seconds between two memory checks
AGAIN = 4  # cost of returning pages and faulting them in again, relative to returning them
GROUPS = Path("/sys/fs/cgroup")
_keeps: list[bool] = []


def share_heap() -> None:
    """Makes threads that start from now on share one heap."""
    with contextlib.suppress(UsageError):  # a wrong TESSERA_HEAP is reported at the backend's start
        if _may_keep():
            _set({ARENA_MAX: 1})


def keep_pages() -> bool:
    """Makes the process keep its pages; returns whether that worked. `TESSERA_HEAP=0` prevents
    it."""
    if not _may_keep():
        return False
    _keeps[:] = [_set(KEEPING)]
    return _keeps[0]


def _may_keep() -> bool:
    return platform.libc_ver()[0] == "glibc" and environment.is_on(environment.HEAP, default=True)


def give_if_short() -> None:
    """Stops keeping pages for good, and returns unused ones, if the process has more memory than is
    free. Does nothing if the free memory is unknown."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        if any(_keeps) and resident_bytes() > free_bytes():
            _keeps.clear()
            _set(GIVING)
            ctypes.CDLL(None).malloc_trim(0)


_looked_s = [0.0]


def look() -> None:
    """Calls `give_if_short`, which takes 0.2 ms, at most once in LOOK_S."""
    now_s = time.monotonic()
    if now_s > _looked_s[0] + LOOK_S:
        _looked_s[0] = now_s
        give_if_short()


class _Unused:
    """State of `give_unused`: the most memory that the process should need, and the time spent so
    far."""

    most_bytes, spent_s, begin_s = 0, 0.0, 0.0


def give_unused(next_bytes: int) -> None:
    """Returns unused pages to the kernel if the process has grown beyond its need; `next_bytes` is
    the need of the next program. The time for it, page faults included, is limited to a hundredth
    of the run."""
    now_s, state = time.perf_counter(), _Unused
    with contextlib.suppress(OSError):
        if not any(_keeps) or resident_bytes() <= state.most_bytes + next_bytes // 2:
            return
        state.begin_s = state.begin_s or now_s
        if state.spent_s > (now_s - state.begin_s) / 100:
            return
        ctypes.CDLL(None).malloc_trim(0)
        state.spent_s += AGAIN * (time.perf_counter() - now_s)
        state.most_bytes = resident_bytes() + next_bytes


class _Closed:
    """The closed free chunks: the addresses of the blocks that fill them, and their bytes."""

    places: tuple[int, ...] = ()
    bytes = 0


def close_holes() -> None:
    """Returns unused pages, and fills the free chunks between live ones with blocks that stay.

    One chunk of STOCK bytes is left free, so that small blocks do not take the place of large ones.
    If the filled chunks take too much address space, all are freed instead.
    """
    if not any(_keeps):
        return
    import resource  # exists on Unix only

    libc = ctypes.CDLL(None)
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = libc.realloc.argtypes = [ctypes.c_void_p]
    libc.malloc.restype = libc.realloc.restype = libc.sbrk.restype = ctypes.c_void_p
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    most = MOST_CLOSED if limit == resource.RLIM_INFINITY else min(limit // 16, MOST_CLOSED)
    if _Closed.bytes > most:
        for place in _Closed.places:
            libc.free(place)
        _Closed.places, _Closed.bytes = (), 0
        return
    libc.malloc_trim(0)
    info = _info()
    if info is None:
        return
    end = libc.sbrk(0) - info.keepcost  # start of the free chunk at the heap's top
    size = left = info.fordblks - info.keepcost
    large: list[int] = []
    small: list[int] = []
    while size > LEAST_HOLE and left > 0:
        place = libc.malloc(size)
        if place is None or place >= end:  # no free chunk is so large
            libc.free(place)
            size = size * 31 // 32
            continue
        left -= size
        if size > MOST_HOLE:
            large.append(place)
        else:
            small.append(place)
            _Closed.bytes += size
    _Closed.places += tuple(small)
    # `behind` stays in use, or the freed stock would merge with the free chunk at the heap's top.
    stock, behind = libc.malloc(STOCK), libc.malloc(STOCK)
    libc.realloc(behind, ctypes.c_size_t(LEAST_HOLE))
    for place in (*large, stock):
        libc.free(place)


def _set(wanted: dict[int, int]) -> bool:
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(key, value) == 1 for key, value in wanted.items())


def resident_bytes() -> int:
    """Returns the resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """Returns the free memory of the host, limited by the control groups (cgroups) of the
    process."""
    rows = dict(r.split(":") for r in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) << 10
    said = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((r.removeprefix("0::/") for r in said if r.startswith("0::/")), "")
    for group in (GROUPS / own, *(GROUPS / own).parents):
        most = group / "memory.max"
        if group.is_relative_to(GROUPS) and most.exists() and most.read_text().strip().isdigit():
            kinds = dict(r.split() for r in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(kinds["inactive_file"])
            free = min(free, int(most.read_text()) - used)
    return free


class _Info(ctypes.Structure):
    """The result of mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


@cache
def _asked() -> Any:
    """Returns the C library's mallinfo2; None if it has none."""
    if platform.libc_ver()[0] != "glibc":
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is not None:
        ask.restype = _Info
    return ask


def _info() -> _Info | None:
    ask = _asked()
    found: _Info | None = None if ask is None else ask()
    return found


def used_bytes() -> int:
    """Returns the bytes of the C library's heap that are in use; 0 if unknown."""
    info = _info()
    return 0 if info is None else info.uordblks + info.hblkhd - _Closed.bytes
