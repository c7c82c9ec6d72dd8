"""Context managers and decorators that warn if they are created but not used."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from inspect import isfunction, ismethod
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

from .errors import UsageError, warn_no_effect

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Within(ContextDecorator, AbstractContextManager[T], Generic[T]):
    """A reusable context manager, also a decorator, that warns if it is dropped unused."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]], name: str, fix: str) -> None:
        self._used = True  # no warning if `make` raises an error
        self._make, self._name, self._fix = make, name, fix
        self._first: AbstractContextManager[T] | None = make()
        self._open: list[AbstractContextManager[T]] = []
        self._used = False

    def __call__(self, fn: Any) -> Any:
        self._used = True
        return super().__call__(fn) if isfunction(fn) else Under(self, fn)

    def __enter__(self) -> T:
        self._used = True
        inside, self._first = self._first or self._make(), None
        found = inside.__enter__()
        self._open.append(inside)
        return found

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)

    def __del__(self) -> None:
        if not (self._used or sys.is_finalizing()):
            warn_no_effect(
                f"{self._name}(...)",
                "it was called without `with`",
                means="it holds inside of a `with` block, and inside of functions it decorates",
                fix=self._fix,
            )


class Under:
    """A compiled function decorated with a context: calls of it and of its methods, such as
    `.plan(...)`, run inside. Other attributes are the function's own."""

    def __init__(self, context: AbstractContextManager[Any], fn: Any) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._context, self._fn = context, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context:
            return self._fn(*args, **kwargs)

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    @property
    def fn(self) -> Any:
        """This object itself, so that a recording runs the function inside of its context, too."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._fn, name)
        return Under(self._context, found) if ismethod(found) else found


def within(
    name: str, fix: str = ""
) -> Callable[[Callable[P, AbstractContextManager[T]]], Callable[P, Within[T]]]:
    """Returns a decorator for functions that make contexts: a context that is never entered gives
    an OptionWarning.

    >>> from contextlib import nullcontext
    >>> with within("ts.nothing")(nullcontext)(5) as x:
    ...     x
    5
    """

    def decorate(make: Callable[P, AbstractContextManager[T]]) -> Callable[P, Within[T]]:
        @functools.wraps(make)
        def call(*args: P.args, **kwargs: P.kwargs) -> Within[T]:
            how = fix or f"write with {name}(...):"
            return Within(functools.partial(make, *args, **kwargs), name, how)

        return call

    return decorate


class Above:
    """A decorator `@name(...)` that warns if it is never applied to a function."""

    def __init__(self, wrap: Callable[[Any], Any], name: str, fix: str) -> None:
        self._wrap, self._name, self._fix, self._used = wrap, name, fix, False

    def __call__(self, fn: Any) -> Any:
        self._used = True
        return self._wrap(fn)

    def __enter__(self) -> NoReturn:
        self._used = True
        what = f"{self._name}(...) is for a function, and not for a block of code"
        raise UsageError(what, fix=self._fix)

    def __exit__(self, *error: Any) -> None: ...

    def __del__(self) -> None:
        if not (self._used or sys.is_finalizing()):
            warn_no_effect(
                f"{self._name}(...)",
                "no function was given to it",
                means="it is for the function below it",
                fix=self._fix,
            )


def above(name: str, wrap: F, fix: str = "") -> F:
    """Returns `wrap`, a function decorator, as the result of `name(...)`.

    >>> above("ts.twice", lambda fn: lambda x: fn(fn(x)))(abs)(-3)
    3
    """
    return cast(F, Above(wrap, name, fix or f"write @{name}(...) above the function"))
