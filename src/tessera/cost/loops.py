"""Is a repeated layer written out or looped? Compile time against step time."""

from __future__ import annotations

# Seconds to compile one more written-out layer, and the seconds of compilation a user will wait
# for a faster step (by about a tenth). bench/RESULTS.md has the measurement behind them.
COMPILE_S_PER_LAYER = 0.3
PATIENCE_S = 8.0


def write_out(depth: int) -> bool:
    """Whether `depth` equal layers are written out one by one.

    >>> write_out(24), write_out(96)
    (True, False)
    """
    return depth * COMPILE_S_PER_LAYER <= PATIENCE_S
