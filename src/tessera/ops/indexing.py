"""Gather and scatter by ids: take, put, take_along, put_along.

If the dim is split, each device serves the ids in its block and reads zeros for the others, and the
result is partial. An id outside the whole dim is an error, but a program cannot stop midway, so the
result shows it (`beyond`): a read gives NaN, a write adds NaN to the nearest row. The attribute
`ids` is the range of valid ids:

    "exact"   0 to n - 1
    "signed"  -n to n - 1, negative ones counted from the end
    none      all: an id outside reads zeros and adds nothing

The ops are linear in the values that they read or add, not in the ids, which are completed first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtypes import DType, beyond, bool_, int32, uint32
from ..core.errors import DTypeError, ShapeError
from ..core.layout import (
    Dim,
    Factor,
    TensorType,
    dim_axes,
    dim_size,
    dim_text,
    parse_dim,
    unknown_axis,
)
from ..core.tensor_checks import integers
from .batch import next_dim
from .elementwise import FIELD, need, unbroadcast
from .index_string import Index, propagate
from .op import Array, Attrs, Batched, Build, Call, Inferred, Op, define


def _check_ids(name: str, ids: TensorType, attrs: Attrs, rank: int) -> None:
    integers(name, "ids", ids)
    if not 0 <= attrs["dim"] < rank:
        raise ShapeError(
            f"{name}: there is no dim {attrs['dim']} in rank {rank}", fix="count from 0"
        )


def _check_put(name: str, updates: TensorType, attrs: Attrs) -> None:
    need("scatter_add", (updates,), FIELD)
    if "ids" in attrs and not updates.dtype.is_float:  # only NaN survives further additions
        raise DTypeError(
            f"{name}: ids are looked at where floats are added only",
            updates=updates,
            fix="leave ids= out, and look at the ids beside the op",
        )


def _blocks(
    name: str, index: Index, ins: tuple[TensorType, TensorType], dtype: DType, attrs: Attrs
) -> Inferred:
    """`propagate`, with the dim of the first argument split in plain blocks, so that each block is
    a range of ids."""
    dim = attrs["dim"]
    if "ids" in attrs and not dtype.is_float:  # only NaN is the same in each term of a sum
        ins = (ins[0].complete(), ins[1])
    got = propagate(name, index, ins, dtype, linear="each")
    home, mesh = got.wants[0].dims[dim], ins[0].mesh
    late = mesh is not None and bool({*dim_axes(home)} & {*mesh.time})  # not known in other turns
    if len(home) > 1 or dtype is bool_ or late:  # truths cannot be summed
        whole = frozenset({index.args[0][dim]})
        got = propagate(name, index, ins, dtype, linear="each", whole=whole)
    return got


def _located(c: Call, ids: Array, arg: int, table: TensorType) -> tuple[Array, Array | None]:
    """(`ids`, argument `arg`, relative to this block of `table`; mask of ids outside the whole
    dim).

    Ids of other blocks fall out of range. Ids outside are clamped to the nearest end if the call
    has the attribute `ids`; otherwise the mask is None.
    """
    xp, how, dim = c.xp, c.attrs.get("ids"), c.attrs["dim"]
    n, here = table.shape[dim], c.site.shape(table)[dim]
    zero, last = xp.full((), 0, int32), xp.full((), n - 1, int32)
    if c.ins[arg].dtype is uint32:  # the upper half is outside too
        ids = xp.minimum(ids, xp.full((), 2**31 - 1, uint32))
    ids = xp.cast(ids, int32)
    if how == "signed":
        ids = xp.where(xp.lt(ids, zero), xp.add(ids, xp.full((), n, int32)), ids)
    split = bool(dim_axes(table.dims[dim]))
    if how is None and not split:
        return ids, None
    outside = xp.logical_or(xp.lt(ids, zero), xp.gt(ids, last))
    if how is not None:
        ids = xp.minimum(xp.maximum(ids, zero), last)
    if split:
        local = xp.sub(ids, xp.cast(c.site.start(table, dim, 0), int32))
        ids = xp.where(outside, xp.full((), here, int32), local) if how is None else local
    return ids, None if how is None else outside


def _marked(c: Call, x: Array, outside: Array | None, table: TensorType | None = None) -> Array:
    """`x` with NaN or the farthest integer (`beyond`) where `outside`. If the blocks of `table`
    each give one term of a sum, only the first block has the mark and the others zero."""
    if outside is None:
        return x
    dtype, dim = c.out.dtype, c.attrs["dim"]
    mark = c.xp.full((), beyond(dtype), dtype)
    if table is not None and dim_axes(table.dims[dim]):
        first = c.xp.eq(c.xp.cast(c.site.start(table, dim, 0), int32), c.xp.full((), 0, int32))
        mark = c.xp.where(first, mark, c.xp.full((), 0, dtype))
    return c.xp.where(outside, mark, x)


def _rows_of(c: Call, outside: Array | None, rank: int) -> Array | None:
    """`outside` as a mask over the rows that ids select from a table of `rank` dims."""
    if outside is None:
        return None
    dim = c.attrs["dim"]
    return c.xp.reshape(outside, ((1,) * dim + tuple(outside.shape) + (1,) * (rank - dim - 1)))


def _home(table: TensorType, dim: int, *args: Any) -> str:
    """The layout of the dim of `table`, as text for the attribute `into`; its size if no argument
    has a mesh."""
    known = any(a.type.mesh is not None for a in args)
    return dim_text(table.dims[dim]) if known else str(table.shape[dim])


def _which(attrs: Attrs) -> dict[str, str]:
    """The attribute `ids` for the op of the gradient."""
    return {"ids": attrs["ids"]} if "ids" in attrs else {}


def inside_range(n: Any) -> tuple[int, int]:
    """The valid ids [low, high) of node `n`; (0, 0) if it does not check them."""
    if n.op == "inside":
        return 0, n.attrs["size"]
    if n.op not in ("take", "take_along", "put", "put_along") or "ids" not in n.attrs:
        return 0, 0
    table = n.args[0] if n.op.startswith("take") else n
    size = table.type.shape[n.attrs["dim"]]
    return (-size if n.attrs["ids"] == "signed" else 0), size


# -- take: rows of a table ------------------------------------------------------------------------
def _take_index(table_rank: int, ids_rank: int, dim: int) -> tuple[tuple[str, ...], ...]:
    rows = tuple(f"t{i}" for i in range(table_rank))
    ids = tuple(f"i{i}" for i in range(ids_rank))
    return rows, ids, (*rows[:dim], *ids, *rows[dim + 1 :])


def _take_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dim = attrs["dim"]
    _check_ids("take", ins[1], attrs, ins[0].rank)
    table, ids = ins[0], ins[1].complete()
    rows, places, out = _take_index(table.rank, ids.rank, dim)
    got = _blocks("take", Index((rows, places), out), (table, ids), table.dtype, attrs)
    return Inferred(got.wants, got.outs)


def _take_local(c: Call, table: Array, ids: Array) -> Array:
    dim, whole = c.attrs["dim"], c.ins[0]
    at, outside = _located(c, ids, 1, whole)
    rows = c.xp.take(table, at, dim) if whole.shape[dim] else c.xp.full(c.shape, 0, c.out.dtype)
    return _marked(c, rows, _rows_of(c, outside, whole.rank), whole)


def _take_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    table, ids = n.args
    dim = n.attrs["dim"]
    into = _home(table.type, dim, ids, g)
    return [b("put", ids, g, dim=dim, into=into, **_which(n.attrs)), None]


def _take_batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched | None:
    of_table, of_ids = which
    if of_table and of_ids:
        return None
    return (
        Batched({**attrs, "dim": attrs["dim"] + 1})
        if of_table
        else Batched(attrs, out=attrs["dim"])
    )


take = define(
    Op("take", _take_rule, _take_local, _take_grad, attrs="dim ids?",
       batch=_take_batch, memory="expensive", invariance="moves", linear="alone")
)  # fmt: skip


def _into(attrs: Attrs, ins: Sequence[TensorType], used: Sequence[str]) -> tuple[int, Dim]:
    """(size, layout) of the result's dim that ids index into, as requested, without axes that are
    in use."""
    mesh = next((t.mesh for t in ins if t.mesh is not None), None)
    sizes = mesh.sizes if mesh is not None else {}
    goal = parse_dim(attrs["into"])
    for axis in dim_axes(goal):
        if axis not in sizes:
            raise unknown_axis(axis, mesh)
    taken = {*used, *(mesh.time if mesh is not None else ())}
    if len(goal) > 1 or taken & {*dim_axes(goal)}:
        goal = (Factor(dim_size(goal)),)
    return dim_size(goal), goal


# -- put: the transpose of take -------------------------------------------------------------------
def _put_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of a sum over the ids: it is partial over the axes that split them. The dim that ids
    index into has the layout in `attrs`, along free axes."""
    dim, (ids, updates) = attrs["dim"], (ins[0].complete(), ins[1])
    _check_ids("put", ids, attrs, updates.rank - ids.rank + 1)
    _check_put("put", updates, attrs)
    rows, places, full = _take_index(updates.rank - ids.rank + 1, ids.rank, dim)
    kept = tuple(k for k in rows if k != rows[dim])
    index = Index((places, full), kept)
    got = propagate("put", index, (ids, updates), updates.dtype, linear="each")
    out = got.outs[0]
    _, goal = _into(attrs, ins, (*out.split_axes, *out.partial_axes))
    out = TensorType(out.dtype, (*out.dims[:dim], goal, *out.dims[dim:]), out.partial, out.mesh)
    return Inferred(got.wants, (out,), got.reduces)


