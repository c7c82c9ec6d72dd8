"""Places outside of a recorded function that it reads and writes: variables, attributes, items."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import CellType
from typing import Any

import numpy as np

from .host_data import is_host_array
from .static_arguments import Same, kept

GONE: Any = Same("nothing")
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, Enum)
Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A variable, an attribute of a module, an item of a container; or a place inside of one."""

    root: Any  # the dict of a global or an attribute, the cell of a closure, a module, a list
    key: Any
    label: str
    path: tuple[tuple[bool, Any], ...] = ()  # (whether it is an attribute, its name or key)

    @property
    def name(self) -> Name:
        return id(self.root), self.key, self.path

    @property
    def above(self) -> Name | None:
        """The name of the place that this one is in."""
        return (id(self.root), self.key, self.path[:-1]) if self.path else None

    def below(self, attribute: bool, key: Any) -> Place:
        label = f"{self.label}.{key}" if attribute else f"{self.label}[{key!r}]"
        return Place(self.root, self.key, label, (*self.path, (attribute, key)))

    def now(self) -> Any:
        """What is there, or GONE."""
        try:
            return self._at(self.path)
        except (LookupError, AttributeError, ValueError, TypeError):
            return GONE

    def mark(self) -> object:
        """What of it is compared between calls."""
        return mark_of(self.now())

    def _at(self, path: tuple[tuple[bool, Any], ...]) -> Any:
        x = self.root
        if isinstance(x, (dict, list)):
            x = x[self.key]
        else:
            x = x.cell_contents if isinstance(x, CellType) else x.__dict__[self.key]
        for attribute, key in path:
            x = getattr(x, key) if attribute else x[key]
        return x

    def put(self, value: Any, silently: bool = False) -> None:
        """Puts `value` there, GONE to remove what is there; `silently` past what a module does when
        an attribute or an item is set."""
        holder: Any = self.root
        attribute = not isinstance(holder, (dict, list))
        key: Any = "cell_contents" if isinstance(holder, CellType) else self.key
        if self.path:
            holder, (attribute, key) = self._at(self.path[:-1]), self.path[-1]
        if attribute and silently and not isinstance(holder, CellType):
            holder, attribute = holder.__dict__, False
        if value is GONE and self.now() is not GONE:
            delattr(holder, key) if attribute else holder.__delitem__(key)
        elif value is GONE:
            return
        elif attribute:
            setattr(holder, key, value)
        elif silently:
            (list if isinstance(holder, list) else dict).__setitem__(holder, key, value)
        else:
            holder[key] = value


def mark_of(x: Any) -> object:
    """What is compared of a variable that is no tensor; of a container of tensors its items."""
    if is_plain(x) or is_host_array(x):
        return kept(x)
    if isinstance(x, dict):
        return dict, tuple(x)
    return (type(x), len(x)) if isinstance(x, (list, tuple)) else Same(x)


def is_plain(x: Any) -> bool:
    """Whether `x` is a number, a string, or a tuple of these."""
    return isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))
