"""Rows of the collectives. They act on the devices of the whole mesh, row by row, or of each of its
lines along `cluster_axis`: 0 joins the devices of a column, 1 those of a row.

Arguments that name wires and workers (`topology`, `num_workers`, semaphores, ...) have no effect on
values; `num_links` is held against the links of the machine, if one is described.

The label of a result says what the devices' parts make together: the axis along which a collective
acts gets another one. Some results no label describes: parts in an order that is not row by row.
These keep the operand's label, as in TT-NN, and are an error with
`ttnn.CONFIG.strict_ccl_topology = True`.

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

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.checks import whole
from ..core.dtypes import int32
from ..lang.math import functions as F
from ..lang.parallel.local import collectives as local
from ..lang.record.local_view import View
from ..lang.value.tensor import Tensor as Value
from .args import check_types, dim_of
from .configs import ReduceType, Topology
from .device import MeshDevice
from .dtypes import DataType
from .errors import wrong
from .hardware import CONFIG
from .mapping import Placement, PlacementReplicate, PlacementShard, TensorTopology
from .op import KEYWORDS, Call, op
from .shapes import MeshShape
from .system import system
from .tensor import Tensor

Axes = tuple[str, ...]
_WIRES = re.compile(r"(\d+) x ")  # how a link of several wires begins: "2 x chip ethernet 100G"
_BUFFERS = ("persistent_output_buffer", "persistent_output_buffers", "persistent_output_tensor")
# Keywords that name wires, workers and buffers.
COLLECTIVE_KEYWORDS = KEYWORDS | {
    *_BUFFERS, "num_links", "topology", "mesh_device", "num_workers_per_link", "chunks_per_sync",
    "intermediate_memory_config", "multi_device_global_semaphore", "barrier_semaphore",
    "persistent_intermediate_buffer", "num_devices", "chunk_size", "use_broadcast", "worker_mode",
    "dispatch_algorithm", "linear_barrier", "init_semaphore", "cross_device_semaphore",
    "drain_sync_tilizer_core", "barrier_semaphores", "rs_global_semaphores",
    "ag_global_semaphores", "use_optimal_ccl_for_llama",
}  # fmt: skip
_AXIS = inspect.Parameter(
    "cluster_axis", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int | None
)


def collective(
    *, gathers: bool = False, shards: str = "", keeps: bool = False,
    before: Callable[[Call], None] | None = None, keywords: Sequence[str] = (), **facts: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A row of a body that gets `axes` too, those with more than one device. The result is a shard
    of the dim that the option `shards` names, with `keeps` it lies like the operand, and else it is
    the same on all devices; with `gathers` it is gathered along `dim`."""
    ready = partial(_prepare, gathers, shards, keeps, before)
    return op(internal=["axes"], more=[_AXIS], prepare=ready, extra_args=True,
              keywords=COLLECTIVE_KEYWORDS.union(keywords), **facts)  # fmt: skip


def _prepare(
    gathers: bool, shards: str, keeps: bool, before: Callable[[Call], None] | None, call: Call
) -> None:
    """Checks a call of a collective, and sets its axes and the topology of its result."""
    if before is not None:
        before(call)
    name, options, x = call.op.name, call.options, call.tensors()[0]
    device, grid, mesh = x.device_, x.grid_, x.value.type.mesh
    assert device is not None and grid is not None and mesh is not None
    axis = _cluster_axis(call, device)
    axes = [*range(len(grid))] if axis is None else [axis]
    _check_links(name, call.keywords.get("num_links"))
    for word in ("dim", "in_dim", "out_dim"):
        if word in options:
            options[word] = dim_of(name, x.shape, options[word])
    for word in ("sender_coord", "receiver_coord"):
        if word in options:  # the device's number along the axes
            at = device.place(options[word])
            options[word] = sum(at[i] * math.prod(grid[k] for k in axes if k > i) for i in axes)
    # Along an axis of one device nothing happens.
    options["axes"] = tuple(mesh.axes[i] for i in axes if grid[i] > 1)
    new = PlacementShard(options[shards]) if shards else PlacementReplicate()
    call.topology = x.topology
    if not keeps:
        dim = options["dim"] if gathers else None
        call.topology = relabel(name, x.topology, grid, axes, len(x.shape), new, dim)
    # Of several buffers the last one is for the result, the others are for data in transit.
    buffers = [call.keywords.get(k) for k in _BUFFERS]
    ends = [b[-1] if isinstance(b, Sequence) and b else b for b in buffers]
    call.output = call.output or next((t for t in ends if isinstance(t, Tensor)), None)


