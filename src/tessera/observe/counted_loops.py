"""While loops as loops with a measured number of turns, so that their values can be measured."""

from __future__ import annotations

from dataclasses import replace

from ..core.dtypes import int32
from ..ir.graph.build import Builder
from ..ir.graph.node import Emit, Graph, Node
from ..lang.value.eager import run_graph
from ..ops.create import full
from .instrument import Run

MOST = 100_000


def counted(run: Run) -> Run:
    """`run` with its while loops replaced by loops of a fixed length; it runs once to count their
    turns. While loops inside other loops, with a condition that varies over devices, without a turn
    or with more than `MOST` turns are not replaced."""
    loops = [n for n in run.graph.nodes if _decides(n) and not n.types[0].varying]
    if not loops:
        return run
    counts: list[Node] = []

    def count(was: Node, now: Node, emit: Emit) -> Node | None:
        if was not in loops:
            return None
        counting, turns = _counting(now, run.graph, emit)
        counts.append(turns)
        return counting

    graph = run.graph.rewrite(count, _same)
    every = run_graph(replace(graph, outputs=tuple(counts)), run.values)
    turns = dict(zip(loops, (int(t.item()) for t in every), strict=True))

    def over_turns(was: Node, now: Node, emit: Emit) -> Node | None:
        length = turns.get(was, 0)
        if not 0 < length <= MOST:
            return None
        return emit(replace(now, attrs={**now.attrs, "length": length}))

    return replace(run, graph=run.graph.rewrite(over_turns, _same))


def _decides(n: Node) -> bool:
    return n.op == "scan" and n.attrs["length"] is None


def _counting(loop: Node, graph: Graph, emit: Emit) -> tuple[Node, Node]:
    """(`loop` with a further carry that counts its turns, the node of the count)."""
    body, consts, carries = loop.attrs["body"], loop.attrs["consts"], loop.attrs["carries"]
    inside = Builder(body.name, options=body.options)
    inside.nodes, inside.inputs = list(body.nodes), list(body.inputs)
    one = inside("cast", body.inputs[consts], dtype=int32)
    more = inside("add", inside.input(one.type, "turns"), one)
    attrs = {**loop.attrs, "body": inside.graph([*body.outputs, more]), "carries": carries + 1}
    outside = Builder(graph.name, options=graph.options)
    none = outside.redistribute(outside(full.name, dtype=int32, shape=(), value=0), one.type)
    counting = outside("scan", *loop.args, none, **attrs)
    turns = outside("item", counting, index=carries)
    for n in outside.nodes:
        emit(n)
    return counting, turns


def _same(body: Graph) -> Graph:
    return body
