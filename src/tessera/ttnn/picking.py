"""Which ops of TT-NN say where elements are, or take and write elements by their places?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.dtypes import int32
from ..lang import functions as F
from ..lang.shaping import swap
from ..lang.tensor import Tensor as Value
from .dtypes import DataType, Layout
from .elementwise import named
from .faults import wrong
from .run import how, run, run_many
from .tensor import Tensor


def _best(name: str, body: Callable[[Value, int], Value]) -> Callable[..., Tensor]:
    def local(x: Value, dim: int | None, keepdim: bool) -> Value:
        if dim is None:
            found = body(x.reshape(-1), 0)
            return found.reshape((1,) * x.ndim) if keepdim else found
        found = body(x, dim)
        return F.unsqueeze(found, dim if dim >= 0 else dim + x.ndim) if keepdim else found

    local.__name__ = name

    def op(
        input_tensor: Tensor, dim: int | None = None, keepdim: bool = False, **options: Any
    ) -> Tensor:
        rows = Layout.ROW_MAJOR
        return run(name, local, [input_tensor], DataType.UINT32, **how(name, options), layout=rows,
                   dim=dim, keepdim=keepdim)  # fmt: skip

    text = "Where along `dim` the {} element is (the first of equal ones), as uint32; without `dim`"
    most = "largest" if name == "argmax" else "smallest"
    return named(op, name, f"{text.format(most)} in the whole part.")


argmax, argmin = _best("argmax", F.argmax), _best("argmin", F.argmin)


def _places(x: Tensor, dim: int) -> DataType:
    """The type of places along a dim."""
    return DataType.UINT16 if x.shape[dim] <= 1 << 16 else DataType.UINT32


def topk(
    input_tensor: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *,
    indices_tensor: Tensor | None = None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The `k` largest (or smallest) elements along `dim`, and where they are (uint16; uint32 of a
    dim that has more places): by `indices_tensor`, which names each element's place, if it is
    given."""
    given = [] if indices_tensor is None else [indices_tensor]
    kinds = [None, given[0].dtype if given else _places(input_tensor, dim)]
    return run_many("topk", _topk, [input_tensor, *given], kinds, **how("topk", options), count=2,
                    k=k, dim=dim, largest=largest)  # fmt: skip


def _topk(x: Value, *ids: Value, k: int, dim: int, largest: bool) -> tuple[Value, Value]:
    last = dim in (-1, x.ndim - 1)
    values, places = F.topk(x if last else swap(x, dim, -1), k, largest=largest)
    if not last:
        values, places = swap(values, dim, -1), swap(places, dim, -1)
    return values, F.gather(ids[0], places, dim) if ids else places


def sort(
    input_tensor: Tensor, dim: int = -1, descending: bool = False, stable: bool = False,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The elements in order along `dim`, and where they were, of the type that `topk` gives. Equal
    ones keep their order."""
    kinds = [None, _places(input_tensor, dim)]
    return run_many("sort", _sort, [input_tensor], kinds, **how("sort", options), count=2, dim=dim,
                    descending=descending)  # fmt: skip


def _sort(x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    return F.sort(x, dim, descending)


def gather(input: Tensor, dim: int, index: Tensor, **options: Any) -> Tensor:
    """The elements that `index` names along `dim`, each in its own row, in the shape of `index`.
    Raises TTNNError for an index of floats."""
    options.pop("sparse_grad", None)
    _whole("gather", index)
    return run("gather", _gather, [input, index], **how("gather", options), dim=dim)


def _whole(name: str, index: Tensor) -> None:
    if index.dtype.is_float:
        raise wrong(
            f"{name}: the index is of whole numbers, not {index.dtype}",
            [("index", index.shape)],
            fix="ttnn.typecast(index, ttnn.uint32)",
        )


def _gather(x: Value, ids: Value, dim: int) -> Value:
    return F.gather(x, ids.to(int32), dim)


def scatter(
    input: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The tensor with each element of `src` at the place along `dim` that `index` names: in its
    stead (of several for one place the last), or with `reduce="add"` added to it. Raises TTNNError
    for an index of floats."""
    _whole("scatter", index)
    if reduce not in (None, "add"):
        raise wrong(f"scatter: reduce={reduce!r} is not provided", fix='give "add", or none')
    said = how("scatter", options)
    return run("scatter", _scatter, [input, index, src], **said, dim=dim, add=reduce == "add")


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor, **options: Any) -> Tensor:
    """`scatter` with `reduce="add"`."""
    return scatter(input, dim, index, src, reduce="add", **options)


def _scatter(x: Value, ids: Value, src: Value, dim: int, add: bool) -> Value:
    ids, dim = ids.to(int32), dim % x.ndim
    src = src[tuple(slice(n) for n in ids.shape)]
    if add:
        return F.scatter_add(x, ids, src, dim)
    short = [0 if d == dim else n - m for d, (n, m) in enumerate(zip(x.shape, ids.shape))]
    pads = [n for k in reversed(short) for n in (0, k)]
    ids, src = F.pad(ids, pads, value=-1), F.pad(src, pads)  # -1: into no place
    ids = swap(ids, dim, -1)
    hit = F.unsqueeze(ids, -2) == F.arange(x.shape[dim]).reshape(-1, 1)
    last = swap(F.max(F.where(hit, F.arange(ids.shape[-1]), -1), -1), dim, -1)
    return F.where(last >= 0, F.gather(src, F.maximum(last, 0), dim), x)


def roll(input_tensor: Tensor, shifts: Any, dim: Any = None, **options: Any) -> Tensor:
    """The elements moved by `shifts` places along `dim`, one or several; what leaves comes in
    again."""
    by, dims = (tuple(n) if isinstance(n, list) else n for n in (shifts, dim))
    return run("roll", _roll, [input_tensor], **how("roll", options), shifts=by, dims=dims)


def _roll(x: Value, shifts: Any, dims: Any) -> Value:
    return F.roll(x, shifts, dims)


def plus_one(
    input_tensor: Tensor, *, skip_negative_entries: bool = False, **options: Any
) -> Tensor:
    """Adds one to each place of a list, in the tensor itself; to those below 0 not, with
    `skip_negative_entries`."""
    how("plus_one", options)
    return run("plus_one", _plus_one, [input_tensor], output=input_tensor,
               skip=skip_negative_entries)  # fmt: skip


def _plus_one(x: Value, skip: bool) -> Value:
    return F.where(x < 0, x, x + 1) if skip else x + 1


__all__ = [
    "argmax", "argmin", "gather", "plus_one", "roll", "scatter", "scatter_add", "sort", "topk",
]  # fmt: skip
