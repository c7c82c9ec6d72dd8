"""Checks of a call's arguments against dtypes, meshes and signatures.

Checks of one plain value are in `core/checks.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ...core.checks import function_of, number, shown, unfit
from ...core.dtypes import DType, largest
from ...core.errors import DTypeError, MeshError, UsageError
from ...core.mesh import Mesh
from ...core.public import asking, misfit

F = TypeVar("F", bound=Callable[..., Any])


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
            fits = np.isfinite(np.float64(x).astype(dtype.real.numpy))
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


def asked_function(name: str, argument: str, value: Any) -> Callable[..., Any]:
    """Returns `value` as a function that raises UsageError if it is called with arguments that it
    does not take. Raises UsageError if `value` cannot be called."""
    fn = function_of(name, argument, value)
    try:
        inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return fn
    return asking(fn, getattr(fn, "__name__", argument))


def bound(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Binds the arguments of a call to their names. Raises UsageError if they do not fit."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        of_object = next(iter(signature.parameters), "") == "self"
        raise misfit(signature, name, args, kwargs, of_object) from None
