"""Rules for JAX's elementwise primitives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from ...core.dtypes import f32, int32, uint32
from ...core.errors import UsageError
from ..math import functions as F
from ..value.tensor import Tensor
from .jax_rules import rule, wanted

Function = Callable[..., Any]


def _unary(**of: Function) -> None:
    for name, f in of.items():
        rule(name)(lambda x, f=f, **_: f(x).to(x.dtype))


_unary(**{n: getattr(F, n) for n in (
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt", "sign", "sin",
    "sqrt", "tanh", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "erfc",
)})  # fmt: skip
_unary(
    erf_inv=F.erfinv, logistic=F.sigmoid, square=lambda x: x * x, neg=lambda x: -x,
    exp2=lambda x: 2.0**x, cbrt=lambda x: F.sign(x) * F.abs(x) ** (1 / 3),
    stop_gradient=F.stop_gradient,
)  # fmt: skip
_unary(**{"not": lambda x: ~x})
# Hints to the compiler and to the placement, which the layouts of tensors take over.
for _name in ("copy", "name", "sharding_constraint"):
    rule(_name)(lambda x, **_: x)


@rule("optimization_barrier", "device_put")
def _same(*xs: Tensor, **_: Any) -> list[Tensor]:
    return list(xs)


def _binary(of_numbers: Function, of_bools: Function | None = None) -> Function:
    def run(x: Tensor, y: Tensor, out_dtype: Any = None, **_: Any) -> Tensor:
        if out_dtype is not None:
            x, y = x.to(wanted(out_dtype)), y.to(wanted(out_dtype))
        bools = x.dtype.kind == "bool" and of_bools is not None
        out: Tensor = (of_bools if bools and of_bools is not None else of_numbers)(x, y)
        return out

    return run


rule("add", "add_any")(_binary(operator.add))
rule("mul")(_binary(operator.mul))
rule("max")(_binary(F.maximum, operator.or_))
rule("min")(_binary(F.minimum, operator.and_))
for _name, _f in (
    ("sub", operator.sub), ("eq", operator.eq), ("ne", operator.ne), ("lt", operator.lt),
    ("le", operator.le), ("gt", operator.gt), ("ge", operator.ge), ("and", operator.and_),
    ("or", operator.or_), ("xor", operator.xor), ("atan2", F.atan2),
):  # fmt: skip
    rule(_name)(_binary(_f))


def _rank(x: Tensor) -> Tensor:
    """Integers in the total order of floats: -NaN, -inf, ..., -0, 0, ..., inf, NaN."""
    if not x.dtype.is_float:
        return x
    bits = F.bitcast(x.to(f32), int32)
    return F.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


for _name, _f in (("lt_to", operator.lt), ("le_to", operator.le)):
    rule(_name)(lambda x, y, f=_f, **_: f(_rank(x), _rank(y)))
rule("is_finite")(lambda x, **_: F.isfinite(x))


@rule("div")
def quotient(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    """`x / y`; for integers the quotient rounded towards zero (`//` rounds down)."""
    if x.dtype.is_float:
        return x / y
    down = x // y
    if x.dtype.kind == "uint":
        return down
    return F.where((down * y != x) & ((x < 0) ^ (y < 0)), down + 1, down)


@rule("rem")
def _remainder(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    """The remainder with the sign of `x`."""
    if x.dtype.kind == "uint":
        return x % y
    below, size = x < 0, F.abs(y)
    rest = F.where(below, -x, x) % size
    return F.where(below, -rest, rest)


@rule("pow")
def _power(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    return x ** y.to(x.dtype)


@rule("integer_pow")
def _integer_power(x: Tensor, y: int, **_: Any) -> Tensor:
    return x**y if y >= 0 else 1.0 / x**-y


@rule("round")
def _round(x: Tensor, rounding_method: Any, **_: Any) -> Tensor:
    """Halves away from zero (method 0), or to the even neighbour (1)."""
    if int(getattr(rounding_method, "value", rounding_method)) == 1:
        return F.round(x)
    down = F.floor(F.abs(x))
    return F.sign(x) * F.where(F.abs(x) - down >= 0.5, down + 1, down)


@rule("clamp")
def _clamp(low: Tensor, x: Tensor, high: Tensor, **_: Any) -> Tensor:
    inside = F.where((x == low) | (x == high), F.stop_gradient(x), x)
    return F.clip(inside, low, high)  # at both ends no operand has a gradient


@rule("select_n")
def select(which: Tensor, *cases: Tensor, **_: Any) -> Tensor:
    """The element of the case that `which` names, a bool or the index of the case."""
    out = cases[0]
    for i, case in enumerate(cases[1:], 1):
        out = F.where(which if which.dtype.kind == "bool" else which == i, case, out)
    return out


# -- dtypes and bits ------------------------------------------------------------------------------
@rule("convert_element_type")
def _convert(x: Tensor, new_dtype: Any, **_: Any) -> Tensor:
    to = wanted(new_dtype)
    return x != 0 if to.kind == "bool" and x.dtype is not to else x.to(to)


@rule("bitcast_convert_type")
def _bitcast(x: Tensor, new_dtype: Any, **_: Any) -> Tensor:
    return F.bitcast(x, wanted(new_dtype))


rule("shift_left")(lambda x, y, **_: _shifted(x, y, x << _count(x, y)))
rule("shift_right_logical")(lambda x, y, **_: _shifted(x, y, _right(x, _count(x, y))))


@rule("shift_right_arithmetic")
def _arithmetic(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    """Filled with the sign bit; a count of the width or more leaves the sign alone."""
    most = F.full((), 8 * x.dtype.bytes - 1, x.dtype)
    count = F.where((y < 0) | (y > most), most, y)
    if x.dtype.kind == "int":
        return x >> count
    other = _OTHER[x.dtype.name]
    return F.bitcast(F.bitcast(x, other) >> F.bitcast(count, other), x.dtype)


_OTHER = {"i32": "u32", "u32": "i32", "i8": "u8", "u8": "i8"}


def _count(x: Tensor, y: Tensor) -> Tensor:
    """The count `y`, within the width of `x`."""
    return F.where((y < 0) | (y >= 8 * x.dtype.bytes), F.full((), 0, y.dtype), y)


def _shifted(x: Tensor, y: Tensor, shifted: Tensor) -> Tensor:
    """`shifted`, or 0 where all bits of `x` leave."""
    return F.where((y < 0) | (y >= 8 * x.dtype.bytes), F.full((), 0, x.dtype), shifted)


def _right(x: Tensor, y: Tensor) -> Tensor:
    """`x` shifted right, filled with zeros."""
    if x.dtype.kind == "uint":
        return x >> y
    other = _OTHER[x.dtype.name]
    return F.bitcast(F.bitcast(x, other) >> F.bitcast(y, other), x.dtype)


def _bits(x: Tensor) -> Tensor:
    """The bits of integers as u32, zeros above their width."""
    if x.dtype.kind == "int":
        x = F.bitcast(x, _OTHER[x.dtype.name])
    return x.to(uint32)


def _ones(b: Tensor) -> Tensor:
    """The number of ones in each u32: sums of neighbours, of 1, 2, 4, ... bits."""
    for width, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF),
                        (16, 0x0000FFFF)):  # fmt: skip
        every = F.full((), mask, uint32)
        b = (b & every) + ((b >> width) & every)
    return b


@rule("population_count")
def _population(x: Tensor, **_: Any) -> Tensor:
    return _ones(_bits(x)).to(x.dtype)


@rule("clz")
def _leading_zeros(x: Tensor, **_: Any) -> Tensor:
    """The width less the number of ones, after each one is spread to all bits below it."""
    b = _bits(x)
    for width in (1, 2, 4, 8, 16):
        b = b | (b >> width)
    return (F.full((), 8 * x.dtype.bytes, uint32) - _ones(b)).to(x.dtype)


@rule("nextafter")
def _next_after(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    """The neighbour of `x` towards `y`: its bits, which are a sign and a size, one up or down."""
    if x.dtype is not f32:
        raise UsageError("nextafter of JAX has a rule for f32 alone", x=x.type, fix="use f32")
    one, bits = F.full((), 1, uint32), F.bitcast(x, uint32)
    up = (x < y) == (x > 0)
    moved = F.where(up, bits + one, bits - one)
    smallest = F.where(y < 0, F.full((), 0x80000001, uint32), one)
    out = F.bitcast(F.where(x == 0, smallest, moved), f32)
    return F.where(x == y, y, F.where(F.isnan(x) | F.isnan(y), x + y, out))


@rule("reduce_precision")
def _reduce_precision(x: Tensor, exponent_bits: int, mantissa_bits: int, **_: Any) -> Tensor:
    """`x` rounded to so many bits, in its own dtype."""
    size = {"f32": (8, 23), "bf16": (8, 7), "f16": (5, 10)}
    if size.get(x.dtype.name) == (exponent_bits, mantissa_bits):
        return x
    to = next((n for n, s in size.items() if s == (exponent_bits, mantissa_bits)), None)
    if to is None:
        raise UsageError(
            f"reduce_precision of JAX has no rule for {exponent_bits} and {mantissa_bits} bits",
            x=x.type,
            fix="round to the bits of f32 (8, 23), bf16 (8, 7) or f16 (5, 10)",
        )
    return x.to(to).to(x.dtype)
