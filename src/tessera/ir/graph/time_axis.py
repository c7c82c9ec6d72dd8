"""Values on a mesh with an axis in time, as values on the mesh of the devices: whole, or one turn.

The type `without_time_axis(t)` is whole along the axis in time, with its sums over the axis
completed. `one_step` is the part of one coordinate of the axis. Rows are cut in place between the
two: no data moves.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ...core.dtypes import DType, bool_
from ...core.layout import TensorType, grouped, without
from ...core.mesh import Mesh
from ...ops.control import stacked
from ...ops.elementwise import add, maximum, minimum
from ...ops.op import OPS, Op
from .build import Builder
from .node import Node


def depends_on_time(t: TensorType) -> bool:
    """Returns whether a value of type `t` differs between the turns of its mesh's axis in time."""
    time = t.mesh.time if t.mesh is not None else ()
    return any(a in time for a in (*t.split_axes, *t.partial_axes, *t.varying))


def step_count(t: TensorType) -> int:
    """The number of turns along the axis in time."""
    assert t.mesh is not None
    return t.mesh.sizes[t.mesh.time[0]]


def combined(t: TensorType) -> str:
    """The reduction that makes a value of type `t` from its turns: "sum", "max" or "min"; "same" if
    every turn has the whole value; "" if each turn has a part."""
    if not depends_on_time(t):
        return "same"
    time = t.mesh.time if t.mesh is not None else ()
    return next((kind for a, kind in t.partial if a in time), "")


def combining(kind: str, dtype: DType) -> Op:
    """The op that combines the values of two turns, by the reduction `kind` of `combined`."""
    if dtype is bool_:
        return OPS["logical_or"]
    return add if kind == "sum" else maximum if kind == "max" else minimum


def on_fewer_axes(t: TensorType, mesh: Mesh | None) -> TensorType:
    """`t` on `mesh`, whole along the axes that `mesh` lacks, with sums over them completed."""
    if t.mesh is None or t.mesh == mesh:
        return t
    lost = [a for a in t.mesh.axes if mesh is None or a not in mesh]
    dims = (without(d, lost, t.sizes) for d in t.dims)
    partial = tuple(p for p in t.partial if p[0] not in lost)
    return TensorType(
        t.dtype, dims, partial, mesh, (a for a in t.varying if a not in lost), t.rest_axes
    )


@lru_cache(maxsize=4096)
def without_time_axis(t: TensorType) -> TensorType:
    """The type `t` on the mesh of the devices, whole along the axis in time."""
    return on_fewer_axes(t, t.mesh.space) if t.mesh is not None and t.mesh.time else t


@lru_cache(maxsize=4096)
def one_step(t: TensorType) -> TensorType:
    """The type of one turn's part of a value of type `t`, on the mesh of the devices."""
    if t.mesh is None or not t.mesh.time:
        return t
    time = t.mesh.time
    dims = (grouped(d for d in t.digits(i) if not {*d.axes} & {*time}) for i in range(t.rank))
    partial = tuple(p for p in t.partial if p[0] not in time)
    return TensorType(t.dtype, dims, partial, t.mesh.space, t.varying, t.rest_axes)


def place_of_time(t: TensorType) -> tuple[int, int, int]:
    """(dim that the axis in time splits, product of sizes above it, product of sizes below it)."""
    assert t.mesh is not None
    (axis,) = t.mesh.time
    dim = next(i for i, d in enumerate(t.dims) if any(axis in f.axes for f in d))
    run = t.digits(dim)
    place = next(i for i, d in enumerate(run) if d.axes == (axis,))
    return dim, math.prod(d.size for d in run[:place]), math.prod(d.size for d in run[place + 1 :])


def cut(b: Builder, x: Node, t: TensorType) -> Node:
    """The turns of a value of type `t`, stacked; `x` is that value at rest. The first turn of a sum
    holds the whole sum, the others zeros."""
    shape, count = t.shape, step_count(t)
    if combined(t):
        x = b("reshape", x, shape=(1, *shape))
        none = {"starts": (0,) * x.type.rank, "steps": (1,) * x.type.rank}
        return b("pad", x, **none, shape=(count, *shape))
    dim, above, below = place_of_time(t)
    x = b("reshape", x, shape=(*shape[:dim], above, count, below, *shape[dim + 1 :]))
    x = b("transpose", x, perm=(dim + 1, *(i for i in range(x.type.rank) if i != dim + 1)))
    x = b("reshape", x, shape=(count, *one_step(t).shape))
    return b.redistribute(x, stacked(one_step(t), count))


def joined(b: Builder, x: Node, t: TensorType) -> Node:
    """The inverse of `cut`."""
    (dim, above, below), shape = place_of_time(t), one_step(t).shape
    x = b("reshape", x, shape=(step_count(t), *shape[:dim], above, below, *shape[dim + 1 :]))
    order = [*range(1, x.type.rank)]
    order.insert(dim + 1, 0)
    x = b("reshape", b("transpose", x, perm=tuple(order)), shape=t.shape)
    return b.redistribute(x, without_time_axis(t))
