"""Pipelines: `from tessera import pipeline`."""

from typing import TYPE_CHECKING

from .core.public import public
from .ir.schedule.pipelines.check import verify_table
from .ir.schedule.pipelines.orders import SCHEDULES, pipeline_table
from .ir.schedule.pipelines.simulate import PipelineWarning, Timeline, simulate
from .ir.schedule.pipelines.tables import Action, Table
from .lang.parallel.pipelines.compose import compose, run
from .lang.parallel.pipelines.pipe import Pipe
from .show.pipeline_picture import pipeline_svg, pipeline_text
from .show.pipeline_picture import show as show_table

__all__ = [
    "SCHEDULES", "Action", "Pipe", "PipelineWarning", "Table", "compose", "pipeline_svg",
    "pipeline_table", "pipeline_text", "run", "show", "simulate", "verify_table",
]  # fmt: skip


def show(what: Pipe | Table | Timeline) -> None:
    """Prints the actions of each rank over time; for a `Pipe`, also the placement of its stages.

    Raises UsageError if the `Pipe` has not been called yet.
    """
    if isinstance(what, Pipe):
        print(what.plan_text())
    show_table(what.table if isinstance(what, Pipe) else what)


if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("pipeline", globals())
