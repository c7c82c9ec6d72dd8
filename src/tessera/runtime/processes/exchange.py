"""Exchange of host values between processes: gather, barrier, values of the first process.

>>> gather("greeting", {"rank": 0}, 10.0)
[{'rank': 0}]
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from ...core.errors import BackendError
from ...core.limits import limits
from ...core.wording import nth
from ..jax_private import service
from .flight import flight
from .join import joined
from .program_consistency import comparison, gathered
from .store import absent, wait_for

_barriers = itertools.count(1)


def gather(name: str, value: Any, limit_s: float) -> list[Any]:
    """Returns `value` (of JSON) of each process, in the order of their ranks. Each process calls
    it, once for each `name`. Raises BackendError if one does not come within `limit_s` seconds."""
    (rank, count), client = joined(), service()
    if count == 1:
        return [json.loads(json.dumps(value))]
    values: list[Any] = []
    key = f"tessera/gather/{name}"
    try:
        client.key_value_set_bytes(f"{key}/{rank}", json.dumps(value).encode())
        for other in range(count):
            text = wait_for(f"{key}/{other}", limit_s, other)
            if text is None:
                raise _silent("gather", other, limit_s)
            values.append(json.loads(text))
        if client.key_value_increment(f"{key}/read", 1) == count:
            client.key_value_delete(key)
    except RuntimeError as error:
        raise _no_service("gather", error) from None
    return values


def _silent(operation: str, rank: int, limit_s: float) -> BackendError:
    fix = "see what that rank did instead, and whether it reaches the coordinator"
    return BackendError(f"{operation}: rank {rank} {absent(rank, limit_s)}", fix=fix)


def _no_service(operation: str, error: RuntimeError) -> BackendError:
    rows = [("service", str(error).splitlines()[0])]
    fix = "the coordinator (rank 0) has ended or cannot be reached"
    return BackendError(f"{operation}: the processes' store gives no answer", rows=rows, fix=fix)


def together(name: str, limit_s: float) -> None:
    """Returns at about the same time in all processes. Raises BackendError if one does not come
    within `limit_s` seconds."""
    if joined()[1] == 1:
        return
    try:
        service().wait_at_barrier(f"tessera/together/{name}", int(limit_s * 1000))
    except RuntimeError as error:
        raise BackendError(
            f"together: not all ranks came within {limit_s:g} s",
            service=str(error).splitlines()[0],
            fix="see whether all ranks run, and reach the coordinator",
        ) from None


def barrier() -> None:
    """Returns when all processes have come to their barrier of this number. Raises BackendError
    with the missing ranks after the time limit of collectives."""
    rank, count = joined()
    if count == 1:
        return
    k, limit_s, ranks = next(_barriers), limits().collective_s, tuple(range(count))
    with comparison("barrier", f"the {nth(k)} barrier", ranks) as record:
        service().key_value_set_bytes(f"tessera/barrier/{k}/{rank}", b"here")
        if gathered(f"tessera/barrier/{k}/", ranks, limit_s) is None:
            raise flight().late(record, limit_s)
        # All have read the last barrier's key, or they would not be at this one.
        service().key_value_delete(f"tessera/barrier/{k - 1}/{rank}")


# -- messages of the first process -----------------------------------------------------------------
# last messages of the first process that slower processes may still have to read
_KEPT_MESSAGES = 1000


def from_first(name: str, number: int, value: Any, limit_s: float, first: int = 0) -> Any:
    """Returns message `number` (1, 2, ...) of the process `first`: that process does not wait, the
    others wait for it. Raises BackendError after `limit_s` seconds."""
    (rank, count), client = joined(), service()
    key = f"tessera/word/{name}/"
    if count == 1:
        return value
    if rank == first:
        client.key_value_set_bytes(f"{key}{number}", json.dumps(value).encode())
        if number > _KEPT_MESSAGES:
            client.key_value_delete(f"{key}{number - _KEPT_MESSAGES}")
        return value
    try:
        text = wait_for(key + str(number), limit_s, first)
    except RuntimeError as error:
        raise _no_service("from_first", error) from None
    if text is None:
        raise _silent("from_first", first, limit_s)
    return json.loads(text)


def asked(name: str, value: Any = None) -> Any:
    """Returns the request stored under `name` by any process, None without one. With `value`,
    stores it."""
    if joined()[1] == 1:
        return value
    key = f"tessera/asked/{name}"
    if value is not None:
        service().key_value_set_bytes(key, json.dumps(value).encode(), True)
        return value
    try:
        return json.loads(service().key_value_try_get_bytes(key))
    except RuntimeError:  # the key does not exist
        return None
