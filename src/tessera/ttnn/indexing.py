"""Rows of the ops that find elements, or take and write elements by their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.dtypes import int32
from ..lang.math import functions as F
from ..lang.math.shape import swap
from ..lang.value.tensor import Tensor as Value
from .dtypes import DataType, Layout
from .errors import wrong
from .op import KEYWORDS, Call, op, row


def _best(name: str, body: Callable[[Value, int], Value]) -> Any:
    def local(x: Value, dim: int | None, keepdim: bool) -> Value:
        if dim is None:
            found = body(x.reshape(-1), 0)
            return found.reshape((1,) * x.ndim) if keepdim else found
        found = body(x, dim)
        return F.unsqueeze(found, dim if dim >= 0 else dim + x.ndim) if keepdim else found

    return row(
        name, local, "input_tensor", options={"dim": None, "keepdim": False},
        dtype=DataType.UINT32, layout=Layout.ROW_MAJOR,
    )  # fmt: skip


argmax, argmin = _best("argmax", F.argmax), _best("argmin", F.argmin)


def _places(call: Call) -> None:
    """Sets the element types: places are uint16, or uint32 of a dim that has more of them."""
    x, *ids = call.tensors()
    fits = x.shape[call.options["dim"]] <= 1 << 16
    call.dtype = [None, ids[0].dtype if ids else DataType.UINT16 if fits else DataType.UINT32]


@op(prepare=_places)
def topk(
    input_tensor: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *,
    indices_tensor: Value | None = None,
) -> list[Value]:  # fmt: skip
    """The `k` largest (or smallest) elements along `dim`, and their places (uint16; uint32 of a dim
    that has more places): by `indices_tensor`, which names each element's place, if it is given."""
    x = input_tensor
    last = dim in (-1, x.ndim - 1)
    values, places = F.topk(x if last else swap(x, dim, -1), k, largest=largest)
    if not last:
        values, places = swap(values, dim, -1), swap(places, dim, -1)
    return [values, places if indices_tensor is None else F.gather(indices_tensor, places, dim)]


@op(prepare=_places)
def sort(
    input_tensor: Value, dim: int = -1, descending: bool = False, stable: bool = False
) -> list[Value]:
    """The elements in order along `dim`, and their places before, of the type that `topk` gives.
    Equal ones keep their order."""
    return list(F.sort(input_tensor, dim, descending))


def _whole(name: str, index: Value) -> Value:
    if index.dtype.is_float:
        raise wrong(
            f"{name}: the index is of whole numbers, not {index.dtype.name}",
            [("index", index.shape)],
            fix="ttnn.typecast(index, ttnn.uint32)",
        )
    return index.to(int32)


@op(keywords=KEYWORDS | {"sparse_grad"})
def gather(input: Value, dim: int, index: Value) -> Value:
    """The elements that `index` names along `dim`, each in its own row, in the shape of `index`.
    Raises TTNNError for an index of floats."""
    return F.gather(input, _whole("gather", index), dim)


@op()
def scatter(
    input: Value, dim: int, index: Value, src: Value, *, reduce: str | None = None
) -> Value:
    """The tensor with each element of `src` at the place along `dim` that `index` names: in its
    stead (of several for one place the last), or with `reduce="add"` added to it. Raises TTNNError
    for an index of floats."""
    x, ids, dim = input, _whole("scatter", index), dim % input.ndim
    src = src[tuple(slice(n) for n in ids.shape)]
    if reduce == "add":
        return F.scatter_add(x, ids, src, dim)
    if reduce is not None:
        raise wrong(f"scatter: reduce={reduce!r} is not provided", fix='give "add", or none')
    short = [0 if d == dim else n - m for d, (n, m) in enumerate(zip(x.shape, ids.shape))]
    pads = [n for k in reversed(short) for n in (0, k)]
    ids, src = F.pad(ids, pads, value=-1), F.pad(src, pads)  # -1: into no place
    ids = swap(ids, dim, -1)
    hit = F.unsqueeze(ids, -2) == F.arange(x.shape[dim]).reshape(-1, 1)
    last = swap(F.max(F.where(hit, F.arange(ids.shape[-1]), -1), -1), dim, -1)
    return F.where(last >= 0, F.gather(src, F.maximum(last, 0), dim), x)


@op()
def scatter_add(input: Value, dim: int, index: Value, src: Value) -> Value:
    """`scatter` with `reduce="add"`."""
    ids = _whole("scatter_add", index)
    cut = src[tuple(slice(n) for n in ids.shape)]
    return F.scatter_add(input, ids, cut, dim % input.ndim)


@op()
def roll(input_tensor: Value, shifts: Any, dim: Any = None) -> Value:
    """The elements moved by `shifts` places along `dim`, one or several; elements that
    leave at one end come in at the other."""
    return F.roll(input_tensor, shifts, dim)


@op(into="input_tensor")
def plus_one(input_tensor: Value, *, skip_negative_entries: bool = False) -> Value:
    """Adds one to each place of a list, in the tensor itself; to those below 0 not, with
    `skip_negative_entries`."""
    x = input_tensor
    return F.where(x < 0, x, x + 1) if skip_negative_entries else x + 1
