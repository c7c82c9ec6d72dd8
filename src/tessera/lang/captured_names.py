"""What does a recorded function find outside of itself, and what does it leave there?

The globals and closure cells that its code names, and the attributes that it names of objects found
there, are places. They are read anew at each call: a tensor put there since is used, and anything
else that changed means another recording. A tensor that the function itself puts into such a place
is a result, and is put there after each call.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import PACKAGE
from .record import Recorder
from .static_arguments import Same, kept
from .tensor import Tensor
from .tree import is_registered

GONE: Any = Same("nothing")
MOST_FUNCTIONS, MOST_ITEMS, DEPTH = 200, 2000, 4
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_LIBRARIES = (PACKAGE, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A global, a cell of a closure or an attribute of an object, or what is below one of them."""

    root: Any  # a dict or a cell
    key: str
    label: str
    path: tuple[tuple[bool, Any], ...] = ()  # (is it an attribute, its name or key)

    @property
    def name(self) -> Name:
        return id(self.root), self.key, self.path

    def below(self, attribute: bool, key: Any) -> Place:
        label = f"{self.label}.{key}" if attribute else f"{self.label}[{key!r}]"
        return Place(self.root, self.key, label, (*self.path, (attribute, key)))

    def now(self) -> Any:
        """What is there, or GONE."""
        try:
            return self._at(self.path)
        except (LookupError, AttributeError, ValueError, TypeError):
            return GONE

    def _at(self, path: tuple[tuple[bool, Any], ...]) -> Any:
        x = self.root[self.key] if isinstance(self.root, dict) else self.root.cell_contents
        for attribute, key in path:
            x = getattr(x, key) if attribute else x[key]
        return x

    @property
    def above(self) -> Name | None:
        """The name of the place that this one is in."""
        return (id(self.root), self.key, self.path[:-1]) if self.path else None

    def put(self, value: Any) -> None:
        """Puts `value` there; GONE removes what is there."""
        holder: Any = self.root
        attribute, key = not isinstance(holder, dict), "cell_contents"
        if not attribute:
            key = self.key
        if self.path:
            holder, (attribute, key) = self._at(self.path[:-1]), self.path[-1]
        if value is GONE:
            delattr(holder, key) if attribute else holder.pop(key)
        elif attribute:
            setattr(holder, key, value)
        else:
            holder[key] = value


def _mark(x: Any) -> object:
    """The part of an object outside that is compared between calls, if it is not a tensor."""
    if isinstance(x, dict):
        return dict, tuple(x)
    if isinstance(x, (list, tuple)):
        return type(x), len(x)
    return kept(x) if isinstance(x, _VALUES) else Same(x)


_VALUES = (
    int, float, complex, str, bytes, bytearray, type(None), set, frozenset, deque, np.ndarray,
    np.generic,
)  # fmt: skip


@dataclass(slots=True)
class Found:
    """What a recording met outside: what must hold at a later call, and what is put there."""

    tensors: list[tuple[object, list[Place]]] = field(default_factory=list)  # (type, where it is)
    others: list[tuple[Place, object]] = field(default_factory=list)  # (place, its mark)
    writes: list[Place] = field(default_factory=list)

    def same(self) -> bool:
        """Whether the recording still stands for a call now."""
        for kind, places in self.tensors:
            t = places[0].now()
            if type(t) is not Tensor or t.type != kind or any(p.now() is not t for p in places[1:]):
                return False
        for place, mark in self.others:
            x = place.now()
            if not (x is mark.x if type(mark) is Same else _mark(x) == mark):
                return False
        return True


Looked = dict[Name, tuple[Place, Any, object]]  # (place, what is there, its mark)


class Outside:
    """The places of the function `fn`, which may be a method of objects among its `arguments`."""

    def __init__(self, fn: Any, arguments: Iterable[Any], owners: Iterable[type]) -> None:
        given = list(arguments)
        self._args = fn, given, [x for x in given if type(x) in owners]
        self.before = _look(*self._args)

    def end(self, recorder: Recorder) -> tuple[Found, dict[int, Place], list[Tensor]]:
        """(what was found, the place of each tensor that the recording uses by its id, what it put
        into `writes`)."""
        after = _look(*self._args)
        found = Found()
        used = {id(t): t.type for t, _ in recorder.captured}
        groups: dict[int, list[Place]] = {}
        for name, (place, x, mark) in self.before.items():
            if type(x) is Tensor:
                if id(x) in used:
                    groups.setdefault(id(x), []).append(place)
            # What the function changed by itself it would change at each recording anew.
            elif name in after and after[name][2] == mark:
                found.others.append((place, mark))
        found.tensors = [(used[i], places) for i, places in groups.items()]
        new = self._set(after, recorder)
        found.writes = [p for p, _ in new]
        return found, {i: places[0] for i, places in groups.items()}, [x for _, x in new]

    def restore(self, recorder: Recorder) -> None:
        """Puts back what was in the places into which the function has put its tensors."""
        for place, _ in self._set(_look(*self._args), recorder):
            place.put(self.before[place.name][1] if place.name in self.before else GONE)

    def _set(self, after: Looked, recorder: Recorder) -> list[tuple[Place, Tensor]]:
        """The places that the function set to its tensors: they, or what they are in, were there
        before. A list is no such place: it would grow with each recording."""
        out = []
        for place, x, _ in after.values():
            if isinstance(x, Tensor) and x._trace is recorder:
                name = place.above
                holder = None if name is None else after[name][1]
                was = name is None or (name in self.before and self.before[name][1] is holder)
                if was and not isinstance(holder, (list, tuple)):
                    out.append((place, x))
        return out


