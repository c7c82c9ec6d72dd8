"""NumPy functions on tensors: each runs the op of the same meaning, which keeps the gradient.

NumPy dispatches its functions to its arguments (`__array_ufunc__`, `__array_function__`). `OPS` has
a function for each NumPy function with a counterpart here, with NumPy's argument names; all others
raise errors with the replacement to write.

>>> import tessera as ts
>>> x = ts.tensor([1.0, 4.0])
>>> ts.grad(np.sum(np.sqrt(x)), x).numpy().tolist()
[0.5, 0.25]
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ...core.peers import fix_for, name_fix
from ...core.value_checks import is_whole
from ..math import functions as F
from ..record.operands import as_tensor, binary
from ..value.tensor import Like, Tensor, method


def _name(f: Any) -> str:
    module = getattr(f, "__module__", None) or "numpy"
    return f"{re.sub(r'[.]_.*', '', module).replace('numpy', 'np', 1)}.{f.__name__}"


def _refused(f: Any, why: str, instead: str = "") -> UsageError:
    """The error for the NumPy function `f` on a tensor."""
    instead = instead or name_fix("np", f.__name__, ())
    return UsageError(
        f"{_name(f)}: {why}", fix=f"{instead}; the value alone, without a gradient, is x.numpy()"
    )


@method("__array_ufunc__")
def _ufunc(x: Tensor, f: Any, method: str, *inputs: Any, **how: Any) -> Any:
    """A NumPy ufunc on tensors, as an op. Raises UsageError if there is none."""
    if method != "__call__":
        outer = f"write {_name(f)}(x[:, None], y) of vectors" if method == "outer" else ""
        raise _refused(
            f, f"its .{method} is no op of tensors", outer or fix_for("names", method, _name(f))
        )
    return _function(x, f, (), inputs, how)


@method("__array_function__")
def _function(x: Tensor, f: Any, types: Any, args: Sequence[Any], how: dict[str, Any]) -> Any:
    """A NumPy function on tensors, as an op. Raises UsageError if there is none, or if it does not
    take the arguments."""
    ours = OPS.get(f)
    if ours is None:
        raise _refused(f, "it is no op of tensors")
    if how.get("out") is not None:
        raise _refused(f, "its result cannot be put into an array", "use the result of the call")
    try:
        inspect.signature(ours).bind(*args, **how)
    except TypeError as error:
        takes = str(inspect.signature(ours)).partition(" ->")[0].replace("'", "")
        raise _refused(f, f"{error}; of a tensor it takes {takes}") from None
    return ours(*args, **how)


def _over(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, axis=None, *, keepdims=False: f(a, axis, keepdims=keepdims)


def _spread(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, axis=None, *, ddof=0, keepdims=False: f(
        a, axis, keepdims=keepdims, correction=ddof
    )


def _along(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` with NumPy's `axis`: None flattens the tensor first."""
    return lambda a, axis=None: f(_ravel(a), 0) if axis is None else f(a, axis)


def _ravel(a: Like) -> Tensor:
    return F.reshape(a, -1)


def _shape(f: Callable[..., Any], probe: Any, how: tuple[Any, ...]) -> tuple[int, ...]:
    try:
        return f(probe, *how).shape  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise _refused(f, str(error)) from None


def _ordered(f: Callable[..., Any], a: Like, *how: Any) -> Tensor:
    """Returns `a` with its dims in the order that NumPy's `f` gives them. (`f` runs on an array
    whose sizes number the dims.)"""
    t = as_tensor(a)
    return F.permute(t, _shape(f, np.empty(range(t.ndim)), how))


def _shaped(f: Callable[..., Any], a: Like, *how: Any) -> Tensor:
    """Returns `a` in the shape that NumPy's `f` gives it."""
    t = as_tensor(a)
    return F.reshape(t, _shape(f, np.broadcast_to(0, t.shape), how))


def _joined(xs: Sequence[Like], axis: int | None) -> Tensor:
    return F.concat([_ravel(x) if axis is None else as_tensor(x) for x in xs], axis or 0)