def _put_local(c: Call, ids: Array, updates: Array) -> Array:
    dim = c.attrs["dim"]
    at, outside = _located(c, ids, 0, c.out)
    updates = _marked(c, updates, _rows_of(c, outside, c.out.rank))
    return c.xp.put(at, updates, dim, c.shape[dim])


def _put_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [None, b("take", g, n.args[0], dim=n.attrs["dim"], **_which(n.attrs))]


def _put_batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched | None:
    return Batched({**attrs, "dim": attrs["dim"] + 1}) if which == (False, True) else None


put = define(
    Op("put", _put_rule, _put_local, _put_grad, attrs="dim into ids?", batch=_put_batch,
       invariance="added", linear="alone")
)  # fmt: skip


# -- take_along: one dim, elementwise in the others -----------------------------------------------
def _along_index(rank: int, dim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    x = tuple(f"_{i}" for i in range(rank))
    return x, (*x[:dim], "k", *x[dim + 1 :])


def _take_along_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of take_along: dim `dim` of `x` is read block by block, the other dims have the
    layout of the ids."""
    dim = attrs["dim"]
    _check_ids("take_along", ins[1], attrs, ins[0].rank)
    x, ids = ins[0], ins[1].complete()
    letters, places = _along_index(x.rank, dim)
    if ids.rank != x.rank:
        raise ShapeError(
            "take_along: ids and x need the same number of dims",
            x=x,
            ids=ids,
            fix="reshape ids; a dim of size 1 broadcasts",
        )
    return _blocks("take_along", Index((letters, places), places), (x, ids), x.dtype, attrs)


def _take_along_local(c: Call, x: Array, ids: Array) -> Array:
    dim = c.attrs["dim"]
    at, outside = _located(c, ids, 1, c.ins[0])
    some = c.ins[0].shape[dim]
    got = c.xp.take_along(x, at, dim) if some else c.xp.full(c.shape, 0, c.out.dtype)
    return _marked(c, got, outside, c.ins[0])


def _take_along_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, ids = n.args
    dim = n.attrs["dim"]
    into = _home(x.type, dim, ids, g)
    put = b("put_along", ids, g, dim=dim, into=into, **_which(n.attrs))
    return [unbroadcast(b, put, x.type), None]


take_along = define(
    Op("take_along", _take_along_rule, _take_along_local, _take_along_grad, attrs="dim ids?",
       batch=next_dim("dim"), memory="expensive", invariance="moves", linear="alone")
)  # fmt: skip


def _put_along_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dim, (ids, updates) = attrs["dim"], (ins[0].complete(), ins[1])
    _check_ids("put_along", ids, attrs, updates.rank)
    _check_put("put_along", updates, attrs)
    letters, places = _along_index(updates.rank, dim)
    kept = tuple(k for k in letters if k != letters[dim])
    index = Index((places, places), kept)
    got = propagate("put_along", index, (ids, updates), updates.dtype, linear="each")
    out = got.outs[0]
    _, goal = _into(attrs, ins, (*out.split_axes, *out.partial_axes))
    out = TensorType(out.dtype, (*out.dims[:dim], goal, *out.dims[dim:]), out.partial, out.mesh)
    return Inferred(got.wants, (out,), got.reduces)


def _put_along_local(c: Call, ids: Array, updates: Array) -> Array:
    dim = c.attrs["dim"]
    at, outside = _located(c, ids, 0, c.out)
    return c.xp.put_along(at, _marked(c, updates, outside), dim, c.shape[dim])


def _put_along_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [None, b("take_along", g, n.args[0], dim=n.attrs["dim"], **_which(n.attrs))]


def _places(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    """Bytes of an index per dim for each element (int32), and of the ids broadcast to all elements;
    0 if there is one id per row of the result, which is a loop."""
    if ins[1].shape[attrs["dim"]] == 1:
        return 0
    return 4 * (ins[1].rank + 1) * math.prod(ins[1].local_shape)


put_along = define(
    Op("put_along", _put_along_rule, _put_along_local, _put_along_grad, attrs="dim into ids?",
       batch=next_dim("dim"), scratch=_places, invariance="added", linear="alone")
)  # fmt: skip
