"""Recorded functions as values: `from tessera import graph`."""

from typing import TYPE_CHECKING

from .core.public import public
from .ir.graph.node import Graph
from .ir.graph.oracle import evaluate
from .ir.graph.text import parse
from .ir.graph.verify import verify
from .ir.schedule.comm_trace import trace_lines as comm_trace
from .lang.jit.capture import capture
from .lang.parallel.pipelines.compose import pipeline
from .lang.program.training_step import backward, parameters, stage, training_step
from .observe.trace import trace
from .passes.simplify import simplify

__all__ = [
    "Graph", "backward", "capture", "comm_trace", "evaluate", "parameters", "parse", "pipeline",
    "simplify", "stage", "trace", "training_step", "verify",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("graph", globals())
