"""`Tensor`: an array on devices, or a node of a trace, such as the recording of a function.

The current `Trace` applies ops: outside of recorded functions they run at once
(lang/value/eager.py), inside they add nodes (lang/record/recorder.py). Functions on tensors are in
modules above this one; those that are methods and operators too are installed here by `method`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, Union
from weakref import ref

import numpy as np

from ...core.devices import process_count
from ...core.dtypes import DType
from ...core.errors import DonatedError, DTypeError, ShapeError, UsageError
from ...core.interrupts import whole
from ...core.layout import TensorType
from ...core.locks import put_back
from ...core.mesh import Mesh
from ...core.public import asking
from ...core.tracebacks import boundary
from ...ir.graph.node import Node
from .annotations import TensorSpec, spec_of
from .deferred_values import Recipe
from .engine import engine

Scalar = int | float | bool
Like = Union["Tensor", Scalar, "np.ndarray[Any, Any]"]  # `|` does not take a string
Function = TypeVar("Function", bound=Callable[..., Any])


class Trace(Protocol):
    """The handler of ops on tensors, and of reads of their results."""

    def apply(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        """Returns the results of the op named `op`."""

    def value(self, t: Tensor) -> np.ndarray[Any, Any]:
        """The whole value of `t` on the host."""

    def show(self, tensors: Sequence[Tensor], act: Callable[[Sequence[Any]], None]) -> None:
        """Calls `act` with the values of `tensors` on the host (`HostValue`) once they exist."""

    def check(self, t: Tensor) -> None:
        """Raises UsageError if `t`, of this trace, is used after the trace ended."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """The history entry of an eager tensor: one op on other tensors."""

    op: str
    args: tuple[Tensor, ...]
    attrs: dict[str, Any]
    index: int
    loc: str
    of_gradient: bool = False  # a result of ts.grad, or made of one
    is_gradient: bool = False  # a result of ts.grad itself
    is_update: bool = False  # a weight that an optimizer has updated


def behind(x: Tensor) -> tuple[Tensor, ...]:
    """The tensors that `x` was made from; none for a gradient."""
    return () if x._history is None or x._history.is_gradient else x._history.args


@dataclass(frozen=True, slots=True)
class Past:
    """Weak references to the freed history of a value: its tensors that still exist."""

    tensors: list[ref[Tensor]]
    stopped: bool  # freed by `ts.stop_gradient`: gradients by these tensors are zero
    by: str = ""  # the compiled function that made the value; its inputs are not recorded

    def has(self, wanted: Iterable[Tensor]) -> list[Tensor]:
        there = {id(t): t for r in self.tensors if (t := r()) is not None}
        return [t for t in wanted if there.get(id(t)) is t]


class _Size(int):
    """A number of elements. Calling it, as in PyTorch, raises UsageError with the replacement."""

    def __call__(self, dim: int | None = None) -> NoReturn:
        raise UsageError(
            "size: it is a number, not a function",
            size=int(self),
            fix="write x.shape" if dim is None else f"write x.shape[{dim}]",
        )


ON_READ: list[Callable[[Tensor], None]] = []
"""Called with each eager tensor whose value is read on the host (lang/record/recorder.py)."""


class Tensor:
    """A tensor with a type: dtype, shape, layout and mesh. `t.type` prints all of it.

    `ts.tensor` makes one from host data, `ts.dist.tensor` on the devices. A Tensor is immutable;
    functions and operators return new ones. A method with a dim that does not exist raises
    ShapeError.
    """

    # Defaults on the class, so that wrapping a result sets two fields only.
    name: str = ""
    _node: Node | None = None
    _trace: Trace | None = None  # the trace of `_node`; None for an eager value
    _history: HistoryEntry | None = None
    _past: Past | None = None  # its freed history (lang/autodiff/tape.py)
    _pending: Callable[[], Any] | None = None
    _recipe: Recipe | None = None  # the recipe in `_pending`, if the data can be made repeatedly
    _host_values: np.ndarray[Any, Any] | None = None  # a number, or integers, from the host
    drawn: bool = False  # made by dist.tensor: a weight, which a training step may name
    frozen: bool = False  # a parameter that is not trained
    out_in: bool = False  # a linear layer's weight [out, in], as PyTorch has it
    box: Tensor | None = None  # the box whose value this is or was
    of: Tensor | None = None  # the tensor that this is a separate copy of, for gradients
    home: Any = None  # a weak reference to the module whose attribute this became
    _reports: tuple[object, ...] = ()  # the reports of the function that made it
    remake: Callable[..., Tensor] | None = None  # makes the weight anew: (shape, name="")

    def __init_subclass__(cls) -> None:
        KINDS.add(cls)

    def __init__(self, data: Any, type: TensorType) -> None:
        self._data = data
        self.type = type

    def wait(self, recipe: Recipe) -> None:
        """Defers the data to `recipe`, which makes them in the layout at the first use. For
        creators of tensors."""
        self._recipe, self._pending = recipe, lambda: recipe(self.type)

    def __class_getitem__(cls, items: Any) -> TensorSpec:
        return spec_of(items)

    def now(self) -> Tensor:
        """The current value of a parameter as an immutable tensor; any other tensor itself."""
        return self

    # -- type -------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape: the size of each dim over all devices."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type, e.g. `ts.f32`."""
        return self.type.dtype

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the tensor lies on, or None if it has none yet."""
        return self.type.mesh

    @property
    def layout(self) -> str:
        """The splits of the dims over mesh axes, as text, e.g. `[8@dp, 4096] +tp`.

        `8@dp` is a dim of size 8 split over axis dp; `+tp` means that a sum over axis tp is
        pending.
        """
        return self.type.text.removeprefix(self.type.dtype.name)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.type.rank

    @property
    def size(self) -> int:
        """The number of elements, over all devices."""
        return _Size(self.type.size)

    @property
    def stored(self) -> Any:
        """The engine's array of this tensor as it lies on the devices: with padding rows of uneven
        parts, and blocks as dims. For the engine; users call `jax`. Raises UsageError for a tensor
        of a recorded function."""
        if self._data is None:
            if self._trace is not None:
                self._trace.check(self)
            pending = self._pending  # another thread may be here, too
            if pending is not None:
                self._data = pending()
                self._pending = None
                if self._recipe is not None and not self._recipe.permanent:
                    self._recipe = None
            elif self._node is not None:
                raise UsageError(
                    "a tensor of a recorded function has no value of its own",
                    tensor=self.type,
                    fix="return it from the function, or read it with .item() inside",
                )
        return self._data

    def __reduce__(self) -> tuple[Any, ...]:
        if process_count() > 1:
            engine().fetch(self.stored, self.type)  # says why it cannot be read here, and the fix
        return _unpickled, (type(self), self.stored, self.type, self.name, self.frozen)

    def __copy__(self) -> Tensor:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self._trace is not None:
            return self  # a node never changes
        other = Tensor(None, self.type)
        if self._data is None and self._recipe is not None:
            other.wait(self._recipe)
        else:
            other._data = self.copied()
        if self._history is not None:
            other._history = replace(
                self._history, op="reshape", args=(self,), attrs={"shape": self.shape}, index=0
            )
        other.name, other.drawn, other.remake = self.name, self.drawn, self.remake
        other._host_values = self._host_values
        return other

    def copied(self) -> Any:
        """Returns a copy of the data, which stays valid when the data are donated."""
        return engine().alive(self.stored, self.type).copy()

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError(
                "len: a scalar has no length",
                tensor=self.type,
                fix="use .item() for its value, or .size",
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    # -- reading ----------------------------------------------------------------------------------
    @whole
    def numpy(self) -> np.ndarray[Any, Any]:
        """The whole value on the host. Inside a recorded function the program is split at this
        line."""
        now = self.now()
        if now._trace is not None:
            return now._trace.value(now)
        for noted in ON_READ:
            noted(self)
        try:
            return self._fetched()
        except DonatedError:
            with put_back():
                return self._fetched()

    def _fetched(self) -> np.ndarray[Any, Any]:
        now = self.now()
        value: np.ndarray[Any, Any] = engine().fetch(now.stored, now.type)
        return value

    def item(self) -> Any:
        """The value of a one-element tensor as a Python number.

        Raises ShapeError if the tensor does not have exactly one element.
        """
        if self.size != 1:
            raise ShapeError(
                f"item: a tensor of {self.size} elements is not one number",
                tensor=self.type,
                fix="reduce it first, or use .numpy()",
            )
        return self.numpy().reshape(()).item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if not self.dtype.is_int:
            raise DTypeError(
                "index: a tensor of floats is no index",
                tensor=self.type,
                fix="cast it with .to(ts.int32)",
            )
        return int(self.item())

    def __format__(self, how: str) -> str:
        value = self.item() if self.size == 1 else self.numpy()
        try:
            return format(value, how)
        except (TypeError, ValueError):
            raise UsageError(
                f"format: {how!r} does not fit the value",
                tensor=self.type,
                fix="format one number with .item(), or the array of .numpy()",
            ) from None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    def __dlpack__(self, **how: Any) -> Any:
        return np.array(self.numpy()).__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the host: a gathered copy

    def jax(self) -> Any:
        """The `jax.Array` behind this value: one array dim per factor, its sharding that of the
        layout. Raises DonatedError if the value was donated."""
        for noted in ON_READ:
            noted(self)
        return engine().alive(self.stored, self.type)

    # -- installed by the modules above that have them (`method`) ----------------------------------
    if TYPE_CHECKING:

        def __add__(self, o: Like) -> Tensor: ...
        def __radd__(self, o: Like) -> Tensor: ...
        def __sub__(self, o: Like) -> Tensor: ...
        def __rsub__(self, o: Like) -> Tensor: ...
        def __mul__(self, o: Like) -> Tensor: ...
        def __rmul__(self, o: Like) -> Tensor: ...
        def __truediv__(self, o: Like) -> Tensor: ...
        def __rtruediv__(self, o: Like) -> Tensor: ...
        def __floordiv__(self, o: Like) -> Tensor: ...
        def __rfloordiv__(self, o: Like) -> Tensor: ...
        def __mod__(self, o: Like) -> Tensor: ...
        def __rmod__(self, o: Like) -> Tensor: ...
        def __pow__(self, o: Like) -> Tensor: ...
        def __rpow__(self, o: Like) -> Tensor: ...
        def __matmul__(self, o: Like) -> Tensor: ...
        def __rmatmul__(self, o: Like) -> Tensor: ...
        def __eq__(self, o: object) -> Tensor: ...  # type: ignore[override]  # as in NumPy
        def __ne__(self, o: object) -> Tensor: ...  # type: ignore[override]
        def __lt__(self, o: object) -> Tensor: ...
        def __le__(self, o: object) -> Tensor: ...
        def __gt__(self, o: object) -> Tensor: ...
        def __ge__(self, o: object) -> Tensor: ...
        def __and__(self, o: Like) -> Tensor: ...
        def __rand__(self, o: Like) -> Tensor: ...
        def __or__(self, o: Like) -> Tensor: ...
        def __ror__(self, o: Like) -> Tensor: ...
        def __xor__(self, o: Like) -> Tensor: ...
        def __rxor__(self, o: Like) -> Tensor: ...
        def __lshift__(self, o: Like) -> Tensor: ...
        def __rlshift__(self, o: Like) -> Tensor: ...
        def __rshift__(self, o: Like) -> Tensor: ...
        def __rrshift__(self, o: Like) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __round__(self, decimals: int | None = None) -> Tensor: ...
        def __getitem__(self, key: Any) -> Tensor: ...
        def __array_ufunc__(self, f: Any, method: str, *inputs: Any, **how: Any) -> Any: ...
        def __array_function__(self, f: Any, types: Any, args: Any, how: Any) -> Any: ...

        def to(self, dtype: object) -> Tensor:
            """The tensor converted to another dtype. Raises DTypeError if `dtype` is unknown."""

        astype = to

        def _real(self) -> Tensor: ...
        def _imag(self) -> Tensor: ...
        def conj(self) -> Tensor:
            """`ts.conj`: the complex conjugate, elementwise."""

        def reshape(self, *shape: int | Sequence[int]) -> Tensor:
            """`ts.reshape`: the same elements in another shape; one size may be -1."""

        def transpose(self, a: int | Sequence[int] | None = None, b: int = -1) -> Tensor:
            """Exchanges two dims; for a matrix its two dims."""

        def permute(self, *dims: int | Sequence[int]) -> Tensor:
            """`ts.permute`: the dims in another order."""

        def squeeze(self, dim: int | Sequence[int] | None = None) -> Tensor:
            """`ts.squeeze`: the tensor without its dims of size 1, or without those in `dim`."""

        def unsqueeze(self, dim: int) -> Tensor:
            """`ts.unsqueeze`: the tensor with a new dim of size 1."""

        def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
            """`ts.flatten`: several dims joined to one, by default all."""

        def repeat(self, *repeats: int | Sequence[int]) -> Tensor:
            """`ts.tile`, as in PyTorch. NumPy's repeat is `ts.repeat_interleave`."""

        def detach(self) -> Tensor:
            """The same value as a constant: no gradient flows through it (`ts.stop_gradient`)."""

        @property
        def at(self) -> Any:
            """Places of the tensor for new values: `x.at[key].set(value)`, `add`, `mul`, `max` and
            `min`, as in JAX."""

        @property
        def data(self) -> Tensor:
            """The value without its history, as from `detach`. For a parameter it can be set."""

        @data.setter
        def data(self, value: Like) -> None: ...

        def sum(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
            """`ts.sum`: the sum along `dim`, by default over all dims."""

        def mean(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
            """`ts.mean`: the mean along `dim`, by default over all dims."""

        def max(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
            """`ts.max`: the largest element along `dim`, by default over all dims."""

        def min(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
            """`ts.min`: the smallest element along `dim`, by default over all dims."""

        def any(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
            """`ts.any`: True where at least one element along `dim` is true, by default of all."""

        def all(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
            """`ts.all`: True where all elements along `dim` are true, by default all elements."""

        def var(
            self,
            dim: int | Sequence[int] | None = None,
            *,
            keepdims: bool = False,
            correction: float = 0,
        ) -> Tensor:
            """`ts.var`: the variance along `dim`, by default over all dims."""

        def std(
            self,
            dim: int | Sequence[int] | None = None,
            *,
            keepdims: bool = False,
            correction: float = 0,
        ) -> Tensor:
            """`ts.std`: the standard deviation along `dim`, by default over all dims."""

    @property
    def real(self) -> Tensor:
        """`ts.real`: the real part."""
        return self._real()

    @property
    def imag(self) -> Tensor:
        """`ts.imag`: the imaginary part."""
        return self._imag()

    @property
    def T(self) -> Tensor:  # as in NumPy
        """The tensor with its dims in reverse order, as in NumPy."""
        return self.permute(*reversed(range(self.ndim)))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UsageError(
            "a tensor cannot be changed in place",
            tensor=self.type,
            fix="make a new one: x = x.at[key].set(value), or ts.where(mask, value, x)",
        )


def method(*names: str) -> Callable[[Function], Function]:
    """A decorator that installs a function of a tensor as the Tensor methods `names`."""

    def install(fn: Function) -> Function:
        for name in names:
            inside = name.startswith("__")
            setattr(Tensor, name, boundary(fn) if inside else asking(fn, name, of_object=True))
        return fn

    return install


KINDS: set[type] = {Tensor}
"""Tensor and its subclasses."""

_empty = object.__new__


def wrapped(data: Any, type: TensorType, past: Past | None = None) -> Tensor:
    """Returns the tensor of an engine's array: `Tensor(data, type)` without checks of arguments, as
    programs wrap all their results with it."""
    made = _empty(Tensor)
    made._data = data
    made.type = type
    made._past = past
    return made


def _unpickled(kind: type[Tensor], data: Any, type: TensorType, name: str, frozen: bool) -> Tensor:
    t = kind.__new__(kind)
    Tensor.__init__(t, data, type)
    t.name, t.frozen = name, frozen
    return t
