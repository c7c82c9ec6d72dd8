"""Which thread may record a function, or take and change what is in weights? One at a time.

While a function is recorded, attributes of modules hold its tensors, and weights show the types of
what it writes. A thread that would use them waits for its end. No thread has the turn while a
program of its own runs: what that calls on the host may want it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

TURN: Any = RLock()
GIVING: Any = RLock()
"""Is held by a call that gives up what it takes of weights, until new values are there; so whoever
found them given up waits for it. It is taken before the turn."""


LAUNCH = RLock()
"""Over several devices the engine reads what another thread gives up meanwhile, and the process
ends: so one launch, or one look at an array, at a time."""
LONGEST_S = 60.0  # that `put_back` waits for the other thread


@contextmanager
def put_back() -> Iterator[None]:
    """Inside, what another thread had given up of weights is there again, so who found nothing
    there looks once more. The wait has an end: a program may call on the host who waits for it."""
    held = GIVING.acquire(timeout=LONGEST_S)
    try:
        yield
    finally:
        if held:
            GIVING.release()


@contextmanager
def given_up() -> Iterator[None]:
    """Inside, others may have the turn of this thread."""
    held = TURN._release_save()  # however often it was taken
    try:
        yield
    finally:
        TURN._acquire_restore(held)
