"""Messages of the library to people: through `logging`, as the logger `tessera`.

A program that sets up logging gets them in its own handlers. In any other program the first message
installs one handler, which writes lines to stderr. `logging.getLogger("tessera").setLevel("ERROR")`
silences them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

LOGGER = logging.getLogger("tessera")
PROGRESS_S = (5.0, 30.0, 120.0, 600.0)


class ToStderr(logging.Handler):
    """Writes each message to the current `sys.stderr`, as a line."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:  # print would write to stdout
            with suppress(OSError, ValueError):  # a closed stream
                print(self.format(record), file=sys.stderr, flush=True)


def tell(text: str, level: int = logging.INFO) -> None:
    """Logs a message. Installs a handler and the level INFO unless the program has its own."""
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(ToStderr())
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, "%s", text)


def is_watched() -> bool:
    """Returns whether somebody sees lines of progress: stderr is a terminal, or the program has a
    handler of its own."""
    if sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty():
        return True
    handlers = (*LOGGER.handlers, *logging.getLogger().handlers)
    return any(not isinstance(h, ToStderr) for h in handlers)


@contextmanager
def progress(what: str, after_s: Sequence[float] = PROGRESS_S) -> Iterator[None]:
    """A context that logs a line with `what` and the time it has taken, after each of `after_s`
    seconds. A thread waits for the end of the context, at most for the last of these."""
    if not is_watched():
        yield
        return
    done, begin_s = threading.Event(), time.monotonic()

    def lines() -> None:
        for limit_s in after_s:
            if done.wait(max(0.0, begin_s + limit_s - time.monotonic())):
                return
            tell(f"{what}: {limit_s:g} s so far")

    thread = threading.Thread(target=lines, name="tessera-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def warn(text: str) -> None:
    """Logs a message of something that may be wrong."""
    tell(text, logging.WARNING)
