"""Locks of threads: one recording at a time, one donation of weights, one launch.

During a recording, attributes of modules hold its tensors, and weights show the types of their new
values. A thread that would use them waits for its end. A thread does not hold `RECORDING_LOCK`
while its program runs: host callbacks of that program may need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

RECORDING_LOCK: Any = RLock()
DONATION_LOCK: Any = RLock()
"""Held by a call that donates weights, until their new values are stored; a thread that finds a
donated weight waits for it. Acquired before `RECORDING_LOCK`."""


LAUNCH = RLock()
"""Held by a launch or a read of an array. On several devices the engine would read an array that
another thread donates meanwhile, and end the process."""
LONGEST_S = 60.0  # limit of the wait of `put_back`


@contextmanager
def put_back() -> Iterator[None]:
    """A context that begins once other threads' calls that have donated weights have stored new
    values, so a caller that found a weight donated can read it again. The wait is limited to
    LONGEST_S: a program may wait for this thread's host callback."""
    held = DONATION_LOCK.acquire(timeout=LONGEST_S)
    try:
        yield
    finally:
        if held:
            DONATION_LOCK.release()


@contextmanager
def recording_lock_released() -> Iterator[None]:
    """A context in which other threads may hold this thread's `RECORDING_LOCK`."""
    # releases all levels of a lock that was acquired repeatedly
    held = RECORDING_LOCK._release_save()
    try:
        yield
    finally:
        RECORDING_LOCK._acquire_restore(held)
