"""Elastic training: safe points, and moves of a run's state to a mesh with fewer or more
devices."""

from typing import TYPE_CHECKING

from ..core.public import public
from .device_loss import drop, fit, restore
from .loop import steps
from .policy import elastic
from .resizing import resize

__all__ = ["drop", "elastic", "fit", "resize", "restore", "steps"]
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("elastic", globals())
