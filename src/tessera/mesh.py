"""How does a program get its mesh? `auto()` takes every device, `current()` is the open one."""

from __future__ import annotations

from .core.mesh import Mesh, auto, current

__all__ = ["Mesh", "auto", "current"]
