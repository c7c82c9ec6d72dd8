"""Rules for the ops of PyTorch's ATen: each a function on tensors, by the op's name.

The files are kinds of ops; `table.py` has the table and what they share.
"""

from . import (  # noqa: F401  # they fill the table
    attention,
    convolutions,
    creation,
    elementwise,
    higher_order,
    indexing,
    losses,
    movement,
    normalizations,
    pairs,
    pooling,
    products,
    random,
    reductions,
    sizes,
    sorting,
)
from .table import ATEN, rule

__all__ = ["ATEN", "rule"]
