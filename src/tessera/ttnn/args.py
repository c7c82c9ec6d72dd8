"""Checks of arguments where they come in: a wrong one would have no effect, or be an error of
Python's far away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.checks import instance, whole
from .configs import BufferType, MemoryConfig, SubDeviceId, Tile, Topology
from .device import MeshDevice
from .dtypes import DataType, Layout
from .errors import TTNNError, wrong
from .shapes import MeshCoordinateRange

_OPEN = "ttnn.open_mesh_device(ttnn.MeshShape(1, 2))"
_KINDS: dict[str, tuple[type, str]] = {
    "dtype": (DataType, "dtype=ttnn.bfloat16"),
    "layout": (Layout, "layout=ttnn.TILE_LAYOUT"),
    "device": (MeshDevice, f"device={_OPEN}"),
    "mesh_device": (MeshDevice, f"mesh_device={_OPEN}"),
    "memory_config": (MemoryConfig, "memory_config=ttnn.DRAM_MEMORY_CONFIG"),
    "buffer_type": (BufferType, "buffer_type=ttnn.BufferType.L1"),
    "device_range": (MeshCoordinateRange, "device_range=ttnn.MeshCoordinateRange(device.shape)"),
    "sub_device_ids": (SubDeviceId, "sub_device_ids=[ttnn.SubDeviceId(0)]"),
    "tile": (Tile, "tile=ttnn.Tile((32, 32))"),
    "topology": (Topology, "topology=ttnn.Topology.Ring"),
}


def check_types(name: str, **arguments: Any) -> None:
    """Raises TTNNError unless each of `arguments` is None or has the type for its name."""
    for word, value in arguments.items():
        if value is not None:
            instance(name, word, value, *_KINDS[word], TTNNError)


def dim_of(name: str, shape: Sequence[int], dim: int, more: int = 0) -> int:
    """Dim `dim` of a tensor of `shape`, from the front; with `more` it may be so many behind the
    last. Raises TTNNError if there is none."""
    count, dim = len(shape) + more, whole(name, "dim", dim)
    if not -count <= dim < count:
        raise wrong(
            f"{name}: the tensor has no dim {dim}",
            [("tensor", shape)],
            fix=f"name a dim from {-count} to {count - 1}" if count else "give a tensor with dims",
        )
    return dim % count


def mesh_device(name: str, value: object) -> MeshDevice:
    """A mesh device. Raises TTNNError."""
    return instance(name, "device", value, *_KINDS["device"], TTNNError)


__all__ = ["check_types", "dim_of", "mesh_device"]
