"""Check of the determinism level "mesh_invariant": equal bits on every fold of a mesh."""

from __future__ import annotations

from ..core.errors import UsageError
from ..ir.graph.node import Graph, Node
from ..ops.user import parse_groups, user


def need_kept(graph: Graph) -> None:
    """Raises UsageError if an op of `graph` may give other bits on another fold of the mesh."""
    for n in graph.nodes:
        if n.op != "input" and not n.kind.mesh_invariance and not _apart(n):
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


def _apart(n: Node) -> bool:
    """Returns whether a user function is elementwise by its index."""
    if n.op != user.name or n.attrs.get("whole"):
        return False
    groups = parse_groups("user", n.attrs["index"], dict(n.attrs.get("sizes", ())))
    sides = [set(g) for g in (*groups.args, *groups.outs)]
    return all(s == sides[0] for s in sides)
