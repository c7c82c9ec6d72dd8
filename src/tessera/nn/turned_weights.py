"""Does a weight fit that is loaded? PyTorch keeps the matrix of a linear layer as [out, in]."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from ..core.checks import alike
from ..core.errors import lines_up
from ..core.layout import TensorType

TURNED: set[type] = set()  # classes whose `weight` [in, out] is the transpose of PyTorch's


def turned_names(modules: Iterable[tuple[str, object]]) -> set[str]:
    """The names of the weights of `modules` that are the transpose of PyTorch's."""
    kinds = tuple(TURNED)
    return {f"{name}.weight".lstrip(".") for name, m in modules if isinstance(m, kinds)}


def need_fit(
    what: str, have: TensorType, given: TensorType, value: Any, turned: bool = False
) -> None:
    """Raises ShapeError or DTypeError if `value`, of the type `given`, cannot be the weight `what`.
    Warns of a `turned` one whose shape does not tell, and that lies as PyTorch keeps it."""
    fix = "load a checkpoint of a model with the same sizes"
    if turned and have.shape == given.shape[::-1]:
        fix = "PyTorch keeps it as [out, in]: give w.T, also of linear layers that are square"
    alike(what, have, given, fix)
    theirs = type(value).__module__.partition(".")[0] == "torch"
    if turned and theirs and 1 < have.shape[0] == have.shape[1] and value.is_contiguous():
        warnings.warn(
            f"{what} is square and of PyTorch, which keeps it as [out, in]; it is taken as it is,"
            " [in, out]\n"
            "  fix : give w.T; of one that is turned already w.numpy(), without this warning",
            stacklevel=lines_up(),
        )
