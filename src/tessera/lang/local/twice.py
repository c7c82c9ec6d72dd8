"""Is a gradient added up over the devices a second time, or divided by their number? In a local
body a gradient by what all devices hold is a sum over them; a collective that adds it up again
counts it once per device. Where a loss is a mean over the devices, so is the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from ...core.errors import LayoutError, StrategyWarning, fail, lines_up
from ...ir.graph.node import Node
from ...ops.cast import cast
from ...ops.create import full
from ...ops.elementwise import div, mul
from ...ops.redistribute import NAMES

Slopes = Mapping[Node, Mapping[str, bool]]
"""Gradients that are sums over devices, pending or not: of each, along which axes, and along which
of them the losses differ."""


def summed_over(g: Node) -> tuple[str, ...]:
    """The axes over which the gradient `g` was summed last."""
    while not g.type.partial and (g.op in NAMES or g.op == cast.name):
        g = g.args[0]
    return g.type.partial_axes


def pending(slopes: Slopes, node: Node) -> list[str]:
    """Over which axes the sum of the gradient `node` is still to be made."""
    return [a for a in slopes.get(node, ()) if a in node.type.partial_axes]


def check_sum(
    name: str, x: Node, axes: Sequence[str], mean: bool, batch: Sequence[str], slopes: Slopes,
    told: set[Node],
) -> list[str]:  # fmt: skip
    """Of a sum or `mean` of `x` over `axes`, where a loss is a mean over the axes `batch`: those
    over which `x` is a device's part of that mean. Raises LayoutError if its `mean` is asked for.
    One StrategyWarning where `x`, the same on all devices, is made of a gradient that is a sum over
    them; `told` has those warned of."""
    if own := [a for a in pending(slopes, x) if a in axes]:
        parts = [a for a in own if a in batch]
        if mean and parts:
            raise fail(
                LayoutError,
                f"{name}: over {parts[0]!r} the sum of a mean's parts is pending, not a mean",
                [("x", x.type)],
                fix='leave out op="mean": a loss is the mean of the devices\' losses here',
            )
        return parts
    todo, seen = [x], set[Node]()
    while todo:
        n = todo.pop()
        if n in seen or any(a in t.varying for t in n.types for a in axes):
            continue
        seen.add(n)
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
    return []


def check_divided(means: Mapping[Node, int], nodes: Sequence[Node]) -> None:
    """One StrategyWarning where one of `nodes` divides one of `means`, which are over so many
    devices, by their number, as is done with a sum."""
    for n in nodes:
        if n.op not in (div.name, mul.name) or n.args[0] not in means or n.args[1].op != full.name:
            continue
        count, by = means[n.args[0]], n.args[1].attrs["value"]
        if count > 1 and by == (count if n.op == div.name else 1 / count):
            warnings.warn(
                f"a gradient is divided by {count}, the number of devices, over which it is the"
                f" mean already ({n.loc})\n  leave the division out: a loss is the mean of the"
                " devices' losses here",
                StrategyWarning,
                stacklevel=lines_up(),
            )
            return
