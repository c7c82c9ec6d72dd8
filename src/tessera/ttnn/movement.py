"""Which ops of TT-NN give the same elements, elsewhere or in another form?"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from .. import nn
from ..core.dtypes import int32
from ..lang import functions as F
from ..lang.shaping import swap
from ..lang.tensor import Tensor as Value
from .asked import dim_of
from .configs import DRAM_MEMORY_CONFIG
from .dtypes import DataType, Layout
from .faults import wrong
from .run import brief, how, moves, run, run_many
from .shapes import padded
from .tensor import Tensor
from .transfer import identity, to_layout, typecast


def reshape(input_tensor: Tensor, *shape: Any, **options: Any) -> Tensor:
    """The same elements in another shape; -1 stands for what is left."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return run("reshape", _reshape, [input_tensor], **how("reshape", options), shape=sizes)


@moves
def _reshape(x: Value, shape: tuple[int, ...]) -> Value:
    return x.reshape(*shape)


view = reshape


def permute(input_tensor: Tensor, dims: Sequence[int], **options: Any) -> Tensor:
    """The dims in another order."""
    options.pop("pad_value", None)
    said = how("permute", options)
    return run("permute", _permute, [input_tensor], **said, dims=tuple(dims))


@moves
def _permute(x: Value, dims: tuple[int, ...]) -> Value:
    return F.permute(x, dims)


def transpose(input_tensor: Tensor, dim1: int, dim2: int, **options: Any) -> Tensor:
    """Two dims in each other's place."""
    options.pop("pad_value", None)
    said = how("transpose", options)
    return run("transpose", _transpose, [input_tensor], **said, one=dim1, two=dim2)


@moves
def _transpose(x: Value, one: int, two: int) -> Value:
    return swap(x, one, two)


def concat(tensors: Sequence[Tensor], dim: int = 0, **options: Any) -> Tensor:
    """Tensors one after the other along `dim`."""
    if isinstance(tensors, Tensor) or not tensors:
        raise wrong("concat: it takes a list of tensors", fix="ttnn.concat([a, b], dim=0)")
    if options.pop("groups", 1) != 1:
        raise wrong("concat: groups= is not provided", fix="split and concat the parts")
    return run("concat", _concat, list(tensors), **how("concat", options), dim=dim)


@moves
def _concat(*xs: Value, dim: int) -> Value:
    return F.concat(list(xs), dim)


def stack(tensors: Sequence[Tensor], dim: int = 0, **options: Any) -> Tensor:
    """Tensors along a new dim."""
    return run("stack", _stack, list(tensors), **how("stack", options), dim=dim)


@moves
def _stack(*xs: Value, dim: int) -> Value:
    return F.stack(list(xs), dim)


