"""Checks of arguments, so that a wrong argument gives an error that names it and a fix, not a
traceback from inside the library. Public functions declare them in their signatures
(`declared.py`); checks that depend on other arguments are calls at their head.

There is one check of each kind: the type of a value, one word of several, a number within bounds, a
size that divides, the dims and the dtype of a tensor, equal names, a file, a library.

>>> sizes("zeros", [2, 3]), sizes("zeros", 4), whole("topk", "k", 2), number("adam", "b", 1, most=1)
((2, 3), (4,), 2, 1)
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from .brief import brief
from .errors import ShapeError, TesseraError, UsageError
from .value_checks import is_list, is_whole, numbers, python_numbers, whole_numbers, within
from .version import DISTRIBUTION

if TYPE_CHECKING:
    pass

# Indices are computed in i32.
MOST = 2**31 - 1
T = TypeVar("T")


def shown(value: object) -> str:
    """Returns `value` as a short text."""
    with brief():
        text = " ".join(repr(value).split()) if type(value).__repr__ is not object.__repr__ else ""
    return text if 0 < len(text) <= 40 else f"an object of type {type(value).__name__}"


def unfit(
    name: str,
    argument: str,
    value: object,
    fix: str,
    error: type[TesseraError] = UsageError,
) -> TesseraError:
    """Returns the error that `argument`, an argument of `name`, cannot be `value`."""
    return error(f"{name}: {argument} cannot be {shown(value)}", fix=fix)


# -- the type of a value --------------------------------------------------------------------------
def instance(
    name: str,
    argument: str,
    value: object,
    kind: type[T],
    fix: str,
    error: type[TesseraError] = UsageError,
) -> T:
    """Returns `value` if it is a `kind`. Raises `error`."""
    if isinstance(value, kind):
        return value
    raise unfit(name, argument, value, fix, error)


def taken(name: str, value: object, kind: type[T], fix: str) -> T:
    """Returns `value` if it is a `kind`, which `name` takes. Raises UsageError."""
    if isinstance(value, kind):
        return value
    given = type(value).__name__
    raise UsageError(f"{name}: takes a {kind.__name__}, not a {given}", fix=fix)


def mapping(name: str, argument: str, value: object, fix: str) -> Mapping[Any, Any]:
    """Returns a mapping, such as a dict. Raises UsageError."""
    if isinstance(value, Mapping):
        return value
    raise unfit(name, argument, value, fix)


def string(name: str, argument: str, value: object) -> str:
    """Returns a string. Raises UsageError."""
    return instance(name, argument, value, str, "give a string")


def flag(name: str, argument: str, value: object) -> bool:
    """Returns True or False. Raises UsageError."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise unfit(name, argument, value, "give True or False")


def function_of(
    name: str, argument: str, value: object, fix: str = "give a function"
) -> Callable[..., Any]:
    """Returns a callable. Raises UsageError."""
    if callable(value):
        return value
    raise unfit(name, argument, value, fix)


def several(name: str, xs: object) -> Sequence[Any]:
    """Returns a list or tuple that is not empty. Raises UsageError."""
    if isinstance(xs, (list, tuple)) and xs:
        return xs
    raise UsageError(f"{name}: nothing to join in {shown(xs)}", fix="give a list of tensors")


def axes_of(name: str, axis: object) -> tuple[str, ...]:
    """Returns the names of one mesh axis or of several different ones. Raises UsageError."""
    given = (axis,) if isinstance(axis, str) else axis
    if isinstance(given, (tuple, list)) and all(isinstance(a, str) for a in given):
        if len(set(given)) == len(given):
            return tuple(given)
        raise unfit(name, "axis", axis, "name each mesh axis once")
    raise unfit(name, "axis", axis, 'name a mesh axis, e.g. "dp", or a tuple of them')


# -- one of several -------------------------------------------------------------------------------
def one_of(
    name: str,
    argument: str,
    value: object,
    choices: Iterable[str | bool | None],
    error: type[TesseraError] = UsageError,
) -> Any:
    """Returns `value` if it is one of `choices`. Raises `error`."""
    words = tuple(choices)
    if isinstance(value, (str, bool, NoneType)) and value in words:
        return value
    raise unfit(name, argument, value, "use " + ", ".join(map(str, words)), error)


