"""Tensors of a mesh from the parts of its devices, and the parts of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.layout import plain
from ..lang.value.engine import Parts, engine
from ..lang.value.tensor import Tensor as Value
from .device import MeshDevice
from .errors import wrong
from .mapping import (
    MeshToTensor,
    PlacementShard,
    TensorToMesh,
    replicated,
)
from .op import check_keywords
from .shapes import MeshShape
from .tensor import Tensor, place_of
from .transfer import WRITES, compose, to_device


def get_device_tensors(tensor: Tensor) -> list[Tensor]:
    """Each device's part as a tensor of its own, in the order of the mesh: on the host, or on a
    mesh of that device. Of several processes each gets the parts of its devices."""
    one = replicated((1,))
    parts = {c: Tensor.of_parts([p], tensor, topology=one) for c, p in tensor.local_parts().items()}
    if tensor.parts_ is not None or tensor.device_ is None:
        return [*parts.values()]
    if len(tensor.topology.mesh_coords()) == 1:
        return [tensor]
    singles = tensor.device_.singles()
    return [to_device(p, singles[at]) for at, p in parts.items()]


def from_host_shards(tensors: Sequence[Tensor], mesh_shape: Sequence[int], **more: Any) -> Tensor:
    """One tensor on the host of a part a device, row by row. Raises TTNNError unless the parts are
    alike and as many as the mesh's devices."""
    check_keywords(from_host_shards, more)
    shape = MeshShape(mesh_shape)
    _alike("from_host_shards", tensors)
    if len(tensors) != shape.mesh_size():
        raise wrong(
            f"from_host_shards: {len(tensors)} parts for a mesh of {shape}",
            fix="give one part a device",
        )
    parts = [p for t in tensors for p in t.cpu().host_parts()]
    return Tensor.of_parts(parts, tensors[0].cpu(), topology=replicated(shape))


def combine_device_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of the parts that `get_device_tensors` gives, on the mesh of their devices. Of
    several processes each gives the parts of all its devices. Raises TTNNError unless they are
    alike, and each is on a device of one mesh."""
    _alike("combine_device_tensors", tensors)
    devices = [t.device_ for t in tensors]
    parent = devices[0].parent if devices[0] is not None else None
    if parent is None or any(d is None or d.parent is not parent for d in devices):
        raise wrong(
            "combine_device_tensors: the tensors are not parts of one mesh's devices",
            fix="give what ttnn.get_device_tensors(tensor) gave; host tensors:"
            " ttnn.from_host_shards",
        )
    places = {d.get_device_ids()[0]: c for c, d in parent.singles().items()}
    coords = [places[d.get_device_ids()[0]] for d in devices if d is not None]
    parts = [p for t in tensors for p in t.host_parts()]
    whole = replicated(parent.shape)
    if parent.all_local():
        topology = replace(whole, _coords=tuple(coords))
        return to_device(Tensor.of_parts(parts, tensors[0], topology=topology), parent)
    part_at = dict(zip(coords, parts, strict=True))
    local = [c for c in whole.mesh_coords() if parent.is_local(c)]
    if {*part_at} != {*local}:
        raise wrong(
            "combine_device_tensors: a process gives the parts of all its devices of the mesh",
            [("given", coords), ("its devices", local)],
            fix="give what ttnn.get_device_tensors(tensor) gave in each process",
        )
    mesh = parent.mesh
    t = plain(tensors[0].dtype.held, parts[0].shape, mesh).with_varying(mesh.axes)

    def fill(parts: Parts) -> None:
        for cut, out in parts:
            out[...] = part_at[place_of(t, cut)].reshape(out.shape)

    value = Value(engine().place_blocks(fill, t), t)
    return Tensor.on(parent, value, tensors[0], topology=whole)


def _alike(name: str, tensors: Sequence[Tensor]) -> None:
    kinds = {(t.shape, t.dtype, t.layout) for t in tensors}
    if len(kinds) != 1:
        raise wrong(
            f"{name}: the parts are not alike" if kinds else f"{name}: there are no parts",
            [(str(shape), f"{dtype}, {layout}") for shape, dtype, layout in kinds],
            fix="give parts of one shape, element type and layout",
        )


def distribute_tensor(
    tensor: Tensor, mapper: TensorToMesh, mesh_device: MeshDevice | None = None
) -> Tensor:
    """The parts that `mapper` makes of a tensor; on `mesh_device` if one is named. Raises TTNNError
    if the tensor has different parts already."""
    whole, labels = tensor.host_parts(), tensor.topology.placements()
    if len(whole) > 1 and any(isinstance(p, PlacementShard) for p in labels):
        raise wrong(
            "distribute_tensor: the tensor is distributed already",
            [("grid", tensor.topology.distribution_shape())],
            fix="join it first: ttnn.aggregate_tensor(tensor, composer)",
        )
    parts, topology = mapper.parts(whole[0])
    made = Tensor.of_parts(parts, tensor, topology=topology)
    return made if mesh_device is None else to_device(made, mesh_device)


def aggregate_tensor(tensor: Tensor | Sequence[Tensor], composer: MeshToTensor) -> Tensor:
    """The tensor on the host that `composer` makes of the parts; they may be a list of tensors, one
    for each device of the composer's mesh."""
    if isinstance(tensor, Sequence):
        tensor = from_host_shards([t.cpu() for t in tensor], composer.mesh)
    whole = compose(tensor, composer)
    return Tensor.of_parts([whole], tensor, topology=replicated((1,)))


def aggregate_as_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of parts: of those on devices `combine_device_tensors`; of those on the host one
    with a part a device, in the order of the mesh that it comes to."""
    if any(t.device_ is not None for t in tensors):
        return combine_device_tensors(tensors)
    return from_host_shards(tensors, (len(tensors),))


def copy_host_to_device_tensor(
    host_tensor: Tensor, device_tensor: Tensor, cq_id: int | None = None
) -> None:
    """Writes the values of a tensor on the host into one on a mesh, which stays the same tensor.
    Raises TTNNError unless both are alike."""
    device = device_tensor.device_
    if device is None:
        raise wrong("copy_host_to_device_tensor: the second tensor is on the host", fix="swap them")
    device.queue(cq_id)
    device.check_no_capture("copy_host_to_device_tensor", WRITES)
    _alike("copy_host_to_device_tensor", [host_tensor, device_tensor])
    _ = device_tensor.value  # it is where the mesh is now, or an error says so
    moved = to_device(host_tensor, device)
    device_tensor.value_, device_tensor.topology = moved.value, moved.topology


def copy_device_to_host_tensor(
    device_tensor: Tensor, host_tensor: Tensor, blocking: bool = True, cq_id: int | None = None
) -> None:
    """Writes the values of a tensor on a mesh into one on the host. Raises TTNNError unless both
    are alike."""
    _alike("copy_device_to_host_tensor", [host_tensor, device_tensor])
    host_tensor.parts_ = device_tensor.host_parts()
    host_tensor.topology = device_tensor.topology


__all__ = [
    "aggregate_as_tensor", "aggregate_tensor", "combine_device_tensors",
    "copy_device_to_host_tensor", "copy_host_to_device_tensor", "distribute_tensor",
    "from_host_shards", "get_device_tensors",
]  # fmt: skip
