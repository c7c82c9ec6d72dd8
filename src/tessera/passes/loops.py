"""The gradient of a loop: a second loop in reverse, and the values that the first keeps for it.

A loop has one of four policies: `save` keeps the values that the backward body reads, or fewer
bytes from which they follow elementwise (ir/graph/remat.py); `recompute` keeps only the carries and
recomputes the rest; `products` keeps in addition results of products and inner loops; `together`
computes value and gradient in one loop (for a loop that only adds up a scalar, such as a loss in
blocks). `ts.save_for_backward` marks values, expensive to compute, that `recompute` and `products`
keep as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..core.dtypes import f32, promote
from ..core.errors import GraphError
from ..core.layout import TensorType, dim_axes, without
from ..ir.graph.build import Builder
from ..ir.graph.node import Graph, Node, input_node, reachable
from ..ir.graph.remat import choose_saved, free_nodes
from ..ops.cast import cast, narrowed
from ..ops.control import in_memory, stacked
from ..ops.elementwise import add, save_for_backward
from ..ops.redistribute import all_reduce, reduce_scatter, shard
from .regions import behind, offloaded

Pairs = Sequence[tuple[Node, Node]]
Differentiate = Callable[[Builder, Pairs, Sequence[Node]], "list[Node | None]"]


def scan_gradient(
    b: Builder,
    node: Node,
    gs: Sequence[Node | None],
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> list[Node | None]:
    """One gradient (or None) per argument of the scan `node`, from the gradients of its results.
    Raises GraphError for a while loop."""
    if node.attrs["length"] is None:
        raise GraphError(
            "while_loop: it has no gradient, as nothing says how often its body runs",
            result=", ".join(map(str, node.types[1:])),
            fix="use ts.scan over the most turns, with ts.where to keep the carry once it is done; "
            "or ts.stop_gradient where no gradient is meant",
            at=node.loc,
        )
    indices = [i for i, g in enumerate(gs) if g is not None]
    together = (
        node.attrs["policy"] == "together" and len(indices) == 1 and adds_up(node, indices[0])
    )
    run = _together if together else _backwards
    return run(b, node, gs, wanted, differentiate)


def adds_up(node: Node, at: int) -> bool:
    """Returns whether result `at` is a scalar to which every iteration adds a term that depends on
    no carry."""
    body, first = node.attrs["body"], node.attrs["consts"]
    if at >= node.attrs["carries"] or node.types[at].rank:
        return False
    carries = [n for n in body.inputs[first : first + node.attrs["carries"]] if _is_float(n)]
    total, end = body.inputs[first + at], body.outputs[at]
    if end.op != add.name or total not in end.args:
        return False
    term = end.args[1 - end.args.index(total)]
    return reachable([term]).isdisjoint(carries)


def _is_float(n: Node) -> bool:
    return n.type.dtype.is_float


def resume(body: Graph, around: Builder) -> Builder:
    """A builder that continues after `body`, the body of a loop or branch in `around`,
    recomputed."""
    b = Builder(body.name, around.options, around.strict, around.ordered)
    b.nodes, b.inputs, b.loc = list(body.nodes), list(body.inputs), ""
    b.reduce_dtype = around.reduce_dtype
    b.gathers_again, b.is_body = False, True
    return b


def zeros(b: Builder, t: TensorType) -> Node:
    return b("full", dtype=t.dtype, shape=t.shape, value=0.0, layout=t)


def _asked(body: Graph, wanted: Sequence[bool], always: range) -> list[int]:
    """The body's inputs that need a gradient: floats that are `wanted` or in `always`, the
    carries."""
    return [
        i for i, n in enumerate(body.inputs) if n.type.dtype.is_float and (wanted[i] or i in always)
    ]


def _together(
    b: Builder,
    node: Node,
    gs: Sequence[Node | None],
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> list[Node | None]:
    """One loop that computes the sum and its gradient. The loss is a sum of terms, so the gradient
    by each term is `g`: each iteration uses 1 in place of `g`, and the results are multiplied by
    `g` once, after the loop."""
    at, g = next((i, g) for i, g in enumerate(gs) if g is not None)
    body, attrs = node.attrs["body"], node.attrs
    consts, carries = attrs["consts"], attrs["carries"]
    inner = resume(body, b)
    one = inner("full", dtype=node.types[at].dtype, shape=(), value=1.0)
    ask = _asked(body, wanted, range(0))
    parts = differentiate(inner, [(body.outputs[at], one)], [body.inputs[i] for i in ask])
    partials = {i: p for i, p in zip(ask, parts, strict=True) if p is not None}
    # The sums over all iterations are carries; what belongs to one iteration is stacked.
    sums, added = _summed(inner, {i: p for i, p in partials.items() if i < consts})
    per_iteration = [i for i in partials if i >= consts + carries]
    outs = [
        *body.outputs[:carries],
        *added,
        *body.outputs[carries:],
        *(_narrow_source(inner, partials[i]) for i in per_iteration),
    ]
    heads, tails = body.inputs[: consts + carries], body.inputs[consts + carries :]
    graph = inner.graph(outs).part([*heads, *sums.values(), *tails], outs)
    forward = _forward(
        b,
        *node.args[: consts + carries],
        *(zeros(b, s.type) for s in sums.values()),
        *node.args[consts + carries :],
        **{**attrs, "body": graph, "carries": carries + len(sums), "policy": "recompute"},
    )
    for k in range(len(node.types)):
        _stand_in(b, node, k, b("item", forward, index=k + (len(sums) if k >= carries else 0)))
    out: list[Node | None] = [None] * len(node.args)
    for k, i in enumerate(sums, carries):
        total = b("item", forward, index=k)
        out[i] = _rounded(b, _times(b, total, g), partials[i])
    for k, i in enumerate(per_iteration, len(node.types) + len(sums)):
        # perhaps narrower than the gradient: so it crosses wires
        rows = b("item", forward, index=k)
        scaled = _rounded(b, _times(b, rows, g), rows)
        same = rows.type.dtype is partials[i].type.dtype
        out[i] = scaled if same else b("cast", scaled, dtype=partials[i].type.dtype)
    if wanted[consts + at]:
        out[consts + at] = g
    return out


def _stand_in(b: Builder, old: Node, index: int, new: Node) -> None:
    """Replaces result `index` of the loop `old` by `new`, unless it has a replacement already."""
    for n in b.nodes:
        if n.op == "item" and n.args[0] is old and n.attrs["index"] == index:
            b.replaced.setdefault(n, new)
            b.origins.pop(new, None)


def _forward(b: Builder, *args: Node, **attrs: Any) -> Node:
    """A loop that belongs to the forward pass, although it is added by the backward pass. Nodes
    added after it belong to its gradient."""
    before, b.origin = b.origin, None
    loop = b("scan", *args, **attrs)
    b.origin = loop if before is not None else None
    return loop


def _backwards(
    b: Builder,
    node: Node,
    gs: Sequence[Node | None],
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> list[Node | None]:
    """The second loop, in reverse: its body is the first loop's body followed by its derivative.
    Its carries are the gradients of the carries and the sums of the constants' gradients."""
    body, attrs = node.attrs["body"], node.attrs
    consts, carries = attrs["consts"], attrs["carries"]
    first_x = consts + carries
    inner = resume(body, b)
    inner.gathers_again = b.gathers_again and attrs["policy"] == "save"
    # Cotangents: those of the carries are carried, those of stacked results are scanned.
    g_carry = {
        i: inner.input(out.type.complete(), f"g_carry_{i}")
        for i, out in enumerate(body.outputs[:carries])
        if out.type.dtype.is_float
    }
    g_stack = {i: _unsplit(b, g) for i, g in enumerate(gs) if g is not None and i >= carries}
    g_stacked = {
        i: inner.input(g.type.with_dims(g.type.dims[1:]), f"g_y_{i}") for i, g in g_stack.items()
    }
    seeds = [(body.outputs[i], n) for i, n in (*g_carry.items(), *g_stacked.items())]
    ask = _asked(body, wanted, range(consts, first_x))
    parts = differentiate(inner, seeds, [body.inputs[i] for i in ask])
    partials = {i: p for i, p in zip(ask, parts, strict=True) if p is not None}
    carried = []
    for i, g in g_carry.items():
        part = partials.get(consts + i)
        carried.append(
            zeros(inner, g.type) if part is None else inner.redistribute(part, g.type, "for scan")
        )
    once = attrs["length"] == 1  # then the gradient of a constant is that of the iteration
    added_up = {} if once else {i: p for i, p in partials.items() if i < consts}
    transposed = {i for i, p in added_up.items() if _is_tall(p)}
    partials.update({i: _transposed(inner, partials[i]) for i in transposed})
    sums, added = _summed(inner, {i: partials[i] for i in added_up})
    per_iteration = [i for i in partials if i >= first_x or (once and i < consts)]
    pending = {i: x for i in per_iteration if (x := _pending(partials[i])) is not None}
    rows = [pending.get(i) or _narrow_source(inner, partials[i]) for i in per_iteration]
    outs = [*carried, *added, *rows]
    # One graph has both the forward and the backward nodes; it is cut in two.
    whole = inner.graph([*body.outputs, *outs])
    ends, outs = whole.outputs[: len(body.outputs)], list(whole.outputs[len(body.outputs) :])
    late = _after(whole, {*g_carry.values(), *g_stacked.values(), *sums.values()})
    if attrs["policy"] == "save":
        saved = _read_across(whole, outs, late, {*body.inputs[:consts], *body.inputs[first_x:]})
    else:
        saved = _marked(whole, outs, late, attrs["policy"] in ("products", "offload"))
    needed = reachable(outs, {*saved, *_before(saved)})
    saved += [n for n in body.inputs[consts:first_x] if n in needed]
    kept = {s: input_node(s.type, f"kept{k}") for k, s in enumerate(saved)}
    before = {n: kept[mark] for n, mark in _before(saved).items()}
    back_inputs = [
        *body.inputs[:consts], *g_carry.values(), *sums.values(),
        *body.inputs[first_x:], *g_stacked.values(), *kept.values(),
    ]  # fmt: skip
    backward = whole.part(back_inputs, outs, before | kept)
    run = node
    if saved:
        forward = whole.part(body.inputs, [*ends, *saved])
        forward = offloaded(forward, len(ends)) if attrs["policy"] == "offload" else forward
        told = {**attrs, "body": forward}
        if node in b.replaced:
            run = b("scan", *node.args, **told)
        else:
            run = b.replaced[node] = _forward(b, *node.args, **told)
    starts = [
        zeros(b, n.type) if (given := gs[i]) is None else b.redistribute(given, n.type, "for scan")
        for i, n in g_carry.items()
    ]
    kept_stacks = [b("item", run, index=len(ends) + k) for k in range(len(saved))]
    args = [
        *node.args[:consts], *starts, *(zeros(b, s.type) for s in sums.values()),
        *node.args[first_x:], *g_stack.values(), *kept_stacks,
    ]  # fmt: skip
    if once:
        last = len(args) - len(kept_stacks)
        places = {*range(consts, consts + len(starts)), *range(last - len(g_stack), last)}
        away = range(last, len(args)) if attrs["policy"] == "offload" else ()
        args = behind(b, backward, args, places, b("item", run, index=0), away)
        args[last:] = [b(in_memory.name, x, space="device") if away else x for x in args[last:]]
    loop = b(
        "scan",
        *args,
        **{
            **attrs,
            "body": backward,
            "carries": len(starts) + len(sums),
            "reverse": not attrs["reverse"],
            "policy": "save" if attrs["policy"] == "save" else "recompute",
        },
    )
    out: list[Node | None] = [None] * len(node.args)
    for k, i in enumerate([*(consts + i for i in g_carry), *sums, *per_iteration]):
        result = b("item", loop, index=k)
        if i in pending:
            done = stacked(partials[i].type, result.type.shape[0])
            result = b.redistribute(result, done.with_dtype(result.type.dtype))
        if i in sums:
            result = _rounded(b, result, partials[i])
        elif i in per_iteration and result.type.dtype is not partials[i].type.dtype:
            result = b("cast", result, dtype=partials[i].type.dtype)
        if once and i < consts:
            result = b("reshape", result, shape=result.type.shape[1:])
        out[i] = b("transpose", result, perm=(1, 0)) if i in transposed else result
    return out


