"""JAX functions as Tessera ops: recorded, laid out and run like any other part of a program.

`jax.make_jaxpr` gives the equations of the function; the table `RULES` maps each of them to a
function on tensors, so each result has the layout that its ops give it. `ts.op` is for functions
that run unchanged, on each device's block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import BY_NAME, dtype_of
from ...core.errors import UsageError
from ..math import functions as F
from ..record.operands import as_tensor, scalar
from ..value.engine import engine
from ..value.tensor import Tensor

Operand = Any  # the number of a value, or a NumPy array


class Equation(NamedTuple):
    """`outs = name(args, **params)`."""

    name: str
    args: list[Operand]
    params: dict[str, Any]
    outs: list[int]


class Equations(NamedTuple):
    """A function in equations: the first values are its arguments, `outs` its results."""

    rows: list[Equation]
    outs: list[Operand]


def as_ops(caller: str, fn: Callable[..., list[Any]], args: Sequence[Tensor]) -> list[Tensor]:
    """The results of the JAX function `fn`, which returns a list of arrays, on tensors.

    Raises UsageError, in the name of `caller`, if the function has a primitive without a
    counterpart.
    """
    traced = engine().equations(fn, [(t.shape, t.dtype.numpy) for t in args])
    values: dict[int, Tensor] = dict(enumerate(args))

    def read(x: Operand) -> Tensor:
        return values[x] if isinstance(x, int) else _constant(x)

    for e in traced.rows:
        rule = RULES.get(e.name)
        if rule is None:
            raise UsageError(
                f"{caller}: {e.name} of JAX has no counterpart here",
                rows=[(f"arg {i}", read(x).type) for i, x in enumerate(e.args) if _has_dtype(x)],
                fix="write this part with ts functions; an optimizer of optim needs no JAX",
            )
        results = rule(*map(read, e.args), **e.params)
        values.update(zip(e.outs, results if isinstance(results, list) else [results], strict=True))
    return [read(x) for x in traced.outs]


def _has_dtype(x: Operand) -> bool:
    return isinstance(x, int) or x.dtype.name in BY_NAME


def _constant(x: np.ndarray[Any, Any]) -> Tensor:
    return as_tensor(x) if x.shape else scalar(x.item(), dtype_of(x.dtype))


# -- the table ------------------------------------------------------------------------------------
Rule = Callable[..., Tensor | list[Tensor]]


def _unary(f: Callable[[Tensor], Tensor]) -> Rule:
    return lambda x, **_: f(x)


def _binary(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    return lambda x, y, **_: f(x, y)


def _over(f: Callable[..., Tensor]) -> Rule:
    return lambda x, axes, **_: f(x, tuple(axes)) if axes else x


def _quotient(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    """`x / y`; for integers the quotient rounded towards zero (`//` rounds down)."""
    if x.dtype.is_float:
        return x / y
    down = x // y
    return F.where((down * y != x) & ((x < 0) ^ (y < 0)), down + 1, down)


def _power(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    return x ** (y if y.dtype.is_float else y.to(x.dtype))


def _select(which: Tensor, *cases: Tensor, **_: Any) -> Tensor:
    out = cases[0]
    for i, case in enumerate(cases[1:], 1):
        out = F.where(which if which.dtype.kind == "bool" else which == i, case, out)
    return out


def _broadcast(x: Tensor, shape: Any, broadcast_dimensions: Any, **_: Any) -> Tensor:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    ones = tuple(sizes.get(d, 1) for d in range(len(shape)))
    x = x if x.shape == ones else x.reshape(ones)
    return x if x.shape == tuple(shape) else F.broadcast_to(x, tuple(shape))


def _product(x: Tensor, y: Tensor, dimension_numbers: Any, **_: Any) -> Tensor:
    (cx, cy), (bx, by) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    of_x = {d: next(letters) for d in range(x.ndim)}
    of_y = {d: of_x[e] for d, e in zip((*cy, *by), (*cx, *bx), strict=True)}
    of_y |= {d: next(letters) for d in range(y.ndim) if d not in of_y}
    out = [of_x[d] for d in bx]
    out += [of_x[d] for d in range(x.ndim) if d not in (*cx, *bx)]
    out += [of_y[d] for d in range(y.ndim) if d not in (*cy, *by)]
    left, right = ("".join(s[d] for d in sorted(s)) for s in (of_x, of_y))
    return F.einsum(f"{left},{right}->{''.join(out)}", x, y)


def _slice(x: Tensor, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> Tensor:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _part(x: Tensor, *starts: Tensor, slice_sizes: Any, **_: Any) -> Tensor:
    for d, (start, size) in enumerate(zip(starts, slice_sizes, strict=True)):
        if size < x.shape[d]:
            first = F.clip(start.to("i32"), 0, x.shape[d] - size)  # within, as in JAX
            x = F.take(x, first + F.arange(size), d)
    return x


def _line(dtype: Any, shape: Any, dimension: int, **_: Any) -> Tensor:
    at = F.arange(shape[dimension]).reshape(*(n if d == dimension else 1
                                             for d, n in enumerate(shape)))  # fmt: skip
    return F.broadcast_to(at, tuple(shape)).to(dtype_of(dtype))


def _running(f: Callable[[Tensor, int], Tensor]) -> Rule:
    def rule(x: Tensor, axis: int, reverse: bool, **_: Any) -> Tensor:
        return F.flip(f(F.flip(x, axis), axis), axis) if reverse else f(x, axis)

    return rule


def _nothing(shape: Any, dtype: Any, **_: Any) -> Tensor:
    return F.broadcast_to(scalar(0, dtype_of(dtype)), tuple(shape))


RULES: dict[str, Rule] = {
    **{n: _unary(getattr(F, n)) for n in (
        "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt", "sign",
        "sin", "sqrt", "tanh", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
        "atanh", "erfc",
    )},
    "erf_inv": _unary(F.erfinv), "atan2": _binary(F.atan2),
    "logistic": _unary(F.sigmoid), "is_finite": _unary(F.isfinite),
    "square": _unary(lambda x: x * x), "neg": _unary(lambda x: -x), "not": _unary(lambda x: ~x),
    "copy": _unary(lambda x: x), "copy_p": _unary(lambda x: x),
    "stop_gradient": _unary(F.stop_gradient),
    "integer_pow": lambda x, y, **_: x**y,
    "add": _binary(lambda x, y: x + y), "add_any": _binary(lambda x, y: x + y),
    "sub": _binary(lambda x, y: x - y), "mul": _binary(lambda x, y: x * y),
    "div": _quotient, "pow": _power,
    "rem": _binary(lambda x, y: x - y * (F.where(x / y < 0, F.ceil(x / y), F.floor(x / y))
                                         if x.dtype.is_float else _quotient(x, y))),
    "max": _binary(F.maximum), "min": _binary(F.minimum),
    "clamp": lambda low, x, high, **_: F.minimum(F.maximum(x, low), high),
    "eq": _binary(lambda x, y: x == y), "ne": _binary(lambda x, y: x != y),
    "lt": _binary(lambda x, y: x < y), "le": _binary(lambda x, y: x <= y),
    "gt": _binary(lambda x, y: x > y), "ge": _binary(lambda x, y: x >= y),
    "and": _binary(lambda x, y: x & y), "or": _binary(lambda x, y: x | y),
    "xor": _binary(lambda x, y: x ^ y),
    "select_n": _select,
    "convert_element_type": lambda x, new_dtype, **_: x.to(dtype_of(new_dtype)),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, new_sizes, **_: x.reshape(tuple(new_sizes)),
    "squeeze": lambda x, dimensions, **_: x.squeeze(tuple(dimensions)),
    "expand_dims": lambda x, dimensions, **_: F.unsqueeze(x, dimensions[0]),
    "transpose": lambda x, permutation, **_: x.permute(*permutation),
    "concatenate": lambda *xs, dimension, **_: F.concat(list(xs), dimension),
    "reduce_sum": _over(F.sum), "reduce_max": _over(F.max), "reduce_min": _over(F.min),
    "reduce_and": _over(F.all), "reduce_or": _over(F.any),
    "reduce_prod": _over(F.prod), "stack": lambda *xs, axis, **_: F.stack(list(xs), axis),
    "cumsum": _running(F.cumsum), "cumprod": _running(F.cumprod),
    "cummax": _running(lambda x, d: F.cummax(x, d)[0]),
    "cummin": _running(lambda x, d: F.cummin(x, d)[0]),
    "exp2": _unary(lambda x: 2.0**x), "cbrt": _unary(lambda x: F.sign(x) * F.abs(x) ** (1 / 3)),
    "dot_general": _product, "slice": _slice, "dynamic_slice": _part,
    "split": lambda x, sizes, axis, **_: F.split(x, [*map(int, sizes)], axis),
    "argmax": lambda x, axes, **_: F.argmax(x, axes[0]), "iota": _line, "empty": _nothing,
    "argmin": lambda x, axes, **_: F.argmin(x, axes[0]),
}  # fmt: skip
"""The function on tensors for each JAX primitive."""
