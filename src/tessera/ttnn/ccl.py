"""Which collectives does TT-NN have? They act on the devices of the whole mesh, row by row, or of
each of its lines along `cluster_axis`: 0 joins the devices of a column, 1 those of a row.

Arguments that say by which wires and workers (`topology`, `num_workers`, semaphores, ...) have no
effect on values; `num_links` is held against the links of the machine, if one is described.

>>> import numpy as np
>>> from tessera import ttnn
>>> device = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
>>> cut = ttnn.ShardTensorToMesh(device, dim=0)
>>> x = ttnn.from_torch(np.arange(8.0), device=device, mesh_mapper=cut)
>>> x.shape, ttnn.all_gather(x, dim=0).shape
(Shape([2]), Shape([8]))
>>> ttnn.get_device_tensors(ttnn.all_reduce(x))[3].to_list()
[12.0, 16.0]
>>> ttnn.close_mesh_device(device)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..core.checks import whole
from ..lang import functions as F
from ..lang.local import collectives as local
from ..lang.local.view import View
from ..lang.tensor import Tensor as Value
from .asked import dim_of, kinds
from .configs import ReduceType, Topology
from .device import MeshDevice
from .dtypes import DataType
from .faults import wrong
from .labels import relabelled
from .mapping import Placement, PlacementReplicate, PlacementShard, TensorTopology
from .run import HOW, device_of, moves, run_many
from .shapes import MeshCoordinate
from .system import system
from .tensor import Tensor

Axes = tuple[str, ...]
_WIRES = re.compile(r"(\d+) x ")  # how a link of several wires begins: "2 x chip ethernet 100G"
# Keywords of these ops that say by which way, and never what.
WAYS = HOW | {
    "num_links", "topology", "mesh_device", "num_workers_per_link", "chunks_per_sync",
    "intermediate_memory_config", "multi_device_global_semaphore", "barrier_semaphore",
    "persistent_output_buffer", "persistent_output_buffers", "persistent_output_tensor",
    "persistent_intermediate_buffer", "num_devices",
    "chunk_size", "use_broadcast", "worker_mode", "dispatch_algorithm", "linear_barrier",
    "init_semaphore", "cross_device_semaphore", "drain_sync_tilizer_core", "barrier_semaphores",
    "rs_global_semaphores", "ag_global_semaphores", "use_optimal_ccl_for_llama",
}  # fmt: skip


class Call:
    """One call of a collective: over which axes, and what of its options matters."""

    def __init__(
        self, name: str, x: Tensor, cluster_axis: Any, older: Sequence[Any], options: dict[str, Any]
    ) -> None:
        for given in older:  # forms of 2024: all_gather(x, dim, cluster_axis, mesh_device)
            if isinstance(given, int) and not isinstance(given, bool):
                cluster_axis = given
            elif isinstance(given, ReduceType):
                _sums(name, given)
            elif not isinstance(given, MeshDevice | type(None) | type(Topology.Ring)):
                raise wrong(
                    f"{name}: what is {given!r}?",
                    fix="give arguments after the dim by their names",
                )
        unknown = [k for k in options if k not in WAYS]
        if unknown:
            raise wrong(
                f"{name}: it has no argument {unknown[0]!r}",
                fix="drop it; it takes dim, cluster_axis, memory_config, num_links, topology, ...",
            )
        self.name, self.x, self.options = name, x, options
        device = device_of(name, [x])
        shape, mesh = x.grid_, x.value.type.mesh
        assert shape is not None and mesh is not None
        kinds(name, topology=options.get("topology"), memory_config=options.get("memory_config"))
        for given in (options.get("mesh_device"), *older):
            if isinstance(given, MeshDevice) and given not in device.ancestry():
                raise wrong(
                    f"{name}: the tensor is on another mesh",
                    [("tensor", device), ("mesh_device", given)],
                    fix="leave mesh_device out: it is the tensor's",
                )
        if cluster_axis is not None:
            cluster_axis = whole(name, "cluster_axis", cluster_axis)
        if cluster_axis is not None and not 0 <= cluster_axis < len(shape):
            raise wrong(
                f"{name}: cluster_axis {cluster_axis} is none of the mesh's",
                [("mesh", shape)],
                fix=f"give a number from 0 to {len(shape) - 1}, or none for the whole mesh",
            )
        self.axis: int | None = cluster_axis
        every = mesh.axes
        self.axes: Axes = every if cluster_axis is None else (every[cluster_axis],)
        # Along an axis of one device nothing happens.
        self.moving = tuple(a for a in self.axes if mesh.sizes[a] > 1)
        self.count = 1
        for a in self.axes:
            self.count *= mesh.sizes[a]
        links = options.get("num_links")
        if links is not None:
            links, most = whole(name, "num_links", links), _links()
            if links < 1 or (most and links > most):
                raise wrong(
                    f"{name}: num_links={links}",
                    [("links between neighbours", most or "unknown")],
                    fix=f"give a number from 1 to {most}" if most else "give at least 1",
                )

    def run(self, body: Any, topology: TensorTopology, *more: Tensor, **options: Any) -> Tensor:
        """The result of `body`, which gets the axes that have more than one device."""
        return self.run_many(body, topology, *more, **options)[0]

    def run_many(
        self, body: Any, topology: TensorTopology, *more: Tensor, **options: Any
    ) -> list[Tensor]:
        """The results of `body`."""
        keys = "output_tensor", *(k for k in sorted(WAYS) if k.startswith("persistent_output"))
        given = [self.options.get(k) for k in keys]
        # Of several buffers the last one is for the result, the others for what is on the way.
        ends = [g[-1] if isinstance(g, Sequence) and g else g for g in given]
        into = next((t for t in ends if isinstance(t, Tensor)), None)
        memory = self.options.get("memory_config")
        options = {"output": into, "memory_config": memory} | options
        return run_many(
            self.name, body, [self.x, *more], topology=topology, axes=self.moving, **options
        )

    def labels(self, new: Placement, gathered: int | None = None) -> TensorTopology:
        """How the result lies: `new` along the axis, along all of the whole mesh. `gathered` is the
        dim that was gathered."""
        grid = self.x.grid_
        assert grid is not None
        axes = range(len(grid)) if self.axis is None else [self.axis]
        rank = len(self.x.shape)
        return relabelled(self.name, self.x.topology, grid, axes, rank, new, gathered)


def _links() -> int:
    """How many links two neighbours of the system have; 0 where nobody says so."""
    machine = system().machine
    names = [level.link.name for level in machine.topology.levels] if machine is not None else []
    counts = [int(found[1]) if (found := _WIRES.match(n)) else 1 for n in names]
    return min(counts, default=0)


def own(x: Value) -> Value:
    """`x` as each device's own, along every axis of its mesh."""
    assert x.type.mesh is not None
    return F.relayout(x, x.type.with_varying(x.type.mesh.axes))


