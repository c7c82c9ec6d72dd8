"""Which ops of TT-NN compute each element from one, or from two?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from ..core.dtypes import f32
from ..lang import functions as F
from ..lang.tensor import Tensor as Value
from .configs import UnaryOpType, UnaryWithParam
from .dtypes import DataType
from .faults import wrong
from .run import brief, how, run
from .tensor import Tensor

Operand = Tensor | int | float


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


def activated(x: Value, activation: Any) -> Value:
    """`x` with the function at the end that `activation` names, if it names one."""
    if activation is None or activation == "":
        return x
    if isinstance(activation, UnaryWithParam):
        activation = activation.op_type
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
    "floor": F.floor, "ceil": F.ceil, "trunc": F.trunc, "round": F.round, "log1p": F.log1p,
    "expm1": F.expm1, "isnan": lambda x: F.isnan(x).to(f32), "isinf": lambda x: F.isinf(x).to(f32),
    "isfinite": lambda x: F.isfinite(x).to(f32), "mish": nn.mish, "hardswish": nn.hardswish,
    "hardsigmoid": nn.hardsigmoid, "log_sigmoid": nn.logsigmoid, "selu": nn.selu,
    "logical_not": lambda x: (x == 0).to(f32), "identity": lambda x: x,
    "eqz": lambda x: (x == 0).to(f32), "nez": lambda x: (x != 0).to(f32),
    "gtz": lambda x: (x > 0).to(f32), "ltz": lambda x: (x < 0).to(f32),
    "gez": lambda x: (x >= 0).to(f32), "lez": lambda x: (x <= 0).to(f32),
    "log2": lambda x: F.log(x) / math.log(2.0), "log10": lambda x: F.log(x) / math.log(10.0),
    "exp2": lambda x: F.exp(x * math.log(2.0)), "softsign": lambda x: x / (1.0 + F.abs(x)),
    "bitwise_not": lambda x: ~x,
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


def _with_number(name: str, body: Callable[[Value, float], Value], at: str, default: float) -> Any:
    def local(x: Value, number: float) -> Value:
        return body(x, number)

    local.__name__ = name

    def op(input_tensor: Tensor, number: float = default, **options: Any) -> Tensor:
        number = options.pop(at, number)
        return run(name, local, [input_tensor], **how(name, options), number=number)

    return named(op, name, f"`{name}` of each element, with `{at}` ({default} by default).")


leaky_relu = _with_number("leaky_relu", nn.leaky_relu, "negative_slope", 0.01)
elu = _with_number("elu", nn.elu, "alpha", 1.0)
relu_max = _with_number("relu_max", lambda x, n: F.clip(x, 0.0, n), "upper_limit", 6.0)
relu_min = _with_number("relu_min", lambda x, n: F.maximum(x, n), "lower_limit", 0.0)


def softplus(
    input_tensor: Tensor, *, beta: float = 1.0, threshold: float = 20.0, **options: Any
) -> Tensor:
    """log(1 + exp(beta x)) / beta; x itself where beta x is above `threshold`."""
    said = how("softplus", options)
    return run("softplus", _softplus, [input_tensor], **said, beta=beta, threshold=threshold)


def _softplus(x: Value, beta: float, threshold: float) -> Value:
    return F.where(x * beta > threshold, x, nn.softplus(x * beta) / beta)


def clamp(
    input_tensor: Tensor, min: Operand | None = None, max: Operand | None = None, **options: Any
) -> Tensor:
    """Each element, no less than `min` and no more than `max`: numbers, or tensors."""
    found = input_tensor
    for limit, op in ((min, OPS["maximum"]), (max, OPS["minimum"])):
        if limit is not None:
            found = op(found, limit, **options)
    return found


clip = clamp


# -- each element from two ------------------------------------------------------------------------
def binary(name: str, body: Callable[[Value, Any], Value]) -> Callable[..., Tensor]:
    """The op of two tensors, or a tensor and a number, that are broadcast together."""

    def local(
        *values: Value, number: float | None = None, reverse: bool = False,
        before: tuple[Any, ...] = (), other: tuple[Any, ...] = (), after: tuple[Any, ...] = (),
    ) -> Value:  # fmt: skip
        x: Value = values[0]
        y: Any = values[1] if len(values) > 1 else number
        for step in before:
            x = activated(x, step)
        for step in other:
            y = activated(y, step)
        x = body(y, x) if reverse else body(x, y)
        for step in after:
            x = activated(x, step)
        return x.to(f32) if x.dtype.name == "bool" else x

    local.__name__ = name

    def op(
        input_tensor_a: Operand,
        input_tensor_b: Operand,
        *,
        dtype: DataType | None = None,
        activations: Sequence[Any] | None = None,
        input_tensor_a_activations: Sequence[Any] | None = None,
        input_tensor_b_activations: Sequence[Any] | None = None,
        **options: Any,
    ) -> Tensor:
        said = how(name, options)
        for word, steps in (
            ("after", activations),
            ("before", input_tensor_a_activations),
            ("other", input_tensor_b_activations),
        ):
            if steps:
                said[word] = tuple(steps)
        tensors = [t for t in (input_tensor_a, input_tensor_b) if isinstance(t, Tensor)]
        if len(tensors) == 1:
            said["number"] = input_tensor_a if tensors[0] is input_tensor_b else input_tensor_b
            said["reverse"] = tensors[0] is input_tensor_b
            if not isinstance(said["number"], int | float):
                raise wrong(
                    f"{name}: {brief(said['number'])} is neither a tensor of ttnn nor a number",
                    fix="ttnn.from_torch(array, device=device)",
                )
        return run(name, local, tensors, dtype, **said)

    return named(op, name, f"`{name}` of each two elements, after broadcasting.")


def in_place(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` with its result written into its first operand."""

    def made(input_tensor_a: Tensor, input_tensor_b: Operand, **options: Any) -> Tensor:
        return op(input_tensor_a, input_tensor_b, **options, output_tensor=input_tensor_a)

    name = f"{op.__name__}_"
    return named(made, name, f"`{op.__name__}`, written into its first operand.")


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y, "maximum": F.maximum, "minimum": F.minimum,
    "pow": lambda x, y: x**y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "remainder": lambda x, y: x - y * F.floor(x / y),
    "fmod": lambda x, y: x - y * F.trunc(x / y),
    "squared_difference": lambda x, y: (x - y) * (x - y), "rsub": lambda x, y: y - x,
    "rdiv": lambda x, y: y / x, "logaddexp": F.logaddexp,
    "logical_and": lambda x, y: (x != 0) & (y != 0), "logical_or": lambda x, y: (x != 0) | (y != 0),
    "logical_xor": lambda x, y: (x != 0) ^ (y != 0), "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y, "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_left_shift": lambda x, y: x << y, "bitwise_right_shift": lambda x, y: x >> y,
}  # fmt: skip
OPS |= {name: binary(name, body) for name, body in _BINARY.items()}
OPS |= {f"{n}_": in_place(OPS[n]) for n in ("add", "subtract", "multiply", "divide")}
for _short, _long in {"sub": "subtract", "mul": "multiply", "div": "divide"}.items():
    OPS |= {_short: OPS[_long], f"{_short}_": OPS[f"{_long}_"]}
