"""Rows of the ops that compute each element from one, two or three."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from ..core.dtypes import f32, int32, uint32
from ..lang.math import functions as F
from ..lang.value.tensor import Tensor as Value
from .configs import LossReductionMode, UnaryOpType, UnaryWithParam
from .errors import public, wrong
from .op import REQUIRED, Call, Defaults, Operand, in_place, op, row
from .tensor import Tensor

Body = Callable[..., Any]
_LN2, _LN10 = math.log(2.0), math.log(10.0)

# -- activations ----------------------------------------------------------------------------------
ACTIVATIONS: dict[str, Body] = {
    "relu": nn.relu, "gelu": lambda x: nn.gelu(x, approximate="none"),
    "gelu_approx": lambda x: nn.gelu(x, approximate="tanh"), "silu": nn.silu,
    "sigmoid": F.sigmoid, "tanh": F.tanh, "exp": F.exp, "sqrt": F.sqrt, "rsqrt": F.rsqrt,
    "reciprocal": lambda x: 1.0 / x, "neg": lambda x: -x, "abs": F.abs, "log": F.log,
    "square": lambda x: x * x, "relu6": nn.relu6, "softplus": nn.softplus,
}  # fmt: skip
ACTIVATIONS["recip"] = ACTIVATIONS["reciprocal"]  # as `UnaryOpType` has it
# Their parameter says how exactly they are computed, which is always as exact as f32 is.
_HOW_EXACT = {"gelu", "exp", "log", "sigmoid", "sqrt", "rsqrt", "tanh"}


def activated(x: Value, activation: Any) -> Value:
    """`x` with the function that `activation` names, if it names one."""
    if activation is None or activation == "":
        return x
    if isinstance(activation, UnaryWithParam):
        param, activation = activation.param, activation.op_type
        name = activation.name.lower()
        if param is not None and name not in _HOW_EXACT:
            raise wrong(
                f"the activation {name!r} takes no parameter, such as {param!r}",
                fix="call the op behind this one: ttnn.softplus(x, beta=2.0)",
            )
    name = activation.name.lower() if isinstance(activation, UnaryOpType) else activation
    if name not in ACTIVATIONS:
        raise wrong(f"there is no activation {name!r}", fix=f"name one of {', '.join(ACTIVATIONS)}")
    found: Value = ACTIVATIONS[name](x)
    return found


# -- of one ---------------------------------------------------------------------------------------
def _sign_of(test: Body) -> Body:
    return lambda x: test(x).to(int32)


UNARY: dict[str, Body] = {
    "abs": F.abs, "neg": lambda x: -x, "exp": F.exp, "log": F.log, "sqrt": F.sqrt,
    "rsqrt": F.rsqrt, "square": lambda x: x * x, "reciprocal": lambda x: 1.0 / x, "sin": F.sin,
    "cos": F.cos, "tan": F.tan, "tanh": F.tanh, "sigmoid": F.sigmoid, "relu": nn.relu,
    "relu6": nn.relu6, "silu": nn.silu, "swish": nn.silu, "erf": F.erf, "sign": F.sign,
    "floor": lambda x: F.floor(x) if x.dtype.is_float else x,
    "ceil": lambda x: F.ceil(x) if x.dtype.is_float else x, "trunc": F.trunc, "log1p": F.log1p,
    "expm1": F.expm1, "mish": nn.mish, "hardswish": nn.hardswish, "hardsigmoid": nn.hardsigmoid,
    "log_sigmoid": nn.logsigmoid, "identity": lambda x: x, "log2": lambda x: F.log(x) / _LN2,
    "log10": lambda x: F.log(x) / _LN10, "exp2": lambda x: 2.0**x,
    "softsign": lambda x: x / (1.0 + F.abs(x)), "bitwise_not": lambda x: ~x, "acos": F.acos,
    "acosh": F.acosh, "asin": F.asin, "asinh": F.asinh, "atan": F.atan, "atanh": F.atanh,
    "cosh": F.cosh, "sinh": F.sinh, "erfc": F.erfc, "erfinv": F.erfinv,
    "cbrt": lambda x: F.sign(x) * F.abs(x) ** (1 / 3), "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi), "frac": lambda x: x - F.trunc(x),
    "sigmoid_accurate": F.sigmoid, "tanhshrink": lambda x: x - F.tanh(x),
    "hardmish": lambda x: x * F.clip(x + 2.8, 0.0, 5.0) / 5.0,
    "isnan": _sign_of(F.isnan), "isinf": _sign_of(F.isinf), "isfinite": _sign_of(F.isfinite),
    "logical_not": _sign_of(lambda x: x == 0), "eqz": _sign_of(lambda x: x == 0),
    "nez": _sign_of(lambda x: x != 0), "gtz": _sign_of(lambda x: x > 0),
    "ltz": _sign_of(lambda x: x < 0), "gez": _sign_of(lambda x: x >= 0),
    "lez": _sign_of(lambda x: x <= 0), "signbit": _sign_of(lambda x: F.bitcast(x, int32) < 0),
    "isposinf": _sign_of(lambda x: x == math.inf), "isneginf": _sign_of(lambda x: x == -math.inf),
}  # fmt: skip


def _selu(x: Value, scale: float, alpha: float) -> Value:
    return scale * F.where(x > 0, x, alpha * F.expm1(F.minimum(x, 0.0)))


def _logit(x: Value, eps: float | None) -> Value:
    x = x if eps is None else F.clip(x, eps, 1.0 - eps)
    return F.log(x / (1.0 - x))


def _polynomial(x: Value, coeffs: Sequence[float]) -> Value:
    found = F.zeros_like(x)
    for c in coeffs:
        found = found * x + c
    return found


def _gated(gate: Body) -> Body:
    def halves(x: Value, dim: int) -> Any:
        first, second = F.split(x, 2, dim)
        return first * gate(second)

    return halves


# One tensor, and numbers.
NUMBERED: dict[str, tuple[Body, Defaults]] = {
    "leaky_relu": (nn.leaky_relu, {"negative_slope": 0.01}),
    "elu": (nn.elu, {"alpha": 1.0}),
    "celu": (
        lambda x, alpha: F.where(x > 0, x, alpha * F.expm1(F.minimum(x, 0.0) / alpha)),
        {"alpha": 1.0},
    ),
    "selu": (_selu, {"scale": 1.0507009873554805, "alpha": 1.6732632423543772}),
    "relu_max": (lambda x, n: F.clip(x, 0.0, n), {"upper_limit": 6.0}),
    "relu_min": (lambda x, n: F.maximum(x, n), {"lower_limit": 0.0}),
    "hardtanh": (lambda x, low, high: F.clip(x, low, high), {"min_val": -1.0, "max_val": 1.0}),
    "hardshrink": (lambda x, n: F.where(F.abs(x) <= n, 0.0, x), {"lambd": 0.5}),
    "softshrink": (  # a NaN stays one
        lambda x, n: F.where(F.abs(x) <= n, 0.0, x - n * F.sign(x)),
        {"lambd": 0.5},
    ),
    "heaviside": (lambda x, n: F.where(x == 0, n, (x > 0).to(f32)), {"value": REQUIRED}),
    "threshold": (
        lambda x, least, n: F.where(x > least, x, n),
        {"threshold": REQUIRED, "value": REQUIRED},
    ),
    "softplus": (  # x itself where it is large
        lambda x, beta, most: F.where(x * beta > most, x, nn.softplus(x * beta) / beta),
        {"beta": 1.0, "threshold": 20.0},
    ),
    "gelu": (
        lambda x, fast: nn.gelu(x, approximate="tanh" if fast else "none"),
        {"fast_and_approximate_mode": False},
    ),
    "logit": (_logit, {"eps": None}),
    "round": (lambda x, n: F.round(x, n or 0), {"decimals": 0}),
    "rpow": (lambda x, n: n**x, {"exponent": REQUIRED}),
    "fill": (F.full_like, {"fill_value": REQUIRED}),
    "polyval": (_polynomial, {"coeffs": REQUIRED}),
    "tril": (F.tril, {"diagonal": 0}),
    "triu": (F.triu, {"diagonal": 0}),
    "glu": (nn.glu, {"dim": -1}),
    "reglu": (_gated(nn.relu), {"dim": -1}),
    "geglu": (_gated(lambda x: nn.gelu(x, approximate="none")), {"dim": -1}),
    "swiglu": (_gated(nn.silu), {"dim": -1}),
}
OPS = {name: row(name, body, "input_tensor") for name, body in UNARY.items()}
OPS |= {name: row(name, b, "input_tensor", options=n) for name, (b, n) in NUMBERED.items()}


# -- of two ---------------------------------------------------------------------------------------
def _full(y: Any, like: Value) -> Value:
    return y if isinstance(y, Value) else F.full_like(like, y)


def _xlogy(x: Any, y: Any) -> Value:
    x = _full(x, y)
    return F.where((x == 0) & (_full(y, x) == y), 0.0, x * F.log(y))


def _floored(x: Any, y: Any) -> Any:
    is_float = (x if isinstance(x, Value) else y).dtype.is_float
    return F.floor(x / y) if is_float else x // y


def _prelu(x: Value, weight: Any) -> Value:
    if isinstance(weight, Value) and weight.ndim == 1 and x.ndim > 1:  # [C] beside [N, C, ...]
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return F.where(x > 0, x, x * weight)


def _quotient(x: Any, y: Any, mode: str | None) -> Any:
    if mode not in (None, "floor", "trunc"):
        raise wrong(f"divide: there is no round_mode {mode!r}", fix='give "floor" or "trunc"')
    if mode is None:
        return x / y
    down = _floored(x, y)
    if mode == "floor":
        return down
    if down.dtype.is_float:
        return F.trunc(x / y)
    up: Value = (down < 0) & (x != down * y)
    return down + up.to(down.dtype)


def _fmod(x: Any, y: Any) -> Value:
    left: Value = x % y  # it is exact, and has the sign of `y`
    return F.where((left != 0) & ((x < 0) != (y < 0)), left - y, left)


def _close(x: Value, y: Any, rtol: float, atol: float, equal_nan: bool) -> Value:
    y = _full(y, x)
    near: Value = (F.abs(x - y) <= atol + rtol * F.abs(y)) | (x == y)
    return near | (F.isnan(x) & F.isnan(y)) if equal_nan else near


# Two tensors, or a tensor and a number.
BINARY: dict[str, Body] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "maximum": F.maximum, "minimum": F.minimum, "pow": lambda x, y: x**y,
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    "remainder": lambda x, y: x % y, "fmod": _fmod, "rsub": lambda x, y: y - x,
    "squared_difference": lambda x, y: (x - y) * (x - y), "logaddexp": F.logaddexp,
    "atan2": F.atan2, "hypot": F.hypot, "xlogy": _xlogy, "floor_div": _floored, "prelu": _prelu,
    "logaddexp2": lambda x, y: F.logaddexp(x * _LN2, y * _LN2) / _LN2,
    "ldexp": lambda x, y: x * 2.0**y,
    "div_no_nan": lambda x, y: F.where(_full(y, x) == 0, 0.0, x / y),
    "bias_gelu": lambda x, y: nn.gelu(x + y, approximate="none"),
    "logical_and": lambda x, y: (x != 0) & (y != 0), "logical_or": lambda x, y: (x != 0) | (y != 0),
    "logical_xor": lambda x, y: (x != 0) ^ (y != 0), "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y, "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_left_shift": lambda x, y: x << y, "bitwise_right_shift": lambda x, y: x >> y,
    "logical_left_shift": lambda x, y: x << y,
    "logical_right_shift": lambda x, y: F.bitcast(
        F.bitcast(x, uint32) >> (y.to(uint32) if isinstance(y, Value) else y), x.dtype
    ),
}  # fmt: skip
BINARY_NUMBERED: dict[str, tuple[Body, Defaults]] = {
    "divide": (_quotient, {"round_mode": None}),
    "rdiv": (lambda x, y, mode: _quotient(y, x, mode), {"round_mode": None}),
    "addalpha": (lambda x, y, n: x + n * y, {"alpha": 1.0}),
    "subalpha": (lambda x, y, n: x - n * y, {"alpha": 1.0}),
    "isclose": (_close, {"rtol": 1e-5, "atol": 1e-8, "equal_nan": False}),
}
_STEPS: Defaults = {
    "input_tensor_a_activations": (), "input_tensor_b_activations": (), "activations": (),
}  # fmt: skip


def _binary(name: str, body: Body, numbers: Defaults) -> Any:
    def local(x: Any, y: Any, *args: Any, **steps: Any) -> Value:
        first, second, last = (steps[k] or () for k in _STEPS)
        for step in first:
            x = activated(x, step)
        for step in second:
            y = activated(y, step)
        found: Value = body(x, y, *args)
        for step in last:
            found = activated(found, step)
        return found.to(int32) if found.dtype.name == "bool" else found

    return row(
        name, local, "input_tensor_a?", "input_tensor_b?", options=numbers, keyword_options=_STEPS,
        prepare=_whole_numbers,
    )  # fmt: skip


def _whole_numbers(call: Call) -> None:
    """Makes numbers beside tensors of whole numbers whole, so that the result is exact. Raises
    TTNNError if an operand has a fraction."""
    first = next(iter(call.tensors()))
    for word, n in call.options.items() if not first.dtype.is_float else ():
        if isinstance(n, float) and n.is_integer():
            call.options[word] = int(n)
        elif isinstance(n, float) and word in call.op.operands:
            raise wrong(
                f"{call.op.name}: {n} is no whole number, and the tensor is of {first.dtype}",
                fix="ttnn.typecast(tensor, ttnn.float32) first",
            )


OPS |= {name: _binary(name, body, {}) for name, body in BINARY.items()}
OPS |= {name: _binary(name, *definition) for name, definition in BINARY_NUMBERED.items()}
OPS |= {
    f"{n}_": in_place(OPS[n])
    for n in (
        "add", "subtract", "multiply", "divide", "rsub", "eq", "ne", "lt", "le", "gt", "ge",
        "logical_and", "logical_or", "logical_xor", "ldexp", "logaddexp", "logaddexp2",
        "squared_difference", "bias_gelu",
    )
}  # fmt: skip
for _short, _long in {"sub": "subtract", "mul": "multiply", "div": "divide"}.items():
    OPS |= {_short: OPS[_long], f"{_short}_": OPS[f"{_long}_"]}
OPS["power"] = OPS["pow"]


def _loss(name: str, each: Callable[[Value], Value]) -> Any:
    def local(x: Value, y: Value, reduction: Any) -> Value:
        found = each(x - y)
        sums = {"SUM": F.sum, "MEAN": F.mean}
        return sums[reduction.name](found) if reduction.name != "NONE" else found

    named = {"reduction": LossReductionMode.NONE}
    return row(name, local, "input_reference", "input_prediction", keyword_options=named)


OPS |= {"mse_loss": _loss("mse_loss", lambda x: x * x), "l1_loss": _loss("l1_loss", F.abs)}


# -- of three -------------------------------------------------------------------------------------
def _of_a_choice(call: Call) -> None:
    words = ("true_value", "false_value", "condition")
    call.dtype = next(t.dtype for w in words if isinstance(t := call.operands.get(w), Tensor))


@op(prepare=_of_a_choice)
def where(condition: Value, true_value: Operand, false_value: Operand) -> Value:
    """`true_value` where `condition` is not zero, else `false_value`."""
    return F.where(condition != 0, true_value, false_value)


@op()
def lerp(input: Value, end: Value, weight: Operand) -> Value:
    """`input + weight * (end - input)`."""
    return input + weight * (end - input)


@op()
def mac(input_tensor_a: Value, b: Operand, c: Operand) -> Value:
    """`a * b + c`."""
    return input_tensor_a * b + c


@op()
def addcmul(input_a: Value, input_b: Value, input_c: Value, *, value: float = 1.0) -> Value:
    """`a + value * b * c`."""
    return input_a + value * input_b * input_c


@op()
def addcdiv(input_a: Value, input_b: Value, input_c: Value, *, value: float = 1.0) -> Value:
    """`a + value * b / c`."""
    return input_a + value * input_b / input_c


@public
def clamp(
    input_tensor: Tensor, min: Tensor | float | None = None, max: Tensor | float | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Each element, no less than `min` and no more than `max`: numbers, or tensors. Raises
    TTNNError if both are left out."""
    if min is None and max is None:
        raise wrong(
            "clamp: neither min nor max is given", fix="ttnn.clamp(tensor, min=0.0, max=1.0)"
        )
    found = input_tensor
    for limit, name in ((min, "maximum"), (max, "minimum")):
        if limit is not None:
            found = OPS[name](found, limit, **options)
    return found


clip = clamp
