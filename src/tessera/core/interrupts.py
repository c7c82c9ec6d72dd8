"""Deferral of signals, such as a Ctrl-C, to the end of a compiled call.

A `whole` call is never interrupted: weights and moments are those from before it or from after it.
A Python signal handler runs DELAY_S after the call has ended, or later, when the next compiled
function is called. By then the call's result is in the caller's variable; only a result that is
directly an argument of the next call, `g(f(x))`, is lost. A second Ctrl-C is handled at once.
Python runs handlers in the main thread alone; calls in other threads are not affected.
"""

from __future__ import annotations

import _thread
import functools
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` takes 1 µs
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

from .tracebacks import boundary

F = TypeVar("F", bound=Callable[..., Any])

DELAY_S = 0.05
NOTICE_S = 1.0
"""After this time a Ctrl-C that still waits is answered with a line."""
CALLS = 4
"""Number of calls in a row, other than of compiled functions, that defer a signal."""
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_MAIN = threading.main_thread().ident

_depth = 0  # nesting of whole calls in the main thread
_ended_s = -DELAY_S  # end of the last whole call
_waiting: dict[int, float] = {}  # deferred signal -> time of its arrival
_calls = 0  # calls since the signal, and since the last call of a compiled function
_sent = False  # the next signal is a deferred one, sent again


class Handler:
    """A handler that calls `former`, now or later."""

    def __init__(self, former: Callable[[int, FrameType | None], Any]) -> None:
        self.former = former

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        global _calls, _sent
        again, _sent = _sent, False
        busy = _depth > 0 or time.monotonic() - _ended_s < DELAY_S
        if signum in _waiting and not again and signum == signal.SIGINT:
            busy = False  # the second press
        if busy:
            if signum not in _waiting:
                _calls = 0
                _waiting[signum] = time.monotonic()
                _thread.start_new_thread(_send_again, (signum,))
            return
        _waiting.pop(signum, None)
        self.former(signum, frame)


class Immediate:
    """A handler that is called at once, as it changes nothing that a compiled call uses."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.handler(signum, frame)


_QUIET = {Handler, Immediate, int, signal.Handlers, type(None)}  # types that need no wrapping


def whole(fn: F) -> F:
    """Returns `fn` with Python signal handlers deferred during its calls."""

    @boundary
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _depth, _ended_s
        if threading.get_ident() != _MAIN:
            return fn(*args, **kwargs)
        for signum in SIGNALS:  # handlers may change at any time
            if getsignal(signum).__class__ not in _QUIET:
                _install(signum)
        if _waiting and not _depth:
            handle_waiting(compiled=False)
        _depth += 1
        try:
            return fn(*args, **kwargs)
        finally:
            _ended_s = time.monotonic()
            _depth -= 1

    return cast(F, run)


def _install(signum: int) -> None:
    """Wraps the current Python handler of a signal in a `Handler`."""
    signal.signal(signum, Handler(getsignal(signum)))


def handle_waiting(compiled: bool = True) -> None:
    """Runs the handlers of signals that have waited for DELAY_S. Called when a compiled function is
    called; other calls (`compiled=False`) run them only at the last of CALLS in a row."""
    global _calls
    if not _waiting or _depth > 1 or threading.get_ident() != _MAIN:
        return
    _calls = 0 if compiled else _calls + 1
    if not compiled and _calls < CALLS:
        return
    due = [s for s, came_s in _waiting.items() if time.monotonic() - came_s > DELAY_S]
    for signum in due:
        del _waiting[signum]
        handler = getsignal(signum)
        if callable(handler):
            getattr(handler, "former", handler)(signum, None)


def opens(fn: F) -> F:
    """Returns `fn`, a part of a whole call, with signals handled during it: it calls a user's
    function that is only recorded."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _depth
        if threading.get_ident() != _MAIN:
            return fn(*args, **kwargs)
        before, _depth = _depth, 0
        try:
            return fn(*args, **kwargs)
        finally:
            _depth = before

    return cast(F, run)


def _send_again(signum: int) -> None:
    """Sends a deferred signal again until it is handled. Prints a line if a Ctrl-C waits for
    long."""
    global _sent
    came_s, said = _waiting.get(signum), False
    while came_s is not None and _waiting.get(signum) == came_s:
        time.sleep(DELAY_S)
        if not _depth and _waiting.get(signum) == came_s:
            _sent = True
            signal.pthread_kill(cast(int, _MAIN), signum)  # ends a sleep of the main thread, too
        elif signum == signal.SIGINT and not said and time.monotonic() - came_s > NOTICE_S:
            said = True
            print(
                "Ctrl-C: this call goes on to its end, so that nothing is half changed; press it"
                " again to stop now",
                file=sys.stderr,
            )
