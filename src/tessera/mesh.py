"""How does a program get its mesh? `auto()` takes every device, `current()` is the open one."""

from __future__ import annotations

from .core.mesh import Mesh, auto
from .lang.local.view import current_mesh as current


def show(mesh: Mesh) -> None:
    """Prints a picture of `mesh`: which device is at which place, by its id."""
    from .show.mesh_picture import show as draw  # its library is slow to import

    draw(mesh)


__all__ = ["Mesh", "auto", "current", "show"]
