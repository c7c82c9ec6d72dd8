"""The closed set of ops: one value each, with shape, layout, computation and gradient."""

from . import (
    contract,
    control,
    elementwise,
    indexing,
    movement,
    random,
    redistribute,
    reduce,
)
from .op import OPS, Op, op_named

__all__ = [
    "OPS",
    "Op",
    "contract",
    "control",
    "elementwise",
    "indexing",
    "movement",
    "op_named",
    "random",
    "redistribute",
    "reduce",
]
