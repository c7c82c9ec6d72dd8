"""The tensor a user holds: a value on devices, or a node of the function being recorded.

Outside a recorded function an op runs at once as a one-op program and the result remembers how it
was made, so that `ts.grad` works there too. Inside one it adds a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union
from weakref import ref

import numpy as np

from ..core.checks import shown
from ..core.dtypes import DType, beyond, dtype_of, f32, int32, promote
from ..core.errors import DTypeError, ShapeError, UsageError, fail
from ..core.interrupts import whole
from ..core.layout import TensorType, plain
from ..core.mesh import Mesh
from ..ir.graph.node import Node
from .checks import fitting
from .engine import engine
from .host import engine_array, host_array, host_view, remembered
from .spec import TensorSpec, spec_of

if TYPE_CHECKING:
    from .record import Recorder
    from .tape import Past

Scalar = int | float | bool
Like = Union["Tensor", Scalar, "np.ndarray[Any, Any]"]  # a name in it is a string


@dataclass(frozen=True, slots=True)
class Made:
    """How a tensor outside any recording was made: one op on other tensors."""

    op: str
    args: tuple[Tensor, ...]
    attrs: dict[str, Any]
    index: int
    loc: str
    of_gradient: bool = False  # a result of ts.grad, or made of one


class Tensor:
    """A tensor with a type: dtype, shape, layout and mesh. `t.type` prints all of it.

    `ts.tensor` makes one from host data, `ts.dist.tensor` on the devices. A Tensor is immutable;
    functions and operators return new ones. Those with a dim that does not exist raise ShapeError.
    """

    # Defaults on the class, so that wrapping a result sets two fields and no more.
    name: str = ""
    _node: Node | None = None
    _recorder: Recorder | None = None
    _made: Made | None = None
    _past: Past | None = None  # what it was made of, when that was let go of (lang/tape.py)
    _pending: Callable[[], Any] | None = None
    _given: np.ndarray[Any, Any] | None = None  # integers, where they came from the host
    drawn: bool = False  # by dist.tensor: a weight, which a training step may name
    frozen: bool = False  # a parameter that is not trained
    box: Tensor | None = None  # the parameter that this was in
    home: Any = None  # a weak reference to the module whose attribute this became
    _reports: tuple[object, ...] = ()  # what the function that made it said of itself
    remake: Callable[..., Tensor] | None = None  # the same weight anew: (shape, name="")

    def __init__(self, data: Any, type: TensorType) -> None:
        self._data = data
        self.type = type

    def __class_getitem__(cls, items: Any) -> TensorSpec:
        return spec_of(items)

    def now(self) -> Tensor:
        """The current value of a parameter as an immutable tensor; any other tensor itself."""
        return self

    # -- what it is -------------------------------------------------------------------------------
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
        """How the dims are split over mesh axes, as text, e.g. `[8@dp, 4096] +tp`.

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
        return self.type.size

    @property
    def data(self) -> Any:
        """The engine's array behind this tensor (`jax` gives it as a `jax.Array`)."""
        if self._data is None:
            if self._recorder is not None:
                self._recorder.check(self)
            if self._pending is not None:
                self._data = self._pending()
                self._pending = None
            elif self._node is not None:
                raise fail(
                    UsageError,
                    "a tensor of a recorded function has no value of its own",
                    [("tensor", self.type)],
                    fix="return it from the function, or read it with .item() inside",
                )
        return self._data

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.data, self.type, self.name, self.frozen)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self  # it never changes

    def __repr__(self) -> str:
        where = f" on {self.mesh.text()}" if self.mesh is not None else ""
        label = f" {self.name!r}" if self.name else ""
        return f"<Tensor{label} {self.type}{where}>"

    def __len__(self) -> int:
        if not self.shape:
            raise fail(
                ShapeError,
                "len: a scalar has no length",
                [("tensor", self.type)],
                fix="use .item() for its value, or .size",
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    # -- reading ----------------------------------------------------------------------------------
    @whole
    def numpy(self) -> np.ndarray[Any, Any]:
        """The whole value on the host. Inside a recorded function this cuts the program here."""
        if self._recorder is not None:
            return self._recorder.read(self)
        return engine().fetch(self.data, self.type)  # type: ignore[no-any-return]

    def item(self) -> Any:
        """The value of a one-element tensor as a Python number.

        Raises ShapeError if the tensor does not have exactly one element.
        """
        if self.size != 1:
            raise fail(
                ShapeError,
                f"item: a tensor of {self.size} elements is not one number",
                [("tensor", self.type)],
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
            raise fail(
                DTypeError,
                "index: a tensor of floats is no index",
                [("tensor", self.type)],
                fix="cast it with .to(ts.int32)",
            )
        return int(self.item())

    def __format__(self, how: str) -> str:
        value = self.item() if self.size == 1 else self.numpy()
        try:
            return format(value, how)
        except (TypeError, ValueError):
            raise fail(
                UsageError,
                f"format: {how!r} does not fit the value",
                [("tensor", self.type)],
                fix="format one number with .item(), or the array of .numpy()",
            ) from None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    # NumPy's functions are ours on tensors (lang/numpy_names.py): a value would have no gradient.
    def __array_ufunc__(self, f: Any, method: str, *inputs: Any, **how: Any) -> Any:
        from .numpy_names import apply_ufunc

        return apply_ufunc(f, method, inputs, how)

    def __array_function__(self, f: Any, types: Any, args: Sequence[Any], how: Any) -> Any:
        from .numpy_names import apply_function

        return apply_function(f, args, how)

    def __dlpack__(self, **how: Any) -> Any:
        return np.array(self.numpy()).__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the host: a gathered copy

    def jax(self) -> Any:
        """The `jax.Array` behind this value: one array dim a factor, its sharding the layout's.
        Raises DonatedError where the value was given up."""
        return engine().alive(self.data, self.type)

    # -- arithmetic -------------------------------------------------------------------------------
    def __add__(self, o: Like) -> Tensor:
        return binary("add", self, o)

    def __radd__(self, o: Like) -> Tensor:
        return binary("add", o, self)

    def __sub__(self, o: Like) -> Tensor:
        return binary("sub", self, o)

    def __rsub__(self, o: Like) -> Tensor:
        return binary("sub", o, self)

    def __mul__(self, o: Like) -> Tensor:
        return binary("mul", self, o)

    def __rmul__(self, o: Like) -> Tensor:
        return binary("mul", o, self)

    def __truediv__(self, o: Like) -> Tensor:
        return binary("div", self, o)

    def __rtruediv__(self, o: Like) -> Tensor:
        return binary("div", o, self)

    def __floordiv__(self, o: Like) -> Tensor:
        return binary("floordiv", self, o)

    def __rfloordiv__(self, o: Like) -> Tensor:
        return binary("floordiv", o, self)

    def __mod__(self, o: Like) -> Tensor:
        return binary("mod", self, o)

    def __rmod__(self, o: Like) -> Tensor:
        return binary("mod", o, self)

    def __pow__(self, o: Like) -> Tensor:
        if isinstance(o, int) and o < 0 and self.dtype.is_int:
            raise fail(
                DTypeError,
                f"pow: {self.dtype} to the power of {o} is no whole number",
                [("x", self.type)],
                fix=f"give the exponent as a float: x ** {float(o)}",
            )
        if isinstance(o, int) and not isinstance(o, bool) and 1 <= o <= 4:
            out = self
            for _ in range(o - 1):
                out = out * self
            return out
        return binary("pow", self, o)

    def __rpow__(self, o: Like) -> Tensor:
        return binary("pow", o, self)

    def __neg__(self) -> Tensor:
        return emit("neg", self)

    def __abs__(self) -> Tensor:
        return emit("abs", self)

    def __matmul__(self, o: Like) -> Tensor:
        from .functions import matmul

        return matmul(self, tensor_like(o, self, "matmul"))

    def __rmatmul__(self, o: Like) -> Tensor:
        from .functions import matmul

        return matmul(tensor_like(o, self, "matmul"), self)

    def __eq__(self, o: object) -> Tensor:  # type: ignore[override]  # elementwise, as in NumPy
        return binary("eq", self, o)

    def __ne__(self, o: object) -> Tensor:  # type: ignore[override]
        return binary("ne", self, o)

    def __lt__(self, o: object) -> Tensor:
        return binary("lt", self, o)

    def __le__(self, o: object) -> Tensor:
        return binary("le", self, o)

    def __gt__(self, o: object) -> Tensor:
        return binary("gt", self, o)

    def __ge__(self, o: object) -> Tensor:
        return binary("ge", self, o)

    def __and__(self, o: Like) -> Tensor:
        return _bits("and", self, o)

    def __or__(self, o: Like) -> Tensor:
        return _bits("or", self, o)

    def __xor__(self, o: Like) -> Tensor:
        return _bits("xor", self, o)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Tensor:
        # -1 - x turns every bit; of unsigned numbers, their largest less x
        if self.dtype.is_int:
            return (-1 if self.dtype.kind == "int" else beyond(self.dtype)) - self
        return emit("logical_not", self)

    def __round__(self, decimals: int | None = None) -> Tensor:
        from .functions import round

        return round(self, decimals or 0)

    # -- shape ------------------------------------------------------------------------------------
    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """`ts.reshape`: the same elements in another shape; one size may be -1."""
        from .shaping import reshape

        return reshape(self, *shape)

    def transpose(self, a: int = -2, b: int = -1) -> Tensor:
        """Exchanges two dims, by default the last two."""
        from .shaping import swap

        return swap(self, a, b)

    def permute(self, *dims: int) -> Tensor:
        """`ts.permute`: the dims in another order."""
        from .shaping import permute

        return permute(self, *dims)

    @property
    def T(self) -> Tensor:  # as in NumPy
        """The tensor with its dims in reverse order, as in NumPy."""
        return self.permute(*reversed(range(self.ndim)))

    def detach(self) -> Tensor:
        """The same value as a constant: no gradient flows through it (`ts.stop_gradient`)."""
        from .tape import stop_gradient

        return stop_gradient(self)

    def to(self, dtype: object) -> Tensor:
        """The tensor converted to another dtype. Raises DTypeError if `dtype` is unknown."""
        want = dtype_of(dtype)
        return self if want is self.dtype else emit("cast", self, dtype=want)

    astype = to

    def __getitem__(self, key: Any) -> Tensor:
        from .picking import getitem

        return getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise fail(
            UsageError,
            "a tensor cannot be changed in place",
            [("tensor", self.type)],
            fix="make a new one: ts.where(mask, value, x), ts.concat, ts.scatter_add",
        )

    # -- reductions -------------------------------------------------------------------------------
    def sum(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ts.sum`: the sum along `dim`, by default over all dims."""
        from .functions import reduce

        return reduce("sum", self, dim, keepdims)

    def mean(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ts.mean`: the mean along `dim`, by default over all dims."""
        from .functions import mean

        return mean(self, dim, keepdims)

    def max(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ts.max`: the largest element along `dim`, by default over all dims."""
        from .functions import reduce

        return reduce("max", self, dim, keepdims)

    def min(self, dim: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ts.min`: the smallest element along `dim`, by default over all dims."""
        from .functions import reduce

        return reduce("min", self, dim, keepdims)


def _unpickled(kind: type[Tensor], data: Any, type: TensorType, name: str, frozen: bool) -> Tensor:
    t = kind.__new__(kind)
    Tensor.__init__(t, data, type)
    t.name, t.frozen = name, frozen
    return t


# -- making and combining -------------------------------------------------------------------------
def symbolic(node: Node, recorder: Recorder) -> Tensor:
    t = Tensor(None, node.types[0])
    t._node, t._recorder = node, recorder
    recorder.made.append(ref(t))
    return t


def emit(op: str, *args: Tensor, **attrs: Any) -> Tensor:
    """Applies one op: into the recording if there is one, at once otherwise."""
    from . import record

    recorder = record.current()
    if recorder is not None:
        node = recorder.builder(op, *map(recorder.node, args), **attrs)
        return symbolic(record.without_past(recorder, node), recorder)
    return record.full_now(attrs) if op == "full" else record.run_now(op, args, attrs)[0]


def emit_many(op: str, *args: Tensor, **attrs: Any) -> list[Tensor]:
    """Applies an op of several results."""
    from . import record

    recorder = record.current()
    if recorder is not None:
        node = recorder.builder(op, *map(recorder.node, args), **attrs)
        count = range(len(node.types))
        items = [recorder.builder("item", node, index=i) for i in count]
        return [symbolic(record.without_past(recorder, n), recorder) for n in items]
    return record.run_now(op, args, attrs)


def scalar(value: Scalar, dtype: DType, name: str = "number") -> Tensor:
    return emit("full", dtype=dtype, shape=(), value=fitting(name, value, dtype))


def tensor_like(value: object, like: Tensor, name: str = "tensor") -> Tensor:
    """A Tensor of `value`; a Python number takes the dtype of `like` (float beats int)."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        dtype = like.dtype
        if isinstance(value, float) and not dtype.is_float:
            dtype = f32
        if not isinstance(value, bool) and dtype.kind == "bool":
            dtype = int32 if isinstance(value, int) else f32
        return scalar(value, dtype, name)
    return as_tensor(value, name=name)


def as_tensor(value: object, dtype: object = None, name: str = "tensor") -> Tensor:
    """A Tensor of host data (without a mesh), or the Tensor itself."""
    if isinstance(value, Tensor):
        return value if dtype is None else value.to(dtype)
    if engine_array(value):
        e = engine()
        return Tensor(value, e.adopt(value, None))
    x, want = host_array(value, dtype, name)
    t = plain(want, x.shape)
    made = Tensor(None, t)
    made._pending = lambda: engine().place(x, made.type)
    made._given = remembered(x)
    return made


def type_like(value: object) -> TensorType:
    """The type that `as_tensor(value)` has; what is in the memory of `value` is not looked at."""
    if isinstance(value, Tensor):
        return value.type
    if engine_array(value):
        return engine().adopt(value, None)
    x, want = host_view(value)
    return plain(want, x.shape)


def matched(op: str, x: object, y: object) -> tuple[Tensor, Tensor]:
    """Both as Tensors of one dtype."""
    like = x if isinstance(x, Tensor) else y
    if not isinstance(like, Tensor):
        x = as_tensor(x, name=op)
        like = x
    a, b = tensor_like(x, like, op), tensor_like(y, like, op)
    if a.dtype is not b.dtype:
        want = promote(a.dtype, b.dtype, op, [("x", a.type), ("y", b.type)])
        a, b = a.to(want), b.to(want)
    if op == "div" and not a.dtype.is_float:
        a, b = a.to(f32), b.to(f32)
    return a, b


def binary(op: str, x: object, y: object) -> Tensor:
    a, b = matched(op, x, y)
    if op in ("floordiv", "mod"):
        _check_divisor(op, a, y)
    return emit(op, a, b)


def _bits(op: str, x: Tensor, y: Like) -> Tensor:
    """And, or, xor: of truths, or bit by bit of whole numbers."""
    a, b = matched(op, x, y)
    return emit(f"bit_{op}" if a.dtype.is_int else f"logical_{op}", a, b)


def _check_divisor(op: str, x: Tensor, divisor: object) -> None:
    """Raises UsageError for whole numbers by a zero that the host knows."""
    given: Any = divisor._given if isinstance(divisor, Tensor) else divisor
    if x.dtype.is_int and given is not None and not np.all(given):
        raise fail(
            UsageError,
            f"{op}: whole numbers cannot be divided by zero",
            [("x", x.type), ("divisor", shown(divisor))],
            fix="divide by something else where it is zero: ts.where(y == 0, 1, y)",
        )


__all__ = ["Like", "Made", "Scalar", "Tensor", "as_tensor", "binary", "emit", "emit_many", "scalar"]
