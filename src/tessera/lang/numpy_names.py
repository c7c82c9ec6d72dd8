"""What does a NumPy function do to a tensor? The op of the same meaning, never a value without its
gradient.

NumPy asks the arguments of its functions who computes (`__array_ufunc__`, `__array_function__`).
Here stands what we answer: a function for each name that means an op of ours, with the arguments
that NumPy calls so; for all others an error that says what to type.

>>> import tessera as ts
>>> x = ts.tensor([1.0, 4.0])
>>> ts.grad(np.sum(np.sqrt(x)), x).numpy().tolist()
[0.5, 0.25]
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.errors import UsageError
from ..core.kinds import is_whole
from ..core.peer_names import INSTEAD
from . import functions as F
from . import linalg
from .operands import as_tensor, binary, emit
from .shaping import dims_of
from .tensor import Like, Tensor, method

Axis = int | Sequence[int] | None


def _name(f: Any) -> str:
    module = (getattr(f, "__module__", None) or "numpy").replace("numpy", "np", 1)
    inside = module.removeprefix("np").partition("._")[0]
    return f"np{inside}.{f.__name__}" if module.startswith("np") else f"{module}.{f.__name__}"


def refused(f: Any, why: str, instead: str = "") -> UsageError:
    """The error for the NumPy function `f` on a tensor."""
    return UsageError(
        f"{_name(f)}: {why}",
        fix=(f"use {instead}, or " if instead else "compose it of functions of ts, or ")
        + "take the value alone, without a gradient: x.numpy()",
    )


@method("__array_ufunc__")
def _ufunc(x: Tensor, f: Any, way: str, *inputs: Any, **how: Any) -> Any:
    """A ufunc of NumPy on tensors, as an op. Raises UsageError."""
    if way != "__call__":
        outer = f"{_name(f)}(x[:, None], y) of vectors" if way == "outer" else ""
        raise refused(f, f"its .{way} is no op of tensors", outer or _OTHER_WAYS.get((f, way), ""))
    return _apply(f, UFUNCS.get(f), inputs, how)


@method("__array_function__")
def _function(x: Tensor, f: Any, types: Any, args: Sequence[Any], how: Any) -> Any:
    """Another function of NumPy on tensors, as an op. Raises UsageError."""
    return _apply(f, FUNCTIONS.get(f), tuple(args), how)


def _apply(
    f: Any, ours: Callable[..., Any] | None, args: tuple[Any, ...], how: dict[str, Any]
) -> Any:
    """Our function in place of NumPy's `f`; what it does not take is an error that says so."""
    if ours is None:
        raise refused(f, "it is no op of tensors", _same_name(f))
    if how.get("out") is not None:
        raise refused(f, "its result cannot be put into an array", "the result of the call")
    try:
        inspect.signature(ours).bind(*args, **how)
    except TypeError as error:
        takes = str(inspect.signature(ours)).partition(" ->")[0].replace("'", "")
        raise refused(f, f"{error}; of a tensor it takes {takes}", _same_name(f)) from None
    return ours(*args, **how)


def _same_name(f: Any) -> str:
    for module, prefix in ((F, "ts."), (linalg, "ts.linalg.")):
        if f.__name__ in module.__all__:
            return f"{prefix}{f.__name__}"
    return {**INSTEAD, "select": "ts.where"}.get(f.__name__, "")


# -- of each element ------------------------------------------------------------------------------
def _two(op: str) -> Callable[..., Tensor]:
    def call(x1: Like, x2: Like) -> Tensor:
        return binary(op, x1, x2)

    return call


def _scaled(f: Callable[[Any], Tensor], by: float) -> Callable[..., Tensor]:
    def call(x: Like) -> Tensor:
        return f(x) * by

    return call


def _square(x: Like) -> Tensor:
    t = as_tensor(x)
    return t * t


def _exp2(x: Like) -> Tensor:
    return F.exp(as_tensor(x) * math.log(2.0))


def _tan(x: Like) -> Tensor:
    return F.sin(x) / F.cos(x)


def _not(x: Like) -> Tensor:
    return emit("logical_not", _truth(x))


def _truth(x: Like) -> Tensor:
    t = as_tensor(x)
    return t if t.dtype.kind == "bool" else t != 0


def _logical(op: str) -> Callable[..., Tensor]:
    def call(x1: Like, x2: Like) -> Tensor:
        return binary(op, _truth(x1), _truth(x2))

    return call


def _xor(x1: Like, x2: Like) -> Tensor:
    return _truth(x1) != _truth(x2)


