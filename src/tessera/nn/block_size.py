"""Block sizes by backend: blocks that stay in the cache on a CPU, as large as memory allows
elsewhere. A block is launched kernel by kernel, so small blocks would leave a GPU idle."""

from __future__ import annotations

import math

from ..core.context import settings
from ..core.devices import platform
from ..core.dtypes import dtype_of, f32
from ..lang.record.recorder import choose
from ..lang.value.tensor import Tensor

# Rows of a block on a CPU: few enough to need little memory, and enough that a further block costs
# little time.
ROWS = 512
# Elsewhere: bytes of a block's largest tensor, and scores of attention. Scores are f32, and several
# tensors of their size exist together.
BYTES, SCORES = 1 << 30, 1 << 26


def rows_at_once(rows: int | None, x: Tensor, width: int) -> int:
    """The maximum number of rows in a block whose product with `x` has `width` elements per row;
    `rows` if given."""
    if rows is not None:
        return rows
    if platform() == "cpu":
        count = max(1, math.prod(x.type.local_shape[:-1]))
        others = {min(n, count): n for n in (count, 4 * ROWS, 2 * ROWS, ROWS // 2, ROWS // 4)}
        others.pop(min(ROWS, count), None)  # the same blocks as by default
        return int(choose("block_rows", ROWS, others.values()))
    narrow = settings().autocast if x.dtype is f32 else None
    size = (x.dtype if narrow is None else dtype_of(narrow)).bytes
    return max(ROWS, BYTES // (size * max(1, width)))


def scores_at_once(on_cpu: int) -> int:
    """The maximum number of attention scores that a device computes at once."""
    default = on_cpu if platform() == "cpu" else SCORES
    return int(choose("attention_scores", default, (default // 4, default * 4, default * 16)))
