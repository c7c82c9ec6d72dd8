"""`dist.resize`: moves the state of a run to a mesh with more or fewer devices.

>>> import tessera as ts
>>> from tessera import dist
>>> mesh = dist.Mesh.parse("dp=8")
>>> weights = {"w": dist.tensor((10, 4), layout="[10@dp, 4]", mesh=mesh)}
>>> weights = dist.resize(mesh.fold(onto=2), weights)
>>> weights["w"].layout, weights["w"].mesh.physical.size
('[10@dp, 4]', 2)
>>> dist.resize(dist.Mesh.parse("dp=3"), weights)["w"].type.local_shape
(4, 4)
"""

from __future__ import annotations

import warnings
from typing import Any

from ..core.errors import MeshError, StrategyWarning, UsageError, lines_up
from ..core.layout import TensorType, without
from ..core.mesh import Mesh
from ..lang.record.box import Box
from ..lang.record.mesh_transfer import moved
from ..lang.record.offload import back, where_lies
from ..lang.record.recorder import current
from ..lang.record.submesh import with_two_axes
from ..lang.record.tree import Path, flatten, tree_update
from ..lang.value.checks import mesh_or_none, needed_mesh
from ..lang.value.tensor import Tensor


def resize(mesh: Mesh, *trees: Any) -> Any:
    """Moves modules, optimizer states and other trees of tensors to `mesh`, with more or fewer
    devices; returns the tree, or a tuple of the trees.

    Each tensor keeps its layout: a dim that is split over an axis stays split over the axis of that
    name, into as many blocks as that has now (the last ones are short if the dim does not divide).
    A tensor that is split over an axis that `mesh` lacks is gathered over it; a StrategyWarning
    reports how much that is. A tensor without a mesh is unchanged. A module is changed in place,
    other containers are returned as new ones. Weights on slices of a mesh, such as those of a
    pipeline's stages, go to the same slices of `mesh`: it then needs the same axes and sizes, and
    is folded onto other devices.

    `mesh.fold(onto=4)` keeps the logical mesh, and so, at the level "mesh_invariant", the bits of
    results. Raises MeshError if `mesh` is no mesh, or lacks the slices.
    """
    if current() is not None:
        raise UsageError(
            "dist.resize: a compiled function runs on the mesh that it is recorded for",
            fix="resize between two calls of the function",
        )
    mesh = needed_mesh("dist.resize", mesh_or_none("dist.resize", mesh))
    if not trees:
        raise UsageError(
            "dist.resize: there is nothing to move",
            fix="model, state = dist.resize(mesh, model, state)",
        )
    where = places({t.mesh for t in flatten(trees)[0] if isinstance(t, Tensor)}, mesh)
    done: set[int] = set()
    joined: dict[str, int] = {}  # bytes that each lost axis split

    def put(path: Path, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.mesh is None or id(x) in done:
            return x
        to = type_on(x.type.complete(), where[x.mesh])
        if isinstance(x, Box):
            done.add(id(x))
        if to is x.type:
            return x
        for axis in (a for a in x.type.split_axes if a not in mesh):
            joined[axis] = joined.get(axis, 0) + x.type.nbytes
        if x.drawn and x._data is None and x._pending is not None:
            x.type = to
        elif isinstance(x, Box):
            x.put(moved(x.now(), to))
        else:
            name, x = x.name, where_lies(x, moved(back(x), to))
            x.name = name
        return x

    out = tree_update(put, trees)
    if joined:
        _warn(joined, mesh)
    return out[0] if len(out) == 1 else out


def _warn(joined: dict[str, int], mesh: Mesh) -> None:
    """Gives a StrategyWarning with the lost axes and the bytes that each of them split."""
    rows = "".join(f"\n  {axis:5} : split {n:,} bytes" for axis, n in joined.items())
    warnings.warn(
        "dist.resize: what was split over axes that the new mesh lacks is whole on each device"
        f"{rows}\n  mesh  : {mesh}"
        "\n  fix   : give the new mesh axes of the same names, or lay out anew:"
        " dist.place(model, strategy, mesh)",
        StrategyWarning,
        stacklevel=lines_up(),
    )


def places(held: set[Mesh | None], mesh: Mesh) -> dict[Mesh, Mesh]:
    """The target mesh for the tensors on each of the meshes `held`: `mesh`, or the same slice of
    it. Raises MeshError if a mesh is no slice."""
    olds = [old for old in held if old is not None]
    return {old: _place_of(old, mesh) if len(olds) > 1 else mesh for old in olds}


def type_on(t: TensorType, mesh: Mesh) -> TensorType:
    """`t` on `mesh`: gathered along the axes that `mesh` lacks, otherwise in the same layout."""
    lost = [a for a in t.split_axes if a not in mesh]
    dims = [without(d, lost, t.sizes) for d in t.dims]
    return TensorType(t.dtype, dims, t.partial, mesh, (), t.rest_axes)


def _place_of(old: Mesh, mesh: Mesh) -> Mesh:
    """The target mesh for tensors on `old`: the whole of `mesh`, or the same slice of it. Raises
    MeshError if `old` is neither."""
    wide = with_two_axes(mesh)
    for one in (mesh, wide):
        if (old.axes, old.ids, old.shape) == (one.axes, one.ids, one.shape):
            return one
    if set(old.axes) < set(wide.axes) and set(old.ids) <= set(wide.ids):
        at = wide.coords(old.ids[0])
        part = wide.slice(**{a: i for a, i in at.items() if a not in old})
        if (part.axes, part.ids, part.shape) == (old.axes, old.ids, old.shape):
            return part
    raise MeshError(
        "dist.resize: the tensors lie on several meshes, and one of them is no slice of the new",
        example=old,
        new=mesh,
        fix="give the mesh that they are slices of, folded: mesh.fold(onto=4); or lay them out"
        " anew: dist.place(model, strategy, mesh)",
    )