def _cluster_axis(call: Call, device: MeshDevice) -> int | None:
    """The axis that a call goes along, or None for all. Raises TTNNError if the mesh has none such,
    or is another one than the call names."""
    name, keywords = call.op.name, call.keywords
    axis: int | None = keywords.get("axis", call.options.pop("cluster_axis"))
    check_types(name, topology=keywords.get("topology"))
    # Forms of 2024: all_gather(x, dim, cluster_axis, mesh_device).
    for argument in (keywords.get("mesh_device"), *call.extra_args):
        if isinstance(argument, int) and not isinstance(argument, bool):
            axis = argument
        elif isinstance(argument, ReduceType):
            _check_sum(name, argument)
        elif isinstance(argument, MeshDevice) and argument not in device.ancestry():
            raise wrong(
                f"{name}: the tensor is on another mesh",
                [("tensor", device), ("mesh_device", argument)],
                fix="leave mesh_device out: it is the tensor's",
            )
        elif not isinstance(argument, MeshDevice | type(None) | Topology):
            raise wrong(
                f"{name}: {argument!r} is no argument of it",
                fix="give arguments after the dim by their names",
            )
    if axis is not None and not 0 <= whole(name, "cluster_axis", axis) < len(device.shape):
        raise wrong(
            f"{name}: cluster_axis {axis} is none of the mesh's",
            [("mesh", device.shape)],
            fix=f"give a number from 0 to {len(device.shape) - 1}, or none for the whole mesh",
        )
    return axis


def _check_links(name: str, links: Any) -> None:
    if links is None:
        return
    machine = system().machine
    names = [level.link.name for level in machine.topology.levels] if machine is not None else []
    counts = [int(found[1]) if (found := _WIRES.match(n)) else 1 for n in names]
    most = min(counts, default=0)  # 0: nobody says so
    if whole(name, "num_links", links) < 1 or (most and links > most):
        raise wrong(
            f"{name}: num_links={links}",
            [("links between neighbours", most or "unknown")],
            fix=f"give a number from 1 to {most}" if most else "give at least 1",
        )


def _check_sum(name: str, math_op: Any) -> None:
    """Raises TTNNError if `math_op` names another thing than a sum."""
    if math_op is not None and "sum" not in str(math_op).lower():
        raise wrong(f"{name}: {math_op} is not provided", fix="leave it out: it is a sum")


# -- rows -----------------------------------------------------------------------------------------
def as_varying(x: Value) -> Value:
    """`x` as each device's own, along every axis of its mesh."""
    assert x.type.mesh is not None
    return F.relayout(x, x.type.with_varying(x.type.mesh.axes))


def rank_along(x: Value, axes: Axes) -> Value:
    """Each device's number along `axes`."""
    assert x.type.mesh is not None
    return View(x.type.mesh, axes).symbol(local.recorder_now())


@collective(moves=True, gathers=True)
def all_gather(input_tensor: Value, dim: int, *, axes: Axes) -> Value:
    """On each device the parts of all, one after the other along `dim`."""
    return as_varying(local.collected(input_tensor, axes, dim)) if axes else input_tensor


@collective()
def all_reduce(input_tensor: Value, *, axes: Axes, math_op: Any = None) -> Value:
    """On each device the sum of all parts."""
    _check_sum("all_reduce", math_op)
    return as_varying(local.reduced(input_tensor, axes, "sum")) if axes else input_tensor


