"""Shape functions: `reshape`, `permute`, `broadcast_to`, `concat`, `stack`, `split`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.checks import several, sizes, unfit, whole
from ...core.declared import Integer
from ...core.dtypes import promote
from ...core.errors import ShapeError, UsageError
from ...core.value_checks import is_whole
from ..record.operands import as_tensor, emit
from ..value.tensor import Like, Tensor, method

Dims = int | Sequence[int] | None


def dims_of(name: str, x: Tensor, dim: Dims) -> tuple[int, ...]:
    """Returns `dim` as sorted non-negative dims of `x`; None is all dims. For a scalar, 0 and -1
    are accepted, as in PyTorch, and give no dims. Raises ShapeError if a dim does not exist or is
    named twice."""
    dims: Any = range(x.ndim) if dim is None else (dim,) if is_whole(dim) else dim
    if not isinstance(dims, (tuple, list, range)):
        whole(name, "dim", dim)  # raises UsageError
    out = []
    for d in (whole(name, "dim", d) for d in dims):
        if not x.ndim and d in (0, -1):
            continue
        if not -x.ndim <= d < x.ndim:
            raise ShapeError(
                f"{name}: there is no dim {d}", x=x.type, fix=f"dims are {-x.ndim} to {x.ndim - 1}"
            )
        if d % x.ndim in out:
            fix = "name each dim once"
            raise ShapeError(f"{name}: dim {d} is named twice", x=x.type, fix=fix)
        out.append(d % x.ndim)
    return tuple(sorted(out))


def one_dim(name: str, x: Tensor, dim: int) -> int:
    """Returns `dim` as one non-negative dim of `x`. Raises ShapeError if it does not exist,
    UsageError if it is not a whole number."""
    dims = dims_of(name, x, whole(name, "dim", dim))
    if not dims:
        raise ShapeError(f"{name}: a scalar has no dims", x=x.type, fix="reshape it")
    return dims[0]


def need_elements(name: str, x: Tensor, dims: Sequence[int]) -> None:
    """Raises ShapeError if a result would have to be one of no elements along `dims`."""
    none = [d for d in dims if not x.shape[d]]
    if none and all(n for d, n in enumerate(x.shape) if d not in dims):
        raise ShapeError(
            f"{name}: dim {none[0]} has no elements, so there is none to give",
            x=x.type,
            fix="ask x.size first, or ts.concat a value that stands for none",
        )


def along(fn: Callable[[Tensor, int], Tensor], name: str, x: Like, dim: int) -> Tensor:
    """Returns `fn(x, d)` for `x` and its dim; a scalar is passed as a tensor of one element."""
    t = as_tensor(x)
    line = t if t.ndim else reshape(t, 1)
    out = fn(line, one_dim(name, line, dim))
    return out if t.ndim else reshape(out, ())


# -- shape ----------------------------------------------------------------------------------------
@method("reshape")
def reshape(x: Like, *shape: int | Sequence[int]) -> Tensor:
    """`x` in another shape, its elements in row-major order; one size may be -1 (the remaining
    one).

    Raises ShapeError if the number of elements differs.
    """
    t = as_tensor(x)
    new = [whole("reshape", "a size", n) for n in _spread("reshape", shape)]
    if new.count(-1) == 1:
        known_size = math.prod(n for n in new if n != -1)
        if known_size > 0 and t.size % known_size == 0:
            new[new.index(-1)] = t.size // known_size
    if any(n < 0 for n in new):
        raise ShapeError(
            f"reshape: {t.size} elements do not fit shape {tuple(new)}",
            x=t.type,
            fix="sizes are >= 0; one of them may be -1 where the rest, above 0, divides",
        )
    return t if tuple(new) == t.shape else emit("reshape", t, shape=tuple(new))


def _spread(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Returns the sizes or dims of a call, given as `f(2, 3)` or as `f((2, 3))`."""
    if len(args) == 1 and not is_whole(args[0]):
        inner = args[0]
        if not isinstance(inner, (tuple, list, np.ndarray, range)):
            whole(name, "a size" if name == "reshape" else "a dim", inner)  # raises UsageError
        return list(inner)
    return args


@method("permute")
def permute(x: Like, *dims: int | Sequence[int]) -> Tensor:
    """`x` with its dims in the order `dims`: dim i of the result is dim `dims[i]` of `x`.

    Raises ShapeError if `dims` does not name each dim once.
    """
    t = as_tensor(x)
    order = [whole("permute", "a dim", d) for d in _spread("permute", dims)]
    perm = tuple(d % t.ndim if -t.ndim <= d < t.ndim else d for d in order)
    if sorted(perm) != list(range(t.ndim)):
        raise ShapeError(
            f"permute: {tuple(order)} is no order of {t.ndim} dims",
            x=t.type,
            fix=f"name each of 0 to {t.ndim - 1} once",
        )
    return emit("transpose", t, perm=perm)


