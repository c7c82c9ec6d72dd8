"""The variables of a recorded function: compared, read and written at each call.

They are the globals and closure cells that its own code names, and the attributes of the object
that it is a method of. Its own code is the function, the functions inside it, and those that it
names: functions of the same file, methods of that object. A tensor in a variable, or in a container
or object there, is read again at each call; a tensor that the function puts into such a place is
put there at each call. Other variables are compared: numbers and arrays by value, the rest by
identity. What lies deeper is a constant.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from .places import GONE, Name, Place, is_plain, mark_of
from .record import Recorder
from .static_arguments import Same
from .tensor import Tensor
from .tree import Spec, flatten, is_registered, unflatten

MOST_FUNCTIONS, MOST_ITEMS = 200, 2000
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Tensor)


# -- which variables there are --------------------------------------------------------------------
@dataclass(slots=True)
class Variables:
    """The variables that the code of a function names; and `others`, further attributes of the
    objects that it is a method of."""

    named: list[Place] = field(default_factory=list)
    others: list[Place] = field(default_factory=list)


def variables(functions: Iterable[Any], objects: Iterable[Any] = ()) -> Variables:
    """Those of `functions`, which may be methods of `objects`."""
    todo, seen, names, own = list(functions), set[int](), {"__call__"}, list(objects)
    found: dict[Name, Place] = {}

    def methods() -> list[Any]:
        there = (getattr(type(x), name, None) for x in own for name in sorted(names))
        return [m for m in there if hasattr(m, "__code__") and id(m) not in seen]

    while (todo := todo or methods()) and len(seen) < MOST_FUNCTIONS:
        f = todo.pop()
        if id(f) in seen:
            continue
        seen.add(id(f))
        if isinstance(f, FunctionType):
            ours = _is_ours(f)  # around a function of the user's
            names |= set() if ours else names_in(f.__code__)
            for place in () if ours else variables_of(f):
                found[place.name] = place
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
    out = Variables(list(found.values()))
    for x in own:
        for key in vars(x) if _is_open(x) else ():
            place = Place(vars(x), key, f"{type(x).__name__}.{key}")
            (out.named if key in names else out.others).append(place)
    return out


def _is_ours(x: Any) -> bool:
    """Whether the function or class `x` is of this package."""
    return str(x.__module__).startswith("tessera.")


def _parts(f: Any) -> Iterator[Any]:
    """The functions in an object of this package, such as a pipeline."""
    for x in getattr(f, "__dict__", {}).values():
        rows = x if isinstance(x, (list, tuple)) else [x]
        yield from (v for v in rows if callable(v) and not isinstance(v, type))


def names_in(code: CodeType) -> set[str]:
    """The globals and attributes that `code` names, and the functions inside it."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def variables_of(f: FunctionType) -> Iterator[Place]:
    """The globals and the closure cells that the code of `f` names."""
    for name in sorted(names_in(f.__code__) & f.__globals__.keys()):
        yield Place(f.__globals__, name, name)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield Place(cell, name, name)


def _is_open(x: Any) -> bool:
    """Whether `x` is an object of a user's with attributes."""
    kind = type(x)
    return (
        isinstance(getattr(x, "__dict__", None), dict)
        and not isinstance(x, (*_CLOSED, dict, list, tuple))
        and not is_registered(kind)
        and not kind.__module__.startswith(("tessera.", "jax", "numpy", "torch"))
    )


Looked = dict[Name, tuple[Place, Any]]  # (place, what is there)


def look(roots: Iterable[Place]) -> Looked:
    """What is in the variables `roots`, and in the containers and objects there, those nearest to a
    variable first, up to MOST_ITEMS."""
    out: Looked = {}
    todo = deque((place, place.now()) for place in roots)
    opened = set[int]()
    while todo and len(out) < MOST_ITEMS:
        place, x = todo.popleft()
        if x is GONE:
            continue
        out[place.name] = place, x
        if id(x) in opened:
            continue
        opened.add(id(x))
        if isinstance(x, dict):
            todo += [(place.below(False, k), v) for k, v in x.items()]
        elif isinstance(x, (list, tuple)):
            todo += [(place.below(False, i), v) for i, v in enumerate(x)]
        elif _is_open(x):
            todo += [(place.below(True, k), v) for k, v in vars(x).items()]
    return out


def places_of(fn: Any, tensors: Iterable[Tensor]) -> list[tuple[Place, Tensor]]:
    """Where the variables of `fn` hold each of `tensors`."""
    wanted = set(map(id, tensors))
    return [(p, x) for p, x in look(variables([fn]).named).values() if id(x) in wanted]


# -- what holds at a later call --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Write:
    """A tensor, or a container with some, that a function puts into `place`: the `leaves` that are
    tensors are the next results of its program."""

    place: Place
    spec: Spec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.leaves if isinstance(x, Tensor)]

    def emptied(self) -> Write:
        """The same without the recording's tensors."""
        bare = (_RESULT if isinstance(x, Tensor) else x for x in self.leaves)
        return Write(self.place, self.spec, tuple(bare))

    @property
    def count(self) -> int:
        """How many results go there."""
        return sum(x is _RESULT for x in self.leaves)

    def put(self, results: Iterator[Tensor]) -> None:
        leaves = (next(results) if x is _RESULT else x for x in self.leaves)
        self.place.put(unflatten(self.spec, list(leaves)))