UFUNCS: dict[Any, Callable[..., Any]] = {
    np.add: _two("add"),
    np.subtract: _two("sub"),
    np.multiply: _two("mul"),
    np.divide: _two("div"),
    np.floor_divide: _two("floordiv"),
    np.remainder: _two("mod"),
    np.power: lambda x1, x2: as_tensor(x1) ** x2,
    np.maximum: _two("maximum"),
    np.minimum: _two("minimum"),
    np.arctan2: lambda x1, x2: F.atan2(x1, x2),
    np.hypot: lambda x1, x2: F.hypot(x1, x2),
    np.equal: _two("eq"),
    np.not_equal: _two("ne"),
    np.less: _two("lt"),
    np.less_equal: _two("le"),
    np.greater: _two("gt"),
    np.greater_equal: _two("ge"),
    np.logical_and: _logical("logical_and"),
    np.logical_or: _logical("logical_or"),
    np.logical_xor: _xor,
    np.logical_not: _not,
    np.invert: lambda x: ~x,
    np.bitwise_and: lambda x1, x2: as_tensor(x1) & x2,
    np.bitwise_or: lambda x1, x2: as_tensor(x1) | x2,
    np.bitwise_xor: lambda x1, x2: as_tensor(x1) ^ x2,
    np.left_shift: lambda x1, x2: F.bitwise_left_shift(x1, x2),
    np.right_shift: lambda x1, x2: F.bitwise_right_shift(x1, x2),
    np.matmul: F.matmul,
    np.negative: lambda x: -x,
    np.positive: lambda x: x,
    np.absolute: F.abs,
    np.fabs: F.abs,
    np.sign: F.sign,
    np.square: _square,
    np.reciprocal: lambda x: 1.0 / x,
    np.sqrt: F.sqrt,
    np.exp: F.exp,
    np.expm1: F.expm1,
    np.exp2: _exp2,
    np.log: F.log,
    np.log1p: F.log1p,
    np.log2: _scaled(F.log, 1.0 / math.log(2.0)),
    np.log10: _scaled(F.log, 1.0 / math.log(10.0)),
    np.sin: F.sin,
    np.cos: F.cos,
    np.tan: _tan,
    np.tanh: F.tanh,
    np.arcsin: F.asin,
    np.arccos: F.acos,
    np.arctan: F.atan,
    np.sinh: F.sinh,
    np.cosh: F.cosh,
    np.arcsinh: F.asinh,
    np.arccosh: F.acosh,
    np.arctanh: F.atanh,
    np.floor: F.floor,
    np.ceil: F.ceil,
    np.isfinite: F.isfinite,
    np.isnan: F.isnan,
    np.isinf: F.isinf,
}
_OTHER_WAYS = {
    (np.add, "reduce"): "np.sum", (np.multiply, "reduce"): "np.prod",
    (np.maximum, "reduce"): "np.max", (np.minimum, "reduce"): "np.min",
    (np.add, "accumulate"): "np.cumsum", (np.multiply, "accumulate"): "np.cumprod",
}  # fmt: skip


