"""`Ahead`: the next items of an iterator, made by a thread before they are requested.

>>> with Ahead(iter(range(3)), depth=2) as made:
...     print(list(made))
[0, 1, 2]
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

from ..core.errors import BackendError

T = TypeVar("T")
_LOOK_S = 1.0
"""The interval at which a waiting consumer checks that the thread is alive."""


class _Shared(Generic[T]):
    """The state that the two threads share. The worker holds this and not `Ahead`, so that `Ahead`
    can be garbage collected."""

    def __init__(self, depth: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[T] = deque()
        self.depth = depth
        self.closed = False
        self.ended = False
        self.error: BaseException | None = None

    def room(self) -> bool:
        """Waits until an item may be made; returns False after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.ready) < self.depth)
            return not self.closed

    def put(self, item: T) -> None:
        with self.changed:
            if not self.closed:
                self.ready.append(item)
                self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()


def _work(items: Iterator[T], shared: _Shared[T]) -> None:
    try:
        while shared.room():
            shared.put(next(items))
        shared.end(None)
    except StopIteration:
        shared.end(None)
    except BaseException as error:  # raised again when the item is requested
        shared.end(error)


_OPEN: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends the threads before the interpreter does, which would abort those in C++ code."""
    for each in list(_OPEN):
        each.close()


class Ahead(Generic[T]):
    """The items of an iterator, at most `depth` (at least 1) of them made before they are
    requested.

    An error of the iterator is raised in the consumer, after the items before it. `close` ends the
    thread; so does dropping the last reference.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._shared: _Shared[T] = _Shared(depth)
        self._thread = threading.Thread(
            target=_work, args=(items, self._shared), name="tessera-data", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._shared.close)
        _OPEN.add(self)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            while not (shared.ready or shared.ended or shared.closed):
                # A forked process has the object but not the thread.
                if not shared.changed.wait(_LOOK_S) and not self._thread.is_alive():
                    raise BackendError(
                        "dataloader: the thread that makes batches is gone",
                        fix="make the loader in the process that uses it, or say prefetch=0",
                    )
            if shared.ready:
                item = shared.ready.popleft()
                shared.changed.notify_all()
                return item
        if shared.error is not None:
            raise shared.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread, after the item that it is making."""
        self._shared.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
