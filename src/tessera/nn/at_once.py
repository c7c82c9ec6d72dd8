"""How much does a device compute at once? On a CPU blocks that stay near a core. Elsewhere as much
as memory has room for: a block is launched kernel by kernel, and small ones leave a GPU idle."""

from __future__ import annotations

from ..core.checks import whole
from ..core.devices import platform

# Rows of a block on a CPU: they cost little memory, and one more block costs little time.
ROWS = 512
# Elements of a block elsewhere: 2 GiB in f32. Scores are fewer, since several tensors as large as
# they are exist together.
ELEMENTS, SCORES = 1 << 29, 1 << 27


def rows_at_once(name: str, rows: int | None, width: int) -> int:
    """The most rows of a block that makes `width` elements of each; `rows` where they are given.
    Raises UsageError unless they are a whole number from 1 on."""
    if rows is not None:
        return whole(name, "rows", rows, 1)
    return ROWS if platform() == "cpu" else max(ROWS, ELEMENTS // max(1, width))


def scores_at_once(on_cpu: int) -> int:
    """The most scores of attention that a device computes at once."""
    return on_cpu if platform() == "cpu" else SCORES
