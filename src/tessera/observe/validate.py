"""`dist.validate_determinism`: a test of whether a step gives the same bits twice, and on fewer
devices.

The compiled step runs twice, and a third time on its mesh folded. If results differ, all
intermediate values are computed in each of these ways, in program order, and the first that differs
is reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.declared import Function
from ..core.errors import UsageError
from ..core.mesh import Mesh
from ..ir.graph.node import Graph, Node
from ..ir.graph.text import node_text
from ..ir.schedule.pipelines.stages import on_mesh
from ..lang.jit.argument_updates import Snapshot
from ..lang.jit.jit import Jit
from ..lang.record.tree import flatten
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from .instrument import Array, Run, measured, outside, recorded, results

CALLER = "validate_determinism"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first node whose bits differ between the first run and `run`.

    `node` is its line in the graph, `loc` the user's line, `scope` the modules around it; `count`
    of `of` elements differ. `inside` is True if an intermediate value differs; otherwise all values
    agree one by one, and differ only in the program compiled as a whole.
    """

    run: str
    op: str
    node: str
    loc: str
    scope: str
    count: int
    of: int
    inside: bool


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of `validate_determinism`; `str()` is the report."""

    level: str
    runs: tuple[str, ...]
    results: int
    first: Difference | None

    @property
    def same(self) -> bool:
        """Returns whether all results of all runs have the same bits."""
        return self.first is None

    def __str__(self) -> str:
        head = f"{self.level}: {self.results} results of {', '.join(self.runs)}"
        d = self.first
        if d is None:
            return f"{head}: the same bits"
        rows = [("node", d.node), *([("at", d.loc)] if d.loc else [])]
        rows += [("scope", d.scope)] if d.scope else []
        rows += [("differ", f"{d.count} of {d.of} elements")]
        if not d.inside:
            rows.append(("seen", "in the whole program only: its values agree one by one"))
        body = [f"  {k:<6} : {v}" for k, v in rows]
        return "\n".join([f"{head}: bits differ first at {d.op}, {d.run}", *body])

    __repr__ = __str__


def validate_determinism(
    step: Function, *args: Any, onto: object = None, **kwargs: Any
) -> Validation:
    """Runs `step(*args)` twice and once on a folded mesh, and reports the first node that differs.

    The mesh is folded `onto` fewer devices (None: one); `report.same` is True if all results have
    the same bits. `step` is a function, compiled or not, and runs under the current level
    (`dist.deterministic`). The arguments and the random state are not changed. A pipeline runs as
    the plain function that it stands for. Raises UsageError if the step has no mesh, MeshError if
    the mesh cannot be folded so.
    """
    outside(CALLER)
    fn = step.fn if isinstance(step, Jit) else step
    run = recorded(CALLER, _with_writes(fn), args, kwargs)
    runs = [("the first run", run), ("the second run", run)]
    mesh = _one_mesh(run.graph)
    if mesh is not None and mesh.size > 1:
        small = mesh.fold(1 if onto is None else onto)
        if small != mesh:
            runs.append((f"folded onto {small.physical.text()}", _moved(run, small)))
    elif onto is not None:
        raise UsageError(f"{CALLER}: the step has no mesh to fold", fix="leave out onto=")
    names = tuple(name for name, _ in runs)
    outputs = [_outputs(r) for _, r in runs]
    first = None
    for i in range(1, len(runs)):
        if any(x.tobytes() != y.tobytes() for x, y in zip(outputs[0], outputs[i], strict=True)):
            first = _inside(runs[0][1], *runs[i]) or _whole(run, names[i], outputs[0], outputs[i])
            break
    return Validation(run.graph.options.determinism, names, len(run.graph.outputs), first)


def _with_writes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, extended to return also the tensors that it writes into its arguments."""

    @functools.wraps(fn)
    def both(*args: Any, **kwargs: Any) -> Any:
        before = Snapshot((args, kwargs))
        out = fn(*args, **kwargs)
        written = [x for x in before.changes()[1] if isinstance(x, Tensor)]
        return flatten(out)[0] + written

    return both


def _one_mesh(graph: Graph) -> Mesh | None:
    meshes = {t.mesh for n in graph.nodes for t in n.types if t.mesh is not None}
    return meshes.pop() if len(meshes) == 1 else None


def _moved(run: Run, mesh: Mesh) -> Run:
    """The same graph and values on `mesh`."""
    graph = on_mesh(run.graph, mesh)
    values = []
    for n, t in zip(graph.inputs, run.values, strict=True):
        values.append(t if n.type.mesh is None else
                      Tensor(engine().place(t.numpy(), n.type), n.type))  # fmt: skip
    return Run(graph, tuple(values))


def _outputs(run: Run) -> list[Array]:
    program = engine().compile(run.graph)
    data = program([t.stored for t in run.values], tuple(t.type for t in run.values))
    return [engine().fetch(d, t) for d, t in zip(data, program.types, strict=True)]


def _values(run: Run) -> Iterator[tuple[Graph, Node, Array]]:
    for spot, (value,) in measured(run, lambda graph, loop: results(graph), lambda x: [x]):
        graph = spot.loops[-1].attrs["body"] if spot.loops else run.graph
        yield graph, spot.node, value


def _inside(a: Run, name: str, b: Run) -> Difference | None:
    for (graph, node, x), (_, _, y) in zip(_values(a), _values(b), strict=True):
        if x.tobytes() != y.tobytes():
            return _difference(name, graph, node, x, y, True)
    return None


def _whole(run: Run, name: str, a: Sequence[Array], b: Sequence[Array]) -> Difference:
    at = next(i for i, (x, y) in enumerate(zip(a, b)) if x.tobytes() != y.tobytes())
    return _difference(name, run.graph, run.graph.outputs[at], a[at], b[at], False)


def _difference(name: str, graph: Graph, n: Node, x: Array, y: Array, inside: bool) -> Difference:
    bits = [v.reshape(-1).view("u1").reshape(v.size, -1) for v in (x, y)]
    count = int((bits[0] != bits[1]).any(1).sum())
    return Difference(name, n.op, node_text(graph, n), n.loc, n.scope, count, x.size, inside)
