"""Matrix entries: triangles (`tril`, `triu`), `diagonal`, `diag`, `trace` and the identity
`eye`."""

from __future__ import annotations

from ...core.checks import sizes
from ...core.declared import Integer
from ...core.dtypes import bool_, dtype_of, f32, int32, summed
from ...core.errors import ShapeError
from ...core.tensor_checks import ranked
from ..record.operands import as_tensor, emit, scalar
from ..value.tensor import Like, Tensor
from .shape import one_dim, permute, reshape, sliced


def _least_rank(name: str, x: Tensor, rank: int) -> None:
    fix = f"give at least {rank} dims; the last two are the matrix"
    ranked(name, "x", x.type, rank, fix, more=True)


def _line(shape: tuple[int, ...], dim: int) -> Tensor:
    return emit("iota", dtype=int32, shape=shape, dim=dim)


def _triangle(name: str, x: Like, k: int, below: bool) -> Tensor:
    t = as_tensor(x)
    _least_rank(name, t, 2)
    m, n = t.shape[-2:]
    # Diagonals beyond the matrix are all alike; the limits fit i32.
    k = max(-m - n, min(m + n, k))
    apart = emit("sub", _line((1, n), 1), _line((m, 1), 0))
    inside = apart <= k if below else apart >= k
    zero = scalar(False if t.dtype is bool_ else 0, t.dtype)
    return emit("where", inside, t, zero)


def tril(x: Like, k: Integer = 0) -> Tensor:
    """The lower triangle of each matrix [..., m, n]; zeros above the `k`th diagonal.

    `k` = 0 is the main diagonal, `k` > 0 lies above it. Raises ShapeError if `x` has fewer than 2
    dims.
    """
    return _triangle("tril", x, k, True)


def triu(x: Like, k: Integer = 0) -> Tensor:
    """The upper triangle of each matrix [..., m, n]; zeros below the `k`th diagonal.

    `k` = 0 is the main diagonal, `k` > 0 lies above it. Raises ShapeError if `x` has fewer than 2
    dims.
    """
    return _triangle("triu", x, k, False)


def eye(rows: Integer, columns: Integer | None = None, dtype: object = f32) -> Tensor:
    """A matrix [rows, columns], square by default, with ones on the diagonal and zeros
    elsewhere."""
    m, *_ = sizes("eye", rows)
    n, *_ = sizes("eye", m if columns is None else columns)
    return emit("eq", _line((m, 1), 0), _line((1, n), 1)).to(dtype_of(dtype))


def diagonal(x: Like, offset: Integer = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The diagonal of each matrix in the dims `dim1` and `dim2`, as the last dim of the result.

    `offset` > 0 takes a diagonal above the main one, < 0 below; it is empty if the matrix does not
    reach so far. Raises ShapeError if `x` has fewer than 2 dims or `dim1` and `dim2` are the same.
    """
    t = as_tensor(x)
    _least_rank("diagonal", t, 2)
    i, j = one_dim("diagonal", t, dim1), one_dim("diagonal", t, dim2)
    m, n = t.shape[i], t.shape[j]
    count = min(m + min(offset, 0), n - max(offset, 0))
    if i == j:
        raise ShapeError(f"diagonal: dims {i} and {j} are one", x=t.type, fix="name two dims")
    other_dims = [d for d in range(t.ndim) if d not in (i, j)]
    order = (*other_dims, i, j)
    t = t if order == tuple(range(t.ndim)) else permute(t, order)
    lead = t.shape[:-2]
    flat = reshape(t, (*lead, m * n))
    if count < 1:
        return sliced(flat, {t.ndim - 2: (0, 0, 1)})
    start = offset if offset >= 0 else -offset * n
    return emit(
        "slice", flat,
        starts=(*(0,) * len(lead), start),
        stops=(*lead, start + (count - 1) * (n + 1) + 1),
        steps=(*(1,) * len(lead), n + 1),
    )  # fmt: skip


def diag(x: Like) -> Tensor:
    """A diagonal matrix [n, n] from a vector [n]; from a matrix [..., m, n], its main diagonal.

    Raises ShapeError if `x` is a scalar.
    """
    t = as_tensor(x)
    if t.ndim != 1:
        return diagonal(t)
    (n,) = t.shape
    zero = scalar(False if t.dtype is bool_ else 0, t.dtype)
    return emit("where", eye(n, dtype=bool_), t, zero)


def trace(x: Like) -> Tensor:
    """The sum of the main diagonal of each matrix [..., m, n]: [...].

    Raises ShapeError if `x` has fewer than 2 dims.
    """
    t = as_tensor(x)
    d = diagonal(t.to(summed(t.dtype)))
    return emit("sum", d, dims=(d.ndim - 1,))


__all__ = ["diag", "diagonal", "eye", "trace", "tril", "triu"]
