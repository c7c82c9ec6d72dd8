"""A counter of the engine's compilations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jax import monitoring


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Yields a list to which the end of each compilation inside is added, in seconds of
    `time.perf_counter`."""
    ended_s: list[float] = []

    def seen(event: str, duration_s: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            ended_s.append(time.perf_counter())

    monitoring.register_event_duration_secs_listener(seen)
    try:
        yield ended_s
    finally:
        monitoring.unregister_event_duration_listener(seen)
