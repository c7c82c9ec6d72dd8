"""Microbatches as a mesh axis in time: the batch is split over it and computed part by part."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain

from ...core.context import settings
from ...core.errors import lines_up
from ...core.layout import Factor, shard_count
from ...core.mesh import Mesh, in_time
from ...ir.graph.time_axis import place_of_time, step_count
from ...ir.schedule.pipelines.simulate import PipelineWarning
from ..math.functions import permute, relayout, reshape
from ..record.parameter import Parameter
from ..record.recorder import current
from ..value.tensor import Tensor

AXIS = "mb"


def is_weight(t: Tensor) -> bool:
    """Returns whether `t` is a weight, or state of one, by its origin."""
    return isinstance(t, Parameter) or bool(t.name) or t.drawn or bool(t.type.rest_axes)


def rows_of(tensors: Sequence[Tensor], alone: Sequence[Tensor]) -> Tensor | None:
    """Returns the first of `tensors` that holds the batch. Among those that are no weights it is
    the first of integers or bools, such as tokens, labels and masks; if there is none, the first
    that is an argument itself (`alone`), not in a container, with those whose rows are split first;
    else the first of all."""
    able = [t for t in tensors if t.ndim and not is_weight(t)]
    mine = {id(t) for t in able}
    own = [t for t in alone if id(t) in mine]
    whole = (t for t in able if not t.dtype.is_float)
    split = (t for t in own if any(f.axes for f in t.type.dims[0]))
    return next(chain(whole, split, own, able), None)


def in_microbatches(
    tensors: Sequence[Tensor], count: int, first: Tensor | None, mesh: Mesh | None = None
) -> list[Tensor]:
    """Splits the rows of each tensor that has as many rows as `first`, and is no weight, over a
    mesh axis in time, so that each device computes them in `count` parts.

    If the rows of a device do not divide by `count`, the next larger number that divides them is
    used. Rows unevenly split over the devices are computed at once, and rows that are split over
    time already stay so. `mesh` is the mesh of the devices; None takes that of the tensors.
    """
    laid = any(t.mesh is not None and t.mesh.time for t in tensors)
    parts = 1 if first is None or laid else _smallest_count(first, count)
    if first is None or parts == 1:
        return list(tensors)
    mesh = mesh or next((t.mesh for t in tensors if t.mesh is not None), settings().mesh)
    axis = AXIS if mesh is None or AXIS not in mesh else f"{AXIS}_"
    late = in_time(mesh, {axis: parts})
    rows = [
        t.ndim
        and t.shape[0] == first.shape[0]
        and not is_weight(t)
        and _smallest_count(t, parts) == parts
        for t in tensors
    ]
    return [_laid(t, late) if own else t for t, own in zip(tensors, rows, strict=True)]


def _smallest_count(t: Tensor, count: int) -> int:
    """The smallest number of microbatches, at least `count`, into which a device's rows of `t`
    divide."""
    rows, devices = t.type.dims[0][0].size, shard_count(t.type.dims[0][0].axes, t.type.sizes)
    if rows % devices:
        return 1
    here = rows // devices
    return next((n for n in range(min(count, here), here + 1) if n and here % n == 0), 1)


def _laid(t: Tensor, mesh: Mesh) -> Tensor:
    first, *more = t.type.dims[0]
    rows = Factor(first.size, (*first.axes, *mesh.time))
    return relayout(t, t.type.on(mesh).with_dims(((rows, *more), *t.type.dims[1:])))


def by_microbatch(x: Tensor) -> Tensor:
    """Returns `x` with a new first dim: in a pipeline the microbatches of `x`, with the dim that is
    split over time reduced to its part; elsewhere a dim of size 1."""
    recorder, t = current(), x.type
    late = t.mesh is not None and bool({*t.mesh.time} & {*t.split_axes})
    if recorder is None or recorder.root.stages is None or not late:
        return reshape(x, (1, *x.shape))
    (dim, above, below), count = place_of_time(t), step_count(t)
    y = reshape(x, (*x.shape[:dim], above, count, below, *x.shape[dim + 1 :]))
    y = permute(y, dim + 1, *(i for i in range(y.ndim) if i != dim + 1))
    return reshape(y, (count, *x.shape[:dim], above * below, *x.shape[dim + 1 :]))


def warn_of_microbatches(quantity: str) -> None:
    """Gives one PipelineWarning for each pipeline of several microbatches: the mean `quantity` is
    over each microbatch."""
    recorder = current()
    stages = None if recorder is None else recorder.root.stages
    if stages is not None and stages.count > 1 and quantity not in stages.pipe.warned:
        stages.pipe.warned.add(quantity)
        warnings.warn(
            f"{quantity}: its mean is not that of the whole batch on one device. Where that "
            "matters,"
            " use fewer microbatches",
            PipelineWarning,
            stacklevel=lines_up(),
        )