# -- of dims --------------------------------------------------------------------------------------
def _over(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(a: Like, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
        return f(a, axis, keepdims)

    return call


def _var(a: Like, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Tensor:
    return F.var(a, axis, keepdims=keepdims, correction=ddof)


def _std(a: Like, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Tensor:
    return F.std(a, axis, keepdims=keepdims, correction=ddof)


def _along(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` along one dim; NumPy's axis=None means the tensor as one row."""

    def call(a: Like, axis: int | None = None) -> Any:
        return f(_ravel(a), 0) if axis is None else f(a, axis)

    return call


def _sort(a: Like, axis: int = -1) -> Tensor:
    return F.sort(a, axis)[0]


def _argsort(a: Like, axis: int = -1) -> Tensor:
    return F.argsort(a, axis)


def _take(a: Like, indices: Like, axis: int | None = None) -> Tensor:
    return F.take(_ravel(a), indices, 0) if axis is None else F.take(a, indices, axis)


# -- of shapes ------------------------------------------------------------------------------------
def _reshape(a: Like, shape: Any) -> Tensor:
    return F.reshape(a, shape)


def _ravel(a: Like) -> Tensor:
    return F.reshape(a, -1)


def _transpose(a: Like, axes: Sequence[int] | None = None) -> Tensor:
    t = as_tensor(a)
    return t.T if axes is None else F.permute(t, axes)


def _several(given: Any) -> Sequence[int]:
    return (given,) if is_whole(given) else given


def _moveaxis(a: Like, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    t = as_tensor(a)
    of, to = ([d % t.ndim for d in _several(given)] for given in (source, destination))
    order = [d for d in range(t.ndim) if d not in of]
    for d, at in sorted(zip(to, of, strict=True)):
        order.insert(d, at)
    return F.permute(t, order)


def _expand_dims(a: Like, axis: int | Sequence[int]) -> Tensor:
    t = as_tensor(a)
    given = _several(axis)
    rank = t.ndim + len(given)
    rest = iter(t.shape)
    new = {d % rank for d in given}
    return F.reshape(t, tuple(1 if i in new else next(rest) for i in range(rank)))


def _squeeze(a: Like, axis: Axis = None) -> Tensor:
    t = as_tensor(a)
    drop = dims_of("np.squeeze", t, axis)
    if axis is None:
        drop = tuple(d for d in drop if t.shape[d] == 1)
    if any(t.shape[d] != 1 for d in drop):
        raise refused(np.squeeze, f"dims {drop} of shape {t.shape} are not of size 1")
    return F.reshape(t, tuple(n for i, n in enumerate(t.shape) if i not in drop))


def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Tensor:
    if axis is None:
        return F.concat(list(map(_ravel, arrays)), 0)
    return F.concat(list(map(as_tensor, arrays)), axis)


def _stack(arrays: Sequence[Any], axis: int = 0) -> Tensor:
    return F.stack(list(map(as_tensor, arrays)), axis)


def _vstack(tup: Sequence[Any]) -> Tensor:
    ts = list(map(as_tensor, tup))
    return F.concat([F.reshape(t, (1, t.size)) if t.ndim < 2 else t for t in ts], 0)


def _hstack(tup: Sequence[Any]) -> Tensor:
    ts = [t if t.ndim else F.reshape(t, 1) for t in map(as_tensor, tup)]
    return F.concat(ts, 0 if ts[0].ndim == 1 else 1)


def _split(ary: Like, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    t, given = as_tensor(ary), indices_or_sections
    if not is_whole(given):  # NumPy gives the places of the cuts, we the sizes of the parts
        ends = [0, *given, t.shape[axis]]  # type: ignore[misc]
        given = [b - a for a, b in pairwise(ends)]
    return F.split(t, given, axis)


def _diagonal(a: Like, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    return F.diagonal(a, offset, axis1, axis2)


# -- products, choices ----------------------------------------------------------------------------
def _dot(a: Like, b: Like) -> Tensor:
    x, y = as_tensor(a), as_tensor(b)
    if not x.ndim or not y.ndim:
        return x * y
    if y.ndim > 2:
        raise refused(np.dot, f"the second tensor has {y.ndim} dims", "ts.matmul or ts.einsum")
    return F.matmul(x, y)


def _outer(a: Like, b: Like) -> Tensor:
    return F.einsum("i, j -> i j", _ravel(a), _ravel(b))


def _einsum(subscripts: str, *operands: Like, optimize: object = True) -> Tensor:
    return F.einsum(subscripts, *operands)


def _clip(
    a: Like, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Tensor:
    return F.clip(a, a_min if min is None else min, a_max if max is None else max)


def _where(condition: Like, x: Like, y: Like) -> Tensor:
    return F.where(condition, x, y)


# -- of values: what they give has no gradient anyway ----------------------------------------------
def _of_values(f: Any) -> Callable[..., Any]:
    def call(*args: Any, **how: Any) -> Any:
        values = [a.numpy() if isinstance(a, Tensor) else a for a in args]
        return f(*values, **{k: v.numpy() if isinstance(v, Tensor) else v for k, v in how.items()})

    return call


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: _over(F.sum),
    np.prod: _over(F.prod),
    np.max: _over(F.max),
    np.amax: _over(F.max),
    np.min: _over(F.min),
    np.amin: _over(F.min),
    np.mean: _over(F.mean),
    np.var: _var,
    np.std: _std,
    np.all: _over(F.all),
    np.any: _over(F.any),
    np.cumsum: _along(F.cumsum),
    np.cumprod: _along(F.cumprod),
    np.argmax: _along(F.argmax),
    np.argmin: _along(F.argmin),
    np.sort: _sort,
    np.argsort: _argsort,
    np.flip: lambda m, axis=None: F.flip(m, axis),
    np.take: _take,
    np.reshape: _reshape,
    np.ravel: _ravel,
    np.transpose: _transpose,
    np.swapaxes: lambda a, axis1, axis2: F.swap(a, axis1, axis2),
    np.moveaxis: _moveaxis,
    np.expand_dims: _expand_dims,
    np.squeeze: _squeeze,
    np.broadcast_to: lambda array, shape: F.broadcast_to(array, shape),
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.vstack: _vstack,
    np.hstack: _hstack,
    np.split: _split,
    np.tril: lambda m, k=0: F.tril(m, k),
    np.triu: lambda m, k=0: F.triu(m, k),
    np.diag: lambda v: F.diag(v),
    np.diagonal: _diagonal,
    np.trace: lambda a, offset=0, axis1=0, axis2=1: F.sum(_diagonal(a, offset, axis1, axis2), -1),
    np.dot: _dot,
    np.outer: _outer,
    np.einsum: _einsum,
    np.roll: lambda a, shift, axis=None: F.roll(a, shift, axis),
    np.tile: lambda A, reps: F.tile(A, reps),
    np.repeat: lambda a, repeats, axis=None: F.repeat_interleave(a, repeats, axis),
    np.clip: _clip,
    np.round: lambda a, decimals=0: F.round(a, decimals),
    np.where: _where,
    np.zeros_like: F.zeros_like,
    np.ones_like: F.ones_like,
    np.copy: lambda a: a,
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a: a.size,
    np.result_type: lambda *given: np.result_type(
        *(a.dtype.numpy if isinstance(a, Tensor) else a for a in given)
    ),
    **{
        f: _of_values(f)
        for f in (
            np.allclose, np.isclose, np.array_equal, np.array_equiv, np.array2string, np.array_repr,
            np.array_str, np.save, np.savez, np.savez_compressed, np.savetxt,
        )
    },
}  # fmt: skip
