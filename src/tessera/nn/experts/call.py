"""What does a call of `moe` need? Its arguments, checked; where weights and tokens go."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.context import settings
from ...core.errors import DTypeError, ShapeError, UsageError, fail
from ...core.layout import Factor, TensorType, dim_axes, unknown_axis, ways
from ...core.mesh import Mesh
from ...lang import functions as F
from ...lang.checks import axes_of, mesh_or_none, number, shown, whole
from ...lang.record import current
from ...lang.tensor import Tensor, as_tensor
from .. import functional as fn
from .dispatch import Wire
from .placement import Placement
from .tokens import Tokens, tokens_of
from .transport import (
    TRANSPORTS,
    MoEInspection,
    Transport,
    buckets_of,
    hops,
    row_bytes,
    transport_of,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": fn.gelu, "relu": fn.relu, "silu": fn.silu,
}  # fmt: skip
WEIGHTS = ("router", "up", "down", "gate", "bias", "shared")


@dataclass(frozen=True, slots=True)
class Weights:
    """`up`, `gate` [R, d, h], `down` [R, h, d], `router` [d, E], `bias` [E]; those of the shared
    expert have no first dim."""

    router: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    bias: Tensor | None = None
    shared: tuple[Tensor, Tensor, Tensor | None] | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """One call, checked: the weights where they work, the tokens' layout, the options."""

    weights: Weights
    tokens: Tokens
    placement: Placement | None
    experts: int
    rows: int
    k: int
    capacity: int | None
    wire: Wire
    transport: Transport
    slots: int

    def sent_bytes(self, packing: str | None) -> int:
        """Bytes that one device hands over on the way there or back."""
        t = self.tokens.type
        return self.slots * row_bytes(t.shape[-1], t.dtype.bytes, packing)


