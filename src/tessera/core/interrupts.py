"""Where does a Ctrl-C arrive? At the next statement of the user's own code, never within a step.

From a compiled function's call to the statement that keeps its result all is one piece: weights and
moments are those of before or those of after, and a result whose arguments gave up their memory is
not lost on its way to its variable. So `whole` functions are not interrupted; what comes meanwhile
is handed on when the statement that called them has ended. A second Ctrl-C arrives at once.

Only a handler that is a Python function is put off (Python's own raises KeyboardInterrupt), and
only in the main thread, which is where Python runs handlers.
"""

from __future__ import annotations

import _thread
import ast
import functools
import linecache
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` takes 1 µs
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from .errors import PACKAGE

F = TypeVar("F", bound=Callable[..., Any])
Former = Callable[[int, FrameType | None], Any]

RECENT_S = 0.05
"""A handler that runs so soon after a whole call may run before its result is in a variable."""
LOOK_S = 0.25
"""How often one looks whether an interrupt that was put off still waits for a whole call."""
_LIBRARIES = (PACKAGE, threading.__file__.rpartition("threading")[0])
_ENGINE = ("jax", "jaxlib", "numpy")

_ended_s = -RECENT_S  # when the last whole call ended
_waiting: _Waiting | None = None  # an interrupt that was put off
_open: set[CodeType] = set()


def whole(fn: F) -> F:
    """`fn`, within which no interrupt arrives: it does, once the statement that called it ended."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _ended_s
        if type(getsignal(signal.SIGINT)) is not Handler:
            _install()
        try:
            return fn(*args, **kwargs)
        finally:
            _ended_s = time.monotonic()
            if _waiting is not None and not _waiting.by_line:
                _waiting.ended()

    return cast(F, run)


def opens(fn: F) -> F:
    """`fn`, part of a whole call, that calls a function of the user's which is only recorded: an
    interrupt arrives at its statements."""
    _open.add(fn.__code__)
    return fn


_WHOLE = cast(Any, whole(lambda: None)).__code__  # what every wrapped function runs in


class Handler:
    """A handler of signals that hands on to `former`, now or later."""

    def __init__(self, former: Former) -> None:
        self.former = former

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        global _waiting
        if _waiting is not None:
            _waiting.end()
        elif frame is not None and (_held(frame) or time.monotonic() - _ended_s < RECENT_S):
            _waiting = _Waiting(self, signum, frame)
            return
        self.former(signum, frame)


def _install() -> None:
    """Puts a `Handler` before the one that is there now, which may change at any time."""
    former = getsignal(signal.SIGINT)
    if callable(former) and threading.get_ident() == threading.main_thread().ident:
        signal.signal(signal.SIGINT, Handler(former))


class _Waiting:
    """An interrupt that came within a whole call, on its way to the user's next statement."""

    def __init__(self, handler: Handler, signum: int, frame: FrameType) -> None:
        self.handler, self.signum = handler, signum
        self.frame: FrameType | None = None
        self.before: Any = None
        user = _user(frame)
        # One tracer at a time: a debugger's stays, and the interrupt arrives as the call ends.
        self.by_line = user is not None and sys.gettrace() is None
        if user is not None and self.by_line:
            self._go_to(user)
            sys.settrace(_no_more)
        # A thread of `threading` takes locks that the interrupted frame may hold.
        _thread.start_new_thread(self._watch, ())

    def _go_to(self, frame: FrameType) -> None:
        self._leave()
        self.frame, self.before = frame, frame.f_trace
        self.at, self.lines = frame.f_lasti, _statement(frame)
        frame.f_trace = self._trace

    def _leave(self) -> None:
        if self.frame is not None:
            self.frame.f_trace = self.before
        self.frame = None

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function of the user's frame: it delivers the interrupt at the next statement,
        or follows the return into the frame that called it."""
        if frame is not self.frame or _waiting is not self:
            return None
        if event == "line" and (frame.f_lasti < self.at or frame.f_lineno not in self.lines):
            self.deliver(frame)
        elif event == "return":
            outer = _user(frame.f_back) if frame.f_back is not None else None
            # What runs a cell or a script is no statement of the user's.
            if outer is None or frame.f_code.co_name == "<module>":
                self.deliver(frame)
            else:
                self._go_to(outer)
        return self._trace

    def ended(self) -> None:
        """A whole call ends: the interrupt arrives, where no statement can be waited for."""
        frame = sys._getframe(2)
        if not _held(frame):
            self.deliver(frame)

    def deliver(self, frame: FrameType) -> None:
        self.end()
        self.handler.former(self.signum, frame)

    def end(self) -> None:
        global _waiting
        _waiting = None
        self._leave()
        if self.by_line:
            sys.settrace(None)

    def _watch(self) -> None:
        """Says why nothing happens. Where the statement goes on in a function that it called since,
        the interrupt arrives there; where it goes on without a whole call, at once."""
        free = looks = 0
        while True:
            time.sleep(LOOK_S)
            if _waiting is not self:
                return
            main = threading.main_thread().ident or 0
            frame = sys._current_frames().get(main)
            looks, free = looks + 1, 0 if frame is None or _held(frame) else free + 1
            user = _user(frame)
            inside = any(f is self.frame for f in _outward(user))
            if self.by_line and user is not None and user is not self.frame and inside:
                self._go_to(user)
            del frame, user
            if free == 2:
                signal.pthread_kill(main, self.signum)  # which ends a sleep, too
                return
            if looks == 4:
                print(
                    "Ctrl-C: this call goes on to its end, so that nothing is half changed; press"
                    " it again to stop now",
                    file=sys.stderr,
                )


def _no_more(frame: FrameType, event: str, arg: Any) -> None:
    """Traces no frame that is new."""


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _held(frame: FrameType) -> bool:
    """Whether `frame` is within a whole call, and not within a function that one records."""
    for f in _outward(frame):
        if f.f_code is _WHOLE:
            return True
        if f.f_code in _open:
            return False
    return False


def _user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's that may be interrupted."""
    found = None
    for f in _outward(frame):
        if f.f_code is _WHOLE:  # what it called of the user's is a part of it
            found = None
        elif f.f_code in _open and found is not None:
            return found
        elif found is None and _theirs(f):
            found = f
    return found


def _theirs(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    mine = name.startswith("<frozen") or (name.startswith(_LIBRARIES) and "-packages" not in name)
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return not (mine or name.startswith(PACKAGE) or package in _ENGINE)


def _statement(frame: FrameType) -> range:
    """The lines of the statement at which `frame` is, without those of a block in it."""
    line = frame.f_lineno
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    found = range(line, line + 1)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body: list[ast.AST] = getattr(node, "body", [])
            end = getattr(body[0], "lineno", line) - 1 if body else node.end_lineno or line
            if line <= end:
                found = range(node.lineno, end + 1)
    return found
