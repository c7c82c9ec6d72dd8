"""Choice between unrolling repeated layers and a loop: compile time against step time."""

from __future__ import annotations

# Seconds to compile one more unrolled layer, and the seconds of compilation that a user will accept
# for a faster step (by about a tenth). bench/RESULTS.md has the measurement behind them.
COMPILE_S_PER_LAYER = 0.3
PATIENCE_S = 8.0


def write_out(depth: int) -> bool:
    """Returns whether `depth` equal layers are unrolled.

    >>> write_out(24), write_out(96)
    (True, False)
    """
    return depth * COMPILE_S_PER_LAYER <= PATIENCE_S
