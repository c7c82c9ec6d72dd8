"""Sorting, searching and indexing: `argmax`, `sort`, `topk`, `take`, `gather`, `scatter_add`."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.checks import sizes, unfit
from ...core.declared import Flag, Integer, Natural
from ...core.dtypes import beyond, f32, int32
from ...core.errors import ShapeError
from ...core.tensor_checks import integers
from ..record.index_bounds import check_ids
from ..record.operands import as_tensor, emit, emit_many, scalar
from ..value.tensor import Like, Tensor
from .rearranging import unsqueeze
from .shape import Dims, along, dims_of, need_elements, one_dim, sliced, swap


def argmax(x: Like, dim: int = -1, keepdims: Flag = False) -> Tensor:
    """The int32 index of the largest element along `dim`; of equal elements the first.

    With `keepdims` the dim stays, of size 1. Raises ShapeError if `dim` has no elements.
    """
    return _best("argmax", x, dim, keepdims)


def argmin(x: Like, dim: int = -1, keepdims: Flag = False) -> Tensor:
    """The int32 index of the smallest element along `dim`; of equal elements the first.

    With `keepdims` the dim stays, of size 1. Raises ShapeError if `dim` has no elements.
    """
    return _best("argmin", x, dim, keepdims)


def _best(op: str, x: Like, dim: int, keepdims: bool) -> Tensor:
    def place(t: Tensor, d: int) -> Tensor:
        need_elements(op, t, (d,))
        found = emit(op, t, dim=d)
        return unsqueeze(found, d) if keepdims else found

    return along(place, op, x, dim)


def argsort(x: Like, dim: int = -1, descending: Flag = False) -> Tensor:
    """The indices that sort `x` along `dim`; equal elements keep their order (a stable sort)."""
    return _argsort("argsort", x, dim, descending)


def _argsort(name: str, x: Like, dim: int, descending: bool) -> Tensor:
    return along(lambda t, d: emit("argsort", t, dim=d, descending=descending), name, x, dim)


def sort(x: Like, dim: int = -1, descending: Flag = False) -> tuple[Tensor, Tensor]:
    """(`x` sorted along `dim`, the index of each element in `x`); the sort is stable."""
    t = as_tensor(x)
    ids = _argsort("sort", t, dim, descending)
    return (gather_or_zero(t, ids, dim) if t.ndim else t), ids


def flip(x: Like, dim: Dims = -1) -> Tensor:
    """`x` with the order of elements reversed along `dim`, or along each of several dims; None is
    all dims. Raises ShapeError if a dim does not exist or is named twice."""
    t = as_tensor(x)
    for d in dims_of("flip", t, dim):
        t = emit("flip", t, dim=d)
    return t


def topk(x: Like, k: Integer, dim: int = -1, largest: Flag = True) -> tuple[Tensor, Tensor]:
    """(The `k` largest elements along `dim`, largest first; their indices).

    With `largest` False they are the `k` smallest, smallest first. A NaN counts as largest. Of
    equal elements the one with the lower index comes first. Raises ShapeError if `dim` has fewer
    than `k` elements.
    """
    t = as_tensor(x)
    d = one_dim("topk", t, dim) if t.ndim else 0
    if not t.ndim or not 0 <= k <= t.shape[d]:
        raise ShapeError(f"topk: cannot take {k} of dim {d}", x=t.type, fix="0 <= k <= its size")
    if not largest:
        return tuple(sliced(part, {d: (0, k, 1)}) for part in sort(t, d))  # type: ignore[return-value]
    if d == t.ndim - 1:
        values, ids = emit_many("top_k", t, k=k)
    else:
        values, ids = (swap(part, d, -1) for part in emit_many("top_k", swap(t, d, -1), k=k))
    return values, ids


# -- indexing -------------------------------------------------------------------------------------
def take(x: Like, ids: Like, dim: int = 0) -> Tensor:
    """The slices of `x` along `dim` that `ids` names, as `numpy.take`; -1 is the last one.

    With x [n, d] and ids [B, S] the result is [B, S, d]. If the host knows the ids, an id outside
    of -n to n - 1 raises ShapeError. On the device such an id gives NaN (for integers: the lowest
    number of a signed dtype, the highest of an unsigned one). Raises DTypeError if `ids` are not
    integers.
    """
    d = last_dim(x, ids, dim, "take", "ids")
    t, at = as_tensor(x), as_tensor(ids)
    check_ids("take", "id", at, t.shape[d], low=-t.shape[d])
    return emit("take", t, at, dim=d, ids="signed")


def last_dim(x: Like, ids: Like, dim: int, name: str, before: str) -> int:
    """Returns `dim` of `x`, counted from 0. Raises UsageError if the dim is given before the ids,
    which is PyTorch's order."""
    if isinstance(ids, int) and hasattr(dim, "__len__"):
        fix = f"the dim comes last here: ts.{name}(x, {before}, dim)"
        raise unfit(name, "ids", ids, fix)
    return one_dim(name, as_tensor(x), dim)


def take_or_zero(x: Tensor, ids: Like, dim: int = 0) -> Tensor:
    """The slices of `x` along `dim` at `ids`. An id outside, also a negative one, gives zeros."""
    return emit("take", x, as_tensor(ids), dim=one_dim("take", x, dim))


