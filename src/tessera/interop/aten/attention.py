"""Rules for softmax and attention."""

from __future__ import annotations

import math
from typing import Any

from ...core.dtypes import DType, bool_, f32
from ...lang.math import functions as F
from ...lang.value.tensor import Tensor
from ...nn import dot_product_attention as D
from ...nn import functional as N
from .table import as_float, aten, in_dim, line, of

HIDDEN = -1e30


@aten("_softmax", "softmax.int")
def _softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    found: Tensor = in_dim(N.softmax, as_float(_cast(x, dtype)), dim)
    return found


@aten("_log_softmax", "log_softmax.int")
def _log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    found: Tensor = in_dim(N.log_softmax, as_float(_cast(x, dtype)), dim)
    return found


def _cast(x: Tensor, dtype: DType | bool | None) -> Tensor:
    """`x` in `dtype`; ops that begin with _ have the flag `half_to_float` there."""
    if isinstance(dtype, bool):
        return x.to(f32) if dtype else x
    return of(x, dtype)


@aten("_safe_softmax")
def _safe_softmax(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """The softmax; rows of -inf alone are zeros."""
    t = of(x, dtype)
    none = F.all(t == -math.inf, dim, True)
    return F.where(none, 0.0, N.softmax(F.where(none, 0.0, t), dim))


@aten("scaled_dot_product_attention")
def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if query.ndim == 2:
        q, k, v = (t.reshape((1, *t.shape)) for t in (query, key, value))
        return _attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    rows, columns = query.shape[-2], key.shape[-2]
    if is_causal and rows != columns:  # PyTorch's first query sees the first key alone
        attn_mask, is_causal = line(rows).reshape((rows, 1)) >= line(columns), False
    if not dropout_p:
        return D.attention(query, key, value, is_causal, scale, mask=attn_mask)
    return _with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    shared = q.shape[-3] // k.shape[-3]
    if shared > 1:
        k, v = (F.repeat_interleave(t, shared, -3) for t in (k, v))
    scores = F.matmul(q, k.transpose(-2, -1)).to(f32)
    scores = scores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale))
    seen = []
    if causal:
        n = q.shape[-2]
        seen.append(line(n).reshape((n, 1)) >= line(n))
    if mask is not None:
        seen += [mask] if mask.dtype is bool_ else []
        scores = scores if mask.dtype is bool_ else scores + mask.to(f32)
    for sees in seen:
        scores = F.where(sees, scores, HIDDEN)
    shares = N.softmax(scores)
    for sees in seen:
        shares = F.where(sees, shares, 0.0)
    return F.matmul(N.dropout(shares.to(v.dtype), p), v)
