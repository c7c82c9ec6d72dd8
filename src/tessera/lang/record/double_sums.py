"""Warnings for gradients that are summed over the devices twice.

In a local body a gradient by a replicated value is a sum over devices already; a further all_reduce
counts it once per device.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from ...core.errors import StrategyWarning, lines_up
from ...ir.graph.node import Node
from ...ops.cast import cast
from ...ops.redistribute import NAMES

Slopes = Mapping[Node, Mapping[str, bool]]
"""Gradients that are sums over devices, pending or complete: for each node, the axes of its sum,
and for each axis whether the losses differ along it."""


def summed_over(g: Node) -> tuple[str, ...]:
    """The axes over which the gradient `g` was summed last."""
    while not g.type.partial and (g.op in NAMES or g.op == cast.name):
        g = g.args[0]
    return g.type.partial_axes


def pending(slopes: Slopes, node: Node) -> list[str]:
    """The axes over which the sum of the gradient `node` is pending."""
    return [a for a in slopes.get(node, ()) if a in node.type.partial_axes]


def check_sum(
    name: str, x: Node, axes: Sequence[str], mean: bool, slopes: Slopes, told: set[Node]
) -> None:
    """Gives one StrategyWarning if `x`, equal on all devices, is computed from a gradient that is a
    sum over `axes`, and is summed or averaged (`mean`) over them again. `told` has the nodes warned
    of."""
    if any(a in axes for a in pending(slopes, x)):  # the collective completes the pending sum
        return
    todo, visited = [x], set[Node]()
    while todo:
        n = todo.pop()
        if n in visited or any(a in t.varying for t in n.types for a in axes):
            continue
        visited.add(n)
        of = slopes.get(n, {})
        if over := [a for a in axes if a in of and (of[a] or not mean)]:
            if n not in told:
                told.add(n)
                warnings.warn(
                    f"{name} adds up a gradient that is the sum over {over[0]!r} already, so all"
                    f" devices have the same ({n.loc})\n  leave this {name} out; where the mean of"
                    " the devices' losses is meant, take the gradient of"
                    f" dist.all_reduce(loss, {over[0]!r}, op='mean')",
                    StrategyWarning,
                    stacklevel=lines_up(),
                )
            break
        todo += n.args
