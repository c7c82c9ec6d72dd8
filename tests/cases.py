"""Which of many cases run without --long? Of a grid, each row once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

LONG = pytest.mark.long


def short(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Every value as a parameter of a test, of which `kept` run by default."""
    found = [pytest.param(v, marks=[LONG] * (v not in kept), id=str(v)) for v in values]
    assert len(found) - sum(bool(p.marks) for p in found) == len(kept), "a value is not there"
    return found


def grid(
    rows: Iterable[Any], columns: Sequence[Any], name: Callable[[Any], str] = str
) -> list[Any]:
    """Every row with every column, as parameters of a test. A row runs by default with one column
    alone, the next row with the next: so each value of both is there."""
    return [
        pytest.param(
            row, column, id=f"{name(row)}-{name(column)}", marks=[LONG] * (i % len(columns) != j)
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
