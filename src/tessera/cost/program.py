"""Nodes of a program in execution order, with their operands; the same for a graph and a
schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..ir.graph.node import Graph, Node, input_node
from ..ir.schedule.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """Nodes in order, with the operands of each; `inputs` are the inputs, `results` the outputs."""

    nodes: tuple[Node, ...]
    args: Mapping[Node, tuple[Node, ...]]
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]

    @cached_property
    def readers(self) -> dict[Node, list[Node]]:
        """The readers of each node."""
        found: dict[Node, list[Node]] = {}
        for n in self.nodes:
            for a in self.args[n]:
                found.setdefault(a, []).append(n)
        return found

    @cached_property
    def _results(self) -> set[Node]:
        return set(self.results)

    def uses(self, n: Node) -> tuple[set[Node], bool]:
        """Returns (the readers of `n` or of its views, whether `n` or a view of it is a result)."""
        found: set[Node] = set()
        todo, is_result = [n], False
        while todo:
            m = todo.pop()
            is_result = is_result or m in self._results
            for r in self.readers.get(m, ()):
                (todo.append if r.kind.memory == "view" else found.add)(r)
        return found, is_result


def of_graph(graph: Graph) -> Program:
    """Returns the program of `graph`."""
    nodes: list[Node] = []
    args: dict[Node, tuple[Node, ...]] = {}
    _add(graph, {}, nodes, args)
    return Program(tuple(nodes), args, graph.inputs, graph.outputs)


def of_schedule(schedule: Schedule) -> Program:
    """Returns the program of the steps of `schedule`, one after the other."""
    made: dict[int, Node] = {}
    for b in schedule.inputs:
        made[b] = input_node(schedule.buffers[b], f"b{b}")
    given = tuple(made.values())
    nodes: list[Node] = []
    args: dict[Node, tuple[Node, ...]] = {}
    for step in schedule.steps:
        stands = dict(zip(step.graph.inputs, (made[b] for b in step.reads), strict=True))
        _add(step.graph, stands, nodes, args)
        outs = [stands.get(o, o) for o in step.graph.outputs]
        made.update(zip(step.writes, outs, strict=True))
    return Program(tuple(nodes), args, given, tuple(made[b] for b in schedule.outputs))


def _add(
    graph: Graph,
    stands: Mapping[Node, Node],
    nodes: list[Node],
    args: dict[Node, tuple[Node, ...]],
) -> None:
    """Adds the nodes of `graph`; `stands` maps nodes of `graph` to their replacements."""
    for n in graph.nodes:
        if n.op != "input" and n not in args:
            nodes.append(n)
            args[n] = tuple(stands.get(a, a) for a in n.args)
