"""Runs that go on with fewer devices, or with more: safe points, and what moves to another mesh."""

from ..core.peers import public
from .resize import resize

__all__ = ["resize"]
__getattr__ = public("elastic", globals())
