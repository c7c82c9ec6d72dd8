"""Tensors from data of the host to the devices of a mesh, and back."""

# Rows of the table are made at run time, so their types are not seen.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..core.checks import instance, library
from ..core.layout import plain
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor as Value
from .args import check_types, mesh_device
from .configs import DRAM_MEMORY_CONFIG, MemoryConfig
from .device import MeshDevice
from .dtypes import DataType, Layout, check_numbers, rounded
from .errors import TTNNError, brief, public, wrong
from .mapping import (
    Array,
    MeshToTensor,
    TensorToMesh,
    coordinates,
    replicated,
)
from .op import KEYWORDS, check_keywords, op
from .shapes import Shape
from .tensor import Tensor, TensorSpec, dtype_of, host_array

_mapper: ContextVar[TensorToMesh | None] = ContextVar("ttnn_mapper", default=None)
_composer: ContextVar[MeshToTensor | None] = ContextVar("ttnn_composer", default=None)


@contextlib.contextmanager
def distribute(default: TensorToMesh | MeshToTensor) -> Iterator[None]:
    """Within the block, `from_torch` distributes by this mapper, or `to_torch` joins by this
    composer. Raises TTNNError if it is neither."""
    kinds: dict[type, ContextVar[Any]] = {TensorToMesh: _mapper, MeshToTensor: _composer}
    if type(default) not in kinds:
        raise wrong(
            f"distribute: {default!r} is neither a mapper nor a composer",
            fix="ttnn.ShardTensorToMesh(device, dim=0), ttnn.ConcatMeshToTensor(device, dim=0)",
        )
    held = kinds[type(default)]
    token = held.set(default)
    try:
        yield
    finally:
        held.reset(token)


def from_torch(
    tensor: Any, dtype: DataType | None = None, *, spec: Any = None, tile: Any = None,
    pad_value: float | None = None, layout: Layout | None = None, device: MeshDevice | None = None,
    memory_config: MemoryConfig | None = None, mesh_mapper: TensorToMesh | None = None,
    cq_id: int | None = None, **older: object,
) -> Tensor:  # fmt: skip
    """A tensor of an array of PyTorch, or NumPy: on the host, or on `device` if one is named.

    `mesh_mapper` distributes it; without one all devices get the whole. Raises TTNNError if
    `dtype` lacks a number of the data (floats may be rounded), if it needs tiles and `layout` says
    otherwise, if the mapper does not fit, or if a trace is being captured on `device`.
    """
    check_keywords(from_torch, older)
    array = host_array(tensor)
    if spec is not None:
        instance("from_torch", "spec", spec, TensorSpec, "spec=tensor.spec", TTNNError)
        if spec.shape != array.shape:
            raise wrong(
                "from_torch: the spec is of another shape",
                [("data", [*array.shape]), ("spec", spec.shape)],
                fix="give data of the spec's shape, or no spec",
            )
        dtype, layout = dtype or spec.dtype, layout or spec.layout
        memory_config = memory_config or spec.memory_config
    check_types("from_torch", dtype=dtype, layout=layout, device=device, tile=tile)
    check_types("from_torch", memory_config=memory_config)
    if device is not None:
        device.check_no_capture("from_torch", WRITES)
    dtype = dtype or dtype_of(array)
    check_numbers("from_torch", array, dtype)
    tiled = layout or (Layout.TILE if dtype.bits else Layout.ROW_MAJOR)
    if dtype.bits and tiled is Layout.ROW_MAJOR:
        raise wrong(
            f"from_torch: {dtype} is of tiles, not of rows",
            [("layout", tiled)],
            fix="layout=ttnn.TILE_LAYOUT",
        )
    mapper = mesh_mapper or _mapper.get()
    if mapper is not None:
        fix = "ttnn.ShardTensorToMesh(device, dim=0); of a config: ttnn.create_mesh_mapper"
        instance("from_torch", "mesh_mapper", mapper, TensorToMesh, fix, TTNNError)
    parts, topology = [array], replicated((1,))
    if mapper is not None:
        parts, topology = mapper.parts(array)
    elif device is not None:
        topology = replicated(device.shape)
        parts = [array] * device.get_num_devices()
    memory = memory_config or DRAM_MEMORY_CONFIG
    held = {id(p): rounded(p, dtype) for p in parts}
    result = Tensor.of_parts(
        [held[id(p)] for p in parts], None, dtype=dtype, layout=tiled, topology=topology,
        memory_config_=memory,
    )  # fmt: skip
    return result if device is None else to_device(result, device, cq_id=cq_id)


WRITES = "what the host writes"