@collective(shards="dim")
def reduce_scatter(input_tensor: Value, dim: int, *, axes: Axes, math_op: Any = None) -> Value:
    """On each device its part along `dim` of the sum of all. Raises ShapeError if `dim` is not
    divided by as many devices."""
    _check_sum("reduce_scatter", math_op)
    return as_varying(local.scattered(input_tensor, axes, dim, "sum")) if axes else input_tensor


@collective(moves=True)
def broadcast(input_tensor: Value, sender_coord: Any, *, axes: Axes) -> Value:
    """On each device the part of the one at `sender_coord`; along `cluster_axis`, of the one of its
    line that has the sender's place there."""
    return as_varying(local.sent(input_tensor, axes, sender_coord)) if axes else input_tensor


@collective(moves=True)
def all_broadcast(input_tensor: Value, *, axes: Axes) -> list[Value]:
    """On each device the parts of all: a tensor for each."""
    if not axes:
        return [input_tensor]
    every = as_varying(local.collected(F.unsqueeze(input_tensor, 0), axes, 0))
    return [every[i] for i in range(every.shape[0])]


@collective(moves=True, keeps=True, into="output_tensor")
def point_to_point(
    input_tensor: Value, sender_coord: Any, receiver_coord: Any, *,
    output_tensor: Value | None = None, axes: Axes,
) -> Value:  # fmt: skip
    """The sender's part on the receiver. The other devices have their part of `output_tensor`, or
    their own part.

    (Programs of 2025 named the receiver first: name both, `sender_coord=..., receiver_coord=...`.)
    """
    x = input_tensor
    if not axes:
        return x
    moved = as_varying(local.permuted(x, axes, ((sender_coord, receiver_coord),)))
    other = x if output_tensor is None else output_tensor
    return F.where(rank_along(x, axes) == receiver_coord, moved, other)


