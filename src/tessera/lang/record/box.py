"""`Box`: a mutable tensor, such as a parameter; all holders see a new value.

Plain tensors never change: a result computed from a box is computed from the value at that time. A
recording maps each box that it reads or writes to a node; the boxes keep their data until the
program has run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from ...core.context import settings
from ...core.errors import caller
from ...core.layout import TensorType
from ...core.locks import RECORDING_LOCK
from ...core.tensor_checks import alike
from ..value.deferred_values import Recipe
from ..value.eager import eager
from ..value.engine import engine
from ..value.tensor import HistoryEntry, Past, Tensor, behind
from .mesh_transfer import moved
from .recorder import Recorder, current, symbolic
from .state_effects import nearby

First = Callable[[TensorType], Any]  # makes the data, in the box's layout at the first use


class Box(Tensor):
    """A tensor whose value can be replaced: a module's parameter, or a tensor of `dist.tensor`.

    A recorded function reads it anew at each call, also as a global or in a closure.
    """

    _trace: Recorder | None = None
    _first: First | None = None  # makes the data when it is first used
    _value: Tensor | None = None  # the immutable value that tapes and copies refer to
    label = ""  # its name in the function that made it

    def __init__(self, data: Any, type: TensorType, name: str = "") -> None:
        super().__init__(data, type)
        self.name = name

    @classmethod
    def holding(cls, value: Tensor) -> Box:
        """Returns a box with the value and the name of `value`."""
        box = cls(None, value.type, value.name)
        box._take(value)
        return box

    # -- the value --------------------------------------------------------------------------------
    def now(self) -> Tensor:
        """The current value, as a tensor that stays the same when the box is written later."""
        recorder = current()
        if recorder is not None and (held := recorder.holds(self)) is not None:
            return held
        value = self._value
        if value is not None and value.type is self.type and self._trace is None:
            return value
        with RECORDING_LOCK:
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
        """The engine's array of the value. For the engine only."""
        data = self._data
        if data is None:
            with RECORDING_LOCK:
                return super().stored
        return data

    def _first_of(self, first: First, copy: Tensor) -> Any:
        """Returns the first data of `copy`, a value of this box: the box's own data while both
        agree."""
        with RECORDING_LOCK:
            alike = self._value is copy and self._data is None and self.type is copy.type
            return self.stored if alike else first(copy.type)

    def put(self, value: Tensor) -> None:
        """Replaces the value; in a recorded function, after its program has run.

        Raises ShapeError if `value` has another shape, DTypeError if one of the two is not of
        floats, UsageError in the body of a loop or branch.
        """
        alike("put: the new value", self.type, value.type, "give a value of its shape and dtype")
        recorder = current()
        if recorder is not None:
            recorder.write(self, value)
            return
        with RECORDING_LOCK:
            if value._trace is not None:
                value._trace.check(value)
            self._take(value)

    def lay(self, to: TensorType) -> None:
        """Gives the value the layout `to`, outside of the current recording."""
        if self._data is None and self._pending is not None:
            self.type = to
        elif self.type is not to:
            with eager():
                self.fill(moved(self.now(), to).stored, to)

    def fill(self, data: Any, type: TensorType) -> None:
        """Sets the engine's array `data` as the value after a program has run. For the engine
        only."""
        with RECORDING_LOCK:
            self._value = None
            self._data, self.type = data, type
            self._pending = self._first = self._recipe = None

    def _take(self, value: Tensor) -> None:
        """Adopts the value and type of `value`; a value on no mesh is put on the mesh of the box.
        Data that must be moved is moved when it is read."""
        if value is self:
            return
        if value._trace is not None:  # a new parameter of a recorded value
            recorder = current()
            assert value._node is not None and isinstance(value._trace, Recorder)
            if recorder is None or recorder is value._trace:
                self.bind(value._node, value._trace)
            else:  # the value is of an outer recording; a later `put` here is of this one
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
        """Links the value to the history of `source`, so that a gradient flows through the box
        outside of recorded functions. There is no link if `source` was computed from the box's
        previous value (each value would keep all earlier ones alive), nor if the value was moved
        (its data would exist twice); a gradient through the box is then an error. The value of
        another box is a constant, as in PyTorch."""
        near, value = nearby(source, behind), self.now()
        if alike and not any(t.box is self for t in near):
            shape, derived = (
                {"shape": source.shape},
                source._history and source._history.of_gradient,
            )
            value._history = HistoryEntry(
                "reshape", (source,), shape, 0, caller() or "", bool(derived)
            )
            value._past = source._past
        else:
            value._past = Past([ref(t) for t in near if t.box is None], False)

    def wait(self, first: First) -> None:
        """Defers the data to `first`, which is called with the layout at the first use. For
        creators of boxes."""
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
        other.frozen, other.out_in, other._first = self.frozen, self.out_in, self._first
        recorder = current()
        held = None if recorder is None else recorder.holds(self)
        if held is not None:
            other.bind(held._node, held._trace)
            return other
        with RECORDING_LOCK:
            other.type, other._node, other._trace = self.type, self._node, self._trace
            if self._trace is not None:
                return other
            if self._recipe is None:
                self.stored  # noqa: B018  # makes the data now, so that it can be copied
            if self._data is not None:  # a copy, as either box may be donated
                other._first, other._data = None, self.copied()
            else:
                other.wait(self._first)  # type: ignore[arg-type]
        return other

    # -- in a recording ---------------------------------------------------------------------------
    def bind(self, node: Any, recorder: Any) -> None:
        """Makes a box created inside the recorded function stand for `node`. For the recorder
        only."""
        self._data = self._pending = None
        self._node, self._trace, self.type = node, recorder, node.types[0]


def fits(caller: str, box: Tensor, value: Tensor, fix: str) -> None:
    """Raises ShapeError or DTypeError unless `value` has the shape and dtype of `box`."""
    alike(caller, box.type, value.type, fix, exactly=True)
