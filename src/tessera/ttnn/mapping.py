"""Mappers, which cut a tensor over the devices of a mesh, and composers, which join the parts.

A mapper names, for each dim of a grid, which dim of the tensor is cut along it, or that the tensor
is the same there. The grid is the mesh, or another one (`mesh_shape_override`) that lies on it:
place for place where it has as many dims and fits, else row by row.

>>> mapping = MeshMapperConfig([PlacementReplicate(), PlacementShard(3)])
>>> mapping
MeshMapperConfig(placements: [PlacementReplicate(), PlacementShard(3)])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.checks import whole
from .args import dim_of
from .device import MeshDevice
from .errors import wrong
from .shapes import MeshCoordinate, MeshShape

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PlacementReplicate:
    """The tensor is the same along a dim of the grid."""

    def __repr__(self) -> str:
        return "PlacementReplicate()"


@dataclass(frozen=True)
class PlacementShard:
    """Dim `dim` of the tensor is cut along a dim of the grid."""

    dim: int

    def __post_init__(self) -> None:
        whole("PlacementShard", "dim", self.dim)

    def __repr__(self) -> str:
        return f"PlacementShard({self.dim})"


Placement = PlacementReplicate | PlacementShard


@dataclass(frozen=True)
class TensorTopology:
    """The placement of a tensor on a mesh: the grid, the placement along each of its dims, and the
    places of its parts."""

    _shape: MeshShape
    _placements: tuple[Placement, ...]
    _coords: tuple[MeshCoordinate, ...]

    def __post_init__(self) -> None:
        # Two are alike whether lists or tuples were given.
        object.__setattr__(self, "_placements", tuple(self._placements))
        object.__setattr__(self, "_coords", tuple(self._coords))

    def distribution_shape(self) -> MeshShape:
        """The grid over which the tensor was distributed."""
        return self._shape

    def placements(self) -> list[Placement]:
        """The placement of the tensor along each dim of that grid."""
        return [*self._placements]

    def over(self, mesh: Sequence[int]) -> TensorTopology:
        """The same on `mesh`: of parts in a line, without a place on a mesh, row by row."""
        line = [(i,) for i in range(len(self._coords))]
        if len(mesh) == 1 or self._coords != tuple(line) or len(line) > math.prod(mesh):
            return self
        return replace(self, _coords=tuple(coordinates(mesh)[: len(line)]))

    def mesh_coords(self) -> list[MeshCoordinate]:
        """The places of the mesh that have a part, in the order of the grid."""
        return [*self._coords]


def replicated(shape: Sequence[int]) -> TensorTopology:
    """The topology of a tensor that is the same on all devices of a mesh."""
    return TensorTopology(
        MeshShape(shape), (PlacementReplicate(),) * len(shape), tuple(coordinates(shape))
    )


def coordinates(shape: Sequence[int]) -> list[MeshCoordinate]:
    """The places of a mesh, row by row."""
    return [MeshCoordinate(at) for at in np.ndindex(*shape)]


class _Config:
    """One placement, or dim, for each dim of a grid: a sequence with the grid, or the first two by
    `row_dim` and `col_dim`."""

    WORD = ""

    def __init__(
        self, placements: Sequence[Any] | int | None = None,
        mesh_shape_override: Sequence[int] | int | None = None, *, row_dim: int | None = None,
        col_dim: int | None = None,
    ) -> None:  # fmt: skip
        override, self.mesh_shape_override = mesh_shape_override, None
        if isinstance(placements, Sequence):
            self.placement_args = [*placements]
            if override is not None:
                self.mesh_shape_override = MeshShape(override)
            return
        rows = placements if placements is not None else row_dim
        self.placement_args = self.of_dims(
            [rows, override if isinstance(override, int) else col_dim]
        )

    def of_dims(self, dims: Sequence[int | None]) -> list[Any]:
        """The items for dims of the tensor along rows and columns."""
        return [d for d in dims if d is not None]

    def __repr__(self) -> str:
        over = self.mesh_shape_override
        more = f", mesh_shape_override={over}" if over else ""
        return f"{type(self).__name__}({self.WORD}: {self.placement_args}{more})"


class MeshMapperConfig(_Config):
    """The placement of a tensor along each dim of the grid: `placements`, or the dims that are cut
    along rows and along columns (None: the tensor is the same there)."""

    WORD = "placements"

    def __init__(
        self, placements: Sequence[Placement] | int | None = None,
        mesh_shape_override: Sequence[int] | int | None = None, **dims: int | None,
    ) -> None:  # fmt: skip
        super().__init__(placements, mesh_shape_override, **dims)

    def of_dims(self, dims: Sequence[int | None]) -> list[Any]:
        """Placements for dims of the tensor along rows and columns."""
        return [PlacementReplicate() if d is None else PlacementShard(d) for d in dims]

    @property
    def placements(self) -> list[Placement]:
        """The placement of the tensor along each dim of the grid."""
        return [*self.placement_args]


class MeshComposerConfig(_Config):
    """The dims along which parts are joined, one a dim of the grid."""

    WORD = "dims"

    def __init__(
        self, dims: Sequence[int] | int | None = None,
        mesh_shape_override: Sequence[int] | int | None = None, **named: int | None,
    ) -> None:  # fmt: skip
        super().__init__(dims, mesh_shape_override, **named)

    @property
    def dims(self) -> list[int]:
        """The dims along which parts are joined."""
        return [*self.placement_args]


def compute_distribution_to_mesh_mapping(
    distribution_shape: Sequence[int], mesh_shape: Sequence[int]
) -> list[MeshCoordinate]:
    """The place on the mesh of each place of the grid, in the order of the grid.

    Raises TTNNError if the grid is larger than the mesh.

    >>> [tuple(c) for c in compute_distribution_to_mesh_mapping((2, 1), (2, 4))]
    [(0, 0), (1, 0)]
    >>> [tuple(c) for c in compute_distribution_to_mesh_mapping((3,), (2, 2))]
    [(0, 0), (0, 1), (1, 0)]
    """
    grid, mesh = MeshShape(distribution_shape), MeshShape(mesh_shape)
    if grid.mesh_size() > mesh.mesh_size():
        raise wrong(
            f"a grid of {grid} does not lie on a mesh of {mesh}",
            [("grid", f"{grid.mesh_size()} places"), ("mesh", f"{mesh.mesh_size()} devices")],
            fix="give a grid of at most as many places",
        )
    if len(grid) == len(mesh) and all(a <= b for a, b in zip(grid, mesh)):
        return coordinates(grid)
    return coordinates(mesh)[: grid.mesh_size()]


@dataclass(frozen=True)
class TensorToMesh:
    """A mapper: the part of a tensor on the host for each device of `device`."""

    device: MeshDevice = field(repr=False)
    grid: MeshShape
    placements: tuple[Placement, ...]

    def parts(self, x: Array) -> tuple[list[Array], TensorTopology]:
        """The parts of `x`, in the order of the grid, and how they lie. Raises TTNNError if `x` has
        no such dim, or is not cut into equal parts."""
        grid, cuts = [*self.grid], {}
        for i, (n, p) in enumerate(zip(self.grid, self.placements, strict=True)):
            if isinstance(p, PlacementReplicate):
                continue
            dim = dim_of("a mapper", x.shape, p.dim)
            if dim in cuts:
                raise wrong(
                    f"a mapper cuts dim {dim} along two dims of the grid",
                    [("placements", [*self.placements])],
                    fix="cut each dim once",
                )
            size = -(-x.shape[dim] // n)
            chunks = -(-x.shape[dim] // size) if size else 0
            if chunks != n and len(grid) == 1:
                grid = [chunks]  # of one dim there may be fewer parts than devices
            if size == 0 or x.shape[dim] % size or chunks != grid[i]:
                raise wrong(
                    f"dim {dim} of {x.shape[dim]} is not cut into {n} equal parts",
                    [("tensor", list(x.shape)), ("grid", self.grid)],
                    fix=f"pad it to a multiple of {n}, or cut another dim",
                )
            cuts[dim] = (i, size)
        blocks = []
        for at in np.ndindex(*grid):
            pick = [slice(None)] * x.ndim
            for dim, (i, size) in cuts.items():
                pick[dim] = slice(at[i] * size, (at[i] + 1) * size)
            blocks.append(x[tuple(pick)])
        where = compute_distribution_to_mesh_mapping(grid, self.device.shape)
        if len(grid) == 1:  # row by row, of which there are as many as parts
            where = coordinates(self.device.shape)[: grid[0]]
        return blocks, TensorTopology(MeshShape(grid), self.placements, tuple(where))


CppTensorToMesh = TensorToMesh


def create_mesh_mapper(mesh_device: MeshDevice, config: MeshMapperConfig) -> TensorToMesh:
    """The mapper of `config` on `mesh_device`. Raises TTNNError unless it has a placement for each
    dim of the grid, and the grid lies on the mesh."""
    grid = config.mesh_shape_override or mesh_device.shape
    if len(config.placements) != len(grid):
        raise wrong(
            f"a mapper of {len(config.placements)} placements for a grid of {len(grid)} dims",
            [("placements", config.placements), ("grid", grid)],
            fix="give one placement a dim of the grid",
        )
    compute_distribution_to_mesh_mapping(grid, mesh_device.shape)
    return TensorToMesh(mesh_device, grid, tuple(config.placements))


def _on_all(mesh_device: MeshDevice, placement: Placement) -> TensorToMesh:
    grid = MeshShape(mesh_device.get_num_devices())
    return create_mesh_mapper(mesh_device, MeshMapperConfig([placement], grid))


def ShardTensorToMesh(mesh_device: MeshDevice, dim: int) -> TensorToMesh:
    """Cuts dim `dim` over all devices, row by row."""
    return _on_all(mesh_device, PlacementShard(dim))


def ReplicateTensorToMesh(mesh_device: MeshDevice) -> TensorToMesh:
    """Gives all devices the whole tensor."""
    return _on_all(mesh_device, PlacementReplicate())


def ShardTensor2dMesh(
    mesh_device: MeshDevice, mesh_shape: Sequence[int], dims: Sequence[int | None]
) -> TensorToMesh:
    """Cuts `dims[0]` along the rows of a grid of `mesh_shape` and `dims[1]` along its columns; None
    is a dim of the grid along which the tensor is the same."""
    if any(not isinstance(g, Sequence) or len(g) != 2 for g in (dims, mesh_shape)):
        raise wrong(
            "ShardTensor2dMesh: it takes two dims and a grid of two",
            [("dims", dims), ("mesh_shape", mesh_shape)],
            fix="write dims=(row, column), with None where the tensor is the same",
        )
    config = MeshMapperConfig(row_dim=dims[0], col_dim=dims[1])
    config.mesh_shape_override = MeshShape(mesh_shape)
    return create_mesh_mapper(mesh_device, config)


shard_tensor_to_mesh_mapper = ShardTensorToMesh
replicate_tensor_to_mesh_mapper = ReplicateTensorToMesh
shard_tensor_to_2d_mesh_mapper = ShardTensor2dMesh


@dataclass(frozen=True)
class MeshToTensor:
    """A composer: how the whole is made of the devices' parts."""

    grid: MeshShape
    dims: tuple[int, ...]
    mesh: MeshShape

    def whole(self, parts: Sequence[Array], topology: TensorTopology) -> Array:
        """The parts, in the order of `topology`, as one. Raises TTNNError if they are not those of
        the composer's grid."""
        if len(parts) > self.mesh.mesh_size():
            raise wrong(
                f"the composer is of a mesh of {self.mesh.mesh_size()} devices, and the tensor has"
                f" {len(parts)} parts",
                fix="make it of the tensor's mesh: ttnn.ConcatMeshToTensor(device, dim=...)",
            )
        at = dict(zip(topology.over(self.mesh).mesh_coords(), parts, strict=True))
        if len(self.grid) == 1:
            shards = [at[c] for c in coordinates(self.mesh) if c in at]
            grid = [len(shards)]
        else:
            where = compute_distribution_to_mesh_mapping(self.grid, self.mesh)
            missing = [c for c in where if c not in at]
            if missing:
                raise wrong(
                    f"the composer joins {self.grid}, of which {missing[0]} has no part",
                    [("parts", len(parts))],
                    fix="give the grid over which the tensor lies",
                )
            shards, grid = [at[c] for c in where], [*self.grid]
        for n, dim in zip(reversed(grid), reversed(self.dims)):
            dim = dim_of("a composer", shards[0].shape, dim)
            shards = [np.concatenate(shards[i : i + n], dim) for i in range(0, len(shards), n)]
        return shards[0]