def settled(
    t: TensorType, experts: Any, k: Any, transport: Any, mesh: Any, capacity: Any, groups: Any,
    axis: Any, placement: Any, block: Any, zigzag: Any = 1,
) -> Settled:  # fmt: skip
    """Everything about a call that its values do not change. Raises what `moe` raises."""
    w = _weights(experts, t)
    k = whole("moe", "k", k, 1)
    how = _wished(transport)
    if block is not None:
        whole("moe", "block", block, 1)
    zigzag = whole("moe", "zigzag", zigzag, 1)
    if placement is not None and not isinstance(placement, Placement):
        raise fail(
            UsageError, f"moe: placement cannot be {shown(placement)}",
            fix="give nn.place_experts(experts, owners)",
        )  # fmt: skip
    count, rows = w.router.shape[1], w.up.shape[0]
    have = placement.rows if placement is not None else range(rows)
    if len(have) != rows or max(have) + 1 != count:
        raise fail(
            ShapeError,
            f"moe: the router has {count} experts, the weights {rows} rows",
            [("router", w.router.type), ("up", w.up.type)],
            fix="give a row per expert, or the placement that says which row is whose",
        )
    if k > count:
        raise fail(UsageError, f"moe: k={k} of {count} experts", fix="choose at most all of them")
    where = t.mesh or mesh_or_none("moe", mesh) or w.up.mesh or settings().mesh
    axes = expert_axes(w.up.type, axis, where)
    there = ways(axes, where.sizes) if where is not None else 1
    if rows % there:
        raise fail(
            UsageError,
            f"moe: {rows} rows of experts do not divide over {', '.join(axes)} of {there}",
            fix="add replicas by a placement, or split the experts over fewer devices",
        )
    moves = tuple(a for a in axes if where is not None and where.sizes[a] > 1)
    hidden = {a for a in dim_axes(w.up.type.in_use.dims[2]) if a not in moves}
    wants = moves
    if t.mesh is None and where is not None:
        t = t.on(where)
        wants = tuple(a for a in where.axes if a in {*moves, "dp"} and a not in hidden)
    spread = None
    if capacity is not None:
        spread = number("moe", "capacity", capacity)
        if not 0 < spread < math.inf:
            raise fail(
                UsageError,
                f"moe: a capacity of {spread} leaves room for nothing",
                fix="give a number above 0, e.g. 1.25 for a quarter more than an even share, or"
                " None for dropless",
            )
        groups = _groups(t, groups)
        if zigzag > 1 and math.prod(t.shape[:-1]) // groups % t.shape[-2]:
            raise fail(
                UsageError, "moe: groups of parts of a sequence that lies in zig-zag order",
                [("x", t), ("groups", groups)],
                fix="leave out groups, so that each sequence is one, or unzigzag x before",
            )  # fmt: skip
    elif groups is not None:
        raise fail(
            UsageError, "moe: groups without a capacity have no meaning",
            fix="give capacity=1.25 too, or leave out groups",
        )  # fmt: skip
    tokens = tokens_of(t, wants, hidden, groups, zigzag)
    each = math.prod(tokens.four[1:])
    limit = None
    if spread is not None:
        limit = max(1, min(each, math.ceil(spread * k * each / rows)))
        room, buckets = min(limit, tokens.four[2]), rows
    else:
        room, buckets = tokens.four[2] * min(k, rows // there), there
    sent = tokens.parts * buckets * room
    width = row_bytes(t.shape[-1], t.dtype.bytes, how.pack_dtype)
    pieces = buckets_of(sent * width, room, how) if moves else 1
    wire = Wire(moves, how.pack_dtype if moves else None, pieces, how.epoch == "hard")
    slots = tokens.parts * buckets * wire.room(room)
    return Settled(
        _placed(w, moves, where), tokens, placement, count, rows, k, limit, wire, how, slots,
    )  # fmt: skip


def _wished(transport: Any) -> Transport:
    """The transport of a call; what it leaves open is as `@schedule(comm_backend=, epoch=)` has."""
    how, chosen = transport_of(transport), settings().schedule
    if how.type == "auto" and chosen.backend in TRANSPORTS:
        how = replace(how, type=chosen.backend)
    said = isinstance(transport, Transport) or (
        isinstance(transport, Mapping) and "epoch" in transport
    )
    return how if said or chosen.epoch is None else replace(how, epoch=chosen.epoch)


# What calls did: by the id of their result, where they ran at once, or of the recording that they
# are in. It goes when that goes. (A tensor is no key: == gives a tensor.)
_reports: dict[int, list[MoEInspection]] = {}


def report(of: Tensor, call: Settled) -> None:
    """Keeps what the call that gave `of` does, for `dist.inspect`."""
    recorder = current()
    while recorder is not None and recorder.parent is not None:
        recorder = recorder.parent
    place = of if recorder is None else recorder.builder
    if id(place) not in _reports:
        weakref.finalize(place, _reports.pop, id(place), None)
    _reports.setdefault(id(place), []).append(inspection(call))


def reports(of: object) -> tuple[MoEInspection, ...]:
    """What the calls of `moe` did that gave the tensor `of`, or that the recording `of` has."""
    return tuple(_reports.get(id(of), ()))


def inspection(call: Settled, capacity: float | None = None, known: bool = True) -> MoEInspection:
    """What `call` does; nothing of sizes and rows where its tokens are not `known`, but `capacity`
    in even shares."""
    there, back = (
        hops(call.tokens.type, call.wire.axes, call.sent_bytes(p) if known else None)
        for p in (call.wire.packing, call.wire.narrow)
    )
    return MoEInspection(
        call.transport, call.experts, call.rows, call.k, call.wire.axes,
        call.capacity if known else capacity, call.slots if known else None, call.wire.buckets,
        there, back,
    )  # fmt: skip


def _groups(t: TensorType, groups: Any) -> int:
    """The number of groups of tokens. Raises UsageError."""
    count = math.prod(t.shape[:-1])
    n = math.prod(t.shape[:-2]) if groups is None else whole("moe", "groups", groups, 1)
    if count % n:
        raise fail(
            UsageError, f"moe: {count} tokens do not divide into {n} groups", [("x", t)],
            fix="give a number of groups that divides the tokens",
        )  # fmt: skip
    return n


def expert_axes(up: TensorType, axis: Any, mesh: Mesh | None) -> tuple[str, ...]:
    """The mesh axes of the experts. Raises UsageError, LayoutError."""
    if axis is None:
        return dim_axes(up.in_use.dims[0]) or (("ep",) if mesh is not None and "ep" in mesh else ())
    axes = axes_of("moe", axis)
    for a in axes:
        if mesh is None or a not in mesh:
            raise unknown_axis(a, mesh)
    return axes


def _placed(w: Weights, axes: tuple[str, ...], mesh: Mesh | None) -> Weights:
    """The weights with their rows over `axes`."""
    if not axes and not w.up.type.rest:
        return w

    def over(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        t = x.type if x.type.mesh is not None else x.type.on(mesh)
        if dim_axes(t.dims[0]) == axes:
            return x
        return F.relayout(x, t.with_dims(((Factor(x.shape[0], axes),), *t.dims[1:])))

    up, down = over(w.up), over(w.down)
    assert up is not None and down is not None
    return Weights(w.router, up, down, over(w.gate), w.bias, w.shared)


def _weights(given: Any, x: TensorType) -> Weights:
    """The weights of `experts`, checked against x [.., d]. Raises UsageError, ShapeError,
    DTypeError."""
    if not has_weights(given):
        raise fail(
            UsageError,
            f"moe: experts cannot be {shown(given)}",
            fix='give {"router": [d, E], "up": [E, d, h], "down": [E, h, d]}, an nn.MoE, or a'
            " number of experts",
        )
    odd = [n for n in given if n not in WEIGHTS]
    if odd:
        raise fail(
            UsageError,
            f"moe: experts has no weight {shown(odd[0])}",
            fix="use " + ", ".join(WEIGHTS),
        )
    if x.rank < 2:
        raise fail(ShapeError, "moe: x is not [.., d]", [("x", x)], fix="give tokens of d channels")
    if not x.dtype.is_float:
        raise fail(DTypeError, "moe: x is not of floats", [("x", x)], fix="embed token ids first")
    d = x.shape[-1]
    router, up = as_tensor(given["router"]), as_tensor(given["up"])
    e, h = (up.shape[0], up.shape[2]) if up.ndim == 3 else (0, 0)
    count = router.shape[1] if router.ndim == 2 else 0
    _shape("router", router, (d, count))
    found = {n: as_tensor(given[n]) for n in ("up", "down", "gate") if given.get(n) is not None}
    for n, w in found.items():
        _shape(n, w, (e, h, d) if n == "down" else (e, d, h))
    bias = None if given.get("bias") is None else as_tensor(given["bias"])
    if bias is not None:
        _shape("bias", bias, (count,))
    shared = None
    if given.get("shared") is not None:
        part = given["shared"]
        if not isinstance(part, Mapping) or not {"up", "down"} <= set(part) <= {
            "up",
            "down",
            "gate",
        }:
            raise fail(
                UsageError, f"moe: shared cannot be {shown(part)}",
                fix='give {"up": [d, h], "down": [h, d]}, and "gate" [d, h] where it is gated',
            )  # fmt: skip
        s = {n: as_tensor(v) for n, v in part.items() if v is not None}
        wide = s["up"].shape[-1] if s["up"].ndim == 2 else 0
        for n, w in s.items():
            _shape(f"shared {n}", w, (wide, d) if n == "down" else (d, wide))
        shared = s["up"], s["down"], s.get("gate")
    return Weights(router, found["up"], found["down"], found.get("gate"), bias, shared)


def has_weights(given: Any) -> bool:
    """Whether `given` is a dict with what every network of experts has."""
    return isinstance(given, Mapping) and {"router", "up", "down"} <= set(given)


def _shape(name: str, w: Tensor, want: tuple[int, ...]) -> None:
    if w.shape != want or not w.dtype.is_float:
        sizes = ", ".join(str(n) if n else "?" for n in want)
        raise fail(
            ShapeError,
            f"moe: {name} is not of floats [{sizes}]",
            [(name, w.type)],
            fix="router is [d, E], up and gate [E, d, h], down [E, h, d], for x [.., d]",
        )


def activation_of(name: Any, w: Weights) -> Callable[[Tensor], Tensor]:
    if name is None:
        return fn.gelu if w.gate is None else fn.silu
    if isinstance(name, str) and name in ACTIVATIONS:
        return ACTIVATIONS[name]
    raise fail(
        UsageError,
        f"moe: activation {shown(name)} is not known",
        fix="use " + ", ".join(ACTIVATIONS),
    )