def gather(x: Like, ids: Like, dim: int = -1) -> Tensor:
    """The elements of `x` that `ids` names along `dim`, element by element, as `torch.gather`.

    With `dim=1` the result at [i, j] is `x[i, ids[i, j]]`. Ids are from 0 to n - 1. In each other
    dim `ids` has the size of `x`, or size 1 (one id for all of `x`), or fewer elements than `x`
    (the first ones of `x` are used). If the host knows the ids, an id outside raises ShapeError; on
    the device its result is that of `take`. Raises DTypeError if `ids` are not integers.
    """
    d = last_dim(x, ids, dim, "gather", "ids")
    t, at = as_tensor(x), as_tensor(ids)
    integers("gather", "ids", at.type)
    check_ids("gather", "id", at, t.shape[d])
    if t.ndim == at.ndim:  # of the other dims, the part that has ids
        t = _first(
            t, [n if i == d or k == 1 else k for i, (n, k) in enumerate(zip(t.shape, at.shape))]
        )
    return emit("take_along", t, at, dim=d, ids="exact")


def _first(t: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the first `counts` elements of each dim; all of a dim that has no more."""
    return sliced(t, {i: (0, k, 1) for i, (n, k) in enumerate(zip(t.shape, counts)) if k < n})


def gather_or_zero(x: Tensor, ids: Tensor, dim: int = -1) -> Tensor:
    """The elements of `x` at `ids` along `dim`. An id outside gives zero."""
    return emit("take_along", x, ids, dim=one_dim("gather", x, dim))


def scatter_add(x: Like, ids: Like, updates: Like, dim: int = -1) -> Tensor:
    """`x` with each element of `updates` added at the place along `dim` that `ids` names.

    `ids` and `updates` have the rank of `x`; an id is from 0 to n - 1. In the other dims `ids` may
    have size 1 (one id for all of `updates`), or fewer elements than `updates` (then only the first
    updates are added). With `ids` [k] of one dim, whole slices of `updates` are added. If the host
    knows the ids, an id outside raises ShapeError. On the device it adds NaN at the nearest place;
    with integers the whole result becomes the lowest number of the dtype (unsigned: the highest).
    Raises ShapeError if the shapes do not match, DTypeError if `ids` are not integers.
    """
    d = last_dim(x, ids, dim, "scatter_add", "ids, updates")
    t, at, u = as_tensor(x), as_tensor(ids), as_tensor(updates)
    slices = (
        [i for i in range(t.ndim) if u.shape == (*t.shape[:i], at.size, *t.shape[i + 1 :])]
        if at.ndim == 1 < t.ndim
        else []
    )
    if d in slices:
        return _added("put", t, at, u, d)
    if t.ndim == at.ndim == u.ndim:
        one = [i != d and k == 1 for i, k in enumerate(at.shape)]
        u = _first(u, [m if broad else k for k, m, broad in zip(at.shape, u.shape, one)])
    alike = t.ndim == at.ndim == u.ndim and all(
        m <= n and k in (1, m)
        for i, (n, k, m) in enumerate(zip(t.shape, at.shape, u.shape))
        if i != d
    )
    if not alike or at.shape[d] != u.shape[d]:
        raise ShapeError(
            f"scatter_add: ids and updates must match each other, and x but for dim {d}",
            x=t.type,
            ids=at.type,
            updates=u.type,
            fix=f"these ids name slices of dim {slices[0]}: give dim={slices[0]}"
            if slices
            else "give each update an id: both of one shape, with the rank of x",
        )
    return _added("put_along", t, at, u, d)


def _added(op: str, t: Tensor, at: Tensor, u: Tensor, dim: int) -> Tensor:
    """Returns `t` with `u` added at the places `at` along `dim`. An id outside marks the result:
    floats by NaN, integers by `beyond`."""
    size = t.shape[dim]
    integers("scatter_add", "ids", at.type)
    check_ids("scatter_add", "id", at, size)
    how = {"ids": "exact"} if u.dtype.is_float else {}
    sums = emit(op, at, u, dim=dim, into=str(size), **how)
    if sums.shape != t.shape:  # fewer ids than rows: nothing is added to the others
        none = (0,) * t.ndim
        sums = emit("pad", sums, starts=none, steps=(1,) * t.ndim, shape=t.shape)
    out = t + sums
    if how:
        return out
    return _or_beyond(out, emit("sum", _inside(at, size), dims=tuple(range(at.ndim))))


def _inside(ids: Tensor, size: int) -> Tensor:
    return emit("inside", ids, size=size)


def _or_beyond(x: Tensor, inside: Tensor) -> Tensor:
    """Returns `x`, or NaN (integers: `beyond`, the farthest number) where `inside` is NaN."""
    mark = scalar(beyond(x.dtype), x.dtype)
    return emit("where", emit("isfinite", inside), x, mark)


def one_hot(ids: Like, count: Natural, dtype: object = f32) -> Tensor:
    """A new last dim of size `count` with 1 at the place that the id names and 0 elsewhere.

    `ids` [...] gives [..., count]. An id is from 0 to `count` - 1; if the host knows the ids, one
    outside raises ShapeError. Raises DTypeError if `ids` are not integers.
    """
    t = as_tensor(ids)
    integers("one_hot", "ids", t.type)
    shape = sizes("one_hot", count)
    check_ids("one_hot", "id", t, count)
    line = emit("iota", dtype=int32, shape=shape, dim=0)  # narrow dtypes cannot hold `count`
    at = t.to(int32).reshape((*t.shape, 1))
    return _or_beyond((at == line).to(dtype), _inside(at, count))
