"""Matrix factorizations and solves over the last two dims; each matrix is whole on one device.

Leading dims are a batch and may be split. Gradients as in Giles (2008), "Collected matrix
derivative results", and for qr and svd as in Walter & Lehmann (2010) and Townsend (2016). Factors
that are unique only up to signs have the same signs on every backend: R has a positive diagonal; in
an eigenvector (or left singular vector), the first element of about the largest size is positive. A
matrix without factors gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtypes import int32
from ..core.errors import ShapeError
from ..core.layout import TensorType
from ..core.tensor_checks import one_dtype
from .batch import last_dims
from .elementwise import const, need
from .op import Array, Attrs, Build, Call, Grad, Inferred, Invariance, Op, Scratch, define
from .trailing_dims import leading, propagate_heads

Shape = tuple[int, ...]
# From the matrices' shapes: the trailing dims of the results, or None if the shapes do not fit.
Tails = Callable[..., Sequence[Shape] | None]


def _op(
    name: str,
    tails: Tails,
    needs: str,
    grad: Grad,
    work: Callable[..., float],
    attrs: str = "",
    invariance: Invariance = "library",
    scratch: Scratch = lambda ins, outs, attrs: ins[0].local_bytes,
) -> Op:
    """Defines an op on matrices; `needs` describes the shapes for errors, `work` gives the FLOPs of
    one matrix. The default `scratch` is a copy of the first argument."""

    def rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
        need(name, ins, ("float",))
        one_dtype(name, ins)
        fit = all(t.rank > 1 and t.shape[:-2] == ins[0].shape[:-2] for t in ins)
        found = tails(*(t.shape[-2:] for t in ins)) if fit else None
        if found is None:
            raise ShapeError(
                f"{name}: needs {needs}",
                rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
                fix="matrices are the last two dims, the dims before them are equal",
            )
        outs = [(ins[0].dtype, tail) for tail in found]
        return propagate_heads(name, leading([t.rank - 2 for t in ins]), ins, outs)

    def flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
        count = math.prod(ins[0].shape[:-2])
        return count * max(1, int(work(*(t.shape[-2:] for t in ins))))

    def run(c: Call, *xs: Array) -> Array:
        return getattr(c.xp, name)(*xs, **c.attrs)

    return define(
        Op(
            name,
            rule,
            run,
            grad,
            flops=flops,
            attrs=attrs,
            invariance=invariance,
            scratch=scratch,
            batch=last_dims,
        )
    )


# -- helpers for gradients ------------------------------------------------------------------------
def _mm(b: Build, x: Any, y: Any) -> Any:
    return b("contract", x, y, index="... i j, ... j k -> ... i k")


def _t(b: Build, x: Any) -> Any:
    r = x.type.rank
    return b("transpose", x, perm=(*range(r - 2), r - 1, r - 2))


def _picked(b: Build, x: Any, compare: str) -> Any:
    """`x` where row `compare` column holds, zero elsewhere."""
    row, col = (b("iota", dtype=int32, shape=x.type.shape[-2:], dim=d) for d in (0, 1))
    return b("where", b(compare, row, col), x, const(b, x, 0.0))


def _half(b: Build, x: Any) -> Any:
    return b("mul", x, const(b, x, 0.5))


def _symmetric(b: Build, x: Any) -> Any:
    return _half(b, b("add", x, _t(b, x)))


def _skew(b: Build, x: Any) -> Any:
    return b("sub", x, _t(b, x))


def _across(b: Build, v: Any) -> Any:
    """A vector [..., n] as a row [..., 1, n]."""
    return b("reshape", v, shape=(*v.type.shape[:-1], 1, v.type.shape[-1]))


def _down(b: Build, v: Any) -> Any:
    return b("reshape", v, shape=(*v.type.shape, 1))


def _diagonal(b: Build, v: Any) -> Any:
    """A vector [..., n] as the diagonal of [..., n, n]."""
    n = v.type.shape[-1]
    return _picked(b, b("broadcast_to", _across(b, v), shape=(*v.type.shape, n)), "eq")


def _gaps(b: Build, v: Any) -> Any:
    """1 / (v_j - v_i) in row i, column j; zero where i = j."""
    apart = b("sub", _across(b, v), _down(b, v))
    one = b("full", dtype=v.type.dtype, shape=(v.type.shape[-1],) * 2, value=1.0)
    return b("div", _picked(b, one, "ne"), b("add", apart, _picked(b, one, "eq")))


def _sum(b: Build, parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = b("add", total, part)
    return total


def _solved(b: Build, a: Any, y: Any, lower: bool) -> Any:
    return b("triangular_solve", a, y, lower=lower)


# -- solves ---------------------------------------------------------------------------------------
def _square(a: Shape, y: Shape | None = None) -> Sequence[Shape] | None:
    return [y or a] if a[0] == a[1] and (y is None or y[0] == a[0]) else None


def _triangular_solve_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    a, lower = n.args[0], n.attrs["lower"]
    of_y = _solved(b, _t(b, a), g, not lower)
    of_a = b("neg", _mm(b, of_y, _t(b, n)))
    return [_picked(b, of_a, "ge" if lower else "le"), of_y]


# a⁻¹ y for a triangular a; the other triangle is not read.
triangular_solve = _op(
    "triangular_solve",
    _square,
    "a square matrix, and as many rows beside it",
    _triangular_solve_grad,
    lambda a, y: a[0] ** 2 * y[1],
    attrs="lower",
)


def _solve_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    of_y = b("solve", _t(b, n.args[0]), g)
    return [b("neg", _mm(b, of_y, _t(b, n))), of_y]


solve = _op(
    "solve",
    _square,
    "a square matrix, and as many rows beside it",
    _solve_grad,
    lambda a, y: 2 * a[0] ** 3 / 3 + 2 * a[0] ** 2 * y[1],
)


def _slogdet_grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    if gs[1] is None:
        return [None]
    a, g = n.args[0], gs[1]
    lead, size = g.type.shape, a.type.shape[-1]
    rows = b("broadcast_to", b("reshape", g, shape=(*lead, 1)), shape=(*lead, size))
    return [b("solve", _t(b, a), _diagonal(b, rows))]


# The sign of the determinant and the logarithm of its absolute value.
slogdet = _op(
    "slogdet",
    lambda a: [(), ()] if a[0] == a[1] else None,
    "square matrices",
    _slogdet_grad,
    lambda a: 2 * a[0] ** 3 / 3,
    invariance="sums",
)


# -- factors --------------------------------------------------------------------------------------
def _cholesky_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    inner = _mm(b, _t(b, n), g)
    half = b("sub", _picked(b, inner, "ge"), _half(b, _picked(b, inner, "eq")))
    up = _t(b, n)
    once = _solved(b, up, half, False)
    return [_symmetric(b, _solved(b, up, _t(b, once), False))]


# L with L Lᵀ the mean of a and aᵀ.
cholesky = _op("cholesky", _square, "square matrices", _cholesky_grad, lambda a: a[0] ** 3 / 3)


def _eigh_grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    values, vectors = (b("item", n, index=i) for i in (0, 1))
    parts = [] if gs[0] is None else [_diagonal(b, gs[0])]
    if gs[1] is not None:
        parts.append(b("mul", _gaps(b, values), _mm(b, _t(b, vectors), gs[1])))
    inner = _sum(b, parts)
    return [_symmetric(b, _mm(b, vectors, _mm(b, inner, _t(b, vectors))))]


# Eigenvalues, ascending, and eigenvectors, in columns, of the mean of a and aᵀ.
eigh = _op(
    "eigh",
    lambda a: [(a[0],), a] if a[0] == a[1] else None,
    "square matrices",
    _eigh_grad,
    lambda a: 9 * a[0] ** 3,
    scratch=lambda ins, outs, attrs: 0,
)


def _qr_grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    q, r = (b("item", n, index=i) for i in (0, 1))
    parts = [] if gs[1] is None else [_mm(b, r, _t(b, gs[1]))]
    if gs[0] is not None:
        parts.append(b("neg", _mm(b, _t(b, gs[0]), q)))
    m = _sum(b, parts)
    both = b("add", _picked(b, m, "ge"), _t(b, _picked(b, m, "gt")))
    of_q = _mm(b, q, both)
    of_q = of_q if gs[0] is None else b("add", gs[0], of_q)
    return [_t(b, _solved(b, r, _t(b, of_q), False))]


# Q [m, n] with orthonormal columns and an upper triangular R [n, n], for m >= n.
qr = _op(
    "qr",
    lambda a: [a, (a[1], a[1])] if a[0] >= a[1] else None,
    "at least as many rows as columns",
    _qr_grad,
    lambda a: 4 * a[0] * a[1] ** 2 - 4 * a[1] ** 3 / 3,
)


def _svd_grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    """The gradient of A = U S Vᵀ (Townsend 2016): within the span of the factors by the skew parts
    of Uᵀ dU and Vᵀ dV, and outside of it if A is not square. It does not exist for equal singular
    values."""
    u, s, vt = (b("item", n, index=i) for i in (0, 1, 2))
    a, v = n.args[0], _t(b, vt)
    of_u, of_s, of_v = gs[0], gs[1], None if gs[2] is None else _t(b, gs[2])
    gaps = _gaps(b, b("mul", s, s))
    inner: list[Any] = [] if of_s is None else [_diagonal(b, of_s)]
    rest: list[Any] = []
    k = s.type.shape[-1]
    if of_u is not None:
        turn = b("mul", gaps, _skew(b, _mm(b, _t(b, u), of_u)))
        inner.append(b("mul", turn, _across(b, s)))
        if a.type.shape[-2] > k:
            out = b("sub", of_u, _mm(b, u, _mm(b, _t(b, u), of_u)))
            rest.append(_mm(b, b("div", out, _across(b, s)), vt))
    if of_v is not None:
        turn = b("mul", gaps, _skew(b, _mm(b, vt, of_v)))
        inner.append(b("mul", _down(b, s), turn))
        if a.type.shape[-1] > k:
            out = b("sub", of_v, _mm(b, v, _mm(b, vt, of_v)))
            rest.append(_mm(b, u, _t(b, b("div", out, _across(b, s)))))
    total = _mm(b, u, _mm(b, _sum(b, inner), vt))
    return [_sum(b, [total, *rest])]


def _svd_tails(a: Shape) -> Sequence[Shape]:
    k = min(a)
    return [(a[0], k), (k,), (k, a[1])]


# U [m, k], singular values [k], descending, and Vᵀ [k, n], with k the smaller of m and n.
svd = _op(
    "svd", _svd_tails, "matrices", _svd_grad, lambda a: 4 * max(a) * min(a) ** 2 + 8 * min(a) ** 3
)
