"""Is an argument of the kind that a function takes? Asked at the door, so that nobody meets a
traceback from inside: every answer of no is an error that names the argument.

>>> sizes("zeros", [2, 3]), sizes("zeros", 4), whole("topk", "k", 2)
((2, 3), (4,), 2)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ..core.dtypes import DType, largest
from ..core.errors import DTypeError, MeshError, ShapeError, TesseraError, UsageError, fail
from ..core.mesh import Mesh

# Indices are computed in i32.
MOST = 2**31 - 1
F = TypeVar("F", bound=Callable[..., Any])


def shown(value: object) -> str:
    """`value` in a few words."""
    text = " ".join(repr(value).split()) if type(value).__repr__ is not object.__repr__ else ""
    return text if 0 < len(text) <= 40 else f"an object of type {type(value).__name__}"


def unfit(
    name: str,
    what: str,
    value: object,
    fix: str,
    error: type[TesseraError] = UsageError,
) -> TesseraError:
    """The error that `what`, an argument of `name`, cannot be `value`."""
    return fail(error, f"{name}: {what} cannot be {shown(value)}", fix=fix)


def is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def whole(name: str, what: str, value: object, least: int | None = None) -> int:
    """A whole number, at least `least`. Raises UsageError."""
    if is_whole(value) and (least is None or value >= least):  # type: ignore[operator]
        return int(value)  # type: ignore[call-overload, no-any-return]  # narrowed by is_whole
    bound = "" if least is None else f" of at least {least}"
    raise fail(
        UsageError,
        f"{name}: {what} cannot be {shown(value)}",
        fix=f"give a whole number{bound}",
    )


def sizes(name: str, shape: object) -> tuple[int, ...]:
    """A shape: whole numbers from 0 to 2**31 - 1; a bare number is one dim. Raises ShapeError."""
    given = (shape,) if is_whole(shape) else shape
    if isinstance(given, (tuple, list, np.ndarray, range)) and all(is_whole(n) for n in given):
        if all(0 <= n <= MOST for n in given):
            return tuple(int(n) for n in given)
        raise fail(
            ShapeError,
            f"{name}: shape {tuple(map(int, given))} has a dim that is not from 0 to 2**31 - 1",
            fix="every dim has from 0 to 2**31 - 1 elements",
        )
    raise fail(
        ShapeError, f"{name}: the shape cannot be {shown(shape)}", fix="give sizes, e.g. (8, 4096)"
    )


def number(name: str, what: str, value: object) -> float:
    """A Python or NumPy number. Raises UsageError."""
    if isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        return value.item() if isinstance(value, np.generic) else value
    raise fail(UsageError, f"{name}: {what} cannot be {shown(value)}", fix="give a number")


def one_of(name: str, what: str, value: object, known: Iterable[str]) -> str:
    """One of the words `known`. Raises UsageError."""
    words = tuple(known)
    if isinstance(value, str) and value in words:
        return value
    raise unfit(name, what, value, "use " + ", ".join(words))


# -- by what an annotation says -------------------------------------------------------------------
def _number(value: object) -> bool:
    return is_whole(value) or isinstance(value, (float, np.floating))


def _list(ok: Callable[[object], bool], count: int | None = None) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, (tuple, list, range, np.ndarray))
        and (count is None or len(value) == count)
        and all(map(ok, value))
    )


def _tensor(value: object) -> bool:
    from .tensor import Tensor

    return isinstance(value, Tensor)


# What an annotation takes, and how a reader calls it.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (is_whole, "a whole number"),
    "float": (_number, "a number"),
    "bool": (lambda value: isinstance(value, (bool, np.bool_)), "True or False"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "None": (lambda value: value is None, "None"),
    "Tensor": (_tensor, "a tensor"),
    "tuple[float, float]": (_list(_number, 2), "two numbers, e.g. (0.9, 0.999)"),
    "Sequence[int]": (_list(is_whole), "a list of whole numbers"),
    "Sequence[float]": (_list(_number), "a list of numbers"),
}


def annotated(name: str, annotations: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Raises UsageError where one of `values` is not what is written beside its name. Annotations
    that say more than `_KINDS` are not looked at."""
    for what, value in values.items():
        kinds = str(annotations.get(what)).split(" | ")
        if set(kinds) <= _KINDS.keys() and not any(_KINDS[k][0](value) for k in kinds):
            raise fail(
                UsageError,
                f"{name}: {what} cannot be {shown(value)}",
                fix="give " + " or ".join(_KINDS[k][1] for k in kinds),
            )


