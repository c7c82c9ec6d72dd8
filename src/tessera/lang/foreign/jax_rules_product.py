"""Rules for JAX's products, convolutions and matrices."""

from __future__ import annotations

from typing import Any

from ...core.dtypes import promote
from ...core.errors import UsageError
from ..autodiff import linalg
from ..math import functions as F
from ..math.matrices import eye
from ..record.operands import emit
from ..value.tensor import Tensor
from .jax_rules import inverse, permuted, rule, wanted


@rule("dot_general")
def _product(
    x: Tensor, y: Tensor, dimension_numbers: Any, preferred_element_type: Any = None, **_: Any
) -> Tensor:
    (cx, cy), (bx, by) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    of_x = {d: next(letters) for d in range(x.ndim)}
    of_y = {d: of_x[e] for d, e in zip((*cy, *by), (*cx, *bx), strict=True)}
    of_y |= {d: next(letters) for d in range(y.ndim) if d not in of_y}
    out = [of_x[d] for d in bx]
    out += [of_x[d] for d in range(x.ndim) if d not in (*cx, *bx)]
    out += [of_y[d] for d in range(y.ndim) if d not in (*cy, *by)]
    left, right = ("".join(s[d] for d in sorted(s)) for s in (of_x, of_y))
    dtype = promote(x.dtype, y.dtype, "dot_general")
    to = dtype if preferred_element_type is None else wanted(preferred_element_type)
    if not dtype.is_float:  # exact sums of integers, in the dtype of the result
        dtype = to
    x, y = x.to(dtype), y.to(dtype)
    how = {"dtype": to} if to is not dtype else {}
    return emit("contract", x, y, index=f"{left},{right}->{''.join(out)}", **how)


@rule("conv_general_dilated")
def _convolution(
    x: Tensor, w: Tensor, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    dimension_numbers: Any, feature_group_count: int = 1, batch_group_count: int = 1,
    preferred_element_type: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """x [batch, channels, *sizes] by w [outs, ins, *sizes], after the dims are in that order."""
    n = dimension_numbers
    x, w = permuted(x, n.lhs_spec), permuted(w, n.rhs_spec)
    rank, outs = x.ndim - 2, w.shape[0]
    strides, pads = list(window_strides), [tuple(map(int, p)) for p in padding]
    spread, apart = list(lhs_dilation or (1,) * rank), list(rhs_dilation or (1,) * rank)
    if not rank:  # a product of matrices: one spatial dim of size 1
        x, w = x.reshape(*x.shape, 1), w.reshape(*w.shape, 1)
        strides, pads, spread, apart = [1], [(0, 0)], [1], [1]
    count = feature_group_count * batch_group_count
    rows, channels = x.shape[:2]
    if batch_group_count > 1:  # each part of the batch has its own outputs
        x = x.reshape(batch_group_count, rows // batch_group_count, *x.shape[1:])
        x = x.permute(1, 0, *range(2, x.ndim))
    else:
        x = x.reshape(rows, count, channels // count, *x.shape[2:])
    w = w.reshape(count, outs // count, *w.shape[1:])
    y = emit("conv", x, w, stride=tuple(strides), pads=tuple(pads), dilation=tuple(apart),
             spread=tuple(spread))  # fmt: skip
    y = y.reshape(y.shape[0], outs, *y.shape[3:])
    y = permuted(y if rank else y.squeeze(-1), inverse(n.out_spec))
    return y if preferred_element_type is None else y.to(wanted(preferred_element_type))


# -- matrices -------------------------------------------------------------------------------------
rule("cholesky")(lambda a, **_: linalg.cholesky(a))


@rule("triangular_solve")
def _triangular_solve(
    a: Tensor, b: Tensor, left_side: bool, lower: bool, transpose_a: bool, unit_diagonal: bool,
    **_: Any,
) -> Tensor:  # fmt: skip
    """The X of op(A) X = B, or of X op(A) = B."""
    if unit_diagonal:
        line = eye(a.shape[-1]) > 0
        a = F.where(line, F.full((), 1, a.dtype), a)
    if bool(transpose_a) == left_side:
        a, lower = F.swap(a, -2, -1), not lower
    if left_side:
        return linalg.solve_triangular(a, b, lower=lower)
    return F.swap(linalg.solve_triangular(a, F.swap(b, -2, -1), lower=lower), -2, -1)


@rule("eigh")
def _eigh(a: Tensor, lower: bool = True, subset_by_index: Any = None, **_: Any) -> list[Tensor]:
    """(Vectors, values); the other triangle is not read."""
    if subset_by_index not in (None, (0, a.shape[-1])):
        raise UsageError("eigh of JAX has no rule for some of the values", fix="take all of them")
    half = F.tril(a) if lower else F.triu(a)
    line = eye(a.shape[-1]) > 0
    values, vectors = linalg.eigh(
        half + F.where(line, F.full((), 0, a.dtype), F.swap(half, -2, -1))
    )
    return [vectors, values]


@rule("qr")
def _qr(a: Tensor, full_matrices: bool = False, pivoting: bool = False, **_: Any) -> list[Tensor]:
    if (full_matrices and a.shape[-2] > a.shape[-1]) or pivoting:
        raise UsageError("qr of JAX has a rule for the reduced form alone", fix="mode='reduced'")
    return list(linalg.qr(a))


@rule("svd")
def _svd(a: Tensor, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> list[Tensor]:
    """(Values, u, vᵀ)."""
    if compute_uv and full_matrices and a.shape[-2] != a.shape[-1]:
        raise UsageError("svd of JAX has a rule for the reduced form", fix="full_matrices=False")
    u, s, v = linalg.svd(a)
    return [s, u, v] if compute_uv else [s]
