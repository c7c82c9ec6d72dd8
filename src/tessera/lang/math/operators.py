"""The operators of tensors, such as `x + y`, `x < y` and `x | y`.

(`x @ y`, `x[i]` and `round(x)` are defined beside their functions.)
"""

from __future__ import annotations

from ...core.dtypes import beyond
from ...core.errors import DTypeError
from ..record.operands import binary, emit, matched
from ..value.tensor import Like, Tensor, method


def _from_both_sides(name: str, op: str) -> None:
    """Defines the operator `name` for a tensor on either side."""
    method(f"__{name}__")(lambda x, y: binary(op, x, y))
    method(f"__r{name}__")(lambda y, x: binary(op, x, y))


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _from_both_sides(_name, _name)
_from_both_sides("truediv", "div")
method("__divmod__")(lambda x, y: (x // y, x % y))
method("__rdivmod__")(lambda y, x: (x // y, x % y))


def _compared(name: str) -> None:
    method(f"__{name}__")(lambda x, y: binary(name, x, y))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):  # elementwise, as in NumPy
    _compared(_name)
method("__contains__")(lambda x, y: bool((x == y).any()))


def _bits(name: str) -> None:
    """Defines and, or, xor: logical for bools, bitwise for integers."""

    @method(f"__{name}__", f"__r{name}__")
    def apply(x: Tensor, y: Like) -> Tensor:
        a, b = matched(name, x, y)
        return emit(f"bit_{name}" if a.dtype.is_int else f"logical_{name}", a, b)


for _name in ("and", "or", "xor"):
    _bits(_name)


@method("__neg__")
def _neg(x: Tensor) -> Tensor:
    return emit("neg", x)


@method("__abs__")
def _abs(x: Tensor) -> Tensor:
    return emit("abs", x)


@method("__invert__")
def _invert(x: Tensor) -> Tensor:
    # -1 - x inverts every bit; for unsigned numbers it is the largest number minus x
    if x.dtype.is_int:
        return (-1 if x.dtype.kind == "int" else beyond(x.dtype)) - x
    return emit("logical_not", x)


@method("__pow__")
def _pow(x: Tensor, y: Like) -> Tensor:
    """`x ** y`; exponents from 1 to 4 as products, which are exact and have a gradient at 0."""
    if isinstance(y, int) and y < 0 and x.dtype.is_int:
        raise DTypeError(
            f"pow: {x.dtype} to the power of {y} is no whole number",
            x=x.type,
            fix=f"give the exponent as a float: x ** {float(y)}",
        )
    if isinstance(y, int) and not isinstance(y, bool) and 1 <= y <= 4:
        out = x
        for _ in range(y - 1):
            out = out * x
        return out
    return binary("pow", x, y)


@method("__rpow__")
def _rpow(y: Tensor, x: Like) -> Tensor:
    return binary("pow", x, y)