def annotated_fields(settings: Any) -> None:
    """`annotated` of a dataclass that was just made."""
    kinds = {f.name: f.type for f in dataclasses.fields(settings)}
    annotated(type(settings).__name__, kinds, {n: getattr(settings, n) for n in kinds})


def typed(fn: F) -> F:
    """`fn`, or the `__init__` of a class, with `annotated` of its arguments at each call."""
    name, signature = fn.__qualname__.removesuffix(".__init__"), inspect.signature(fn)
    kinds = {p.name: p.annotation for p in signature.parameters.values()}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        annotated(name, kinds, bound(name, signature, args, kwargs).arguments)
        return fn(*args, **kwargs)

    return cast(F, run)


def probability(name: str, value: object) -> float:
    """A number from 0 up to, not including, 1. Raises UsageError."""
    p = number(name, "p", value)
    if not 0.0 <= p < 1.0:
        raise fail(UsageError, f"{name}: p is {p}", fix="0 <= p < 1")
    return p


def flag(name: str, what: str, value: object) -> bool:
    """True or False. Raises UsageError."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise fail(UsageError, f"{name}: {what} cannot be {shown(value)}", fix="give True or False")


def fitting(name: str, value: object, dtype: DType) -> float:
    """A number that `dtype` can hold. Raises UsageError, DTypeError."""
    x = number(name, "the value", value)
    if dtype.is_int:
        info = np.iinfo(dtype.numpy.name)
        if not math.isfinite(x) or x != int(x) or not info.min <= x <= info.max:
            raise fail(
                DTypeError,
                f"{name}: {x} does not fit {dtype}",
                fix=f"use a whole number from {info.min} to {info.max}, or another dtype",
            )
    elif dtype.is_float and math.isfinite(x):
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.float64(x).astype(dtype.numpy))
        if not fits:
            top = largest(dtype)
            raise fail(
                DTypeError,
                f"{name}: {x} does not fit {dtype}",
                fix=f"use a number from {-top} to {top}, or another dtype",
            )
    return x


def mesh_or_none(name: str, mesh: object) -> Mesh | None:
    """A mesh, or None. Raises MeshError."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    raise fail(
        MeshError,
        f"{name}: mesh cannot be {shown(mesh)}",
        fix='give a dist.Mesh, e.g. dist.Mesh(("dp",), devices=8)',
    )


def axes_of(name: str, axis: object) -> tuple[str, ...]:
    """One mesh axis or several, as names. Raises UsageError."""
    given = (axis,) if isinstance(axis, str) else axis
    if isinstance(given, (tuple, list)) and all(isinstance(a, str) for a in given):
        return tuple(given)
    raise fail(
        UsageError,
        f"{name}: axis cannot be {shown(axis)}",
        fix='name a mesh axis, e.g. "dp", or a tuple of them',
    )


def function_of(name: str, what: str, value: object) -> Callable[..., Any]:
    """Something that can be called. Raises UsageError."""
    if callable(value):
        return value
    raise fail(UsageError, f"{name}: {what} cannot be {shown(value)}", fix="give a function")


def several(name: str, xs: object) -> Sequence[Any]:
    """A list or tuple with something in it. Raises UsageError."""
    if isinstance(xs, (list, tuple)) and xs:
        return xs
    raise fail(UsageError, f"{name}: nothing to join in {shown(xs)}", fix="give a list of tensors")


def signature_of(name: str, fn: Callable[..., Any]) -> inspect.Signature:
    """The arguments that `fn` takes. Raises UsageError where it does not say."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        raise fail(
            UsageError,
            f"{name}: {shown(fn)} does not say what arguments it takes",
            fix="wrap it in a function of your own: lambda x: f(x)",
        ) from None


def bound(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call, by name. Raises UsageError where they do not fit."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise fail(
            UsageError,
            f"{name}: {error}",
            [("arguments", str(signature))],
            fix="call it with the arguments that it takes",
        ) from None
