"""How much does a device compute at once? On a CPU blocks that stay near a core. Elsewhere as much
as memory has room for: a block is launched kernel by kernel, and small ones leave a GPU idle."""

from __future__ import annotations

from ..core.checks import whole
from ..core.context import settings
from ..core.devices import platform
from ..core.dtypes import dtype_of, f32
from ..lang.tensor import Tensor

# Rows of a block on a CPU: they cost little memory, and one more block costs little time.
ROWS = 512
# Elsewhere: bytes of a block's largest tensor, and scores of attention, which are f32 and of which
# several tensors exist together.
BYTES, SCORES = 1 << 30, 1 << 26


def rows_at_once(name: str, rows: int | None, x: Tensor, width: int) -> int:
    """The most rows of a block that makes a product of `x` with `width` elements of each; `rows`
    where they are given. Raises UsageError unless they are a whole number from 1 on."""
    if rows is not None:
        return whole(name, "rows", rows, 1)
    if platform() == "cpu":
        return ROWS
    narrow = settings().autocast if x.dtype is f32 else None
    size = (x.dtype if narrow is None else dtype_of(narrow)).bytes
    return max(ROWS, BYTES // (size * max(1, width)))


def scores_at_once(on_cpu: int) -> int:
    """The most scores of attention that a device computes at once."""
    return on_cpu if platform() == "cpu" else SCORES
