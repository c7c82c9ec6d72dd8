"""Facts about the engine for `tessera doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from ...core.errors import BackendError
from ...core.flags import is_exact
from ..devices import need_plain, start


def engine_facts() -> dict[str, Any]:
    """Returns the backend, its devices, and its guarantees. Joins the run and starts the engine."""
    start()
    local = jax.local_devices()
    platform = jax.default_backend()
    return {
        "platform": platform,
        "kind": local[0].device_kind,
        "local": len(local),
        "devices": jax.device_count(),
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "exact": platform != "cpu" or is_exact(),
        "invariant": _keeps_bits(platform),
    }


def _keeps_bits(platform: str) -> bool:
    """Returns whether results here can be bitwise equal on every mesh."""
    if platform != "cpu":
        return False
    try:
        need_plain()
    except BackendError:
        return False
    return True


def took_s(run: Callable[[], Any], times: int) -> float:
    """Returns the mean seconds of `times` runs in a row, until the last result is ready. `run`
    returns a tensor."""
    jax.block_until_ready(run().stored)
    begin = time.perf_counter()
    for _ in range(times):
        last = run()
    jax.block_until_ready(last.stored)
    return (time.perf_counter() - begin) / times
