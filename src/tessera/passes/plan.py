"""The compile pipeline: the passes from a recorded program to its schedule, in order. Runtime, cost
model and displays all use it."""

from __future__ import annotations

from ..core.errors import UsageError
from ..ir.graph.node import Graph, Node
from ..ir.graph.verify import verify
from ..ir.graph.write_out import written_out
from ..ir.schedule.build import build_schedule
from ..ir.schedule.schedule import Schedule
from ..ir.schedule.verify import verify_schedule
from ..ops.user import parse_groups, user
from .algorithms import algorithms
from .partial_sums import complete_once
from .simplify import simplify
from .time import lower_time


def plan(graph: Graph) -> Schedule:
    """The schedule that runs `graph`, a recorded function, under its options.

    Raises UsageError if it cannot keep its determinism level, or names an algorithm that does not
    exist.
    """
    return scheduled(prepared(graph))


def prepared(graph: Graph) -> Graph:
    """`graph` simplified, without axes in time and regions, and with its partial sums completed
    where that sends the fewest bytes. Raises UsageError if it cannot keep its determinism level."""
    graph = simplify(graph)
    verify(graph, "simplify")
    if any(t.mesh is not None and t.mesh.time for n in graph.nodes for t in n.types):
        graph = simplify(lower_time(graph))
        verify(graph, "lower_time")
    plain = written_out(graph)
    if plain is not graph:
        graph = simplify(plain)
        verify(graph, "written_out")
    once = complete_once(graph)
    if once is not graph:
        graph = once
        verify(graph, "complete_once")
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


# Check of the determinism level "mesh_invariant": equal bits on every fold of a mesh.


def need_kept(graph: Graph) -> None:
    """Raises UsageError if an op of `graph` may give other bits on another fold of the mesh."""
    for n in graph.nodes:
        if n.op != "input" and not n.kind.mesh_invariance and not _is_elementwise(n):
            name = n.attrs.get("name", n.op) if n.op == user.name else n.op
            raise UsageError(
                f"mesh_invariant: {name} may add up in another order on another mesh",
                rows=[
                    *((f"arg {i}", a.type) for i, a in enumerate(n.args)),
                    *([("index", n.attrs["index"])] if n.op == user.name else []),
                ],
                fix="write it with ops of Tessera, which add up in a fixed order, or ask for less:"
                ' level="run_to_run"',
                at=n.loc or None,
            )
        for value in n.attrs.values():
            if isinstance(value, Graph):
                need_kept(value)


def _is_elementwise(n: Node) -> bool:
    """Returns whether a user function is elementwise by its index."""
    if n.op != user.name or n.attrs.get("whole"):
        return False
    groups = parse_groups("user", n.attrs["index"], dict(n.attrs.get("sizes", ())))
    sides = [set(g) for g in (*groups.args, *groups.outs)]
    return all(s == sides[0] for s in sides)
