"""How does a tensor of TT-NN come from data of the host to the devices of a mesh, and back?"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.checks import instance, library
from ..core.layout import plain
from ..lang.engine import engine
from ..lang.tensor import Tensor as Value
from .asked import kinds, mesh_device
from .configs import DRAM_MEMORY_CONFIG, MemoryConfig
from .device import MeshDevice
from .distribution import composer_now, mapper_now
from .dtypes import DataType, Layout, fits, rounded
from .faults import TTNNError, wrong
from .mapping import (
    Array,
    MeshToTensor,
    TensorToMesh,
    coordinates,
    replicated,
)
from .run import how, moves, run
from .shapes import Shape
from .tensor import Tensor, TensorSpec, dtype_of, host_array


def from_torch(
    tensor: Any,
    dtype: DataType | None = None,
    *,
    spec: Any = None,
    tile: Any = None,
    pad_value: float | None = None,
    layout: Layout | None = None,
    device: MeshDevice | None = None,
    memory_config: MemoryConfig | None = None,
    mesh_mapper: TensorToMesh | None = None,
    cq_id: int | None = None,
    **older: object,
) -> Tensor:
    """A tensor of an array of PyTorch, or NumPy: on the host, or on `device` if one is named.

    `mesh_mapper` says which device gets what; without one all get the whole. Raises TTNNError if
    `dtype` lacks a number of the data (floats may be rounded), if it needs tiles and `layout` says
    otherwise, if the mapper does not fit, or if a trace is being captured on `device`.
    """
    how("from_torch", older)
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
    kinds("from_torch", dtype=dtype, layout=layout, device=device, memory_config=memory_config)
    kinds("from_torch", tile=tile)
    if device is not None:
        device.outside_capture("from_torch", WRITES)
    dtype = dtype or dtype_of(array)
    fits("from_torch", array, dtype)
    tiled = layout or (Layout.TILE if dtype.bits else Layout.ROW_MAJOR)
    if dtype.bits and tiled is Layout.ROW_MAJOR:
        raise wrong(
            f"from_torch: {dtype} is of tiles, not of rows",
            [("layout", tiled)],
            fix="layout=ttnn.TILE_LAYOUT",
        )
    mapper = mesh_mapper or mapper_now()
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
    made = Tensor.of_parts(
        [held[id(p)] for p in parts], None, dtype=dtype, layout=tiled, topology=topology,
        memory_config_=memory,
    )  # fmt: skip
    return made if device is None else to_device(made, device, cq_id=cq_id)


WRITES = "what the host writes"


def to_torch(
    tensor: Tensor,
    dtype: Any = None,
    *,
    torch_rank: int | None = None,
    mesh_composer: MeshToTensor | None = None,
    device: MeshDevice | None = None,
    cq_id: int | None = None,
) -> Any:
    """The tensor as one of PyTorch: its only part, or what `mesh_composer` makes of the parts.

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
    array = composed(tensor, mesh_composer)
    if torch_rank is not None:
        array = array.reshape(Shape(list(array.shape)).to_rank(torch_rank))
    if tensor.dtype is DataType.BFLOAT16:
        found = torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    elif tensor.dtype.is_float:
        found = torch.from_numpy(array.astype(np.float32))
    else:
        found = torch.from_numpy(array.astype(np.int64))
        dtype = dtype or _whole_type(torch, tensor.dtype, array)
    return found if dtype is None else found.to(dtype)


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


def composed(tensor: Tensor, composer: MeshToTensor | None) -> Array:
    """The parts as one array on the host. Raises TTNNError if there are several and no composer."""
    fix = "ttnn.ConcatMeshToTensor(device, dim=0); of a config: ttnn.create_mesh_composer"
    one = "give a tensor of ttnn; parts: ttnn.aggregate_tensor(tensors, composer)"
    instance("to_torch", "tensor", tensor, Tensor, one, TTNNError)
    composer = composer or composer_now()
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
    tensor: Tensor,
    device: MeshDevice,
    memory_config: MemoryConfig | None = None,
    *,
    cq_id: int | None = None,
) -> Tensor:
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
        return run("to_device", identity, [tensor], memory_config=memory_config)
    device.outside_capture("to_device", WRITES)
    made = laid(tensor, device)
    made.memory_config_ = memory_config or tensor.memory_config_
    return made


