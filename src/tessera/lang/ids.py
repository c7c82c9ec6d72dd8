"""Is an id outside the dim that it points into? An error, where the host can say so."""

from __future__ import annotations

import numpy as np

from ..core.errors import ShapeError, fail
from .tensor import Tensor


def check_ids(
    name: str, what: str, ids: Tensor, size: int, *, low: int = 0, ignore: int | None = None
) -> None:
    """Raises ShapeError where the host knows that one of `ids` is not from `low` to `size - 1` and
    not `ignore`. What only the devices know, they mark themselves: see ops/indexing.py."""
    given = ids._given
    if given is None:
        return
    bad = (given < low) | (given >= size)
    if ignore is not None:
        bad &= given != ignore
    if not bad.any():
        return
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    place = f" at [{', '.join(map(str, at))}]" if at else ""
    others = int(bad.sum()) - 1
    rest = f", and {others} more" if others else ""
    spared = f", or {ignore}" if ignore is not None else ""
    raise fail(
        ShapeError,
        f"{name}: {what} {given[at]}{place} is outside {low} to {size - 1}{rest}",
        [(f"{what}s", ids.type)],
        fix=f"keep each {what} within {low} to {size - 1}{spared}",
    )
