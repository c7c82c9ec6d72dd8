"""Who looks on while the steps of a schedule run? The stepped executor tells; a profile listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from .schedule import Schedule


class Watcher(Protocol):
    """Told of every step, when it is done. Times are of `time.perf_counter`, in seconds."""

    def step(
        self,
        schedule: Schedule,
        index: int,
        start_s: float,
        launched_s: float,
        ready_s: dict[int, float],
    ) -> None:
        """`launched_s` says when Python could go on, `ready_s` per device when its results were
        there."""

    def begin(self, schedule: Schedule) -> None:
        """A run of `schedule` begins."""


_watcher: ContextVar[Watcher | None] = ContextVar("tessera_watcher", default=None)


def watcher() -> Watcher | None:
    return _watcher.get()


@contextmanager
def watching(who: Watcher) -> Iterator[None]:
    token = _watcher.set(who)
    try:
        yield
    finally:
        _watcher.reset(token)
