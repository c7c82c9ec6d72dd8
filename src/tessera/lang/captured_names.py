"""What does a recorded function find outside of itself, and what does it leave there?

The globals and closure cells that its code names, and the attributes that it names of objects found
there, are places. They are read anew at each call: a tensor put there since is used, and anything
else that changed means another recording. A tensor that the function itself puts into such a place
is a result, and is put there after each call; so is a number, of which each that was there before
means a recording of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from .captured_code import SHARED, look
from .captured_places import GONE, Looked, Place, is_plain, mark_of
from .record import Recorder
from .static_arguments import Same, kept
from .tensor import Tensor
from .tree import Spec, flatten, unflatten


@dataclass(frozen=True, slots=True)
class Left:
    """What a function puts into `place`: a tensor, or a container of tensors and numbers, whose
    `leaves` that are tensors are the next results of its program."""

    place: Place
    spec: Spec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.leaves if isinstance(x, Tensor)]

    def emptied(self) -> Left:
        """The same without the recording's tensors."""
        bare = (_RESULT if isinstance(x, Tensor) else x for x in self.leaves)
        return Left(self.place, self.spec, tuple(bare))

    @property
    def count(self) -> int:
        """How many results go there."""
        return sum(x is _RESULT for x in self.leaves)

    def put(self, results: Iterator[Tensor]) -> None:
        leaves = (next(results) if x is _RESULT else x for x in self.leaves)
        self.place.put(unflatten(self.spec, list(leaves)))


_RESULT = Same("a result")


@dataclass(slots=True)
class Found:
    """What a recording met outside: what must hold at a later call, and what is put there."""

    tensors: list[tuple[object, list[Place]]] = field(default_factory=list)  # (type, where it is)
    others: list[tuple[Place, object]] = field(default_factory=list)  # (place, its mark)
    writes: list[Left] = field(default_factory=list)
    values: list[tuple[Place, object]] = field(default_factory=list)  # (place, what is put there)
    seen: list[tuple[Tensor, ref[Tensor]]] = field(default_factory=list)  # (box, what was read)

    def same(self, begun: bool = False) -> bool:
        """Whether the recording still stands for a call now; `begun`: but for what is there where
        nothing was."""
        for kind, places in self.tensors:
            t = places[0].now()
            if type(t) is not Tensor or t.type != kind or any(p.now() is not t for p in places[1:]):
                return False
        if any(box.now() is not value() for box, value in self.seen):
            return False
        for place, mark in self.others:
            x = place.now()
            if begun and type(mark) is Same and mark.x is GONE:
                continue
            if not (x is mark.x if type(mark) is Same else mark_of(x) == mark):
                return False
        return True


class Outside:
    """The places of the function `fn`, which may be a method of objects among its `arguments`."""

    def __init__(self, fn: Any, arguments: Iterable[Any], owners: Iterable[type]) -> None:
        given = list(arguments)
        self._args = fn, given, [x for x in given if type(x) in owners or isinstance(x, SHARED)]
        self.before = look(*self._args)
        self._inherited = {name for name, (place, *_) in self.before.items() if place.inherited}

    def end(self, recorder: Recorder) -> tuple[Found, dict[int, Place], list[Tensor]]:
        """(what was found, the place of each tensor that the recording uses by its id, what it put
        into `writes`)."""
        before, after = self._looked(recorder)
        left, values = _written(before, after, recorder)
        written = [*(x.place for x in left), *(p for p, _ in values)]
        wrote, tensors = {p.name for p in written}, [t for x in left for t in x.tensors]
        for t in tensors:
            recorder.node(t)  # one from outside is an input from here on
        found = Found()
        used = {id(t): t.type for t, _ in recorder.captured}
        read = {id(t) for t, _ in recorder.seen}
        found.seen = [(t, value) for t, value in recorder.seen if type(t) is not Tensor]
        groups: dict[int, list[Place]] = {}
        for name, (place, x, mark) in before.items():
            if place.above in wrote:  # an item of a tuple
                wrote.add(name)
            if type(x) is Tensor:
                if id(x) in read:
                    found.others.append((place, Same(x)))
                if id(x) in used:
                    groups.setdefault(id(x), []).append(place)
            # What else the function changed it would change at each recording anew.
            elif name in wrote or (name in after and after[name][2] == mark):
                found.others.append((place, mark))
        found.others += [(p, Same(GONE)) for p in written if p.name not in before]
        found.tensors = [(used[i], places) for i, places in groups.items()]
        found.writes, found.values = [x.emptied() for x in left], values
        return found, {i: places[0] for i, places in groups.items()}, tensors

    def restore(self, recorder: Recorder) -> None:
        """Puts back what was in the places into which the function has put tensors and numbers."""
        before, after = self._looked(recorder)
        left, values = _written(before, after, recorder)
        for place in (*(x.place for x in left), *(p for p, _ in values)):
            own = place.name in before and place.name not in self._inherited
            place.put(before[place.name][1] if own else GONE)

    def _looked(self, recorder: Recorder) -> tuple[Looked, Looked]:
        """All places before the recording and now, with the attributes of modules that it set."""
        before, after = dict(self.before), look(*self._args)
        for (_, name), (holder, was) in recorder.changes.noted.items():
            place = Place(holder.__dict__, name, f"{type(holder).__name__}.{name}")
            for looked, x in (before, was), (after, holder.__dict__.get(name, GONE)):
                if x is not GONE:
                    looked[place.name] = place, x, mark_of(x)
        return before, after


def _written(
    before: Looked, after: Looked, recorder: Recorder
) -> tuple[list[Left], list[tuple[Place, Any]]]:
    """The places that the function set to its tensors, or to new containers of them; and those that
    it set to numbers and their like. They, or what they are in, were there before. A list that grew
    would do so at each recording."""
    left, values = [], []
    for place, x, _ in after.values():
        name, holder, grew = place.above, None, False
        if name is not None:
            holder = after[name][1]
            if name not in before or before[name][1] is not holder or isinstance(holder, tuple):
                continue
            grew = before[name][2] != after[name][2]
        was = before.get(place.name)
        if is_plain(x) and not (isinstance(holder, list) and grew):
            if was is None or kept(was[1]) != kept(x):
                values.append((place, x))
        elif (
            isinstance(x, (Tensor, dict, list, tuple))
            and not isinstance(holder, list)
            and (was is None or was[1] is not x)
        ):
            leaves, spec = flatten(x)
            mine = any(isinstance(t, Tensor) and t._trace is recorder for t in leaves)
            if mine and all(type(t) is Tensor or is_plain(t) for t in leaves):
                left.append(Left(place, spec, tuple(leaves)))
    return left, values


def places_of(fn: Any, tensors: Iterable[Tensor]) -> list[tuple[Place, Tensor]]:
    """Where `fn` finds each of `tensors` outside of itself."""
    wanted = set(map(id, tensors))
    return [(p, x) for p, x, _ in look(fn, [], []).values() if id(x) in wanted]
