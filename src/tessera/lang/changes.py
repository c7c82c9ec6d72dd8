"""Changes of a recording outside of itself: written parameters, attributes and items of modules.

Parameters keep their content and only show the type of what was written; attributes hold tensors of
the recording. When it ends, all is as it was before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

from ..core.layout import TensorType
from ..ir.graph.node import Node
from .places import Place
from .tensor import Past, Tensor

X = TypeVar("X")
_FAR = 4096  # values: all of a history, but for the longest
_NEAR = 64  # values, by which an optimizer's update of a weight comes to its old one


def nearby(x: X, made_of: Callable[[X], Iterable[X]], most: int = _NEAR) -> list[X]:
    """`x` and the first of what it was made of: as much as an update of a weight is made of."""
    found = {id(x): x}
    todo = deque([x])
    while todo and len(found) < most:
        new = {id(a): a for a in made_of(todo.popleft()) if id(a) not in found}
        found |= new
        todo += new.values()
    return list(found.values())


def apart_from(out: Tensor, source: Tensor) -> Tensor:
    """`out`, a copy of `source` elsewhere: a gradient through it is an error."""
    there = nearby(source, lambda t: () if t._made is None else t._made.args, _FAR)
    out._past = Past([ref(t) for t in there], False)
    return out


@dataclass
class Written:
    """A parameter from outside of a recording that is given to it, or that it writes."""

    box: Any
    type: TensorType  # before the recording
    given: Node | None = None  # the input that stands for it, of an argument
    last: Node | None = None  # what is written last, or else the input

    @property
    def is_set(self) -> bool:
        return self.last is not self.given


@dataclass
class Change:
    """An attribute of a module from outside, or an item of a list or dict of one, that a recorded
    function has set."""

    place: Place
    before: Any
    last: Tensor | None = None  # None of a number


class Changes:
    """Those of the recording of one whole function."""

    def __init__(self) -> None:
        self.boxes: dict[int, Written] = {}
        self.changed: dict[object, Change] = {}  # by the names of their places
        self.born: dict[int, Any] = {}  # modules and parameters made in the function itself
        # (a parameter that was set, what was in it before, what is in it since)
        self.puts: list[tuple[Any, Node | None, Node]] = []
        self.slopes: set[Node] = set()  # results of ts.grad
        self.updates: set[Node] = set()  # what updates made of weights

    def write(self, box: Any, before: Node | None, new: Node) -> None:
        """Notes that `new` is in `box` in place of `before`."""
        self.boxes.setdefault(id(box), Written(box, box.type)).last = new
        self.put(box, before, new)

    def put(self, box: Any, before: Node | None, new: Node) -> None:
        """The same of a box that the recording has made: nothing of it outlives the recording."""
        self.puts.append((box, before, new))
        self.update(before, new)

    def assign(self, holder: Any, name: Any, last: Tensor | None = None) -> None:
        """Notes that the attribute or item `name` of `holder` is set to `last`, or to a number."""
        place = Place(holder, name, f"{type(holder).__name__}.{name}")
        self.changed.setdefault(place.name, Change(place, place.now())).last = last

    @property
    def assigned(self) -> list[Change]:
        """The places that are set to tensors."""
        return [c for c in self.changed.values() if c.last is not None]

    @contextmanager
    def numbers_before(self) -> Iterator[None]:
        """Inside, modules have the numbers that they had before the recording."""
        numbers = [c for c in self.changed.values() if c.last is None]
        after = [c.place.now() for c in numbers]
        for c in numbers:
            c.place.put(c.before)
        try:
            yield
        finally:
            for c, now in zip(numbers, after, strict=True):
                c.place.put(now)

    def made_of_before(self, end: Node) -> set[int]:
        """The ids of the parameters that were set since `end` was computed of what they had."""
        was = {n: box for box, n, _ in self.puts if n is not None}
        new = {n for *_, n in self.puts}
        found, todo, seen = set[int](), [end] if was else [], set[Node]()
        while todo:
            n = todo.pop()
            if n in was:
                found.add(id(was[n]))
            if n not in seen and n not in new:  # how a new value was computed is another matter
                seen.add(n)
                todo += n.args
        return found

    def update(self, old: Node | None, new: Node) -> None:
        """Notes that `new` is in a parameter in place of `old`: an update, if it is made of it."""
        if old in nearby(new, lambda n: () if n in self.slopes else n.args):
            self.updates.add(new)

    def constants(self, wanted: Sequence[Node], nodes: Iterable[Node]) -> set[Node]:
        """The updated weights among `nodes`, in their order, that are constants to a gradient by
        those `wanted`, as in PyTorch: all, but where one was computed from these in another way
        than through an earlier gradient, as from its first value or a learning rate."""
        if not self.updates:
            return set()
        made = set(wanted)
        for n in nodes:
            if n not in self.slopes and not made.isdisjoint(n.args):
                made.add(n)
        others = self.updates - {*wanted}
        return others if made.isdisjoint(others) else set()

    def undo(self) -> None:
        """Makes all as it was before; what attributes are now is kept."""
        for w in self.boxes.values():
            w.box.type = w.type
        for c in self.assigned:
            if c.place.now() is c.last:
                c.place.put(c.before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, all is as it was before, and may be used and changed."""
        put = [c for c in self.assigned if c.place.now() is c.last]
        self.undo()
        try:
            yield
        finally:
            for w in self.boxes.values():
                assert w.last is not None
                w.type, w.box.type = w.box.type, w.last.type
            for c in put:
                c.place.put(c.last)

    def clear(self) -> None:
        """Lets go of all of it."""
        self.boxes.clear()
        self.changed.clear()
        self.born.clear()
        self.puts.clear()
        self.slopes.clear()
        self.updates.clear()
