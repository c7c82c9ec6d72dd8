"""The limits of the cache of compiled programs in the process."""

from __future__ import annotations

from ...core.declared import Count
from ..value.engine import engine


def set_program_cache(*, maps: Count | None = None, bytes: Count | None = None) -> None:
    """Limits how many compiled programs the process keeps; the least recently used ones go first.

    `maps` is the most memory maps the process may have, `bytes` the most heap memory that programs
    may take. None leaves a limit as it is; the defaults are half of the maps that the system allows
    (`vm.max_map_count`) and an eighth of the machine's memory. A dropped program is compiled again
    at its next call. Raises UsageError if a limit is not a whole number of at least 1.

    >>> set_program_cache(bytes=2 << 30)
    """
    engine().program_cache(maps, bytes)


def clear_caches() -> None:
    """Drops all compiled programs; each is compiled again at its next call."""
    engine().clear_caches()
