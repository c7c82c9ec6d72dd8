"""Contents of an object whose class is registered with JAX as a pytree node."""

from __future__ import annotations

from typing import Any

from jax import tree_util


def opened(x: object) -> tuple[tuple[Any, ...], list[Any], Any] | None:
    """Returns (names of the children of `x`, the children, a treedef that rebuilds such an object);
    None if `x` is no container. Equal treedefs rebuild equal objects from equal children."""
    if tree_util.all_leaves((x,)):
        return None
    rows, tree = tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    names, values = [], []
    for (key,), value in rows:
        names.append(getattr(key, "name", None) or _attribute(x, value) or getattr(key, "key", key))
        values.append(value)
    return tuple(names), values, tree


def _attribute(x: object, value: object) -> str:
    """Returns the name of the attribute of `x` that is `value`, for a child that JAX knows only by
    number; "" if there is not exactly one."""
    found = [n for n, v in getattr(x, "__dict__", {}).items() if v is value]
    return found[0] if len(found) == 1 else ""
