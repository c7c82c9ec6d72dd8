"""One call of `moe`: placement of weights and tokens, capacity, and the computation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.checks import divides
from ...core.context import settings
from ...core.dtypes import f32
from ...core.errors import MeshError, ShapeError, UsageError, warn_no_effect
from ...core.layout import TensorType, dim_axes, shard_count
from ...core.mesh import Mesh
from ...ir.schedule.algorithms.build import puts_by
from ...lang.math import functions as F
from ...lang.record.operands import as_tensor, emit, matched
from ...lang.value.checks import mesh_or_none
from ...lang.value.tensor import Tensor
from ...ops.index_string import common_mesh
from .dispatch import Experts, Runs, Wire, by_capacity, dropless, in_blocks
from .options import ACTIVATIONS, Options
from .routing import Choice, choose
from .tokens import Tokens, tokens_of
from .transport import CARRIERS, MoEInspection, Transport, buckets_of, hops, row_bytes, transport_of
from .weights import Weights, expert_axes, weights_of


@dataclass(frozen=True, slots=True)
class Call:
    """A call with all settings fixed: weights on the experts' devices, layout of tokens, capacity,
    wire."""

    options: Options
    weights: Weights
    tokens: Tokens
    capacity: int | None
    wire: Wire
    transport: Transport
    slots: int

    @property
    def experts(self) -> int:
        return self.weights.router.shape[1]

    @property
    def rows(self) -> int:
        """The number of rows of weights: one per expert, plus replicas."""
        return self.weights.first.shape[0]

    # -- computation ------------------------------------------------------------------------------
    def run(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Choice, Tensor]:
        """(Σ gate · expert(token) for tokens x [.., d], the routing choice, number of dropped
        choices). Tokens with `mask` [..] False go to no expert."""
        o, w, tokens = self.options, self.weights, self.tokens
        rows = tokens.grouped(F.complete(x))
        token_mask = None if mask is None else tokens.each(F.complete(mask))
        choice = choose(rows, w.router, o.routing, w.bias, token_mask)
        ids = self._rows_of(choice.ids)
        if token_mask is not None:
            ids = F.where(token_mask, ids, self.rows)
        if self.capacity is None:
            y = dropless(
                rows, ids, choice.gates, self.rows, self.wire, self._runs(), token_mask is None
            )
            dropped = F.zeros(())
        else:
            y, dropped = by_capacity(
                rows, ids, choice.gates, self.rows, self.capacity, self.wire, self._experts(),
                tokens.runs(), all_served=token_mask is None,
            )  # fmt: skip
        out = tokens.ungrouped(y)
        home = x.type.complete() if x.mesh is not None else None
        if w.shared is not None:
            plain = F.relayout(x, home) if home is not None else tokens.ungrouped(rows)
            out = out + self._through(plain, w.shared)
        out = out.to(x.dtype)
        out = F.relayout(out, home) if home is not None else F.complete(out)
        return out, choice, dropped

    def _hidden(self, up: Tensor, gate: Tensor | None) -> Tensor:
        act = ACTIVATIONS[self.options.activation or ("gelu" if gate is None else "silu")]
        return act(up) if gate is None else act(gate) * up

    def _through(self, rows: Tensor, w: Mapping[str, Tensor]) -> Tensor:
        """`rows` [*, t, d] through networks whose weights have the dims * too, or broadcast over
        them."""
        if self.options.network is None:
            up, gate = F.matmul(rows, w["up"]), w.get("gate")
            h = self._hidden(up, None if gate is None else F.matmul(rows, gate))
            return F.matmul(h, w["down"])
        out = self.options.network(rows, w)
        if not isinstance(out, Tensor) or out.shape != rows.shape:
            raise ShapeError(
                "moe: the network does not give a row for each row",
                rows=[
                    ("rows", rows.type),
                    ("gives", out.type if isinstance(out, Tensor) else out),
                    *((n, v.type) for n, v in w.items()),
                ],
                fix='return a tensor of the shape of rows: rows @ w["up"] @ w["down"], and a bias'
                ' is w["bias"].unsqueeze(-2)',
            )
        return out

    def _runs(self) -> Runs:
        """The experts of one device, applied to rows in the order of the experts."""
        if self.options.network is not None or self.options.block is not None:
            return in_blocks(self._experts(), self.options.block)
        network = self.weights.tied(self.options.placement)
        up, down, gate = network["up"], network["down"], network.get("gate")

        def run(rows: Tensor, counts: Tensor) -> Tensor:
            devices = rows.shape[1]

            def product(h: Tensor, weight: Tensor) -> Tensor:
                h, w = F.narrowed(*matched("moe", h, weight))
                each = w.reshape(devices, -1, *w.shape[1:])
                return emit("ragged_dot", h, each, counts, turned=False)

            h = self._hidden(product(rows, up), None if gate is None else product(rows, gate))
            return product(h, down)

        return run

    def _experts(self) -> Experts:
        """The experts of one device, applied to rows in blocks of one expert each."""
        network = self.weights.tied(self.options.placement)
        if self.options.network is not None:
            return self._user_experts(network)
        up, down, gate = network["up"], network["down"], network.get("gate")

        def run(parts: Tensor, mine: Tensor | None) -> Tensor:
            devices = parts.shape[1]

            def product(h: Tensor, weight: Tensor) -> Tensor:
                each = weight.reshape(devices, -1, *weight.shape[1:])
                if mine is None:
                    return F.einsum("a j n b d, j n d h -> a j n b h", h, each)
                each = F.einsum("a j n e, j e d h -> a j n d h", mine.to(each.dtype), each)
                return F.einsum("a j n b d, a j n d h -> a j n b h", h, each)

            h = self._hidden(product(parts, up), None if gate is None else product(parts, gate))
            return product(h, down)

        return run

    def _user_experts(self, network: Mapping[str, Tensor]) -> Experts:
        """`_experts` for a user-defined network."""

        def run(parts: Tensor, mine: Tensor | None) -> Tensor:
            devices = parts.shape[1]
            given = {}
            for name, w in network.items():
                own = w.shape[1:]
                each = w.reshape(1, devices, -1, *own)
                if mine is not None:  # the weights of each block's expert
                    flat = w.reshape(devices, w.shape[0] // devices, math.prod(own))
                    each = F.einsum("a j n e, j e p -> a j n p", mine.to(w.dtype), flat)
                    each = each.reshape(*each.shape[:3], *own)
                given[name] = each
            return self._through(parts, given)

        return run

    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row of weights that serves each choice. Replicas take turns by the number of the
        token."""
        placement = self.options.placement
        if placement is None:
            return ids
        held: list[list[int]] = [[] for _ in range(self.experts)]
        for row, e in enumerate(placement.rows):
            held[e].append(row)
        most = max(map(len, held))
        flat = np.array([r + r[:1] * (most - len(r)) for r in held], np.int32).reshape(-1)
        table = as_tensor(flat)
        if most == 1:
            return F.take_or_zero(table, ids)
        counts = as_tensor(np.array([len(r) for r in held], np.int32))
        copy = self.tokens.numbers() % F.take_or_zero(counts, ids)
        return F.take_or_zero(table, ids * most + copy)

    # -- report -----------------------------------------------------------------------------------
    def inspection(self, tokens_known: bool = True) -> MoEInspection:
        """The report. Without `tokens_known` it has no sizes, and the capacity is in even
        shares."""
        dispatch, combine = (
            hops(self.tokens.type, self.wire.axes, self._sent_bytes(p) if tokens_known else None)
            for p in (self.wire.packing, self.wire.combine_packing)
        )
        capacity = self.capacity if tokens_known else self.options.capacity
        return MoEInspection(
            self.transport, self.experts, self.rows, self.options.k, self.wire.axes, capacity,
            self.slots if tokens_known else None, self.wire.buckets, dispatch, combine,
        )  # fmt: skip

    def warn_of_no_effect(self) -> None:
        """Warns of transport options that have no effect on this call."""
        t = self.transport
        pairs = {"multi_qp": t.multi_qp, "num_qps": t.num_qps}
        for name, given in pairs.items():
            if given:
                warn_no_effect(
                    f"moe: transport: {name}={given}",
                    f"XLA's all_to_all {CARRIERS} has no queue pairs to choose",
                    means="how many queue pairs of a network card carry the tokens",
                    fix="leave it out; NCCL reads NCCL_IB_QPS_PER_CONNECTION",
                )
        said = transport_of(self.options.transport).epoch == "hard"
        if said and self.wire.axes and self.wire.buckets == 1:
            warn_no_effect(
                "moe: transport: epoch='hard'",
                "all tokens of a device go in one bucket",
                means="each bucket is sent before the next begins",
                fix='cut the payload, e.g. transport={"bucket_bytes": 1 << 20}',
            )

    def _sent_bytes(self, packing: str | None) -> int:
        """Bytes that one device sends in a dispatch or a combine."""
        t = self.tokens.type
        return self.slots * row_bytes(t.shape[-1], t.dtype.bytes, packing)


