"""`Place`: a variable, attribute or item outside of a recorded function that it reads or writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import CellType
from typing import Any

import numpy as np

from ..value.host_data import is_host_array
from .static_arguments import Same, cache_key

GONE: Any = Same("nothing")
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, Enum)


@dataclass(frozen=True, slots=True)
class Place:
    """A variable, an attribute of a module, or an item of a container of one."""

    root: Any  # the dict of a global or an attribute, the cell of a closure, a module, a list
    key: Any
    label: str
    compared: bool = True  # compared at each call also if it is a number

    @property
    def name(self) -> tuple[int, object]:
        return id(self.root), self.key

    def now(self) -> Any:
        """Returns the current value, or GONE if there is none."""
        x = self.root
        try:
            if isinstance(x, (dict, list)):
                return x[self.key]
            return x.cell_contents if isinstance(x, CellType) else x.__dict__[self.key]
        except (LookupError, ValueError):
            return GONE

    def put(self, value: Any) -> None:
        """Sets the value, or removes it for GONE, without the `__setattr__` or `__setitem__` of a
        module or its containers."""
        x, key = self.root, self.key
        if isinstance(x, CellType):
            if value is GONE:
                del x.cell_contents
            else:
                x.cell_contents = value
            return
        rows: Any = x if isinstance(x, (dict, list)) else x.__dict__
        kind = list if isinstance(rows, list) else dict
        if value is not GONE:
            kind.__setitem__(rows, key, value)
        elif self.now() is not GONE:
            kind.__delitem__(rows, key)

    def assign(self, value: Any) -> None:
        """Sets the value as a user's assignment does."""
        if isinstance(self.root, (dict, list)):
            self.root[self.key] = value
        else:
            setattr(self.root, self.key, value)


def mark_of(x: Any) -> object:
    """Returns the key by which a variable is compared: the value of numbers and arrays, else the
    identity."""
    return cache_key(x) if is_plain(x) or is_host_array(x) else Same(x)


def is_plain(x: Any) -> bool:
    """Returns whether `x` is a number, a string, None, an enum member, or a tuple of these."""
    return isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))
