"""Kinds of values: a description for errors, and a predicate. Tables of settings have one per key.

>>> words, fits = whole_numbers(1)
>>> words, fits(3), fits(0), fits(True)
('a whole number of at least 1', True, False, False)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

Kind = tuple[str, Callable[[Any], bool]]


def is_whole(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an integer of Python or NumPy; a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether `value` is a number of Python or NumPy; a bool is not."""
    return is_whole(value) or isinstance(value, (float, np.floating))


def python_numbers(value: Any) -> Any:
    """Returns `value` with Python's numbers in place of NumPy's, which have no `bit_length` and no
    JSON.

    >>> python_numbers(np.int64(3)), python_numbers((np.float64(0.5), 2)), python_numbers(None)
    (3, (0.5, 2), None)
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value)(map(python_numbers, value)) if type(value) in (tuple, list) else value


def is_string(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_list(value: object, of: Callable[[Any], bool], count: int | None = None) -> bool:
    """Returns whether `value` is a list, a tuple, a range or an array whose elements all satisfy
    `of`; with `count`, whether it also has this length."""
    if isinstance(value, (tuple, list, range)) or (isinstance(value, np.ndarray) and value.ndim):
        return count in (None, len(value)) and all(map(of, value))
    return False


_WITHIN: dict[str, Callable[[float, float], bool]] = {
    "least": operator.ge, "most": operator.le, "above": operator.gt, "below": operator.lt,
}  # fmt: skip


def within(x: float, bounds: Mapping[str, float]) -> bool:
    """Returns whether `x` is within `bounds`: "least", "most", "above", "below"."""
    return all(_WITHIN[bound](x, limit) for bound, limit in bounds.items())


def _bounds_text(bounds: Mapping[str, float]) -> str:
    """Returns the finite bounds in words."""
    told = {how: x for how, x in bounds.items() if math.isfinite(x)}
    if told.keys() == {"least", "most"}:
        return f" from {told['least']} to {told['most']}"
    words = {"least": "of at least", "most": "of at most"}
    return " " * bool(told) + " and ".join(f"{words.get(how, how)} {x}" for how, x in told.items())


def whole_numbers(least: int | None = None, most: int | None = None) -> Kind:
    """Returns the kind of integers from `least` to `most`.

    >>> whole_numbers(0, 7)[0]
    'a whole number from 0 to 7'
    """
    bounds = {k: x for k, x in (("least", least), ("most", most)) if x is not None}
    return "a whole number" + _bounds_text(bounds), lambda x: is_whole(x) and within(x, bounds)


def numbers(**bounds: float) -> Kind:
    """Returns the kind of numbers within the bounds `least`, `most`, `above`, `below`.

    >>> numbers(least=0, below=1)[0], numbers(above=0, below=math.inf)[0]
    ('a number of at least 0 and below 1', 'a number above 0')
    """
    return "a number" + _bounds_text(bounds), lambda x: is_number(x) and within(x, bounds)


def choices(*options: object) -> Kind:
    """Returns the kind of some words, True, False or None.

    >>> choices(True, "bf16", "fp16")[0]
    'True, "bf16" or "fp16"'
    """
    words = [f'"{k}"' if isinstance(k, str) else str(k) for k in options]
    said = ", ".join(words[:-1]) + " or " * (len(words) > 1) + words[-1]
    # `is` for other values, as 1 == True.
    return said, lambda x: x in options if isinstance(x, str) else any(x is k for k in options)


def or_none(kind: Kind) -> Kind:
    """Returns the kind of the values of `kind` and None."""
    return f"{kind[0]}, or None", lambda x: x is None or kind[1](x)


FLAG: Kind = ("True or False", lambda x: isinstance(x, (bool, np.bool_)))
STRING: Kind = ("a string", is_string)
