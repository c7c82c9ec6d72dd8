"""Element types, their sizes in bytes, and promotion.

>>> bf16.name, bf16.bytes, bf16.is_float
('bf16', 2, True)
>>> dtype_of("float32") is f32 and held_as(np.dtype("int64")) is int32
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from .errors import DTypeError
from .value_checks import is_whole


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type: its printed `name`, `kind` (float, complex, int, uint, bool) and NumPy
    form."""

    name: str
    kind: str
    bytes: int
    numpy: np.dtype[np.generic]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype, under the attribute that NumPy and JAX read: `np.zeros(3, ts.bf16)`."""
        return self.numpy

    @property
    def is_float(self) -> bool:
        """True for floats and complex numbers, whose values have gradients."""
        return self.kind in ("float", "complex")

    @property
    def is_complex(self) -> bool:
        return self.kind == "complex"

    @property
    def is_wide(self) -> bool:
        """True if its numbers have 64 bits."""
        return self.real.bytes == 8

    @property
    def real(self) -> DType:
        """The dtype of the real and imaginary parts; of a real dtype, itself."""
        return {"c64": f32, "c128": f64}[self.name] if self.is_complex else self

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        return (dtype_of, (self.name,))


def _make(name: str, kind: str, numpy: object) -> DType:
    dtype = np.dtype(numpy)  # type: ignore[call-overload]  # ml_dtypes scalars are dtypes to NumPy
    return DType(name, kind, dtype.itemsize, dtype)


f64 = _make("f64", "float", np.float64)
f32 = _make("f32", "float", np.float32)
bf16 = _make("bf16", "float", ml_dtypes.bfloat16)
f16 = _make("f16", "float", np.float16)
fp8_e4m3 = _make("f8e4m3", "float", ml_dtypes.float8_e4m3fn)
fp8_e5m2 = _make("f8e5m2", "float", ml_dtypes.float8_e5m2)
complex64 = _make("c64", "complex", np.complex64)
complex128 = _make("c128", "complex", np.complex128)
int64 = _make("i64", "int", np.int64)
int32 = _make("i32", "int", np.int32)
int8 = _make("i8", "int", np.int8)
uint64 = _make("u64", "uint", np.uint64)
uint32 = _make("u32", "uint", np.uint32)
uint8 = _make("u8", "uint", np.uint8)
bool_ = _make("bool", "bool", np.bool_)

ALL = (
    f32, bf16, f16, fp8_e4m3, fp8_e5m2, int32, int8, uint32, uint8, bool_,
    f64, int64, uint64, complex64, complex128,
)  # fmt: skip
BY_NAME = {d.name: d for d in ALL} | {d.numpy.name: d for d in ALL}
BY_NAME |= {"bfloat16": bf16, "fp16": f16, "fp32": f32, "int": int32, "float": f32, "half": f16}
BY_NAME |= {"fp64": f64, "double": f64, "long": int64}
BY_NAME |= {"fp8_e4m3": fp8_e4m3, "fp8_e5m2": fp8_e5m2}
_PYTHON: dict[type, DType] = {float: f32, int: int32, bool: bool_, complex: complex64}
# Host data of 64 bits is narrowed on the way in if no dtype is named (ints are checked), since
# NumPy makes 64 bits of any Python number.
_NARROWED = {
    "float64": f32, "int64": int32, "uint64": uint32, "int16": int32, "uint16": int32,
    "complex128": complex64,
}  # fmt: skip


def dtype_of(value: object) -> DType:
    """Returns the DType for a DType, a name, a dtype or scalar type of NumPy or JAX, a dtype of
    PyTorch, or a Python scalar type.

    Raises DTypeError for anything else. Types of 64 bits are kept here; `held_as` narrows the types
    of host data.
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, type) and value in _PYTHON:
        return _PYTHON[value]
    name = value if isinstance(value, str) else ""
    if not name and value is not None:  # NumPy reads None as float64
        try:
            name = np.dtype(value).name  # type: ignore[call-overload]  # anything, errors below
        except (TypeError, ValueError):  # a dtype that NumPy does not know
            name = str(value).removeprefix("torch.")
    dtype = BY_NAME.get(name)
    if dtype is not None:
        return dtype
    near = _NARROWED.get(name)
    if near is not None:
        raise DTypeError(
            f"dtype {name!r} is asked for, and there is none: the nearest is {near}",
            fix=f"ask for {near}; NumPy arrays of {name} become {near} where no dtype is named",
        )
    fix = "use one of " + ", ".join(d.name for d in ALL)
    if name.partition(":")[0] in ("cpu", "cuda", "gpu", "tpu") or hasattr(value, "device_ids"):
        fix = (
            "a value lies where its mesh is: ts.tensor(data, mesh=mesh),"
            " dist.place(model, strategy, mesh)"
        )
    elif name.startswith("key<"):
        fix = "leave keys of jax.random out: ts.random draws anew at each call, after ts.seed(0)"
    elif is_whole(value):
        fix = f"sizes go in one tuple, as in (2, {value}); then comes a dtype"
    raise DTypeError(f"dtype {name or value!r} is not known", fix=fix)


