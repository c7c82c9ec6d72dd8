"""What does a recorded function find outside of itself, and what does it leave there?

The globals and closure cells that its code names, and the attributes that it names of objects found
there, are places. They are read anew at each call: a tensor put there since is used, and anything
else that changed means another recording. A tensor that the function itself puts into such a place
is a result, and is put there after each call; so is a number, of which each that was there before
means a recording of its own.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ..core.errors import PACKAGE
from .host_data import is_host_array
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

    def mark(self) -> object:
        """What of it is compared between calls."""
        return _mark(self.now())

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
    return kept(x) if isinstance(x, _VALUES) or is_host_array(x) else Same(x)


_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, Enum)
_VALUES = (
    int, float, complex, str, bytes, bytearray, type(None), set, frozenset, deque, np.generic,
)  # fmt: skip


@dataclass(slots=True)
class Found:
    """What a recording met outside: what must hold at a later call, and what is put there."""

    tensors: list[tuple[object, list[Place]]] = field(default_factory=list)  # (type, where it is)
    others: list[tuple[Place, object]] = field(default_factory=list)  # (place, its mark)
    writes: list[Place] = field(default_factory=list)
    values: list[tuple[Place, object]] = field(default_factory=list)  # (place, what is put there)

    def same(self, begun: bool = False) -> bool:
        """Whether the recording still stands for a call now; `begun`: but for what is there where
        nothing was."""
        for kind, places in self.tensors:
            t = places[0].now()
            if type(t) is not Tensor or t.type != kind or any(p.now() is not t for p in places[1:]):
                return False
        for place, mark in self.others:
            x = place.now()
            if begun and type(mark) is Same and mark.x is GONE:
                continue
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
        before, after = self._looked(recorder)
        self.after = after
        written = _written(before, after, recorder)
        wrote = {p.name for p, _ in written}
        found = Found()
        used = {id(t): t.type for t, _ in recorder.captured}
        groups: dict[int, list[Place]] = {}
        for name, (place, x, mark) in before.items():
            if place.above in wrote:  # an item of a tuple
                wrote.add(name)
            if type(x) is Tensor:
                if id(x) in used:
                    groups.setdefault(id(x), []).append(place)
            # What else the function changed it would change at each recording anew.
            elif name in wrote or (name in after and after[name][2] == mark):
                found.others.append((place, mark))
        found.others += [(p, Same(GONE)) for p, _ in written if p.name not in before]
        found.tensors = [(used[i], places) for i, places in groups.items()]
        tensors = [(p, x) for p, x in written if isinstance(x, Tensor)]
        found.writes = [p for p, _ in tensors]
        found.values = [(p, x) for p, x in written if not isinstance(x, Tensor)]
        return found, {i: places[0] for i, places in groups.items()}, [x for _, x in tensors]

    def restore(self, recorder: Recorder) -> None:
        """Puts back what was in the places into which the function has put tensors and numbers."""
        before, after = self._looked(recorder)
        for place, _ in _written(before, after, recorder):
            place.put(before[place.name][1] if place.name in before else GONE)

    def _looked(self, recorder: Recorder) -> tuple[Looked, Looked]:
        """All places before the recording and now, with the attributes of modules that it set."""
        before, after = dict(self.before), _look(*self._args)
        for (_, name), (holder, was) in recorder.changes.noted.items():
            place = Place(holder.__dict__, name, f"{type(holder).__name__}.{name}")
            for looked, x in (before, was), (after, holder.__dict__.get(name, GONE)):
                if x is not GONE:
                    looked[place.name] = place, x, _mark(x)
        return before, after


def _written(before: Looked, after: Looked, recorder: Recorder) -> list[tuple[Place, Any]]:
    """The places that the function set to its tensors, and to numbers and their like: they, or what
    they are in, were there before. A list that grew would do so at each recording."""
    out = []
    for place, x, _ in after.values():
        name, holder, grew = place.above, None, False
        if name is not None:
            holder = after[name][1]
            if name not in before or before[name][1] is not holder or isinstance(holder, tuple):
                continue
            grew = before[name][2] != after[name][2]
        if isinstance(x, Tensor):
            if x._trace is recorder and not isinstance(holder, list):
                out.append((place, x))
        elif is_plain(x) and not (isinstance(holder, list) and grew):
            was = before.get(place.name)
            if was is None or kept(was[1]) != kept(x):
                out.append((place, x))
    return out


def is_plain(x: Any) -> bool:
    """Whether `x` is a number, or its like, that cannot change by itself."""
    return isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))


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
                names.update(names_in(f.__code__))
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


def names_in(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that it names, and those of the functions in it."""
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from names_in(c)


def variables(f: types.FunctionType) -> Iterator[Place]:
    """The globals and the closure cells that the code of `f` names."""
    for name in dict.fromkeys(names_in(f.__code__)):
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
