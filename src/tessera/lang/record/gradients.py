"""The gradient nodes of a recorded loss, one for each weight, in the requested layouts."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.layout import TensorType
from ...ir.graph.build import Builder
from ...ir.graph.node import Node
from ...passes.differentiate import differentiate

Goal = TensorType | None
"""The layout of a gradient; None leaves it as it is, sums over devices pending."""


def derived(
    b: Builder,
    loss: Node,
    wrt: Sequence[Node],
    goals: Sequence[Goal],
) -> list[Node]:
    """Returns the gradients of `loss`; if each device has its own loss, the gradients of their
    sum."""
    one = b("full", dtype=loss.type.dtype, shape=(), value=1.0)
    out = []
    for node, found, goal in zip(wrt, differentiate(b, [(loss, one)], wrt), goals, strict=True):
        at = node if node.loc else loss
        out.append(zeros(b, node, goal) if found is None else laid(b, found, at, goal))
    return out


def zeros(b: Builder, node: Node, goal: Goal) -> Node:
    """The zero gradient of a value that does not depend on `node`."""
    want = goal or node.type.complete()
    return b("full", dtype=want.dtype, shape=want.shape, value=0.0, layout=want)


def laid(b: Builder, g: Node, at: Node, goal: Goal) -> Node:
    """Redistributes the gradient `g` to the layout `goal`, at the source line of `at`."""
    if goal is None or g.type is goal:
        return g
    to = goal if goal.mesh is not None else goal.on(g.type.mesh)
    with b.at(at.loc, "grad"):
        return b.summed(g, to, "for the gradient")
