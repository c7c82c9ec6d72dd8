"""Which ambient choices hold at this line? One frozen `Settings` in one context variable.

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
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypedDict, Unpack

from . import switches
from .errors import BackendError, fail
from .options import AS_IT_COMES, ScheduleOptions

if TYPE_CHECKING:
    from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Settings:
    """What is in force: the current mesh, the autocast dtype's name, strictness, the comm trace,
    how programs are scheduled, what runs them ("fused": one program, "stepped": step by step), what
    is promised of the bits, in which order sums over devices are added up then, and whether what is
    computed is a constant to gradients. How long a
    collective may take and how many of them a rank remembers is no part of a program, so two
    settings that differ in it are equal."""

    mesh: Mesh | None = None
    autocast: str | None = None
    strict: bool = False
    comm_trace: bool = False
    schedule: ScheduleOptions = AS_IT_COMES
    executor: str = "fused"
    promise: str = "fast"
    order: str = "binary"
    no_grad: bool = False
    collective_limit_s: float = field(default=300.0, compare=False)
    flight_records: int = field(default=256, compare=False)


class Changes(TypedDict, total=False):
    """What `replaced` and `enter` take: any of the fields of `Settings`."""

    mesh: Mesh | None
    autocast: str | None
    strict: bool
    comm_trace: bool
    schedule: ScheduleOptions
    executor: str
    promise: str
    order: str
    no_grad: bool
    collective_limit_s: float
    flight_records: int


@dataclass(frozen=True, slots=True)
class _Scope:
    """Settings and the scope they were opened in: a stack that is itself a value."""

    settings: Settings
    outer: _Scope | None = field(default=None, repr=False)


_scope: ContextVar[_Scope | None] = ContextVar("tessera_settings", default=None)


@cache
def _root() -> _Scope:
    # At first use rather than at import: a program may still set its switches after `import`.
    switches.warn_of_unknown()
    promise = "mesh_invariant" if switches.is_on(switches.DETERMINISTIC) else "fast"
    return _Scope(
        Settings(
            comm_trace=switches.is_on(switches.COMM_TRACE),
            promise=promise,
            collective_limit_s=switches.number(switches.COLLECTIVE_LIMIT, 300),
            flight_records=switches.number(switches.FLIGHT_RECORDS, 256),
        )
    )


def settings() -> Settings:
    """The settings in force here."""
    return (_scope.get() or _root()).settings


def enter(**changes: Unpack[Changes]) -> Settings:
    """Opens a scope with `changes` on top of what is in force; `leave` closes it.

    For objects that are context managers themselves and may be entered more than once
    (`with mesh:` inside `with mesh:`). Everything else uses `replaced`.
    """
    outer = _scope.get() or _root()
    inner = _Scope(replace(outer.settings, **changes), outer)
    _scope.set(inner)
    return inner.settings


def put(**changes: Unpack[Changes]) -> None:
    """Changes the innermost scope itself: for statements that hold from here on."""
    inner = _scope.get() or _root()
    _scope.set(_Scope(replace(inner.settings, **changes), inner.outer))


def leave() -> None:
    """Closes the innermost scope."""
    inner = _scope.get()
    assert inner is not None and inner.outer is not None, "leave() without enter()"
    _scope.set(inner.outer)


@contextmanager
def replaced(**changes: Unpack[Changes]) -> Iterator[Settings]:
    """Settings with `changes` inside the `with`, and what was there before after it."""
    token = _scope.get()
    try:
        yield enter(**changes)
    finally:
        _scope.set(token)


_providers: list[Callable[[], int]] = []


def set_device_provider(provider: Callable[[], int]) -> None:
    """Says how devices are counted. The runtime does this, since only it may ask the engine."""
    _providers[:] = [provider]


def device_count() -> int:
    """How many devices this program has. Raises `BackendError` where nothing can count them."""
    if not _providers:
        raise fail(
            BackendError,
            "device_count: no engine is loaded, so there are no devices to count",
            fix="import tessera, or name the devices: Mesh(['dp'], devices=range(8))",
        )
    return _providers[0]()
