"""Which public names have changed? The old ones work for one version more, and say what to write.

A module says `__getattr__ = renamed_names("ts", {"old": "new"}, globals())`, a function
`@renamed_arguments("ts.function", old="new")`, a class `old = renamed_attribute("Class", "new")`.
`docs/renamed.md` has the table for users.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from .errors import UsageError, lines_up

P = ParamSpec("P")
R = TypeVar("R")
# Each old name and its new one, as users write them; filled as modules are imported.
RENAMED: dict[str, str] = {}


def renamed_names(
    module: str, names: Mapping[str, str], there: Mapping[str, Any]
) -> Callable[[str], Any]:
    """The `__getattr__` of a module, which users write as `module` and whose globals are `there`:
    it finds what `names` (old: new) renamed, and warns."""
    RENAMED.update({f"{module}.{old}": f"{module}.{new}" for old, new in names.items()})

    def __getattr__(name: str) -> Any:
        new = names.get(name)
        if new is None:
            raise AttributeError(f"module {there['__name__']!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{new}")
        return there[new]

    return __getattr__


def renamed_arguments(function: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for the function or class that users write as `function`: arguments that are
    given under the old names of `names` (old=new) go to the new ones, with a warning. Raises
    UsageError if both are given."""
    RENAMED.update({f"{function}({old}=)": f"{new}=" for old, new in names.items()})

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        if isinstance(fn, type):
            fn.__init__ = wrap(fn.__init__)  # type: ignore[misc]
            return fn

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise UsageError(
                        f"{function}: {old}= and {new}= are the same argument",
                        fix=f"give {new}= alone",
                    )
                _warn(f"{function}({old}=)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return fn(*args, **kwargs)

        call.old_names = names  # type: ignore[attr-defined]
        return call

    return wrap


class renamed_attribute:
    """An old attribute of a class that users write as `owner`: `old = renamed_attribute("Mesh",
    "new")` reads the new one, with a warning."""

    def __init__(self, owner: str, new: str) -> None:
        self._owner, self._new = owner, new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = f"{self._owner}.{name}"
        RENAMED[self._old] = f"{self._owner}.{self._new}"

    def __get__(self, found: object, owner: type) -> Any:
        _warn(self._old, f"{self._owner}.{self._new}")
        return getattr(owner if found is None else found, self._new)


def _warn(old: str, new: str) -> None:
    text = f"{old} is called {new} now; the old name goes with the next version"
    warnings.warn(text, DeprecationWarning, stacklevel=lines_up())