def laid(tensor: Tensor, device: MeshDevice) -> Tensor:
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
    tensor: Tensor,
    layout: Layout,
    dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None,
    **older: object,
) -> Tensor:
    """The tensor in rows or tiles; what pads it to tiles is never seen. In rows bfloat8_b and
    bfloat4_b become bfloat16."""
    how("to_layout", older)
    kinds("to_layout", dtype=dtype, layout=layout, memory_config=memory_config)
    if dtype is not None and dtype is not tensor.dtype:
        tensor = typecast(tensor, dtype)
    if tensor.dtype.bits and layout is Layout.ROW_MAJOR:  # rows have no blocks; bfloat16 loses none
        tensor = typecast(tensor, DataType.BFLOAT16)
    if tensor.parts_ is not None:
        memory = memory_config or tensor.memory_config_
        return Tensor.of_parts(tensor.parts_, tensor, layout=layout, memory_config_=memory)
    return run("to_layout", identity, [tensor], layout=layout, memory_config=memory_config)


def deallocate(tensor: Tensor, force: bool = True) -> None:
    """Lets go of a tensor's values: what reads them afterwards is an error."""
    instance("deallocate", "tensor", tensor, Tensor, "give a tensor of ttnn", TTNNError)
    tensor.deallocate(force)


def get_memory_config(tensor: Tensor) -> MemoryConfig:
    """Where a tensor is said to lie in a device's memories."""
    return tensor.memory_config_


def is_tensor_storage_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on a mesh."""
    return tensor.parts_ is None


@moves
def identity(x: Value) -> Value:
    """The op that changes nothing but the form."""
    return x


def typecast(input_tensor: Tensor, dtype: DataType, *older: Any, **options: Any) -> Tensor:
    """The elements as another type."""
    if older:  # typecast(tensor, from, to)
        dtype = older[0]
    kinds("typecast", dtype=dtype)
    if input_tensor.parts_ is not None:
        parts = [rounded(p, dtype) for p in input_tensor.parts_]
        return Tensor.of_parts(parts, input_tensor, dtype=dtype)
    return run("typecast", identity, [input_tensor], dtype, **how("typecast", options))


# -- methods of tensors ---------------------------------------------------------------------------
def to(self: Tensor, *where: Any, **options: Any) -> Tensor:
    """The same tensor on a mesh, or in another layout."""
    found = self
    for what in (*where, *options.values()):
        if isinstance(what, MeshDevice):
            found = to_device(found, what)
        elif isinstance(what, Layout):
            found = to_layout(found, what)
        elif isinstance(what, MemoryConfig):
            found.memory_config_ = what
        elif isinstance(what, DataType):
            found = typecast(found, what)
        elif not isinstance(what, int | None):
            raise wrong(
                f"tensor.to: what is {what!r}?", fix="give a mesh, a layout, or a memory config"
            )
    return found


def numpy(self: Tensor) -> Array:
    """The only part, on the host. Raises TTNNError if there are several."""
    return composed(self, None)


def item(self: Tensor) -> Any:
    """The only number of the only part."""
    return numpy(self).item()


def to_list(self: Tensor) -> Any:
    """The only part as nested lists."""
    return numpy(self).astype(np.float32 if self.dtype.is_float else np.int64).tolist()


def as_array(self: Tensor, dtype: Any = None, copy: bool | None = None) -> Array:
    """The only part, where NumPy wants an array."""
    return np.asarray(numpy(self), dtype)


def as_float(self: Tensor) -> float:
    """The only number."""
    return float(_only(self))


def as_int(self: Tensor) -> int:
    """The only number, as a whole one."""
    return int(_only(self))


def as_bool(self: Tensor) -> bool:
    """Whether the only number is not zero."""
    return bool(_only(self))


def _only(x: Tensor) -> Any:
    if x.volume() != 1:
        raise wrong(
            f"a tensor of {x.volume()} elements is no number",
            [("tensor", x.shape)],
            fix="read it: ttnn.to_torch(tensor), and ask for .all() or .any()",
        )
    return item(x)


for _name, _op in {
    "__array__": as_array, "__float__": as_float, "__int__": as_int, "__bool__": as_bool,
}.items():  # fmt: skip
    setattr(Tensor, _name, _op)
for _method in (to, to_torch, numpy, item, to_list):
    setattr(Tensor, _method.__name__, _method)


__all__ = [
    "deallocate", "from_device", "from_torch", "get_memory_config", "is_tensor_storage_on_device",
    "to_device", "to_layout", "to_torch", "typecast",
]  # fmt: skip
