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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .errors import DTypeError, ShapeError, TesseraError, UsageError
from .kinds import is_list, is_whole, numbers, python_numbers, whole_numbers, within
from .version import DISTRIBUTION

if TYPE_CHECKING:
    from .layout import TensorType

# Indices are computed in i32.
MOST = 2**31 - 1
T = TypeVar("T")


def shown(value: object) -> str:
    """Returns `value` as a short text."""
    text = " ".join(repr(value).split()) if type(value).__repr__ is not object.__repr__ else ""
    return text if 0 < len(text) <= 40 else f"an object of type {type(value).__name__}"


def unfit(
    name: str,
    what: str,
    value: object,
    fix: str,
    error: type[TesseraError] = UsageError,
) -> TesseraError:
    """Returns the error that `what`, an argument of `name`, cannot be `value`."""
    return error(f"{name}: {what} cannot be {shown(value)}", fix=fix)


# -- the type of a value --------------------------------------------------------------------------
def instance(
    name: str,
    what: str,
    value: object,
    kind: type[T],
    fix: str,
    error: type[TesseraError] = UsageError,
) -> T:
    """Returns `value` if it is a `kind`. Raises `error`."""
    if isinstance(value, kind):
        return value
    raise unfit(name, what, value, fix, error)


def taken(name: str, value: object, kind: type[T], fix: str) -> T:
    """Returns `value` if it is a `kind`, which `name` takes. Raises UsageError."""
    if isinstance(value, kind):
        return value
    given = type(value).__name__
    raise UsageError(f"{name}: takes a {kind.__name__}, not a {given}", fix=fix)


def mapping(name: str, what: str, value: object, fix: str) -> Mapping[Any, Any]:
    """Returns a mapping, such as a dict. Raises UsageError."""
    if isinstance(value, Mapping):
        return value
    raise unfit(name, what, value, fix)


def string(name: str, what: str, value: object) -> str:
    """Returns a string. Raises UsageError."""
    return instance(name, what, value, str, "give a string")