CppMeshToTensor = MeshToTensor


def create_mesh_composer(mesh_device: MeshDevice, config: MeshComposerConfig) -> MeshToTensor:
    """The composer of `config`. Raises TTNNError unless it names a dim for each dim of the grid,
    and each once."""
    grid, dims = config.mesh_shape_override or mesh_device.shape, config.dims
    whole = all(isinstance(d, int) for d in dims)
    if not whole or len(dims) != len(grid) or len(set(dims)) != len(dims):
        raise wrong(
            f"a composer of dims {config.dims} for a grid of {len(grid)} dims",
            [("grid", grid)],
            fix="give a dim of the tensor for each dim of the grid, each once",
        )
    compute_distribution_to_mesh_mapping(grid, mesh_device.shape)
    return MeshToTensor(grid, tuple(config.dims), mesh_device.shape)


def ConcatMeshToTensor(mesh_device: MeshDevice, dim: int) -> MeshToTensor:
    """Joins the parts of all devices along `dim`, row by row."""
    grid = MeshShape(mesh_device.get_num_devices())
    return create_mesh_composer(mesh_device, MeshComposerConfig([dim], grid))


concat_mesh_to_tensor_composer = ConcatMeshToTensor


def ConcatMesh2dToTensor(
    mesh_device: MeshDevice, mesh_shape: Sequence[int], dims: Sequence[int]
) -> MeshToTensor:
    """Joins the parts along a grid's rows at `dims[0]`, along its columns at `dims[1]`."""
    return create_mesh_composer(mesh_device, MeshComposerConfig(dims, MeshShape(mesh_shape)))


