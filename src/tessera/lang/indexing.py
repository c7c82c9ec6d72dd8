"""Functions that order elements, find them, and pick them by their ids."""

from __future__ import annotations

from ..core.dtypes import f32
from ..core.errors import ShapeError, fail
from .checks import flag, sizes, whole
from .shaping import one_dim, swap
from .tensor import Like, Tensor, as_tensor, emit, emit_many


def argmax(x: Like, dim: int = -1) -> Tensor:
    t = as_tensor(x)
    return emit("argmax", t, dim=one_dim("argmax", t, dim))


def argmin(x: Like, dim: int = -1) -> Tensor:
    t = as_tensor(x)
    return emit("argmin", t, dim=one_dim("argmin", t, dim))


def argsort(x: Like, dim: int = -1, descending: bool = False) -> Tensor:
    """The order that sorts `dim`; equal values keep their order."""
    t = as_tensor(x)
    d, down = one_dim("argsort", t, dim), flag("argsort", "descending", descending)
    return emit("argsort", t, dim=d, descending=down)


def sort(x: Like, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """`x` sorted along `dim`, and where each value stood; equal values keep their order."""
    t = as_tensor(x)
    ids = argsort(t, dim, descending)
    return gather(t, ids, dim), ids


def flip(x: Like, dim: int = -1) -> Tensor:
    t = as_tensor(x)
    return emit("flip", t, dim=one_dim("flip", t, dim))


def topk(x: Like, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The `k` largest values along `dim`, descending, and their ids; ties by lower id."""
    t = as_tensor(x)
    k, d = whole("topk", "k", k), one_dim("topk", t, dim) if t.ndim else 0
    if not t.ndim or not 1 <= k <= t.shape[d]:
        raise fail(
            ShapeError,
            f"topk: cannot take {k} of dim {d}",
            [("x", t.type)],
            fix="1 <= k <= its size",
        )
    if d == t.ndim - 1:
        values, ids = emit_many("top_k", t, k=k)
    else:
        values, ids = (swap(part, d, -1) for part in emit_many("top_k", swap(t, d, -1), k=k))
    return values, ids


# -- indexing -------------------------------------------------------------------------------------
def take(x: Like, ids: Like, dim: int = 0) -> Tensor:
    """Rows of `x` along `dim`; an id outside gives zeros."""
    t = as_tensor(x)
    return emit("take", t, as_tensor(ids), dim=one_dim("take", t, dim))


def gather(x: Like, ids: Like, dim: int = -1) -> Tensor:
    """`x` at `ids` along `dim`, elementwise in the other dims; an id outside gives zeros."""
    t = as_tensor(x)
    return emit("take_along", t, as_tensor(ids), dim=one_dim("gather", t, dim))


def scatter_add(x: Like, ids: Like, updates: Like, dim: int = -1) -> Tensor:
    """`x` with `updates` added at `ids` along `dim`, elementwise in the other dims.

    `ids` of one dim say where whole slices of `updates` go. Raises ShapeError, DTypeError.
    """
    t, at, u = as_tensor(x), as_tensor(ids), as_tensor(updates)
    d = one_dim("scatter_add", t, dim)
    if at.ndim == 1 < t.ndim and u.shape == (*t.shape[:d], at.size, *t.shape[d + 1 :]):
        return t + emit("put", at, u, dim=d, into=str(t.shape[d]))
    alike = t.ndim == at.ndim == u.ndim and all(
        n == m and k in (1, n)
        for i, (n, k, m) in enumerate(zip(t.shape, at.shape, u.shape))
        if i != d
    )
    if not alike or at.shape[d] != u.shape[d]:
        raise fail(
            ShapeError,
            f"scatter_add: ids and updates must match each other, and x but for dim {d}",
            [("x", t.type), ("ids", at.type), ("updates", u.type)],
            fix="give each update an id: both of one shape, with the rank of x",
        )
    return t + emit("put_along", at, u, dim=d, into=str(t.shape[d]))


def one_hot(ids: Like, count: int, dtype: object = f32) -> Tensor:
    t = as_tensor(ids)
    shape = sizes("one_hot", whole("one_hot", "count", count, 1))
    line = emit("iota", dtype=t.dtype, shape=shape, dim=0)
    return (t.reshape((*t.shape, 1)) == line).to(dtype)
