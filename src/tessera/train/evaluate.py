"""Evaluation: a mean loss over fixed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..core.errors import UsageError
from ..lang.record.to_host import read_by_all
from ..lang.value.tensor import Tensor


def mean_loss(loss: Callable[[Any], Tensor], batches: Iterable[Any]) -> float:
    """The mean of `loss(batch)` over batches; all are dispatched before one is read.

    A batch of a loader, `{"labels": ...}`, is weighted by its labels that are not -100, so that
    padding rows of the last batch do not count; other batches have equal weights. All processes
    must call it.

    >>> import tessera as ts
    >>> mean_loss(lambda batch: ts.tensor(batch).mean(), [[1.0, 2.0], [5.0, 6.0]])
    3.5
    """
    found = [(loss(batch), _labels(batch)) for batch in batches]
    if not found:
        raise UsageError("mean_loss: there are no batches", fix="give at least one")
    counts = [1.0 if labels is None else float((labels != -100).sum()) for _, labels in found]
    losses = read_by_all("mean_loss", [t for t, _ in found])
    parts = [c * float(t.item()) for c, t in zip(counts, losses, strict=True) if c]
    return sum(parts) / sum(counts) if parts else float("nan")


def _labels(batch: object) -> Any:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, (Tensor, np.ndarray)):
        return None
    return np.asarray(read_by_all("labels", labels))