OPS["power"] = OPS["pow"]


def where(condition: Tensor, true_value: Operand, false_value: Operand, **options: Any) -> Tensor:
    """`true_value` where `condition` is not zero, else `false_value`; the two are tensors or
    numbers."""
    tensors, numbers = [condition], []
    for value in (true_value, false_value):
        numbers.append(None if isinstance(value, Tensor) else value)
        if isinstance(value, Tensor):
            tensors.append(value)
    dtype = tensors[1].dtype if len(tensors) > 1 else None
    return run("where", _where, tensors, dtype, **how("where", options), numbers=tuple(numbers))


def _where(pick: Value, *values: Value, numbers: tuple[float | None, ...]) -> Value:
    rest = iter(values)
    x, y = (next(rest) if n is None else n for n in numbers)
    return F.where(pick != 0, x, y)


for _name, _op in {
    "__add__": "add", "__radd__": "add", "__sub__": "subtract", "__mul__": "multiply",
    "__rmul__": "multiply", "__truediv__": "divide", "__rsub__": "rsub", "__rtruediv__": "rdiv",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__pow__": "pow", "__neg__": "neg",
}.items():  # fmt: skip
    setattr(Tensor, _name, OPS[_op])

__all__ = [
    "clamp", "clip", "elu", "gelu", "leaky_relu", "relu_max", "relu_min", "softplus", "where",
]  # fmt: skip
