"""The closed set of ops: one value each, with shape, layout, computation and gradient."""

from . import (
    cast,
    contract,
    control,
    conv,
    create,
    custom,
    elementwise,
    indexing,
    linalg,
    local,
    movement,
    ragged,
    random,
    redistribute,
    reduce,
    user,
)
from .op import OPS, Op, op_named

__all__ = [
    "OPS",
    "Op",
    "cast",
    "contract",
    "control",
    "conv",
    "create",
    "custom",
    "elementwise",
    "indexing",
    "linalg",
    "local",
    "movement",
    "op_named",
    "ragged",
    "random",
    "redistribute",
    "reduce",
    "user",
]
