"""Tensors without data of the host, and tensors in files."""

# Rows of the table are made at run time, so their types are not seen.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checks import file_access
from ..core.files import write_whole
from .args import check_types
from .configs import BufferType, MemoryConfig
from .device import MeshDevice
from .dtypes import DataType, Layout
from .errors import wrong
from .mapping import PlacementReplicate, PlacementShard, TensorToMesh, TensorTopology
from .op import OUTPUT_KEYWORDS, check_keywords
from .shapes import MeshCoordinate, MeshShape
from .tensor import Tensor, TensorSpec, dtype_of, host_array
from .transfer import WRITES, clone, from_torch, place_on_mesh, to_device

_random = np.random.default_rng(0)


def manual_seed(seed: int) -> None:
    """Begins the numbers of `rand` anew."""
    global _random
    _random = np.random.default_rng(seed)


def full(
    shape: Sequence[int], fill_value: float, dtype: DataType | None = None,
    layout: Layout | None = None, device: MeshDevice | None = None,
    memory_config: MemoryConfig | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """A tensor of one number, on all devices. Raises TTNNError if a trace is being captured
    there."""
    check_keywords(full, options)
    into = _into(options)
    if into is not None:
        dtype, layout, device = dtype or into.dtype, layout or into.layout, device or into.device_
    check_types("full", device=device)
    if device is not None:
        device.check_no_capture("full", WRITES)
    tensor = from_torch(
        np.full(tuple(shape), fill_value), dtype or DataType.BFLOAT16,
        layout=layout or Layout.TILE, device=device, memory_config=memory_config,
    )  # fmt: skip
    if into is None:
        return tensor
    return clone(tensor, dtype=tensor.dtype, output_tensor=into)


def _into(options: dict[str, Any]) -> Any:
    return next((options[k] for k in OUTPUT_KEYWORDS if options.get(k) is not None), None)


def zeros(shape: Sequence[int], *args: Any, **options: Any) -> Tensor:
    """Zeros, on all devices."""
    return full(shape, 0.0, *args, **options)


def ones(shape: Sequence[int], *args: Any, **options: Any) -> Tensor:
    """Ones, on all devices."""
    return full(shape, 1.0, *args, **options)


def empty(
    shape: Sequence[int], dtype: DataType | None = None, layout: Layout | None = None,
    device: MeshDevice | None = None, memory_config: MemoryConfig | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """A tensor whose values are to be written: zeros until then. It may be made while a trace is
    captured, too."""
    check_types("empty", device=device)
    check_keywords(empty, options)
    if _into(options) is not None:
        return full(shape, 0.0, dtype, layout, device, memory_config, **options)
    made = full(shape, 0.0, dtype, layout, memory_config=memory_config)
    return made if device is None else place_on_mesh(made, device)


def allocate_tensor_on_device(
    shape: Any, dtype: Any = DataType.BFLOAT16, layout: Layout = Layout.TILE,
    device: MeshDevice | None = None, memory_config: MemoryConfig | None = None,
) -> Tensor:  # fmt: skip
    """`empty`, on a mesh. In place of a shape, an element type and a layout it takes a
    `TensorSpec`, and the mesh."""
    if isinstance(shape, TensorSpec):
        device = dtype if isinstance(dtype, MeshDevice) else device
        return empty(shape.shape, shape.dtype, shape.layout, device, shape.memory_config)
    return empty(shape, dtype, layout, device, memory_config)


def allocate_tensor_on_host(
    shape: Any, dtype: Any = DataType.BFLOAT16, layout: Layout = Layout.TILE,
    mesh_device: MeshDevice | None = None, memory_config: MemoryConfig | None = None,
) -> Tensor:  # fmt: skip
    """`empty` on the host, with a part for each device of a mesh."""
    return allocate_tensor_on_device(shape, dtype, layout, mesh_device, memory_config).cpu()


def full_like(tensor: Tensor, fill_value: float, **options: Any) -> Tensor:
    """A tensor of one number, otherwise like another one."""
    return full(tensor.shape, fill_value, **_like(tensor, options))


def _like(tensor: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    facts = {"dtype": tensor.dtype, "layout": tensor.layout, "device": tensor.device_}
    return facts | {k: v for k, v in options.items() if v is not None}


def zeros_like(tensor: Tensor, **options: Any) -> Tensor:
    """Zeros, otherwise like another tensor."""
    return full_like(tensor, 0.0, **options)


def ones_like(tensor: Tensor, **options: Any) -> Tensor:
    """Ones, otherwise like another tensor."""
    return full_like(tensor, 1.0, **options)


def empty_like(tensor: Tensor, **options: Any) -> Tensor:
    """A tensor whose values are to be written, otherwise like another one."""
    return empty(tensor.shape, **_like(tensor, options))


def arange(*bounds: int, dtype: DataType = DataType.BFLOAT16, device: MeshDevice | None = None,
           layout: Layout | None = None, **options: Any) -> Tensor:  # fmt: skip
    """Defaults from a start, before an end, in steps; in rows, if no layout is named."""
    check_keywords(arange, options)
    numbers = np.arange(*bounds)
    return from_torch(numbers, dtype, layout=layout, device=device)


def rand(
    shape: Sequence[int], *, dtype: DataType = DataType.BFLOAT16, layout: Layout = Layout.TILE,
    device: MeshDevice | None = None, memory_config: MemoryConfig | None = None, low: float = 0.0,
    high: float = 1.0, seed: int | None = None,
) -> Tensor:  # fmt: skip
    """Random numbers from `low` to `high`, the same on all devices; of a type of whole numbers
    without fractions."""
    source = np.random.default_rng(seed) if seed else _random
    numbers = source.uniform(low, high, tuple(shape)).astype(np.float32)
    if not dtype.is_float:
        numbers = np.trunc(numbers)
    return from_torch(numbers, dtype, layout=layout, device=device, memory_config=memory_config)


# -- files ----------------------------------------------------------------------------------------
SUFFIX, MAGIC = ".tensorbin", b"tessera-ttnn 1\n"


def dump_tensor(file_name: str | Path, tensor: Tensor) -> None:
    """Writes a tensor into a file, whose name ends with ".tensorbin" (TTNNError if not), whole or
    not at all. Its folder is made. Raises UsageError if it cannot be written."""
    path = _named("dump_tensor", file_name)
    if not isinstance(tensor, Tensor):
        raise wrong(
            f"dump_tensor: {type(tensor).__name__} is no tensor of ttnn",
            fix="ttnn.from_torch(array) first",
        )
    parts, topology = tensor.host_parts(), tensor.topology
    data = [np.ascontiguousarray(part).tobytes() for part in parts]
    distinct = [*dict.fromkeys(data)]  # parts that are alike are written once
    facts = {
        "dtype": tensor.dtype.name, "layout": tensor.layout.name, "shape": list(tensor.shape),
        "grid": list(topology.distribution_shape()), "parts": [distinct.index(d) for d in data],
        "placements": [p.dim if isinstance(p, PlacementShard) else None
                       for p in topology.placements()],
        "coords": [list(c) for c in topology.mesh_coords()],
        "buffer": tensor.memory_config_.buffer_type.name,
    }  # fmt: skip
    with file_access("dump_tensor", path, "written", "name a file in a folder of your own"):
        write_whole(path, MAGIC + json.dumps(facts).encode() + b"\n" + b"".join(distinct))


def load_tensor(file_name: str | Path, device: MeshDevice | None = None) -> Tensor:
    """The tensor of a file that `dump_tensor` wrote; on `device` if one is named. Raises TTNNError
    if it is none. Nothing in it is executed."""
    path = _named("load_tensor", file_name)
    try:
        head, _, payload = path.read_bytes().removeprefix(MAGIC).partition(b"\n")
        facts = json.loads(head)
        dtype, shape = DataType[facts["dtype"]], [int(n) for n in facts["shape"]]
        count = max(facts["parts"]) + 1
        size = math.prod(shape) * dtype.held.numpy.itemsize
        if len(payload) != count * size:
            raise ValueError(f"{len(payload)} bytes of data, not {count * size}")
        rows = [payload[i * size : (i + 1) * size] for i in range(count)]
        distinct = [np.frombuffer(r, dtype.held.numpy).reshape(shape) for r in rows]
        labels = [PlacementReplicate() if d is None else PlacementShard(int(d))
                  for d in facts["placements"]]  # fmt: skip
        coords = tuple(MeshCoordinate(c) for c in facts["coords"])
        topology = TensorTopology(MeshShape(facts["grid"]), tuple(labels), coords)
        parts = [distinct[i] for i in facts["parts"]]
        layout = Layout[facts["layout"]]
        memory = MemoryConfig(buffer_type=BufferType[facts.get("buffer", "DRAM")])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise wrong(
            f"load_tensor: {path} is no tensor of a file",
            [("said", error)],
            fix="name a file that ttnn.dump_tensor wrote here",
        ) from None
    tensor = Tensor.of_parts(
        parts, dtype=dtype, layout=layout, topology=topology, memory_config_=memory
    )
    return tensor if device is None else to_device(tensor, device)


def _named(name: str, file_name: str | Path) -> Path:
    if not str(file_name).endswith(SUFFIX):
        raise wrong(
            f"{name}: the file {file_name} must have {SUFFIX} extension",
            fix=f"name it {Path(file_name).stem}{SUFFIX}",
        )
    return Path(file_name)


def as_tensor(
    tensor: Any, dtype: DataType | None = None, *, layout: Layout | None = None,
    device: MeshDevice | None = None, memory_config: MemoryConfig | None = None,
    cache_file_name: str | Path | None = None,
    preprocess: Callable[[Any], Any] | None = None, mesh_mapper: TensorToMesh | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`from_torch`, kept in a file: a second call with the same `cache_file_name`, type, layout and
    mapper reads it, and does not look at `tensor`."""

    check_keywords(as_tensor, options)

    def make() -> Tensor:
        given = preprocess(tensor) if preprocess is not None else tensor
        return from_torch(given, dtype, layout=layout, mesh_mapper=mesh_mapper)

    if cache_file_name is None:
        converted = make()
    else:
        kind = (dtype or dtype_of(host_array(tensor))).name
        form = (layout or Layout.ROW_MAJOR).name
        cut = "" if mesh_mapper is None else f"_{_mapper_text(mesh_mapper)}"
        path = Path(f"{cache_file_name}_dtype_{kind}_layout_{form}{cut}{SUFFIX}")
        if not path.is_file():
            dump_tensor(path, make())
        converted = load_tensor(path)
    if device is not None:
        converted = to_device(converted, device)
    if memory_config is not None:
        converted.memory_config_ = memory_config
    return converted


def _mapper_text(mapper: TensorToMesh) -> str:
    cuts = [p.dim if isinstance(p, PlacementShard) else "r" for p in mapper.placements]
    return f"{'x'.join(map(str, mapper.grid))}_{'_'.join(map(str, cuts))}".replace("-", "m")


__all__ = [
    "allocate_tensor_on_device", "allocate_tensor_on_host", "arange", "as_tensor", "dump_tensor",
    "empty", "empty_like", "full", "full_like", "load_tensor", "manual_seed", "ones", "ones_like",
    "rand", "zeros", "zeros_like",
]  # fmt: skip