def same_names(name: str, missing: Sequence[str], more: Sequence[str], fix: str) -> None:
    """Raises UsageError if names are missing or too many."""
    if missing or more:
        raise UsageError(
            f"{name}: {len(missing)} names are missing, {len(more)} are too many",
            missing=shortened(missing),
            extra=shortened(more),
            fix=fix,
        )


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Returns the first of `names`, and the number of the others.

    >>> shortened(["a", "b", "c"], 2), shortened([])
    ('a, b and 1 more', 'none')
    """
    rest = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {rest} more" if rest > 0 else "")


# -- numbers --------------------------------------------------------------------------------------
def whole(
    name: str, argument: str, value: object, least: int | None = None, most: int | None = None
) -> int:
    """Returns an integer from `least` to `most`. Raises UsageError."""
    if is_whole(value) and (least is None or value >= least) and (most is None or value <= most):
        return int(value)
    raise unfit(name, argument, value, "give " + whole_numbers(least, most)[0])


def number(name: str, argument: str, value: object, **bounds: float) -> float:
    """Returns a Python or NumPy number within the bounds `least`, `most`, `above`, `below`. With
    bounds a bool is refused, as it would turn an option on or off. Raises UsageError."""
    if isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        x = value.item() if isinstance(value, np.generic) else value
        if within(x, bounds) and not (bounds and isinstance(x, bool)):
            return x
    raise unfit(name, argument, value, "give " + numbers(**bounds)[0])


def listed(
    name: str,
    what: str,
    value: object,
    of: Callable[[Any], bool] = is_whole,
    count: int | None = None,
) -> tuple[Any, ...]:
    """Returns numbers as a tuple, `count` of them if given. Raises UsageError."""
    if is_list(value, of, count):
        return tuple(map(python_numbers, cast(Sequence[Any], value)))
    many = f"a tuple of {count}" if count else "a list of whole" if of is is_whole else "a list of"
    raise unfit(name, what, value, f"give {many} numbers")


class NamedSize(int):
    """A whole number that stays itself in shapes, as it has a name."""


def sizes(name: str, shape: object) -> tuple[int, ...]:
    """Returns a shape: integers from 0 to 2**31 - 1; a bare number is one dim. Raises
    ShapeError."""
    given = (shape,) if is_whole(shape) else shape
    if isinstance(given, (tuple, list, np.ndarray, range)) and all(is_whole(n) for n in given):
        if all(0 <= n <= MOST for n in given):
            return tuple(n if isinstance(n, NamedSize) else int(n) for n in given)
        raise ShapeError(
            f"{name}: shape {tuple(map(int, given))} has a dim that is not from 0 to 2**31 - 1",
            fix="every dim has from 0 to 2**31 - 1 elements",
        )
    raise unfit(name, "the shape", shape, "give sizes, e.g. (8, 4096)", ShapeError)


def divides(
    name: str,
    count: int,
    parts: int,
    message: str,
    fix: str = "make it a multiple of {parts}",
    error: type[TesseraError] = ShapeError,
    **operands: object,
) -> None:
    """Raises `error` unless `parts` divides `count`. `message` and `fix` are formatted with both.

    >>> divides("zigzag", 6, 4, "a sequence of {count} does not divide into {parts} chunks")
    Traceback (most recent call last):
    tessera.ShapeError: zigzag: a sequence of 6 does not divide into 4 chunks
      fix : make it a multiple of 4
    """
    if count % parts:
        fields = {"count": count, "parts": parts}
        text = f"{name}: {message.format(**fields)}"
        raise error(text, rows=[*operands.items()], fix=fix.format(**fields))


# -- tensors --------------------------------------------------------------------------------------
def unread(name: str, options: object, fields: Iterable[str], why: str, fix: str) -> None:
    """Raises UsageError if one of the `fields` of the dataclass `options` is not at its default:
    nothing reads it because of `why`."""
    for f in dataclasses.fields(options):  # type: ignore[arg-type]  # any dataclass
        if f.name not in fields:
            continue
        value, made = getattr(options, f.name), f.default_factory
        if value != (f.default if made is dataclasses.MISSING else made()):
            raise UsageError(f"{name}: {f.name}={shown(value)} has no effect: {why}", fix=fix)


# -- outside of the program -----------------------------------------------------------------------
def library(name: str, module: str, extra: str) -> Any:
    """Returns the module of a library that `extra` installs. Raises UsageError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"{name}: the `{module.partition('.')[0]}` library is not installed",
            fix=f"pip install '{DISTRIBUTION}[{extra}]'",
        ) from None


def existing(name: str, path: Path, fix: str, folder: bool = False) -> None:
    """Raises UsageError unless `path` is a file; with `folder`, a file or a folder."""
    if not (path.exists() if folder else path.is_file()):
        raise UsageError(f"{name}: {str(path)!r} does not exist", fix=fix)


def path_of(name: str, argument: str, value: object) -> Path:
    """Returns a path. Raises UsageError."""
    if not isinstance(value, (str, os.PathLike)):
        raise unfit(name, argument, value, "give a path: a string, or a pathlib.Path")
    return Path(value)


@contextlib.contextmanager
def file_access(name: str, path: object, verb: str, fix: str) -> Iterator[None]:
    """A context that raises UsageError if `path` is no path, or if its body raises OSError: the
    file cannot be `verb`."""
    path_of(name, "the path", path)
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{name}: {str(path)!r} cannot be {verb}: {error.strerror}", fix=fix
        ) from None
