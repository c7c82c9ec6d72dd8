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
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..observe.rows import Row, Value, column, read_metrics

__all__ = ["MetricsWriter", "Row", "Value", "column", "read_metrics"]


class MetricsWriter:
    """Writes rows to `path`: a tracker, and a context manager. `append` goes on with a file that
    exists."""

    __slots__ = ("_file", "path")

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115

    def config(self, settings: Mapping[str, Any]) -> None:
        """Writes nothing: the settings of a run lie in a file beside this one."""

    def log(self, step: int, values: Mapping[str, Value | np.generic]) -> None:
        """Writes one row and flushes it."""
        row = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def write(self, step: int, **values: Value | np.generic) -> None:
        """`log` with the values as keywords."""
        self.log(step, values)

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


def _plain(value: Value | np.generic) -> Value:
    plain: Any = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    found: Value = plain
    return found
