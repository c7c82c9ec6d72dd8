"""Rows of the ops that give the same elements, elsewhere or in another form."""

# Rows of the table are made at run time, so their types are not seen.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from .. import nn
from ..core.dtypes import int32
from ..lang.math import functions as F
from ..lang.math.shape import swap
from ..lang.value.tensor import Tensor as Value
from .args import dim_of
from .configs import DRAM_MEMORY_CONFIG
from .dtypes import DataType, Layout
from .errors import brief, public, wrong
from .op import KEYWORDS, Call, op
from .shapes import padded
from .tensor import Tensor
from .transfer import clone, to_layout, typecast

_PADS = KEYWORDS | {"pad_value"}


@public
def reshape(input_tensor: Tensor, *shape: Any, **options: Any) -> Tensor:
    """The same elements in another shape; -1 stands for the size that is left."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _reshape(input_tensor, options.pop("shape", sizes), **options)


@op(moves=True, name="reshape")
def _reshape(x: Value, shape: Sequence[int]) -> Value:
    return x.reshape(*shape)


view = reshape


@op(moves=True, keywords=_PADS)
def permute(input_tensor: Value, dims: Sequence[int]) -> Value:
    """The dims in another order."""
    return F.permute(input_tensor, dims)


@op(moves=True, keywords=_PADS)
def transpose(input_tensor: Value, dim1: int, dim2: int) -> Value:
    """Two dims in each other's place."""
    return swap(input_tensor, dim1, dim2)


@op(moves=True)
def concat(tensors: Sequence[Value], dim: int = 0, *, groups: int = 1) -> Value:
    """Tensors one after the other along `dim`."""
    if not isinstance(tensors, list):
        raise wrong("concat: it takes a list of tensors", fix="ttnn.concat([a, b], dim=0)")
    if groups != 1:
        raise wrong("concat: groups= is not provided", fix="split and concat the parts")
    return F.concat(tensors, dim)


@op(moves=True)
def stack(tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors along a new dim."""
    return F.stack(tensors, dim)


@public
def slice(
    input_tensor: Tensor, slice_start: Any = None, slice_end: Any = None, slice_step: Any = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The elements from `slice_start` on, before `slice_end`, each `slice_step`-th, dim by dim.

    Bounds are lists of numbers, or tensors of them, which are read for it.
    """
    rank = len(input_tensor.shape)
    step = options.pop("steps", slice_step)
    starts_and_ends = options.pop("starts", slice_start), options.pop("ends", slice_end)
    bounds = [*map(_numbers, (*starts_and_ends, [1] * rank if step is None else step))]
    if not all(isinstance(b, Sequence) and len(b) == rank for b in bounds):
        raise wrong(
            f"slice: it takes {rank} numbers for starts, ends and steps each",
            [("tensor", input_tensor.shape), ("given", (*bounds,))],
            fix="give one for each dim, or write tensor[:, 0:32]",
        )
    return _slice(input_tensor, [tuple(map(int, cut)) for cut in zip(*bounds)], **options)


def _numbers(bounds: Any) -> Any:
    """The numbers of a tensor, of which all devices have the same."""
    if not isinstance(bounds, Tensor):
        return bounds
    first, *others = (part.reshape(-1).tolist() for part in bounds.host_parts())
    if any(part != first for part in others):
        raise wrong(
            "slice: the devices would take parts of different places",
            [("given", [first, *others])],
            fix="replicate the bounds: mesh_mapper=ttnn.ReplicateTensorToMesh(device)",
        )
    return first


@op(moves=True, name="slice")
def _slice(x: Value, pick: Sequence[Any]) -> Value:
    found = x[tuple(builtins.slice(*p) if isinstance(p, tuple) else p for p in pick)]
    assert isinstance(found, Value)
    return found


def getitem(x: Tensor, key: Any) -> Tensor:
    """`x[key]` of numbers, slices and `...`; of a tensor on the host too."""
    parts = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(p, int | builtins.slice | type(...)) for p in parts):
        raise wrong(
            f"x[...]: {brief(key)} is not of numbers and slices",
            fix="for other choices: ttnn.embedding, ttnn.where",
        )
    if x.parts_ is not None:
        return Tensor.of_parts([part[key] for part in x.parts_], x)
    cuts = [(p.start, p.stop, p.step) if isinstance(p, builtins.slice) else p for p in parts]
    return _slice(x, cuts)


