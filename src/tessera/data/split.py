"""`Split`: the rows of a batch that a process makes, and the tensors that it makes of them.

>>> Split(hosts=(1, 2)).rows(8).tolist()
[4, 5, 6, 7]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import divides
from ..core.devices import process_count
from ..core.dtypes import dtype_of, int32
from ..core.errors import UsageError
from ..core.layout import Factor, TensorType, shard_count
from ..core.mesh import Mesh
from ..lang.math.create import tensor
from ..lang.value.engine import Parts, engine
from ..lang.value.tensor import Tensor

DATA_AXES = ("dp", "fsdp", "ddp", "data")
"""The mesh axes that a batch is split over, unless `data_axes` names others."""
OTHER_AXES = ("tp", "pp", "ep", "sp", "cp")
"""Axes that by custom split something other than the batch."""


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a batch's dim 0 over the axes `axes` of `mesh`, or over `hosts` processes that
    are not connected: (index of this one, how many)."""

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    hosts: tuple[int, int] = (0, 1)
    _by_size: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def joined(self) -> bool:
        """True if a batch is one tensor on the mesh for all processes."""
        return self.mesh is not None and self.hosts[1] == 1

    def rows(self, size: int) -> NDArray[np.int64]:
        """The rows of a batch of `size` that this process makes, ascending."""
        if size not in self._by_size:
            self._by_size[size] = self._rows(size)
        return self._by_size[size]

    def _rows(self, size: int) -> NDArray[np.int64]:
        which, hosts = self.hosts
        if self.mesh is None:
            return np.arange(size * which // hosts, size * (which + 1) // hosts)
        if hosts > 1:
            return host_rows(self.mesh, self.axes, size, which, hosts)
        if process_count() > 1:
            layout = TensorType(int32, ((Factor(size, self.axes),),), (), self.mesh)
            found: NDArray[np.int64] = engine().local_row_indices(layout)
            return found
        return np.arange(size)

    def tensor(self, rows: NDArray[Any], size: int) -> Tensor:
        """The tensor of a batch of `size` rows: on a mesh all of it, without one the given `rows`,
        which are those of this process. A number is on every device."""
        if not self.joined or not rows.ndim:
            return tensor(rows, self.mesh if self.joined else None)
        dims = ((Factor(size, self.axes),), *((Factor(n),) for n in rows.shape[1:]))
        t = TensorType(dtype_of(rows.dtype), dims, (), self.mesh)
        # Not of this batch, of which one process may have all rows and others none: `tensor`
        # compares values among processes.
        shards = shard_count(self.axes, t.sizes)
        if self.rows(shards).size == shards:
            return tensor(rows, t.mesh, t)
        mine = self.rows(size)

        def fill(parts: Parts) -> None:
            for cut, out in parts:
                first, after = np.searchsorted(mine, cut[0].indices(size)[:2])
                out[...] = rows[first:after, *cut[1:]]

        return Tensor(engine().place_blocks(fill, t), t)


def data_axes(mesh: Mesh, asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split the batch: `asked`, or else those with a customary name. Raises
    UsageError if there are neither, MeshError for an unknown axis."""
    if asked is not None:
        for axis in asked:
            mesh.axis_size(axis)  # raises for an unknown axis
        return tuple(dict.fromkeys(asked))
    axes = tuple(axis for axis in mesh.axes if axis in DATA_AXES)
    if axes or all(axis in OTHER_AXES for axis in mesh.axes):
        return axes
    raise UsageError(
        "dataloader: it is not known which axes of the mesh split the batch",
        mesh=mesh.text(),
        fix=f'say so in the config, e.g. "data_axes": ("{mesh.axes[0]}",)',
    )


def host_rows(
    mesh: Mesh, axes: tuple[str, ...], batch_size: int, which: int, hosts: int
) -> NDArray[np.int64]:
    """The rows of a global batch that the devices of host `which` hold, each once, ascending.

    >>> host_rows(Mesh.parse("dp=4 tp=2"), ("dp",), 8, 1, 2).tolist()
    [4, 5, 6, 7]
    """
    divides(
        "dataloader", mesh.size, hosts, "{count} devices do not divide over {parts} hosts",
        "give hosts=(which, of how many) with as many devices each", UsageError, mesh=mesh.text(),
    )  # fmt: skip
    each = mesh.size // hosts
    mine = np.isin(mesh.array(), np.sort(mesh.array(), None)[which * each : (which + 1) * each])
    place = np.zeros(mesh.shape, np.int64)
    for axis in axes:
        place = place * mesh.sizes[axis] + np.indices(mesh.shape)[mesh.axes.index(axis)]
    block = math.ceil(batch_size / shard_count(axes, mesh.sizes))
    return np.flatnonzero(np.isin(np.arange(batch_size) // block, place[mine]))
