"""State changes during a recording: parameters, attributes and items of modules that it writes.

A parameter keeps its data and only shows the type of the new value; an attribute holds a tensor of
the recording. When the recording ends, all of them are restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

from ...core.layout import TensorType
from ...ir.graph.node import Node
from ..value.tensor import Past, Tensor
from .variables import Place

X = TypeVar("X")
_FAR = 4096  # values: a whole history, except for the longest ones
_NEAR = 64  # values: enough to find the old weight behind an optimizer's update


def nearby(x: X, sources_of: Callable[[X], Iterable[X]], most: int = _NEAR) -> list[X]:
    """Returns `x` and the values nearest to it in its history, at most about `most`."""
    found = {id(x): x}
    todo = deque([x])
    while todo and len(found) < most:
        new = {id(a): a for a in sources_of(todo.popleft()) if id(a) not in found}
        found |= new
        todo += new.values()
    return list(found.values())


def cut_from(out: Tensor, source: Tensor) -> Tensor:
    """Returns `out`, a copy of `source` elsewhere; a gradient through it is an error."""
    there = nearby(source, lambda t: () if t._history is None else t._history.args, _FAR)
    out._past = Past([ref(t) for t in there], False)
    return out


@dataclass
class Written:
    """A parameter from outside that is an argument of the recording, or that it writes."""

    box: Any
    type: TensorType  # before the recording
    argument_node: Node | None = None  # its input, if it is an argument
    last: Node | None = None  # the value written last, or else the input

    @property
    def is_set(self) -> bool:
        return self.last is not self.argument_node


@dataclass
class Change:
    """An attribute of a module from outside, or an item of a module's list or dict, that a recorded
    function has set."""

    place: Place
    before: Any
    last: Tensor | None = None  # None for a number


class Changes:
    """The state changes of one recording."""

    def __init__(self) -> None:
        self.boxes: dict[int, Written] = {}
        self.changed: dict[object, Change] = {}  # by the names of their places
        self.created: dict[int, Any] = {}  # modules and parameters made in the function itself
        # (a parameter that was set, its node before, its new node)
        self.puts: list[tuple[Any, Node | None, Node]] = []
        self.slopes: set[Node] = set()  # results of ts.grad
        self.updates: set[Node] = set()  # updated weights

    def write(self, box: Any, before: Node | None, new: Node) -> None:
        """Notes that `new` replaces `before` in `box`, a box from outside."""
        self.boxes.setdefault(id(box), Written(box, box.type)).last = new
        self.put(box, before, new)

    def put(self, box: Any, before: Node | None, new: Node) -> None:
        """Notes that `new` replaces `before` in `box`, which the recording has made and which ends
        with it."""
        self.puts.append((box, before, new))
        self.update(before, new)

    def assign(self, holder: Any, name: Any, last: Tensor | None = None) -> None:
        """Notes that the attribute or item `name` of `holder` is set to `last`, or to a number."""
        place = Place(holder, name, f"{type(holder).__name__}.{name}")
        self.changed.setdefault(place.name, Change(place, place.now())).last = last

    @property
    def assigned(self) -> list[Change]:
        """The changes that set a place to a tensor."""
        return [c for c in self.changed.values() if c.last is not None]

    @contextmanager
    def numbers_before(self) -> Iterator[None]:
        """A context in which modules have the numbers from before the recording."""
        numbers = [c for c in self.changed.values() if c.last is None]
        after = [c.place.now() for c in numbers]
        for c in numbers:
            c.place.put(c.before)
        try:
            yield
        finally:
            for c, now in zip(numbers, after, strict=True):
                c.place.put(now)

    def stale_sources(self, end: Node) -> set[int]:
        """The ids of the parameters whose old value `end` was computed from, and that were set
        since."""
        was = {n: box for box, n, _ in self.puts if n is not None}
        new = {n for *_, n in self.puts}
        found, todo, seen = set[int](), [end] if was else [], set[Node]()
        while todo:
            n = todo.pop()
            if n in was:
                found.add(id(was[n]))
            if n not in seen and n not in new:  # the history of a new value does not count
                seen.add(n)
                todo += n.args
        return found

    def update(self, old: Node | None, new: Node) -> None:
        """Notes that `new` replaces `old` in a parameter; it is an update if it is computed from
        `old`."""
        if old in nearby(new, lambda n: () if n in self.slopes else n.args):
            self.updates.add(new)

    def constants(self, wanted: Sequence[Node], nodes: Iterable[Node]) -> set[Node]:
        """The updated weights among `nodes`, in their order, that are constants for a gradient by
        `wanted`. As in PyTorch these are all of them, unless one was computed from `wanted` other
        than through an earlier gradient, as from an initial value or a learning rate: then there
        are none."""
        if not self.updates:
            return set()
        made = set(wanted)
        for n in nodes:
            if n not in self.slopes and not made.isdisjoint(n.args):
                made.add(n)
        others = self.updates - {*wanted}
        return others if made.isdisjoint(others) else set()

    def undo(self) -> None:
        """Restores the state from before the recording; the values of attributes stay in
        `assigned`."""
        for w in self.boxes.values():
            w.box.type = w.type
        for c in self.assigned:
            if c.place.now() is c.last:
                c.place.put(c.before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context with the state from before the recording, which may be used and changed in
        it."""
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
        """Forgets all changes."""
        self.boxes.clear()
        self.changed.clear()
        self.created.clear()
        self.puts.clear()
        self.slopes.clear()
        self.updates.clear()
