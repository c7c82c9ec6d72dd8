"""The key-value store of a run's processes, kept by the engine's service.

A wait for a rank that has ended its program ends, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ...core.errors import BackendError
from ..jax_private import place, service

LOOK_S = 1.0  # between two checks for ended ranks
_ENDED = "tessera/ended/"


def wait_for(key: str, limit_s: float, rank: int | None = None) -> bytes | None:
    """Returns the value under `key`, which `rank` sets; None if there is none within `limit_s`
    seconds, or if that rank has ended without it. Raises RuntimeError if the service has ended."""
    end_s = time.monotonic() + limit_s
    over = False
    while True:
        left_s = end_s - time.monotonic()
        try:
            wait_ms = max(int(min(left_s, LOOK_S) * 1000), 1)
            return bytes(service().blocking_key_value_get_bytes(key, wait_ms))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if over or left_s <= LOOK_S:
            return None
        # One more try: the rank may have set the value just before it ended.
        over = rank is not None and rank in ended([rank])


def leave() -> None:
    """Tells the others that the program of this process has ended."""
    with contextlib.suppress(RuntimeError):  # the service has ended: no process reads this
        if service() is not None:
            service().key_value_set(f"{_ENDED}{place()[0]}", "1", True)


def ended(ranks: Sequence[int]) -> list[int]:
    """Returns those of `ranks` whose programs have ended."""
    if service() is None:
        return []
    found: list[tuple[str, str]] = []
    with contextlib.suppress(RuntimeError):
        found = service().key_value_dir_get(_ENDED)
    gone = {int(key.rpartition("/")[2]) for key, _ in found}
    return [r for r in ranks if r in gone]


def absent(rank: int, limit_s: float) -> str:
    """Returns the reason why `wait_for` returned None for that rank."""
    return "has ended its program" if ended([rank]) else f"did not come within {limit_s:g} s"


def unreachable(operation: str, error: RuntimeError) -> BackendError:
    """Returns the error for a comparison of `operation` without the service."""
    return BackendError(
        f"{operation}: the processes cannot compare what they have",
        service=str(error).splitlines()[0],
        fix="the coordinator (rank 0) has ended or cannot be reached",
    )
