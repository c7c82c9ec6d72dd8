"""Why is a CPU step not slowed by page faults? The C library keeps what large arrays give back.

By default glibc returns each large temporary to the kernel and faults every page in again at the
next step: 8 to 14 % of a training step (bench/RESULTS.md). One arena that never shrinks avoids it.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

from ..core import environment

# The parameters of mallopt(3) and what they are set to.
ARENA_MAX, MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -8, -4, -1, -2
TOP_PAD_BYTES = 256 << 20


def keep_pages() -> bool:
    """Lets the process keep its pages; whether that was possible. `TESSERA_HEAP=0` prevents it."""
    if platform.libc_ver()[0] != "glibc" or not environment.is_on(environment.HEAP, default=True):
        return False
    libc = ctypes.CDLL(None)
    wanted = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: TOP_PAD_BYTES}
    return all(libc.mallopt(key, value) == 1 for key, value in wanted.items())


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


def used_bytes() -> int:
    """How much of the C library's heap is in use; 0 where nobody can say."""
    ask = _asked()
    return 0 if ask is None else ask().uordblks + ask().hblkhd
