"""How good is the model on text it has not seen? A mean over fixed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..core.errors import UsageError, fail
from ..lang.tensor import Tensor


def mean_loss(loss: Callable[[Any], Tensor], batches: Iterable[Any]) -> float:
    """The mean of `loss(batch)` over batches of one size; all are dispatched before one is read.

    >>> import tessera as ts
    >>> mean_loss(lambda batch: ts.tensor(batch).mean(), [[1.0, 2.0], [5.0, 6.0]])
    3.5
    """
    found = [loss(batch) for batch in batches]
    if not found:
        raise fail(UsageError, "mean_loss: there are no batches", fix="give at least one")
    return sum(float(t.item()) for t in found) / len(found)
