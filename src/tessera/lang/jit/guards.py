"""The outer variables of a recorded function: compared, read and written at each call.

They are the globals and closure cells that its own code names, the attributes of the object that it
is a method of, and the attributes of other objects in these variables. Its own code is the
function, the functions inside it, and the functions that they name: functions of the same file,
methods of that object. A variable that holds tensors, or lists and dicts of them, is read at each
call like an argument; a tensor that the function puts into a variable is put there at each call.
Other variables are compared: numbers and arrays by value, the rest by identity. Deeper contents are
constants.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from ..record.box import Box
from ..record.recorder import Recorder
from ..record.static_arguments import Same
from ..record.tree import flatten, is_registered
from ..record.variables import GONE, Place, is_plain, mark_of
from ..value.tensor import Tensor
from .argument_updates import MOST_ITEMS, Variables

MOST_FUNCTIONS, MOST_DEPTH = 200, 8
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Tensor)


# -- the variables --------------------------------------------------------------------------------
def variables(functions: Iterable[Any], objects: Iterable[Any] = ()) -> list[Place]:
    """The variables named in the code of `functions`, which may be methods of `objects`."""
    todo, visited, names, own = list(functions), set[int](), {"__call__"}, list(objects)
    places: dict[object, Place] = {}

    def methods() -> list[Any]:
        there = (getattr(type(x), name, None) for x in own for name in sorted(names))
        return [m for m in there if hasattr(m, "__code__") and id(m) not in visited]

    # Methods are found by the names seen so far, so they are looked up when no other code is left.
    while (todo := todo or methods()) and len(visited) < MOST_FUNCTIONS:
        f = todo.pop()
        if id(f) in visited:
            continue
        visited.add(id(f))
        if isinstance(f, FunctionType):
            ours = _is_ours(f)  # around a function of the user's
            names |= set() if ours else names_in(f.__code__)
            for place in () if ours else variables_of(f):
                places[place.name] = place
                x = place.now()
                if (isinstance(x, FunctionType) and x.__module__ == f.__module__) or _is_ours(
                    type(x)
                ):
                    todo.append(x)
        elif isinstance(f, MethodType):
            todo.append(f.__func__)
            own.append(f.__self__)
        elif isinstance(f, functools.partial):
            todo.append(f.func)
        elif not isinstance(f, type):
            todo += _parts(f) if _is_ours(type(f)) else ()
            own.append(f)
        todo += [f.__wrapped__] if hasattr(f, "__wrapped__") else []
    mine, inside = set(map(id, own)), [*own, *(place.now() for place in places.values())]
    met = set[int]()
    while inside:
        x = inside.pop()
        for key in sorted(names & vars(x).keys()) if _is_open(x) and id(x) not in met else ():
            place = Place(vars(x), key, f"{type(x).__name__}.{key}", id(x) in mine)
            places[place.name] = place
            inside.append(place.now())
        met.add(id(x))
    return list(places.values())


def _is_ours(x: Any) -> bool:
    """Returns whether the function or class `x` is of this package; classes of Python
    modules do not count."""
    mine = str(x.__module__).startswith("tessera.")
    return mine and not (isinstance(x, type) and issubclass(x, ModuleType))


def _parts(f: Any) -> Iterator[Any]:
    """The functions in an object of this package, such as a pipeline."""
    for x in getattr(f, "__dict__", {}).values():
        rows = x if isinstance(x, (list, tuple)) else [x]
        yield from (v for v in rows if callable(v) and not isinstance(v, type))


def names_in(code: CodeType) -> set[str]:
    """The globals and attributes named in `code` and in the functions inside it."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def variables_of(f: FunctionType) -> Iterator[Place]:
    """The globals and closure cells named in the code of `f`."""
    for name in sorted(names_in(f.__code__) & f.__globals__.keys()):
        yield Place(f.__globals__, name, name)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield Place(cell, name, name)


def _is_open(x: Any) -> bool:
    """Returns whether `x` is an object of a user's class with attributes."""
    kind = type(x)
    return (
        isinstance(getattr(x, "__dict__", None), dict)
        and not isinstance(x, (*_CLOSED, dict, list, tuple))
        and not is_registered(kind)
        and not kind.__module__.startswith(("tessera.", "jax", "numpy", "torch"))
    )


# -- their contents -------------------------------------------------------------------------------
def contents(x: Any, depth: int = 0) -> tuple[list[Any], object]:
    """Returns (leaves, structure) of the dicts, lists and tuples in `x`. Modules and boxes are
    leaves, compared by identity."""
    if isinstance(x, (dict, list, tuple)) and (len(x) > MOST_ITEMS or depth > MOST_DEPTH):
        return [Same(x)], None
    keys: object = ()
    if isinstance(x, dict):
        keys, values = tuple(x), list(x.values())
    elif isinstance(x, (list, tuple)):
        values = list(x)
    else:
        return [Same(x) if isinstance(x, Box) or is_registered(type(x)) else x], None
    rows = [contents(v, depth + 1) for v in values]
    return [leaf for leaves, _ in rows for leaf in leaves], (type(x), keys, *(s for _, s in rows))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the `contents` of a variable."""

    place: Place
    index: int

    @property
    def label(self) -> str:
        return self.place.label

    @property
    def name(self) -> object:
        return self.place.name, self.index

    def now(self) -> Any:
        leaves = contents(self.place.now())[0]
        return leaves[self.index] if self.index < len(leaves) else GONE


@dataclass(slots=True)
class Guards:
    """The conditions on variables under which a recording is valid for a call."""

    others: list[tuple[Place | Leaf, object]] = field(default_factory=list)  # (place, its mark)
    read: list[tuple[Tensor, ref[Tensor]]] = field(default_factory=list)  # (box, value read)

    def hold(self) -> bool:
        """Returns whether all conditions hold now."""
        for place, mark in self.others:
            x = place.now()
            if not (x is mark.x if type(mark) is Same else mark_of(x) == mark):
                return False
        return all(t.now() is value() for t, value in self.read)


def guards(
    recorder: Recorder, before: Variables, written: Container[int]
) -> tuple[Guards, list[Place]]:
    """Returns (the guards, the variables that are read like arguments) of a recording that has put
    tensors into the variables at the indices `written`."""
    used, read = ({id(t) for t, _ in rows} for rows in (recorder.captured, recorder.host_reads))
    out = Guards(read=[r for r in recorder.host_reads if type(r[0]) is not Tensor])
    held = []
    for i, (place, x) in enumerate(zip(before.places, before.values, strict=True)):
        inside = [v.x if type(v) is Same else v for v in contents(x)[0]]
        modules = [m for m in inside if is_registered(type(m)) and _is_read(m, recorder, used)]
        recorder.called_modules.update({id(m): m for m in modules})
        needed = modules or any(id(t) in used for t in inside)
        if i in written or (needed and (type(x) is Tensor or isinstance(x, (dict, list, tuple)))):
            held.append(place)
        elif x is not GONE and type(x) is not Tensor and (place.compared or not is_plain(x)):
            out.others.append((place, mark_of(x)))
        out.others += [(Leaf(place, k), Same(t)) for k, t in enumerate(inside) if id(t) in read]
    return out, held


def _is_read(module: Any, recorder: Recorder, used: set[int]) -> bool:
    return id(module) in recorder.called_modules or any(id(t) in used for t in flatten(module)[0])