def _summed(inner: Builder, terms: Mapping[int, Node]) -> tuple[dict[int, Node], list[Node]]:
    """(inputs for the running sums of `terms` over iterations, their values after one more
    iteration).

    Values narrower than f32 are summed in f32, as in one product over all rows.
    """
    wide = {i: n if n.type.dtype.bytes >= 4 else inner("cast", n, dtype=f32)
            for i, n in terms.items()}  # fmt: skip
    sums = {i: inner.input(n.type, f"sum_{i}") for i, n in wide.items()}
    return sums, [inner("add", sums[i], n) for i, n in wide.items()]


def _narrow_source(inner: Builder, n: Node) -> Node:
    """`n`, or the narrower float that it was cast from, in which it is stacked and sent."""
    narrow = narrowed(inner, n)
    return n if narrow is None else narrow


def _pending(n: Node) -> Node | None:
    """The partial sum from which `n` follows by casts and by collectives that complete it over an
    axis in time. A loop that returns it can run turn by turn. None if `n` is another value."""
    time = n.type.mesh.time if n.type.mesh is not None else ()
    x, found = n, None
    while time and x.op in (cast.name, all_reduce.name, reduce_scatter.name, shard.name):
        ends_here = any(a in time for a in x.attrs.get("axes", ()))
        x = x.args[0]
        found = x if ends_here else found
    return found


