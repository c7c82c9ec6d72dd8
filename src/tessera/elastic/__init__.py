"""Runs that go on with fewer devices, or with more: safe points, and what moves to another mesh."""

from ..core.public import public
from .loop import steps
from .lost import drop, fit, restore
from .policy import elastic
from .resizing import resize

__all__ = ["drop", "elastic", "fit", "resize", "restore", "steps"]
__getattr__ = public("elastic", globals())
