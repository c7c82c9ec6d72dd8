"""Conversion of operands to tensors (`as_tensor`, `matched`), and application of ops (`emit`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.checks import shown
from ...core.dtypes import DType, complex64, complex128, dtype_of, f32, f64, int32, promote
from ...core.errors import DTypeError, MeshError, UsageError
from ...core.layout import TensorType, plain
from ..value.checks import fitting
from ..value.eager import EAGER, current_trace
from ..value.engine import engine
from ..value.host_data import engine_array, host_array, host_recipe, host_view, is_array, remembered
from ..value.tensor import Scalar, Tensor, method
from .submesh import on_one


def emit(op: str, *args: Tensor, **attrs: Any) -> Tensor:
    """Applies one op: it is recorded if there is a recording, else it runs at once."""
    return emit_many(op, *args, **attrs)[0]


def emit_many(op: str, *args: Tensor, **attrs: Any) -> list[Tensor]:
    """Applies an op of several results."""
    trace = current_trace()
    try:
        return trace.apply(op, args, attrs)
    except MeshError:
        together = on_one(args) if trace is EAGER else None
        if together is None:
            raise
        return trace.apply(op, together, attrs)


def scalar(value: Scalar, dtype: DType, name: str = "number") -> Tensor:
    return emit("full", dtype=dtype, shape=(), value=fitting(name, value, dtype))


def tensor_like(value: object, like: Tensor, name: str = "tensor") -> Tensor:
    """Returns `value` as a Tensor; a Python number takes the dtype of `like` (float beats int)."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        dtype = like.dtype
        if isinstance(value, float) and not dtype.is_float:
            dtype = f32
        if not isinstance(value, bool) and dtype.kind == "bool":
            dtype = int32 if isinstance(value, int) else f32
        return scalar(value, dtype, name)
    if isinstance(value, complex):
        return as_tensor(value, complex128 if like.dtype.real is f64 else complex64, name)
    return as_tensor(value, name=name)


def as_tensor(value: object, dtype: object = None, name: str = "tensor") -> Tensor:
    """Returns host data as a Tensor without a mesh, and a Tensor as it is."""
    if isinstance(value, Tensor):
        return value if dtype is None else value.to(dtype)
    if engine_array(value):
        e = engine()
        return Tensor(value, e.adopt(value, None))
    x, want = host_array(value, dtype, name)
    t = plain(want, x.shape)
    made = Tensor(None, t)
    made._pending = lambda: engine().place(x, made.type)
    made._recipe = host_recipe(x)
    made._host_values = remembered(x)
    return made


def of_floats(value: object, numbers: bool = False) -> object:
    """Returns an array of floats, of any library, as a Tensor, with `numbers` a Python float too;
    any other value as it is."""
    dtype = getattr(value, "dtype", "") if is_array(value) or isinstance(value, np.generic) else ""
    taken = "float" in str(dtype) or (numbers and isinstance(value, float))
    return as_tensor(value) if taken and not isinstance(value, Tensor) else value


def type_like(value: object) -> TensorType:
    """The type of `as_tensor(value)`. The values are not copied."""
    if isinstance(value, Tensor):
        return value.type
    if engine_array(value):
        return engine().adopt(value, None)
    x, want = host_view(value)
    return plain(want, x.shape)


@method("to", "astype")
def cast(x: object, dtype: object) -> Tensor:
    """`x` converted to `dtype`, the same as `x.to(dtype)`. Raises DTypeError if it is unknown."""
    t, want = as_tensor(x), dtype_of(dtype)
    if t.dtype.is_complex and not want.is_complex:
        raise DTypeError(
            f"cast: complex numbers do not fit {want}",
            x=t.type,
            fix="write ts.real(x), ts.imag(x) or ts.abs(x)",
        )
    return t if want is t.dtype else emit("cast", t, dtype=want)


def matched(op: str, x: object, y: object) -> tuple[Tensor, Tensor]:
    """Returns both as Tensors of one dtype. Raises UsageError for `==` with None."""
    like = x if isinstance(x, Tensor) else y
    if y is None and op in ("eq", "ne"):
        raise UsageError(
            f"{op}: a tensor is not compared with None",
            x=like.type if isinstance(like, Tensor) else shown(x),
            fix="write x is None" if op == "eq" else "write x is not None",
        )
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


def _check_divisor(op: str, x: Tensor, divisor: object) -> None:
    """Raises UsageError if integers are divided by a zero that the host knows."""
    given: Any = divisor._host_values if isinstance(divisor, Tensor) else divisor
    if x.dtype.is_int and given is not None and not np.all(given):
        raise UsageError(
            f"{op}: whole numbers cannot be divided by zero",
            x=x.type,
            divisor=shown(divisor),
            fix="divide by something else where it is zero: ts.where(y == 0, 1, y)",
        )