@method("transpose")
def swap(x: Like, a: int | Sequence[int] | None = None, b: int = -1) -> Tensor:
    """`x` with two dims exchanged; a matrix with its two dims; or all dims in the order `a`, as in
    NumPy. Raises UsageError if `x` has more than two dims and none is named."""
    t = as_tensor(x)
    if a is None and t.ndim > 2:
        raise UsageError(
            "transpose: no dims are named",
            x=t.type,
            fix="x.transpose(-2, -1) exchanges the last two, x.T has all in reverse order",
        )
    if isinstance(a, Sequence):
        return permute(t, a)
    a = -2 if a is None else a
    i, j = one_dim("transpose", t, a), one_dim("transpose", t, b)
    perm = list(range(t.ndim))
    perm[i], perm[j] = j, i
    return emit("transpose", t, perm=tuple(perm))


def broadcast_to(x: Like, shape: Sequence[int]) -> Tensor:
    """`x` broadcast to `shape` by NumPy's rules. Raises ShapeError if that is not possible."""
    t = as_tensor(x)
    if isinstance(shape, (list, tuple)) and any(is_whole(n) and n == -1 for n in shape):
        fix = "write the size that stays, as in (4, *x.shape[1:])"
        raise unfit("broadcast_to", "shape", shape, fix, ShapeError)
    new = sizes("broadcast_to", shape)
    return t if new == t.shape else emit("broadcast_to", t, shape=new)


def concat(xs: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors `xs` joined along the existing dim `dim`; mixed dtypes are promoted to one.

    Raises UsageError if `xs` is empty, ShapeError if sizes differ in another dim.
    """
    ts = _one_dtype([as_tensor(x) for x in several("concat", xs)])
    d = one_dim("concat", ts[0], dim)
    return emit("concat", *ts, dim=d) if len(ts) > 1 else ts[0]


def _one_dtype(ts: list[Tensor]) -> list[Tensor]:
    want = ts[0].dtype
    for t in ts[1:]:
        want = promote(want, t.dtype)
    return [t.to(want) for t in ts]


def stack(xs: Sequence[Tensor], dim: Integer = 0) -> Tensor:
    """The tensors `xs`, all of one shape, joined along a new dim at place `dim`.

    Raises UsageError if `xs` is empty, ShapeError if shapes differ or `dim` is out of range.
    """
    ts = [as_tensor(x) for x in several("stack", xs)]
    rank = ts[0].ndim + 1
    if not -rank <= dim < rank or any(t.shape != ts[0].shape for t in ts):
        raise ShapeError(
            f"stack: tensors of one shape and a dim from {-rank} to {rank - 1} are needed",
            rows=[*((f"x{i}", t.type) for i, t in enumerate(ts[:4])), ("dim", dim)],
            fix="reshape the tensors, or use ts.concat along a dim that is there",
        )
    at = dim % rank
    return concat([t.reshape((*t.shape[:at], 1, *t.shape[at:])) for t in ts], at)


def split(x: Like, sections: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    """A list of the parts of `x` along `dim`: `sections` equal parts, or parts of the given sizes.

    Raises ShapeError if the sizes do not add up to the size of `dim`.
    """
    t = as_tensor(x)
    d = one_dim("split", t, dim)
    n = t.shape[d]
    if is_whole(sections):
        count = whole("split", "sections", sections)
        count = min(count, n + 1) if n else count
        parts = [n // count] * count if count > 0 else []
    else:
        parts = list(sizes("split", sections))
    if sum(parts) != n or not parts:
        raise ShapeError(
            f"split: dim {d} of size {n} does not divide into {sections}",
            x=t.type,
            fix="give a divisor, or sizes that add up",
        )
    out, at = [], 0
    for size in parts:
        out.append(sliced(t, {d: (at, at + size, 1)}))
        at += size
    return out


def sliced(t: Tensor, rows: dict[int, tuple[int, int, int]]) -> Tensor:
    """Slices each dim in `rows` by its (start, stop, step); other dims stay whole."""
    full = [rows.get(i, (0, n, 1)) for i, n in enumerate(t.shape)]
    if all(r == (0, n, 1) for r, n in zip(full, t.shape, strict=True)):
        return t
    starts, stops, steps = zip(*full, strict=True)
    return emit("slice", t, starts=starts, stops=stops, steps=steps)
