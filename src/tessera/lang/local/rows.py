"""Do the rows of a device meet each other in what it computes? Then the mean of the devices' losses
is not the loss of the batch: in a contrastive loss, or behind statistics of a batch.

The body is recorded for a device's rows and for twice as many, and the two are read side by side
(lang/pipelines/means.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set

from ...core.errors import StrategyWarning, lines_up
from ...core.layout import TensorType
from ...ops.control import scan
from ..pipelines.balances import has_balance
from ..pipelines.means import Reading, alike, of_experts, values
from .batch_arguments import Trial, doubled
from .boundary import Borders


def by_rows(
    record: Callable[[Mapping[int, TensorType]], Trial | None],
    kinds: Mapping[int, TensorType],
    batch: Set[int],
) -> list[Trial]:
    """Recordings of a body for more and more rows, on trial; none where that is not possible.
    `record` makes one of blocks of these types by place, which are `kinds` in the call; those of
    `batch` hold the rows."""
    trials: list[Trial] = []
    while len(trials) < 3:  # again with more, where it goes block by block from some size on
        made = record(kinds) if batch else None
        if made is None or made.by_rank:
            return []
        trials.append(made)
        if len(trials) > 1 and alike(trials[-2].nodes, made.nodes):
            break
        larger = {i: doubled(kinds[i]) for i in batch}
        kinds = {**kinds, **{i: t for i, t in larger.items() if t is not None}}
        if None in larger.values():
            return []
    return trials


def warn_of_rows(borders: Borders, trials: Sequence[Trial], batch: Set[int]) -> None:
    """One StrategyWarning where a number that is averaged over the data axes is no mean over rows,
    or the rows of a result meet each other, as `trials` of more and more rows show it, or they
    cannot be compared."""
    if not trials:
        return
    once, twice = trials[-2:]
    ends = [n for n in once.numbers if n.type.dtype.is_float]
    axes = borders.view.batch
    over = ", ".join(map(repr, axes))
    if not alike(once.nodes, twice.nodes):
        if ends:
            _warn(borders.name, "with more rows it is another program, so it is not known whether"
                  f" the mean over {over} is the result of the whole batch")  # fmt: skip
        return
    rows = {once.inputs[i] for i in batch}
    experts = {*filter(of_experts, once.nodes)}
    read = Reading(borders.name, once.nodes, rows, {}, (), inside=experts, axes=axes)
    found = values(read, twice.nodes)
    for n, value in ((n, found[n]) for n in ends if n in found):
        # What is odd of numbers alone averages.py tells.
        if value.by is not None and (value.across or value.by.type.rank):
            does = "goes across a device's rows" if value.across else "is of what a device added up"
            _warn(
                borders.name,
                f"{value.by.op!r} {does} ({value.by.loc}), so the mean over {over} is not the"
                " result of the whole batch\n  bring the rows together first, or their sums:"
                f" dist.all_gather(x, {over}) or dist.all_reduce(x.sum(0), {over})",
            )
            return
        by = value.by
        both = by is not None and by.kind.degree == "joint" and {found[a].degree for a in by.args}
        power = value.kind == "added" and not math.isnan(value.degree or 0.0) and value.degree
        if power or (both and len(both - {None}) > 1):
            loc = by.loc if by is not None else n.loc
            _warn(borders.name, f"a sum over a device's rows ({loc}) is averaged over {over}: it"
                  " is the sum over all rows divided by the number of devices\n  take the mean, or"
                  f" complete it: dist.all_reduce(x, {over})")  # fmt: skip
            return
    if has_balance(read, twice.nodes, ends):
        _warn(
            borders.name,
            "the auxiliary loss of experts is taken of each device's rows: its mean over"
            f" {over} is not that of the whole batch\n  where that matters, leave out"
            " ts.distribute: on a mesh it is of all rows",
        )
        return
    inner = {n.loc for n in once.numbers if n not in found}  # losses in the body of a loop
    for n, m in zip(once.nodes, twice.nodes, strict=True):
        by_row = n.op == scan.name and n.attrs["length"] != m.attrs["length"]
        asked = [x.loc for x in n.attrs["body"].nodes if x.loc in inner] if by_row else []
        if asked:
            _warn(
                borders.name,
                f"a gradient in a loop over a device's rows ({asked[0]}) is of the mean over"
                f" {over}, so it is that of a row divided by the number of devices\n  take that of"
                " each row by ts.vmap",
            )
            return
    for n in once.states:
        of = found.get(n)
        if of is None or "batch_norm" in (of.by or n).scope.split("/"):
            continue
        if of.kind == "odd" or (
            of.kind == "added" and not math.isnan(of.degree or 0.0) and of.degree
        ):
            loc = (of.by or n).loc
            _warn(
                borders.name,
                f"what is set from a device's rows ({loc}) is averaged over {over}, and is no mean"
                f" of rows: it is not that of the whole batch\n  combine it first: dist.all_reduce("
                f'x.sum(0), {over}), or op="max"',
            )
            return
    for n, m in zip(once.arrays, twice.arrays, strict=True):
        of = found.get(n)
        met = of is not None and (of.mixed or of.kind == "odd")
        if of is not None and met and m.type.shape[0] == 2 * n.type.shape[0]:
            by = of.by or n
            _warn(
                borders.name,
                f"{by.op!r} goes across a device's rows ({by.loc}), so a result is not that of the"
                " whole batch\n  bring the rows together first, or their sums: dist.all_gather(x,"
                f' {over}) or dist.all_reduce(x.mean(0), {over}, op="mean")',
            )
            return


def _warn(name: str, what: str) -> None:
    warnings.warn(f"{name}: {what}", StrategyWarning, stacklevel=lines_up())
