"""Parametrization helpers: the cases that run without --long, alone or as a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

LONG = pytest.mark.long


def short(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns every value as a pytest parameter. Those not in `kept` are marked `long`."""
    found = [pytest.param(v, marks=[LONG] * (v not in kept), id=str(v)) for v in values]
    assert len(found) - sum(bool(p.marks) for p in found) == len(kept), "a value is not there"
    return found


def grid(
    rows: Iterable[Any], columns: Sequence[Any], name: Callable[[Any], str] = str
) -> list[Any]:
    """Returns every (row, column) pair as a pytest parameter. By default row i runs with column i
    modulo the number of columns alone, so that each row and each column runs once at least."""
    return [
        pytest.param(
            row, column, id=f"{name(row)}-{name(column)}", marks=[LONG] * (i % len(columns) != j)
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
