"""Errors of TT-NN's API, and the wrapper of every public function that makes all errors such.

The wrapper costs nothing while calls are right: only after one of Python's errors from inside are
the arguments held against the function's annotations.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import numpy as np

from ..core.checks import shown
from ..core.errors import TesseraError

C = TypeVar("C", bound=Callable[..., Any])
# Errors of the system, and those that no argument causes.
_SYSTEM = (OSError, MemoryError, ImportError, Warning)


class TTNNError(TesseraError, RuntimeError):
    """Raised when TT-NN's API is used in a way that has no meaning there, or here."""


def wrong(message: str, rows: Sequence[tuple[str, object]] = (), *, fix: str) -> TTNNError:
    """A TTNNError with a message, the operands in `rows`, and the way out in `fix`."""
    return TTNNError(message, rows=rows, fix=fix)


def brief(x: object) -> str:
    """An argument in a line: an array by its type and shape."""
    shape = getattr(x, "shape", None)
    return shown(x) if shape is None else f"{type(x).__name__}{[*shape]}"


def public(call: C) -> C:
    """`call` as a public function, whose errors are TTNNErrors. It may call no function of its
    caller: the errors of that would become TTNNErrors too."""
    if hasattr(call, "public"):
        return call

    @wraps(call)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return call(*args, **keywords)
        except TesseraError as error:
            # Programs of TT-NN catch RuntimeErrors.
            if not isinstance(error, (RuntimeError, AttributeError)):
                kind: Any = type(error)
                error.__class__ = _runtime(kind)
            raise
        except _SYSTEM:
            raise
        except Exception as error:
            raise _explained(call, args, keywords, error) from None

    checked.public = True  # type: ignore[attr-defined]
    return typing.cast(C, checked)


def functions(module: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions of a module or class whose names have no `_` in front."""
    every = {n: f for n, f in module.items() if isinstance(f, types.FunctionType)}
    return {n: f for n, f in every.items() if not n.startswith("_")}


def publics(module: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions of a module that are public."""
    return {n: f for n, f in functions(module).items() if hasattr(f, "public")}


@lru_cache
def _runtime(kind: Any) -> Any:
    """The class `kind` that is a RuntimeError too."""
    made = type(kind.__name__, (kind, TTNNError), {"__doc__": kind.__doc__})
    made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
    return made


def _explained(
    call: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], error: Exception
) -> TTNNError:
    """The error that names the argument of another kind than its annotation, or lists all."""
    name, signature = call.__name__, inspect.signature(call)
    fix = re.sub(r"(?:\w+\.)+(?=[A-Z])", "", f"{name}{signature}".replace("'", ""))
    try:
        bound = signature.bind(*args, **keywords).arguments
    except TypeError as reason:
        return wrong(f"{name}: {reason}", fix=fix)
    try:
        hints = typing.get_type_hints(call)
    except (NameError, TypeError):
        hints = {}
    rows = [(k, brief(v)) for k, v in bound.items()]
    for word, value in bound.items():
        parameter = signature.parameters[word]
        several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if not several and not has_type(value, hints.get(word, Any)):
            return wrong(f"{name}: {word} cannot be {brief(value)}", rows, fix=fix)
    inner = " ".join(str(error).split("\n")[0].split())[:120]
    return wrong(f"{name}: no result for such arguments ({inner})", rows, fix=fix)


def has_type(value: object, hint: Any) -> bool:
    """True if `value` has the type of an annotation."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, h) for h in inner)
    if hint is int:
        return isinstance(value, int | np.integer)
    if hint is float:
        return isinstance(value, int | float | np.number)
    kind = origin or hint
    if not isinstance(kind, type) or not isinstance(value, kind):
        return not isinstance(kind, type)
    items = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    if inner and items and kind is Sequence and isinstance(value, Sequence):
        return all(has_type(v, inner[0]) for v in value)
    return kind is not Sequence or not isinstance(value, str)
