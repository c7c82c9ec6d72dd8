"""`@ts.function`: annotations that are checked at each call and bind dim names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..core.errors import ShapeError, fail
from .checks import bound as bound_call
from .checks import function_of, signature_of
from .spec import TensorSpec
from .tensor import Tensor, type_like

P = ParamSpec("P")
R = TypeVar("R")


def function(fn: Callable[P, R]) -> Callable[P, R]:
    """Checks `ts.Tensor["B", "S", ts.int32]` annotations of arguments and result.

    A name binds the size of its dim at first sight, for all arguments of the call. One ShapeError
    lists all mismatches.

    >>> import tessera as ts
    >>> @ts.function
    ... def scores(x: ts.Tensor["B", "D"], w: ts.Tensor["D", "V"]) -> ts.Tensor["B", "V"]:
    ...     return x @ w
    >>> scores(ts.zeros((2, 3)), ts.zeros((3, 5))).shape
    (2, 5)
    """
    function_of("function", "what is annotated", fn)
    signature = signature_of("function", fn)
    specs = _specs(fn)
    result = specs.pop("return", None)

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        bound: dict[str, int] = {}
        given = bound_call(fn.__name__, signature, args, kwargs).arguments
        wrong = []
        for name, spec in specs.items():
            value = given.get(name)
            if value is None:
                continue
            if not hasattr(value, "shape") and not isinstance(value, (int, float, list)):
                wrong.append((name, f"is a {type(value).__name__}, not a tensor"))
                continue
            t = type_like(value)
            wrong += [(name, w) for w in spec.mismatches(t.shape, t.dtype, bound)]
        if wrong:
            raise _mismatch(fn, wrong, specs, bound)
        out = fn(*args, **kwargs)
        if result is not None and isinstance(out, Tensor):
            found = result.mismatches(out.shape, out.dtype, bound)
            if found:
                rows = [("result", w) for w in found]
                raise _mismatch(fn, rows, {"result": result}, bound)
        return out

    return run


def _specs(fn: Callable[..., Any]) -> dict[str, TensorSpec]:
    """The annotations of `fn` that are ours. One that cannot be read is nobody's: each is read on
    its own, so that a name which only a type checker knows does not hide the others."""
    fn = inspect.unwrap(fn)  # of @ts.distribute, say
    around = inspect.getclosurevars(fn)
    names = {**around.builtins, **getattr(fn, "__globals__", {}), **around.nonlocals}
    found = {}
    for name, hint in getattr(fn, "__annotations__", {}).items():
        if isinstance(hint, str):
            try:
                hint = eval(hint, names)
            except Exception:
                continue
        if isinstance(hint, TensorSpec) and hint.dims is not None:
            found[name] = hint
    return found


def _mismatch(
    fn: Callable[..., Any],
    wrong: list[tuple[str, str]],
    specs: dict[str, TensorSpec],
    bound: dict[str, int],
) -> ShapeError:
    rows = [(name, f"{why}; annotated {specs[name]}") for name, why in wrong]
    sizes = " ".join(f"{k}={v}" for k, v in bound.items())
    names = {name for name, _ in wrong}
    what = f"{len(names)} arguments do"
    if len(names) == 1:
        what = "the result does" if names == {"result"} else "1 argument does"
    return fail(
        ShapeError,
        f"{getattr(fn, '__name__', 'function')}: {what} not fit the annotations",
        [*rows, ("bound", sizes or "nothing")],
        fix="change the tensors or the annotations",
    )
