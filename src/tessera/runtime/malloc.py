"""Why is a CPU step not slowed by page faults? The C library keeps what large arrays give back.

By default glibc returns each large temporary to the kernel and faults every page in again at the
next step: 8 to 20 % of a training step. One arena that never shrinks avoids it. A thread that took
memory before there was to be one has an arena of its own, which engine threads then share by turns
and which maps each large temporary anew, so that is settled when the package is imported.
What is small and stays can come to lie in the place of what was large, so what is kept grows: what
is not in use is given back now and then (runtime/throttle.py). Where there is no room for what is
kept, the keeping ends.
A compiler leaves thousands of free pieces between what stays, through which the C library would
search at each of the engine's allocations, 30,000 of them in a step with convolutions, while the
other threads wait: they are given back and closed.
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

from ..core import environment
from ..core.errors import UsageError

# The parameters of mallopt(3) and what they are set to: to keep all, and to keep what is small.
ARENA_MAX, MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -8, -4, -3, -1, -2
KEEPING = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 256 << 20}
GIVING = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 256 << 20, TOP_PAD: 1 << 20}
LEAST_HOLE, MOST_HOLE = 1 << 10, 1 << 20  # bytes of a free piece that is closed
STOCK = 32 << 20  # bytes of the free piece that stays
MOST_CLOSED = 8 << 30  # bytes of address space: no page of them is in memory
LAUNCHES, LOOK_S = 16, 0.02  # of programs, and seconds, at least, between two looks at the memory
AGAIN = 4  # times as long as to give pages back it takes to do that and to have them again
GROUPS = Path("/sys/fs/cgroup")
_keeps: list[bool] = []


def share_heap() -> None:
    """Has the threads that begin from now on take memory from the heap that the others use."""
    with contextlib.suppress(UsageError):  # of a word that is neither on nor off: at the start
        if _may_keep():
            _set({ARENA_MAX: 1})


def keep_pages() -> bool:
    """Lets the process keep its pages; whether that was possible. `TESSERA_HEAP=0` prevents it."""
    if not _may_keep():
        return False
    _keeps[:] = [_set(KEEPING)]
    return _keeps[0]


def _may_keep() -> bool:
    return platform.libc_ver()[0] == "glibc" and environment.is_on(environment.HEAP, default=True)


def give_if_short() -> None:
    """Ends the keeping for good, and gives back what is not in use, where the process has more
    memory than is left. Where nobody can say how much that is, it goes on."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        if any(_keeps) and resident_bytes() > free_bytes():
            _keeps.clear()
            _set(GIVING)
            ctypes.CDLL(None).malloc_trim(0)


_looked_s = [0.0]


def look() -> None:
    """`give_if_short`, which takes 0.2 ms, unless it was asked a moment ago."""
    now_s = time.monotonic()
    if now_s > _looked_s[0] + LOOK_S:
        _looked_s[0] = now_s
        give_if_short()


class _Unused:
    """How much memory there is when all that is kept is of use, and what giving back has cost."""

    most_bytes, spent_s, begin_s = 0, 0.0, 0.0


def give_unused(next_bytes: int) -> None:
    """Gives back what is kept and not in use, where the process has grown; what runs next takes so
    many bytes. As that has page faults again, it is done for a hundredth of the time at most."""
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
    """The free pieces that are closed: where what fills them lies, and their bytes."""

    places: tuple[int, ...] = ()
    bytes = 0


def close_holes() -> None:
    """Gives back what is kept and not in use, and closes the free pieces between what is in use;
    one of STOCK stays, for what is small not to lie in the place of what is large. Where they take
    much of the address space, all are opened instead."""
    if not any(_keeps):
        return
    import resource  # of Unix alone

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
    end = libc.sbrk(0) - info.keepcost  # of what was ever in use
    size = left = info.fordblks - info.keepcost
    large: list[int] = []
    small: list[int] = []
    while size > LEAST_HOLE and left > 0:
        place = libc.malloc(size)
        if place is None or place >= end:  # no free piece is so large
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
    stock, behind = libc.malloc(STOCK), libc.malloc(STOCK)
    libc.realloc(behind, ctypes.c_size_t(LEAST_HOLE))
    for place in (*large, stock):
        libc.free(place)


def _set(wanted: dict[int, int]) -> bool:
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(key, value) == 1 for key, value in wanted.items())


def resident_bytes() -> int:
    """How much memory the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """How much more there is, on the host and in the control groups that the process is in."""
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
    """What mallinfo2(3) gives."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


@cache
def _asked() -> Any:
    """The C library's function; None where it has none."""
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
    """How much of the C library's heap is in use; 0 where nobody can say."""
    info = _info()
    return 0 if info is None else info.uordblks + info.hblkhd - _Closed.bytes