def public_name(dtype: DType) -> str:
    """Returns the name of `dtype` in `tessera`.

    >>> public_name(int32), public_name(bf16), public_name(bool_)
    ('int32', 'bf16', 'bool')
    """
    return next(n for n, d in globals().items() if d is dtype).rstrip("_")


def held_as(dtype: np.dtype[Any]) -> DType:
    """Returns the DType for host data of a NumPy dtype: a 64-bit type becomes its 32-bit
    counterpart.

    Raises DTypeError for any other unknown dtype.
    """
    return _NARROWED.get(dtype.name) or dtype_of(dtype)


def beyond(dtype: DType) -> float:
    """Returns the value of an op without a defined result: NaN, the lowest signed integer, the
    highest unsigned integer, True.

    >>> beyond(bf16), beyond(int8), beyond(uint8)
    (nan, -128, 255)
    """
    if dtype.is_float:
        return math.nan
    if dtype is bool_:
        return True
    info = np.iinfo(dtype.numpy.name)
    return int(info.min if dtype.kind == "int" else info.max)


@cache
def largest(dtype: DType) -> float:
    """Returns the largest finite number of a float dtype."""
    return float(ml_dtypes.finfo(dtype.real.numpy).max)  # type: ignore[no-untyped-call]  # it has no types


# Promotion takes the later dtype in this order: floats after integers, wider after narrower.
# _WITHOUT_COMMON_ORDER has the pairs in which neither holds all values of the other: a dtype for
# both, or None.
_ORDER = (
    bool_, uint8, int8, uint32, int32, uint64, int64, fp8_e5m2, fp8_e4m3, f16, bf16, f32, f64,
    complex64, complex128,
)  # fmt: skip
_WITHOUT_COMMON_ORDER = {
    frozenset({f16, bf16}): f32,
    frozenset({uint8, int8}): int32,
    frozenset({uint32, int8}): None,
    frozenset({uint32, int32}): None,
    frozenset({uint64, int8}): None,
    frozenset({uint64, int32}): None,
    frozenset({uint64, int64}): None,
    frozenset({f64, complex64}): complex128,
    frozenset({fp8_e5m2, fp8_e4m3}): f16,
}


def promote(
    a: DType, b: DType, name: str = "promote", operands: Sequence[tuple[str, object]] = ()
) -> DType:
    """Returns the dtype of a binary op on arrays of `a` and `b`, as in PyTorch and NumPy if that
    dtype exists here.

    Raises DTypeError for the op `name` if no dtype holds the values of both.

    >>> promote(int32, bf16), promote(f16, bf16), promote(bool_, uint8), promote(uint8, int8)
    (bf16, f32, u8, i32)
    """
    if a is b:
        return a
    wider = a if _ORDER.index(a) >= _ORDER.index(b) else b
    dtype = _WITHOUT_COMMON_ORDER.get(frozenset({a, b}), wider)
    if dtype is None:
        raise DTypeError(
            f"{name}: no dtype holds all values of both {a} and {b}",
            rows=operands,
            fix='cast both: .to("i32") where all are small, .to("u32") where none is negative',
        )
    return dtype


def adds_up_in(*dtypes: DType) -> DType:
    """Returns the dtype in which real numbers of `dtypes` are added up: f64 if one is f64, else
    f32.

    >>> adds_up_in(bf16, f32), adds_up_in(f32, f64)
    (f32, f64)
    """
    return f64 if f64 in dtypes else f32


def counts_to(dtype: DType) -> int:
    """Returns the largest n such that `dtype` holds each integer from 0 to n.

    >>> counts_to(uint8), counts_to(f16), counts_to(int32)
    (255, 2048, 2147483647)
    """
    if dtype.is_int:
        return int(np.iinfo(dtype.numpy.name).max)
    if not dtype.is_float:
        return 1
    return int(2 ** (ml_dtypes.finfo(dtype.real.numpy).nmant + 1))  # type: ignore[no-untyped-call]  # it has no types


def summed(dtype: DType) -> DType:
    """Returns the dtype of sums and products of many elements: i32 for bool and narrow integers, as
    PyTorch uses its widest. A larger sum wraps around, as in PyTorch."""
    return int32 if not dtype.is_float and dtype.bytes < 4 else dtype
