"""Texts of objects in errors: without their values, which may be large or on other devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_BRIEF: ContextVar[bool] = ContextVar("tessera_brief", default=False)
is_brief = _BRIEF.get
"""Returns whether the text of a tensor is its type alone."""


@contextmanager
def brief() -> Iterator[None]:
    """A context in which the text of a tensor is its type alone."""
    token = _BRIEF.set(True)
    try:
        yield
    finally:
        _BRIEF.reset(token)
