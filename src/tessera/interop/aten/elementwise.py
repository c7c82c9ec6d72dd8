"""Rules for ops of one operand, element by element."""

from __future__ import annotations

import math
from typing import Any

from ...core.dtypes import bool_, f32, int32
from ...lang.math import functions as F
from ...lang.value.tensor import Tensor
from ...nn import activations as A
from ...nn import functional as N
from .table import as_float, aten, cast_all, number, unless_bool

FLOATS = {
    "acos": F.acos, "acosh": F.acosh, "asin": F.asin, "asinh": F.asinh, "atan": F.atan,
    "atanh": F.atanh, "cos": F.cos, "cosh": F.cosh, "erf": F.erf, "erfc": F.erfc,
    "erfinv": F.erfinv, "exp": F.exp, "expm1": F.expm1, "log": F.log, "log1p": F.log1p,
    "rsqrt": F.rsqrt, "sigmoid": F.sigmoid, "sin": F.sin, "sinh": F.sinh, "sqrt": F.sqrt,
    "tan": F.tan, "tanh": F.tanh,
    "exp2": lambda x: F.exp(x * math.log(2.0)),
    "log2": lambda x: (F.log(x.to(f32)) * (1.0 / math.log(2.0))).to(x.dtype),
    "log10": lambda x: (F.log(x.to(f32)) * (1.0 / math.log(10.0))).to(x.dtype),
    "reciprocal": lambda x: 1.0 / x,
    "sinc": lambda x: F.where(x == 0.0, 1.0, F.sin(_turn(x)) / _turn(x)),
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "rad2deg": lambda x: x * (180.0 / math.pi),
}  # fmt: skip
SAME = {  # whole numbers stay
    "ceil": F.ceil, "floor": F.floor, "round": F.round, "trunc": F.trunc,
}  # fmt: skip
NUMBERS = {
    "abs": F.abs, "neg": lambda x: -x, "sign": F.sign, "sgn": F.sign, "square": lambda x: x * x,
    "relu": N.relu,
}  # fmt: skip
ACTIVATIONS = {
    "silu": N.silu, "mish": A.mish, "hardsigmoid": A.hardsigmoid, "hardswish": A.hardswish,
    "relu6": A.relu6, "selu": A.selu, "log_sigmoid": A.logsigmoid,
}  # fmt: skip


def _turn(x: Tensor) -> Tensor:
    return F.where(x == 0.0, 1.0, x) * math.pi


def _floated(fn: Any) -> Any:
    return lambda x: fn(as_float(x))


for _name, _fn in {**FLOATS, **ACTIVATIONS}.items():
    aten(_name)(_floated(_fn))
for _name, _fn in SAME.items():
    aten(_name)(lambda x, fn=_fn: fn(x) if x.dtype.is_float else x)
for _name, _fn in NUMBERS.items():
    aten(_name)(unless_bool(_fn))

aten("isnan")(lambda x: F.isnan(as_float(x)))
aten("isinf")(lambda x: F.isinf(as_float(x)))
aten("isfinite")(lambda x: F.isfinite(as_float(x)))
aten("logical_not")(lambda x: ~x if x.dtype is bool_ else x == 0)
aten("bitwise_not")(F.bitwise_not)
aten("frac")(lambda x: x - F.trunc(x))
aten("positive")(lambda x: x)


@aten("signbit")
def _signbit(x: Tensor) -> Tensor:
    return F.bitcast(x.to(f32), int32) < 0 if x.dtype.is_float else x < 0


@aten("round.decimals")
def _round(x: Tensor, *, decimals: int = 0) -> Tensor:
    return F.round(x, decimals) if x.dtype.is_float else x


@aten("gelu")
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return N.gelu(x, approximate)


@aten("leaky_relu")
def _leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return F.where(x > 0, x, x * float(negative_slope))


@aten("hardtanh")
def _hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    low, high = cast_all(min_val, max_val, dtype=x.dtype)
    return F.where(x <= low, low, F.where(x >= high, high, x))  # at both ends the gradient is 0


@aten("elu")
def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    above = x > 0
    below = F.expm1(F.where(above, 0.0, x) * float(input_scale)) * float(alpha)
    return F.where(above, x, below) * float(scale)


@aten("celu")
def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return _elu(x, alpha, 1.0, 1.0 / alpha)


@aten("softplus")
def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    soft = A.softplus(x, float(beta))
    return F.where(x * float(beta) > float(threshold), x, soft)


@aten("threshold")
def _threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return F.where(x <= number(threshold, x.dtype), number(value, x.dtype), x)


@aten("hardshrink")
def _hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return F.where(F.abs(x) <= float(lambd), 0.0, x)


@aten("softshrink")
def _softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return F.sign(x) * F.maximum(F.abs(x) - float(lambd), 0.0)


@aten("logit")
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = as_float(x)
    x = x if eps is None else F.clip(x, eps, 1.0 - eps)
    return F.log(x / (1.0 - x))


@aten("nan_to_num")
def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    return F.nan_to_num(x, nan or 0.0, posinf, neginf) if x.dtype.is_float else x


@aten("log_sigmoid_forward")
def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return A.logsigmoid(x), F.exp(-F.abs(x))


@aten("glu")
def _glu(x: Tensor, dim: int = -1) -> Tensor:
    return A.glu(x, dim)
