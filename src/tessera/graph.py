"""Recorded functions as values: `from tessera import graph`."""

from .ir.graph.node import Graph
from .ir.graph.oracle import evaluate
from .ir.graph.text import parse
from .ir.graph.verify import verify
from .lang.grad import grad as backward
from .lang.trace import trace
from .passes.simplify import simplify

__all__ = ["Graph", "backward", "evaluate", "parse", "simplify", "trace", "verify"]
