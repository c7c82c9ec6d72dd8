"""Is the auxiliary loss of experts in what is averaged? It is a product of two means over rows, so
its mean over parts of a batch is not that of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.graph.node import Node, reachable
from ...ops.control import item, scan
from ...ops.create import full
from ...ops.elementwise import mul
from .means import Reading, alike, of_experts, values


def has_balance(once: Reading, larger: Sequence[Node], numbers: Sequence[Node]) -> bool:
    """Whether one of `numbers` has it, with another weight than zero. `once` was read beside the
    nodes `larger` of twice as many rows."""
    zeros = {n for n in once.nodes if n.op == full.name and n.attrs["value"] == 0}
    nothing = {n for n in once.nodes if n.op == mul.name and not zeros.isdisjoint(n.args)}
    there = reachable(numbers, nothing)
    return not there.isdisjoint(once.balances) or any(
        _in_turns(once, n, m)
        for n, m in zip(once.nodes, larger, strict=True)
        if n in there and n.op == item.name and n.args[0].op == scan.name
    )


def _in_turns(once: Reading, n: Node, m: Node) -> bool:
    """Whether each turn of a loop, as over layers, makes one of which the result `n` is."""
    body, larger = n.args[0].attrs["body"], m.args[0].attrs["body"]
    if not any(map(of_experts, body.nodes)) or not alike(body.nodes, larger.nodes):
        return False
    inner = Reading(once.name, body.nodes, (), {}, (), inside=body.nodes, axes=once.axes)
    values(inner, larger.nodes)
    return has_balance(inner, larger.nodes, [body.outputs[n.attrs["index"]]])
