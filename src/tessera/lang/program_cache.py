"""How much may compiled programs take? The user's word on it, for the process."""

from __future__ import annotations

from .checks import whole
from .engine import engine


def set_program_cache(*, maps: int | None = None, bytes: int | None = None) -> None:
    """From here on compiled programs are kept, those that were used last, as long as the process
    has at most `maps` memory maps and they take at most `bytes` of the heap; None: as it was.

    At the start that is half of the maps that the system allows (`vm.max_map_count`) and an eighth
    of the machine's memory. A program that was let go of is compiled again when it is called.
    Raises UsageError for what is no whole number of at least 1.

    >>> set_program_cache(bytes=2 << 30)
    """
    if maps is not None:
        whole("set_program_cache", "maps", maps, 1)
    if bytes is not None:
        whole("set_program_cache", "bytes", bytes, 1)
    engine().program_cache(maps, bytes)


def clear_caches() -> None:
    """Lets go of all compiled programs; each is compiled again when it is called."""
    engine().clear_caches()
