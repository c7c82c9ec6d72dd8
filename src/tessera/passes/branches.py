"""The gradient of a `cond`: a second `cond` between the gradients of its bodies, which are computed
again."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.layout import TensorType
from ..ir.graph.build import Builder
from ..ir.graph.node import Graph, Node
from .loops import Differentiate, resume, zeros


def cond_gradient(
    b: Builder,
    node: Node,
    gs: Sequence[Node | None],
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> list[Node | None]:
    """One gradient (or None) per argument of `node` that is `wanted`, from the gradients of its
    results."""
    given = [i for i, g in enumerate(gs) if g is not None]
    ask = [i for i, a in enumerate(node.args) if i and wanted[i] and a.type.dtype.is_float]
    seeds = [
        b.redistribute(g, t.complete(), "for cond")
        for g, t in zip(gs, node.types, strict=True)
        if g is not None
    ]
    sides = [_Side(b, node.attrs[k], given, ask, differentiate) for k in ("yes", "no")]
    yes, no = (side.parts for side in sides)
    inputs = node.attrs["yes"].inputs
    types = [_common(p, q, inputs[i - 1].type) for p, q, i in zip(yes, no, ask, strict=True)]
    bodies = {k: side.graph(types) for k, side in zip(("yes", "no"), sides, strict=True)}
    made = b("cond", *node.args, *seeds, **bodies)
    out: list[Node | None] = [None] * len(node.args)
    for k, i in enumerate(ask):
        out[i] = b("item", made, index=k)
    return out


class _Side:
    """A body and its derivatives: the gradients `parts` by the inputs `ask`, from those of the
    results `given`."""

    def __init__(
        self,
        b: Builder,
        body: Graph,
        given: Sequence[int],
        ask: Sequence[int],
        differentiate: Differentiate,
    ) -> None:
        self.body, self.b = body, resume(body, b)
        ends = [body.outputs[i] for i in given]
        self.gs = [self.b.input(n.type.complete(), f"g_{i}") for i, n in zip(given, ends)]
        pairs = list(zip(ends, self.gs, strict=True))
        self.parts = differentiate(self.b, pairs, [body.inputs[i - 1] for i in ask])

    def graph(self, types: Sequence[TensorType]) -> Graph:
        """The graph of the gradients in these types; zeros where there is none."""
        outs = [
            zeros(self.b, t) if n is None else self.b.redistribute(n, t, "for cond")
            for n, t in zip(self.parts, types, strict=True)
        ]
        whole = self.b.graph(outs)
        return whole.part([*self.body.inputs, *self.gs], whole.outputs)


def _common(yes: Node | None, no: Node | None, of: TensorType) -> TensorType:
    """The type of a gradient that either body gives. A sum over devices stays partial, also where
    one body has none."""
    types = [n.type for n in (yes, no) if n is not None]
    alike = len({(t.dims, t.varying) for t in types}) == 1
    sums = all(kind == "sum" for t in types for _, kind in t.partial)
    if not (alike and sums):
        return of.complete()
    most = max(types, key=lambda t: len(t.partial))
    inside = all({*t.partial_axes} <= {*most.partial_axes} for t in types)
    return most if inside else of.complete()
