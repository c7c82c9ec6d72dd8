"""Reverse-mode differentiation: new nodes for the gradient of one value by earlier ones.

Layouts are inferred as nodes are added, so this also inserts the collectives of the backward pass:
the gradient of a replicated weight is partial over the axes that split the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from functools import partial, reduce
from itertools import pairwise

from ..core.errors import GraphError
from ..core.layout import Partial, TensorType, dim_axes
from ..core.reshard import completed, gathered
from ..ir.graph.build import Builder
from ..ir.graph.node import Node, reachable
from ..ops.contract import contract
from ..ops.elementwise import add, stop_gradient
from ..ops.local import reinterpret
from ..ops.movement import pad
from ..ops.redistribute import NAMES
from .branches import cond_gradient
from .loops import scan_gradient
from .thin_products import thin_gradient

Grads = dict[tuple[Node, int], list[Node]]


def differentiate(
    b: Builder, outputs: Sequence[tuple[Node, Node]], wrt: Sequence[Node]
) -> list[Node | None]:
    """The gradients by `wrt` of the sum of `outputs`, given as (value, its cotangent).

    The gradient is None for a node of `wrt` that no output depends on. Partial sums stay partial.
    """
    order = list(b.nodes)
    asked = set(wrt)
    active = _depends_on(order, asked, b.constants) & reachable(n for n, _ in outputs)
    grads: Grads = defaultdict(list)
    exact = b.options.mesh_invariant
    for root, g in outputs:
        grads[root, 0].append(g)
    before = b.loc, b.scope, b.origin
    for node in reversed(order):
        if node not in active or node.op == "input":
            continue
        b.origin = node
        gs = [
            _varying_gradient(b, _total(b, grads.pop((node, i), [])), t)
            for i, t in enumerate(node.types)
        ]
        if all(g is None for g in gs):
            continue
        if node in asked:  # asked for itself: keep it
            grads[node, 0] = [g for g in gs[:1] if g is not None]
        if active.isdisjoint(node.args):
            continue
        b.loc, b.scope = node.loc, str(node.scope)  # its name, as this is no visit of it
        if _joins(node, active) and gs[0] is not None:
            # Both branches need the whole gradient, so it is completed once, before them.
            gs[0] = b.redistribute(gs[0], gs[0].type.complete(), "for the gradient")
        if node.op == "item":
            assert gs[0] is not None
            grads[node.args[0], node.attrs["index"]].append(gs[0])
            continue
        parts: Sequence[Node | None]
        if node.op == "scan":
            parts = scan_gradient(b, node, gs, [a in active for a in node.args], differentiate)
        elif node.op == "cond":
            parts = cond_gradient(b, node, gs, [a in active for a in node.args], differentiate)
        else:
            rule = node.kind.grad
            if rule is None:
                raise GraphError(
                    f"{node.op}: it has no gradient",
                    result=", ".join(map(str, node.types)),
                    fix="pass the argument through ts.stop_gradient where none is meant",
                    at=node.loc,
                )
            thin = None
            if node.op == contract.name and gs[0] is not None:
                thin = thin_gradient(b, node, gs[0], grads)
            parts = thin or rule(b, node, gs if len(gs) > 1 else gs[0])
        for arg, part in zip(node.args, parts, strict=True):
            if part is not None and arg in active:
                grads[_whole_or_not(arg) if exact else arg, 0].append(_summed(b, part, arg))
    b.loc, b.scope, b.origin = before
    return [_total(b, grads.get((n, 0), [])) for n in wrt]


def reached(end: Node, constants: Set[Node] = frozenset()) -> set[Node]:
    """The nodes that `end` depends on through values that have gradients and are not
    `constants`."""
    found: set[Node] = set()
    todo = [end]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            if n in constants:
                continue
            if n.op != stop_gradient.name and any(t.dtype.is_float for t in n.types):
                todo.extend(n.args)
    return found


def _whole_or_not(n: Node) -> Node:
    """The value of `n` before changes of its layout at rest. The parts of its gradient are summed
    there, in one order, whether the value was gathered, cut or whole on the way."""
    while n.op in NAMES or n.op == reinterpret.name:
        source = n.args[0]
        if source.type.in_use is not n.type.in_use:
            break
        n = source
    return n


def _depends_on(order: Sequence[Node], sources: set[Node], constants: Set[Node]) -> set[Node]:
    """The nodes that depend on `sources` through values that have gradients and are not
    `constants`."""
    found: set[Node] = set(sources)
    for n in order:
        if n in found or n in constants or not any(t.dtype.is_float for t in n.types):
            continue
        if n.op != stop_gradient.name and any(a in found for a in n.args):
            found.add(n)
    return found


def _varying_gradient(b: Builder, g: Node | None, of: TensorType) -> Node | None:
    """The gradient `g` of a value of type `of`, varying over the axes of `of`. The gradients of a
    varying value's devices are summed for its source, even if they are equal."""
    if g is None or set(of.varying) <= set(g.type.varying):
        return g
    more = (*g.type.varying, *(a for a in of.varying if a not in g.type.varying))
    t = g.type if g.type.mesh is not None else g.type.on(of.mesh)
    return b("reinterpret", g, layout=t.with_varying(more))