@op(moves=True)
def split(input_tensor: Value, split_size: int | Sequence[int], dim: int = 0) -> list[Value]:
    """Parts along `dim`, each of `split_size`, the last one smaller if need be; or of the sizes
    that are named."""
    sizes = split_size
    if isinstance(sizes, int):
        width = input_tensor.shape[dim_of("split", input_tensor.shape, dim)]
        sizes = [builtins.min(sizes, width - at) for at in range(0, width, sizes)]
    return list(F.split(input_tensor, sizes, dim))


@public
def chunk(input_tensor: Tensor, chunks: int, dim: int = 0, **options: Any) -> list[Tensor]:
    """At most `chunks` parts along `dim`, of which the last may be smaller."""
    return split(input_tensor, -(-input_tensor.shape[dim] // chunks), dim, **options)


@op(moves=True)
def squeeze(input_tensor: Value, dim: int | Sequence[int] | None = None) -> Value:
    """Without dims of one: all, or those named."""
    shape = input_tensor.shape
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {dim_of("squeeze", shape, d) for d in dims}
    return input_tensor.reshape(*[n for i, n in enumerate(shape) if i not in gone or n != 1])


@op(moves=True)
def unsqueeze(input_tensor: Value, dim: int) -> Value:
    """With a new dim of one at `dim`."""
    return F.unsqueeze(input_tensor, dim_of("unsqueeze", input_tensor.shape, dim, 1))


@public
def unsqueeze_to_4D(tensor: Tensor) -> Tensor:
    """With dims of one in front, to have four."""
    return reshape(tensor, tensor.shape.to_rank(4))


@op(moves=True)
def expand(input_tensor: Value, sizes: Sequence[int]) -> Value:
    """Repeated along dims of one, to the sizes; -1 leaves a dim."""
    have = [1] * (len(sizes) - input_tensor.ndim) + list(input_tensor.shape)
    full = tuple(h if n == -1 else n for h, n in zip(have, sizes))
    return F.broadcast_to(input_tensor, full)


@op(moves=True)
def repeat(input_tensor: Value, repeat_dims: Sequence[int]) -> Value:
    """The whole repeated along each dim."""
    return F.tile(input_tensor, repeat_dims)


@op(moves=True)
def repeat_interleave(input_tensor: Value, repeats: int, dim: int | None = None) -> Value:
    """Each element along `dim` repeated."""
    return F.repeat_interleave(input_tensor, repeats, dim)


@op(moves=True)
def pad(input_tensor: Value, padding: Any, value: Any = 0.0, legacy: float = 0.0) -> Value:
    """With `value` around: `padding` has (before, after) for the last dims, or for all.

    In the form of 2023 `padding` is the result's shape, `value` where the tensor begins in it, and
    `legacy` the value.
    """
    x = input_tensor
    if isinstance(value, tuple):
        sizes = zip(padding, value, x.shape, strict=True)
        padding, value = [(begin, whole - begin - n) for whole, begin, n in sizes], legacy
    pairs = [(0, 0) if p is None else p for p in padding]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    flat = [n for pair in reversed(pairs) for n in pair]
    if x.dtype.is_float:
        return F.pad(x, flat, value=float(value))
    return F.pad(x.to(int32), flat, value=int(value)).to(x.dtype)


def _ids(call: Call) -> None:
    ids, weight = call.tensors()
    if ids.dtype.is_float and ids.dtype is not DataType.BFLOAT16:
        raise wrong(
            f"embedding: ids are whole numbers, not {ids.dtype}",
            [("ids", ids.shape), ("weight", weight.shape)],
            fix="ttnn.from_torch(ids, dtype=ttnn.uint32, device=device)",
        )
    call.dtype, call.layout = weight.dtype, Layout.ROW_MAJOR


@op(moves=True, prepare=_ids, keywords=KEYWORDS | {"layout", "embeddings_type"})
def embedding(input_tensor: Value, weight: Value, *, padding_idx: int | None = None) -> Value:
    """The rows of `weight` [..., V, H] that the ids of `input_tensor` [B, S] name: [B, S, H]; of
    `padding_idx`, zeros. Ids may be whole numbers of bfloat16, too; one that names no row, such as
    0.5, gives NaN. Raises TTNNError for other floats."""
    ids, table = input_tensor, weight.reshape(weight.shape[-2], weight.shape[-1])
    if ids.dtype.is_float:
        ids = F.where(ids == F.floor(ids), ids, -(2.0**31))  # no row's
    ids = ids.to(int32)
    found = nn.embedding(ids, table)
    if padding_idx is None:
        return found
    return F.where(F.unsqueeze(ids == padding_idx, -1), 0.0, found)


# -- the form -------------------------------------------------------------------------------------
@public
def copy(input_a: Tensor, input_b: Tensor, **options: Any) -> Tensor:
    """Writes the elements of the first tensor into the second. Raises TTNNError unless both are of
    one shape."""
    return clone(input_a, **options | {"dtype": input_b.dtype, "output_tensor": input_b})


@public
def assign(input_tensor: Tensor, output: Tensor | None = None, **options: Any) -> Tensor:
    """The same elements in a tensor of its own, or written into `output`."""
    return (
        clone(input_tensor, **options) if output is None else copy(input_tensor, output, **options)
    )


@public
def reallocate(input_tensor: Tensor, memory_config: Any = None) -> Tensor:
    """The same tensor, moved together with others in memory, which XLA does itself."""
    if memory_config is not None:
        input_tensor.memory_config_ = memory_config
    return input_tensor


move = reallocate


@public
def to_dtype(tensor: Tensor, dtype: DataType) -> Tensor:
    """The elements as another type, of a tensor on the host too."""
    return typecast(tensor, dtype)


@public
def to_memory_config(
    tensor: Tensor, memory_config: Any, dtype: DataType | None = None, **options: Any
) -> Tensor:
    """The same tensor, said to lie elsewhere in the memories of its device."""
    return clone(tensor, dtype=dtype, **options | {"memory_config": memory_config})


@public
def interleaved_to_sharded(
    input_tensor: Tensor, memory_config: Any, *args: Any, output_dtype: DataType | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The same tensor, said to be cut over the cores of its device; of `output_dtype` if that is
    named."""
    return to_memory_config(input_tensor, memory_config, output_dtype, **options)


@public
def sharded_to_interleaved(
    input_tensor: Tensor, memory_config: Any = None, *args: Any,
    output_dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The same tensor, said to lie in one piece; of `output_dtype` if that is named."""
    lies = memory_config or DRAM_MEMORY_CONFIG
    return to_memory_config(input_tensor, lies, output_dtype, **options)


@public
def tilize(input_tensor: Tensor, *, dtype: DataType | None = None, **options: Any) -> Tensor:
    """The tensor in tiles; the padding to whole tiles is not seen."""
    return to_layout(input_tensor, Layout.TILE, dtype, **options)


tilize_with_zero_padding = tilize


@public
def untilize(input_tensor: Tensor, **options: Any) -> Tensor:
    """The tensor in rows."""
    return to_layout(input_tensor, Layout.ROW_MAJOR, **options)


@public
def tilize_with_val_padding(
    input_tensor: Tensor, output_tensor_shape: Sequence[int], pad_value: float = 0.0, **options: Any
) -> Tensor:
    """The tensor in tiles. It keeps its shape: the padding to `output_tensor_shape` is not seen.
    Raises TTNNError if that is smaller, or has other dims."""
    shape, full = input_tensor.shape, output_tensor_shape
    if len(full) != len(shape) or any(to < n for n, to in zip(shape, full)):
        raise wrong(
            "tilize_with_val_padding: a tensor is filled up to a shape that is not smaller",
            [("tensor", shape), ("output_tensor_shape", [*full])],
            fix=f"give {[*padded(shape, True)]}",
        )
    return tilize(input_tensor, **options)


@public
def untilize_with_unpadding(
    input_tensor: Tensor, output_tensor_end: Sequence[int], **options: Any
) -> Tensor:
    """The tensor in rows, up to and with the places of `output_tensor_end`."""
    ends = [n + 1 for n in output_tensor_end]
    return untilize(slice(input_tensor, [0] * len(ends), ends), **options)
