"""A weight: a box with a tensor in it, which training replaces. Whoever holds the box sees the new
value.

Tensors never change, so what is computed from a box is computed from the tensor that was in it
then. A recording knows which nodes stand for the boxes that it reads and writes; the boxes keep
their content until its program has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from ..core.checks import alike, flag, shown, sizes, unfit
from ..core.context import settings
from ..core.dtypes import dtype_of
from ..core.errors import DTypeError, ShapeError, UsageError, caller, fail
from ..core.kinds import is_whole
from ..core.layout import TensorType, plain
from ..core.turns import TURN
from .changes import nearby
from .create import first_values
from .eager import eager
from .engine import engine
from .moving import moved
from .operands import as_tensor
from .recipe import Recipe
from .record import Recorder, current, symbolic
from .tensor import Like, Made, Past, Tensor, behind

First = Callable[[TensorType], Any]  # makes the data, in the layout that is wanted by then


class Parameter(Tensor):
    """A weight of a module, from sizes as in `Parameter(4, 8, init="normal")`, or from a tensor.

    From sizes, the values are made at the first use, and the layout may be chosen until then; they
    depend on `ts.seed` and `name` (without a name, on the order of creation). `init` is as in
    `dist.tensor`. With `requires_grad=False` it is frozen: saved, moved and used, but not trained.
    Raises UsageError if `init` is unknown or comes with a tensor, DTypeError if the dtype is not a
    float, ShapeError if a size is negative.

    >>> import tessera as ts
    >>> w = ts.nn.Parameter(ts.ones((2, 3)))
    >>> w.shape, w.requires_grad, isinstance(w, ts.Tensor)
    ((2, 3), True, True)
    """

    _trace: Recorder | None = None
    _first: First | None = None  # makes the data, where there is none yet
    _value: Tensor | None = None  # what is in the box, as tapes and copies refer to it
    label = ""  # the name by which the function that made it knows it

    def __init__(
        self,
        *shape: Any,
        init: Any = None,
        dtype: Any = None,
        name: str = "",
        requires_grad: bool = True,
    ) -> None:
        recorder = current()
        if recorder is not None:
            recorder.bear(self)
        given = shape[0] if shape and not isinstance(shape[0], np.generic) else None
        if given is not None and hasattr(given, "__array__"):  # an array, of whatever library
            if len(shape) == 2 and isinstance(shape[1], bool):
                requires_grad = shape[1]
            elif len(shape) > 1 or init is not None:
                raise fail(
                    UsageError,
                    "Parameter: a tensor has its values already",
                    [("tensor", shown(shape[0]))],
                    fix="give the tensor alone, or sizes and init=",
                )
            value = as_tensor(shape[0], dtype)
            super().__init__(None, value.type)
            self.name = name or value.name
            self._take(value)
        else:
            if len(shape) == 1 and isinstance(given, (tuple, list)):
                shape = tuple(given)
            if not all(map(is_whole, shape)):
                fix = "give sizes, nn.Parameter(8, 4096), or a tensor: nn.Parameter(ts.tensor(x))"
                raise unfit("Parameter", "the shape", shape, fix, ShapeError)
            kind = dtype_of("f32" if dtype is None else dtype)
            super().__init__(None, plain(kind, sizes("Parameter", shape), settings().mesh))
            self._wait(first_values("Parameter", "normal" if init is None else init, name))
            self.name, self.drawn = name, True
            self.remake = lambda s, name="": Parameter(
                *s, init=init, dtype=dtype, name=name, requires_grad=self.requires_grad
            )
        if not self.dtype.is_float:
            raise fail(
                DTypeError,
                f"Parameter: {self.dtype} cannot be trained",
                [("tensor", self.type)],
                fix="give floats; a tensor of integers is an attribute like any other",
            )
        self.requires_grad = requires_grad

    # -- is it trained? ---------------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained. False: it has no gradient and no optimizer state."""
        return not self.frozen

    @requires_grad.setter
    def requires_grad(self, value: object) -> None:
        trained = flag("Parameter", "requires_grad", value)
        if self.frozen is trained:
            self.frozen = not trained
            FREEZING.add(True)

    # -- what is in it ----------------------------------------------------------------------------
    def now(self) -> Tensor:
        """The current value, as a tensor that does not change when the parameter does."""
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

    @property
    def data(self) -> Tensor:
        """The value without its past. Setting it puts a value into the parameter, as in PyTorch:
        `p.data = p.data - step`. Raises ShapeError or DTypeError if it is not like the old one."""
        return self.detach()

    @data.setter
    def data(self, value: Like) -> None:
        new = as_tensor(value).detach()
        fits("Parameter.data: the new value", self, new, "give a value of its shape and dtype")
        self.put(new)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise fail(
            UsageError,
            "a parameter cannot be changed in a part of it",
            [("parameter", self.type)],
            fix="put a whole value into it: p.data = ts.where(mask, value, p)",
        )

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

    def _in_place(self, value: Tensor) -> Tensor:
        """Itself, with `value` in it: what `p -= step` means, where no gradient could be asked for
        through the old value. Raises UsageError elsewhere, as PyTorch does."""
        if not (settings().no_grad or self.frozen):
            raise fail(
                UsageError,
                "Parameter: a weight that is trained is changed in place",
                [("weight", self.type)],
                fix="change it inside `with ts.no_grad():`; assign it: model.weight = tensor; or"
                " compute on with a new tensor: w = w - step",
            )
        fits("Parameter: the new value", self, value, "give a value of its shape and dtype")
        self.put(value)
        return self

    def draw_as(self, name: str) -> None:
        """For graph functions: the first values are those of a parameter called `name`."""
        if self.remake is not None:
            with eager():
                first = self.remake(self.shape, name)
            self._wait(first._first)  # type: ignore[attr-defined]

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
        """Takes on the value of `value`, in this parameter's mesh, where it has one; what needs to
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
        source = value.now() if isinstance(value, Parameter) else value
        to = self.type if source.mesh is None and self.mesh is not None else source.type
        self.type = to.with_dtype(source.dtype)
        alike = self.type is source.type
        other = source.box if isinstance(source.box, Parameter) else self
        waiting: Any = source._pending if source._data is None else None
        recipe = source._recipe if source._data is None else None
        if alike and other is self and source._data is not None:
            self._data, self._pending = engine().alive(source._data, source.type), None
        elif recipe is not None:
            self._wait(recipe)
        elif other is not self and alike:
            self._data, self._pending = source.copied(), None
        elif alike and hasattr(waiting, "wait"):  # in host memory, until one of the two is used
            self._wait(waiting)
        else:
            self._wait(lambda to: moved(source, to).stored)
        if source.box is None and not settings().no_grad:
            self._come_of(source, alike)

    def _come_of(self, source: Tensor, alike: bool) -> None:
        """Notes, outside of recorded functions, that the value is that of `source`: a gradient by
        what that was made of flows through here. Not where it is made of this parameter's own value
        before, as each would hold all others, nor where it was moved, as its data would be there
        twice: then a gradient by a tensor that leads here is an error. What another parameter holds
        comes as a constant, as in PyTorch."""
        near, value = nearby(source, behind), self.now()
        if alike and not any(t.box is self for t in near):
            shape, derived = {"shape": source.shape}, source._made and source._made.of_gradient
            value._made = Made("reshape", (source,), shape, 0, caller() or "", bool(derived))
            value._past = source._past
        else:
            value._past = Past([ref(t) for t in near if t.box is None], False)

    def _wait(self, first: First) -> None:
        self._data, self._first, self._pending = None, first, self._begin
        self._recipe = first if isinstance(first, Recipe) else None

    def _begin(self) -> Any:
        assert self._first is not None
        data, copy = self._first(self.type), self._value
        self._first = None
        if copy is not None and copy._data is None and copy.type is self.type:
            copy._data, copy._pending, copy._recipe = data, None, None
        return data

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        other = Parameter.__new__(Parameter)
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
                other._wait(self._first)  # type: ignore[arg-type]
        return other

    # -- in a recording ---------------------------------------------------------------------------
    def bind(self, node: Any, recorder: Any) -> None:
        """For the recorder: makes a parameter of the recorded function's own stand for `node`."""
        self._data = self._pending = None
        self._node, self._trace, self.type = node, recorder, node.types[0]


