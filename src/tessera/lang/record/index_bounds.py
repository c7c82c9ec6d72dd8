"""Bounds checks of ids on the host, which raise ShapeError.

The host checks the ids that it knows: at once for an eager op, and at each call of a compiled
function for ids among its arguments. Ids known only to the devices are marked there: see
ops/indexing.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.errors import ShapeError, caller
from ...ir.graph.node import Node
from ...ir.graph.oracle import value_of
from ..value.tensor import Tensor
from .recorder import Recorder

NOTHING = "ask x.size first: there is nothing to pick"


@dataclass(frozen=True)
class Expected:
    """The bounds of an op's ids. In a recorded function the ids are `views` of an argument."""

    views: tuple[Node, ...]
    name: str
    label: str
    low: int
    size: int
    ignore: int | None
    loc: str

    def check(self, ids: Tensor) -> None:
        """Raises ShapeError if the host knows that one of the argument's ids is outside."""
        values = ids._host_values
        if values is None or values.dtype.kind not in "iu":
            return
        shape = values.shape
        bad = (values < self.low) | (values >= self.size)
        if self.ignore is not None:
            bad &= values != self.ignore
        if not bad.any():
            return
        place = np.arange(values.size).reshape(shape)
        # The views move and select elements: only ids that reach the op count.
        for view in self.views:
            values, bad, place = (value_of(view, [x]) for x in (values, bad, place))
        if not bad.any():
            return
        first = np.unravel_index(place[bad][0], shape)
        at = f" at [{', '.join(str(int(i)) for i in first)}]" if shape else ""
        others = int(bad.sum()) - 1
        others_text = f", and {others} more" if others else ""
        spared = f", or {self.ignore}" if self.ignore is not None else ""
        within = f"{self.low} to {self.size - 1}" if self.size else "a dim of size 0"
        raise ShapeError(
            f"{self.name}: {self.label} {values[bad][0]}{at} is outside {within}{others_text}",
            rows=[(f"{self.label}s", ids.type), *([("used_at", self.loc)] if self.loc else [])],
            fix=f"keep each {self.label} within {within}{spared}" if self.size else NOTHING,
        )


def check_ids(
    name: str, label: str, ids: Tensor, size: int, *, low: int = 0, ignore: int | None = None
) -> None:
    """Raises ShapeError if the host knows that one of `ids` is neither from `low` to `size - 1` nor
    `ignore`. Ids of an argument of a recorded function are checked at each call."""
    node, recorder = ids._node, ids._trace
    if ids._host_values is not None:
        Expected((), name, label, low, size, ignore, "").check(ids)
    elif node is not None and isinstance(recorder, Recorder) and recorder.parent is None:
        found = _argument(node)
        if found is not None:
            argument, views = found
            expected = Expected(views, name, label, low, size, ignore, caller() or "")
            recorder.checks.append((argument, expected.check))


def _argument(n: Node) -> tuple[Node, tuple[Node, ...]] | None:
    """Returns (the input whose elements `n` shows, the nodes between); None if `n` is computed."""
    views: list[Node] = []
    while n.op != "input":
        if n.kind.elements not in ("same", "moved", "chosen") or len(n.args) * len(n.types) > 1:
            return None
        views.append(n)
        n = n.args[0]
    return n, tuple(reversed(views))
