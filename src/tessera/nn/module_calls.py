"""Wrappers of a module's methods: a named scope in the graph, and a record that the module was
used. Error for a module without `__call__`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.errors import UsageError
from ..core.public import unfit_call
from ..core.tracebacks import boundary
from ..lang.record.recorder import CALLED, current
from .module_scopes import module_scope


def scoped(call: Callable[..., Any], base: type) -> Callable[..., Any]:
    """The `__call__` of a module, a subclass of `base`, in the scope of its path."""

    @boundary
    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _record_use(self, base)
        try:
            with module_scope(self, self.__dict__.get("scope_name") or type(self).__name__.lower()):
                return call(self, *args, **kwargs)
        except TypeError as error:
            name = type(self).__name__
            wrong_call = unfit_call(error, call, name, (self, *args), kwargs, of_object=True)
            if wrong_call is None:
                raise
        raise wrong_call

    return run


def recording_use(method: Callable[..., Any], base: type) -> Callable[..., Any]:
    """Another method of a module, which records that the module was used, in the scope of its
    path."""

    @boundary
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _record_use(self, base)
        if current() is None:
            return method(self, *args, **kwargs)
        with module_scope(self):
            return method(self, *args, **kwargs)

    return run


def _record_use(module: object, base: type) -> None:
    recorder = current()
    if recorder is None:
        CALLED[id(module)] = module
    elif isinstance(module, base) and id(module) not in recorder.root.changes.created:
        recorder.root.called_modules[id(module)] = module


def not_callable(self: Any, *args: Any, **kwargs: Any) -> Any:
    has = "forward" if hasattr(type(self), "forward") else "its method"
    raise UsageError(
        f"{type(self).__name__}: there is no __call__ to call", fix=f"name {has} __call__"
    )
