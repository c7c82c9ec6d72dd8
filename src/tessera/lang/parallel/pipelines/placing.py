"""Placement of a pipeline's weights on their stages, once instead of in each step."""

from __future__ import annotations

from typing import Any

from ....core.reshard import gathered
from ...math.functions import relayout
from ...record.mesh_transfer import sent
from ...record.operands import as_tensor
from ...record.submesh import laid_on
from ...record.tree import flatten, path_name, paths, unflatten
from ...value.host_data import is_array
from ...value.tensor import Tensor
from .program import PipeProgram


def placed(program: PipeProgram, tree: Any) -> Any:
    """Returns `tree` with each weight on the stage where `program` uses it first. Raises UsageError
    if a name is unknown or matches several weights."""
    leaves, spec = flatten(tree)
    at = {
        i: path_name(path)
        for i, (x, path) in enumerate(zip(leaves, paths(tree), strict=True))
        if isinstance(x, Tensor) or is_array(x)  # the rest are settings
    }
    weights = [_together(program, as_tensor(leaves[i])) for i in at]
    new = _sent(program, weights, list(at.values()))
    if all(leaves[i] is t for i, t in zip(at, new, strict=True)):
        return tree
    for i, t in zip(at, new, strict=True):
        leaves[i] = t
    return unflatten(spec, leaves)


def _together(program: PipeProgram, t: Tensor) -> Tensor:
    """Returns `t` gathered over the stages' axis, so that it can be sent to one stage."""
    axis = program.state.pipe.axis
    apart = axis in t.type.split_axes and t._data is not None
    return relayout(t, gathered(t.type, (axis,))) if apart else t


def _sent(program: PipeProgram, weights: list[Tensor], names: list[str]) -> list[Tensor]:
    """Sends `weights` to their stages by one schedule. A weight without data is made there."""
    state = program.state
    to = []
    for t, name in zip(weights, names, strict=True):
        home = program.home(t, name)
        to.append(t.type if home is None else laid_on(t.type, state.slices[home]))
        if t._data is None and t._pending is not None:
            t.type = to[-1]
    return sent(weights, to, state.mesh)