def flag(name: str, what: str, value: object) -> bool:
    """Returns True or False. Raises UsageError."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise unfit(name, what, value, "give True or False")


def function_of(
    name: str, what: str, value: object, fix: str = "give a function"
) -> Callable[..., Any]:
    """Returns a callable. Raises UsageError."""
    if callable(value):
        return value
    raise unfit(name, what, value, fix)


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
    what: str,
    value: object,
    known: Iterable[str | bool | None],
    error: type[TesseraError] = UsageError,
) -> Any:
    """Returns `value` if it is one of `known`. Raises `error`."""
    words = tuple(known)
    if isinstance(value, (str, bool, NoneType)) and value in words:
        return value
    raise unfit(name, what, value, "use " + ", ".join(map(str, words)), error)


def same_names(name: str, missing: Sequence[str], more: Sequence[str], fix: str) -> None:
    """Raises UsageError if names are missing or too many."""
    if missing or more:
        raise UsageError(
            f"{name}: {len(missing)} names are missing, {len(more)} are too many",
            missing=some(missing),
            extra=some(more),
            fix=fix,
        )


def some(names: Sequence[str], most: int = 5) -> str:
    """Returns the first of `names`, and the number of the others.

    >>> some(["a", "b", "c"], 2), some([])
    ('a, b and 1 more', 'none')
    """
    rest = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {rest} more" if rest > 0 else "")


# -- numbers --------------------------------------------------------------------------------------
def whole(
    name: str, what: str, value: object, least: int | None = None, most: int | None = None
) -> int:
    """Returns an integer from `least` to `most`. Raises UsageError."""
    if is_whole(value) and (least is None or value >= least) and (most is None or value <= most):
        return int(value)
    raise unfit(name, what, value, "give " + whole_numbers(least, most)[0])


def number(name: str, what: str, value: object, **bounds: float) -> float:
    """Returns a Python or NumPy number within the bounds `least`, `most`, `above`, `below`. With
    bounds a bool is refused, as it would turn an option on or off. Raises UsageError."""
    if isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        x = value.item() if isinstance(value, np.generic) else value
        if within(x, bounds) and not (bounds and isinstance(x, bool)):
            return x
    raise unfit(name, what, value, "give " + numbers(**bounds)[0])


def listed(
    name: str,
    what: str,
    value: object,
    of: Callable[[Any], bool] = is_whole,
    count: int | None = None,
) -> tuple[Any, ...]:
    """Returns numbers as a tuple, `count` of them if given. Raises UsageError."""
    if is_list(value, of, count):
        return tuple(map(python_numbers, value))  # type: ignore[call-overload]
    many = f"a tuple of {count}" if count else "a list of whole" if of is is_whole else "a list of"
    raise unfit(name, what, value, f"give {many} numbers")


def sizes(name: str, shape: object) -> tuple[int, ...]:
    """Returns a shape: integers from 0 to 2**31 - 1; a bare number is one dim. Raises
    ShapeError."""
    given = (shape,) if is_whole(shape) else shape
    if isinstance(given, (tuple, list, np.ndarray, range)) and all(is_whole(n) for n in given):
        if all(0 <= n <= MOST for n in given):
            return tuple(int(n) for n in given)
        raise ShapeError(
            f"{name}: shape {tuple(map(int, given))} has a dim that is not from 0 to 2**31 - 1",
            fix="every dim has from 0 to 2**31 - 1 elements",
        )
    raise unfit(name, "the shape", shape, "give sizes, e.g. (8, 4096)", ShapeError)


def divides(
    name: str,
    count: int,
    parts: int,
    what: str,
    fix: str = "make it a multiple of {parts}",
    error: type[TesseraError] = ShapeError,
    **operands: object,
) -> None:
    """Raises `error` unless `parts` divides `count`. `what` and `fix` are formatted with both.

    >>> divides("zigzag", 6, 4, "a sequence of {count} does not divide into {parts} chunks")
    Traceback (most recent call last):
    tessera.ShapeError: zigzag: a sequence of 6 does not divide into 4 chunks
      fix : make it a multiple of 4
    """
    if count % parts:
        said = {"count": count, "parts": parts}
        text = f"{name}: {what.format(**said)}"
        raise error(text, rows=[*operands.items()], fix=fix.format(**said))


# -- tensors --------------------------------------------------------------------------------------
def _operand(what: str, t: TensorType) -> list[tuple[str, object]]:
    return [(what.removeprefix("the "), t)]


def ranked(name: str, what: str, t: TensorType, rank: int, fix: str, more: bool = False) -> None:
    """Raises ShapeError unless `t` has `rank` dims; with `more`, at least as many."""
    if t.rank < rank or (t.rank > rank and not more):
        have = f"{t.rank} dim{'s' * (t.rank != 1)}"
        said = f"{name}: {what} has {have}, not {rank}{' or more' * more}"
        raise ShapeError(said, rows=_operand(what, t), fix=fix)


def integers(
    name: str, what: str, t: TensorType, fix: str = "cast them with .to(ts.int32)"
) -> None:
    """Raises DTypeError unless the dtype of `t` is an integer type."""
    if not t.dtype.is_int:
        raise DTypeError(f"{name}: {what} must be integers", rows=_operand(what, t), fix=fix)


def floats(name: str, what: str, t: TensorType, fix: str = "cast it with .to(ts.f32)") -> None:
    """Raises DTypeError unless the dtype of `t` is a float type."""
    if not t.dtype.is_float:
        raise DTypeError(f"{name}: {what} must be floats", rows=_operand(what, t), fix=fix)


def one_dtype(name: str, ins: Sequence[TensorType], *labels: str) -> None:
    """Raises DTypeError unless all of `ins` have one dtype."""
    if len({t.dtype for t in ins}) > 1:
        operands = zip(labels or [f"arg {i}" for i in range(len(ins))], ins, strict=True)
        fix = "cast one of them with .to(dtype)"
        raise DTypeError(f"{name}: arguments have different dtypes", rows=[*operands], fix=fix)


def shaped(
    name: str, what: str, t: TensorType, shape: Sequence[int], **operands: TensorType
) -> None:
    """Raises ShapeError unless `t` has `shape`, which follows from `operands`."""
    if t.shape != tuple(shape):
        raise ShapeError(
            f"{name}: {what} has shape {t.shape}, not {tuple(shape)}",
            rows=[*_operand(what, t), *operands.items()],
            fix=f"give it the shape {tuple(shape)}",
        )


def alike(who: str, have: TensorType, given: TensorType, fix: str, exactly: bool = False) -> None:
    """Raises ShapeError unless `given` has the shape of `have`. Raises DTypeError unless both or
    neither have a float dtype; with `exactly`, unless their dtypes are equal."""
    dtype = have.dtype is given.dtype or (
        not exactly and have.dtype.is_float is given.dtype.is_float
    )
    if have.shape == given.shape and dtype:
        return
    error, what = (ShapeError, "shape") if have.shape != given.shape else (DTypeError, "dtype")
    raise error(f"{who} has another {what}", have=have, given=given, fix=fix)


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


def path_of(name: str, what: str, value: object) -> Path:
    """Returns a path. Raises UsageError."""
    if not isinstance(value, (str, os.PathLike)):
        raise unfit(name, what, value, "give a path: a string, or a pathlib.Path")
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
