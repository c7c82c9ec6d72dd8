"""What do the processes of a run tell each other outside of a collective? Values under names, in
the store that the engine's service keeps for them. Who waits for a value of a rank that has ended
its program stops waiting: it will not come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ..core.errors import BackendError
from .jax_private import place, service

LOOK_S = 1.0  # between two looks at who has ended
_ENDED = "tessera/ended/"


def wait_for(key: str, limit_s: float, rank: int | None = None) -> bytes | None:
    """The value under `key`, which `rank` sets; None if there is none within `limit_s` seconds, or
    if that rank has ended without it. Raises RuntimeError where the service is gone."""
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
        over = rank is not None and rank in ended([rank])  # a last look: it may have set it before


def leave() -> None:
    """Tells the others that the program of this process has ended."""
    with contextlib.suppress(RuntimeError):  # where the service is gone, so is whoever could ask
        if service() is not None:
            service().key_value_set(f"{_ENDED}{place()[0]}", "1", True)


def ended(ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` whose programs have ended."""
    if service() is None:
        return []
    found: list[tuple[str, str]] = []
    with contextlib.suppress(RuntimeError):
        found = service().key_value_dir_get(_ENDED)
    gone = {int(key.rpartition("/")[2]) for key, _ in found}
    return [r for r in ranks if r in gone]


def absent(rank: int, limit_s: float) -> str:
    """Why `wait_for` gave nothing of that rank, in words."""
    return "has ended its program" if ended([rank]) else f"did not come within {limit_s:g} s"


def unreachable(what: str, error: RuntimeError) -> BackendError:
    """The error that the processes cannot compare `what` they have: the service is gone."""
    return BackendError(
        f"{what}: the processes cannot compare what they have",
        service=str(error).splitlines()[0],
        fix="the coordinator (rank 0) has ended or cannot be reached",
    )
