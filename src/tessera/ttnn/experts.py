"""How do tokens come to the devices of their experts, and back?"""

from __future__ import annotations

from typing import Any

from ..core.dtypes import int32
from ..lang import functions as F
from ..lang.local import collectives as local
from ..lang.tensor import Tensor as Value
from .ccl import Axes, Call, own, rank_along
from .dtypes import DataType
from .faults import wrong
from .mapping import PlacementReplicate, PlacementShard
from .run import device_of, moves
from .tensor import Tensor


def all_to_all_dispatch(
    input_tensor: Tensor, expert_indices_tensor: Tensor, expert_mapping_tensor: Tensor, *,
    cluster_axis: int | None = None, output_concat_dim: int = 1, output_tensors: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens to the devices of their experts.

    Of each device come tokens [B, 1, S, H] and the experts chosen for each, [B, 1, S, K];
    `expert_mapping_tensor` [1, 1, E, D] is 1 where a device (of the whole mesh) has an expert. Each
    device gets [1, B * n, S, H] of the n devices of its line: the tokens with an expert of its own,
    zeros for the others; and the choices of all, [1, B * n, S, K]. With `output_concat_dim=2` it is
    the sequence that is joined: [1, B, S * n, H].
    """
    name = "all_to_all_dispatch"
    call = Call(name, input_tensor, cluster_axis, (), options)
    joined = _token_dim(name, output_concat_dim)
    _experts(call, expert_indices_tensor, expert_mapping_tensor)
    if expert_indices_tensor.shape[:-1] != input_tensor.shape[:-1]:
        raise wrong(
            f"{name}: the choices are not those of the tokens",
            [("tokens", input_tensor.shape), ("choices", expert_indices_tensor.shape)],
            fix="give tokens [batch, 1, sequence, hidden] and choices [batch, 1, sequence, chosen]",
        )
    dtypes = [input_tensor.dtype, expert_indices_tensor.dtype]
    into = {"output": list(output_tensors)} if output_tensors else {"output": None}
    found = call.run_many(
        _dispatch, call.labels(PlacementReplicate()), expert_indices_tensor, expert_mapping_tensor,
        dtype=dtypes, count=2, dim=joined, **into,
    )  # fmt: skip
    return found[0], found[1]


def _experts(call: Call, chosen: Tensor, mapping: Tensor) -> None:
    """Raises TTNNError unless they can be the choices for tokens, and which devices have which
    expert."""
    device_of(call.name, [call.x, chosen, mapping])
    if chosen.dtype.is_float and chosen.dtype is not DataType.BFLOAT16:
        raise wrong(
            f"{call.name}: the chosen experts are whole numbers",
            [("choices", f"{chosen.shape}, {chosen.dtype}")],
            fix="ttnn.typecast(tensor, ttnn.uint16)",
        )
    assert call.x.grid_ is not None
    if len(mapping.shape) < 2 or mapping.shape[-1] not in (1, call.x.grid_.mesh_size()):
        raise wrong(
            f"{call.name}: the mapping has no column for each device",
            [("mapping", mapping.shape), ("mesh", call.x.grid_)],
            fix="give a mapping [1, 1, experts, devices] of all devices of the mesh",
        )


def _token_dim(name: str, dim: int) -> int:
    if dim not in (1, 2):
        raise wrong(f"{name}: tokens are joined along dim 1 or 2", [("given", dim)], fix="give 1")
    return dim


@moves
def _dispatch(
    x: Value, experts: Value, mapping: Value, axes: Axes, dim: int
) -> tuple[Value, Value]:
    tokens, chosen = (F.permute(v, (1, 0, 2, 3)) for v in (x, experts.to(int32)))
    if axes:
        tokens = own(local.collected(tokens, axes, dim))
        chosen = own(local.collected(chosen, axes, dim))
    mine = _mine(x, mapping)
    here = F.max(F.take(mine, chosen.reshape(-1), 0).reshape(*chosen.shape), -1, keepdims=True)
    return F.where(here > 0, tokens, F.zeros_like(tokens)), chosen


def _mine(x: Value, mapping: Value) -> Value:
    """Which experts this device has, [E]: 1 or 0."""
    assert x.type.mesh is not None
    experts, devices = mapping.shape[-2:]
    table = mapping.to(int32).reshape(experts, devices)
    if devices == 1:
        return table.reshape(experts)
    column = F.arange(devices) == rank_along(x, x.type.mesh.axes)
    return F.sum(F.where(column, table, F.zeros_like(table)), -1)


def all_to_all_combine(
    input_tensor: Tensor, expert_mapping_tensor: Tensor, expert_metadata_tensor: Tensor, *,
    local_reduce: bool = False, cluster_axis: int | None = None, output_shard_dim: int = 1,
    **options: Any,
) -> Tensor:  # fmt: skip
    """What experts made of tokens, back where the tokens came from.

    A device has [E / D, B * n, S, H] of its experts (with `local_reduce` their sum, [1, ...]), and
    the choices of all tokens from `all_to_all_dispatch`. It gets [K, B, S, H]: for each of its
    tokens what each of the K chosen experts made; after `local_reduce` a device's sum stands at the
    first of its experts, in their order, that was chosen, and zeros at the others. Versions of 2025
    have the mapping and the choices in this order or in the other: the shapes say which is which.
    Raises TTNNError if they do not.
    """
    name = "all_to_all_combine"
    call = Call(name, input_tensor, options.pop("axis", cluster_axis), (), options)
    dim = _token_dim(name, output_shard_dim)
    mapping, chosen = expert_mapping_tensor, expert_metadata_tensor
    fits = [_are_choices(input_tensor, *both) for both in ((mapping, chosen), (chosen, mapping))]
    if fits[0] == fits[1]:
        raise wrong(
            f"{name}: the shapes do not say which tensor has the mapping, and which the choices",
            [(f"tensor {i}", t.shape) for i, t in enumerate((input_tensor, mapping, chosen))],
            fix="give a mapping [1, 1, experts, devices] and choices [1, batch, sequence, chosen],"
            " of the batch and sequence of the tokens",
        )
    if fits[1]:
        mapping, chosen = chosen, mapping
    _experts(call, chosen, mapping)
    return call.run(
        _combine, call.labels(PlacementShard(dim)), mapping, chosen, dim=dim, reduced=local_reduce
    )


def _are_choices(x: Tensor, mapping: Tensor, chosen: Tensor) -> bool:
    """Whether the tensors can be the mapping of experts to devices, and the choices for tokens."""
    assert x.grid_ is not None
    devices = mapping.shape[-1] == x.grid_.mesh_size() and set(mapping.shape[:-2]) <= {1}
    return devices and len(chosen.shape) == 4 and chosen.shape[1:3] == x.shape[1:3]


@moves
def _combine(x: Value, mapping: Value, chosen: Value, axes: Axes, dim: int, reduced: bool) -> Value:
    mine = _mine(x, mapping)
    chosen = chosen.to(int32)
    b, s, k = chosen.shape[1:]
    # The place of each expert among those of its device, and whether it is here.
    place = F.cumsum(mine, 0) - 1
    flat = chosen.reshape(-1)
    here = F.take(mine, flat, 0).reshape(b, s, k) > 0
    first = F.min(F.where(here, chosen[0], mine.shape[0]), -1)
    rows = []
    before = F.zeros_like(first)
    for i in range(k):
        wanted = here[..., i]
        if reduced:
            row, wanted = x[0], wanted & (chosen[0, :, :, i] == first) & (before == 0)
            before = before + wanted.to(int32)
        else:
            at = F.maximum(F.take(place, chosen[0, :, :, i].reshape(-1), 0), 0).reshape(b, s)
            pick = F.arange(x.shape[0]).reshape(-1, 1, 1) == at
            row = F.sum(F.where(F.unsqueeze(pick, -1), x, F.zeros_like(x)), 0)
        rows.append(F.where(F.unsqueeze(wanted, -1), row, F.zeros_like(row)))
    found = F.stack(rows, 0)
    return own(local.scattered(found, axes, dim, "sum")) if axes else found


__all__ = ["all_to_all_combine", "all_to_all_dispatch"]
