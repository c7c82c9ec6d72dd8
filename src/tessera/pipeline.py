"""Pipelines: `from tessera import pipeline`."""

from .ir.schedule.check_table import verify_table
from .ir.schedule.orders import SCHEDULES, pipeline_table
from .ir.schedule.simulate import PipelineWarning, simulate
from .ir.schedule.tables import Action, Table
from .lang.pipe import Pipe, compose, run
from .show.pipeline_picture import pipeline_svg, pipeline_text, show

__all__ = [
    "SCHEDULES", "Action", "Pipe", "PipelineWarning", "Table", "compose", "pipeline_svg",
    "pipeline_table", "pipeline_text", "run", "show", "simulate", "verify_table",
]  # fmt: skip
