"""Nodes of a program in execution order, with their operands; the same for a graph and a
schedule. A loop that runs once is not a loop: the compiler puts its body in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..ir.graph.node import Graph, Node, copied, input_node
from ..ir.schedule.schedule import Schedule
from ..ops.control import item, scan
from ..ops.movement import reshape


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
    stands: dict[Node, Node] = {}
    _add(graph.nodes, stands, nodes, args)
    outs = tuple(stands.get(o, o) for o in graph.outputs)
    return Program(tuple(nodes), args, graph.inputs, outs)


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
        _add(step.graph.nodes, stands, nodes, args)
        outs = [stands.get(o, o) for o in step.graph.outputs]
        made.update(zip(step.writes, outs, strict=True))
    return Program(tuple(nodes), args, given, tuple(made[b] for b in schedule.outputs))


def _add(
    those: Iterable[Node],
    stands: dict[Node, Node],
    nodes: list[Node],
    args: dict[Node, tuple[Node, ...]],
) -> None:
    """Adds `those`, without inputs. `stands` maps nodes to their replacements, and gets those of
    the results of loops that run once."""
    once: dict[Node, list[Node]] = {}
    for n in those:
        if n.op == "input" or n in args:
            continue
        given = tuple(stands.get(a, a) for a in n.args)
        if n.op == scan.name and n.attrs["length"] == 1:
            once[n] = _body(n, given, nodes, args)
        elif n.op == item.name and n.args[0] in once:
            stands[n] = once[n.args[0]][n.attrs["index"]]
        else:
            nodes.append(n)
            args[n] = given


def _body(
    loop: Node, given: Sequence[Node], nodes: list[Node], args: dict[Node, tuple[Node, ...]]
) -> list[Node]:
    """Adds a copy of the body of `loop`, which runs once on `given`; returns its results."""
    body: Graph = loop.attrs["body"]
    new: dict[Node, Node] = {}
    for own, x in zip(body.inputs, given, strict=True):
        same = own.type.shape == x.type.shape
        new[own] = x if same else Node(reshape.name, (x,), own.types, {"shape": own.type.shape})
    rows = [x for x in new.values() if x not in args]
    made = copied([n for n in body.nodes if n.op != "input"], new)
    stands: dict[Node, Node] = {}
    _add([*rows, *made], stands, nodes, args)
    return [stands.get(new[o], new[o]) for o in body.outputs]
