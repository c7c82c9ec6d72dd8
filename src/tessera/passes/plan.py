"""The compile pipeline: the passes from a recorded program to its schedule, in order. Runtime, cost
model and displays all use it."""

from __future__ import annotations

from ..ir.graph.node import Graph
from ..ir.graph.verify import verify
from ..ir.schedule.build import build_schedule
from ..ir.schedule.schedule import Schedule
from ..ir.schedule.verify import verify_schedule
from .algorithms import algorithms
from .determinism import need_kept
from .simplify import simplify
from .time import in_turns


def plan(graph: Graph) -> Schedule:
    """The schedule that runs `graph`, a recorded function, under its options.

    Raises UsageError if it cannot keep its determinism level, or names an algorithm that does not
    exist.
    """
    return scheduled(prepared(graph))


def prepared(graph: Graph) -> Graph:
    """`graph` simplified and without axes in time, ready to be scheduled. Raises UsageError if it
    cannot keep its determinism level."""
    graph = simplify(graph)
    verify(graph, "simplify")
    if any(t.mesh is not None and t.mesh.time for n in graph.nodes for t in n.types):
        graph = simplify(in_turns(graph))
        verify(graph, "in_turns")
    if graph.options.mesh_invariant:
        need_kept(graph)
    return graph


def scheduled(program: Graph | Schedule) -> Schedule:
    """The schedule of a graph from `prepared`, or of a pipeline, with its algorithms. Raises
    UsageError as `plan` does."""
    if isinstance(program, Schedule):
        s = program
        if s.options.mesh_invariant:
            for graph in dict.fromkeys(step.graph for step in s.steps):
                need_kept(graph)
    else:
        s = build_schedule(program)
    s = algorithms(s)
    verify_schedule(s)
    return s