def to_torch(
    tensor: Tensor, dtype: Any = None, *, torch_rank: int | None = None,
    mesh_composer: MeshToTensor | None = None, device: MeshDevice | None = None,
    cq_id: int | None = None,
) -> Any:  # fmt: skip
    """The tensor as one of PyTorch: its only part, or the parts joined by `mesh_composer`.

    uint16 becomes int16 and uint32 int32, as in TT-NN. Raises TTNNError if there are several parts
    and no composer, if `torch_rank` would lose a dim that is not one, or if a whole number does not
    fit into its type (`dtype` names a wider one).
    """
    torch = library("ttnn.to_torch", "torch", "torch")
    if dtype is not None:
        fix = "dtype=torch.float32: it is PyTorch's"
        instance("to_torch", "dtype", dtype, torch.dtype, fix, TTNNError)
    if device is not None:
        mesh_device("to_torch", device).queue(cq_id)
        on = getattr(tensor, "device_", None)
        if on is not None and on is not device:
            raise wrong(
                "to_torch: the tensor is on another mesh",
                [("tensor", on), ("device", device)],
                fix=f"leave device out, or give the tensor's: device={on}",
            )
    array = compose(tensor, mesh_composer)
    if torch_rank is not None:
        array = array.reshape(Shape(list(array.shape)).to_rank(torch_rank))
    if tensor.dtype is DataType.BFLOAT16:
        result = torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    elif tensor.dtype.is_float:
        result = torch.from_numpy(array.astype(np.float32))
    else:
        result = torch.from_numpy(array.astype(np.int64))
        dtype = dtype or _whole_type(torch, tensor.dtype, array)
    return result if dtype is None else result.to(dtype)


def _whole_type(torch: Any, dtype: DataType, array: Array) -> Any:
    """The type of PyTorch that TT-NN gives for whole numbers. Raises TTNNError if it lacks one of
    them."""
    name = {DataType.UINT8: "uint8", DataType.UINT16: "int16"}.get(dtype, "int32")
    most = torch.iinfo(getattr(torch, name)).max
    if array.size and array.max() > most:
        raise wrong(
            f"to_torch: {dtype} becomes torch.{name}, which has no {array.max()}",
            fix="name a wider type: ttnn.to_torch(tensor, dtype=torch.int64)",
        )
    return getattr(torch, name)


def compose(tensor: Tensor, composer: MeshToTensor | None) -> Array:
    """The parts as one array on the host. Raises TTNNError if there are several and no composer."""
    fix = "ttnn.ConcatMeshToTensor(device, dim=0); of a config: ttnn.create_mesh_composer"
    one = "give a tensor of ttnn; parts: ttnn.aggregate_tensor(tensors, composer)"
    instance("to_torch", "tensor", tensor, Tensor, one, TTNNError)
    composer = composer or _composer.get()
    if composer is not None:
        instance("to_torch", "mesh_composer", composer, MeshToTensor, fix, TTNNError)
    parts = tensor.host_parts()
    if composer is not None and len(parts) > 1:
        return composer.whole(parts, tensor.topology)
    if len(parts) > 1:
        raise wrong(
            "Can't convert a tensor distributed on "
            f"{tensor.grid_ or tensor.topology.distribution_shape()} mesh to row-major logical"
            " tensor. Supply a mesh composer to concatenate multi-device shards.",
            fix="mesh_composer=ttnn.ConcatMeshToTensor(device, dim=...), or"
            " ttnn.get_device_tensors(tensor)[0] where all are alike",
        )
    return parts[0]


def to_device(
    tensor: Tensor, device: MeshDevice, memory_config: MemoryConfig | None = None, *,
    cq_id: int | None = None,
) -> Tensor:  # fmt: skip
    """The tensor on the devices of a mesh; one that is there stays.

    A tensor of one part goes to all devices. Raises TTNNError if the mesh lacks a place of it, or
    if a trace is being captured there.
    """
    if not isinstance(device, MeshDevice):
        raise wrong(
            f"to_device: {device!r} is no device",
            fix="open one: ttnn.open_mesh_device(ttnn.MeshShape(1, 2))",
        )
    device.queue(cq_id)
    if tensor.parts_ is None and tensor.device_ is device:
        _ = tensor.value  # it is there, or an error says so
        if memory_config in (None, tensor.memory_config_):
            return tensor
        return clone(tensor, memory_config=memory_config)
    device.check_no_capture("to_device", WRITES)
    result = place_on_mesh(tensor, device)
    result.memory_config_ = memory_config or tensor.memory_config_
    return result