def places_of(fn: Any, tensors: Iterable[Tensor]) -> list[tuple[Place, Tensor]]:
    """Where `fn` finds each of `tensors` outside of itself."""
    wanted = set(map(id, tensors))
    return [(p, x) for p, x, _ in _look(fn, [], []).values() if id(x) in wanted]


# -- looking --------------------------------------------------------------------------------------
def _look(fn: Any, arguments: list[Any], own: list[Any]) -> Looked:
    """All places of `fn`, with what is there."""
    roots: dict[Name, Place] = {}
    names: set[str] = set()
    seen: set[int] = set()
    objects = [x for x in arguments if _is_object(x) or is_registered(type(x))]
    package = str(getattr(inspect.unwrap(fn), "__module__", "")).partition(".")[0]
    todo = [fn]
    while todo and len(seen) < MOST_FUNCTIONS:
        f = todo.pop()
        if id(f) not in seen:
            seen.add(id(f))
            todo += _parts(f)
            if isinstance(f, types.FunctionType) and _is_theirs(f, package):
                names.update(_names(f.__code__))
                for place in variables(f):
                    roots.setdefault(place.name, place)
                    x = place.now()
                    if callable(x):
                        todo.append(x)
                    if _is_object(x) or is_registered(type(x)):
                        objects.append(x)
        if not todo:
            every = (m for x in objects for m in _methods(x, names))
            todo = [m for m in every if id(m) not in seen]
    out: Looked = {}
    for x in own:
        for name in sorted(names & x.__dict__.keys()):
            place = Place(x.__dict__, name, f"{type(x).__name__}.{name}")
            _expand(place, x.__dict__[name], names, out)
    for place in roots.values():
        _expand(place, place.now(), names, out)
    return out


def _expand(place: Place, x: Any, names: set[str], out: Looked) -> None:
    """Adds what is at `place`, and what is in it, to `out`."""
    if x is GONE or len(out) > MOST_ITEMS or isinstance(x, types.ModuleType):
        return
    out[place.name] = place, x, None if type(x) is Tensor else _mark(x)
    if len(place.path) == DEPTH:
        return
    if isinstance(x, dict):
        for key, value in x.items():
            _expand(place.below(False, key), value, names, out)
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            _expand(place.below(False, i), value, names, out)
    elif _is_object(x) or is_registered(type(x)):
        for name in sorted(names & x.__dict__.keys()):
            below = x.__dict__[name]
            # The tensors of a module are read by lang/captured_modules.py; here it counts which
            # parts it has.
            if _is_object(x) or is_registered(type(below)):
                _expand(place.below(True, name), below, names, out)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _names(c)


def variables(f: types.FunctionType) -> Iterator[Place]:
    """The globals and the closure cells that the code of `f` names."""
    for name in dict.fromkeys(_names(f.__code__)):
        if name in f.__globals__:
            yield Place(f.__globals__, name, name)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield Place(cell, name, name)


def _is_theirs(f: types.FunctionType, package: str) -> bool:
    """Whether `f` is of the user's, or of the `package` that the compiled function is of."""
    home = str(f.__module__).partition(".")[0]
    return (home == package and home != "tessera") or not f.__code__.co_filename.startswith(
        _LIBRARIES
    )


def _is_object(x: Any) -> bool:
    """Whether `x` is an object of a user's with attributes, and no container of its own kind."""
    kind = type(x)
    return (
        not isinstance(x, _OPAQUE)
        and isinstance(getattr(x, "__dict__", None), dict)
        and not isinstance(x, (dict, list, tuple))
        and not is_registered(kind)
        and not kind.__module__.startswith(("tessera.", "jax", "numpy"))
    )


def _parts(f: Any) -> list[Any]:
    """The functions that `f`, which can be called, is made of."""
    if isinstance(f, types.MethodType):
        return [f.__func__]
    if isinstance(f, functools.partial):
        return [f.func]
    if isinstance(f, types.FunctionType):
        return [f.__wrapped__] if hasattr(f, "__wrapped__") else []
    if isinstance(f, type) or not type(f).__module__.startswith("tessera."):
        return []
    inside = getattr(f, "__dict__", {}).values()  # a compiled function, a pipeline, a stage
    rows = [v for x in inside for v in (x if isinstance(x, (list, tuple)) else [x])]
    return [v for v in rows if callable(v) and not isinstance(v, type)]


def _methods(x: Any, names: set[str]) -> Iterator[Any]:
    for c in type(x).__mro__:
        for name, v in vars(c).items():
            if name in names or name == "__call__":
                v = getattr(v, "fget", None) or getattr(v, "__func__", None) or v
                if callable(v) and not isinstance(v, type):
                    yield v
