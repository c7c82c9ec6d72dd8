"""Statistics of gradients, weights and activations: norm, largest value, mean, zeros, non-finite
values.

>>> import tessera as ts
>>> grads = {"w": ts.tensor([3.0, 0.0, -4.0, 0.0]), "b": ts.tensor([0.5])}
>>> print(statistics(grads))
name  norm  max abs   mean  zeros  not finite
w        5        4  -0.25   50 %           0
b      0.5      0.5    0.5    0 %           0

The numbers are tensors, computed on the mesh, so a compiled step can return them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.checks import shown
from ..core.dtypes import f32
from ..core.errors import UsageError
from ..core.reshard import completed
from ..core.wording import columns
from ..ir.graph.node import Graph, Node, Scope, scope_prefixes
from ..lang.math import functions as F
from ..lang.math.shape import concat, reshape, stack
from ..lang.record.operands import as_tensor, of_floats
from ..lang.record.tree import flatten, path_name, register, spec_paths
from ..lang.value.tensor import Tensor
from .instrument import as_f32, every_float, measured, recorded, tidy

COLUMNS = ("norm", "max_abs", "mean", "zeros", "nonfinite")
HEADS = ("norm", "max abs", "mean", "zeros", "not finite")
Visit = tuple[str, tuple[int, ...]]  # (scope, number of its entry)


class Statistics:
    """A row per tensor: its norm, largest absolute value, mean, fraction of zeros, and number of
    elements that are not finite. `values` is a tensor [names, 5] with the columns in this order."""

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        self.names, self.values = names, values

    @property
    def norm(self) -> Tensor:
        """The norm of all tensors together."""
        return F.sqrt(F.sum(self.values[:, 0] * self.values[:, 0]))

    def rows(self) -> dict[str, dict[str, float]]:
        """The numbers on the host: `rows()["w"]["norm"]`."""
        table = np.asarray(self.values.numpy(), np.float64).tolist()
        return {n: dict(zip(COLUMNS, row, strict=True)) for n, row in zip(self.names, table)}

    def flat(self, prefix: str = "") -> dict[str, float]:
        """The numbers for a row of metrics: `{"w/norm": 5.0, "w/max_abs": 4.0, ...}`."""
        return {
            f"{prefix}{name}/{key}": value
            for name, row in self.rows().items()
            for key, value in row.items()
        }

    def __str__(self) -> str:
        rows = [
            (name, *map(tidy, (r["norm"], r["max_abs"], r["mean"])),
             f"{100 * r['zeros']:.3g} %", f"{r['nonfinite']:.0f}")
            for name, r in self.rows().items()
        ]  # fmt: skip
        return "\n".join(columns([("name", *HEADS), *rows], 1))

    def __repr__(self) -> str:
        recorded = self.values._trace is not None  # a debugger may ask then too
        return "statistics in a program that is being recorded" if recorded else str(self)


register(Statistics)


def statistics(tree: Any) -> Statistics:
    """Statistics of every float tensor or array in `tree` (gradients, weights, ...), by its path.

    It also works inside a compiled function. Sums are computed in f32 and reduced together: one
    collective for all tensors that are split over the same axes, and one more for their largest
    values. Raises UsageError if `tree` has no float tensor.
    """
    leaves, spec = flatten(tree)
    pairs = zip(map(path_name, spec_paths(spec)), map(of_floats, leaves), strict=True)
    found = {name: t for name, t in pairs if isinstance(t, Tensor) and t.dtype.is_float and t.size}
    if not found:
        raise UsageError(
            f"statistics: there is no tensor of floats with elements in {shown(tree)}",
            fix="give a tensor, or a dict of them such as ts.grad returns",
        )
    if list(found) == [""]:
        found = {"tensor": found[""]}
    return Statistics(tuple(found), _table(list(found.values())))


def _table(tensors: list[Tensor]) -> Tensor:
    """[tensors, 5]: the columns of `Statistics`."""
    whole = [_complete(as_f32(t)) for t in tensors]
    sums = _together([_sums(t) for t in whole])
    largest = _together([reshape(F.max(F.abs(t)), 1) for t in whole])
    sizes = stack([F.full((), float(t.size)) for t in whole])
    norm, mean, zeros = F.sqrt(sums[:, 0]), sums[:, 1] / sizes, sums[:, 2] / sizes
    return stack([norm, largest[:, 0], mean, zeros, sums[:, 3]], dim=1)


def _complete(x: Tensor) -> Tensor:
    return F.relayout(x, completed(x.type, x.type.partial_axes))


def _sums(x: Tensor) -> Tensor:
    """[4]: sum of squares, sum of elements, number of zeros, number of non-finite elements."""
    parts = (x * x, x, (x == 0).to(f32), (~F.isfinite(x)).to(f32))
    return stack([F.sum(p) for p in parts])


def _together(rows: list[Tensor]) -> Tensor:
    """The rows as one tensor, completed; rows that are partial over the same axes are reduced
    together."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.type, []).append(i)
    order = [i for members in groups.values() for i in members]
    done = [_complete(stack([rows[i] for i in members])) for members in groups.values()]
    joined = concat(done) if len(done) > 1 else done[0]
    if order == sorted(order):
        return joined
    return stack([joined[order.index(i)] for i in range(len(rows))])


