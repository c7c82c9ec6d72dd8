"""The batch, laid over an axis in time: computed in microbatches, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.context import settings
from ..core.layout import Factor, ways
from ..core.mesh import Mesh, in_time
from .functions import relayout
from .tensor import Tensor

AXIS = "mb"


def in_microbatches(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """`tensors`, of which those with as many rows as the first are laid over an axis in time: each
    device takes its rows in `count` turns.

    Where they do not divide into so many, it takes the next larger number that divides them. Rows
    that lie uneven on the devices are taken at once.
    """
    first = next((t for t in tensors if t.ndim), None)
    if first is None:
        return list(tensors)
    turns = _turns(first, count)
    if turns == 1:
        return list(tensors)
    mesh = next((t.mesh for t in tensors if t.mesh is not None), settings().mesh)
    axis = AXIS if mesh is None or AXIS not in mesh else f"{AXIS}_"
    late = in_time(mesh, {axis: turns})
    rows = [t.ndim and t.shape[0] == first.shape[0] and _turns(t, turns) == turns for t in tensors]
    return [_laid(t, late) if own else t for t, own in zip(tensors, rows, strict=True)]


def _turns(t: Tensor, count: int) -> int:
    """The smallest number of turns, at least `count`, into which a device's rows of `t` divide."""
    rows, devices = t.type.dims[0][0].size, ways(t.type.dims[0][0].axes, t.type.sizes)
    if rows % devices:
        return 1
    here = rows // devices
    return next((n for n in range(min(count, here), here + 1) if n and here % n == 0), 1)


def _laid(t: Tensor, mesh: Mesh) -> Tensor:
    first, *more = t.type.dims[0]
    rows = Factor(first.size, (*first.axes, *mesh.time))
    return relayout(t, t.type.on(mesh).with_dims(((rows, *more), *t.type.dims[1:])))
