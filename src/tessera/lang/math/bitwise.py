"""Bitwise functions and `bitcast`. (`x & y`, `x | y`, `x ^ y` and `~x` are operators.)"""

from __future__ import annotations

from ...core.checks import whole
from ...core.dtypes import DType, bool_, dtype_of
from ...core.errors import DTypeError
from ...core.value_checks import is_whole
from ..record.operands import as_tensor, binary, emit
from ..value.tensor import Like, Tensor, method


def bitwise_and(x: Like, y: Like) -> Tensor:
    """`x & y`: the bitwise and of integers, the logical and of bools."""
    return as_tensor(x) & y


def bitwise_or(x: Like, y: Like) -> Tensor:
    """`x | y`: the bitwise or of integers, the logical or of bools."""
    return as_tensor(x) | y


def bitwise_xor(x: Like, y: Like) -> Tensor:
    """`x ^ y`: the bitwise exclusive or of integers, the logical exclusive or of bools."""
    return as_tensor(x) ^ y


def bitwise_not(x: Like) -> Tensor:
    """`~x`: the bitwise complement of integers, the logical not of bools."""
    return ~as_tensor(x)


@method("__lshift__")
def bitwise_left_shift(x: Like, y: Like) -> Tensor:
    """`x << y`: the bits of integers shifted left by `y` places, filled with zeros.

    Bits beyond the width of the dtype are lost. A count in `y` is from 0 to that width. Raises
    DTypeError if `x` or `y` is not an integer, UsageError if `y` is a negative number.
    """
    return _shifted("bitwise_left_shift", "shift_left", x, y)


@method("__rshift__")
def bitwise_right_shift(x: Like, y: Like) -> Tensor:
    """`x >> y`: the bits of integers shifted right by `y` places; `x // 2**y`.

    A negative number stays negative. A count in `y` is from 0 to the width of the dtype. Raises
    DTypeError if `x` or `y` is not an integer, UsageError if `y` is a negative number.
    """
    return _shifted("bitwise_right_shift", "shift_right", x, y)


@method("__rlshift__")
def _reversed_left_shift(y: Tensor, x: Like) -> Tensor:
    return bitwise_left_shift(x, y)


@method("__rrshift__")
def _right(y: Tensor, x: Like) -> Tensor:
    return bitwise_right_shift(x, y)


def bitcast(x: Like, dtype: DType | str) -> Tensor:
    """The bits of `x` [...] read as another dtype of the same width; `x.view(dtype)` of PyTorch and
    NumPy.

    Raises DTypeError if the dtypes differ in width, or if one of them is bool. It has no gradient.

    >>> bitcast(1.0, "i32").item() == 0x3F800000
    True
    """
    t, to = as_tensor(x), dtype_of(dtype)
    if t.dtype.bytes != to.bytes or bool_ in (t.dtype, to):
        raise DTypeError(
            f"bitcast: {t.dtype} and {to} are not two readings of the same bits",
            x=t.type,
            bytes=f"{t.dtype.bytes} and {to.bytes}",
            fix="name a dtype of the same width, or convert the values with .to(dtype)",
        )
    return emit("bitcast", t, dtype=to)


def _shifted(name: str, op: str, x: Like, y: Like) -> Tensor:
    return binary(op, x, whole(name, "the count", y, 0) if is_whole(y) else y)
