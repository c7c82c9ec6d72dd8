"""Rules for ops of several operands, element by element; dtypes are promoted as in PyTorch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from ...core.dtypes import bool_, f32
from ...lang.math import functions as F
from ...lang.value.tensor import Tensor
from .table import Operand, aten, cast_all, floats, number, result_dtype, truth


# -- sums and products ----------------------------------------------------------------------------
@aten("add.Tensor", "add.Scalar")
def _add(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    a, b = cast_all(x, y)
    if a.dtype is bool_:
        return a | b if alpha else a
    return a + (b if alpha == 1 else b * number(alpha, b.dtype))


@aten("sub.Tensor", "sub.Scalar")
def _sub(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    a, b = cast_all(x, y)
    return a - (b if alpha == 1 else b * number(alpha, b.dtype))


@aten("rsub.Tensor", "rsub.Scalar")
def _rsub(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    return _sub(y, x, alpha)


@aten("mul.Tensor", "mul.Scalar")
def _mul(x: Operand, y: Operand) -> Tensor:
    a, b = cast_all(x, y)
    return a & b if a.dtype is bool_ else a * b


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def _div(x: Operand, y: Operand) -> Tensor:
    a, b = floats(x, y)
    return a / b


@aten("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(x: Operand, y: Operand, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return _div(x, y)
    a, b = cast_all(x, y)
    if rounding_mode == "floor":
        return a // b
    return F.trunc(a / b) if a.dtype.is_float else F.where((a < 0) ^ (b < 0), -(-a // b), a // b)


aten("floor_divide", "floor_divide.Scalar")(lambda x, y: _div_mode(x, y, rounding_mode="floor"))


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(x: Operand, y: Operand) -> Tensor:
    a, b = cast_all(x, y)
    return a % b


@aten("fmod.Tensor", "fmod.Scalar")
def _fmod(x: Operand, y: Operand) -> Tensor:
    a, b = cast_all(x, y)
    below = a < 0
    rest = F.where(below, -a, a) % F.abs(b)
    return F.where(below, -rest, rest)


@aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _pow(x: Operand, y: Operand) -> Tensor:
    if isinstance(x, Tensor) and isinstance(y, (int, float)) and x.dtype.is_float:
        if math.isfinite(y) and y == int(y):
            return x ** int(y)
        return F.sqrt(x) if y == 0.5 else x ** float(y)
    a, b = cast_all(x, y)
    return a**b


# -- comparisons, choices and bits ----------------------------------------------------------------
def _cast(fn: Callable[[Any, Any], Any], at: Any = cast_all) -> Callable[[Any, Any], Any]:
    return lambda x, y: fn(*at(x, y))


def _truths(x: Operand, y: Operand) -> list[Tensor]:
    return [truth(x), truth(y)]


def _ordered(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`fn` for numbers; bools are compared as small numbers."""

    def run(x: Operand, y: Operand) -> Any:
        a, b = cast_all(x, y)
        if a.dtype is not bool_:
            return fn(a, b)
        return fn(*cast_all(a.to("u8"), b.to("u8")))

    return run


for _name in ("eq", "ne"):
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_cast(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge"):
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_ordered(getattr(operator, _name)))
for _name, _fn in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    aten(f"logical_{_name}")(_cast(_fn, _truths))
    _bits = aten(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"__{_name}__.Tensor",
                 f"__{_name}__.Scalar")  # fmt: skip
    _bits(_cast(_fn))
for _name, _fn in {"left": operator.lshift, "right": operator.rshift}.items():
    aten(f"bitwise_{_name}_shift.Tensor", f"bitwise_{_name}_shift.Tensor_Scalar")(_cast(_fn))
    aten(f"__{_name[0]}shift__.Scalar")(_cast(_fn))