def _summed(b: Builder, part: Node, arg: Node) -> Node:
    """The gradient `part` of `arg`. If `part` varies over devices and `arg` does not, it is a
    partial sum. A sum over an axis in time that `arg` lacks is completed here, except in a loop's
    body."""
    here = part.type
    time = here.mesh.time if here.mesh is not None else ()
    if time and not b.is_body and arg.type.mesh != here.mesh:
        whole = gathered(completed(here, time), time)
        to = whole if arg.type.mesh is None else whole.on(arg.type.mesh)
        return b.redistribute(part, to, "for the gradient")
    own = [a for a in here.varying if a not in arg.type.varying]
    if not own:
        return part
    partial = (*here.partial, *((a, "sum") for a in own))
    to = TensorType(here.dtype, here.dims, partial, here.mesh, arg.type.varying)
    return b("reinterpret", part, layout=to)


def _total(b: Builder, parts: list[Node]) -> Node | None:
    """The sum of `parts`. Parts with equal partial axes are added first, so each sum is completed
    once."""
    groups: dict[Partial, Node] = {}
    for g in joined(b, parts):
        have = groups.get(g.type.partial)
        groups[g.type.partial] = g if have is None else b("add", have, g)
    total: Node | None = None
    for g in groups.values():
        total = g if total is None else b("add", total, g)
    return total


def _joins(n: Node, active: set[Node]) -> bool:
    """Returns whether `n` adds two large values of one shape that both need gradients: a
    residual."""
    return (
        n.op == add.name
        and n.type.rank > 1
        and all(a in active and a.type.shape == n.type.shape for a in n.args)
    )


# Gradients of slices of one value, concatenated if the slices are adjacent.
#
# The gradient of a slice is a pad: zeros around the slice's gradient. A sum of pads writes every
# element once for each slice; slices that fill a run of one dim are concatenated instead, which
# writes each element once.


def joined(b: Builder, parts: Sequence[Node]) -> list[Node]:
    """`parts`, with gradients of slices that fill a run of one dim merged into one node at the
    place of the first. The sum of the parts does not change."""
    groups: dict[tuple[int, Partial], list[int]] = defaultdict(list)
    for at, g in enumerate(parts):
        dim = _grown(g)
        if dim is not None:
            groups[dim, g.type.partial].append(at)
    found: list[Node | None] = list(parts)
    for (dim, _), places in groups.items():
        one = _side_by_side(b, dim, [parts[i] for i in places]) if len(places) > 1 else None
        if one is not None:
            for i in places:
                found[i] = None
            found[places[0]] = one
    return [g for g in found if g is not None]


def _grown(g: Node) -> int | None:
    """The dim that the pad `g` enlarges, if it is the only one and the pad has no steps; else
    None."""
    if g.op != pad.name or any(k != 1 for k in g.attrs["steps"]):
        return None
    had = g.args[0].type.shape
    grown = [i for i, (n, m) in enumerate(zip(had, g.type.shape, strict=True)) if n != m]
    return grown[0] if len(grown) == 1 else None


def _side_by_side(b: Builder, dim: int, pads: Sequence[Node]) -> Node | None:
    """The sum of `pads` along `dim` if each begins where another ends, else None. Pads at the same
    place are added."""
    places: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for g in pads:
        part = g.args[0]
        places[g.attrs["starts"][dim], part.type.shape[dim]].append(part)
    runs = sorted(places)
    if any(start + n != then for (start, n), (then, _) in pairwise(runs)):
        return None
    # Blocks of a split dim are adjacent on each device only if all parts have the same size.
    split = any(dim_axes(p.type.dims[dim]) for parts in places.values() for p in parts)
    if split and len({n for _, n in runs}) > 1:
        return None
    joined = b("concat", *(reduce(partial(b, "add"), places[run]) for run in runs), dim=dim)
    shape = pads[0].type.shape
    starts = tuple(runs[0][0] if i == dim else 0 for i in range(len(shape)))
    if joined.type.shape == shape:
        return joined
    return b("pad", joined, starts=starts, steps=(1,) * len(shape), shape=shape)
