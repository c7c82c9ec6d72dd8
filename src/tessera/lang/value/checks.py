"""Checks of a call's arguments against annotations, dtypes, meshes and signatures.

Checks of one plain value are in `core/checks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ...core import kinds
from ...core.checks import function_of, number, shown, unfit
from ...core.dtypes import DType, largest
from ...core.errors import DTypeError, MeshError, UsageError
from ...core.mesh import Mesh
from ...core.public import asking, misfit
from .tensor import Tensor

F = TypeVar("F", bound=Callable[..., Any])


# -- by annotation --------------------------------------------------------------------------------
def _tensor(value: object) -> bool:
    return isinstance(value, Tensor)


# The values that each annotation accepts: words for the error, and a predicate.
_KINDS: dict[str, kinds.Kind] = {
    "int": kinds.whole_numbers(),
    "float": kinds.numbers(),
    "bool": kinds.FLAG,
    "str": kinds.STRING,
    "None": kinds.choices(None),
    "Tensor": ("a tensor", _tensor),
    "tuple[float, float]": (
        "two numbers, e.g. (0.9, 0.999)", lambda x: kinds.is_list(x, kinds.is_number, 2),
    ),
    "tuple[int, ...]": (
        "a tuple of whole numbers", lambda x: isinstance(x, tuple) and all(map(kinds.is_whole, x)),
    ),
    "tuple[float, ...]": (
        "a tuple of numbers", lambda x: isinstance(x, tuple) and all(map(kinds.is_number, x)),
    ),
    "Sequence[int]": ("a list of whole numbers", lambda x: kinds.is_list(x, kinds.is_whole)),
    "Sequence[float]": ("a list of numbers", lambda x: kinds.is_list(x, kinds.is_number)),
}  # fmt: skip


def annotated(
    name: str, annotations: Mapping[str, object], values: Mapping[str, object]
) -> dict[str, Any]:
    """Returns `values`, with Python numbers in place of NumPy's, and tuples where the annotation is
    one. Raises UsageError if a value does not fit its annotation. Annotations that are not made of
    `_KINDS` are not checked."""
    found = dict(values)
    for what, value in values.items():
        legal = str(annotations.get(what)).split(" | ")
        if not set(legal) <= _KINDS.keys():
            continue
        if not any(_KINDS[k][1](value) for k in legal):
            raise unfit(name, what, value, "give " + " or ".join(_KINDS[k][0] for k in legal))
        made = kinds.python_numbers(value)
        found[what] = tuple(made) if isinstance(made, list) and legal[0][:5] == "tuple" else made
    return found


def annotated_fields(settings: Any) -> None:
    """Applies `annotated` to the fields of a dataclass that was just made."""
    types = {f.name: f.type for f in dataclasses.fields(settings)}
    values = {n: getattr(settings, n) for n in types}
    for what, value in annotated(type(settings).__name__, types, values).items():
        if value is not values[what]:
            object.__setattr__(settings, what, value)


def typed(fn: F) -> F:
    """Returns `fn`, or the `__init__` of a class, with `annotated` of its arguments at each
    call."""
    name, signature = fn.__qualname__.removesuffix(".__init__"), inspect.signature(fn)
    types = {p.name: p.annotation for p in signature.parameters.values()}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = bound(name, signature, args, kwargs)
        given.arguments |= annotated(name, types, given.arguments)
        return fn(*given.args, **given.kwargs)

    return cast(F, run)


def fitting(name: str, value: object, dtype: DType) -> float:
    """Returns `value` as a number that `dtype` can hold. Raises UsageError if it is not a number,
    DTypeError if it does not fit."""
    x = number(name, "the value", value)
    if dtype.is_int:
        info = np.iinfo(dtype.numpy.name)
        if not math.isfinite(x) or x != int(x) or not info.min <= x <= info.max:
            raise DTypeError(
                f"{name}: {x} does not fit {dtype}",
                fix=f"use a whole number from {info.min} to {info.max}, or another dtype",
            )
    elif dtype.is_float and math.isfinite(x) and abs(x) > largest(dtype):
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.float64(x).astype(dtype.numpy))
        if not fits:
            top = largest(dtype)
            raise DTypeError(
                f"{name}: {x} does not fit {dtype}",
                fix=f"use a number from {-top} to {top}, or another dtype",
            )
    return x


def mesh_or_none(name: str, mesh: object) -> Mesh | None:
    """Returns `mesh`. Raises MeshError unless it is a Mesh or None."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    fix = 'give a dist.Mesh, e.g. dist.Mesh(("dp",), devices=8)'
    raise unfit(name, "mesh", mesh, fix, MeshError)


def needed_mesh(name: str, mesh: Mesh | None) -> Mesh:
    """Returns `mesh`. Raises MeshError if it is None."""
    if mesh is None:
        raise MeshError(f"{name}: there is no mesh", fix="pass mesh=..., or say: with mesh:")
    return mesh


def signature_of(name: str, fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of `fn`. Raises UsageError if it has none that Python can read."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        raise UsageError(
            f"{name}: {shown(fn)} does not say what arguments it takes",
            fix="wrap it in a function of your own: lambda x: f(x)",
        ) from None


def asked_function(name: str, what: str, value: Any) -> Callable[..., Any]:
    """Returns `value` as a function that raises UsageError if it is called with arguments that it
    does not take. Raises UsageError if `value` cannot be called."""
    fn = function_of(name, what, value)
    try:
        inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return fn
    return asking(fn, getattr(fn, "__name__", what))


def bound(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Binds the arguments of a call to their names. Raises UsageError if they do not fit."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        of_object = next(iter(signature.parameters), "") == "self"
        raise misfit(signature, name, args, kwargs, of_object) from None