def _times(b: Builder, x: Node, g: Node) -> Node:
    """`x` times the scalar `g`, in the wider of their dtypes. Where `x` is partial and `g` varies
    over the same axes, each device's term is multiplied by its own `g`."""
    dtype, t = promote(x.type.dtype, g.type.dtype), x.type
    own = [a for a in t.partial_axes if a in g.type.varying]
    if own:
        rest = tuple(p for p in t.partial if p[0] not in own)
        x = b("reinterpret", x, layout=t.with_partial(rest).with_varying((*t.varying, *own)))
    parts = (a if a.type.dtype is dtype else b("cast", a, dtype=dtype) for a in (x, g))
    out = b("mul", *parts)
    if own:
        left = out.type.with_varying(a for a in out.type.varying if a not in own)
        whole = left.with_partial((*left.partial, *((a, "sum") for a in own)))
        out = b("reinterpret", out, layout=whole)
    return out


def _rounded(b: Builder, total: Node, term: Node) -> Node:
    """`total`, a sum of values like `term`, in their dtype, in which it is sent."""
    if total.type.dtype is term.type.dtype:
        return total
    return b("cast", total, dtype=term.type.dtype, terms=True)


def _is_tall(n: Node) -> bool:
    """Returns whether `n` is the gradient of a weight with more rows than columns: x.T @ g with x
    wide.

    A matrix unit reads the narrow operand across and the wide one along: g.T @ x was a third faster
    on the measured CPUs, and its transpose is taken once, after the loop.
    """
    return (
        n.kind.memory == "product"
        and n.type.rank == 2
        and len(n.args) == 2
        and n.type.shape[0] > n.type.shape[1]
    )


