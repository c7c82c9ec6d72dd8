"""Rules for products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtypes import int32
from ...core.errors import UsageError
from ...lang.math import functions as F
from ...lang.math.norms import vector_norm
from ...lang.record.operands import emit
from ...lang.value.tensor import Tensor
from .table import aten, cut, number, rule

aten("mm", "bmm", "matmul", "dot", "mv", "vdot")(F.matmul)


@aten("addmm", "addmv", "baddbmm")
def _add_product(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = F.matmul(a, b)
    return _added(x, product, beta, alpha)


def _added(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    y = product if alpha == 1 else product * number(alpha, product.dtype)
    if beta == 0:
        return y
    return y + (x if beta == 1 else x * number(beta, x.dtype))


@aten("addbmm")
def _addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, F.einsum("bij,bjk->ik", a, b), beta, alpha)


@aten("addr")
def _addr(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, F.outer(a, b), beta, alpha)


@aten("linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = F.matmul(x, weight.transpose(0, 1) if weight.ndim > 1 else weight)
    return y if bias is None else y + bias


@aten("outer")
def _outer(x: Tensor, y: Tensor) -> Tensor:
    return F.outer(x, y)


@aten("einsum")
def _einsum(
    equation: str, tensors: Sequence[Tensor], *, path: Sequence[int] | None = None
) -> Tensor:
    return F.einsum(equation, *tensors)


@aten("_cdist_forward", "cdist")
def _cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    apart = x.reshape((*x.shape[:-1], 1, x.shape[-1])) - y.reshape(
        (*y.shape[:-2], 1, *y.shape[-2:])
    )
    return vector_norm(apart, p, -1)


@aten("trace")
def _trace(x: Tensor) -> Tensor:
    return F.sum(F.diagonal(x))


@rule("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def _grouped(
    x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: object = None
) -> Tensor:
    """Runs of the rows x [S, K] times a matrix of weight [E, K, N] each; `offs` [E] are the ends of
    the runs."""
    if bias is not None:
        raise UsageError("_grouped_mm: there is no rule for a bias", fix="add it to the result")
    ends = offs.to(int32)
    first = F.concat([F.full((1,), 0, int32), cut(ends, 0, 0, ends.shape[0] - 1)])
    counts = (ends - first).reshape((1, 1, -1))
    rows, each = x.reshape((1, 1, *x.shape)), weight.reshape((1, *weight.shape))
    out = emit("ragged_dot", rows, each.to(x.dtype), counts, turned=False)
    return out.reshape((x.shape[0], weight.shape[-1]))
