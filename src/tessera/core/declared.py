"""Declarations of arguments: the annotation of a public function's parameter says which values fit,
and the function checks them before it runs.

>>> import numpy as np
>>> def topk(x, k: Count, op: Annotated[str, OneOf("sum", "mean")] = "sum"): ...
>>> fitted(topk, declarations(topk), "topk", (0, np.int64(2)), {})
(0, 2)
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

from .checks import flag, function_of, instance, listed, mapping, number, one_of, string, whole
from .errors import TesseraError
from .value_checks import is_number


class Check:
    """A check of `core.checks` with its arguments; subclasses say which one."""

    function: Callable[..., Any]

    def __init__(self, *args: Any, **bounds: float) -> None:
        self.args, self.bounds = args, bounds

    def check(self, name: str, what: str, value: Any) -> Any:
        """Returns `value`, the argument `what` of `name`. Raises UsageError if it does not fit."""
        return type(self).function(name, what, value, *self.args, **self.bounds)


class Whole(Check):
    """An integer: `Whole(1)` is at least 1, `Whole(0, 7)` from 0 to 7."""

    function = staticmethod(whole)


class Number(Check):
    """A number with the bounds `least`, `most`, `above`, `below`."""

    function = staticmethod(number)


class OneOf(Check):
    """One of several words."""

    function = staticmethod(lambda name, what, value, *words: one_of(name, what, value, words))


class Given(Check):
    """An object of the annotated class. `Given("give an nn.GPT")` has the fix of the error."""

    function = staticmethod(instance)


class Called(Check):
    """A function, or another object that can be called."""

    function = staticmethod(function_of)


class Mapped(Check):
    """A mapping, such as a dict; with the fix of the error."""

    function = staticmethod(mapping)


class Listed(Check):
    """A list of whole numbers, or of numbers with `is_number`; with `count`, of so many."""

    function = staticmethod(listed)


class OnOff(Check):
    """True or False."""

    function = staticmethod(flag)


class Text(Check):
    """A string."""

    function = staticmethod(string)


Integer = Annotated[int, Whole()]
Natural = Annotated[int, Whole(0)]
Count = Annotated[int, Whole(1)]
Real = Annotated[float, Number(least=-math.inf)]
Positive = Annotated[float, Number(above=0)]
NonNegative = Annotated[float, Number(least=0)]
Scale = Annotated[float, Number(above=0, below=math.inf)]
Rate = Annotated[float, Number(least=0, below=math.inf)]
Share = Annotated[float, Number(least=0, most=1)]
Probability = Annotated[float, Number(least=0, below=1)]
Flag = Annotated[bool, OnOff()]
String = Annotated[str, Text()]
Function = Annotated[Callable[..., Any], Called()]
Integers = Annotated[Sequence[int], Listed()]
Reals = Annotated[Sequence[float], Listed(is_number)]
Pair = Annotated[tuple[float, float], Listed(is_number, 2)]


class Declaration(NamedTuple):
    """A declared parameter of a function, at `place` of its arguments. Its `default` is not
    checked; with `none`, None is not checked either."""

    place: int
    name: str
    default: Any
    none: bool
    check: Check


def declarations(fn: Callable[..., Any]) -> tuple[Declaration, ...]:
    """Returns the declared parameters of `fn`. Annotations are strings; those without a declaration
    are not evaluated, since their names may exist for type checkers only."""
    there = getattr(inspect.unwrap(fn), "__globals__", {})
    found = []
    for place, p in enumerate(inspect.signature(fn).parameters.values()):
        words = re.findall(r"\w+", p.annotation) if isinstance(p.annotation, str) else ()
        if not any(declares(there.get(word)) for word in words):
            continue
        kinds = eval(p.annotation, there)
        for kind in (kinds, *get_args(kinds)):
            for check in getattr(kind, "__metadata__", ()):
                if isinstance(check, Given) and isinstance(check.args[0], str):
                    check = Given(get_args(kind)[0], *check.args)
                at = sys.maxsize if p.kind is p.KEYWORD_ONLY else place
                found.append(Declaration(at, p.name, p.default, NoneType in get_args(kinds), check))
    return tuple(found)


def declares(value: object) -> bool:
    """Returns whether `value` is a subclass of Check, or an annotation with a check."""
    if isinstance(value, type):
        return issubclass(value, Check)
    return any(isinstance(x, Check) for x in getattr(value, "__metadata__", ()))


def fitted(
    fn: Callable[..., Any],
    have: Sequence[Declaration],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """Returns the positional arguments of a call of `fn`, called `name`, with the declared ones
    checked and converted; those by name are replaced in `kwargs`. Raises UsageError, and TypeError
    if the arguments are too many or too few besides."""
    for place, what, default, none, check in have:
        by_name = place >= len(args)
        if by_name and what not in kwargs:
            continue
        value = kwargs[what] if by_name else args[place]
        if value is default or (none and value is None):
            continue
        try:
            fit = check.check(name, what, value)
        except TesseraError:
            inspect.signature(fn).bind(*args, **kwargs)
            raise
        if by_name:
            kwargs[what] = fit
        elif fit is not value:
            args = (*args[:place], fit, *args[place + 1 :])
    return args