def place_on_mesh(tensor: Tensor, device: MeshDevice) -> Tensor:
    """`to_device` of a tensor that is elsewhere, also while a trace is captured."""
    mesh, parts, topology = device.mesh, tensor.host_parts(), tensor.topology
    places = coordinates(device.shape)
    if len(parts) == 1:
        topology = replicated(device.shape)
        parts = parts * len(places)
    topology = topology.over(device.shape)
    at = dict(zip(topology.mesh_coords(), parts, strict=True))
    missing = [c for c in at if c not in places]
    if missing:
        raise wrong(
            f"to_device: the tensor has a part for {missing[0]}, which is not on the mesh",
            [("mesh", device.shape)],
            fix="use a mapper of the mesh that it goes to",
        )
    nothing = np.zeros_like(parts[0])
    rows = np.stack([at.get(c, nothing) for c in places])
    t = plain(tensor.dtype.held, parts[0].shape, mesh).with_varying(mesh.axes)
    value = Value(engine().place(rows.reshape((*[t.sizes[a] for a in t.varying], *t.shape)), t), t)
    return Tensor.on(device, value, tensor, topology=topology)


def from_device(tensor: Tensor, blocking: bool = True, *, cq_id: int | None = None) -> Tensor:
    """The tensor on the host."""
    return tensor.cpu()


def to_layout(
    tensor: Tensor, layout: Layout, dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None, **older: object,
) -> Tensor:  # fmt: skip
    """The tensor in rows or tiles; the padding to tiles is never seen. In rows bfloat8_b and
    bfloat4_b become bfloat16."""
    check_keywords(to_layout, older)
    check_types("to_layout", dtype=dtype, layout=layout, memory_config=memory_config)
    if dtype is not None and dtype is not tensor.dtype:
        tensor = typecast(tensor, dtype)
    if tensor.dtype.bits and layout is Layout.ROW_MAJOR:  # rows have no blocks; bfloat16 loses none
        tensor = typecast(tensor, DataType.BFLOAT16)
    if tensor.parts_ is not None:
        memory = memory_config or tensor.memory_config_
        return Tensor.of_parts(tensor.parts_, tensor, layout=layout, memory_config_=memory)
    return clone(tensor, layout=layout, memory_config=memory_config)


def deallocate(tensor: Tensor, force: bool = True) -> None:
    """Lets go of a tensor's values: reading them afterwards is an error."""
    instance("deallocate", "tensor", tensor, Tensor, "give a tensor of ttnn", TTNNError)
    tensor.deallocate(force)


def get_memory_config(tensor: Tensor) -> MemoryConfig:
    """The place of a tensor in a device's memories."""
    return tensor.memory_config_


def is_tensor_storage_on_device(tensor: Tensor) -> bool:
    """True if a tensor is on a mesh."""
    return tensor.parts_ is None


@op(moves=True, keywords=KEYWORDS | {"layout"})
def clone(input_tensor: Value) -> Value:
    """The same elements in a tensor of its own, of another form if one is named."""
    return input_tensor


@public
def typecast(input_tensor: Tensor, dtype: DataType, *older: Any, **options: Any) -> Tensor:
    """The elements as another type."""
    if older:  # typecast(tensor, from, to)
        dtype = older[0]
    check_types("typecast", dtype=dtype)
    if input_tensor.parts_ is not None:
        parts = [rounded(p, dtype) for p in input_tensor.parts_]
        return Tensor.of_parts(parts, input_tensor, dtype=dtype)
    return clone(input_tensor, dtype=dtype, **options)


# -- methods of tensors ---------------------------------------------------------------------------
def to(self: Tensor, *where: Any, **options: Any) -> Tensor:
    """The same tensor on a mesh, or in another layout."""
    found = self
    for target in (*where, *options.values()):
        if isinstance(target, MeshDevice):
            found = to_device(found, target)
        elif isinstance(target, Layout):
            found = to_layout(found, target)
        elif isinstance(target, MemoryConfig):
            found.memory_config_ = target
        elif isinstance(target, DataType):
            found = typecast(found, target)
        elif not isinstance(target, int | None):
            raise wrong(
                f"tensor.to: it cannot become {brief(target)}",
                fix="give a mesh, a layout, an element type or a memory config",
            )
    return found


def numpy(self: Tensor) -> Array:
    """The only part, on the host. Raises TTNNError if there are several."""
    return compose(self, None)


def item(self: Tensor) -> Any:
    """The only number of the only part."""
    return numpy(self).item()


def to_list(self: Tensor) -> Any:
    """The only part as nested lists."""
    return numpy(self).astype(np.float32 if self.dtype.is_float else np.int64).tolist()


def as_array(self: Tensor, dtype: Any = None, copy: bool | None = None) -> Array:
    """The only part, where NumPy wants an array."""
    return np.asarray(numpy(self), dtype)


def only(self: Tensor) -> Any:
    """The only element. Raises TTNNError if there are several."""
    if self.volume() != 1:
        raise wrong(
            f"a tensor of {self.volume()} elements is no number",
            [("tensor", self.shape)],
            fix="read it: ttnn.to_torch(tensor), and ask for .all() or .any()",
        )
    return item(self)


__all__ = [
    "clone", "deallocate", "distribute", "from_device", "from_torch", "get_memory_config",
    "is_tensor_storage_on_device", "to_device", "to_layout", "to_torch", "typecast",
]  # fmt: skip
