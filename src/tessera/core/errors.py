"""Errors and warnings. Each error says what happened, and shows the operands, the user's line and a
fix.

>>> from tessera.core.errors import MeshError
>>> print(MeshError("Mesh: axis 'q' is not an axis", mesh="dp=2 tp=4", fix="use dp"))
Mesh: axis 'q' is not an axis
  mesh : dp=2 tp=4
  fix  : use dp
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from .brief import brief

PACKAGE = str(Path(__file__).resolve().parent.parent)
# Library frames that may stand between a user's line and ours.
_THREADS = (f"{os.sep}threading.py", f"{os.sep}futures{os.sep}thread.py")
_BETWEEN = ("contextlib.py", "functools.py", f"{os.sep}dataclasses.py", *_THREADS)
_PEERS = tuple(f"site-packages{os.sep}{name}{os.sep}" for name in ("jax", "optax", "torch"))
# Functions that libraries generate: methods of dataclasses and named tuples, JAX's lambdas.
_GENERATED = ("__init__", "__new__", "__eq__", "__repr__", "__hash__", "<lambda>")
_LIBRARIES = ("tessera", "jax", "numpy", "dataclasses", "importlib", "runpy")


class TesseraError(Exception):
    """The base class of every error that Tessera raises on purpose.

    Its text is `message`, the operands by name (empty ones are left out), the user's line, and
    `fix`. `rows` are further operands as (name, value); `at` replaces the user's line, for values
    whose own line matters more than the call's.
    """

    def __init__(
        self,
        message: str = "",
        /,
        *,
        rows: Iterable[tuple[str, object]] = (),
        fix: str = "",
        at: str | None = None,
        **operands: object,
    ) -> None:
        given = (*operands.items(), *rows)
        with brief():
            lines = [(name, text) for name, value in given if (text := str(value))]
        lines += [("at", where)] if (where := caller() if at is None else at) else []
        lines += [("fix", fix)] if fix else []
        width = max((len(name) for name, _ in lines), default=0)
        super().__init__("\n".join([message, *(f"  {n:<{width}} : {text}" for n, text in lines)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), *self.args), self.__dict__ or None


def _unpickled(cls: type[TesseraError], *args: object) -> TesseraError:
    error = cls.__new__(cls)
    error.args = args
    return error


class ShapeError(TesseraError, ValueError):
    """Raised when shapes do not fit an op or each other, or a dim or an index does not exist."""


class DTypeError(TesseraError, TypeError):
    """Raised when an op does not take a dtype, or when a conversion would lose values."""


class LayoutError(TesseraError, ValueError):
    """Raised when an op, a mesh or a redistribution cannot have the layout that was asked for."""


class MeshError(TesseraError, ValueError):
    """Raised when a mesh cannot be built or is missing, or when tensors are on different meshes."""


class StrategyError(TesseraError, ValueError):
    """Raised when a strategy does not exist or does not fit the mesh or the weights."""


class GraphError(TesseraError, ValueError):
    """Raised when a graph, a schedule, or its text breaks a rule of the IR."""


class DonatedError(TesseraError, RuntimeError):
    """Raised when a tensor is used after its buffer was donated to a function."""


class BackendError(TesseraError, RuntimeError):
    """Raised when the machine cannot do what was asked: too few devices, or no such backend."""


class DeviceLostError(BackendError):
    """Raised when a program, a read or a move needs a device that was lost."""


class CheckpointError(TesseraError, RuntimeError):
    """Raised when a checkpoint cannot be written, is not there, or is not what was saved."""


class UsageError(TesseraError, TypeError):
    """Raised when a call has no meaning: a wrong kind of argument, a tensor outside of its
    scope."""


class EngineWarning(UserWarning):
    """Warns that the engine cannot do something as asked: it was started before Tessera could set
    it up, or its devices keep a lower level of determinism."""


class OptionWarning(UserWarning):
    """Warns that an option that was given has no effect there, and says where it has one."""


class StrategyWarning(UserWarning):
    """Warns that a strategy splits nothing, or that a local sum counts a gradient twice."""


class TraceWarning(UserWarning):
    """Warns of a recorded function: it is recorded again and again, as its arguments differ at each
    call; it has side effects that later calls will not have; or no gradient flows through it."""


class UnknownNameError(TesseraError, AttributeError):
    """Raised when a public module, a tensor, a module or an optimizer lacks an attribute."""


class NotYetError(UsageError, UnknownNameError):
    """A UsageError for an attribute that an object does not have yet: `hasattr` returns False."""


NotYetError.__name__ = NotYetError.__qualname__ = UsageError.__name__  # the documented name

for _cls in (
    TesseraError, ShapeError, DTypeError, LayoutError, MeshError, StrategyError, GraphError,
    DonatedError, BackendError, DeviceLostError, UsageError, UnknownNameError, EngineWarning,
    OptionWarning, StrategyWarning, TraceWarning, NotYetError,
):  # fmt: skip
    _cls.__module__ = "tessera"


def caller(frame: FrameType | None = None) -> str:
    """Returns the innermost `file:line` outside of the package, or "" without one; here, or seen
    from `frame` (of another thread).

    Code without a file is a user's, too: a string (`exec`, `python -c`), the standard input, a
    notebook's cell. A doctest or an interactive line has no useful location, so it returns "".
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _INNER:
            if file.startswith("<doctest") or _is_typed(frame):
                return ""
            if is_users(frame):
                return _place(file, frame.f_lineno)
            if not file.startswith("<"):
                _INNER.add(file)  # a cache: each op calls this, below twenty frames of the package
        frame = frame.f_back
    return ""


