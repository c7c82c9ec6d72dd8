"""Signals that wait for the end of a compiled call, such as a Ctrl-C.

A `whole` call is never interrupted: weights and moments are those of before it or those of after
it. A handler of a signal that is a Python function runs DELAY_S after the call has ended, or later
as the next compiled function is called, so the call's result is in the caller's variable by then;
only a result that is nothing but an argument of that next call, `g(f(x))`, is lost. A second Ctrl-C
arrives at once. Python runs handlers in the main thread alone; calls in others have no part in it.
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
SAID_S = 1.0
"""After so long the first Ctrl-C is answered with a line that says what it waits for."""
CALLS = 4
"""So many calls in a row that are of no compiled function let a signal wait."""
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_MAIN = threading.main_thread().ident

_depth = 0  # of whole calls, in the main thread
_ended_s = -DELAY_S  # when the last one ended
_waiting: dict[int, float] = {}  # signal -> when it came
_calls = 0  # since then, and since a compiled function was called
_sent = False  # whether the next signal is one that waits, sent again


class Handler:
    """A handler that hands on to `former`, now or later."""

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


_QUIET = {Handler, Immediate, int, signal.Handlers, type(None)}  # nothing to put a handler before


def whole(fn: F) -> F:
    """`fn`, within which no signal is handled by a Python function."""

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
    """Puts a `Handler` before the Python function that handles a signal now."""
    signal.signal(signum, Handler(getsignal(signum)))


def handle_waiting(compiled: bool = True) -> None:
    """Runs the handlers of signals that have waited for DELAY_S, as a call of a compiled function
    begins, or the last of CALLS of another kind."""
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
    """`fn`, part of a whole call, that calls a function of the user's which is only recorded:
    signals are handled there."""

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
    """Sends a signal that waits once more until it was handled; says what a Ctrl-C waits for."""
    global _sent
    came_s, said = _waiting.get(signum), False
    while came_s is not None and _waiting.get(signum) == came_s:
        time.sleep(DELAY_S)
        if not _depth and _waiting.get(signum) == came_s:
            _sent = True
            signal.pthread_kill(cast(int, _MAIN), signum)  # which ends a sleep, too
        elif signum == signal.SIGINT and not said and time.monotonic() - came_s > SAID_S:
            said = True
            print(
                "Ctrl-C: this call goes on to its end, so that nothing is half changed; press it"
                " again to stop now",
                file=sys.stderr,
            )