@collective(moves=True, shards="dim")
def mesh_partition(input_tensor: Value, dim: int, *, axes: Axes) -> Value:
    """On each device its own part of `dim`: the inverse of `all_gather`. It moves nothing."""
    x, mesh = input_tensor, input_tensor.type.mesh
    assert mesh is not None
    count, size = math.prod(mesh.sizes[a] for a in axes), x.shape[dim]
    if size % count:
        raise wrong(
            f"mesh_partition: dim {dim} of {size} is not divided by {count} devices",
            [("tensor", x.shape), ("mesh", mesh)],
            fix="pad it, or take another dim",
        )
    if not axes:
        return x
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    rows = x.reshape(*before, count, size // count, *after)
    mine = F.take(rows, rank_along(x, axes).reshape(1), dim)
    return mine.reshape(*before, size // count, *after)


# -- tokens to the devices of their experts, and back ---------------------------------------------
def _dispatched(call: Call) -> None:
    x, chosen, mapping = call.tensors()
    _check(call, x, chosen, mapping, "output_concat_dim")
    if chosen.shape[:-1] != x.shape[:-1]:
        raise wrong(
            f"{call.op.name}: the choices are not those of the tokens",
            [("tokens", x.shape), ("choices", chosen.shape)],
            fix="give tokens [batch, 1, sequence, hidden] and choices [batch, 1, sequence, chosen]",
        )
    call.dtype, call.output = [x.dtype, chosen.dtype], call.keywords.get("output_tensors")


def _check(call: Call, x: Tensor, chosen: Tensor, mapping: Tensor, dim: str) -> None:
    """Raises TTNNError unless the tensors can be the choices for tokens, and which devices have
    which expert."""
    name, grid = call.op.name, x.grid_
    if call.options[dim] not in (1, 2):
        rows = [("given", call.options[dim])]
        raise wrong(f"{name}: tokens are joined along dim 1 or 2", rows, fix="give 1")
    if chosen.dtype.is_float and chosen.dtype is not DataType.BFLOAT16:
        raise wrong(
            f"{name}: the chosen experts are whole numbers",
            [("choices", f"{chosen.shape}, {chosen.dtype}")],
            fix="ttnn.typecast(tensor, ttnn.uint16)",
        )
    assert grid is not None
    if len(mapping.shape) < 2 or mapping.shape[-1] not in (1, grid.mesh_size()):
        raise wrong(
            f"{name}: the mapping has no column for each device",
            [("mapping", mapping.shape), ("mesh", grid)],
            fix="give a mapping [1, 1, experts, devices] of all devices of the mesh",
        )


@collective(moves=True, before=_dispatched, keywords=["output_tensors"])
def all_to_all_dispatch(
    input_tensor: Value, expert_indices_tensor: Value, expert_mapping_tensor: Value, *,
    output_concat_dim: int = 1, axes: Axes,
) -> tuple[Value, ...]:  # fmt: skip
    """Tokens to the devices of their experts.

    Of each device come tokens [B, 1, S, H] and the experts chosen for each, [B, 1, S, K];
    `expert_mapping_tensor` [1, 1, E, D] is 1 where a device (of the whole mesh) has an expert. Each
    device gets [1, B * n, S, H] of the n devices of its line: the tokens with an expert of its own,
    zeros for the others; and the choices of all, [1, B * n, S, K]. With `output_concat_dim=2` it is
    the sequence that is joined: [1, B, S * n, H].
    """
    both = (input_tensor, expert_indices_tensor.to(int32))
    tokens, chosen = (F.permute(v, (1, 0, 2, 3)) for v in both)
    if axes:
        tokens = as_varying(local.collected(tokens, axes, output_concat_dim))
        chosen = as_varying(local.collected(chosen, axes, output_concat_dim))
    mine = _mine(input_tensor, expert_mapping_tensor)
    is_local = F.max(F.take(mine, chosen.reshape(-1), 0).reshape(*chosen.shape), -1, keepdims=True)
    return F.where(is_local > 0, tokens, F.zeros_like(tokens)), chosen


def _mine(x: Value, mapping: Value) -> Value:
    """1 for each expert that this device has, else 0: [E]."""
    assert x.type.mesh is not None
    experts, devices = mapping.shape[-2:]
    table = mapping.to(int32).reshape(experts, devices)
    if devices == 1:
        return table.reshape(experts)
    column = F.arange(devices) == rank_along(x, x.type.mesh.axes)
    return F.sum(F.where(column, table, F.zeros_like(table)), -1)


def _combined(call: Call) -> None:
    x, *both = call.tensors()
    fits = [_are_choices(x, *pair) for pair in (both, both[::-1])]
    if fits[0] == fits[1]:
        raise wrong(
            f"{call.op.name}: the shapes do not say which tensor has the mapping, and which the"
            " choices",
            [(f"tensor {i}", t.shape) for i, t in enumerate((x, *both))],
            fix="give a mapping [1, 1, experts, devices] and choices [1, batch, sequence, chosen],"
            " of the batch and sequence of the tokens",
        )
    mapping, chosen = both if fits[0] else both[::-1]
    words = "expert_mapping_tensor", "expert_metadata_tensor"
    call.operands |= dict(zip(words, (mapping, chosen)))
    _check(call, x, chosen, mapping, "output_shard_dim")


def _are_choices(x: Tensor, mapping: Tensor, chosen: Tensor) -> bool:
    """True if the tensors can be the mapping of experts to devices, and the choices for tokens."""
    assert x.grid_ is not None
    devices = mapping.shape[-1] == x.grid_.mesh_size() and set(mapping.shape[:-2]) <= {1}
    return devices and len(chosen.shape) == 4 and chosen.shape[1:3] == x.shape[1:3]


@collective(moves=True, before=_combined, shards="output_shard_dim", keywords=["axis"])
def all_to_all_combine(
    input_tensor: Value, expert_mapping_tensor: Value, expert_metadata_tensor: Value, *,
    local_reduce: bool = False, output_shard_dim: int = 1, axes: Axes,
) -> Value:  # fmt: skip
    """Results of experts for tokens, back where the tokens came from.

    A device has [E / D, B * n, S, H] of its experts (with `local_reduce` their sum, [1, ...]), and
    the choices of all tokens from `all_to_all_dispatch`. It gets [K, B, S, H]: for each of its
    tokens the result of each of the K chosen experts; after `local_reduce` a device's sum stands at
    the first of its experts, in their order, that was chosen, and zeros at the others. Versions of
    2025 have the mapping and the choices in this order or in the other: the shapes say which is
    which. Raises TTNNError if they do not.
    """
    x, mine, chosen = (
        input_tensor,
        _mine(input_tensor, expert_mapping_tensor),
        expert_metadata_tensor,
    )
    chosen = chosen.to(int32)
    b, s, k = chosen.shape[1:]
    # The place of each expert among those of its device, and whether it is here.
    place = F.cumsum(mine, 0) - 1
    is_local = F.take(mine, chosen.reshape(-1), 0).reshape(b, s, k) > 0
    first = F.min(F.where(is_local, chosen[0], mine.shape[0]), -1)
    rows = []
    before = F.zeros_like(first)
    for i in range(k):
        wanted = is_local[..., i]
        if local_reduce:
            row, wanted = x[0], wanted & (chosen[0, :, :, i] == first) & (before == 0)
            before = before + wanted.to(int32)
        else:
            at = F.maximum(F.take(place, chosen[0, :, :, i].reshape(-1), 0), 0).reshape(b, s)
            pick = F.arange(x.shape[0]).reshape(-1, 1, 1) == at
            row = F.sum(F.where(F.unsqueeze(pick, -1), x, F.zeros_like(x)), 0)
        rows.append(F.where(F.unsqueeze(wanted, -1), row, F.zeros_like(row)))
    combined = F.stack(rows, 0)
    return (
        as_varying(local.scattered(combined, axes, output_shard_dim, "sum")) if axes else combined
    )


# -- labels ---------------------------------------------------------------------------------------
def relabel(
    name: str, old: TensorTopology, grid: MeshShape, axes: Sequence[int], rank: int,
    new: Placement, gathered: int | None = None,
) -> TensorTopology:  # fmt: skip
    """The topology after a collective along `axes` of a mesh `grid`, which are `new` then.

    `gathered` is the dim that was gathered. Raises TTNNError if no label describes the result
    and `strict_ccl_topology` is set.
    """
    moving = [i for i, n in enumerate(grid) if n > 1]
    acts = [i for i in moving if i in axes]
    labels = [_from_the_front(p, rank) for p in old.placements()]
    # One dim over all devices, row by row, lies along each axis of the mesh.
    line = len(labels) == 1 and len(old.mesh_coords()) == grid.mesh_size()
    if line and acts == moving:
        return replace(old, _placements=(new,))
    if old.distribution_shape() != grid:
        one = labels[0] if len(labels) == 1 else PlacementReplicate()
        labels = [one if i in moving else PlacementReplicate() for i in range(len(grid))]
    inner = [labels[i] for i in moving if acts and i > acts[0] and i not in acts]
    cut = PlacementShard(gathered) if gathered is not None else None
    if cut in inner and cut in [labels[i] for i in acts]:
        return _refused(name, old, f"parts of dim {gathered} along axis {acts[0]} would"
                        " interleave with those along the next axis")  # fmt: skip
    for i in acts:
        labels[i] = new
    same = [i for i in moving if labels[i] == new]
    if isinstance(new, PlacementShard) and acts and len(same) > 1:
        if same != moving or new in inner:
            return _refused(name, old, f"parts of dim {new.dim} in this order no TensorTopology"
                            " can express")  # fmt: skip
        return TensorTopology(MeshShape(grid.mesh_size()), (new,), tuple(old.mesh_coords()))
    return TensorTopology(grid, tuple(labels), tuple(old.mesh_coords()))


def _refused(name: str, label: TensorTopology, why: str) -> TensorTopology:
    if not CONFIG.strict_ccl_topology:
        return label
    raise wrong(
        f"{name}: {why}",
        [("grid", label.distribution_shape()), ("placements", label.placements())],
        fix="act along the last axis that cuts the dim, or leave ttnn.CONFIG.strict_ccl_topology"
        " False: the label stays",
    )


def _from_the_front(p: Placement, rank: int) -> Placement:
    return PlacementShard(p.dim % rank) if isinstance(p, PlacementShard) else p
