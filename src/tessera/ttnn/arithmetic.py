"""Which ops of TT-NN compute each element from two, or from three?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import nn
from ..core.dtypes import int32, uint32
from ..lang import functions as F
from ..lang.tensor import Tensor as Value
from .configs import LossReductionMode
from .dtypes import DataType
from .elementwise import OPS as OF_ONE
from .elementwise import activated, named
from .faults import wrong
from .run import brief, how, run
from .tensor import Tensor

Operand = Tensor | int | float


def binary(name: str, body: Callable[..., Value], **defaults: Any) -> Callable[..., Tensor]:
    """The op of two tensors, or a tensor and a number, that are broadcast together; what
    `defaults` has is named, or follows the two."""

    def local(
        *values: Value, number: float | None = None, reverse: bool = False,
        before: tuple[Any, ...] = (), other: tuple[Any, ...] = (), after: tuple[Any, ...] = (),
        **more: Any,
    ) -> Value:  # fmt: skip
        x: Value = values[0]
        y: Any = values[1] if len(values) > 1 else number
        for step in before:
            x = activated(x, step)
        for step in other:
            y = activated(y, step)
        rest = [more[k] for k in defaults]
        x = body(y, x, *rest) if reverse else body(x, y, *rest)
        for step in after:
            x = activated(x, step)
        return x.to(int32) if x.dtype.name == "bool" else x

    local.__name__ = name

    def op(
        input_tensor_a: Operand,
        input_tensor_b: Operand,
        *given: Any,
        dtype: DataType | None = None,
        activations: Sequence[Any] | None = None,
        input_tensor_a_activations: Sequence[Any] | None = None,
        input_tensor_b_activations: Sequence[Any] | None = None,
        **options: Any,
    ) -> Tensor:
        more = {k: options.pop(k, v) for k, v in defaults.items()}
        if len(given) > len(more):
            raise wrong(
                f"{name}: what is {brief(given[len(more)])}?",
                fix="give arguments after the two operands by their names",
            )
        said = how(name, options) | more | dict(zip(more, given))
        for word, steps in (
            ("after", activations),
            ("before", input_tensor_a_activations),
            ("other", input_tensor_b_activations),
        ):
            if steps:
                said[word] = tuple(steps)
        tensors = [t for t in (input_tensor_a, input_tensor_b) if isinstance(t, Tensor)]
        if tensors and not tensors[0].dtype.is_float:
            said |= {k: int(said[k]) for k in more if _integral(said[k])}
        if len(tensors) == 1:
            said["number"] = input_tensor_a if tensors[0] is input_tensor_b else input_tensor_b
            said["reverse"] = tensors[0] is input_tensor_b
            scalar, whole = said["number"], not tensors[0].dtype.is_float
            if isinstance(scalar, np.generic) and scalar.dtype.kind in "biuf":
                scalar = said["number"] = scalar.item()
            if whole and isinstance(scalar, float) and not _integral(scalar):
                raise wrong(
                    f"{name}: {scalar} is no whole number, and the tensor is of {tensors[0].dtype}",
                    fix="ttnn.typecast(tensor, ttnn.float32) first",
                )
            if whole and isinstance(scalar, float):
                said["number"] = int(scalar)
            if not isinstance(scalar, int | float):
                raise wrong(
                    f"{name}: {brief(said['number'])} is neither a tensor of ttnn nor a number",
                    fix="ttnn.from_torch(array, device=device)",
                )
        return run(name, local, tensors, dtype, **said)

    return named(op, name, f"`{name}` of each two elements, after broadcasting.")


def _integral(n: Any) -> bool:
    return isinstance(n, float) and n.is_integer()


def in_place(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` with its result written into its first operand."""

    def made(input_tensor_a: Tensor, input_tensor_b: Operand, **options: Any) -> Tensor:
        return op(input_tensor_a, input_tensor_b, **options, output_tensor=input_tensor_a)

    name = f"{op.__name__}_"
    return named(made, name, f"`{op.__name__}`, written into its first operand.")


_LN2 = math.log(2.0)


def _as_tensor(y: Any, like: Value) -> Value:
    return y if isinstance(y, Value) else F.full_like(like, y)