aten("maximum")(lambda x, y: _chosen(F.maximum, operator.or_, x, y))
aten("minimum")(lambda x, y: _chosen(F.minimum, operator.and_, x, y))
aten("atan2")(_cast(F.atan2, floats))
aten("hypot")(_cast(F.hypot))
aten("logaddexp")(_cast(F.logaddexp))


def _chosen(fn: Any, of_bools: Any, x: Operand, y: Operand) -> Tensor:
    a, b = cast_all(x, y)
    found: Tensor = of_bools(a, b) if a.dtype is bool_ else fn(a, b)
    return found


@aten("fmax")
def _fmax(x: Operand, y: Operand) -> Tensor:
    return _number_of(operator.ge, operator.or_, x, y)


@aten("fmin")
def _fmin(x: Operand, y: Operand) -> Tensor:
    return _number_of(operator.le, operator.and_, x, y)


def _number_of(first: Any, of_bools: Any, x: Operand, y: Operand) -> Tensor:
    """`x` where it comes `first` or `y` is NaN, else `y`; the gradient is that of the one."""
    a, b = cast_all(x, y)
    found: Tensor = of_bools(a, b) if a.dtype is bool_ else F.where(first(a, b) | (b != b), a, b)
    return found


@aten("copysign.Tensor", "copysign.Scalar")
def _copysign(x: Operand, y: Operand) -> Tensor:
    a, b = floats(x, y)
    negative = F.bitcast(b.to(f32), "i32") < 0
    return F.where(negative, -F.abs(a), F.abs(a))


@aten("logaddexp2")
def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    two = math.log(2.0)
    return F.logaddexp(x * two, y * two) * (1.0 / two)


@aten("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def _xlogy(x: Operand, y: Operand) -> Tensor:
    a, b = floats(x, y)
    none = (a == 0.0) & ((b <= 0.0) | (b == math.inf))
    return F.where(none, 0.0, a * F.log(F.where(none, 1.0, b)))


@aten("heaviside")
def _heaviside(x: Tensor, values: Tensor) -> Tensor:
    return F.where(x == 0, values, (x > 0).to(x.dtype))


@aten("isclose")
def _isclose(
    x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    a, b = floats(x, y)
    near = (a == b) | (F.isfinite(b) & (F.abs(a - b) <= F.abs(b) * rtol + atol))
    return near | (F.isnan(a) & F.isnan(b)) if equal_nan else near


@aten("where.self", "where.Scalar", "where.ScalarSelf", "where.ScalarOther")
def _where(condition: Tensor, x: Operand, y: Operand) -> Tensor:
    return F.where(truth(condition), *cast_all(x, y))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return F.where(mask, number(value, x.dtype), x)


# -- bounds and mixtures --------------------------------------------------------------------------
@aten("clamp", "clamp.Tensor")
def _clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    given = [v for v in (min, max) if v is not None]
    dtype = result_dtype(x, *given)
    x = x.to(dtype)
    if dtype is bool_:
        x = x if min is None else x | number(min, dtype)
        return x if max is None else x & number(max, dtype)
    # At a bound the gradient is that of `x`, which is not so with `F.clip`.
    if min is not None:
        low = number(min, dtype)
        x = F.where(x < low, low, x)
    if max is not None:
        high = number(max, dtype)
        x = F.where(x > high, high, x)
    return x


aten("clamp_min", "clamp_min.Tensor")(lambda x, min: _clamp(x, min))
aten("clamp_max", "clamp_max.Tensor")(lambda x, max: _clamp(x, None, max))


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(x: Tensor, end: Tensor, weight: Operand) -> Tensor:
    w = number(weight, x.dtype)
    return F.where(F.abs(w) < 0.5, x + w * (end - x), end - (end - x) * (1.0 - w))


@aten("addcmul")
def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    p, q, r = cast_all(x, a, b)
    return p + q * r if value == 1 else p + q * r * number(value, q.dtype)


@aten("addcdiv")
def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    p, q, r = floats(x, a, b)
    return p + q / r if value == 1 else p + q / r * number(value, q.dtype)
