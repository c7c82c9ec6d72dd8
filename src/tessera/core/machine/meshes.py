"""Meshes of described machines, with their links: by name (`preset`) or by file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..declared import Count, Natural
from ..errors import MeshError
from ..mesh import Mesh
from ..mesh_input import Shape
from .presets import PRESETS
from .presets import preset as described
from .share import DESCRIPTOR, descriptor_path
from .visible import narrowed


def from_descriptor(
    source: str | Path | None = None,
    axes: Sequence[str] | None = None,
    shape: Shape = None,
    *,
    mesh_id: Natural | None = None,
) -> Mesh:
    """Returns the mesh described in a file: an MGD 2.0 (.textproto, guide 5, 2.4) or YAML (.yaml).

    Without `source` the file is that of `TT_MESH_GRAPH_DESC_PATH`. `axes` are the names of the
    mesh's axes, one for each level of links (default: the file's: "y", "x" for two dims); a single
    name covers all devices; with `shape` the number of axes is free. `mesh_id` selects one mesh of
    a graph of several. Plans inside `with mesh:` are priced on its links, `mesh.links`. If
    `TT_VISIBLE_DEVICES` or `TESSERA_VISIBLE_DEVICES` is set, the mesh of a program of one process
    has the visible devices.

    Raises MeshError with every fault of the file and its line, if the axes do not fit the levels,
    or if the visible devices are no box; BackendError if a visible device does not exist.
    """
    from .load import load  # its parsers are slow to import

    if source is None:
        source = descriptor_path()
        if not source:
            raise MeshError(
                "from_descriptor: no file is named",
                fix=f"give the path of a .textproto or .yaml file, or set {DESCRIPTOR}",
            )
    return narrowed(load(source, mesh_id)).mesh(axes, shape)


def preset(
    name: str,
    axes: Sequence[str] | None = None,
    shape: Shape = None,
    *,
    nodes: Count | None = None,
) -> Mesh:
    """Returns the mesh of a machine that Tessera describes: "t3000", "dgx_h100", "gb200_nvl72", ...

    `axes`, `shape`, the links and the visible devices are as with `from_descriptor`; `nodes` is the
    size of the outermost level, for instance the number of boxes of a DGX. Raises MeshError if
    there is no such machine, or if the axes do not fit.

    >>> mesh = preset("dgx_h100", ("dp", "tp"), nodes=4)
    >>> mesh.text()
    'dp=4 tp=8'
    >>> print(mesh.links.levels[1])
    8 all (nvlink 4, 3.4 µs, 450 GB/s)
    """
    machine = described(name)
    if nodes is not None:
        machine = machine.of(nodes)
    return narrowed(machine).mesh(axes, shape)


def presets() -> tuple[str, ...]:
    """Returns the names of the described machines.

    >>> presets()[:3]
    ('n300', 't3000', 'galaxy')
    """
    return tuple(PRESETS)