def _split(ary: Like, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    t, given = as_tensor(ary), indices_or_sections
    if not is_whole(given):  # NumPy takes the positions of the cuts, F.split the sizes
        given = np.diff([0, *given, t.shape[axis]]).tolist()  # type: ignore[misc]
    return F.split(t, given, axis)


def _dot(a: Like, b: Like) -> Tensor:
    x, y = as_tensor(a), as_tensor(b)
    if y.ndim > 2:
        raise _refused(np.dot, f"the second tensor has {y.ndim} dims", "use ts.matmul or ts.einsum")
    return F.matmul(x, y) if x.ndim and y.ndim else x * y


def _diagonal(a: Like, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    return F.diagonal(a, offset, axis1, axis2)


def _true(x: Like) -> Tensor:
    return as_tensor(x) != 0


def _values(f: Any) -> Callable[..., Any]:
    """Returns `f` on NumPy values of the tensors: its result has no gradient in any case."""

    def value(x: Any) -> Any:
        return x.numpy() if isinstance(x, Tensor) else x

    return lambda *args, **how: f(*map(value, args), **{k: value(v) for k, v in how.items()})


_OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "remainder": "mod",
    "floor_divide": "floordiv", "equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge",
}  # fmt: skip
OPS: dict[Any, Callable[..., Any]] = {
    # elementwise
    **{
        getattr(np, f.__name__): f
        for f in (
            F.matmul, F.sign, F.sqrt, F.exp, F.expm1, F.log, F.log1p, F.sin, F.cos, F.tanh, F.sinh,
            F.cosh, F.floor, F.ceil, F.isfinite, F.isnan, F.isinf, F.hypot, F.maximum, F.minimum,
            F.bitwise_and, F.bitwise_or, F.bitwise_xor, F.zeros_like, F.ones_like,
        )
    },
    **{getattr(np, n): partial(binary, op) for n, op in _OPERATORS.items()},
    **{
        getattr(np, f"arc{f.__name__[1:]}"): f
        for f in (F.asin, F.acos, F.atan, F.atan2, F.asinh, F.acosh, F.atanh)
    },
    np.power: lambda x1, x2: as_tensor(x1) ** x2,
    np.logical_and: lambda x1, x2: _true(x1) & _true(x2),
    np.logical_or: lambda x1, x2: _true(x1) | _true(x2),
    np.logical_xor: lambda x1, x2: _true(x1) != _true(x2),
    np.logical_not: lambda x: x == 0,
    np.invert: operator.invert,
    np.left_shift: F.bitwise_left_shift,
    np.right_shift: F.bitwise_right_shift,
    np.negative: operator.neg,
    np.positive: lambda x: x,
    np.absolute: F.abs,
    np.fabs: F.abs,
    np.square: lambda x: x * x,
    np.reciprocal: lambda x: 1.0 / x,
    np.exp2: lambda x: F.exp(x * math.log(2.0)),
    np.log2: lambda x: F.log(x) * (1.0 / math.log(2.0)),
    np.log10: lambda x: F.log(x) * (1.0 / math.log(10.0)),
    np.tan: lambda x: F.sin(x) / F.cos(x),
    np.round: lambda a, decimals=0: F.round(a, decimals),
    np.where: lambda condition, x, y: F.where(condition, x, y),
    np.clip: lambda a, a_min=None, a_max=None, *, min=None, max=None: F.clip(
        a, a_min if min is None else min, a_max if max is None else max
    ),
    # along dims
    **{
        getattr(np, f.__name__): _over(f)
        for f in (F.sum, F.prod, F.max, F.min, F.mean, F.all, F.any)
    },
    np.amax: _over(F.max),
    np.amin: _over(F.min),
    np.var: _spread(F.var),
    np.std: _spread(F.std),
    np.cumsum: _along(F.cumsum),
    np.cumprod: _along(F.cumprod),
    np.argmax: _along(F.argmax),
    np.argmin: _along(F.argmin),
    np.sort: lambda a, axis=-1: F.sort(a, axis)[0],
    np.argsort: lambda a, axis=-1: F.argsort(a, axis),
    np.flip: lambda m, axis=None: F.flip(m, axis),
    np.roll: lambda a, shift, axis=None: F.roll(a, shift, axis),
    np.take: lambda a, indices, axis=None: _along(lambda x, dim: F.take(x, indices, dim))(a, axis),
    np.repeat: lambda a, repeats, axis=None: F.repeat_interleave(a, repeats, axis),
    # shapes
    np.reshape: lambda a, shape: F.reshape(a, shape),
    np.ravel: lambda a: _ravel(a),
    np.transpose: lambda a, axes=None: _ordered(np.transpose, a, axes),
    np.swapaxes: lambda a, axis1, axis2: _ordered(np.swapaxes, a, axis1, axis2),
    np.moveaxis: lambda a, source, destination: _ordered(np.moveaxis, a, source, destination),
    np.expand_dims: lambda a, axis: _shaped(np.expand_dims, a, axis),
    np.squeeze: lambda a, axis=None: _shaped(np.squeeze, a, axis),
    np.broadcast_to: lambda array, shape: F.broadcast_to(array, shape),
    np.tile: lambda A, reps: F.tile(A, reps),
    np.concatenate: lambda arrays, axis=0: _joined(arrays, axis),
    np.stack: lambda arrays, axis=0: F.stack([as_tensor(x) for x in arrays], axis),
    np.vstack: lambda tup: F.concat([_shaped(np.atleast_2d, x) for x in tup], 0),
    np.hstack: lambda tup: F.concat(
        [_shaped(np.atleast_1d, x) for x in tup], int(np.ndim(tup[0]) > 1)
    ),
    np.split: _split,
    np.copy: lambda a: a,
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a: a.size,
    np.result_type: lambda *given: np.result_type(
        *(a.dtype.numpy if isinstance(a, Tensor) else a for a in given)
    ),
    # matrices
    np.tril: lambda m, k=0: F.tril(m, k),
    np.triu: lambda m, k=0: F.triu(m, k),
    np.diag: lambda v: F.diag(v),
    np.diagonal: _diagonal,
    np.trace: lambda a, offset=0, axis1=0, axis2=1: F.sum(_diagonal(a, offset, axis1, axis2), -1),
    np.dot: _dot,
    np.outer: lambda a, b: F.einsum("i, j -> i j", _ravel(a), _ravel(b)),
    np.einsum: lambda subscripts, *operands, optimize=True: F.einsum(subscripts, *operands),
    # values
    **{
        f: _values(f)
        for f in (
            np.allclose, np.isclose, np.array_equal, np.array_equiv, np.array2string, np.array_repr,
            np.array_str, np.save, np.savez, np.savez_compressed, np.savetxt,
        )
    },
}  # fmt: skip
