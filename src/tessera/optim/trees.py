"""Trees of weights, gradients and state, matched by name: the path of a leaf in its containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.checks import same_names
from ..core.errors import ShapeError, UsageError, caller
from ..ir.graph.node import entered
from ..lang.record.parameter import need_trained, trained
from ..lang.record.recorder import current
from ..lang.record.tree import flatten, path_name, paths
from ..lang.value.tensor import Tensor

SHOWN = 5  # how many names an error lists


def named(call: str, tree: Any) -> dict[str, Tensor]:
    """The float tensors of `tree` by dotted name, in order; for a module its trained parameters.
    Raises UsageError if there are other leaves."""
    tree = trained(tree)
    out: dict[str, Tensor] = {}
    wrong = []
    for path, x in zip(paths(tree), flatten(tree)[0], strict=True):
        if isinstance(x, Tensor) and x.dtype.is_float:
            out[path_name(path)] = x
        else:
            type_text = str(x.type) if isinstance(x, Tensor) else type(x).__name__
            wrong.append((path_name(path) or "tree", type_text))
    need_trained(call, out.items())
    if wrong:
        raise UsageError(
            f"{call}: {len(wrong)} leaves are not float tensors",
            rows=wrong[:SHOWN],
            fix="give a dict of float tensors, such as model.parameters()",
        )
    return out


def need_same_names(
    call: str, expected: Mapping[str, Any], actual: Mapping[str, Any], fix: str
) -> None:
    """Raises UsageError, with all differences, unless both have the same names."""
    same_names(
        call,
        [n for n in expected if n not in actual],
        [n for n in actual if n not in expected],
        fix,
    )


def need_same_shapes(
    call: str, expected: Mapping[str, Tensor], actual: Mapping[str, Any], fix: str
) -> None:
    """Raises ShapeError, with the first differences, unless equal names have equal shapes."""
    wrong = [
        (name, f"{tuple(actual[name].shape)}, not {t.shape}")
        for name, t in expected.items()
        if tuple(actual[name].shape) != t.shape
    ]
    if wrong:
        raise ShapeError(f"{call}: {len(wrong)} shapes are different", rows=wrong[:SHOWN], fix=fix)


@contextmanager
def one_line(scope: str) -> Iterator[None]:
    """Gives all nodes recorded inside the user's line, looked up once, and `scope`.

    An update adds a dozen nodes for each of hundreds of weights, all for one line.
    """
    recorder = current()
    if recorder is None:
        yield
        return
    b = recorder.builder
    with b.at(caller() if b.loc is None else b.loc, entered(b.scope, scope)):
        yield
