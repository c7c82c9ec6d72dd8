"""Do the rows of a device meet each other in what it computes? Then the mean of the devices' losses
is not the loss of the batch: in a contrastive loss, or behind statistics of a batch.

The body is recorded for a device's rows and for twice as many, and the two are read side by side
(lang/pipelines/means.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from ...core.errors import StrategyWarning, lines_up
from ...core.layout import TensorType
from ..pipelines.means import Reading, values
from ..record import Recorder
from .batch_arguments import doubled, tried
from .boundary import Borders


def warn_of_rows(
    around: Recorder,
    borders: Borders,
    body: Callable[..., Any],
    leaves: Sequence[Any],
    spec: Any,
    kinds: Mapping[int, TensorType],
    batch: Set[int],
) -> None:
    """One StrategyWarning where a number that is averaged over the data axes goes across the rows
    of a device. `kinds` are the types of the blocks among `leaves`, by place; those of `batch` hold
    its rows."""
    larger = {i: doubled(kinds[i]) for i in batch}
    if not batch or None in larger.values():
        return
    once = tried(around, borders, body, leaves, spec, kinds)
    twice = tried(around, borders, body, leaves, spec, {**kinds, **larger})  # type: ignore[dict-item]
    if once is None or twice is None or once.by_rank or twice.by_rank:
        return
    rows = {once.inputs[i] for i in batch}
    axes = borders.view.batch
    found = values(Reading(borders.name, once.nodes, rows, {}, (), axes=axes), twice.nodes)
    for n in once.numbers:
        value = found.get(n)
        if value is None or value.by is None or not n.type.dtype.is_float:
            continue
        if not value.across and not value.by.type.rank:
            continue  # of numbers: averages.py
        does = "goes across a device's rows" if value.across else "is of what a device added up"
        over = ", ".join(map(repr, axes))
        warnings.warn(
            f"{borders.name}: {value.by.op!r} {does} ({value.by.loc}), so the mean over {over} is"
            " not the result of the whole batch\n  bring the rows together first, or their sums:"
            f" dist.all_gather(x, {over}) or dist.all_reduce(x.sum(0), {over})",
            StrategyWarning,
            stacklevel=lines_up(),
        )
        return
