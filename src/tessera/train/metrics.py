"""Metrics of a run: one line of JSON per step, on disk before the next step starts.

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
import os
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..core.checks import file_access, path_of, unfit
from ..core.errors import UsageError
from ..core.messages import tell as log
from ..core.public import checked
from ..observe.metrics_file import Row, Value, column, read_metrics
from .rows import plain

__all__ = ["MetricsWriter", "Row", "Value", "column", "read_metrics"]


@checked
class MetricsWriter:
    """A tracker that writes rows to `path`; a context manager.

    `append` continues an existing file. Rows that cannot be written wait for the next one, and
    `tell` receives one line about it, once; a deleted file is written again. Raises UsageError if
    the file cannot be created.
    """

    __slots__ = ("_file", "_late", "path", "tell")

    def __init__(
        self, path: str | Path, *, append: bool = False, tell: Callable[[str], None] | None = None
    ) -> None:
        self.path = path_of("metrics", "the path", path)
        self.tell: Callable[[str], None] | None = tell or log
        with file_access("metrics", self.path, "written", "name a file in a folder of your own"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that it is known how much of a row was written.
            self._file = open(self.path, "a+b" if append else "w+b", buffering=0)  # noqa: SIM115
        self._late = b""

    def config(self, settings: Mapping[str, Any]) -> None:
        """No-op: the settings of a run are in a separate file."""

    def log(self, step: int, values: Mapping[str, Value | np.generic]) -> None:
        """Writes one row. Raises UsageError for a value that no row can hold."""
        if self._file.closed:
            fix = "write it inside of `with run:`, or before close()"
            raise UsageError(f"metrics: the row of step {step} comes after the end", fix=fix)
        row = {"step": plain("metrics", "step", step)}
        for name, value in values.items():
            if name == "step":
                fix = "the number of the step comes first: log(step, values)"
                raise unfit("metrics", "'step' in a row", value, fix)
            row[name] = _finite(plain("metrics", name, value))
        self._late += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        """Writes pending rows. If the disk refuses, they stay pending until the next row; the user
        is told once."""
        try:
            if not self._is_same_file():
                content = self.content()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path, "w+b", buffering=0)  # noqa: SIM115
                self._file.close()
                self._file, self._late = file, content
            while self._late:
                self._late = self._late[self._file.write(self._late) or 0 :]
        except OSError as error:
            if self.tell is not None:
                self.tell(
                    f"metrics: {self.path} cannot be written: {error.strerror}; its rows are kept"
                    " and tried again"
                )
            self.tell = None  # once

    def _is_same_file(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def content(self) -> bytes:
        """All rows, including pending ones."""
        handle = self._file.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0) + self._late

    def cut(self, step: int) -> int:
        """Removes the rows from `step` on, which will be written again, and returns their number.
        Earlier rows stay on disk all the time."""
        content = self.content()
        rows = content.splitlines(keepends=True)
        kept = [row for row in rows if _step(row) < step]
        before = sum(map(len, takewhile(lambda row: _step(row) < step, rows)))
        on_disk = min(before, len(content) - len(self._late))
        self._late = b"".join(kept)[on_disk:]
        self._file.truncate(on_disk)
        self._file.seek(on_disk)
        self._write()
        return sum(step <= _step(row) < math.inf for row in rows)

    def write(self, step: int, **values: Value | np.generic) -> None:
        """`log` with the values as keywords."""
        self.log(step, values)

    def close(self) -> None:
        if not self._file.closed:
            self._write()
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


def _step(row: bytes) -> float:
    """The step of a row; infinity for an incomplete row, which is removed."""
    if not row.endswith(b"\n"):
        return math.inf
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
