"""Regions: loops of one iteration, whose policy says which values the forward pass keeps.

The gradient of a region computes the other values again, from arguments that exist only after the
gradient of a result. So the compiler cannot merge the second computation with the first,
whose values would then have to be kept. Before a program is scheduled, its regions become plain
nodes (ir/graph/write_out.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..ir.graph.build import Builder
from ..ir.graph.node import Emit, Graph, Node
from ..ir.graph.time_axis import depends_on_time
from ..ops.control import after, in_memory, item
from .simplify import simplify


def behind(
    b: Builder,
    body: Graph,
    args: Sequence[Node],
    cotangents: Collection[int],
    made: Node,
    always: Collection[int] = (),
) -> list[Node]:
    """`args`, the arguments of the gradient `body` of a region, those at `cotangents` being the
    gradients of its results; the others exist only after a gradient, those at `always` in any case,
    and others as far as that is needed.

    Each op of the body depends on such an argument, or on a gradient. `made` is a result of the
    forward pass, which stands for the gradients if they depend on nothing. A weight does not wait
    for the gradient of a microbatch: it is one value for all of them.
    """
    late = {body.inputs[i] for i in cotangents if not _is_constant(args[i])}
    first = next((args[i] for i in sorted(cotangents) if body.inputs[i] in late), made)
    size = {n: a.type.local_bytes for n, a in zip(body.inputs, args, strict=True)}
    fixed = {body.inputs[i] for i in cotangents}
    chosen = {body.inputs[i] for i in always}
    while (x := _early(body, late | chosen, fixed, size)) is not None:
        chosen.add(x)
    in_time = depends_on_time(first.type)
    return [
        b(after.name, a, first) if n in chosen and depends_on_time(a.type) >= in_time else a
        for n, a in zip(body.inputs, args, strict=True)
    ]


def offloaded(forward: Graph, ends: int) -> Graph:
    """`forward`, the body of a region, with its results after the first `ends`, which are kept for
    the gradient, in host memory."""
    away = [
        Node(in_memory.name, (n,), n.types, {"space": "host"}, n.loc, n.scope)
        for n in forward.outputs[ends:]
    ]
    nodes, outputs = (*forward.nodes, *away), (*forward.outputs[:ends], *away)
    return replace(forward, nodes=nodes, outputs=outputs)


def all_kept(graph: Graph) -> Graph:
    """`graph`, whose regions are written out, as if they kept all values on the device."""

    def rule(was: Node, n: Node, emit: Emit) -> Node | None:
        return n.args[0] if n.op in (after.name, in_memory.name) else None

    return simplify(graph.rewrite(rule, all_kept))


def _early(
    body: Graph, late: Collection[Node], fixed: Collection[Node], size: Mapping[Node, int]
) -> Node | None:
    """The smallest input behind the first node that depends on inputs, but on none of `late`. Views
    and what depends on `fixed` inputs alone do not count."""
    late = set(late)
    sources: dict[Node, set[Node]] = {n: {n} - set(fixed) for n in body.inputs}
    for n in body.nodes:
        if n.op == "input":
            continue
        if any(a in late for a in n.args):
            late.add(n)
            continue
        sources[n] = set[Node]().union(*(sources.get(a, ()) for a in n.args))
        if sources[n] and n.kind.memory != "view" and n.op != item.name:
            return min(sources[n], key=lambda x: (size[x], body.inputs.index(x)))
    return None


def _is_constant(n: Node) -> bool:
    """Returns whether `n` depends on no input."""
    todo, seen = [n], set[Node]()
    while todo:
        n = todo.pop()
        if n.op == "input" or not n.kind.pure:
            return False
        if n not in seen:
            seen.add(n)
            todo += n.args
    return True
