"""Debugging of programs: `ts.debug.nan_origin(step, model, batch)`, `ts.debug.compare(a, b)`."""

from typing import TYPE_CHECKING

from .core.public import public
from .lang.program.debug import breakpoint, check_finite, print
from .observe.compare import compare
from .observe.nan_origin import nan_origin
from .observe.statistics import activations, statistics

__all__ = [
    "activations", "breakpoint", "check_finite", "compare", "nan_origin", "print", "statistics",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("debug", globals())
