"""What is a row of the table of silent failures? A habit of users, and the answer it must get.

A row is a function. It types what a user would type, in the order a user would type it, and asserts
what the user relies on. `error` names the class that must be raised, with `says` in its text;
`warns` names the warning that must appear once, with `says` in its text. With neither, the function
itself asserts the right result, held against a peer or a number worked out by hand.
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
    """Adds the function below it to the table, under `name`: what the user does."""

    def add(run: Callable[[], object]) -> Callable[[], object]:
        ROWS.append(Row(name, run, error, warns, says))
        return run

    return add
