"""Tracebacks without this package's frames, so that they end in the user's line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from .environment import OFF, TRACEBACK_FILTERING
from .errors import TesseraError, is_users

F = TypeVar("F", bound=Callable[..., Any])


def hide_frames(error: BaseException) -> None:
    """Removes this package's frames from the traceback of `error`, if it is an error of this
    package, an interrupt, or was raised by the user's code; TESSERA_TRACEBACK_FILTERING=off keeps
    them. The caller raises it again with a bare `raise`, which adds no frame."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    mine = isinstance(error, (TesseraError, KeyboardInterrupt))
    if not frames or not (mine or is_users(frames[-1].tb_frame)):
        return
    if os.environ.get(TRACEBACK_FILTERING, "").lower() in OFF:
        return
    kept = [tb for tb in frames if is_users(tb.tb_frame)]
    for tb, following in zip(kept, [*kept[1:], None], strict=False):
        tb.tb_next = following
    error.__traceback__ = kept[0] if kept else None


def boundary(fn: F) -> F:
    """Returns `fn`, a function for users, with errors without frames of this package."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    return call  # type: ignore[return-value]
