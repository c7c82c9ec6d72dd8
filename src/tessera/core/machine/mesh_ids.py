"""Lookup of a mesh in a descriptor by its mesh_id."""

from __future__ import annotations

from typing import Any

from ..checks import shortened
from ..errors import MeshError

ONLY = -1  # selects the only mesh of a descriptor


def named(descriptor: Any, where: str, mesh_id: int) -> str:
    """Returns the name of the mesh descriptor with `mesh_id`. Raises MeshError if there is none, or
    if there are several."""
    ids: dict[int, set[str]] = {}
    every = [
        n.mesh for g in descriptor.graph_descriptors for n in g.instances if n.HasField("mesh")
    ]
    for ref in (*every, descriptor.top_level_instance.mesh):
        if ref.mesh_descriptor:
            ids.setdefault(ref.mesh_id, set()).add(ref.mesh_descriptor)
    if mesh_id == ONLY and len(ids) > 1:
        raise MeshError(
            f"{where}: it has {len(ids)} meshes, and nothing says which is meant",
            meshes=", ".join(map(str, sorted(ids))),
            fix=f"set TT_MESH_ID={min(ids)}; a file of ranks gives each rank its mesh_id",
        )
    wanted = min(ids) if mesh_id == ONLY else mesh_id
    if wanted not in ids:
        raise MeshError(
            f"{where}: there is no mesh {wanted!r}",
            fix=f"give a mesh_id of {shortened(sorted(map(str, ids)))}",
        )
    if len(ids[wanted]) > 1:
        raise MeshError(
            f"{where}: mesh_id {wanted} is that of several meshes",
            meshes=", ".join(sorted(ids[wanted])),
            fix="give each mesh a mesh_id of its own",
        )
    (found,) = ids[wanted]
    return found
