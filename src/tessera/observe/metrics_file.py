"""Reading of a run's metrics file.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as out:
...     path = Path(out, "metrics.jsonl")
...     _ = path.write_text('{"step": 0, "loss": 6.93}\\n{"step": 1, "loss": "inf"}\\n{"st')
...     read_metrics(path)
[{'step': 0, 'loss': 6.93}, {'step': 1, 'loss': inf}]
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypeAlias

from ..core.checks import file_access
from ..core.errors import UsageError

Value: TypeAlias = int | float | str | bool | None
Row: TypeAlias = dict[str, Value]

# JSON has no such numbers, but the rows of a diverged run need them.
NOT_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_metrics(path: str | Path) -> list[Row]:
    """The rows of a file, in order. An incomplete last line, after a crash, is left out.

    Raises UsageError if the file does not exist or a line of it is not a row.
    """
    rows: list[Row] = []
    fix = "name a metrics.jsonl of a run"
    try:
        with file_access("metrics", path, "read", fix), open(path, encoding="utf-8") as file:
            for line in file:
                if not line.endswith("\n"):
                    break
                rows.append({name: _number(value) for name, value in json.loads(line).items()})
    except (ValueError, AttributeError):
        raise UsageError(
            f"metrics: line {len(rows) + 1} of {str(path)!r} is no row",
            fix="each line is a JSON object, as a run writes it",
        ) from None
    return rows


def column(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows that have a number under `name`.

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


def _number(value: Value) -> Value:
    return NOT_JSON.get(value, value) if isinstance(value, str) else value
