"""Ambient settings: one frozen `Settings` in one context variable.

A recorded function captures the settings it was recorded under and has them in its cache key, so
they are a value: hashable, compared by content, never changed in place.

>>> with replaced(strict=True):
...     with replaced(autocast="bf16"):
...         print(settings().strict, settings().autocast)
...     print(settings().autocast)
True bf16
None

A new thread starts from the defaults; an asyncio task inherits from the task that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from . import environment
from .dtypes import DType
from .limits import limits
from .options import PLAIN, ProgramOptions, ScheduleOptions

if TYPE_CHECKING:  # a circle: `with mesh:` sets the current mesh, which is a setting
    from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force.

    `mesh`: the current mesh. `autocast`: a dtype's name; `autocast_embeddings`: it holds for
    embeddings, too; `autocast_fp8`: linear products are rounded to fp8. `strict`: strict mode.
    `ordered`: sums over devices have a fixed order at every level of determinism. `reduce_dtype`:
    the dtype in which sums of gradients are sent (None: their own). `no_grad`: results are
    constants to gradients. `op_by_op`: a compiled function runs op by op for gradients. `program`:
    the options of programs recorded here. `tune_limit_s`: compiled functions are tuned, each in at
    most so many seconds. `called` is called in place of a compiled function, with the function and
    its arguments.
    """

    mesh: Mesh | None = None
    autocast: str | None = None
    autocast_embeddings: bool = False
    autocast_fp8: bool = False
    strict: bool = False
    ordered: bool = False
    reduce_dtype: DType | None = None
    no_grad: bool = False
    op_by_op: bool = False
    program: ProgramOptions = PLAIN
    tune_limit_s: float | None = field(default=None, compare=False)
    called: Callable[[Any, Any, Any], Any] | None = field(default=None, compare=False)


class Changes(TypedDict, total=False):
    """Arguments of `replaced` and `enter`: fields of `Settings` and of its `program`."""

    mesh: Mesh | None
    autocast: str | None
    autocast_embeddings: bool
    autocast_fp8: bool
    strict: bool
    ordered: bool
    reduce_dtype: DType | None
    no_grad: bool
    op_by_op: bool
    program: ProgramOptions
    comm_trace: bool
    schedule: ScheduleOptions
    tune_limit_s: float | None
    called: Callable[[Any, Any, Any], Any] | None
    executor: str
    determinism: str
    order: str
    level_required: bool


_PROGRAM = {f.name for f in fields(ProgramOptions)}


def _changed(now: Settings, changes: Changes) -> Settings:
    own: dict[str, Any] = {k: v for k, v in changes.items() if k not in _PROGRAM}
    program: dict[str, Any] = {k: v for k, v in changes.items() if k in _PROGRAM}
    if program:
        own["program"] = replace(own.get("program", now.program), **program)
    return replace(now, **own)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Settings and the scope they were opened in: a stack that is itself a value."""

    settings: Settings
    outer: _Scope | None = field(default=None, repr=False)


_scope: ContextVar[_Scope | None] = ContextVar("tessera_settings", default=None)


@cache
def _root() -> _Scope:
    # At first use rather than at import: a program may still set its switches after `import`.
    environment.warn_of_unknown()
    limits()
    level = "mesh_invariant" if environment.is_on(environment.DETERMINISTIC) else "fast"
    traced = environment.is_on(environment.COMM_TRACE)
    return _Scope(Settings(program=ProgramOptions(level, comm_trace=traced)))


def settings() -> Settings:
    """Returns the settings in force here."""
    return (_scope.get() or _root()).settings


def enter(**changes: Unpack[Changes]) -> Settings:
    """Opens a scope with `changes` to the settings in force; `leave` closes it.

    For objects that are context managers themselves and may be entered more than once (`with mesh:`
    inside `with mesh:`). Everything else uses `replaced`.
    """
    outer = _scope.get() or _root()
    inner = _Scope(_changed(outer.settings, changes), outer)
    _scope.set(inner)
    return inner.settings


def put(**changes: Unpack[Changes]) -> None:
    """Changes the innermost scope itself, for statements that hold from here on."""
    inner = _scope.get() or _root()
    _scope.set(_Scope(_changed(inner.settings, changes), inner.outer))


def leave() -> None:
    """Closes the innermost scope."""
    inner = _scope.get()
    assert inner is not None and inner.outer is not None, "leave() without enter()"
    _scope.set(inner.outer)


@contextmanager
def replaced(**changes: Unpack[Changes]) -> Iterator[Settings]:
    """A context with `changes` to the settings, which restores them at its end."""
    token = _scope.get()
    try:
        yield enter(**changes)
    finally:
        _scope.set(token)
