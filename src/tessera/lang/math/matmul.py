"""Products of tensors: `einsum`, and `matmul` with the rules of NumPy.

Inside `ts.autocast` they are computed in the narrow dtype.
"""

from __future__ import annotations

import numpy as np

from ...core.checks import several, shown
from ...core.context import settings
from ...core.dtypes import dtype_of, f32, summed
from ...core.errors import ShapeError, UsageError
from ..record.operands import as_tensor, emit, matched, tensor_like
from ..value.tensor import Like, Tensor, method
from .einsum import plain_form
from .matrices import diagonal
from .shape import broadcast_to, permute


def narrowed(*xs: Tensor) -> tuple[Tensor, ...]:
    """Returns the f32 operands of a product in the narrow dtype of `ts.autocast`, if inside of
    one."""
    to = settings().autocast
    if to is None:
        return xs
    want = dtype_of(to)
    return tuple(x.to(want) if x.dtype is f32 else x for x in xs)


def _same_dtype(name: str, *xs: Tensor) -> tuple[Tensor, ...]:
    xs = narrowed(*xs)
    if len({x.dtype for x in xs}) > 1:
        first = xs[0]
        out = [first]
        for x in xs[1:]:
            first, y = matched(name, first, x)
            out.append(y)
        xs = tuple(x.to(first.dtype) for x in out)
    return xs


def einsum(index: str, *xs: Like) -> Tensor:
    """A sum of products described by an index string, e.g. `einsum("b s d, d n -> b s n", x, w)`.

    The rules are those of `numpy.einsum`; blanks are optional. Without an arrow the result has the
    letters that occur once, in alphabetical order. A letter that occurs twice in one group takes
    the diagonal. `...` stands for any number of dims; these dims, and dims of size 1, broadcast.
    Raises UsageError if `index` is not a string, ShapeError if it does not fit the shapes.
    """
    if not isinstance(index, str):
        raise UsageError(
            f"einsum: {shown(index)} is no index string",
            fix='say which dims go where, e.g. "b s d, d n -> b s n"',
        )
    ts = _same_dtype("einsum", *map(as_tensor, several("einsum", xs)))
    form = plain_form(index, [t.shape for t in ts])
    left, _, right = form.index.partition("->")
    if any(left.count(k) == 1 and k not in right for k in set(left) - set(" ,")):
        ts = tuple(t.to(summed(t.dtype)) for t in ts)  # sums a dim of one argument, as ts.sum
    if "->" in index and not any(form.diagonals) and not any(form.squeezed):
        return emit("contract", *ts, index=index)  # as the user wrote it
    made = []
    for t, pairs, drop in zip(ts, form.diagonals, form.squeezed, strict=True):
        for i, j in pairs:
            d = diagonal(t, 0, i, j)
            t = permute(d, (*range(i), d.ndim - 1, *range(i, d.ndim - 1)))
        made.append(t.reshape([n for i, n in enumerate(t.shape) if i not in drop]))
    return emit("contract", *made, index=form.index)


def matmul(x: Like, y: Like) -> Tensor:
    """The matrix product of `x` [..., m, k] and `y` [..., k, n]; leading dims broadcast.

    The result is [..., m, n]. A vector [k] is multiplied as one row on the left or one column on
    the right, and that dim is dropped from the result. Raises ShapeError if the two sizes k differ,
    if an argument is a scalar, or if the leading dims do not broadcast.
    """
    a, b = _same_dtype("matmul", as_tensor(x), as_tensor(y))
    if not a.ndim or not b.ndim:
        raise ShapeError(
            "matmul: a scalar has no matrix", x=a.type, y=b.type, fix="multiply by it: x * y"
        )
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ShapeError(
            f"matmul: the inner sizes {a.shape[-1]} and {inner} differ",
            x=_made(a),
            y=_made(b),
            fix=f"transpose one of them, or give y a dim -2 of {a.shape[-1]}",
        )
    if b.ndim == 1:
        return emit("contract", a, b, index="... k, k -> ...")
    if a.ndim == 1:
        return emit("contract", a, b, index="k, ... k n -> ... n")
    if b.ndim == 2:
        return emit("contract", a, b, index="... k, k n -> ... n")
    lead = broadcast_lead("matmul", a, b)
    a = broadcast_to(a, (*lead, *a.shape[-2:]))
    b = broadcast_to(b, (*lead, *b.shape[-2:]))
    return emit("contract", a, b, index="... m k, ... k n -> ... m n")


@method("__matmul__")
def _matmul(x: Tensor, y: Like) -> Tensor:
    return matmul(x, tensor_like(y, x, "matmul"))


@method("__rmatmul__")
def _rmatmul(y: Tensor, x: Like) -> Tensor:
    return matmul(tensor_like(x, y, "matmul"), y)


def _made(t: Tensor) -> str:
    loc = t._node.loc if t._node is not None else ""
    return f"{t.type}   made at {loc}" if loc else str(t.type)


def broadcast_lead(name: str, a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Returns the dims before the last two, broadcast together. Raises ShapeError if they do not
    broadcast."""
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ShapeError(
            f"{name}: the leading dims {a.shape[:-2]} and {b.shape[:-2]} do not broadcast",
            x=a.type,
            y=b.type,
            fix="make them equal, or 1",
        ) from None
