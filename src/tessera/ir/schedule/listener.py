"""Watchers of a run: the stepped executor reports each step to them, and a profile is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from .schedule import Schedule


class Watcher(Protocol):
    """Receives a call for every step when it is done. Times are `time.perf_counter`, in seconds."""

    def step(
        self,
        schedule: Schedule,
        index: int,
        start_s: float,
        launched_s: float,
        ready_s: dict[int, float],
    ) -> None:
        """`launched_s` is when the launch returned to Python; `ready_s` is when each device had its
        results."""

    def begin(self, schedule: Schedule) -> None:
        """Called when a run of `schedule` begins."""


_watcher: ContextVar[Watcher | None] = ContextVar("tessera_watcher", default=None)


def watcher() -> Watcher | None:
    return _watcher.get()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
