"""Comparison keys of static arguments, by their contents.

An object may be changed between calls: a namespace of settings, a set, `module.cfg`. So a recording
stores a key of its contents, not the object.

>>> from types import SimpleNamespace
>>> cfg = SimpleNamespace(rate=0.5, sizes={1, 2})
>>> before = cache_key(cfg)
>>> before == cache_key(SimpleNamespace(rate=0.5, sizes={2, 1}))
True
>>> cfg.sizes.add(3)
>>> before == cache_key(cfg)
False
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from ...core.errors import TesseraError, lines_up
from ..value.host_data import is_host_array, lent
from ..value.tensor import Tensor

MOST = 2000
"""An object with more values inside than this is compared by identity, with a warning."""
_NUMBERS = (bool, int, float, complex, np.generic)
_ITSELF = (str, bytes, type(None), type(...), range, Enum, np.dtype)
_ONE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, Tensor,
)  # fmt: skip


class StaticWarning(UserWarning):
    """Warns that a static argument is too large to be compared by its contents."""


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """An object that is compared by identity."""

    x: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.x is self.x

    __hash__ = None  # type: ignore[assignment]


class _TooMany(Exception):
    pass


def cache_key(x: object, warn: bool = False) -> object:
    """Returns the comparison key of `x`: a program recorded for one object is valid for all with an
    equal key.

    With `warn` it gives a StaticWarning if `x` is too large to be compared by its contents.
    """
    kind = type(x)
    if kind is str or kind is int or kind is bool or kind is Same:
        return x
    if kind is float:
        return x if x and x == x else str(x)  # as text, -0.0 differs from 0.0 and NaN equals NaN
    try:
        return _Look().at(x)
    except _TooMany:
        if warn:
            warnings.warn(
                f"a static argument of type {kind.__name__} has more than {MOST} values inside:"
                " changes in it are not seen; give a compiled function what it needs of it",
                StaticWarning,
                stacklevel=lines_up(),
            )
        return Same(x)


def _copied(x: Any) -> object:
    try:
        return copy.copy(x)
    except Exception:  # a user's __copy__ may raise anything
        return Same(x)


class _Look:
    def __init__(self) -> None:
        self.count = 0
        self.above: dict[int, int] = {}

    def at(self, x: Any) -> object:
        """Returns the key of `x`: itself, its identity, or its contents. An object inside of itself
        is named by its depth. Raises _TooMany beyond MOST objects."""
        self.count += 1
        if self.count > MOST:
            raise _TooMany
        if isinstance(x, _NUMBERS):  # `==` of a NumPy number with a container is elementwise
            return type(x), str(x)
        if isinstance(x, _ITSELF):
            return x
        if isinstance(x, _ONE):
            return Same(x)
        if id(x) in self.above:
            return "above", self.above[id(x)]
        self.above[id(x)] = len(self.above)
        try:
            return self.inside(x)
        finally:
            del self.above[id(x)]

    def inside(self, x: Any) -> object:
        """The key of the contents of a container, an array, a bound method, or of an object by its
        fields."""
        kind = type(x)
        if is_host_array(x):
            try:
                x = x if isinstance(x, np.ndarray) else lent(x)
            except TesseraError:  # the host cannot read its values
                return Same(x)
            return (kind, x.dtype.str, x.shape, x.tobytes()) if x.nbytes <= 1 << 20 else Same(x)
        if isinstance(x, (dict, types.MappingProxyType)):
            rows = tuple([(self.at(k), self.at(v)) for k, v in x.items()])
            return kind, rows, self.fields(x)
        if isinstance(x, (list, tuple, deque)):
            return kind, tuple([self.at(v) for v in x]), self.fields(x)
        if isinstance(x, (set, frozenset)):
            self.count += len(x)
            return kind, frozenset(x), self.fields(x)
        if isinstance(x, types.MethodType):
            return kind, Same(x.__func__), self.at(x.__self__)
        if isinstance(x, functools.partial):
            return kind, self.at(x.func), self.at(x.args), self.at(x.keywords)
        field_values = self.fields(x)
        if field_values:
            return kind, field_values
        if "__eq__" not in {n for c in kind.__mro__[:-1] for n in c.__dict__}:
            return Same(x)
        # A value such as a Fraction is its own key; without a hash it is mutable, so copied.
        return x if getattr(kind, "__hash__", None) else _copied(x)

    def fields(self, x: Any) -> tuple[object, ...]:
        have = getattr(x, "__dict__", None)
        rows = list(have.items()) if isinstance(have, dict) else []
        for c in type(x).__mro__:
            names = c.__dict__.get("__slots__", ())
            for n in (names,) if isinstance(names, str) else names:
                if n not in ("__dict__", "__weakref__") and hasattr(x, n):
                    rows.append((n, getattr(x, n)))
        return tuple([(n, self.at(v)) for n, v in rows])
