"""The tensor of TT-NN: one part for each device of a mesh, all of one shape, on the host or on the
devices.

On the devices it is one value of Tessera's, each device's own (`f32[32, 32] varying y,x`): an op on
it is a local op, computed from each device's own part, and only collectives move anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.layout import TensorType
from ..lang.jit.jit import jit
from ..lang.parallel.local import collectives as local
from ..lang.value.tensor import Tensor as Value
from .configs import DRAM_MEMORY_CONFIG, BufferType, MemoryConfig, StorageType, Tile
from .device import MeshDevice
from .dtypes import BY_NUMPY, DataType, Layout, check_numbers, rounded
from .errors import TTNNError, wrong
from .mapping import Array, TensorTopology, coordinates, replicated
from .names import no_attribute
from .shapes import MeshCoordinate, MeshShape, Shape, padded


@dataclass(frozen=True)
class TensorSpec:
    """A tensor on one device without its values: shape, element type, layout, memory."""

    shape: Shape
    dtype: DataType
    layout: Layout
    memory_config: MemoryConfig
    tile: Tile = field(default_factory=Tile)

    def __init__(
        self, shape: Sequence[int], dtype: DataType, layout: Layout, buffer_type: Any = None, *,
        memory_config: MemoryConfig | None = None, tile: Tile | None = None,
    ) -> None:  # fmt: skip
        lies = memory_config or MemoryConfig(buffer_type=buffer_type or BufferType.DRAM)
        facts = Shape(shape), dtype, layout, lies, tile or Tile()
        for name, value in zip(("shape", "dtype", "layout", "memory_config", "tile"), facts):
            object.__setattr__(self, name, value)


class Tensor:
    """A tensor of TT-NN: `shape`, `dtype`, `layout`, and the parts of the devices.

    `Tensor(array, dtype)` makes one on the host of an array of NumPy or PyTorch. Its shape is that
    of a part. Ops give new tensors; those with a `_` at the end of their name, caches and
    `copy_host_to_device_tensor` write into one that exists. Raises TTNNError if `dtype` lacks a
    number of the array.
    """

    def __init__(
        self, data: Any, dtype: DataType | None = None, layout: Layout = Layout.ROW_MAJOR, *,
        memory_config: MemoryConfig | None = None,
    ) -> None:  # fmt: skip
        array = host_array(data)
        self.dtype = dtype or dtype_of(array)
        check_numbers("Tensor", array, self.dtype)
        self.layout = layout
        self.memory_config_ = memory_config or DRAM_MEMORY_CONFIG
        self.topology = replicated((1,))
        self.device_: MeshDevice | None = None
        self.grid_: MeshShape | None = None  # that of the mesh, which may be reshaped later
        self.value_: Value | None = None
        self.parts_: list[Array] | None = [rounded(array, self.dtype)]

    @classmethod
    def of_parts(cls, parts: list[Array], like: Tensor | None = None, **facts: Any) -> Tensor:
        """A tensor on the host; facts that are left out are those of `like`."""
        made = object.__new__(cls)
        for name in ("dtype", "layout", "memory_config_", "topology"):
            setattr(made, name, facts[name] if name in facts else getattr(like, name))
        made.device_, made.grid_, made.value_, made.parts_ = None, None, None, parts
        return made

    @classmethod
    def on(
        cls, device: MeshDevice, value: Value, like: Tensor | None = None, **facts: Any
    ) -> Tensor:
        """A tensor on `device`; facts that are left out are those of `like`."""
        made = cls.of_parts([], like, **facts)
        made.device_, made.grid_, made.value_, made.parts_ = device, device.shape, value, None
        device.remember(made)
        return made

    # -- facts ------------------------------------------------------------------------------------
    @property
    def shape(self) -> Shape:
        """The shape of a device's part."""
        if self.parts_ is not None:
            return Shape(list(self.parts_[0].shape))
        if self.value_ is None:
            raise self.absent()
        return Shape(list(self.value_.shape))

    @property
    def padded_shape(self) -> Shape:
        """The shape of a part with the padding to whole tiles."""
        return padded(self.shape, self.layout is Layout.TILE)

    @property
    def value(self) -> Value:
        """The value on the devices. Raises TTNNError if there is none, if they are closed, or if
        their mesh was reshaped since."""
        if self.value_ is None or (self.device_ is not None and not self.device_.is_open):
            raise self.absent()
        laid = self.value_.type.mesh
        if self.device_ is not None and laid is not None and laid != self.device_.mesh:
            raise wrong(
                "the tensor was laid on the mesh before the mesh was reshaped",
                [("tensor", f"{self.grid_}, devices {[*laid.ids]}"),
                 ("mesh", f"{self.device_.shape}, devices {[*self.device_.mesh.ids]}")],
                fix="read it before device.reshape, or give the mesh its earlier shape back and"
                f" read it then: device.reshape(ttnn.{self.grid_})",
            )  # fmt: skip
        return self.value_

    def absent(self) -> TTNNError:
        """The error that it is not on a device."""
        if self.parts_ is not None:
            return wrong(
                "the tensor is not on a device: it is on the host",
                fix="ttnn.to_device(tensor, device)",
            )
        if self.device_ is not None and not self.device_.is_open:
            return wrong(
                "the mesh device is closed, and the tensor that was on it is gone",
                [("device", self.device_)],
                fix="read it before: host = ttnn.from_device(tensor)",
            )
        return wrong("the tensor was deallocated", fix="read it before, or keep ttnn.clone(tensor)")

    @property
    def spec(self) -> TensorSpec:
        """The shape, element type, layout and memory that it has on each device."""
        return TensorSpec(self.shape, self.dtype, self.layout, memory_config=self.memory_config_)

    @property
    def tile(self) -> Tile:
        """The tiles that it is said to consist of."""
        return Tile()

    def get_tile(self) -> Tile:
        """`tile`."""
        return self.tile

    def device(self) -> MeshDevice | None:
        """The mesh that it is on; None on the host."""
        return self.device_

    def storage_type(self) -> Any:
        """`StorageType.HOST` or `DEVICE`."""
        return StorageType.HOST if self.parts_ is not None else StorageType.DEVICE

    def memory_config(self) -> MemoryConfig:
        """Its place in a device's memories."""
        return self.memory_config_

    def get_layout(self) -> Layout:
        """`layout`."""
        return self.layout

    def get_dtype(self) -> DataType:
        """`dtype`."""
        return self.dtype

    def is_allocated(self) -> bool:
        """True if it still has values."""
        there = self.device_ is None or self.device_.is_open
        return self.parts_ is not None or (self.value_ is not None and there)

    def is_sharded(self) -> bool:
        """True if it is said to be cut over the cores of a device."""
        return self.memory_config_.is_sharded()

    def tensor_topology(self) -> TensorTopology:
        """Its placement on the mesh."""
        return self.topology

    def volume(self) -> int:
        """The number of elements of a part."""
        return int(np.prod(self.shape))

    logical_volume = volume

    def host_parts(self) -> list[Array]:
        """The parts on the host, in the order of `tensor_topology().mesh_coords()`.

        Where other processes have devices of the mesh, it is a collective: all of them call it.
        """
        if self.parts_ is not None:
            return self.parts_
        value, places = self.value, coordinates(self.grid_ or MeshShape(1))
        if self.device_ is not None:
            self.device_.check_no_capture("a tensor is read", "reading")
        if self.device_ is not None and not self.device_.all_local():
            value = _everywhere(value)
        rows = value.numpy().reshape(len(places), *self.value.shape)
        at = {c: np.asarray(rows[i]) for i, c in enumerate(places)}
        return [at[c] for c in self.topology.mesh_coords()]

    def local_parts(self) -> dict[MeshCoordinate, Array]:
        """The parts of this process's devices, by their places: nothing is moved between
        processes."""
        coords = self.topology.mesh_coords()
        if self.parts_ is not None or self.device_ is None or self.device_.all_local():
            return dict(zip(coords, self.host_parts(), strict=True))
        self.device_.check_no_capture("a tensor is read", "reading")
        at = {}
        for shard in self.value.stored.addressable_shards:
            place = place_of(self.value.type, shard.index)
            at[place] = np.asarray(shard.data).reshape(self.value.shape)
        return {c: at[c] for c in coords if c in at}

    # -- to and from ------------------------------------------------------------------------------
    def cpu(self, blocking: bool = True, cq_id: int = 0) -> Tensor:
        """The same tensor on the host."""
        return self if self.parts_ is not None else Tensor.of_parts(self.host_parts(), self)

    def deallocate(self, force: bool = True) -> None:
        """Lets go of the values: reading them afterwards is an error."""
        self.value_ = self.parts_ = None

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __len__(self) -> int:
        return self.shape[0]

    __hash__ = object.__hash__