def concat_2d_mesh_to_tensor_composer(
    mesh_device: MeshDevice, dims: Sequence[int], mesh_shape: Sequence[int]
) -> MeshToTensor:
    """`ConcatMesh2dToTensor`."""
    return ConcatMesh2dToTensor(mesh_device, mesh_shape, dims)


def joint_topology(topologies: Sequence[TensorTopology]) -> TensorTopology:
    """The topology of the result of an op with such operands: cut where one of them is.

    Where grids differ it is that of the first that is cut at all.
    """
    first = topologies[0]
    for t in topologies[1:]:
        if t._shape == first._shape and t._coords == first._coords:
            pairs = zip(first._placements, t._placements, strict=True)
            both = tuple(b if isinstance(a, PlacementReplicate) else a for a, b in pairs)
            first = TensorTopology(first._shape, both, first._coords)
        elif not any(isinstance(p, PlacementShard) for p in first._placements):
            first = t if len(t._coords) >= len(first._coords) else first
    return first


__all__ = [
    "ConcatMesh2dToTensor", "ConcatMeshToTensor", "CppMeshToTensor", "CppTensorToMesh",
    "MeshComposerConfig", "MeshMapperConfig",
    "MeshToTensor", "PlacementReplicate", "PlacementShard", "ReplicateTensorToMesh",
    "ShardTensor2dMesh", "ShardTensorToMesh", "TensorToMesh", "TensorTopology",
    "compute_distribution_to_mesh_mapping", "concat_2d_mesh_to_tensor_composer",
    "concat_mesh_to_tensor_composer", "create_mesh_composer", "create_mesh_mapper",
    "replicate_tensor_to_mesh_mapper", "shard_tensor_to_2d_mesh_mapper",
    "shard_tensor_to_mesh_mapper",
]  # fmt: skip
