"""Channels-last layout for convolutions on a CPU: a pass that avoids transposes of images.

A CPU's convolution reads and writes [N, *sizes, channels], while its compiler keeps every other
value in program order, PyTorch's [N, channels, *sizes]. So values that follow from convolutions by
elementwise ops, windows or sums are computed in the convolution's order. Each is transposed back
for its readers, and the compiler removes a transpose that is followed by its inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.layout import TensorType, dim_axes
from ..ir.graph.node import Emit, Graph, Node
from ..ops.conv import conv, window
from ..ops.movement import concat, pad, reshape, transpose
from ..ops.op import BODIES, infer
from ..ops.reduce import max_, min_, sum_
from .simplify import dead_code

REDUCTIONS = frozenset(op.name for op in (sum_, max_, min_))


def channels_last(graph: Graph) -> Graph:
    """`graph` with the values after its convolutions in channels-last order. Its outputs keep types
    and values, except that sums are added in another order."""
    if not any(n.op == conv.name or n.op in BODIES for n in graph.nodes):
        return graph
    spatial: dict[Node, int] = {}  # channels-last value → spatial dims
    permuted: dict[tuple[Node, tuple[int, ...]], Node] = {}  # values with their dims in some order

    def last(x: Node, order: tuple[int, ...], emit: Emit) -> Node:
        """`x`, which broadcasts to the dims of `order`, transposed to channels last."""
        if not x.type.rank:
            return x
        if (x, order) not in permuted:
            missing = len(order) - x.type.rank
            y = emit(_reshaped(x, (1,) * missing + x.type.shape)) if missing else x
            permuted[x, order] = emit(_transposed(y, order))
        return permuted[x, order]

    def back(node: Node, count: int, emit: Emit) -> Node:
        """`node`, which is channels last, transposed to the graph's order."""
        order = _order(node.type.rank, count)
        found = emit(_transposed(node, _inverse(order)))
        spatial[found], permuted[found, order] = count, node
        return found

    def rule(was: Node, n: Node, emit: Emit) -> Node | None:
        if n.op == conv.name:
            spatial[n] = len(n.attrs["stride"])
            return None
        lead = max((x for x in n.args if x in spatial), key=lambda x: x.type.rank, default=None)
        if lead is None:
            return None
        count, rank = spatial[lead], lead.type.rank
        order = _order(rank, count)
        joins = n.op == concat.name
        if joins or (n.kind.elements in ("computed", "same") and n.type.rank == rank):
            attrs = {"dim": order.index(n.attrs["dim"])} if joins else n.attrs
            args = tuple([last(x, order, emit) for x in n.args])
            types = (_permuted(n.type, order),)
            return back(emit(replace(n, args=args, types=types, attrs=attrs)), count, emit)
        if n.op in REDUCTIONS:
            attrs = {"dims": tuple(sorted(order.index(d) for d in n.attrs["dims"]))}
            kept = [d for d in order if d not in n.attrs["dims"]]
            there = [sorted(kept).index(d) for d in kept]
            args, types = (last(lead, order, emit),), (_permuted(n.type, there),)
            node = emit(replace(n, args=args, types=types, attrs=attrs))
            return emit(_transposed(node, _inverse(there))) if kept != sorted(kept) else node
        if n.op in (window.name, pad.name) and (inner := _in_order(n, order, count)):
            types = (_permuted(n.type, order),)
            args = (last(lead, order, emit),)
            return back(emit(replace(n, args=args, types=types, attrs=inner)), count, emit)
        if n.op == reshape.name and (now := _sizes_after(lead.type, n.type, count)):
            want = _permuted(n.type, _order(n.type.rank, now))
            node = _reshaped(last(lead, order, emit), want.shape)
            return back(emit(node), now, emit) if node.type is want else None
        return None

    return dead_code(graph.rewrite(rule, channels_last))


def _in_order(n: Node, order: Sequence[int], spatial: int) -> dict[str, Any] | None:
    """The attributes for channels-last arguments: of a pad, or of windows over all `spatial` dims,
    whose size is 1 along channels. None for other windows, or if channels are split."""
    if n.op == pad.name:
        return {k: tuple(v[d] for d in order) for k, v in n.attrs.items()}
    x, size = n.args[0].type, n.attrs["size"]
    channels = range(1, x.rank - spatial)
    if len(size) != spatial or any(dim_axes(x.dims[d]) for d in channels):
        return None
    more = len(channels)
    return {
        **n.attrs,
        "size": (*size, *(1,) * more),
        "stride": (*n.attrs["stride"], *(1,) * more),
        "pads": (*n.attrs["pads"], *((0, 0),) * more),
    }


def _order(rank: int, spatial: int) -> tuple[int, ...]:
    """The dims of [N, channels, *sizes] as [N, *sizes, channels]."""
    return (0, *range(rank - spatial, rank), *range(1, rank - spatial))


def _inverse(perm: Sequence[int]) -> list[int]:
    return [perm.index(d) for d in range(len(perm))]


def _permuted(t: TensorType, perm: Sequence[int]) -> TensorType:
    return t.with_dims(t.dims[p] for p in perm)


def _transposed(x: Node, perm: Sequence[int]) -> Node:
    attrs = {"perm": tuple(perm)}
    return Node(transpose.name, (x,), (_permuted(x.type, perm),), attrs, x.loc, x.scope)


def _reshaped(x: Node, shape: tuple[int, ...]) -> Node:
    attrs = {"shape": shape}
    types = infer(reshape, (x.type,), attrs).outs
    return Node(reshape.name, (x,), types, attrs, x.loc, x.scope)


def _sizes_after(x: TensorType, y: TensorType, spatial: int) -> int:
    """The number of spatial dims after a reshape of `x` to `y` that changes only the channels or
    only the sizes; else 0."""
    first = x.rank - spatial
    if y.rank > spatial + 1 and x.shape[0] == y.shape[0] and x.shape[first:] == y.shape[-spatial:]:
        return spatial
    return max(0, y.rank - first) if x.shape[:first] == y.shape[:first] else 0
