"""The table of silent failures: a row is a user's habit with the result that it must have.

A row's function does what a user would write, in that order, and asserts the expected result
against a peer or a number worked out by hand. `error` is the class that must be raised, with `says`
in its text; `warns` is the warning that must appear once, with `says` in its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    name: str
    run: Callable[[], object]
    error: type[Exception] | None
    warns: type[Warning] | None
    says: str


ROWS: list[Row] = []


def row(
    name: str,
    *,
    error: type[Exception] | None = None,
    warns: type[Warning] | None = None,
    says: str = "",
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Adds the decorated function to the table as `name`, the user's habit."""

    def add(run: Callable[[], object]) -> Callable[[], object]:
        ROWS.append(Row(name, run, error, warns, says))
        return run

    return add
