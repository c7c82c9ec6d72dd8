"""Norms of vectors and matrices, for `ts.linalg`."""

from __future__ import annotations

import math

from ...core.checks import number, shown, unfit
from ...core.declared import Flag
from ...core.dtypes import f32
from ...core.errors import ShapeError
from ...core.value_checks import is_whole
from ..record.operands import as_tensor, emit_many
from ..value.tensor import Like, Tensor
from . import functions as F
from .shape import Dims, dims_of

Order = float | str | None
OF_MATRICES = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)


def norm(x: Like, ord: Order = None, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The norm of a vector or of matrices, as in `torch.linalg.norm`.

    Without `ord`: the root of the sum of squares along `dim` (None: all dims). With an `ord`, one
    `dim` means the `vector_norm`, two dims the `matrix_norm`; `dim` None is all dims of a vector or
    of a matrix. Raises ShapeError if `x` has no such dim, or if an `ord` is given with other than
    one or two dims, and UsageError for an unknown `ord`.

    >>> import tessera as ts
    >>> a = ts.tensor([[3.0, 0.0], [4.0, 0.0]])
    >>> ts.linalg.norm(a).item(), ts.linalg.norm(a, 1).item(), ts.linalg.norm(a, 1, dim=1).numpy()
    (5.0, 7.0, array([3., 4.], dtype=float32))
    """
    t = _floats(x)
    dim_count = t.ndim if dim is None else 1 if is_whole(dim) else len(dims_of("norm", t, dim))
    if ord is None:
        return vector_norm(t, 2, dim, keepdims)
    if dim_count > 2 or (dim_count == 0 and t.ndim):
        raise ShapeError(
            f"norm: ord={shown(ord)} is of one dim, a vector, or of two, a matrix; not of "
            f"{dim_count}",
            x=t.type,
            fix="name one or two dims, or use ts.linalg.vector_norm, which takes any number",
        )
    if dim_count == 2:
        return matrix_norm(t, ord, (0, 1) if dim is None else dim, keepdims)
    return vector_norm(t, ord, dim, keepdims)


def vector_norm(x: Like, ord: Order = 2, dim: Dims = None, keepdims: Flag = False) -> Tensor:
    """The `ord`-norm `(sum of |x|**ord)**(1/ord)` of the elements along `dim` (None: all dims).

    `ord` infinity is the largest absolute value, minus infinity the least, 0 the number of nonzero
    elements. Computed in f32. The gradient at zero is zero. Raises UsageError if `ord` is not a
    number, ShapeError if `x` has no such dim.
    """
    t = _floats(x)
    if isinstance(ord, str) or (isinstance(ord, float) and math.isnan(ord)):
        raise unfit("norm", "ord", ord, "give a number, or dim=(a, b) for a norm of matrices")
    p = float(number("norm", "ord", ord))
    size = F.abs(t)
    if math.isinf(p):
        return F.max(size, dim, keepdims) if p > 0 else F.min(size, dim, keepdims)
    return _by_power(F.wide(size), p, dim, keepdims).to(t.dtype.real)


def _by_power(size: Tensor, p: float, dim: Dims, keepdims: bool) -> Tensor:
    if p == 0:
        return F.sum(F.where(F.isnan(size), 1.0, F.sign(size)), dim, keepdims)
    if p == 1:
        return F.sum(size, dim, keepdims)
    # The root has no finite slope at 0, so there its argument is 1. With p below 0 one zero
    # makes the norm zero.
    none = size == 0.0
    powers = size * size if p == 2 else F.where(none, 0.0, F.where(none, 1.0, size) ** p)
    total = F.sum(powers, dim, keepdims)
    zero = total == 0.0 if p > 0 else F.any(none, dim, keepdims)
    safe = F.where(zero, 1.0, total)
    return F.where(zero, 0.0, F.sqrt(safe) if p == 2 else safe ** (1.0 / p))


def matrix_norm(
    a: Like, ord: Order = "fro", dim: Dims = (-2, -1), keepdims: Flag = False
) -> Tensor:
    """The norm of the matrices whose rows and columns are counted by the two dims `dim`.

    | `ord` | is |
    |---|---|
    | "fro" | the root of the sum of squares (Frobenius) |
    | "nuc" | the sum of the singular values |
    | 2, -2 | the largest, the least singular value: the spectral norm |
    | 1, -1 | the largest, the least sum of the absolute values of a column |
    | infinity, -infinity | the same of a row |

    The gradient of a singular value exists where it differs from the others. Raises UsageError for
    any other `ord`, ShapeError if `dim` is not two different dims of `a`.
    """
    t = _floats(a)
    if not isinstance(ord, (int, float, str)) or isinstance(ord, bool) or ord not in OF_MATRICES:
        words = 'use "fro", "nuc", 1, -1, 2, -2, infinity or -infinity'
        raise unfit("matrix_norm", "ord", ord, words)
    dims = tuple(dim) if isinstance(dim, (tuple, list, range)) else ()
    two = len(dims) == 2 and dims[0] != dims[1]
    if not two or len(dims_of("matrix_norm", t, dims)) != 2:
        raise ShapeError(
            f"matrix_norm: {shown(dim)} does not name the rows and the columns",
            a=t.type,
            fix="give two different dims of it, e.g. dim=(-2, -1)",
        )
    rows, columns = dims = tuple(d % t.ndim for d in dims)
    if ord == "fro":
        return vector_norm(t, 2, (rows, columns), keepdims)
    if not t.shape[rows] * t.shape[columns] and (ord == "nuc" or ord > 0):  # type: ignore[operator]
        summed = F.sum(t, (rows, columns), True)
    elif ord in ("nuc", 2, -2):
        other_dims = [d for d in range(t.ndim) if d not in (rows, columns)]
        _, s, _ = emit_many("svd", t.permute(*other_dims, rows, columns))
        summed = F.sum(s, -1) if ord == "nuc" else F.max(s, -1) if ord == 2 else F.min(s, -1)
    else:
        along, over = (rows, columns) if abs(ord) == 1 else (columns, rows)  # type: ignore[arg-type]
        sums = F.sum(F.abs(F.wide(t)), along, True)
        summed = (F.max if ord > 0 else F.min)(sums, over, True).to(t.dtype.real)  # type: ignore[operator]
    kept_shape = [n if d not in (rows, columns) else 1 for d, n in enumerate(t.shape)]
    return summed.reshape(
        kept_shape if keepdims else [n for d, n in enumerate(kept_shape) if d not in dims]
    )


def _floats(x: Like) -> Tensor:
    t = as_tensor(x)
    return t if t.dtype.is_float else t.to(f32)
