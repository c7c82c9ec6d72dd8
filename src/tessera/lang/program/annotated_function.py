"""`@ts.function`: shape annotations that are checked at each call and bind dim names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin

from ...core.declared import Called
from ...core.errors import ShapeError
from ...core.tracebacks import boundary
from ..record.operands import type_like
from ..value.annotations import Sizes, TensorSpec, spec_of
from ..value.checks import bound as bound_call
from ..value.checks import signature_of
from ..value.tensor import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def function(fn: Annotated[Callable[P, R], Called()]) -> Callable[P, R]:
    """A decorator that checks annotations such as `x: ts.Tensor["B", "S", ts.int32]` at each call.

    A name is bound to the size of its dim where it first occurs, and holds for all arguments and
    the result of that call. A dim may be a product, such as "3*D"; it is divided by the sizes that
    are known. Annotations may be in tuples, lists and dicts; an annotation of `*xs` or `**xs` is
    for each of them. `Annotated[ts.Tensor, "B", "S", ts.int32]` says the same to type checkers
    that take a string in brackets for a type. Raises ShapeError, which lists all mismatches, if a
    shape, a dtype or a name does not fit, or if None is given and the annotation has no `| None`
    and the default is not None.

    >>> import tessera as ts
    >>> @ts.function
    ... def scores(x: ts.Tensor["B", "D"], w: ts.Tensor["D", "V"]) -> ts.Tensor["B", "V"]:
    ...     return x @ w
    >>> scores(ts.zeros((2, 3)), ts.zeros((3, 5))).shape
    (2, 5)
    """
    signature = signature_of("function", fn)
    specs = _specs(fn)
    result = specs.pop("return", None)

    @boundary
    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        sizes = Sizes()
        arguments = bound_call(fn.__name__, signature, args, kwargs).arguments
        for name, spec in specs.items():
            at = signature.parameters.get(name)
            if (
                at is None
                or name not in arguments
                or (arguments[name] is None and at.default is None)
            ):
                continue
            if at.kind is at.VAR_POSITIONAL:  # the annotation is of each element
                spec = GenericAlias(tuple, (spec, ...))
            elif at.kind is at.VAR_KEYWORD:
                spec = GenericAlias(dict, (str, spec))
            _see(sizes, name, spec, arguments[name])
        sizes.settle()
        if sizes.wrong:
            raise _mismatch(fn, sizes, specs)
        out = fn(*args, **kwargs)
        if result is not None:
            _see(sizes, "result", result, out)
            sizes.settle()
            if sizes.wrong:
                raise _mismatch(fn, sizes, {**specs, "result": result})
        return out

    return run


def _see(sizes: Sizes, name: str, hint: Any, value: Any) -> None:
    """Checks `value` against its annotation: a spec, or a tuple, list or dict of specs."""
    if isinstance(hint, TensorSpec):
        if value is None and hint.optional:
            return
        if not hasattr(value, "shape") and not isinstance(value, (int, float, list)):
            sizes.wrong.append((name, f"is a {type(value).__name__}, not a tensor"))
            return
        t = type_like(value)
        sizes.see(name, hint, t.shape, t.dtype)
        return
    kind, parts = get_origin(hint), get_args(hint)
    if not isinstance(value, kind):
        sizes.wrong.append((name, f"is a {type(value).__name__}, not a {kind.__name__}"))
        return
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    if kind is dict:
        parts = (parts[1],) * len(items)
    elif kind is list or parts[1:] == (...,):
        parts = (parts[0],) * len(items)
    if len(items) != len(parts):
        sizes.wrong.append((name, f"has {len(items)} parts, not {len(parts)}"))
        return
    for (key, x), part in zip(items, parts, strict=True):
        if _says(part):
            _see(sizes, f"{name}.{key}", part, x)


def _says(hint: Any) -> bool:
    """Returns whether `hint` is a spec with dims, or a tuple, list or dict with such a spec."""
    if isinstance(hint, TensorSpec):
        return hint.dims is not None
    return get_origin(hint) in (tuple, list, dict) and any(map(_says, get_args(hint)))


def _specs(fn: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of `fn` that have specs. Each annotation is evaluated on its own, so that one
    with a name known only to a type checker does not hide the others."""
    fn = inspect.unwrap(fn)  # decorators such as @ts.distribute hide the globals of `fn`
    around = inspect.getclosurevars(fn)
    names = {**around.builtins, **getattr(fn, "__globals__", {}), **around.nonlocals}
    found = {}
    for name, hint in getattr(fn, "__annotations__", {}).items():
        if isinstance(hint, str):
            try:
                hint = eval(hint, names)
            except Exception:
                continue
        hint = _plain(hint)
        if _says(hint):
            found[name] = hint
    return found


def _plain(hint: Any) -> Any:
    """Returns `hint` with a spec for each `Annotated[Tensor, ...]`."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated and parts[0] is Tensor:
        return spec_of(parts[1:])
    if kind in (UnionType, Union) and len(parts) == 2 and parts[1] is NoneType:
        inner = _plain(parts[0])
        return inner | None if isinstance(inner, TensorSpec) else hint
    if kind in (tuple, list, dict) and parts:
        return GenericAlias(kind, tuple(map(_plain, parts)))
    return hint


def _mismatch(fn: Callable[..., Any], sizes: Sizes, specs: dict[str, Any]) -> ShapeError:
    """The error that lists every argument that does not fit its annotation, in the order of the
    arguments."""
    places = list(specs)
    wrong = sorted(sizes.wrong, key=lambda row: places.index(row[0].partition(".")[0]))
    rows = [(name, f"{why}; annotated {specs[name.partition('.')[0]]}") for name, why in wrong]
    bound = " ".join(f"{k}={v}" for k, v in sizes.bound.items())
    names = {name.partition(".")[0] for name, _ in wrong}
    what = f"{len(names)} arguments do"
    if len(names) == 1:
        what = "the result does" if names == {"result"} else "1 argument does"
    return ShapeError(
        f"{getattr(fn, '__name__', 'function')}: {what} not fit the annotations",
        rows=[*rows, ("bound", bound or "nothing")],
        fix="change the tensors or the annotations",
    )
