"""Who still holds a tensor of a function when its recording has ended? Found, and named, at once.

Such a tensor has no value, and is an error wherever it is used. A list of losses that the function
appends to would hold one, or a cache.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from ..core.errors import UsageError, fail
from .tensor import Tensor
from .tree import is_registered

_DEPTH, _FEW = 4, 8


def need_none_left(who: str, made: Sequence[ref[Tensor]]) -> None:
    """Raises UsageError if something outside of the function `who` holds a tensor of `made`."""
    if all(r() is None for r in made):
        return
    with _thawed():
        _look(who, made)


@contextmanager
def _thawed() -> Iterator[None]:
    """The collector does not say what holds a value where the holder stood before `gc.freeze()`."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _look(who: str, made: Sequence[ref[Tensor]]) -> None:
    gc.collect()  # what only a cycle of references holds
    alive = [t for r in made if (t := r()) is not None]
    for t in alive[:_FEW]:  # each is looked for in the whole heap
        holder = _holder(t, {id(alive)}, _DEPTH)
        if holder:
            loc = t._node.loc if t._node is not None else ""
            raise fail(
                UsageError,
                f"{who}: a tensor of the recorded function is kept outside of it",
                [(t.name or "tensor", t.type), *([("made at", loc)] if loc else []),
                 ("kept by", holder)],
                fix="return it from the function, and keep what the call gives back",
            )  # fmt: skip


def _holder(x: Any, known: set[int], depth: int) -> str:
    """What a user calls the thing that holds `x`; "" where it is nothing of theirs."""
    if not depth:
        return ""
    known = {*known, id(x)}
    for r in gc.get_referrers(x):
        if id(r) in known or isinstance(r, types.FrameType):
            continue
        found = _named(r, x, known, depth)
        if found:
            return found
    return ""


def _named(r: Any, x: Any, known: set[int], depth: int) -> str:
    """How a user would call the place where `r` holds `x`: a variable, an attribute, an item of a
    container that has such a name; "" where it has none."""
    if isinstance(r, types.CellType):
        return _variable(r)
    if isinstance(r, dict):
        key = next((k for k, v in r.items() if v is x), None)
        module = sys.modules.get(str(r.get("__name__")))
        if module is not None and vars(module) is r:
            mine = module.__name__.startswith("tessera.")
            return "" if mine else f"{key}, a global of {module.__name__}"
        for o in gc.get_referrers(r):
            if getattr(o, "__dict__", None) is r:
                return _attribute(o, x)
        held = _holder(r, known, depth - 1)
        return f"{held}, at {key!r}" if held else ""
    if isinstance(r, (list, tuple, set, deque)):
        held = _holder(r, known, depth - 1)
        at = "" if isinstance(r, set) else next((str(i) for i, v in enumerate(r) if v is x), "")
        return f"{held}, item {at}" if held and at else held
    return _attribute(r, x)


def _attribute(o: Any, x: Any) -> str:
    kind = type(o)
    if isinstance(o, functools._lru_cache_wrapper):
        return f"the cache of {o.__wrapped__.__qualname__}"
    if kind.__module__.startswith("tessera.") and not is_registered(kind):
        return ""
    have = getattr(o, "__dict__", None)
    names = have if isinstance(have, dict) else {}
    key = next((k for k, v in names.items() if v is x), None)
    return f"{kind.__name__}.{key}" if key is not None else ""


def _variable(cell: types.CellType) -> str:
    """The variable that `cell` is, and a function that has it from outside."""
    for closure in gc.get_referrers(cell):
        if isinstance(closure, tuple):
            for f in gc.get_referrers(closure):
                if isinstance(f, types.FunctionType) and f.__closure__ is closure:
                    at = next(i for i, c in enumerate(closure) if c is cell)
                    name = f.__code__.co_freevars[at]
                    mine = f.__module__.startswith("tessera.")
                    return "" if mine else f"{name}, a variable around {f.__qualname__}"
    return ""
