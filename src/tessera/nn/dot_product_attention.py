"""Scaled dot-product attention, with causality and masks.

A key is hidden by False in a bool mask, by a number of at most -1e29 in a float mask (such as minus
infinity), or by causality. A query that sees no key gives zeros, as in PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.declared import Flag, Positive, Real
from ..core.dtypes import adds_up_in, bool_, f32
from ..core.errors import DTypeError, ShapeError
from ..core.layout import TensorType
from ..core.tensor_checks import shaped
from ..lang.math import functions as F
from ..lang.math.elementwise import as_float
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Like, Tensor
from .functional import soft_cap, softmax

# The score of a hidden key, and the largest float-mask value that hides a key: a score added to so
# large a number is lost in rounding.
HIDDEN, LEAST = -1e30, -1e29


def attention(
    q: Like,
    k: Like,
    v: Like,
    causal: Flag = False,
    scale: Real | None = None,
    bias: Like | None = None,
    mask: Like | None = None,
    cap: Positive | None = None,
) -> Tensor:
    """Scaled dot-product attention of q [..., H, S, D], k [..., G, T, D] and v [..., G, T, E].

    The result is [..., H, S, E]; all scores [..., H, S, T] exist at once. H is a multiple of G:
    each group of H/G query heads shares one head of keys and values (grouped-query attention,
    Ainslie et al. 2023). `scale` is by default 1/sqrt(D). `cap` bounds the scores: they are
    `cap * tanh(scores / cap)`. `bias` [H, T] or [..., H, T] is added to the scores of each head by
    key, for example ALiBi's. `mask` broadcasts to [..., H, S, T]: a bool mask is True where a query
    sees a key, a float mask is added to the scores. A query that sees no key gives zeros, as in
    PyTorch. With `causal` the last query sees all keys and each query before it one key less;
    queries are computed in chunks, each with the keys that it may see.

    Raises ShapeError if the shapes, `bias` or `mask` do not fit; DTypeError if `mask` is of
    integers.
    """
    q, k, v = F.narrowed(*(as_float("attention", t) for t in (q, k, v)))
    check_heads("attention", q, k, v)
    *lead, heads, seq, d = q.shape
    groups, keys = k.shape[-3:-1]
    shared = heads // groups
    by = _lead(lead) + ("gh" if shared > 1 else "g")
    to = _lead(lead) + "g"
    grouped = q.reshape(*lead, groups, shared, seq, d) if shared > 1 else q
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    narrow = q.dtype is k.dtype and q.dtype.bytes < f32.bytes
    grouped = grouped if narrow else grouped * scale
    if bias is not None:
        bias = as_tensor(bias)
        fits_bias("attention", bias.type, (*lead, heads, keys), seq, q=q.type, k=k.type)
        by_group = (groups, shared) if shared > 1 else (groups,)
        added = bias.reshape(*bias.shape[:-2], *by_group, 1, keys)
    scores, types = (*q.shape[:-1], keys), {"q": q.type, "k": k.type}
    seen_by = [] if mask is None else [mask_by_group("attention", mask, scores, shared, **types)]
    outs = []
    for start, stop in causal_chunks(seq) if causal and keys >= seq else [(0, seq)]:
        visible_keys = keys - seq + stop if causal else keys
        index, rows = f"{by}sd,{to}td->{by}st", grouped[..., start:stop, :]
        if narrow:  # scores are rounded nowhere between the product and the softmax
            part = emit("contract", rows, k[..., :visible_keys, :], index=index, dtype=f32) * scale
        else:
            part = F.einsum(index, rows, k[..., :visible_keys, :])
            part = part.to(adds_up_in(part.dtype))
        part = soft_cap(part, cap)
        if bias is not None:
            part = part + added[..., :visible_keys]
        visible = []
        for m in seen_by:
            m = m[..., start:stop, :] if m.shape[-2] > 1 else m
            m = m[..., :visible_keys] if m.shape[-1] > 1 else m
            if m.dtype is not bool_:
                part = part + F.maximum(m.to(part.dtype), LEAST)
            visible.append(m if m.dtype is bool_ else ~(m <= LEAST))
        if causal:
            last = F.arange(stop - start).reshape(stop - start, 1) + (start + keys - seq)
            visible.append(F.arange(visible_keys).reshape(1, visible_keys) <= last)
        for sees in visible:
            part = F.where(sees, part, HIDDEN)
        p = softmax(part)
        if seen_by or (causal and keys < seq):  # some queries may see no key
            for sees in visible:
                p = F.where(sees, p, 0.0)
        p = p.to(v.dtype)
        outs.append(F.einsum(f"{by}st,{to}te->{by}se", p, v[..., :visible_keys, :]))
    return F.concat(outs, -2).reshape(*lead, heads, seq, v.shape[-1])


def fits_bias(
    name: str, bias: TensorType, sizes: tuple[int, ...], queries: int, **operands: TensorType
) -> None:
    """Raises ShapeError unless `bias` is [H, T] or has the shape `sizes`, [..., H, T]."""
    if bias.rank > 2 and bias.shape != sizes and bias.shape[-2:] == (queries, sizes[-1]):
        raise ShapeError(
            f"{name}: the bias is of keys {sizes}, and has no dim of queries",
            rows=[("bias", bias), *operands.items()],
            fix="give what is added to each score as mask=, which may be of floats",
        )
    shaped(name, "the bias", bias, sizes[-2:] if bias.rank == 2 else sizes, **operands)


def mask_by_group(
    name: str, mask: Like, scores: tuple[int, ...], shared: int, **operands: TensorType
) -> Tensor:
    """`mask` reshaped to broadcast to `scores` [..., H, S, T]; with `shared` above 1 to [..., G, R,
    S, T], with the heads in groups of R = `shared`. Raises DTypeError or ShapeError if it does not
    fit."""
    m = as_tensor(mask)
    if m.dtype.is_int:
        raise DTypeError(
            f"{name}: a mask of whole numbers says neither which keys are seen nor what is added",
            mask=m.type,
            fix="give truths, mask != 0, or floats that are added to the scores",
        )
    if m.ndim > len(scores) or any(n not in (1, s) for n, s in zip(m.shape[::-1], scores[::-1])):
        raise ShapeError(
            f"{name}: the mask does not broadcast to the scores, {scores}",
            rows=[("mask", m.type), *operands.items()],
            fix="a mask is [..., H, S, T], any of them 1; of keys [B, T]: mask[:, None, None]",
        )
    m = m.reshape(*(1,) * (2 - m.ndim), *m.shape)
    if m.ndim > 2 and shared > 1:
        heads = m.shape[-3]
        by = (heads // shared, shared) if heads > 1 else (1, 1)
        m = m.reshape(*m.shape[:-3], *by, *m.shape[-2:])
    return m


def check_heads(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ShapeError unless q is [..., H, S, D], k [..., G, T, D], v [..., G, T, E], G in H."""
    if (
        min(q.ndim, k.ndim, v.ndim) < 3
        or not q.ndim == k.ndim == v.ndim
        or q.shape[-3] % k.shape[-3]
        or k.shape[:-3] != q.shape[:-3]
        or k.shape[:-1] != v.shape[:-1]
        or k.shape[-1] != q.shape[-1]
    ):
        raise ShapeError(
            f"{name}: the shapes of q, k and v do not fit",
            q=q.type,
            k=k.type,
            v=v.type,
            fix="q [..., H, S, D], k [..., G, T, D], v [..., G, T, E] with H a multiple of G",
        )


# Queries in a chunk of causal attention, and the maximum number of chunks: more would only lengthen
# the program, except for large chunks.
CHUNK, CHUNKS, LARGE = 64, 4, 512


def causal_chunks(seq: int, even: bool = True) -> list[tuple[int, int]]:
    """[start, stop) of each chunk of `seq` queries that attend causally. Chunks that need not be
    `even` are more for long sequences.

    >>> causal_chunks(130), causal_chunks(131), causal_chunks(131, even=False)
    ([(0, 65), (65, 130)], [(0, 131)], [(0, 66), (66, 131)])
    """
    if not even:
        count = max(1, min(CHUNKS, seq // CHUNK), min(2 * CHUNKS, seq // LARGE))
        size = -(-seq // count)
        return [(i, min(i + size, seq)) for i in range(0, seq, size)]
    count = max(n for n in range(1, CHUNKS + 1) if n == 1 or (seq % n == 0 and seq // n >= CHUNK))
    size = seq // count
    return [(i * size, (i + 1) * size) for i in range(count)]


def _lead(lead: Any) -> str:
    return "abcfijlm"[: len(lead)]
