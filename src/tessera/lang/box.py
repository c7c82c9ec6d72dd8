"""A box with a tensor in it, which training replaces: whoever holds the box sees the new value.

Tensors never change, so what is computed from a box is computed from the tensor that was in it
then. A recording knows which nodes stand for the boxes that it reads and writes; the boxes keep
their content until its program has run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from ..core.checks import alike
from ..core.context import settings
from ..core.errors import caller
from ..core.layout import TensorType
from ..core.turns import TURN
from .changes import nearby
from .eager import eager
from .engine import engine
from .moving import moved
from .recipe import Recipe
from .record import Recorder, current, symbolic
from .tensor import Made, Past, Tensor, behind

First = Callable[[TensorType], Any]  # makes the data, in the layout that is wanted by then


class Box(Tensor):
    """A tensor whose value is replaced: a parameter of a module, or what `dist.tensor` gives.

    A recorded function reads it anew at each call, wherever it has it from.
    """

    _trace: Recorder | None = None
    _first: First | None = None  # makes the data, where there is none yet
    _value: Tensor | None = None  # what is in the box, as tapes and copies refer to it
    label = ""  # the name by which the function that made it knows it

    def __init__(self, data: Any, type: TensorType, name: str = "") -> None:
        super().__init__(data, type)
        self.name = name

    @classmethod
    def holding(cls, value: Tensor) -> Box:
        """A box with `value` in it, of its name."""
        box = cls(None, value.type, value.name)
        box._take(value)
        return box

    # -- what is in it ----------------------------------------------------------------------------
    def now(self) -> Tensor:
        """The current value, as a tensor that does not change when the content of the box does."""
        recorder = current()
        if recorder is not None and (held := recorder.holds(self)) is not None:
            return held
        value = self._value
        if value is not None and value.type is self.type and self._trace is None:
            return value
        with TURN:
            if self._trace is not None:
                assert self._node is not None
                return symbolic(self._node, self._trace)
            if self._value is None or self._value.type is not self.type:  # it was laid out since
                v = Tensor(self._data, self.type)
                v.name, v.box = self.name, self
                if self._data is None:
                    assert self._first is not None
                    v._pending = partial(self._first_of, self._first, v)
                    v._recipe = self._recipe
                self._value = v
            return self._value

    @property
    def stored(self) -> Any:
        """For the engine: the array that is in it."""
        data = self._data
        if data is None:
            with TURN:
                return super().stored
        return data

    def _first_of(self, first: First, copy: Tensor) -> Any:
        """The first data of a `copy` of what was in the box: the box's, while it is like it."""
        with TURN:
            alike = self._value is copy and self._data is None and self.type is copy.type
            return self.stored if alike else first(copy.type)

    def put(self, value: Tensor) -> None:
        """Replaces the value; in a recorded function, after its program has run.

        Raises ShapeError or DTypeError if `value` does not fit, UsageError in the body of a loop or
        branch.
        """
        recorder = current()
        if recorder is not None:
            recorder.write(self, value)
            return
        with TURN:
            if value._trace is not None:
                value._trace.check(value)
            self._take(value)

    def lay(self, to: TensorType) -> None:
        """Gives the value the layout `to`, outside of what is being recorded."""
        if self._data is None and self._pending is not None:
            self.type = to
        elif self.type is not to:
            with eager():
                self.fill(moved(self.now(), to).stored, to)

    def fill(self, data: Any, type: TensorType) -> None:
        """For the engine: sets the engine's array `data` as the value after a program has run."""
        with TURN:
            self._value = None
            self._data, self.type = data, type
            self._pending = self._first = self._recipe = None

    def _take(self, value: Tensor) -> None:
        """Takes on the value of `value`, in the mesh of the box, where it has one; what needs to
        be moved is moved when it is read."""
        if value is self:
            return
        if value._trace is not None:  # a new parameter of a recorded value
            recorder = current()
            assert value._node is not None and isinstance(value._trace, Recorder)
            if recorder is None or recorder is value._trace:
                self.bind(value._node, value._trace)
            else:  # of a recording around this one: what is put into it later is this one's
                self.bind(recorder.node(value), recorder)
            return
        self._value = None
        source = value.now() if isinstance(value, Box) else value
        to = self.type if source.mesh is None and self.mesh is not None else source.type
        self.type = to.with_dtype(source.dtype)
        alike = self.type is source.type
        other = source.box if isinstance(source.box, Box) else self
        waiting: Any = source._pending if source._data is None else None
        recipe = source._recipe if source._data is None else None
        if alike and other is self and source._data is not None:
            self._data, self._pending = engine().alive(source._data, source.type), None
        elif recipe is not None:
            self.wait(recipe)
        elif other is not self and alike:
            self._data, self._pending = source.copied(), None
        elif alike and hasattr(waiting, "wait"):  # in host memory, until one of the two is used
            self.wait(waiting)
        else:
            self.wait(lambda to: moved(source, to).stored)
        if source.box is None and not settings().no_grad:
            self._come_of(source, alike)

    def _come_of(self, source: Tensor, alike: bool) -> None:
        """Notes, outside of recorded functions, that the value is that of `source`: a gradient by
        what that was made of flows through here. Not where it is made of the box's own value
        before, as each would hold all others, nor where it was moved, as its data would be there
        twice: then a gradient by a tensor that leads here is an error. What another box holds
        comes as a constant, as in PyTorch."""
        near, value = nearby(source, behind), self.now()
        if alike and not any(t.box is self for t in near):
            shape, derived = {"shape": source.shape}, source._made and source._made.of_gradient
            value._made = Made("reshape", (source,), shape, 0, caller() or "", bool(derived))
            value._past = source._past
        else:
            value._past = Past([ref(t) for t in near if t.box is None], False)

    def wait(self, first: First) -> None:
        """For those who make boxes: its data come of `first`, in the layout that it has then."""
        self._data, self._first, self._pending = None, first, self._begin
        self._recipe = first if isinstance(first, Recipe) else None

    def _begin(self) -> Any:
        assert self._first is not None
        data, copy = self._first(self.type), self._value
        self._first = None
        if copy is not None and copy._data is None and copy.type is self.type:
            copy._data, copy._pending, copy._recipe = data, None, None
        return data

    def __deepcopy__(self, memo: dict[int, Any]) -> Box:
        other = type(self).__new__(type(self))
        other.name, other.remake, other.drawn = self.name, self.remake, self.drawn
        other.frozen, other._first = self.frozen, self._first
        recorder = current()
        held = None if recorder is None else recorder.holds(self)
        if held is not None:
            other.bind(held._node, held._trace)
            return other
        with TURN:
            other.type, other._node, other._trace = self.type, self._node, self._trace
            if self._trace is not None:
                return other
            if self._recipe is None:
                self.stored  # noqa: B018  # here now, to be copied
            if self._data is not None:  # what is donated of one is still there of the other
                other._first, other._data = None, self.copied()
            else:
                other.wait(self._first)  # type: ignore[arg-type]
        return other

    # -- in a recording ---------------------------------------------------------------------------
    def bind(self, node: Any, recorder: Any) -> None:
        """For the recorder: makes a box of the recorded function's own stand for `node`."""
        self._data = self._pending = None
        self._node, self._trace, self.type = node, recorder, node.types[0]


def fits(what: str, box: Tensor, value: Tensor, fix: str) -> None:
    """Raises ShapeError or DTypeError unless `value` can take the place of what is in `box`."""
    alike(what, box.type, value.type, fix, exactly=True)
