"""The flat dict of an optimizer's `state_dict`, separate from the optimizer's state.

Values loaded into the dict reach the state only through `load_state_dict`.

>>> sorted(FlatState({"step": 1, "m.weight": 2}).items())
[('m.weight', 2), ('step', 1)]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import numpy as np

from ...core.errors import warn_no_effect
from ..value.tensor import Tensor


class FlatState(dict[str, Any]):
    """A flat optimizer state. Gives an OptionWarning if it was filled, and is deleted without being
    read."""

    unread = False

    def __del__(self) -> None:
        if self.unread and not sys.is_finalizing():
            warn_no_effect(
                "checkpoint.load: the state_dict() of an optimizer",
                "it is apart from the state, and what was loaded into it was never read",
                means="the optimizer's state has the values of before",
                fix="give the state itself, or: values = opt.state_dict(state);"
                " checkpoint.load(..., values); state = opt.load_state_dict(state, values)",
            )


def _reading(name: str) -> Callable[..., Any]:
    inner = getattr(dict, name)

    @wraps(inner)
    def read(self: FlatState, *args: Any) -> Any:
        self.unread = False
        return inner(self, *args)

    return read


for _name in ("__getitem__", "__iter__", "copy", "get", "items", "keys", "pop", "values", "__or__"):
    setattr(FlatState, _name, _reading(_name))


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a flat state as tensors and arrays, by names with ".". A checkpoint
    loaded by name has names with "/" between kind and weight."""
    arrays = {k: v if isinstance(v, Tensor) else np.asarray(v) for k, v in values.items()}
    return {k.replace("/", ".") if isinstance(k, str) else k: v for k, v in arrays.items()}


def flat_states(tree: Any) -> Iterator[FlatState]:
    """Yields each FlatState in `tree`."""
    if isinstance(tree, FlatState):
        yield tree
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from flat_states(x)
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from flat_states(x)
