"""What happened at each step? A line of JSON a step, on disk before the next step starts.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as out:
...     with MetricsWriter(Path(out, "metrics.jsonl")) as metrics:
...         metrics.write(0, loss=6.93, tokens_per_s=1200)
...         metrics.write(1, loss=float("inf"), phase="warm up")
...     read_metrics(Path(out, "metrics.jsonl"))
[{'step': 0, 'loss': 6.93, 'tokens_per_s': 1200},
 {'step': 1, 'loss': inf, 'phase': 'warm up'}]
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

Value: TypeAlias = int | float | str | bool | None
Row: TypeAlias = dict[str, Value]

# JSON has no such numbers, and a run that diverges is one whose rows are read with care.
_NOT_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsWriter:
    """Writes rows to `path`; a context manager. `append` goes on with a file that exists."""

    __slots__ = ("_file", "path")

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115

    def write(self, step: int, **values: Value | np.generic) -> None:
        """Writes one row and flushes it."""
        row = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Row]:
    """The rows of a file, in order. A last line that was cut off by a crash is left out."""
    rows: list[Row] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            row: Row = json.loads(line)
            rows.append({name: _number(value) for name, value in row.items()})
    return rows


def column(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have a number under `name`.

    >>> column([{"step": 0, "loss": 3.0}, {"step": 1}, {"step": 2, "loss": 2.0}], "loss")
    ([0, 2], [3.0, 2.0])
    """
    steps: list[int] = []
    values: list[float] = []
    for row in rows:
        step, value = row["step"], row.get(name)
        if isinstance(step, int) and isinstance(value, int | float):
            steps.append(step)
            values.append(float(value))
    return steps, values


def _plain(value: Value | np.generic) -> Value:
    plain: Any = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    found: Value = plain
    return found


def _number(value: Value) -> Value:
    return _NOT_JSON.get(value, value) if isinstance(value, str) else value
