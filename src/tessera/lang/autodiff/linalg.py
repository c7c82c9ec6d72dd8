"""`ts.linalg`: solvers and factorizations of matrices, the last two dims; other dims are a batch.

The batch may be split over the mesh; each matrix is whole on its device. Narrow floats are computed
in f32. A singular matrix, or one that is not positive definite, gives NaN or infinities, because a
program cannot stop halfway.

>>> import tessera as ts
>>> a = ts.tensor([[4.0, 2.0], [2.0, 5.0]])
>>> ts.linalg.cholesky(a).numpy().tolist()
[[2.0, 0.0], [1.0, 2.0]]
>>> round(ts.linalg.det(a).item(), 4)
16.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...core.declared import Flag
from ...core.dtypes import f32
from ...core.errors import ShapeError
from ...core.public import public
from ..math import functions as F
from ..math.matrices import diagonal, eye, trace, tril
from ..math.norms import matrix_norm, norm, vector_norm
from ..math.shape import broadcast_to
from ..record.operands import as_tensor, emit, emit_many, matched
from ..value.tensor import Like, Tensor
from .custom import custom_gradient


def _matrices(name: str, x: Like, square: bool = True) -> Tensor:
    t = as_tensor(x)
    t = t if t.dtype.is_float else t.to(f32)
    if t.ndim < 2 or (square and t.shape[-2] != t.shape[-1]):
        raise ShapeError(
            f"{name}: needs {'square ' if square else ''}matrices in the last two dims",
            x=t.type,
            fix=f"give [..., {'n, n' if square else 'm, n'}]",
        )
    return t


def _pair(name: str, x: Like, y: Like) -> tuple[Tensor, Tensor, bool]:
    """Returns (square matrices, right-hand sides, whether `y` was a vector), with the batches
    broadcast together. Raises ShapeError if the rows differ."""
    a = _matrices(name, x)
    a, b = matched(name, a, y)
    flat = b.ndim == 1
    b = b.reshape(-1, 1) if flat else b
    if b.ndim < 2 or b.shape[-2] != a.shape[-1]:
        raise ShapeError(
            f"{name}: the right side has not as many rows as the matrix",
            a=a.type,
            b=b.type,
            fix="give b [..., n, k], or one vector [n]",
        )
    lead = F.broadcast_lead(name, a, b)
    a = broadcast_to(a, (*lead, *a.shape[-2:]))
    return a, broadcast_to(b, (*lead, *b.shape[-2:])), flat


def cholesky(a: Like) -> Tensor:
    """The lower triangular L [..., n, n] with `L @ Lᵀ = a`, for symmetric positive definite `a`.

    If `a` is not symmetric, the mean of `a` and its transpose is used. Raises ShapeError if the
    matrices are not square.
    """
    return emit("cholesky", _matrices("cholesky", a))


def solve(a: Like, b: Like) -> Tensor:
    """The solution x of `a @ x = b`: a [..., n, n], b [..., n, k] or one vector [n].

    Leading dims broadcast. Raises ShapeError if `a` is not square or `b` does not have n rows.
    """
    m, y, flat = _pair("solve", a, b)
    x = emit("solve", m, y)
    return x.reshape(x.shape[:-1]) if flat else x


def solve_triangular(a: Like, b: Like, lower: Flag = True) -> Tensor:
    """The solution x of `a @ x = b` for a triangular `a` [..., n, n]; b is as in `solve`.

    `lower` says which triangle of `a` is read; the other one is ignored. Raises ShapeError if `a`
    is not square or `b` does not have n rows.
    """
    m, y, flat = _pair("solve_triangular", a, b)
    x = emit("triangular_solve", m, y, lower=lower)
    return x.reshape(x.shape[:-1]) if flat else x


def inv(a: Like) -> Tensor:
    """The inverse of each matrix [..., n, n]. To solve equations, `solve` is faster and more
    accurate.

    Raises ShapeError if the matrices are not square.
    """
    m = _matrices("inv", a)
    return solve(m, eye(m.shape[-1], dtype=m.dtype))


def slogdet(a: Like) -> tuple[Tensor, Tensor]:
    """(sign, logarithm of the absolute value) of the determinant of each matrix [..., n, n].

    The determinant itself may be too large or too small for a float. Raises ShapeError if the
    matrices are not square.
    """
    sign, size = emit_many("slogdet", _matrices("slogdet", a))
    return sign, size


def det(a: Like) -> Tensor:
    """The determinant of each matrix [..., n, n]. Its gradient is the matrix of cofactors, also for
    singular matrices, as in JAX; a second gradient of a singular matrix needs distinct singular
    values. Raises ShapeError if the matrices are not square."""
    return _det(_matrices("det", a))


@custom_gradient
def _det(a: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    value = _product(*slogdet(a))
    singular = (value == 0).reshape(*value.shape, 1, 1)

    def backward(g: Tensor) -> Tensor:
        # The cofactors of a regular matrix come from its inverse and determinant, those of a
        # singular one from its singular values. An unused formula gets a safe diagonal matrix.
        n = a.shape[-1]
        one = eye(n, dtype=a.dtype)
        full = F.where(singular, one, a)
        regular = _product(*slogdet(full)).reshape(singular.shape) * inv(full).transpose(-2, -1)
        u, s, vt = svd(F.where(singular, a, one * (F.arange(n) + 1.0).to(a.dtype)))
        others = F.prod(F.where(one != 0, 1.0, s.reshape(*s.shape[:-1], 1, n)), -1)
        sign = slogdet(u @ vt)[0].reshape(singular.shape)
        lacking = sign * (u * others.reshape(*s.shape[:-1], 1, n) @ vt)
        return g.reshape(singular.shape) * F.where(singular, lacking, regular)

    return value, backward


def _product(sign: Tensor, size: Tensor) -> Tensor:
    return F.stop_gradient(sign) * F.exp(size)


def eigh(a: Like) -> tuple[Tensor, Tensor]:
    """(Eigenvalues [..., n], ascending; eigenvectors [..., n, n] as columns) of symmetric matrices.

    Only the lower triangle is read, as in NumPy and PyTorch; the gradient is that of a symmetric
    matrix, in both triangles. The gradient of the eigenvectors exists only if all eigenvalues
    differ. Raises ShapeError if the matrices are not square.
    """
    m = _matrices("eigh", a)
    mirrored = tril(m) + tril(m, -1).transpose(-2, -1)
    values, vectors = emit_many("eigh", F.straight_through(mirrored, m))
    return values, vectors


def qr(a: Like) -> tuple[Tensor, Tensor]:
    """(Q [..., m, k], R [..., k, n]) with `Q @ R = a` and k = min(m, n).

    The columns of Q are orthonormal; R is upper triangular with a positive diagonal. Raises
    ShapeError if `a` has fewer than 2 dims.
    """
    t = _matrices("qr", a, square=False)
    m, n = t.shape[-2:]
    q, r = emit_many("qr", t[..., : min(m, n)])
    # The other columns of `a` are combinations of the columns of Q.
    return q, r if n <= m else F.concat([r, q.transpose(-2, -1) @ t[..., m:]], -1)


def svd(a: Like) -> tuple[Tensor, Tensor, Tensor]:
    """(U [..., m, k], singular values [..., k] in descending order, Vᵀ [..., k, n]), k = min(m, n).

    The gradients of U and V exist only if all singular values differ. Raises ShapeError if `a` has
    fewer than 2 dims.
    """
    u, s, vt = emit_many("svd", _matrices("svd", a, square=False))
    return u, s, vt


__all__ = [
    "cholesky", "det", "diagonal", "eigh", "inv", "matrix_norm", "norm", "qr", "slogdet", "solve",
    "solve_triangular", "svd", "trace", "vector_norm",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("ts.linalg", globals())
