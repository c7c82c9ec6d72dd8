"""Recorded functions as values: `from tessera import graph`."""

from .ir.graph.comm_trace import trace_lines as comm_trace
from .ir.graph.node import Graph
from .ir.graph.oracle import evaluate
from .ir.graph.text import parse
from .ir.graph.verify import verify
from .lang.grad import grad as backward
from .lang.trace import trace
from .passes.simplify import simplify

__all__ = ["Graph", "backward", "comm_trace", "evaluate", "parse", "simplify", "trace", "verify"]
