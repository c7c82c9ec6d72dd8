"""Ops that read or add at places given by a tensor of ids: take, put, take_along, put_along.

An id outside the dim reads zeros and adds nothing. That makes the split form the same computation:
each device serves the ids in its block, and the results add up (the value is partial).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtypes import DType, bool_, int32
from ..core.errors import DTypeError, ShapeError, fail
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
from .elementwise import unbroadcast
from .index import Index, propagate
from .op import Array, Attrs, Build, Call, Inferred, Op, define


def _check_ids(name: str, ids: TensorType, attrs: Attrs, rank: int) -> None:
    if not ids.dtype.is_int:
        raise fail(
            DTypeError,
            f"{name}: ids must be integers",
            [("ids", ids)],
            fix="cast with .to(ts.int32)",
        )
    if not 0 <= attrs["dim"] < rank:
        raise fail(
            ShapeError, f"{name}: there is no dim {attrs['dim']} in rank {rank}", fix="count from 0"
        )


def _blocks(
    name: str, index: Index, ins: tuple[TensorType, TensorType], dtype: DType, dim: int
) -> Inferred:
    """`propagate`, with dim `dim` of the first argument in plain blocks, each a range of ids."""
    got = propagate(name, index, ins, dtype, linear="each")
    if len(got.wants[0].dims[dim]) > 1 or dtype is bool_:  # truths cannot be summed
        whole = frozenset({index.args[0][dim]})
        got = propagate(name, index, ins, dtype, linear="each", whole=whole)
    return got


def _local_ids(c: Call, ids: Array, table: TensorType, dim: int) -> Array:
    """Ids relative to this block of `table`; those outside fall out of range."""
    xp = c.xp
    if not dim_axes(table.dims[dim]):
        return ids
    n, here = table.shape[dim], c.site.shape(table)[dim]
    inside = xp.logical_and(xp.ge(ids, xp.full((), 0, int32)), xp.lt(ids, xp.full((), n, int32)))
    shifted = xp.sub(ids, xp.cast(c.site.start(table, dim, 0), int32))
    return xp.where(inside, shifted, xp.full((), here, int32))


# -- take: rows of a table ------------------------------------------------------------------------
def _take_index(table_rank: int, ids_rank: int, dim: int) -> tuple[tuple[str, ...], ...]:
    rows = tuple(f"t{i}" for i in range(table_rank))
    ids = tuple(f"i{i}" for i in range(ids_rank))
    return rows, ids, (*rows[:dim], *ids, *rows[dim + 1 :])


def _take_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dim = attrs["dim"]
    _check_ids("take", ins[1], attrs, ins[0].rank)
    table, ids = ins
    rows, places, out = _take_index(table.rank, ids.rank, dim)
    got = _blocks("take", Index((rows, places), out), (table, ids), table.dtype, dim)
    return Inferred(got.wants, got.outs)


def _take_local(c: Call, table: Array, ids: Array) -> Array:
    dim = c.attrs["dim"]
    ids = c.xp.cast(ids, int32)
    return c.xp.take(table, _local_ids(c, ids, c.ins[0], dim), dim)


def _take_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    table, ids = n.args
    dim = n.attrs["dim"]
    return [b("put", ids, g, dim=dim, into=dim_text(table.type.dims[dim])), None]


take = define(Op("take", _take_rule, _take_local, _take_grad, attrs="dim"))


def _into(attrs: Attrs, ins: Sequence[TensorType], used: Sequence[str]) -> tuple[int, Dim]:
    """The dim of the result that ids point into: as wished, but for axes that are taken."""
    mesh = next((t.mesh for t in ins if t.mesh is not None), None)
    sizes = mesh.sizes if mesh is not None else {}
    goal = parse_dim(attrs["into"])
    for axis in dim_axes(goal):
        if axis not in sizes:
            raise unknown_axis(axis, mesh)
    if len(goal) > 1 or set(dim_axes(goal)) & set(used):
        goal = (Factor(dim_size(goal)),)
    return dim_size(goal), goal


# -- put: the transpose of take -------------------------------------------------------------------
def _put_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dim, (ids, updates) = attrs["dim"], ins
    _check_ids("put", ids, attrs, updates.rank - ids.rank + 1)
    rows, places, full = _take_index(updates.rank - ids.rank + 1, ids.rank, dim)
    kept = tuple(k for k in rows if k != rows[dim])
    got = propagate("put", Index((places, full), kept), ins, updates.dtype, linear="each")
    out = got.outs[0]
    _, goal = _into(attrs, ins, (*out.split_axes, *out.partial_axes))
    out = TensorType(out.dtype, (*out.dims[:dim], goal, *out.dims[dim:]), out.partial, out.mesh)
    return Inferred(got.wants, (out,), got.reduces)


def _put_local(c: Call, ids: Array, updates: Array) -> Array:
    dim = c.attrs["dim"]
    ids = _local_ids(c, c.xp.cast(ids, int32), c.out, dim)
    return c.xp.put(ids, updates, dim, c.shape[dim])


def _put_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [None, b("take", g, n.args[0], dim=n.attrs["dim"])]


put = define(Op("put", _put_rule, _put_local, _put_grad, attrs="dim into"))


# -- take_along: one dim, elementwise in the others -----------------------------------------------
def _along_index(rank: int, dim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    x = tuple(f"_{i}" for i in range(rank))
    return x, (*x[:dim], "k", *x[dim + 1 :])


def _take_along_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dim = attrs["dim"]
    _check_ids("take_along", ins[1], attrs, ins[0].rank)
    x, ids = ins
    letters, places = _along_index(x.rank, dim)
    if ids.rank != x.rank:
        raise fail(
            ShapeError,
            "take_along: ids and x need the same number of dims",
            [("x", x), ("ids", ids)],
            fix="reshape ids; a dim of size 1 broadcasts",
        )
    return _blocks("take_along", Index((letters, places), places), (x, ids), x.dtype, dim)


def _take_along_local(c: Call, x: Array, ids: Array) -> Array:
    dim = c.attrs["dim"]
    ids = c.xp.cast(ids, int32)
    return c.xp.take_along(x, _local_ids(c, ids, c.ins[0], dim), dim)


def _take_along_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, ids = n.args
    dim = n.attrs["dim"]
    put = b("put_along", ids, g, dim=dim, into=dim_text(x.type.dims[dim]))
    return [unbroadcast(b, put, x.type), None]


take_along = define(
    Op("take_along", _take_along_rule, _take_along_local, _take_along_grad, attrs="dim")
)


def _put_along_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    dim, (ids, updates) = attrs["dim"], ins
    _check_ids("put_along", ids, attrs, updates.rank)
    letters, places = _along_index(updates.rank, dim)
    kept = tuple(k for k in letters if k != letters[dim])
    got = propagate("put_along", Index((places, places), kept), ins, updates.dtype, linear="each")
    out = got.outs[0]
    _, goal = _into(attrs, ins, (*out.split_axes, *out.partial_axes))
    out = TensorType(out.dtype, (*out.dims[:dim], goal, *out.dims[dim:]), out.partial, out.mesh)
    return Inferred(got.wants, (out,), got.reduces)


def _put_along_local(c: Call, ids: Array, updates: Array) -> Array:
    dim = c.attrs["dim"]
    ids = _local_ids(c, c.xp.cast(ids, int32), c.out, dim)
    return c.xp.put_along(ids, updates, dim, c.shape[dim])


def _put_along_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [None, b("take_along", g, n.args[0], dim=n.attrs["dim"])]


put_along = define(
    Op("put_along", _put_along_rule, _put_along_local, _put_along_grad, attrs="dim into")
)
