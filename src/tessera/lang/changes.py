"""What does a recording change outside of itself while it lasts? Parameters hold its nodes, and
attributes of modules its tensors. When it ends, all is as it was before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

from ..core.layout import TensorType
from ..ir.graph.node import Node
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
class Assigned:
    """An attribute of a module from outside, or an item of a list or dict of one, that a recorded
    function sets to a tensor."""

    holder: Any
    name: Any
    before: dict[Any, Any]  # the attribute, where there was one
    last: Tensor

    @property
    def now(self) -> Any:
        """What is there."""
        return items_of(self.holder).get(self.name)

    def put(self, value: Any) -> None:
        """Sets it, and nothing else."""
        if isinstance(self.holder, list):
            list.__setitem__(self.holder, self.name, value)
        else:
            dict.__setitem__(_dict_of(self.holder), self.name, value)

    def undo(self) -> None:
        """Puts back what was there."""
        if self.before:
            self.put(self.before[self.name])
        else:
            del _dict_of(self.holder)[self.name]


def _dict_of(holder: Any) -> dict[Any, Any]:
    return holder if isinstance(holder, dict) else holder.__dict__


def items_of(holder: Any) -> dict[Any, Any]:
    """The attributes of a module, or the items of a list or dict, by name."""
    return dict(enumerate(holder)) if isinstance(holder, list) else _dict_of(holder)


class Changes:
    """Those of the recording of one whole function."""

    def __init__(self) -> None:
        self.boxes: dict[int, Written] = {}
        self.assigned: dict[tuple[int, Any], Assigned] = {}
        # (id of a module from outside, an attribute set to a number) -> (module, {name: before})
        self.noted: dict[tuple[int, str], tuple[Any, dict[str, Any]]] = {}
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

    def assign(self, holder: Any, name: Any, last: Tensor) -> None:
        """Notes that the attribute or item `name` of `holder` is set to `last`."""
        known, now = self.assigned.get((id(holder), name)), items_of(holder)
        before = {name: now[name]} if name in now else {}
        first = before if known is None else known.before
        self.assigned[id(holder), name] = Assigned(holder, name, first, last)

    def note(self, holder: Any, name: str) -> None:
        """Notes the attribute `name` of the module `holder`, before it is set to a number."""
        if id(holder) not in self.born:
            before = {name: holder.__dict__[name]} if name in holder.__dict__ else {}
            self.noted.setdefault((id(holder), name), (holder, before))

    @contextmanager
    def numbers_before(self) -> Iterator[None]:
        """Inside, modules have the numbers that they had before the recording."""
        noted = [(h.__dict__, name, before) for (_, name), (h, before) in self.noted.items()]
        after = [{name: now[name]} if name in now else {} for now, name, _ in noted]
        for now, name, before in noted:
            now.update(before) if before else now.pop(name, None)
        try:
            yield
        finally:
            for (now, name, _), last in zip(noted, after, strict=True):
                now.update(last) if last else now.pop(name, None)

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
        for a in self.assigned.values():
            if a.now is a.last:
                a.undo()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, all is as it was before, and may be used and changed."""
        put = [a for a in self.assigned.values() if a.now is a.last]
        self.undo()
        try:
            yield
        finally:
            for w in self.boxes.values():
                assert w.last is not None
                w.type, w.box.type = w.box.type, w.last.type
            for a in put:
                a.put(a.last)

    def clear(self) -> None:
        """Lets go of all of it."""
        self.boxes.clear()
        self.assigned.clear()
        self.noted.clear()
        self.born.clear()
        self.puts.clear()
        self.slopes.clear()
        self.updates.clear()
