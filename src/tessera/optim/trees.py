"""How are weights, gradients and state matched? By name: a leaf's path through its containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.checks import same_names
from ..core.errors import ShapeError, UsageError, caller
from ..ir.graph.node import entered
from ..lang.parameter import need_trained, trained
from ..lang.record import current
from ..lang.tensor import Tensor
from ..lang.tree import flatten, path_name, paths

SHOWN = 5  # how many names an error lists


def named(call: str, tree: Any) -> dict[str, Tensor]:
    """The float tensors of `tree` by dotted name, in its order, of a module those that are trained.
    Raises UsageError for others."""
    tree = trained(tree)
    out: dict[str, Tensor] = {}
    wrong = []
    for path, x in zip(paths(tree), flatten(tree)[0], strict=True):
        if isinstance(x, Tensor) and x.dtype.is_float:
            out[path_name(path)] = x
        else:
            what = str(x.type) if isinstance(x, Tensor) else type(x).__name__
            wrong.append((path_name(path) or "tree", what))
    need_trained(call, out.items())
    if wrong:
        raise UsageError(
            f"{call}: {len(wrong)} leaves are not float tensors",
            rows=wrong[:SHOWN],
            fix="give a dict of float tensors, such as model.parameters()",
        )
    return out


def need_same_names(call: str, have: Mapping[str, Any], given: Mapping[str, Any], fix: str) -> None:
    """Raises UsageError, naming all differences, unless both have the same names."""
    same_names(call, [n for n in have if n not in given], [n for n in given if n not in have], fix)


def need_same_shapes(
    call: str, have: Mapping[str, Tensor], given: Mapping[str, Any], fix: str
) -> None:
    """Raises ShapeError, listing all that differ, unless equal names have equal shapes."""
    wrong = [
        (name, f"{tuple(given[name].shape)}, not {t.shape}")
        for name, t in have.items()
        if tuple(given[name].shape) != t.shape
    ]
    if wrong:
        raise ShapeError(f"{call}: {len(wrong)} shapes are different", rows=wrong[:SHOWN], fix=fix)


@contextmanager
def one_line(scope: str) -> Iterator[None]:
    """Marks all nodes recorded inside with the user's line and `scope`, found once.

    An update adds a dozen nodes for each of hundreds of weights, all for one line.
    """
    recorder = current()
    if recorder is None:
        yield
        return
    b = recorder.builder
    with b.at(caller() if b.loc is None else b.loc, entered(b.scope, scope)):
        yield