def all_gather(
    input_tensor: Tensor, dim: int, *older: Any, cluster_axis: int | None = None, **options: Any
) -> Tensor:
    """On each device the parts of all, one after the other along `dim`."""
    call = Call("all_gather", input_tensor, cluster_axis, older, options)
    return _gathered(call, _all_gather, dim)


def _gathered(call: Call, body: Any, dim: int) -> Tensor:
    dim = dim_of(call.name, call.x.shape, dim)
    return call.run(body, call.labels(PlacementReplicate(), dim), dim=dim)


@moves
def _all_gather(x: Value, axes: Axes, dim: int) -> Value:
    return own(local.collected(x, axes, dim)) if axes else x


def all_gather_async_reversed(
    input_tensor: Tensor, dim: int, *older: Any, cluster_axis: int | None = None, **options: Any
) -> Tensor:
    """`all_gather` with the part of the last device first."""
    call = Call("all_gather_async_reversed", input_tensor, cluster_axis, older, options)
    return _gathered(call, _all_gather_reversed, dim)


@moves
def _all_gather_reversed(x: Value, axes: Axes, dim: int) -> Value:
    if not axes:
        return x
    every = local.collected(F.unsqueeze(x, dim), axes, dim)
    return own(F.flip(every, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def all_to_all_async_generic(
    input_tensor: Tensor, in_dim: int, out_dim: int, *, cluster_axis: int | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """On each device its part of `out_dim` of the whole, whose parts of `in_dim` the devices have.
    Raises ShapeError if `out_dim` is not divided by as many devices."""
    call = Call("all_to_all_async_generic", input_tensor, cluster_axis, (), options)
    before, after = (dim_of(call.name, input_tensor.shape, d) for d in (in_dim, out_dim))
    labels = call.labels(PlacementShard(after))
    return call.run(_all_to_all, labels, before=before, after=after)


@moves
def _all_to_all(x: Value, axes: Axes, before: int, after: int) -> Value:
    return own(local.exchanged(x, axes, split=after, concat=before)) if axes else x


def all_reduce(
    input_tensor: Tensor, *older: Any, cluster_axis: int | None = None, math_op: Any = None,
    dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """On each device the sum of all parts, of `dtype` if that is named."""
    _sums("all_reduce", math_op)
    call = Call("all_reduce", input_tensor, cluster_axis, older, options)
    return call.run(_all_reduce, call.labels(PlacementReplicate()), dtype=dtype)


def _all_reduce(x: Value, axes: Axes) -> Value:
    return own(local.reduced(x, axes, "sum")) if axes else x


def reduce_scatter(
    input_tensor: Tensor, dim: int, *older: Any, cluster_axis: int | None = None,
    math_op: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """On each device its part along `dim` of the sum of all. Raises ShapeError if `dim` is not
    divided by as many devices."""
    _sums("reduce_scatter", math_op)
    call = Call("reduce_scatter", input_tensor, cluster_axis, older, options)
    dim = dim_of(call.name, input_tensor.shape, dim)
    return call.run(_reduce_scatter, call.labels(PlacementShard(dim)), dim=dim)


def _reduce_scatter(x: Value, axes: Axes, dim: int) -> Value:
    return own(local.scattered(x, axes, dim, "sum")) if axes else x


def _sums(name: str, math_op: Any) -> None:
    """Raises TTNNError if `math_op` names another thing than a sum."""
    if math_op is not None and "sum" not in str(math_op).lower():
        raise wrong(f"{name}: {math_op} is not provided", fix="leave it out: it is a sum")


def _place(call: Call, coord: Sequence[int]) -> tuple[MeshCoordinate, int]:
    """A place of the mesh, and its number along the axes of the call."""
    device = call.x.device_
    assert device is not None and call.x.grid_ is not None
    at, shape = device.place(coord), call.x.grid_
    number = 0
    for i in range(len(shape)) if call.axis is None else [call.axis]:
        number = number * shape[i] + at[i]
    return MeshCoordinate(at), number


def broadcast(
    input_tensor: Tensor, sender_coord: Sequence[int], *, cluster_axis: int | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """On each device the part of the one at `sender_coord`; along `cluster_axis`, of the one of its
    line that has the sender's place there."""
    call = Call("broadcast", input_tensor, cluster_axis, (), options)
    _, root = _place(call, sender_coord)
    return call.run(_broadcast, call.labels(PlacementReplicate()), root=root)


@moves
def _broadcast(x: Value, axes: Axes, root: int) -> Value:
    return own(local.sent(x, axes, root)) if axes else x


def all_broadcast(
    input_tensor: Tensor, *, cluster_axis: int | None = None, **options: Any
) -> list[Tensor]:
    """On each device the parts of all: a tensor for each."""
    call = Call("all_broadcast", input_tensor, cluster_axis, (), options)
    labels, count = call.labels(PlacementReplicate()), call.count
    dtypes = [input_tensor.dtype] * count
    return call.run_many(_all_broadcast, labels, dtype=dtypes, count=count, output=None)


@moves
def _all_broadcast(x: Value, axes: Axes) -> tuple[Value, ...]:
    if not axes:
        return (x,)
    every = own(local.collected(x.reshape(1, *x.shape), axes, 0))
    return tuple(every[i] for i in range(every.shape[0]))


def point_to_point(
    input_tensor: Tensor, sender_coord: Any, receiver_coord: Any, *older: Any,
    output_tensor: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The sender's part on the receiver. The other devices have what `output_tensor` has there, or
    their own part.

    (Programs of 2025 named the receiver first: name both, `sender_coord=..., receiver_coord=...`.)
    """
    call = Call("point_to_point", input_tensor, None, older, options)
    (_, source), (_, target) = _place(call, sender_coord), _place(call, receiver_coord)
    more = [output_tensor] if output_tensor is not None else []
    return call.run(
        _point_to_point, input_tensor.topology, *more, source=source, target=target,
        output=output_tensor,
    )  # fmt: skip


@moves
def _point_to_point(x: Value, *there: Value, axes: Axes, source: int, target: int) -> Value:
    if not axes:
        return x
    moved = own(local.permuted(x, axes, ((source, target),)))
    return F.where(rank_along(x, axes) == target, moved, there[0] if there else x)


def rank_along(x: Value, axes: Axes) -> Value:
    """Each device's number along `axes`."""
    assert x.type.mesh is not None
    return View(x.type.mesh, axes).symbol(local.recorder_now())


def mesh_partition(
    input_tensor: Tensor, dim: int, cluster_axis: int | None = None, **options: Any
) -> Tensor:
    """On each device its own part of `dim`: what undoes `all_gather`. It moves nothing."""
    call = Call("mesh_partition", input_tensor, cluster_axis, (), options)
    dim = dim_of(call.name, input_tensor.shape, dim)
    size = input_tensor.shape[dim]
    if size % call.count:
        raise wrong(
            f"mesh_partition: dim {dim} of {size} is not divided by {call.count} devices",
            [("tensor", input_tensor.shape), ("mesh", input_tensor.grid_)],
            fix="pad it, or take another dim",
        )
    labels = call.labels(PlacementShard(dim))
    return call.run(_mesh_partition, labels, dim=dim, parts=call.count)


@moves
def _mesh_partition(x: Value, axes: Axes, dim: int, parts: int) -> Value:
    if not axes:
        return x
    rows = x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return F.take(rows, rank_along(x, axes).reshape(1), dim).reshape(
        *x.shape[:dim], x.shape[dim] // parts, *x.shape[dim + 1 :]
    )


__all__ = [
    "all_broadcast", "all_gather", "all_reduce", "broadcast", "mesh_partition", "point_to_point",
    "reduce_scatter",
]  # fmt: skip
