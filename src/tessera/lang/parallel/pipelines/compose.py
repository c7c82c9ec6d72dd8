"""The three ways to make a pipeline: `graph.pipeline`, `pipeline.compose`, `pipeline.run`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ....core.checks import axes_of, function_of, unfit
from ....core.contexts import above
from ....core.declared import Count
from ....core.errors import UsageError
from ....core.mesh import Mesh
from ....ir.schedule.pipelines.orders import named_schedule
from ...program.training_step import Stage
from .pipe import Pipe


def _checked(name: str, axis: object, schedule: object) -> str:
    axes = axes_of(name, axis)
    if len(axes) != 1:
        raise UsageError(
            f"{name}: a pipeline lies along one axis", axes=axes, fix='name one: mesh_axes=("pp",)'
        )
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        named_schedule(schedule)
    return axes[0]


def names_of(
    name: str,
    value: object,
    argument: str = "batch",
    fix: str = 'name arguments, such as batch="images"',
) -> tuple[str, ...] | None:
    """Returns the names in `value`, an `argument`. Raises UsageError if they are not names."""
    names = (value,) if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, Sequence) or not all(isinstance(n, str) and n for n in names):
        raise unfit(name, argument, value, fix)
    return tuple(names)


def _parts(name: str, stages: object) -> list[Callable[..., Any]]:
    if not isinstance(stages, (list, tuple)) or not stages:
        raise unfit(name, "stages", stages, "give a list of functions")
    return [function_of(name, "a stage", s) for s in stages]


def pipeline(
    stages: Sequence[Callable[..., Any]],
    mesh: Mesh | None = None,
    axis: str = "pp",
    *,
    schedule: Any = "1F1B",
    microbatches: Count | None = None,
    chunks: Count | None = None,
    batch: str | Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], Pipe]:
    """`@graph.pipeline(stages=[encoder, decoder], axis="pp")`: runs a model as a pipeline.

    It decorates the function that calls the `stages`. The stages are placed along `axis` and
    microbatches go through them by `schedule` (guide 3, 4.4): a name ("GPipe", "1F1B",
    "Interleaved1F1B", "ZB-H1", "ZB-H2", "ZBV", "DualPipeV"), a table or a CSV file. If there are
    more functions than stages, neighbours are grouped by cost. The batch is found by the first
    argument of integers or bools, such as tokens, or else by the first that is a tensor and no
    parameter; tensors with as many rows are split into microbatches. `batch` names the arguments
    instead. This changes the speed and memory only.

    Raises UsageError if `stages` is not a list of functions or a setting is unknown, MeshError at
    the call if no mesh has the axis.
    """
    axis = _checked("pipeline", axis, schedule)
    parts = _parts("pipeline", stages)

    def wrap(fn: Callable[..., Any]) -> Pipe:
        function_of("pipeline", "the model", fn)
        body = fn if all(isinstance(p, Stage) for p in parts) else None
        name = getattr(fn, "__name__", "model")
        made = Pipe(parts, axis, mesh, schedule, microbatches, chunks, name, body=body)
        made.batch = names_of("pipeline", batch)
        functools.update_wrapper(made, fn, updated=())
        return made

    return above("graph.pipeline", wrap)


def compose(
    stages: Count,
    assign: Sequence[Callable[..., Any]],
    *,
    mesh: Mesh | None = None,
    axis: str = "pp",
    schedule: Any = "1F1B",
    microbatches: Count | None = None,
    chunks: Count | None = None,
    batch: str | Sequence[str] | None = None,
) -> Pipe:
    """A pipeline of `stages` stages that runs the functions `assign` one after the other.

    If there are more functions than stages, neighbours are grouped by cost (guide 2, 3.3). `batch`
    names arguments of the first function, as in `graph.pipeline`. Raises UsageError if there are
    fewer functions than stages.
    """
    axis = _checked("compose", axis, schedule)
    parts = _parts("compose", assign)
    if len(parts) < stages:
        raise UsageError(
            f"compose: {len(parts)} functions for {stages} stages",
            fix="give a function for each stage, or fewer stages",
        )
    pipe = Pipe(parts, axis, mesh, schedule, microbatches, chunks, "compose", stages)
    pipe.batch = names_of("compose", batch)
    return pipe


def run(
    mesh_axes: str | Sequence[str] = ("pp",),
    schedule: Any = "1F1B",
    microbatches: Count | None = None,
    *,
    mesh: Mesh | None = None,
    chunks: Count | None = None,
    batch: str | Sequence[str] | None = None,
    cut_at: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Pipe]:
    """`@pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=16)`: pipelines a function.

    The function is split into stages of similar cost, at points where only one value crosses (guide
    2, 3.3). `batch` names arguments, as in `graph.pipeline`. `cut_at` names modules by the ends of
    their scopes, in order, such as `("layers.8", "layers.16")` of a model from PyTorch: a part
    begins where each is first called, and the stages are these parts. Raises UsageError if
    `mesh_axes` is not one axis or a setting is unknown; at the call, if no module has such a name.
    """
    axis = _checked("run", mesh_axes, schedule)
    paths = names_of("run", cut_at, "cut_at", 'name modules, such as cut_at="layers.8"') or ()

    def wrap(fn: Callable[..., Any]) -> Pipe:
        function_of("run", "the function", fn)
        made = Pipe(
            [fn], axis, mesh, schedule, microbatches, chunks, getattr(fn, "__name__", "model")
        )
        made.batch, made.cut_at = names_of("run", batch), paths
        functools.update_wrapper(made, fn, updated=())
        return made

    return above("pipeline.run", wrap)