# Whether a parameter was ever frozen: until then nobody needs to ask.
FREEZING: set[bool] = set()


def stand_ins(leaves: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """`values` of the `leaves` of a function's arguments. Where a leaf is a parameter, so is what
    stands for it: frozen as that is, and one where that is one under several names."""
    made: dict[int, Parameter] = {}
    for leaf, x in zip(leaves, values, strict=True):
        if type(leaf) is Parameter and type(x) is Tensor and id(leaf) not in made:
            made[id(leaf)] = p = Parameter(x, name=leaf.name)
            p.frozen = leaf.frozen
    return [made.get(id(leaf), x) for leaf, x in zip(leaves, values, strict=True)]


def trained(tree: Any) -> Any:
    """`tree` with the parameters that are trained, by name, in place of each module."""
    if hasattr(type(tree), "trainable_parameters"):
        return tree.trainable_parameters()
    if isinstance(tree, dict):
        return {k: trained(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [trained(v) for v in tree]
        if isinstance(tree, list):
            return values
        return tuple(values) if type(tree) is tuple else type(tree)(*values)
    return tree


def need_trained(call: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raises UsageError if a parameter is frozen, or is there under two names."""
    names: dict[int, str] = {}
    for name, t in named:
        if not isinstance(t, Parameter):
            continue
        if t.frozen:
            raise fail(
                UsageError,
                f"{call}: {name!r} is frozen",
                [("parameter", t.type)],
                fix="give the module itself or its trainable_parameters(), or unfreeze it",
            )
        if names.setdefault(id(t), name) != name:
            raise fail(
                UsageError,
                f"{call}: {names[id(t)]!r} and {name!r} are one parameter",
                [("parameter", t.type)],
                fix="name it once, as the parameters() of a module do",
            )


def fits(what: str, box: Tensor, value: Tensor, fix: str) -> None:
    """Raises ShapeError or DTypeError unless `value` can take the place of what is in `box`."""
    alike(what, box.type, value.type, fix, exactly=True)


def _in_place(name: str) -> Callable[[Parameter, Any], Tensor]:
    plain = name.replace("__i", "__", 1)
    return lambda p, y: p._in_place(getattr(Tensor, plain)(p, y))


for _name in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
    setattr(Parameter, _name, _in_place(_name))