_INNER: set[str] = set()  # files known not to be a user's


def is_users(frame: FrameType) -> bool:
    """Returns whether the code of `frame` is a user's; code that a library generates is not."""
    name = frame.f_code.co_filename
    if name.startswith("<"):
        home = str(frame.f_globals.get("__name__", ""))
        made = name.startswith("<frozen") or frame.f_code.co_name in _GENERATED
        return not made and home.partition(".")[0] not in _LIBRARIES
    if name.startswith(PACKAGE) or name.endswith(_BETWEEN):
        return False
    return not any(peer in name for peer in _PEERS)


def _is_typed(frame: FrameType) -> bool:
    """Returns whether `frame` runs a line typed at Python's own prompt."""
    name = frame.f_code.co_filename
    return name.startswith(("<stdin", "<python-input")) and hasattr(sys, "ps1")


def _place(file: str, line: int) -> str:
    """Returns a file's line; for a notebook's cell its number and line, such as `In[3]:2`."""
    if "ipykernel_" not in file and not file.startswith("<ipython-input"):
        return f"{file.rpartition('/')[2]}:{line}"
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})  # of IPython's cells
    named = re.match(r"<ipython-input-(\d+)-", file)
    number = numbers.get(file, named and named[1])
    return f"cell:{line}" if number is None else f"In[{number}]:{line}"


def lines_up() -> int:
    """Returns the `stacklevel` with which the caller's warning names the user's line."""
    frame, k = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame):
        frame, k = frame.f_back, k + 1
    return k


def warn_no_effect(option: str, why: str, *, means: str, fix: str) -> None:
    """Gives the OptionWarning that `option`, as the user wrote it, has no effect because of `why`;
    with what it `means`, and the fix."""
    text = f"{option} has no effect: {why}\n  means : {means}\n  fix   : {fix}"
    warnings.warn(text, OptionWarning, stacklevel=lines_up())


def line_of(error: BaseException) -> str:
    """Returns the innermost `file:line` outside of the package at which `error` was raised, or
    ""."""
    found, tb = "", error.__traceback__
    while tb is not None:
        if is_users(tb.tb_frame):
            found = _place(tb.tb_frame.f_code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    return found
