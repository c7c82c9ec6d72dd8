"""Module tree: the tensors and modules inside a module, with their dotted names.

A tensor may have several names, such as a table that all blocks share; a name belongs to one
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import UsageError
from ..lang.record.tree import flatten, tree_fill
from ..lang.value.tensor import Tensor


class Holder:
    """The base class of modules: an object with tensors as attributes."""


def direct(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of an attribute, except those inside other modules."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, Holder):
        for _, v in inside(value):
            yield from direct(v)


def tensors_of(module: Holder, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yields (dotted name, tensor) of all tensors in `module`. Raises UsageError if two have the
    same name."""
    known: dict[str, Tensor] = {}
    for name, t in walk(module, prefix.removesuffix(".")):
        if known.setdefault(name, t) is not t:
            raise UsageError(
                f"{type(module).__name__}: two tensors have the name {name!r}",
                fix='rename one key, as of {1: a, "1": b} or {"x.y": a, "x": {"y": b}}',
            )
        yield name, t


def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields (dotted name, tensor) of `value`, if it is a tensor, and of all tensors inside it."""
    if isinstance(value, Tensor):
        yield name, value
    for key, v in inside(value):
        yield from walk(v, f"{name}.{key}" if name else key)


def inside(value: Any) -> list[tuple[str, Any]]:
    """(key, value) of the current contents of a module, dict, list or tuple."""
    value = value.__dict__ if isinstance(value, Holder) else value
    if isinstance(value, dict):
        return [(str(k), v) for k, v in value.items()]
    return [(str(k), v) for k, v in enumerate(value)] if isinstance(value, (list, tuple)) else []


def modules_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, module) of `value`, if it is a module, and of all modules inside it."""
    if isinstance(value, Holder):
        yield name, value
    for key, v in inside(value):
        yield from modules_of(v, f"{name}.{key}" if name else key)


def outer_modules(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, module) for the modules of an attribute, without those inside of
    them."""
    if isinstance(value, Holder):
        yield name, value
    else:
        for key, v in inside(value):
            yield from outer_modules(v, f"{name}.{key}")


def put_buffer(old: Tensor, new: Tensor) -> None:
    """Replaces `old` by `new` if `old` is a buffer of a module."""
    module = old.home() if old.home is not None else None
    if module is not None:
        swap(module, {id(old): new})


def swap(module: Holder, new: Mapping[int, Tensor]) -> None:
    """Replaces buffers by the tensors that `new` maps their ids to, under each of their names."""
    leaves = flatten(module)[0] if new else []
    if any(id(t) in new for t in leaves):
        for t in leaves:
            if id(t) in new:
                new[id(t)].home = t.home
        tree_fill(module, iter([new.get(id(t), t) for t in leaves]))
