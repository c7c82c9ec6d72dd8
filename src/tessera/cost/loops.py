"""Is a repeated layer written out or looped? Compile time against step time."""

from __future__ import annotations

# Seconds to compile one more written-out layer, and the seconds of compilation a user will wait
# for a faster step. bench/RESULTS.md has the measurement behind them.
COMPILE_S_PER_LAYER = 0.08
PATIENCE_S = 2.5


def write_out(depth: int) -> bool:
    """Whether `depth` equal layers are written out one by one.

    >>> write_out(24), write_out(96)
    (True, False)
    """
    return depth * COMPILE_S_PER_LAYER <= PATIENCE_S
