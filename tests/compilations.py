"""When does the engine compile? For tests of what is compiled once, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jax import monitoring


@contextmanager
def compilations() -> Iterator[list[float]]:
    """When each compilation inside ended, in seconds of `time.perf_counter`."""
    ended_s: list[float] = []

    def seen(event: str, duration_s: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            ended_s.append(time.perf_counter())

    monitoring.register_event_duration_secs_listener(seen)
    try:
        yield ended_s
    finally:
        monitoring.unregister_event_duration_listener(seen)
