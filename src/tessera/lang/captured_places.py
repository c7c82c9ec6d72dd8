"""Where is what a function finds outside of itself, and what of it is compared between calls?"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from .host_data import is_host_array
from .static_arguments import Same, kept

GONE: Any = Same("nothing")
Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A global, a cell of a closure or an object itself, or what is below one of them."""

    root: Any  # a dict or a cell; without a key the object itself
    key: str | None
    label: str
    path: tuple[tuple[bool, Any], ...] = ()  # (is it an attribute, its name or key)

    @property
    def name(self) -> Name:
        return id(self.root), self.key, self.path

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
        if self.key is not None:
            x = x[self.key] if isinstance(x, dict) else x.cell_contents
        for attribute, key in path:
            x = getattr(x, key) if attribute else x[key]
        return x

    @property
    def above(self) -> Name | None:
        """The name of the place that this one is in."""
        return (id(self.root), self.key, self.path[:-1]) if self.path else None

    @property
    def inherited(self) -> bool:
        """Whether it is an attribute that an object has from its class, or a class from another."""
        if not self.path or not self.path[-1][0]:
            return False
        holder, name = self._at(self.path[:-1]), self.path[-1][1]
        return name not in getattr(holder, "__dict__", (name,))

    def put(self, value: Any) -> None:
        """Puts `value` there; GONE removes what is there."""
        holder: Any = self.root
        attribute = not isinstance(holder, dict)
        key: Any = "cell_contents" if attribute else self.key
        if self.path:
            holder, (attribute, key) = self._at(self.path[:-1]), self.path[-1]
        if value is GONE:
            with contextlib.suppress(AttributeError):
                delattr(holder, key) if attribute else holder.pop(key, None)
        elif attribute:
            setattr(holder, key, value)
        else:
            holder[key] = value


def mark_of(x: Any) -> object:
    """The part of an object outside that is compared between calls, if it is not a tensor."""
    if isinstance(x, dict):
        return dict, tuple(x)
    if isinstance(x, (list, tuple)):
        return type(x), len(x)
    return kept(x) if isinstance(x, _VALUES) or is_host_array(x) else Same(x)


_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, Enum)
_VALUES = (
    int, float, complex, str, bytes, bytearray, array, type(None), set, frozenset, deque,
    np.generic,
)  # fmt: skip


def is_plain(x: Any) -> bool:
    """Whether `x` is a number, or its like, that cannot change by itself."""
    return isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))


Looked = dict[Name, tuple[Place, Any, object]]  # (place, what is there, its mark)