def _x_log_y(x: Any, y: Any) -> Value:
    x = _as_tensor(x, y)
    return F.where((x == 0) & (_as_tensor(y, x) == y), 0.0, x * F.log(y))


def _floored(x: Any, y: Any) -> Value:
    found = (x if isinstance(x, Value) else y).dtype.is_float
    return F.floor(x / y) if found else x // y


def _by_channel(x: Value, weight: Any) -> Any:
    """A weight of PReLU [C] beside x [N, C, ...]."""
    if not isinstance(weight, Value) or weight.ndim != 1 or x.ndim < 2:
        return weight
    return weight.reshape(-1, *[1] * (x.ndim - 2))


def _quotient(x: Any, y: Any, mode: str | None) -> Value:
    if mode not in (None, "floor", "trunc"):
        raise wrong(f"divide: there is no round_mode {mode!r}", fix='give "floor" or "trunc"')
    if mode is None:
        found: Value = x / y
        return found
    down = _floored(x, y)
    if mode == "floor":
        return down
    if down.dtype.is_float:
        return F.trunc(x / y)
    up: Value = (down < 0) & (x != down * y)
    return down + up.to(down.dtype)


def _fmod(x: Any, y: Any) -> Value:
    """What is left of `x`, with its sign. `%` is exact, and has the sign of `y`."""
    left: Value = x % y
    return F.where((left != 0) & ((x < 0) != (y < 0)), left - y, left)


def _close(x: Value, y: Any, rtol: float, atol: float, equal_nan: bool) -> Value:
    y = _as_tensor(y, x)
    near: Value = (F.abs(x - y) <= atol + rtol * F.abs(y)) | (x == y)
    return near | (F.isnan(x) & F.isnan(y)) if equal_nan else near


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "maximum": F.maximum, "minimum": F.minimum,
    "pow": lambda x, y: x**y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "remainder": lambda x, y: x % y,
    "fmod": _fmod,
    "squared_difference": lambda x, y: (x - y) * (x - y), "rsub": lambda x, y: y - x,
    "logaddexp": F.logaddexp, "atan2": F.atan2, "hypot": F.hypot,
    "logaddexp2": lambda x, y: F.logaddexp(x * _LN2, y * _LN2) / _LN2,
    "ldexp": lambda x, y: x * 2.0**y, "xlogy": _x_log_y,
    "div_no_nan": lambda x, y: F.where(_as_tensor(y, x) == 0, 0.0, x / y),
    "floor_div": _floored,
    "prelu": lambda x, y: F.where(x > 0, x, x * _by_channel(x, y)),
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
OPS = {name: binary(name, body) for name, body in _BINARY.items()}
OPS |= {
    "divide": binary("divide", _quotient, round_mode=None),
    "rdiv": binary("rdiv", lambda x, y, mode: _quotient(y, x, mode), round_mode=None),
    "addalpha": binary("addalpha", lambda x, y, n: x + n * y, alpha=1.0),
    "subalpha": binary("subalpha", lambda x, y, n: x - n * y, alpha=1.0),
    "isclose": binary("isclose", _close, rtol=1e-5, atol=1e-8, equal_nan=False),
}
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


def clamp(
    input_tensor: Tensor, min: Operand | None = None, max: Operand | None = None, **options: Any
) -> Tensor:
    """Each element, no less than `min` and no more than `max`: numbers, or tensors. Raises
    TTNNError if both are left out."""
    if min is None and max is None:
        raise wrong(
            "clamp: neither min nor max is given", fix="ttnn.clamp(tensor, min=0.0, max=1.0)"
        )
    found = input_tensor
    for limit, op in ((min, OPS["maximum"]), (max, OPS["minimum"])):
        if limit is not None:
            found = op(found, limit, **options)
    return found


clip = clamp


# -- each element from three ----------------------------------------------------------------------
def _of_three(name: str, body: Callable[..., Value], *operands: Any, **options: Any) -> Tensor:
    tensors = [x for x in operands if isinstance(x, Tensor)]
    numbers = tuple(None if isinstance(x, Tensor) else x for x in operands)
    for n in numbers:
        if not isinstance(n, int | float | None):
            raise wrong(
                f"{name}: {brief(n)} is neither a tensor of ttnn nor a number",
                fix="ttnn.from_torch(array, device=device)",
            )
    return run(name, body, tensors, **options, numbers=numbers)


