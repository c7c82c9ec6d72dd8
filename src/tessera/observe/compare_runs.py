"""Comparison of two training runs: the first step at which a metric differs.

>>> a = [{"step": 0, "loss": 3.0}, {"step": 1, "loss": 2.0}]
>>> b = [{"step": 0, "loss": 3.0}, {"step": 1, "loss": 2.5}]
>>> print(compare_runs(a, b, 1e-4, 1e-6, False, SPEEDS))
they differ first at step 1, in loss: 2.0 and 2.5
  2 steps compared to 0.0001 of the value; 0 only in a, 0 only in b
<BLANKLINE>
metric  steps  differ  first  absolute  relative
loss        2       1      1       0.5       0.2
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checks import unfit
from ..core.wording import columns
from .instrument import tidy
from .metrics_file import Row, Value, read_metrics

SPEEDS = ("step_s", "tokens_per_s", "mfu")
"""Metrics of speed, which differ between any two runs."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric over the steps that both runs have."""

    name: str
    steps: int
    differ: int
    first: int | None
    values: tuple[Value, Value]
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Every metric; `first` is the one that differs earliest. `str()` is the report."""

    metrics: tuple[Metric, ...]
    steps: int
    only_a: int
    only_b: int
    how: str

    @property
    def first(self) -> Metric | None:
        bad = [m for m in self.metrics if m.first is not None]
        return min(bad, key=lambda m: m.first or 0, default=None)

    @property
    def same(self) -> bool:
        """Returns whether no metric differs at any step, and there are common steps."""
        return self.first is None and self.steps > 0

    def __str__(self) -> str:
        m = self.first
        head = "the same" if self.steps else "they have no step in common"
        if m is not None:
            head = (
                f"they differ first at step {m.first}, in {m.name}: {m.values[0]} and {m.values[1]}"
            )
        counts = f"  {self.steps} steps compared {self.how}"
        rows = [
            [x.name, str(x.steps), str(x.differ), "" if x.first is None else str(x.first),
             tidy(x.absolute), tidy(x.relative)]
            for x in self.metrics
        ]  # fmt: skip
        titles = ("metric", "steps", "differ", "first", "absolute", "relative")
        alone = f"; {self.only_a} only in a, {self.only_b} only in b"
        return "\n".join([head, counts + alone, "", *columns([titles, *rows], 1)])

    __repr__ = __str__


def is_run(x: object) -> bool:
    """Returns whether `x` is a folder, a file, a list of rows, or an object with rows."""
    if isinstance(x, (str, Path)) or hasattr(x, "rows"):
        return True
    return isinstance(x, list) and bool(x) and all(isinstance(r, Mapping) for r in x)


def _rows(x: Any) -> dict[int, Row]:
    """The rows of a run by step: from its folder, its metrics file, an object with `rows()`, or a
    list of rows."""
    if isinstance(x, (str, Path)):
        path = Path(x)
        x = read_metrics(path / "metrics.jsonl" if path.is_dir() else path)
    elif hasattr(x, "rows"):
        x = x.rows()
    rows = {}
    for row in x:
        step = row.get("step") if isinstance(row, Mapping) else None
        if not isinstance(step, int):
            fix = 'each row is a dict with a whole number under "step"'
            raise unfit("compare", "a row of a run", row, fix)
        rows[step] = dict(row)
    return rows


def compare_runs(
    a: Any, b: Any, rtol: float, atol: float, bitwise: bool, ignore: Sequence[str]
) -> RunComparison:
    """The comparison of the metrics of two runs over their common steps."""
    left, right = _rows(a), _rows(b)
    both = sorted(left.keys() & right.keys())
    names = dict.fromkeys(k for s in both for k in (*left[s], *right[s]))
    metrics = []
    for name in names:
        if name == "step" or name in ignore:
            continue
        pairs = [(s, left[s].get(name), right[s].get(name)) for s in both]
        pairs = [p for p in pairs if p[1] is not None or p[2] is not None]
        gaps = [_gap(x, y) for _, x, y in pairs]
        bad = [
            (s, x, y)
            for (s, x, y), (far, scale) in zip(pairs, gaps, strict=True)
            if far > (0.0 if bitwise else atol + rtol * scale)
        ]
        far = max((g for g, _ in gaps), default=0.0)
        part = max((g / scale if scale else g for g, scale in gaps), default=0.0)
        first = bad[0] if bad else (None, None, None)
        metrics.append(Metric(name, len(pairs), len(bad), first[0], first[1:], far, part))
    how = "exactly" if bitwise else f"to {tidy(rtol)} of the value"
    return RunComparison(
        tuple(metrics), len(both), len(left) - len(both), len(right) - len(both), how
    )


def _gap(x: Value, y: Value) -> tuple[float, float]:
    """(absolute difference, larger absolute value); infinite if one of the two is not a number."""
    if not isinstance(x, (int, float)) or not isinstance(y, (int, float)):
        return (0.0 if x == y else math.inf), 0.0
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0, 0.0
    far = abs(x - y)
    return (math.inf, 0.0) if not math.isfinite(far) else (far, max(abs(x), abs(y)))
