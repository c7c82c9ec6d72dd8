"""Which places outside of a function does its code name?

Globals, variables of enclosing functions, the objects that it is a method of, bound and default
arguments, and the attributes that the code names of all that is found there, of classes and modules
of the user's too. What a function calls counts as its own code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..core.errors import PACKAGE
from .captured_places import GONE, Looked, Name, Place, is_plain, mark_of
from .static_arguments import Same
from .tensor import Tensor
from .tree import containers, is_registered

MOST_FUNCTIONS, MOST_ITEMS = 200, 2000
DEPTH = 4  # attributes of attributes; with the containers between them, twice as many
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
SHARED = (type, types.ModuleType)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
# What runs without a name in the code: `x(...)`, `x[i]`, `x.name`, `for y in x`, `with x`, `2 * x`.
_UNNAMED = {
    *("__call__", "__getitem__", "__getattr__", "__getattribute__", "__iter__", "__next__"),
    *("__len__", "__contains__", "__bool__", "__float__", "__int__", "__index__", "__array__"),
    *("__enter__", "__exit__", "__neg__", "__add__", "__radd__", "__sub__", "__rsub__"),
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__"),
}
_BY_TEXT = {"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__"}
_WRAPPERS = {ChainMap: {"maps"}, UserDict: {"data"}, UserList: {"data"}}  # and what is in them
_LIBRARIES = (PACKAGE, *(sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")))


def look(fn: Any, arguments: list[Any], own: list[Any]) -> Looked:
    """All places of `fn`, with what is there."""
    found = _Look(str(getattr(inspect.unwrap(fn), "__module__", "")).partition(".")[0])
    found.read([fn, *(x for x in arguments if isinstance(x, _CALLED))], arguments)
    for x in own:
        found.root(x, type(x).__name__)
    for place in found.roots.values():
        found.expand(place, place.now())
    return found.out


class _Look:
    """The places of functions of `package`, and of what else is the user's."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.names: set[str] = set()  # all that the code of the functions names
        self.texts: set[str] = set()  # those that it may name as texts, there or not
        self.roots: dict[Name, Place] = {}
        self.out: Looked = {}
        self._shared: set[int] = set()

    def root(self, x: Any, label: str) -> None:
        """Notes `x` itself as a place, which stays `x`; what is in it may change."""
        place = Place(x, None, label)
        self.roots.setdefault(place.name, place)

    def read(self, functions: list[Any], arguments: list[Any]) -> None:
        """Goes through the code of `functions` and of all that they call, for names and roots."""
        todo, seen, count = list(functions), set[int](), 0
        met: dict[object, Any] = {id(x): x for x in arguments}

        def more() -> list[Any]:
            return [m for m in self._methods(met.values()) if id(m) not in seen]

        while count < MOST_FUNCTIONS and (todo := todo or more()):
            f = todo.pop()
            if id(f) in seen:
                continue
            seen.add(id(f))
            todo += _parts(f)
            code = isinstance(f, types.FunctionType)
            if code and not self._is_theirs(f):
                continue
            for x, label in _held(f):
                if not is_plain(x):
                    self.root(x, label)
                    met[id(x)] = x
            if code:
                count += 1
                self.texts.update(_texts(f.__code__))
                self.names.update(names_in(f.__code__), self.texts)
                for place in variables(f):
                    self.roots.setdefault(place.name, place)
                    met[id(place.root), place.key] = place.now()

    def _methods(self, met: Iterable[Any]) -> Iterator[Any]:
        """What can be called of all that was `met`, and of what is in it."""
        todo, seen = [(x, 0) for x in met], set[int]()
        while todo:
            x, depth = todo.pop()
            if id(x) in seen or len(seen) > MOST_ITEMS:
                continue
            seen.add(id(x))
            if callable(x):
                yield x
            if isinstance(x, dict):
                inside = list(x.values())
            elif isinstance(x, (list, tuple)):
                inside = list(x)
            elif self._is_open(x):
                yield from _called(x, self.names)
                inside = [v for _, v in self._entries(x)]
            elif is_dataclass(x) and not isinstance(x, type):  # an optimizer and its schedule
                inside = [getattr(x, f.name, None) for f in fields(x)]
            else:
                continue
            if depth < DEPTH:
                todo += [(v, depth + 1) for v in inside]

    def expand(self, place: Place, x: Any) -> None:
        """Adds what is at `place`, and what is in it."""
        if x is GONE or len(self.out) > MOST_ITEMS:
            return
        if isinstance(x, types.ModuleType) and not self._is_users(x):
            return
        self.out[place.name] = place, x, None if type(x) is Tensor else mark_of(x)
        if isinstance(x, SHARED) and self._is_users(x):  # looked at once, wherever it is found
            if id(x) in self._shared:
                return
            self._shared.add(id(x))
            place = Place(x, None, x.__name__)
            self.out[place.name] = place, x, Same(x)
        if len(place.path) == 2 * DEPTH or sum(own for own, _ in place.path) == DEPTH:
            return
        if isinstance(x, dict):
            for key, value in x.items():
                self.expand(place.below(False, key), value)
        elif isinstance(x, (list, tuple)):
            for i, value in enumerate(x):
                self.expand(place.below(False, i), value)
        elif self._is_open(x):
            for name, value in self._entries(x):
                self.expand(place.below(True, name), value)
            for name in self.texts if not isinstance(x, SHARED) else ():
                there = inspect.getattr_static(x, name, GONE)  # a property does not run for this
                slot = isinstance(there, types.MemberDescriptorType)
                if (there is GONE or slot) and not hasattr(x, name):
                    absent = place.below(True, name)
                    self.out[absent.name] = absent, GONE, Same(GONE)

    def _entries(self, x: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of `x` that the code names, its own and those of its class."""
        whole = isinstance(x, SHARED)
        kind = x if whole else type(x)
        named: dict[str, Any] = {}
        for c in () if isinstance(x, types.ModuleType) else reversed(kind.__mro__):
            if self._is_users(c):
                named |= {name: vars(c)[name] for name in self.names & vars(c).keys()}
        found = {name: v for name, v in named.items() if not hasattr(v, "__get__")}
        if not whole:
            slots = [n for n, v in named.items() if isinstance(v, types.MemberDescriptorType)]
            found |= {name: getattr(x, name, GONE) for name in slots}
        own = {} if isinstance(x, type) else getattr(x, "__dict__", {})
        inside = next((names for k, names in _WRAPPERS.items() if isinstance(x, k)), set())
        for name in (self.names | inside) & own.keys():
            found[name] = own[name]
            # The tensors of a module are read by lang/captured_modules.py; here it counts which
            # parts it has.
            if is_registered(kind) and not is_registered(type(own[name])):
                del found[name]
        yield from sorted(found.items())

    def _is_open(self, x: Any) -> bool:
        """Whether the attributes of `x` are looked at."""
        if isinstance(x, SHARED):
            return self._is_users(x)
        return _is_object(x) or is_registered(type(x))

    def _is_theirs(self, f: types.FunctionType) -> bool:
        """Whether `f` is of the user's, or of the package that the compiled function is of."""
        return self._is_own(str(f.__module__)) or not f.__code__.co_filename.startswith(_LIBRARIES)

    def _is_users(self, x: type | types.ModuleType) -> bool:
        """The same of a class or a module."""
        name = str(x.__name__ if isinstance(x, types.ModuleType) else x.__module__)
        file = getattr(sys.modules.get(name, x), "__file__", None)
        if file is None:
            return name.partition(".")[0] not in sys.stdlib_module_names
        return self._is_own(name) or not file.startswith(_LIBRARIES)

    def _is_own(self, module: str) -> bool:
        home = module.partition(".")[0]
        return home == self.package and home != "tessera"


def names_in(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that it names, and those of the functions in it."""
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from names_in(c)


def _texts(code: types.CodeType) -> Iterator[str]:
    """The texts in `code` that may be names of attributes: `getattr(settings, "rate", 0.1)`."""
    todo: list[Any] = list(code.co_consts)
    by_text = not _BY_TEXT.isdisjoint(names_in(code))
    while by_text and todo:
        x = todo.pop()
        if isinstance(x, (tuple, types.CodeType)):
            todo += x if isinstance(x, tuple) else x.co_consts
        elif isinstance(x, str) and x.isidentifier():
            yield x


@functools.lru_cache(4096)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that it names, and those of the functions in it; `v` of `x.v` is none."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname.endswith(_OF_GLOBALS)]
    return tuple(dict.fromkeys([*own, *(name for c in inner for name in _globals_in(c))]))


_OF_GLOBALS = ("_GLOBAL", "_GLOBALS", "LOAD_NAME")


def variables(f: types.FunctionType) -> Iterator[Place]:
    """The globals and the closure cells that the code of `f` names."""
    for name in _globals_in(f.__code__):
        if name in f.__globals__:
            yield Place(f.__globals__, name, name)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield Place(cell, name, name)


def _is_object(x: Any) -> bool:
    """Whether `x` is an object of a user's with attributes, and no container of its own kind."""
    kind = type(x)
    return (
        not isinstance(x, _OPAQUE)
        and (isinstance(getattr(x, "__dict__", None), dict) or hasattr(kind, "__slots__"))
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


def _held(f: Any) -> Iterator[tuple[Any, str]]:
    """What `f`, which can be called, holds for its calls, by name: the object that it is a method
    of or is itself, arguments that are bound or default."""
    x = f.__self__ if isinstance(f, types.MethodType) else f
    if is_registered(type(x)):  # lang/captured_modules.py reads it, not what its classes have
        yield from ((kind, kind.__name__) for kind in dict.fromkeys(map(type, containers(x))))
    elif isinstance(f, types.MethodType):
        yield x, type(x).__name__
    elif isinstance(f, functools.partial):
        yield from ((x, f"argument {i}") for i, x in enumerate(f.args))
        yield from ((x, name) for name, x in f.keywords.items())
    elif isinstance(f, types.FunctionType):
        code, defaults = f.__code__, f.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from zip(defaults, names, strict=True)
        yield from ((x, name) for name, x in (f.__kwdefaults__ or {}).items())
    elif _is_object(f):
        yield f, type(f).__name__


def _called(x: Any, names: set[str]) -> Iterator[Any]:
    """The functions of the class of `x`, or of the class or module `x`, that the code may call."""
    made = isinstance(x, type) and not is_registered(x)  # now, by the code; others are there
    always = _UNNAMED | {"__init__"} if made else _UNNAMED
    if isinstance(x, types.ModuleType):
        holders: Iterable[Any] = (x,)
    else:
        holders = x.__mro__ if isinstance(x, type) else type(x).__mro__
    for c in holders:
        for name, v in vars(c).items():
            if name in always or (name in names and name != "__init__"):
                v = getattr(v, "fget", None) or getattr(v, "__func__", None) or v
                if callable(v) and not isinstance(v, type):
                    yield v