@jit
def _everywhere(x: Value) -> Value:
    """Each device's part, one after the other, on all devices."""
    assert x.type.mesh is not None
    return local.collected(x.reshape(1, *x.shape), x.type.mesh.axes, 0)


def place_of(t: TensorType, cut: Sequence[slice]) -> MeshCoordinate:
    """The place on the mesh whose part lies in the slices `cut` of the array of a value of `t`,
    which has no dim for an axis of one device."""
    assert t.mesh is not None
    at = {a: s.start or 0 for a, s in zip(t.varying, cut)}
    return MeshCoordinate([at.get(a, 0) for a in t.mesh.axes])


# -- arrays ---------------------------------------------------------------------------------------
def host_array(data: Any) -> Array:
    """Data of NumPy, PyTorch or lists as an array; PyTorch's bfloat16 as that of ml_dtypes."""
    if type(data).__module__.partition(".")[0] == "torch":
        import torch

        held = data.detach().cpu()
        if held.dtype is torch.bfloat16:
            return np.asarray(held.float().numpy(), BF16)
        return np.array(held.numpy())
    if isinstance(data, Tensor):
        raise wrong("the data is a tensor of ttnn already", fix="use it as it is, or ttnn.clone")
    return np.array(data)


BF16 = DataType.BFLOAT16.held.numpy


def dtype_of(array: Array) -> DataType:
    """The element type that an array becomes where none is named. Raises TTNNError for others."""
    found = BY_NUMPY.get(array.dtype.name)
    if found is None:
        raise wrong(
            f"an array of {array.dtype} has no element type of TT-NN",
            fix=f"convert it to one of {', '.join(BY_NUMPY)}",
        )
    return found


__all__ = [
    "Tensor", "TensorSpec",
]  # fmt: skip
