"""Simplification: removes dead nodes, common subexpressions and nodes that change nothing.

Each pass is a pure function from graph to graph, visits each node once, and includes the bodies of
loops. Inputs always stay, since they are the signature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ..core.dtypes import f32
from ..core.reshard import steps_between, wire_bytes
from ..ir.graph.node import Emit, Graph, Node, need_graph, reachable
from ..ops.cast import cast
from ..ops.create import full
from ..ops.custom import custom
from ..ops.elementwise import add, div, mul, neg, straight_through, sub
from ..ops.movement import broadcast_to, concat, pad, reshape, slice_, transpose
from ..ops.op import OPS, Attrs, Op, infer
from ..ops.redistribute import all_reduce, shard, step_attrs
from ..ops.reduce import sum_


def simplify(graph: Graph) -> Graph:
    """`graph` without dead, repeated and no-op nodes; its outputs keep their values and types."""
    graph = need_graph("simplify", graph)
    graph = dead_code(common_subexpressions(fold(dead_code(graph))))
    fused = fuse_reductions(graph)
    return graph if fused is graph else dead_code(fused)


def dead_code(graph: Graph) -> Graph:
    """`graph` without the nodes that no output depends on. Ops with effects stay."""
    effects = [n for n in graph.nodes if not n.kind.pure]
    live = reachable((*graph.outputs, *effects))
    nodes = tuple([n for n in graph.nodes if n in live or n.op == "input"])
    if len(nodes) < len(graph.nodes):
        graph = replace(graph, nodes=nodes)
    return graph.rewrite(None, dead_code)


def common_subexpressions(graph: Graph) -> Graph:
    """`graph` with one node for all that compute the same value; the first keeps its line and
    scope."""
    seen: dict[object, Node] = {}

    def again(was: Node, n: Node, emit: Emit) -> Node | None:
        if n.op == "input" or not n.kind.pure:
            return None
        try:
            return seen.setdefault((n.op, n.args, n.types, attrs_key(n.attrs)), n)
        except TypeError:  # an attribute that cannot be hashed
            return None

    return graph.rewrite(again, common_subexpressions)


def attrs_key(attrs: Attrs) -> object:
    # 0.0 and -0.0 compare equal but are different values; their texts differ.
    return tuple([(k, str(v) if type(v) is float else v) for k, v in attrs.items()])


def fuse_reductions(graph: Graph) -> Graph:
    """`graph` with a reduce_scatter for each all_reduce that is only read by a shard."""
    if not any(n.op == shard.name or n.kind.bodies for n in graph.nodes):
        return graph
    uses = Counter(a for n in graph.nodes for a in n.args)
    uses.update(graph.outputs)

    def fuse(was: Node, n: Node, emit: Emit) -> Node | None:
        if n.op != shard.name or n.args[0].op != all_reduce.name or uses[was.args[0]] > 1:
            return None
        whole = n.args[0]
        made = whole.args[0]
        o = graph.options
        order = whole.attrs.get("order", "")
        exact = bool(order) or o.mesh_invariant
        steps = steps_between(made.type, n.type, exact, o.schedule.topology)
        summed = wire_bytes(whole.op, whole.attrs["axes"], made.type, whole.type)
        if sum(s.wire_bytes for s in steps) >= summed:
            return None
        for s in steps:
            note = n.note or whole.note
            attrs = step_attrs(s, made.type, order)
            made = Node(s.kind, (made,), (s.type,), attrs, n.loc, n.scope, note)
            emit(made)
        return made

    return graph.rewrite(fuse, fuse_reductions)


# ---- light algebra -----------------------------------------------------------------------------
def fold(graph: Graph) -> Graph:
    """`graph` without no-op nodes: moves that move nothing, double negation, times one, plus zero.

    A moved constant becomes a constant of the new type. `x + 0` becomes `x` also for -0.0.
    """

    def change(was: Node, n: Node, emit: Emit) -> Node | None:
        rule = _FOLDS.get(n.op)
        return None if rule is None else rule(n, emit)

    return graph.rewrite(change, fold)


Fold = Callable[[Node, Emit], "Node | None"]


def _is_full(n: Node, value: float) -> bool:
    # Constants are never partial, except zeros.
    return n.op == full.name and bool(n.attrs["value"] == value)


def _neutral(value: float, both_sides: bool) -> Fold:
    """The rule that `x ∘ value` is `x`; with `both_sides`, `value ∘ x` as well."""

    def rule(n: Node, emit: Emit) -> Node | None:
        x, y = n.args
        if x.type is n.type and _is_full(y, value):
            return x
        return y if both_sides and y.type is n.type and _is_full(x, value) else None

    return rule


def _constant(n: Node, emit: Emit) -> Node | None:
    """A constant in place of a moved or cast constant."""
    x = n.args[0]
    if x.op != full.name or x.type.partial or n.type.partial:
        return None
    value, t = x.attrs["value"], n.type
    if x.type.dtype is not t.dtype:
        if not (x.type.dtype.kind == t.dtype.kind == "float" and math.isfinite(value)):
            return None
        value = float(x.type.dtype.numpy.type(value))
    attrs = {"dtype": t.dtype, "shape": t.shape, "value": value}
    if t.mesh is not None:
        attrs["layout"] = t
    return emit(Node("full", (), n.types, attrs, n.loc, n.scope))


def _again(n: Node, emit: Emit) -> Node | None:
    """`n` applied to the argument of its argument, if that gives the same type."""
    x = n.args[0].args[0]
    if x.type is n.type and n.op != transpose.name:
        return x
    got = infer(n.kind, (x.type,), n.attrs)
    if got.wants[0] is not x.type or got.outs[0] is not n.type:
        return None
    return emit(n.with_args((x,)))


def _reshape(n: Node, emit: Emit) -> Node | None:
    x = n.args[0]
    if x.type is n.type:
        return x
    return _again(n, emit) if x.op == reshape.name else _constant(n, emit)


def _cast(n: Node, emit: Emit) -> Node | None:
    x = n.args[0]
    if x.type is n.type:
        return x
    # A cast of a narrow float to f32 and on is exact in f32; another dtype in between may round it.
    exact = x.op == cast.name and x.type.dtype is f32 and x.args[0].type.dtype.kind == "float"
    return _again(n, emit) if exact else _constant(n, emit)


def _transpose(n: Node, emit: Emit) -> Node | None:
    x, perm = n.args[0], tuple(n.attrs["perm"])
    if x.op == transpose.name:
        x, perm = x.args[0], tuple([x.attrs["perm"][p] for p in perm])
    if perm == tuple(range(len(perm))):
        return x
    if x is n.args[0]:
        return _constant(n, emit)
    return emit(Node("transpose", (x,), n.types, {"perm": perm}, n.loc, n.scope))


def _broadcast(n: Node, emit: Emit) -> Node | None:
    x = n.args[0]
    return x if x.type is n.type else _constant(n, emit)


def _neg(n: Node, emit: Emit) -> Node | None:
    x = n.args[0]
    return x.args[0] if x.op == neg.name and x.args[0].type is n.type else None


def _slice(n: Node, emit: Emit) -> Node | None:
    x, t = n.args[0], n.attrs
    whole = not any(t["starts"]) and tuple(t["stops"]) == x.type.shape
    return x if whole and x.type is n.type and set(t["steps"]) <= {1} else None


def _pad(n: Node, emit: Emit) -> Node | None:
    x, t = n.args[0], n.attrs
    whole = not any(t["starts"]) and set(t["steps"]) <= {1}
    return x if whole and x.type is n.type else None


def _only(n: Node, emit: Emit) -> Node | None:
    return n.args[0] if len(n.args) == 1 and n.args[0].type is n.type else None


def _sum(n: Node, emit: Emit) -> Node | None:
    return n.args[0] if not n.attrs["dims"] and n.args[0].type is n.type else None


def _value(n: Node, emit: Emit) -> Node | None:
    # Gradients have been taken by now, so the argument that stood for the gradient is not needed.
    return n.args[0] if n.args[0].type is n.type else None


def _of_custom(n: Node, emit: Emit) -> Node | None:
    """One value of an op with a custom gradient, as in `_value`."""
    x: Node = n.args[0]
    value = x.args[n.attrs["index"]] if x.op == custom.name else None
    return value if value is not None and value.type is n.type else None


_RULES: dict[Op, Fold] = {
    add: _neutral(0, True),
    sub: _neutral(0, False),
    mul: _neutral(1, True),
    div: _neutral(1, False),
    neg: _neg,
    sum_: _sum,
    reshape: _reshape,
    cast: _cast,
    transpose: _transpose,
    broadcast_to: _broadcast,
    slice_: _slice,
    pad: _pad,
    concat: _only,
    straight_through: _value,
    custom: lambda n, emit: _value(n, emit) if n.attrs["values"] == 1 else None,
}
_FOLDS: dict[str, Fold] = {name: _constant for name, op in OPS.items() if op.elements == "moved"}
_FOLDS |= {"item": _of_custom} | {op.name: rule for op, rule in _RULES.items()}
