"""The closed set of ops: one value each, with shape, layout, computation and gradient."""

from . import (
    contract,
    control,
    conv,
    custom,
    elementwise,
    indexing,
    linalg,
    local,
    movement,
    random,
    redistribute,
    reduce,
    user,
)
from .op import OPS, Op, op_named

__all__ = [
    "OPS",
    "Op",
    "contract",
    "control",
    "conv",
    "custom",
    "elementwise",
    "indexing",
    "linalg",
    "local",
    "movement",
    "op_named",
    "random",
    "redistribute",
    "reduce",
    "user",
]
