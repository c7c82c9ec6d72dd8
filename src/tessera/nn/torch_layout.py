"""Checks of loaded weights: shapes, dtypes, and PyTorch's [out, in] matrices of linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from ..core.errors import lines_up
from ..core.layout import TensorType
from ..core.tensor_checks import alike

TRANSPOSED: set[type] = set()  # classes whose `weight` [in, out] is the transpose of PyTorch's


def transposed_names(modules: Iterable[tuple[str, object]]) -> set[str]:
    """The names of the weights of `modules` that are transposes of PyTorch's."""
    kinds = tuple(TRANSPOSED)
    return {f"{name}.weight".lstrip(".") for name, m in modules if isinstance(m, kinds)}


def need_fit(
    name: str, expected: TensorType, actual: TensorType, value: Any, transposed: bool = False
) -> None:
    """Raises ShapeError or DTypeError if `value`, of the type `actual`, does not fit the weight
    `name`. Warns if a `transposed` weight is square, so that its shape does not show its order, and
    `value` is a contiguous PyTorch tensor."""
    fix = "load a checkpoint of a model with the same sizes"
    if transposed and expected.shape == actual.shape[::-1]:
        fix = "PyTorch keeps it as [out, in]: give w.T, also of linear layers that are square"
    alike(name, expected, actual, fix)
    theirs = type(value).__module__.partition(".")[0] == "torch"
    if (
        transposed
        and theirs
        and 1 < expected.shape[0] == expected.shape[1]
        and value.is_contiguous()
    ):
        warnings.warn(
            f"{name} is square and of PyTorch, which keeps it as [out, in]; it is taken as it is,"
            " [in, out]\n"
            "  fix : give w.T; of one that is turned already w.numpy(), without this warning",
            stacklevel=lines_up(),
        )
