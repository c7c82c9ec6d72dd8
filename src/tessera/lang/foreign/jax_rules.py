"""The rules for JAX's primitives: the table, and what its files share.

A rule gets tensors for operands and the primitive's params by name; params that have no meaning for
the values, such as shardings and accuracies, are taken and left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from ...core.dtypes import DType, dtype_of, held_as
from ..record.operands import as_tensor, scalar
from ..value.tensor import Tensor
from .rules import Rule, Rules

RULES = Rules("JAX", "jax_rule")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """A decorator for the rule of these primitives: it gets constants as tensors."""

    def add(f: Rule) -> Rule:
        @wraps(f)
        def run(*args: Any, **params: Any) -> Any:
            return f(*map(tensor, args), **params)

        RULES.rule(*names)(run)
        return f

    return add


def tensor(x: Any) -> Any:
    """Returns a constant of a program as a tensor; a tensor, or a function, as it is."""
    if not isinstance(x, (np.ndarray, np.generic)):
        return x
    return as_tensor(x) if x.shape else scalar(x.item(), held_as(x.dtype))


def known(x: Any) -> Any:
    """Returns the number of a scalar constant; None for other operands."""
    return x.item() if isinstance(x, (np.ndarray, np.generic)) and x.size == 1 else None


def wanted(dtype: Any) -> DType:
    """The DType for a dtype of JAX; one of 64 bits becomes the one of 32 bits."""
    name = np.dtype(dtype).name
    return held_as(np.dtype(dtype)) if name.endswith("64") else dtype_of(dtype)


def permuted(x: Tensor, order: Any) -> Tensor:
    """Returns `x` with its dims in this order."""
    order = tuple(order)
    return x if order == tuple(range(x.ndim)) else x.permute(*order)


def reshaped(x: Tensor, shape: Any) -> Tensor:
    """Returns `x` in this shape."""
    return x if x.shape == tuple(shape) else x.reshape(tuple(shape))


def inverse(order: Any) -> list[int]:
    """The permutation that undoes `order`."""
    order = list(order)
    return [order.index(i) for i in range(len(order))]
