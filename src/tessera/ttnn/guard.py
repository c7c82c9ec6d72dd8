"""What does someone hear whose argument fits no op, where no check of its own names it?

Every public function goes through `guarded`. It costs nothing while calls are right: only after
one of Python's errors from inside are the arguments held against the function's annotations.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from ..core.errors import TesseraError
from .faults import TTNNError, wrong
from .run import brief

# These say what they mean: the system's, and those that no argument causes.
_THEIRS = (OSError, MemoryError, ImportError, Warning)


def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose errors are ours. It calls no function of the caller, whose errors stay."""

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except TesseraError as error:
            _made_runtime(error)
            raise
        except _THEIRS:
            raise
        except Exception as error:
            raise explained(name, call, args, kwargs, error) from None

    return checked


def _made_runtime(error: TesseraError) -> None:
    """Makes `error` a RuntimeError besides what it is: programs of TT-NN catch those."""
    if not isinstance(error, (RuntimeError, AttributeError)):
        kind: Any = type(error)
        error.__class__ = _both(kind)


@lru_cache
def _both(cls: Any) -> Any:
    made = type(cls.__name__, (cls, TTNNError), {"__doc__": cls.__doc__})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def explained(
    name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    error: Exception,
) -> TTNNError:  # fmt: skip
    """The error that says which argument of `call` is none of its kind, or what they all are."""
    signature = inspect.signature(call)
    fix = f"ttnn.{name}{signature}".replace("'", "")
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as reason:
        return wrong(f"{name}: {reason}", fix=fix)
    given = [(k, brief(v)) for k, v in bound.items()]
    for word, value in _each(signature, bound):
        if not fits(value, hints(call).get(word, Any)):
            return wrong(f"{name}: {word} cannot be {brief(value)}", given, fix=fix)
    inner = " ".join(str(error).split("\n")[0].split())[:120]
    return wrong(f"{name}: no result for such arguments ({inner})", given, fix=fix)


def _each(signature: inspect.Signature, bound: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for word, value in bound.items():
        kind = signature.parameters[word].kind
        if kind is inspect.Parameter.VAR_KEYWORD or kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        yield word, value


def hints(call: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of `call`, as far as they can be evaluated."""
    try:
        return typing.get_type_hints(call)
    except (NameError, TypeError):
        return {}


def fits(value: object, hint: Any) -> bool:
    """Whether `value` is of the kind that an annotation says."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, h) for h in inner)
    if hint is int:
        return isinstance(value, int | np.integer)
    if hint is float:
        return isinstance(value, int | float | np.number)
    kind = origin or hint
    if not isinstance(kind, type) or not isinstance(value, kind):
        return not isinstance(kind, type)
    items = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    if inner and items and kind is Sequence and isinstance(value, Sequence):
        return all(fits(v, inner[0]) for v in value)
    return kind is not Sequence or not isinstance(value, str)


__all__ = ["guarded"]