def slice(
    input_tensor: Tensor, slice_start: Any = None, slice_end: Any = None, slice_step: Any = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The elements from `slice_start` on, before `slice_end`, each `slice_step`-th, dim by dim.

    Bounds are lists of numbers, or tensors of them, which are read for it.
    """
    start, end = options.pop("starts", slice_start), options.pop("ends", slice_end)
    rank = len(input_tensor.shape)
    step = options.pop("steps", slice_step)
    start, end, step = map(_numbers, (start, end, [1] * rank if step is None else step))
    for bounds in (start, end, step):
        if not isinstance(bounds, Sequence) or len(bounds) != rank:
            raise wrong(
                f"slice: it takes {rank} numbers for starts, ends and steps each",
                [("tensor", input_tensor.shape), ("given", (start, end, step))],
                fix="give one for each dim, or write tensor[:, 0:32]",
            )
    pick = tuple((int(a), int(b), int(s)) for a, b, s in zip(start, end, step, strict=True))
    return run("slice", _slice, [input_tensor], **how("slice", options), pick=pick)


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


@moves
def _slice(x: Value, pick: tuple[Any, ...]) -> Value:
    found = x[tuple(_range(p) if isinstance(p, tuple) else p for p in pick)]
    assert isinstance(found, Value)
    return found


def _range(p: tuple[Any, ...]) -> Any:
    return builtins.slice(*p)


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
    pick = tuple((p.start, p.stop, p.step) if isinstance(p, builtins.slice) else p for p in parts)
    return run("slice", _slice, [x], pick=pick)


def split(
    input_tensor: Tensor, split_size: int | Sequence[int], dim: int = 0, **options: Any
) -> list[Tensor]:
    """Parts along `dim`, each of `split_size`, the last one of what is left; or of the sizes that
    are named."""
    width = input_tensor.shape[dim]
    sizes = [split_size] * (width // split_size) if isinstance(split_size, int) else [*split_size]
    if (left := width - builtins.sum(sizes)) and isinstance(split_size, int):
        sizes.append(left)
    said = how("split", options)
    kinds = [input_tensor.dtype] * len(sizes)
    return run_many("split", _split, [input_tensor], kinds, **said, count=len(sizes),
                sizes=tuple(sizes), dim=dim)  # fmt: skip


@moves
def _split(x: Value, sizes: tuple[int, ...], dim: int) -> tuple[Value, ...]:
    return tuple(F.split(x, sizes, dim))


def chunk(input_tensor: Tensor, chunks: int, dim: int = 0, **options: Any) -> list[Tensor]:
    """At most `chunks` parts along `dim`, of which the last may be smaller."""
    return split(input_tensor, -(-input_tensor.shape[dim] // chunks), dim, **options)


def squeeze(input_tensor: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Without dims of one: all, or those named."""
    shape = input_tensor.shape
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {dim_of("squeeze", shape, d) for d in dims}
    return reshape(input_tensor, [n for i, n in enumerate(shape) if i not in gone or n != 1])


def unsqueeze(input_tensor: Tensor, dim: int) -> Tensor:
    """With a new dim of one at `dim`."""
    sizes = list(input_tensor.shape)
    sizes.insert(dim_of("unsqueeze", sizes, dim, 1), 1)
    return reshape(input_tensor, sizes)


def unsqueeze_to_4D(tensor: Tensor) -> Tensor:
    """With dims of one in front, to have four."""
    return reshape(tensor, tensor.shape.to_rank(4))


def expand(input_tensor: Tensor, sizes: Sequence[int], **options: Any) -> Tensor:
    """Repeated along dims of one, to the sizes; -1 leaves a dim."""
    have = [1] * (len(sizes) - len(input_tensor.shape)) + list(input_tensor.shape)
    full = tuple(h if n == -1 else n for h, n in zip(have, sizes))
    return run("expand", _expand, [input_tensor], **how("expand", options), shape=full)


@moves
def _expand(x: Value, shape: tuple[int, ...]) -> Value:
    return F.broadcast_to(x, shape)


def repeat(input_tensor: Tensor, repeat_dims: Sequence[int], **options: Any) -> Tensor:
    """The whole repeated along each dim."""
    said = how("repeat", options)
    return run("repeat", _repeat, [input_tensor], **said, counts=tuple(repeat_dims))


@moves
def _repeat(x: Value, counts: tuple[int, ...]) -> Value:
    return F.tile(x, counts)


def repeat_interleave(
    input_tensor: Tensor, repeats: int, dim: int | None = None, **options: Any
) -> Tensor:
    """Each element along `dim` repeated."""
    said = how("repeat_interleave", options)
    return run("repeat_interleave", _interleave, [input_tensor], **said, repeats=repeats, dim=dim)


@moves
def _interleave(x: Value, repeats: int, dim: int | None) -> Value:
    return F.repeat_interleave(x, repeats, dim)


def pad(
    input_tensor: Tensor, padding: Any, value: Any = 0.0, *legacy: Any, **options: Any
) -> Tensor:
    """With `value` around: `padding` has (before, after) for the last dims, or for all."""
    if isinstance(value, list | tuple):  # pad(tensor, the result's shape, where it begins, value)
        sizes = zip(padding, value, input_tensor.shape, strict=True)
        padding = [(begin, whole - begin - n) for whole, begin, n in sizes]
        value, legacy = (legacy or (0.0,))[0], legacy[1:]
    pairs = [(0, 0) if p is None else tuple(p) for p in padding]
    pairs = [(0, 0)] * (len(input_tensor.shape) - len(pairs)) + pairs
    said = how("pad", options)
    return run("pad", _pad, [input_tensor], **said, pairs=tuple(pairs), value=float(value))


@moves
def _pad(x: Value, pairs: tuple[tuple[int, int], ...], value: float) -> Value:
    flat = [n for pair in reversed(pairs) for n in pair]
    if x.dtype.is_float:
        return F.pad(x, flat, value=value)
    return F.pad(x.to(int32), flat, value=int(value)).to(x.dtype)


def embedding(
    input_tensor: Tensor, weight: Tensor, *, padding_idx: int | None = None,
    layout: Layout | None = None, dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The rows of `weight` [..., V, H] that the ids of `input_tensor` [B, S] name: [B, S, H]; of
    `padding_idx`, zeros. Ids may be whole numbers of bfloat16, too; one that names no row, such as
    0.5, gives NaN. Raises TTNNError for other floats."""
    options.pop("embeddings_type", None)
    if input_tensor.dtype.is_float and input_tensor.dtype is not DataType.BFLOAT16:
        raise wrong(
            f"embedding: ids are whole numbers, not {input_tensor.dtype}",
            [("ids", input_tensor.shape), ("weight", weight.shape)],
            fix="ttnn.from_torch(ids, dtype=ttnn.uint32, device=device)",
        )
    said = how("embedding", options)
    return run("embedding", _embedding, [input_tensor, weight], dtype or weight.dtype, **said,
               layout=layout or Layout.ROW_MAJOR, padding_idx=padding_idx)  # fmt: skip


@moves
def _embedding(ids: Value, weight: Value, padding_idx: int | None) -> Value:
    table = weight.reshape(weight.shape[-2], weight.shape[-1])
    if ids.dtype.is_float:
        ids = F.where(ids == F.floor(ids), ids, -(2.0**31))  # no row's
    ids = ids.to(int32)
    found = nn.embedding(ids, table)
    if padding_idx is None:
        return found
    return F.where(F.unsqueeze(ids == padding_idx, -1), 0.0, found)


# -- the form -------------------------------------------------------------------------------------
def clone(input_tensor: Tensor, *, dtype: DataType | None = None, **options: Any) -> Tensor:
    """The same elements in a tensor of its own."""
    return run("clone", identity, [input_tensor], dtype, **how("clone", options))


def copy(input_a: Tensor, input_b: Tensor, **options: Any) -> Tensor:
    """Writes the elements of the first tensor into the second. Raises TTNNError unless both are of
    one shape."""
    how("copy", options)
    return run("copy", identity, [input_a], input_b.dtype, output=input_b)


def assign(
    input_tensor: Tensor, output: Tensor | None = None, *, dtype: DataType | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The same elements in a tensor of its own, or written into `output`."""
    if output is not None:
        return copy(input_tensor, output, **options)
    return clone(input_tensor, dtype=dtype, **options)


def reallocate(input_tensor: Tensor, memory_config: Any = None) -> Tensor:
    """The same tensor, moved together with others in memory, which XLA does itself."""
    if memory_config is not None:
        input_tensor.memory_config_ = memory_config
    return input_tensor


move = reallocate


def to_dtype(tensor: Tensor, dtype: DataType) -> Tensor:
    """The elements as another type, of a tensor on the host too."""
    return typecast(tensor, dtype)


def to_memory_config(
    tensor: Tensor, memory_config: Any, dtype: DataType | None = None, **options: Any
) -> Tensor:
    """The same tensor, said to lie elsewhere in the memories of its device."""
    return clone(tensor, dtype=dtype, **options | {"memory_config": memory_config})


def interleaved_to_sharded(
    input_tensor: Tensor, memory_config: Any, *rest: Any, output_dtype: DataType | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The same tensor, said to be cut over the cores of its device; of `output_dtype` if that is
    named."""
    how("interleaved_to_sharded", options)
    return to_memory_config(input_tensor, memory_config, output_dtype)


def sharded_to_interleaved(
    input_tensor: Tensor, memory_config: Any = None, *rest: Any,
    output_dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The same tensor, said to lie in one piece; of `output_dtype` if that is named."""
    how("sharded_to_interleaved", options)
    return to_memory_config(input_tensor, memory_config or DRAM_MEMORY_CONFIG, output_dtype)


def tilize(input_tensor: Tensor, *, dtype: DataType | None = None, **options: Any) -> Tensor:
    """The tensor in tiles."""
    how("tilize", options)
    return to_layout(input_tensor, Layout.TILE, dtype)


def untilize(input_tensor: Tensor, **options: Any) -> Tensor:
    """The tensor in rows."""
    how("untilize", options)
    return to_layout(input_tensor, Layout.ROW_MAJOR)


def tilize_with_val_padding(
    input_tensor: Tensor, output_tensor_shape: Sequence[int], pad_value: float = 0.0, **options: Any
) -> Tensor:
    """The tensor in tiles. It keeps its shape: what fills it up to `output_tensor_shape` is not
    seen. Raises TTNNError if that is smaller, or has other dims."""
    how("tilize_with_val_padding", options)
    shape = input_tensor.shape
    if len(output_tensor_shape) != len(shape) or any(
        to < n for n, to in zip(shape, output_tensor_shape)
    ):
        raise wrong(
            "tilize_with_val_padding: a tensor is filled up to a shape that is not smaller",
            [("tensor", shape), ("output_tensor_shape", [*output_tensor_shape])],
            fix=f"give {[*padded(shape, True)]}",
        )
    return tilize(input_tensor)


def tilize_with_zero_padding(input_tensor: Tensor, **options: Any) -> Tensor:
    """The tensor in tiles; what pads it is not seen."""
    how("tilize_with_zero_padding", options)
    return tilize(input_tensor)


def untilize_with_unpadding(
    input_tensor: Tensor, output_tensor_end: Sequence[int], **options: Any
) -> Tensor:
    """The tensor in rows, up to and with the places of `output_tensor_end`."""
    how("untilize_with_unpadding", options)
    ends = [n + 1 for n in output_tensor_end]
    return untilize(slice(input_tensor, [0] * len(ends), ends))


for _name, _op in {"__getitem__": getitem, "reshape": reshape}.items():
    setattr(Tensor, _name, _op)

__all__ = [
    "assign", "chunk", "clone", "concat", "copy", "embedding", "expand", "interleaved_to_sharded",
    "move", "pad", "permute", "reallocate", "repeat", "repeat_interleave", "reshape",
    "sharded_to_interleaved", "slice", "split", "squeeze", "stack", "tilize",
    "tilize_with_val_padding", "tilize_with_zero_padding", "to_dtype", "to_memory_config",
    "transpose", "unsqueeze", "unsqueeze_to_4D", "untilize", "untilize_with_unpadding", "view",
]  # fmt: skip
