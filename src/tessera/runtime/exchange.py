"""What does each process say? Values that all processes put together.

>>> gather("greeting", {"rank": 0}, 10.0)
[{'rank': 0}]
"""

from __future__ import annotations

import json
from typing import Any

import jax

from ..core.errors import BackendError, fail
from .jax_private import service


def gather(name: str, value: Any, limit_s: float) -> list[Any]:
    """`value` (of JSON) of each process, in the order of their ranks; each process calls it, once
    with a `name`. Raises BackendError if one does not come within `limit_s` seconds."""
    count, client = jax.process_count(), service()
    if count == 1:
        return [json.loads(json.dumps(value))]
    found: list[Any] = []
    try:
        client.key_value_set_bytes(
            f"tessera/gather/{name}/{jax.process_index()}", json.dumps(value).encode()
        )
        for rank in range(count):
            key, limit_ms = f"tessera/gather/{name}/{rank}", int(limit_s * 1000)
            found.append(json.loads(client.blocking_key_value_get_bytes(key, limit_ms)))
    except RuntimeError as error:
        raise fail(
            BackendError,
            f"gather: rank {len(found)} said nothing within {limit_s:g} s",
            [("service", str(error).splitlines()[0])],
            fix="see whether that rank runs, and reaches the coordinator",
        ) from None
    return found


def together(name: str, limit_s: float) -> None:
    """Returns at about the same time in all processes. Raises BackendError as `gather` does."""
    if jax.process_count() == 1:
        return
    try:
        service().wait_at_barrier(f"tessera/together/{name}", int(limit_s * 1000))
    except RuntimeError as error:
        raise fail(
            BackendError,
            f"together: not all ranks came within {limit_s:g} s",
            [("service", str(error).splitlines()[0])],
            fix="see whether all ranks run, and reach the coordinator",
        ) from None
