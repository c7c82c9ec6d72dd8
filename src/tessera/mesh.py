"""Meshes: `auto()` has all devices, `current()` is the open one, `preset` and files have
machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.machine.meshes import from_descriptor, preset, presets
from .core.mesh import Mesh, auto
from .core.public import public
from .lang.record.local_view import current_mesh as current


def show(mesh: Mesh) -> None:
    """Prints a picture of `mesh`: the device at each place, by its id.

    `tessera mesh show` prints a whole machine, with its links and hosts.
    """
    from .show.mesh_picture import show as draw  # its library is slow to import

    draw(mesh)


__all__ = ["Mesh", "auto", "current", "from_descriptor", "preset", "presets", "show"]
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("ts.mesh", globals())