# ---- activations -------------------------------------------------------------------------------
def activations(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Statistics:
    """Statistics of the result of each scope of `fn(*args, **kwargs)`, in the program's order.

    A scope is a module's name or a `ts.named_scope`. A repeated scope has a number; one in a loop
    has the number of the iteration. The call is run again from its recorded graph; `fn` and the
    containers that it changes are not changed. Raises UsageError if nothing has a scope.
    """
    run = recorded("activations", fn, args, kwargs)
    names: dict[tuple[Node | None, Node], list[str]] = {}
    visits: set[Visit] = set()

    def ends(graph: Graph, loop: Node | None) -> list[Node]:
        last = [(v, n) for v, n in _last_of_visits(graph, loop) if v not in visits]
        visits.update(v for v, _ in last)  # a gradient computes the values of a loop's body again
        for (path, _), n in last:
            names.setdefault((loop, n), []).append(path)
        return [n for _, n in last]

    counts: dict[str, int] = {}
    rows: list[tuple[str, Any]] = []
    for spot, (value,) in measured(run, ends, lambda x: [_table([x])[0]]):
        inner = spot.loops[-1] if spot.loops else None
        iterations = list(np.ndindex(value.shape[: len(spot.loops)]))
        for path in names[inner, spot.node]:
            counts[path] = counts.get(path, -1) + 1
            for at in iterations:
                number = "".join(f"[{i}]" for i in at)
                again = f" #{counts[path] + 1}" if counts[path] else ""
                row = value[at]
                rows.append((f"{path}{number}{again}", row.reshape(-1, len(COLUMNS))[0]))
    if not rows:
        raise UsageError(
            "activations: the function has no scopes that compute floats: there is nothing to name",
            fix='call modules in it, or open scopes: with ts.named_scope("mlp"): ...',
        )
    return Statistics(tuple(n for n, _ in rows), as_tensor(np.stack([r for _, r in rows])))


def _last_of_visits(graph: Graph, loop: Node | None) -> list[tuple[Visit, Node]]:
    """(visit of a scope, its last value) for each entry of a scope by the program."""
    around = scope_prefixes(loop.scope) if loop is not None else []
    last = {v: n for n in every_float(graph, loop) if n.op != "input" for v in _visits(n)}
    place = {n: i for i, n in enumerate(graph.nodes)}
    rows = [(v, n) for v, n in last.items() if v[0] not in around]
    return sorted(rows, key=lambda row: (place[row[1]], -len(row[0][1])))


def _visits(n: Node) -> list[Visit]:
    """For a node in `a/b.0.c`: a, a/b.0 and a/b.0.c, each with its visits: what was entered, and
    not the list `a/b`; none for a node of a gradient."""
    if not isinstance(n.scope, Scope):
        return []
    visits = n.scope.visits
    return [
        (path, visits[:i])
        for i, path in enumerate(scope_prefixes(n.scope), 1)
        if visits[i - 1 : i] != visits[i : i + 1]
    ]