def settled(t: TensorType, experts: Any, options: Options, mesh: Any = None) -> Call:
    """The call for tokens of type `t` [.., d], as far as it does not depend on values. Raises the
    errors of `moe`."""
    user_defined = options.network is not None
    w, how, k = weights_of(experts, t, user_defined), options.requested(), options.k
    rows = _need_rows(w, options)
    where = _one_mesh(t, w, mesh_or_none("moe", mesh)) or settings().mesh
    axes = expert_axes(w.first.type, options.axis, where)
    devices = shard_count(axes, where.sizes) if where is not None else 1
    divides(
        "moe", rows, devices,
        f"{{count}} row{'s' * (rows != 1)} of experts cannot be divided over {', '.join(axes)} of"
        " {parts}",
        "add replicas by a placement, or split the experts over fewer devices", UsageError,
    )  # fmt: skip
    moves = tuple(a for a in axes if where is not None and where.sizes[a] > 1)
    tokens = _tokens(t, w, moves, where, options)
    each, room, buckets, limit = math.prod(tokens.four[1:]), tokens.four[2], devices, None
    if options.capacity is None:
        room *= min(k, rows // devices)
    else:
        limit = max(1, min(each, math.ceil(options.capacity * k * each / rows)))
        room, buckets = min(limit, room), rows
    packing = how.pack_dtype
    if (
        packing is None
        and t.dtype is f32
        and not user_defined
        and not settings().program.mesh_invariant
    ):
        packing = settings().autocast  # the products of the experts would round the rows as well
    sent = tokens.parts * buckets * room * row_bytes(t.shape[-1], t.dtype.bytes, packing)
    pieces = buckets_of(sent, room, how) if moves else 1
    by = puts_by(how.epoch) if how.type == "nvshmem" and moves else ""
    wire = Wire(moves, packing if moves else None, pieces, how.epoch == "hard", by)
    slots = tokens.parts * buckets * wire.room(room)
    return Call(options, w.over(moves, where), tokens, limit, wire, how, slots)


def _one_mesh(t: TensorType, w: Weights, asked: Mesh | None) -> Mesh | None:
    """The mesh of tokens `t` and of the weights, or else the mesh `asked`. Raises MeshError if they
    differ."""
    found = common_mesh("moe", [t, w.router.type, w.first.type])
    if asked is not None and found not in (None, asked):
        assert found is not None
        raise MeshError(
            "moe: mesh= is another mesh than that of its arguments",
            mesh=asked.text_beside(found),
            arguments=found.text_beside(asked),
            fix="leave it out, or outside of a function: dist.place(x, mesh=...)",
        )
    return asked or found


def _need_rows(w: Weights, options: Options) -> int:
    """The number of rows of weights. Raises ShapeError unless it fits router and placement."""
    count, rows, placement = w.router.shape[1], w.first.shape[0], options.placement
    have = placement.rows if placement is not None else range(rows)
    if len(have) != rows or max(have) + 1 != count:
        raise ShapeError(
            f"moe: the router has {count} experts, the weights {rows} rows",
            rows=[("router", w.router.type), (next(iter(w.network)), w.first.type)],
            fix="give a row per expert, or the placement that says which row is whose",
        )
    options.routing.check(count)
    return rows


def _tokens(
    t: TensorType, w: Weights, moves: tuple[str, ...], where: Mesh | None, options: Options
) -> Tokens:
    """The layout of tokens of type `t` before they are sent to experts that are split over
    `moves`."""
    up = w.network.get("up") if options.network is None else None
    split = () if up is None else dim_axes(up.type.in_use.dims[2])
    hidden = {a for a in split if a not in moves}
    wants = moves
    if t.mesh is None and where is not None:
        t = t.on(where)
        wants = tuple(a for a in where.axes if a in {*moves, "dp"} and a not in hidden)
    if options.capacity is None:
        return tokens_of(t, wants, hidden, None, options.zigzag)
    count = math.prod(t.shape[:-1])
    groups = math.prod(t.shape[:-2]) if options.groups is None else options.groups
    divides(
        "moe", count, groups, "{count} tokens do not divide into {parts} groups",
        "give a number of groups that divides the tokens", UsageError, x=t,
    )  # fmt: skip
    if options.zigzag > 1 and count // groups % t.shape[-2]:
        raise UsageError(
            "moe: groups of parts of a sequence that lies in zig-zag order",
            x=t,
            groups=groups,
            fix="leave out groups, so that each sequence is one, or unzigzag x before",
        )
    return tokens_of(t, wants, hidden, groups, options.zigzag)
