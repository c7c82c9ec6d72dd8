"""Which ops of TT-NN compute each element from one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from ..core.dtypes import f32, int32
from ..lang import functions as F
from ..lang.tensor import Tensor as Value
from .configs import UnaryOpType, UnaryWithParam
from .dtypes import DataType
from .faults import wrong
from .run import how, run
from .tensor import Tensor

ACTIVATIONS: dict[str, Callable[..., Value]] = {
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate="none"),
    "gelu_approx": lambda x: nn.gelu(x, approximate="tanh"),
    "silu": nn.silu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "exp": F.exp,
    "sqrt": F.sqrt,
    "rsqrt": F.rsqrt,
    "reciprocal": lambda x: 1.0 / x,
    "neg": lambda x: -x,
    "abs": F.abs,
    "log": F.log,
    "square": lambda x: x * x,
    "relu6": nn.relu6,
    "softplus": nn.softplus,
}


# Their parameter says how exactly they are computed, which is always as exact as f32 is.
_HOW_EXACT = {"gelu", "exp", "log", "sigmoid", "sqrt", "rsqrt", "tanh"}


def activated(x: Value, activation: Any) -> Value:
    """`x` with the function at the end that `activation` names, if it names one."""
    if activation is None or activation == "":
        return x
    if isinstance(activation, UnaryWithParam):
        param, activation = activation.param, activation.op_type
        if param is not None and activation.value not in _HOW_EXACT:
            raise wrong(
                f"the activation {activation.value!r} takes no parameter, such as {param!r}",
                fix="call the op behind this one: ttnn.softplus(x, beta=2.0)",
            )
    name = activation.value if isinstance(activation, UnaryOpType) else activation
    if name not in ACTIVATIONS:
        raise wrong(
            f"there is no activation {name!r}",
            fix=f"name one of {', '.join(ACTIVATIONS)}",
        )
    return ACTIVATIONS[name](x)


def unary(name: str, body: Callable[..., Value]) -> Callable[..., Tensor]:
    """The op of one tensor that computes each element from one."""

    def local(x: Value, **options: Any) -> Value:
        return body(x, **options)

    local.__name__ = name

    def op(input_tensor: Tensor, *, dtype: DataType | None = None, **options: Any) -> Tensor:
        return run(name, local, [input_tensor], dtype, **how(name, options))

    return named(op, name, f"`{name}` of each element.")


def named(op: Callable[..., Tensor], name: str, text: str) -> Callable[..., Tensor]:
    """`op` under its name, with a docstring."""
    op.__name__ = op.__qualname__ = name
    op.__doc__ = text
    return op


_UNARY: dict[str, Callable[..., Value]] = {
    "abs": F.abs, "neg": lambda x: -x, "exp": F.exp, "log": F.log, "sqrt": F.sqrt,
    "rsqrt": F.rsqrt, "square": lambda x: x * x, "reciprocal": lambda x: 1.0 / x, "sin": F.sin,
    "cos": F.cos, "tan": F.tan, "tanh": F.tanh, "sigmoid": F.sigmoid, "relu": nn.relu,
    "relu6": nn.relu6, "silu": nn.silu, "swish": nn.silu, "erf": F.erf, "sign": F.sign,
    "floor": lambda x: F.floor(x) if x.dtype.is_float else x,
    "ceil": lambda x: F.ceil(x) if x.dtype.is_float else x, "trunc": F.trunc, "log1p": F.log1p,
    "expm1": F.expm1, "isnan": lambda x: F.isnan(x).to(int32),
    "isinf": lambda x: F.isinf(x).to(int32),
    "isfinite": lambda x: F.isfinite(x).to(int32), "mish": nn.mish, "hardswish": nn.hardswish,
    "hardsigmoid": nn.hardsigmoid, "log_sigmoid": nn.logsigmoid,
    "logical_not": lambda x: (x == 0).to(int32), "identity": lambda x: x,
    "eqz": lambda x: (x == 0).to(int32), "nez": lambda x: (x != 0).to(int32),
    "gtz": lambda x: (x > 0).to(int32), "ltz": lambda x: (x < 0).to(int32),
    "gez": lambda x: (x >= 0).to(int32), "lez": lambda x: (x <= 0).to(int32),
    "log2": lambda x: F.log(x) / math.log(2.0), "log10": lambda x: F.log(x) / math.log(10.0),
    "exp2": lambda x: 2.0**x, "softsign": lambda x: x / (1.0 + F.abs(x)),
    "bitwise_not": lambda x: ~x, "acos": F.acos, "acosh": F.acosh, "asin": F.asin,
    "asinh": F.asinh, "atan": F.atan, "atanh": F.atanh, "cosh": F.cosh, "sinh": F.sinh,
    "erfc": F.erfc, "erfinv": F.erfinv, "cbrt": lambda x: F.sign(x) * F.abs(x) ** (1 / 3),
    "deg2rad": lambda x: x * (math.pi / 180), "rad2deg": lambda x: x * (180 / math.pi),
    "frac": lambda x: x - F.trunc(x), "signbit": lambda x: (F.bitcast(x, int32) < 0).to(int32),
    "isposinf": lambda x: (x == math.inf).to(int32),
    "isneginf": lambda x: (x == -math.inf).to(int32),
    "sigmoid_accurate": F.sigmoid, "tanhshrink": lambda x: x - F.tanh(x),
    "hardmish": lambda x: x * F.clip(x + 2.8, 0.0, 5.0) / 5.0,
}  # fmt: skip
OPS = {name: unary(name, body) for name, body in _UNARY.items()}


def gelu(
    input_tensor: Tensor, *, fast_and_approximate_mode: bool = False, **options: Any
) -> Tensor:
    """The Gaussian error linear unit; with `fast_and_approximate_mode` by tanh."""
    name = "gelu_approx" if fast_and_approximate_mode else "gelu"
    return run("gelu", _activation, [input_tensor], **how("gelu", options), activation=name)


def _activation(x: Value, activation: str) -> Value:
    return activated(x, activation)


_NEEDED: Any = object()


def with_numbers(name: str, body: Callable[..., Value], **defaults: Any) -> Callable[..., Tensor]:
    """The op of one tensor and of numbers, which are named or come in the order of `defaults`."""

    def local(x: Value, **numbers: Any) -> Value:
        return body(x, *(numbers[k] for k in defaults))

    local.__name__ = name
    default = {k: v for k, v in defaults.items() if v is not _NEEDED}
    words = ", ".join(f"`{k}` ({default[k]})" if k in default else f"`{k}`" for k in defaults)

    def op(input_tensor: Tensor, *given: Any, **options: Any) -> Tensor:
        said = {k: options.pop(k) for k in [*defaults][len(given) :] if k in options}
        numbers = default | dict(zip(defaults, given)) | said
        if len(numbers) < len(defaults) or len(given) > len(defaults):
            raise wrong(
                f"{name}: it takes {', '.join(defaults)} after the tensor",
                [("given", (*given, *said))],
                fix=f"ttnn.{name}(tensor, {', '.join(f'{k}=...' for k in defaults)})",
            )
        fixed = {k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items()}
        return run(name, local, [input_tensor], **how(name, options), **fixed)

    return named(op, name, f"`{name}` of each element, with {words}.")


def _selu(x: Value, scale: float, alpha: float) -> Value:
    return scale * F.where(x > 0, x, alpha * F.expm1(F.minimum(x, 0.0)))


def _celu(x: Value, alpha: float) -> Value:
    return F.where(x > 0, x, alpha * F.expm1(F.minimum(x, 0.0) / alpha))


def _logit(x: Value, eps: float | None) -> Value:
    x = x if eps is None else F.clip(x, eps, 1.0 - eps)
    return F.log(x / (1.0 - x))


def _shrunk(x: Value, lambd: float) -> Value:
    return F.where(F.abs(x) <= lambd, 0.0, x - lambd * F.sign(x))  # a NaN stays one


def _polynomial(x: Value, coeffs: Sequence[float]) -> Value:
    found = F.zeros_like(x)
    for c in coeffs:
        found = found * x + c
    return found


def _gated(gate: Callable[[Value], Value]) -> Callable[[Value, int], Value]:
    def halves(x: Value, dim: int) -> Value:
        first, second = F.split(x, 2, dim)
        return first * gate(second)

    return halves


_NUMBERED: dict[str, tuple[Callable[..., Value], dict[str, Any]]] = {
    "leaky_relu": (nn.leaky_relu, {"negative_slope": 0.01}),
    "elu": (nn.elu, {"alpha": 1.0}),
    "celu": (_celu, {"alpha": 1.0}),
    "selu": (_selu, {"scale": 1.0507009873554805, "alpha": 1.6732632423543772}),
    "relu_max": (lambda x, n: F.clip(x, 0.0, n), {"upper_limit": 6.0}),
    "relu_min": (lambda x, n: F.maximum(x, n), {"lower_limit": 0.0}),
    "hardtanh": (lambda x, low, high: F.clip(x, low, high), {"min_val": -1.0, "max_val": 1.0}),
    "hardshrink": (lambda x, n: F.where(F.abs(x) <= n, 0.0, x), {"lambd": 0.5}),
    "softshrink": (_shrunk, {"lambd": 0.5}),
    "heaviside": (lambda x, n: F.where(x == 0, n, (x > 0).to(f32)), {"value": _NEEDED}),
    "threshold": (
        lambda x, least, n: F.where(x > least, x, n), {"threshold": _NEEDED, "value": _NEEDED}
    ),
    "logit": (_logit, {"eps": None}),
    "round": (lambda x, n: F.round(x, n or 0), {"decimals": 0}),
    "rpow": (lambda x, n: n**x, {"exponent": _NEEDED}),
    "fill": (F.full_like, {"fill_value": _NEEDED}),
    "polyval": (_polynomial, {"coeffs": _NEEDED}),
    "tril": (F.tril, {"diagonal": 0}),
    "triu": (F.triu, {"diagonal": 0}),
    "glu": (nn.glu, {"dim": -1}),
    "reglu": (_gated(nn.relu), {"dim": -1}),
    "geglu": (_gated(lambda x: nn.gelu(x, approximate="none")), {"dim": -1}),
    "swiglu": (_gated(nn.silu), {"dim": -1}),
}  # fmt: skip
OPS |= {name: with_numbers(name, body, **more) for name, (body, more) in _NUMBERED.items()}


def softplus(
    input_tensor: Tensor, *, beta: float = 1.0, threshold: float = 20.0, **options: Any
) -> Tensor:
    """log(1 + exp(beta x)) / beta; x itself where beta x is above `threshold`."""
    said = how("softplus", options)
    return run("softplus", _softplus, [input_tensor], **said, beta=beta, threshold=threshold)


def _softplus(x: Value, beta: float, threshold: float) -> Value:
    return F.where(x * beta > threshold, x, nn.softplus(x * beta) / beta)


__all__ = ["gelu", "softplus"]
