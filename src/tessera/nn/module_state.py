"""Tensors that a call sets in a copy of a module, found after the call and set in the module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.errors import UsageError
from ..lang.record.tree import Path, flatten, paths
from ..lang.value.tensor import Tensor
from .module import Module


def changed_tensors(caller: str, module: Module, before: Sequence[Any]) -> dict[Path, Tensor]:
    """The tensors that a call set in `module`, whose leaves were `before`, by their paths. Raises
    UsageError if it set a new tensor, or one of another shape or dtype."""
    leaves = flatten(module)[0]
    same = len(leaves) == len(before) and all(
        isinstance(new, Tensor) == isinstance(old, Tensor)
        and (not isinstance(new, Tensor) or (new.shape, new.dtype) == (old.shape, old.dtype))
        for new, old in zip(leaves, before, strict=True)
    )
    if not same:
        raise UsageError(
            f"{caller}: a layer sets a tensor that it did not have, or of another shape or dtype",
            block=type(module).__name__,
            fix="make each tensor in __init__, and keep its shape and dtype",
        )
    return {
        path: new
        for path, new, old in zip(paths(module), leaves, before, strict=True)
        if isinstance(new, Tensor) and (new._node is not old._node or new._data is not old._data)
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