def _transposed(b: Builder, n: Node) -> Node:
    left, right = n.attrs["index"].split("->")
    index = f"{left}-> {' '.join(reversed(right.split()))}"
    return b("contract", *n.args, **{**n.attrs, "index": index})


def _unsplit(b: Builder, g: Node) -> Node:
    """`g` with its leading dim whole, as a loop needs it."""
    first = without(g.type.dims[0], dim_axes(g.type.dims[0]), g.type.sizes)
    return b.redistribute(g, g.type.with_dims((first, *g.type.dims[1:])), "for scan")


def _after(graph: Graph, sources: set[Node]) -> set[Node]:
    late = set(sources)
    for n in graph.nodes:
        if any(a in late for a in n.args):
            late.add(n)
    return late


def _read_across(
    graph: Graph, outs: Sequence[Node], late: set[Node], inputs: set[Node]
) -> list[Node]:
    """The early nodes, with as few bytes as possible, from which `late` can compute the values that
    it reads, given the inputs `inputs`."""
    early = {n for n in graph.nodes if n not in late}
    read = {a for n in reachable(outs) & late for a in n.args if a in early} | (set(outs) - late)
    marks = {n for n in early if n.op == save_for_backward.name}
    before = {n: mark for n, mark in _before(marks).items() if mark in early}
    free = free_nodes(n for n in graph.nodes if n in early)
    found, _ = choose_saved((before.get(n, n) for n in read), early, free | inputs)
    return [n for n in graph.nodes if n in found and n.op != "input"]


def _marked(graph: Graph, outs: Sequence[Node], late: set[Node], products: bool) -> list[Node]:
    """The marked values that the backward body reaches first; with `products` also the results of
    products and of inner loops."""

    def is_saved(n: Node) -> bool:
        return n.op == save_for_backward.name or (
            products and (n.kind.memory == "product" or n.op == "item")
        )

    found = {n for n in graph.nodes if is_saved(n) and n not in late}
    before = _before(found)
    read = {a for n in reachable(outs, {*found, *before}) for a in n.args} | set(outs)
    read |= {before[n] for n in read & before.keys()}
    return [n for n in graph.nodes if n in found and n in read]


def _before(marks: Iterable[Node]) -> dict[Node, Node]:
    """Each marked value with its mark. A node that reads the value before the mark may read the
    mark instead (the gradient of tanh reads tanh)."""
    return {
        n.args[0]: n for n in marks if n.op == save_for_backward.name and n.args[0].op != "input"
    }
