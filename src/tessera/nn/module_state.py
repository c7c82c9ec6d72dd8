"""Tensors that a call sets in a copy of a module, found after the call and set in the module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.errors import UsageError
from ..lang.record.tree import Path, flatten, paths
from ..lang.value.tensor import Tensor
from .module import Module


def values_of(module: Module) -> list[Any]:
    """The (shape, dtype, node, data) of each tensor of `module`, and None for another leaf."""
    return [
        (x.shape, x.dtype, x._node, x._data) if isinstance(x, Tensor) else None
        for x in flatten(module)[0]
    ]


def changed_tensors(caller: str, module: Module, before: Sequence[Any]) -> dict[Path, Tensor]:
    """The tensors that a call set in `module`, whose `values_of` were `before`, by their paths.
    Raises UsageError if it set a new tensor, or one of another shape or dtype."""
    leaves, after = flatten(module)[0], values_of(module)
    if [x and x[:2] for x in after] != [x and x[:2] for x in before]:
        raise UsageError(
            f"{caller}: a layer sets a tensor that it did not have, or of another shape or dtype",
            block=type(module).__name__,
            fix="make each tensor in __init__, and keep its shape and dtype",
        )
    return {
        path: new
        for path, new, now, old in zip(paths(module), leaves, after, before, strict=True)
        if now and (now[2] is not old[2] or now[3] is not old[3])
    }


def set_tensors(module: Module, values: Iterable[tuple[Path, Tensor]]) -> None:
    """Sets the tensors of `module` at these paths."""
    for (*way, last), value in values:
        at: Any = module
        for step in way:
            at = getattr(at, step) if isinstance(at, Module) else at[step]
        if isinstance(at, Module):
            setattr(at, last, value)
        else:
            at[last] = value