def _in_order(values: tuple[Value, ...], numbers: tuple[float | None, ...]) -> list[Any]:
    rest = iter(values)
    return [next(rest) if n is None else n for n in numbers]


def where(condition: Tensor, true_value: Operand, false_value: Operand, **options: Any) -> Tensor:
    """`true_value` where `condition` is not zero, else `false_value`; the two are tensors or
    numbers."""
    kinds = [x.dtype for x in (true_value, false_value, condition) if isinstance(x, Tensor)]
    said = how("where", options)
    return _of_three("where", _where, condition, true_value, false_value, dtype=kinds[0], **said)


def _where(*values: Value, numbers: tuple[float | None, ...]) -> Value:
    pick, x, y = _in_order(values, numbers)
    return F.where(pick != 0, x, y)


def lerp(input: Tensor, end: Tensor, weight: Operand, **options: Any) -> Tensor:
    """`input + weight * (end - input)`; the weight is a tensor or a number."""
    return _of_three("lerp", _lerp, input, end, weight, **how("lerp", options))


def _lerp(*values: Value, numbers: tuple[float | None, ...]) -> Value:
    x, y, weight = _in_order(values, numbers)
    found: Value = x + weight * (y - x)
    return found


def mac(input_tensor_a: Tensor, b: Operand, c: Operand, **options: Any) -> Tensor:
    """`a * b + c`; the last two are tensors or numbers."""
    return _of_three("mac", _mac, input_tensor_a, b, c, **how("mac", options))


def _mac(*values: Value, numbers: tuple[float | None, ...]) -> Value:
    a, b, c = _in_order(values, numbers)
    found: Value = a * b + c
    return found


def addcmul(
    input_a: Tensor, input_b: Tensor, input_c: Tensor, *, value: float = 1.0, **options: Any
) -> Tensor:
    """`a + value * b * c`."""
    said = how("addcmul", options)
    return run("addcmul", _addcmul, [input_a, input_b, input_c], **said, value=value)


def _addcmul(a: Value, b: Value, c: Value, value: float) -> Value:
    return a + value * b * c


def addcdiv(
    input_a: Tensor, input_b: Tensor, input_c: Tensor, *, value: float = 1.0, **options: Any
) -> Tensor:
    """`a + value * b / c`."""
    said = how("addcdiv", options)
    return run("addcdiv", _addcdiv, [input_a, input_b, input_c], **said, value=value)


def _addcdiv(a: Value, b: Value, c: Value, value: float) -> Value:
    return a + value * b / c


# -- losses ---------------------------------------------------------------------------------------
def _loss(name: str, body: Callable[[Value], Value]) -> Callable[..., Tensor]:
    def local(x: Value, y: Value, reduction: str) -> Value:
        each = body(x - y)
        return {"SUM": F.sum, "MEAN": F.mean}[reduction](each) if reduction != "NONE" else each

    local.__name__ = name

    def op(
        input_reference: Tensor, input_prediction: Tensor, *,
        reduction: Any = LossReductionMode.NONE, **options: Any,
    ) -> Tensor:  # fmt: skip
        tensors = [input_reference, input_prediction]
        return run(name, local, tensors, **how(name, options), reduction=reduction.name)

    return named(op, name, f"`{name}` of each two elements; their sum or mean by `reduction`.")


OPS |= {"mse_loss": _loss("mse_loss", lambda x: x * x), "l1_loss": _loss("l1_loss", F.abs)}

for _name, _op in {
    "__add__": "add", "__radd__": "add", "__sub__": "subtract", "__mul__": "multiply",
    "__rmul__": "multiply", "__truediv__": "divide", "__rsub__": "rsub", "__rtruediv__": "rdiv",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__pow__": "pow", "__neg__": "neg",
}.items():  # fmt: skip
    setattr(Tensor, _name, (OPS | OF_ONE)[_op])

__all__ = ["addcdiv", "addcmul", "clamp", "clip", "lerp", "mac", "where"]
