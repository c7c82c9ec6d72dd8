"""Limits of this process: the time of a collective, and the number of recorded collectives.

They are not part of a program: from the moment they are set they hold for everything that runs, in
all threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from . import environment


@dataclass(frozen=True, slots=True)
class Limits:
    """`collective_s`: time limit of a collective in seconds. `flight_records`: number of last
    collectives that a rank records."""

    collective_s: float
    flight_records: int


_set: list[Limits] = []


@cache
def _by_switches() -> Limits:
    # At first use rather than at import: a program may still set its switches after `import`.
    return Limits(
        environment.number(environment.COLLECTIVE_LIMIT, 300),
        environment.number(environment.FLIGHT_RECORDS, 256),
    )


def limits() -> Limits:
    """Returns the limits in force."""
    return _set[0] if _set else _by_switches()


def set_limits(**changes: Any) -> None:
    """Changes the limits from here on."""
    _set[:] = [replace(limits(), **changes)]
