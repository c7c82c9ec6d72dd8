"""The gradient of a `cond`: a second `cond` between the gradients of the two bodies."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph.build import Builder
from ..ir.graph.node import Graph, Node
from .loops import Differentiate, resume, zeros


def cond_gradient(
    b: Builder, node: Node, gs: Sequence[Node | None], differentiate: Differentiate
) -> list[Node | None]:
    """One gradient (or None) per argument of `node`, from the gradients of its results. The bodies
    are recomputed."""
    given = [i for i, g in enumerate(gs) if g is not None]
    wanted = [i for i, a in enumerate(node.args) if i and a.type.dtype.is_float]
    seeds = []
    for i in given:
        g = gs[i]
        assert g is not None
        seeds.append(b.redistribute(g, node.types[i].complete(), "for cond"))
    bodies = {k: _backward(b, node.attrs[k], given, wanted, differentiate) for k in ("yes", "no")}
    made = b("cond", *node.args, *seeds, **bodies)
    out: list[Node | None] = [None] * len(node.args)
    for k, i in enumerate(wanted):
        out[i] = b("item", made, index=k)
    return out


def _backward(
    b: Builder,
    body: Graph,
    given: Sequence[int],
    wanted: Sequence[int],
    differentiate: Differentiate,
) -> Graph:
    """The graph of a branch's gradients: the branch recomputed, then the derivatives of the results
    `given` by the inputs `wanted`. An input without a gradient gets zeros, as the other branch may
    have one."""
    inner = resume(body, b)
    gs = [inner.input(body.outputs[i].type.complete(), f"g_{i}") for i in given]
    wrt = [body.inputs[i - 1] for i in wanted]
    parts = differentiate(
        inner, [(body.outputs[i], g) for i, g in zip(given, gs, strict=True)], wrt
    )
    outs = []
    for n, part in zip(wrt, parts, strict=True):
        t = n.type.complete()
        outs.append(zeros(inner, t) if part is None else inner.redistribute(part, t, "for cond"))
    whole = inner.graph(outs)
    return whole.part([*body.inputs, *gs], whole.outputs)
