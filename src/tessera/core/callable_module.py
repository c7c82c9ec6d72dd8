"""Callable modules, for `@schedule(...)` and `ts.op(...)`."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module: str, call: Callable[..., Any]) -> None:
    """Makes a call of the module named `module` a call of `call`.

    Python looks for `__call__` in the class of the called object, not in the module itself. So the
    module gets a class of its own, which the language reference allows for this purpose
    ("Customizing module attribute access"). Imports and attributes of the module do not change.
    """
    face = type("CallableModule", (ModuleType,), {"__call__": staticmethod(call)})
    sys.modules[module].__class__ = face