_RESULT = Same("a result")


@dataclass(slots=True)
class Guards:
    """The conditions on variables under which a recording stands for a call, and its writes."""

    tensors: list[tuple[object, list[Place]]] = field(default_factory=list)  # (type, where it is)
    others: list[tuple[Place, object]] = field(default_factory=list)  # (place, its mark)
    read: list[tuple[Tensor, ref[Tensor]]] = field(default_factory=list)  # (tensor, value read)
    writes: list[Write] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return bool(self.tensors or self.others or self.read)

    def hold(self, begun: bool = False) -> bool:
        """Whether they hold now; `begun`: but for variables that a call has created."""
        for kind, places in self.tensors:
            t = places[0].now()
            if type(t) is not Tensor or t.type != kind or any(p.now() is not t for p in places[1:]):
                return False
        if any(t.now() is not value() for t, value in self.read):
            return False
        for place, mark in self.others:
            x = place.now()
            if begun and type(mark) is Same and mark.x is GONE:
                continue
            if not (x is mark.x if type(mark) is Same else mark_of(x) == mark):
                return False
        return True


class Watch:
    """The variables of a function while it is recorded."""

    def __init__(self, functions: Iterable[Any], objects: Iterable[Any]) -> None:
        self._args = list(functions), list(objects)
        found = variables(*self._args)
        self._named = {p.name for p in found.named}
        self.before = look([*found.named, *found.others])
        self._marks = {
            name: mark_of(x)
            for name, (_, x) in self.before.items()
            if name in self._named or isinstance(x, (dict, list))
        }

    def end(self, recorder: Recorder) -> tuple[Guards, dict[int, Place], list[Tensor]]:
        """(the guards, the place of each tensor that the recording uses by its id, what it puts
        into `writes`)."""
        writes = self._writes(recorder)
        put = [t for w in writes for t in w.tensors]
        for t in put:
            recorder.node(t)  # one from outside is an input from here on
        used = {id(t): t.type for t, _ in recorder.captured}
        read = {id(t) for t, _ in recorder.seen}
        written = {w.place.name for w in writes}
        guards = Guards(read=[r for r in recorder.seen if type(r[0]) is not Tensor], writes=writes)
        groups: dict[int, list[Place]] = {}
        holders = set[object]()
        for place, x in self.before.values():
            if is_registered(type(x)) and self._is_read(x, recorder, used):
                recorder.met[id(x)] = x
                guards.others.append((place, Same(x)))
            elif type(x) is Tensor and (id(x) in used or id(x) in read):
                holders.add(place.above)
                if id(x) in used:
                    groups.setdefault(id(x), []).append(place)
                if id(x) in read:
                    guards.others.append((place, Same(x)))
        for name, mark in self._marks.items():
            place, x = self.before[name]
            if type(x) is not Tensor and name not in written:
                if name in holders or not isinstance(x, (dict, list)):
                    guards.others.append((place, mark))
                elif name in self._named:
                    guards.others.append((place, Same(x)))
        for w in writes:
            _, was = self.before.get(w.place.name, (None, GONE))
            if type(was) is not Tensor:
                guards.others.append((w.place, Same(GONE) if was is GONE else mark_of(was)))
        guards.tensors = [(used[i], places) for i, places in groups.items()]
        guards.writes = [w.emptied() for w in writes]
        return guards, {i: places[0] for i, places in groups.items()}, put

    @staticmethod
    def _is_read(module: Any, recorder: Recorder, used: Mapping[int, object]) -> bool:
        return id(module) in recorder.met or any(id(t) in used for t in flatten(module)[0])

    def restore(self, recorder: Recorder) -> None:
        """Puts back what was in the places into which the function has put tensors."""
        for w in self._writes(recorder):
            w.place.put(self.before.get(w.place.name, (None, GONE))[1])

    def _writes(self, recorder: Recorder) -> list[Write]:
        """The places that were set to tensors of the recording, or to new containers of them. They,
        or what they are in, were there before."""
        out = []
        found = variables(*self._args)
        after = look([*found.named, *found.others])
        for name, (place, x) in after.items():
            was, above = self.before.get(name), place.above
            if (was is not None and was[1] is x) or not isinstance(x, (Tensor, dict, list, tuple)):
                continue
            if above is not None:
                holder = after[above][1]
                same = above in self.before and self.before[above][1] is holder
                grew = isinstance(holder, list) and was is None
                if not same or grew or isinstance(holder, tuple):
                    continue
            leaves, spec = flatten(x)
            mine = any(isinstance(t, Tensor) and t._trace is recorder for t in leaves)
            if mine and all(type(t) is Tensor or is_plain(t) for t in leaves):
                out.append(Write(place, spec, tuple(leaves)))
        return out
