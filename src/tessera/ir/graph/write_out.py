"""Structure that is only for recording and for gradients, as plain nodes and loops.

A region (a loop of one iteration) becomes the nodes of its body, so that its collectives overlap
like all others. A branch whose bodies have collectives becomes two loops of at most one iteration,
so that executors, costs and displays know one kind of steps that contain steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from ...core.dtypes import bool_
from ...core.layout import TensorType
from ...ops.control import after, in_memory, item, scan
from ...ops.create import full
from ...ops.elementwise import logical_not
from ...ops.local import cond
from ...ops.movement import reshape
from .node import Emit, Graph, Node, copied, input_node


def written_out(graph: Graph) -> Graph:
    """`graph` with the nodes of their bodies in place of loops of one iteration, and loops in place
    of branches with collectives."""
    graph = graph.rewrite(_as_loops).rewrite(None, written_out)
    if not any(map(_is_region, graph.nodes)):
        return graph
    new: dict[Node, Node] = {}
    results: dict[Node, list[Node]] = {}  # of each region
    nodes = dict[Node, None]()
    copies: list[Node] = []  # of the last region, to host memory
    for n in graph.nodes:
        if n.op == item.name and n.args[0] in results:
            new[n] = results[n.args[0]][n.attrs["index"]]
            continue
        args = tuple([new.get(a, a) for a in n.args if a not in results])
        if _is_region(n):
            results[n], copies = _inside(n, args, nodes, copies)
            continue
        new[n] = n.with_args(args)
        nodes[new[n]] = None
    outputs = tuple(new[n] for n in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _is_region(n: Node) -> bool:
    return n.op == scan.name and n.attrs["length"] == 1


def _inside(
    region: Node, args: Sequence[Node], nodes: dict[Node, None], copies: list[Node]
) -> tuple[list[Node], list[Node]]:
    """Adds the nodes of the body of `region`, applied to `args`, to `nodes`. Returns (its results,
    the copies to host memory that are under way after it).

    If it has such copies, its results exist only after the `copies` of the region before it. So a
    copy runs during the next region, and the memory of its source is free after that.
    """
    body, carries = region.attrs["body"], region.attrs["carries"]

    def put(op: str, args: tuple[Node, ...], types: tuple[TensorType, ...], **attrs: Any) -> Node:
        n = Node(op, args, types, attrs, region.loc, region.scope)
        nodes[n] = None
        return n

    def shaped(x: Node, t: TensorType) -> Node:
        return x if x.type is t else put(reshape.name, (x,), (t,), shape=t.shape)

    new = {n: shaped(x, n.type) for n, x in zip(body.inputs, args, strict=True)}
    nodes.update(dict.fromkeys(copied([n for n in body.nodes if n.op != "input"], new)))
    ends = [new[n] for n in body.outputs]
    away: dict[Node, Node] = {}
    # A copy is made in the shape in which the gradient reads it: a reshape on the host would make
    # the compiler copy it once more.
    read = {*ends[:carries], *(a for n in new.values() for a in n.args)}
    for i, (x, t) in enumerate(zip(ends[carries:], region.types[carries:], strict=True), carries):
        if x not in away and _is_on_host(x):
            if x not in read:
                del nodes[x]
            away[x] = put(in_memory.name, (shaped(x.args[0], t),), (t,), **x.attrs)
        ends[i] = away.get(x, x)
    made = list(away.values())
    for copy in copies if made else ():
        ends = [n if n in made else put(after.name, (n, copy), n.types, copied=True) for n in ends]
    if any(n.op == in_memory.name for n in args):
        # The gradient ends as a whole, or the compiler would compute the gradients of weights
        # last, from values of all regions.
        last = reduce(lambda x, n: put(after.name, (x, n), x.types), ends)
        ends = [last, *(put(after.name, (n, last), n.types) for n in ends[1:])]
    rows = [shaped(x, t) for x, t in zip(ends[carries:], region.types[carries:], strict=True)]
    return [*ends[:carries], *rows], made or copies


def _is_on_host(n: Node) -> bool:
    return n.op == in_memory.name and n.attrs["space"] == "host"


def _as_loops(was: Node, n: Node, emit: Emit) -> Node | None:
    """A branch with collectives as a loop that runs `yes` if the bool is true, and one that runs
    `no` if it is not, from the results of the first."""
    if n.op == item.name and n.args[0].op == scan.name and was.args[0].op == cond.name:
        return emit(replace(n, attrs={"index": n.attrs["index"] + 1}))
    if n.op != cond.name:
        return None
    yes, no = n.attrs["yes"], n.attrs["no"]
    if not any(True for body in (yes, no) for _ in body.collectives()):
        return None
    pick, *args = n.args
    results = [emit(_zeros(t, n)) for t in n.types]
    other = emit(Node(logical_not.name, (pick,), pick.types, {}, n.loc, n.scope))
    for go, body in ((pick, yes), (other, no)):
        types = (pick.type, *n.types)
        attrs = {
            "body": _once(body, pick.type, n), "length": None, "consts": len(args),
            "carries": len(types), "reverse": False, "policy": "save",
        }  # fmt: skip
        loop = emit(Node(scan.name, (*args, go, *results), types, attrs, n.loc, n.scope))
        if go is pick:
            results = [
                emit(Node(item.name, (loop,), (t,), {"index": i + 1}, n.loc, n.scope))
                for i, t in enumerate(n.types)
            ]
    return loop


def _once(body: Graph, pick: TensorType, n: Node) -> Graph:
    """`body` as the body of a loop that ends after it; the carries are a bool and its results."""
    carried = [input_node(t, f"carry{i}") for i, t in enumerate((pick, *n.types))]
    end = _zeros(pick, n)
    inputs = (*body.inputs, *carried)
    inner = [x for x in body.nodes if x.op != "input"]
    outputs = (end, *body.outputs)
    return Graph(body.name, (*inputs, *inner, end), inputs, outputs, body.options)


def _zeros(t: TensorType, like: Node) -> Node:
    value = 0.0 if t.dtype.is_float else False if t.dtype is bool_ else 0
    attrs = {"dtype": t.dtype, "shape": t.shape, "value": value, "layout": t}
    return Node(full.name, (), (t,), attrs, like.loc, like.scope)
