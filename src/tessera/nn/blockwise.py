"""Attention in blocks of queries, for tiles and rings: results with the logsumexp of their scores.

Results over different sets of keys are merged by their logsumexps. Queries are [B, G, R, S, D], in
G groups of R heads; `keys` are k [B, G, 1, T, D], v [B, G, 1, T, E] and tensors by key, [B, G, R,
T] or 1 in place of B, G or R: a float is added to the scores, a bool hides its key where it is
False. `masks` are bool [B, G, R, S, T], or 1 in place of B, G or R, and hide a key from a query.
Sums are in f32, those of f64 in f64. The logsumexp of a query that sees no key is below NONE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtypes import adds_up_in, bool_
from ..core.errors import UsageError
from ..core.layout import TensorType
from ..lang.autodiff.scan import scan
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Like, Tensor
from .block_size import scores_at_once
from .dot_product_attention import HIDDEN, LEAST, causal_chunks, fits_bias, mask_by_group
from .functional import soft_cap

# Scores that a device computes at once, and the minimum number of queries in a block: large enough
# for matrix units, small enough to stay in the cache.
SCORES, ROWS = 1 << 21, 128
NONE = HIDDEN / 2


@dataclass(frozen=True, slots=True)
class Scores:
    """The settings of attention scores: the factor `scale`, the soft cap `cap`, and `causal`, with
    which the last query sees all keys and each query before it one key less. A device computes at
    most `most` scores at once (None: SCORES)."""

    causal: bool = False
    scale: float = 1.0
    cap: float | None = None
    most: int | None = None


def extras(
    name: str, q: Tensor, bias: Like | None, mask: Like | None, keys: int,
    operands: dict[str, TensorType], key_count: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """(tensors by key for q [B, G, R, S, D], masks [B, G, R, S, `keys`]). In a local body one
    device of a ring holds only `key_count` of the keys. Raises ShapeError, DTypeError or
    UsageError, which show `operands`."""
    (batch, groups, shared, seq, _), key_count = q.shape, keys if key_count is None else key_count
    heads, by_key = groups * shared, []
    if bias is not None:
        b = F.wide(as_tensor(bias))
        fits_bias(name, b.type, (batch, heads, key_count), seq, **operands)
        by_key.append(b.reshape(batch if b.ndim == 3 else 1, groups, shared, key_count))
    if mask is None:
        return by_key, []
    m = as_tensor(mask)
    rows = m.shape[-2] if m.ndim > 1 else 1
    scores = (batch, heads, seq, keys if rows > 1 else key_count)
    m = mask_by_group(name, m, scores, shared, **operands)
    rank = 5 if m.ndim > 2 and shared > 1 else 4
    m = m.reshape(*(1,) * (rank - m.ndim), *m.shape)
    m = m if rank == 5 else m.reshape(*m.shape[:2], 1, *m.shape[2:])
    m = F.broadcast_to(m, (*m.shape[:-1], scores[-1]))
    if rows > 1:
        if m.dtype is not bool_:
            raise UsageError(
                f"{name}: a float mask of all scores would have no gradient",
                mask=m.type,
                fix="give a bool mask, mask == 0, or a float one by key, [B, H, 1, S], or use"
                f" {'all_to_all_attention' if 'ring' in name else 'nn.attention'}",
            )
        return by_key, [m]
    m = m.reshape(*m.shape[:3], key_count)
    if m.dtype is not bool_:
        by_key.append(F.maximum(F.wide(m), LEAST))
        m = ~(m <= LEAST)
    return [*by_key, m], []


def attend(
    q: Tensor, keys: Sequence[Tensor], how: Scores, masks: Sequence[Tensor] = ()
) -> list[Tensor]:
    """[result [B, G, R, S, E], logsumexp [B, G, R, S]], both f32.

    >>> from tessera.lang.math.functions import ones
    >>> q, k, v = ones((1, 1, 1, 4, 2)), ones((1, 1, 1, 4, 2)), ones((1, 1, 1, 4, 3))
    >>> out, lse = attend(q, [k, v], Scores(causal=True))
    >>> [round(float(x), 3) for x in lse.numpy().flat]  # 2 + the log of 1, 2, 3 and 4 keys
    [2.0, 2.693, 3.099, 3.386]
    """
    blocks = []
    for start, stop, visible_keys in _chunks(q, keys, how):
        near = [x[:, :, :, :visible_keys] for x in keys]

        def block(nothing: Any, rows: list[Tensor], near: Any = near) -> tuple[Any, list[Tensor]]:
            s, _ = _scores(rows[0], near, rows[1:], how)
            top = F.max(s, -1, True)
            e = F.exp(s - top)
            total = F.sum(e, -1, True)
            y = _product("bgrst,bgte->bgrse", e.to(near[1].dtype), _flat(near[1]))
            return nothing, [y * (1.0 / total), (top + F.log(total)).reshape(total.shape[:-1])]

        rows = [q[:, :, :, start:stop], *_hiding(start, stop, visible_keys, keys, q, masks, how)]
        blocks.append(_by_rows(block, [], rows, visible_keys, how)[1])
    return [_joined(parts) for parts in zip(*blocks, strict=True)]


def merged(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """The result of `attend` over two sets of keys, from its results over each."""
    top = F.maximum(a[1], b[1])
    lse = top + F.log(F.exp(a[1] - top) + F.exp(b[1] - top))
    shares = [F.exp(x[1] - lse).reshape(*lse.shape, 1) for x in (a, b)]
    return [a[0] * shares[0] + b[0] * shares[1], lse]


def pulled(
    rows: Sequence[Tensor], keys: Sequence[Tensor], how: Scores, masks: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The gradients of q and of the floats in `keys`, f32, from one block's recomputed scores.

    `rows` are q, the gradient of the whole result, the logsumexp over all keys, and the sum over E
    of gradient times result (Dao et al. 2022, appendix B).
    """
    dqs, total = [], None
    for start, stop, visible_keys in _chunks(rows[0], keys, how):
        near = [x[:, :, :, :visible_keys] for x in keys]

        def block(sums: Any, now: list[Tensor], near: Any = near) -> tuple[Any, list[Tensor]]:
            q, g, lse, share = now[:4]
            k, v = map(_flat, near[:2])
            s, slope = _scores(q, near, now[4:], how)
            p = F.exp(s - lse.reshape(*lse.shape, 1))
            dp = _product("bgrse,bgte->bgrst", g, v)
            ds = p * (dp - share.reshape(*share.shape, 1))
            added = [F.sum(ds, _whole(x)) for x in near[2:] if x.dtype.is_float]
            ds = ds if slope is None else ds * slope
            narrow = (ds if how.scale == 1.0 else ds * how.scale).to(k.dtype)
            dk = _product("bgrst,bgrsd->bgtd", narrow, q)
            dv = _product("bgrst,bgrse->bgte", p.to(g.dtype), g)
            new = [dk, dv, *added]
            new = [t + x.reshape(t.shape) for t, x in zip(sums, new, strict=True)]
            return new, [_product("bgrst,bgtd->bgrsd", narrow, k)]

        part = [x[:, :, :, start:stop] for x in rows]
        wide = adds_up_in(*(x.dtype for x in (*rows, *near)))
        sums: list[Tensor] = [F.zeros(x.shape, wide) for x in near if x.dtype.is_float]
        part += _hiding(start, stop, visible_keys, keys, rows[0], masks, how)
        fills = [0, 0, -HIDDEN, *[0] * (len(part) - 3)]  # shares of their scores are none
        sums, (dq,) = _by_rows(block, sums, part, visible_keys, how, fills)
        dqs.append(dq)
        sums = [_longer(t, keys[0].shape[3]) for t in sums]
        total = sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
    return [_joined(dqs), *(total or [])]


# -- parts ----------------------------------------------------------------------------------------
def largest_chunk(q: Tensor, keys: Tensor, how: Scores) -> int:
    """The number of scores in one head's largest chunk of queries, the most that exist at once."""
    return max((stop - start) * seen for start, stop, seen in _chunks(q, [keys], how))


def _chunks(q: Tensor, keys: Sequence[Tensor], how: Scores) -> list[tuple[int, int, int]]:
    """(start, stop, number of visible keys) of each chunk of queries."""
    seq, count = q.shape[3], keys[0].shape[3]
    if not how.causal or count < seq:
        return [(0, seq, count)]
    return [(a, b, b + count - seq) for a, b in causal_chunks(seq, even=False)]


def _hiding(
    start: int,
    stop: int,
    visible_keys: int,
    keys: Sequence[Tensor],
    q: Tensor,
    masks: Sequence[Tensor],
    how: Scores,
) -> list[Tensor]:
    """The masks for the queries from `start` to `stop`; with causality also the last key that each
    query sees."""
    rows = [m[:, :, :, start:stop, :visible_keys] for m in masks]
    if how.causal:
        last = F.arange(stop - start) + (start + keys[0].shape[3] - q.shape[3])
        rows.append(last.reshape(1, 1, 1, stop - start))
    return rows


def _scores(
    q: Tensor, keys: Sequence[Tensor], hiding: Sequence[Tensor], how: Scores
) -> tuple[Tensor, Tensor | None]:
    """(scores, their derivative by the scaled products; None if that is 1)."""
    s = _product("bgrsd,bgtd->bgrst", q, _flat(keys[0]))
    s = s if how.scale == 1.0 else s * how.scale
    slope = None
    if how.cap is not None:
        s = soft_cap(s, how.cap)
        part = s * (1.0 / how.cap)
        slope = 1.0 - part * part
    for x in keys[2:]:
        each = x.reshape(*x.shape[:3], 1, x.shape[3])
        s = s + each if x.dtype.is_float else F.where(each, s, HIDDEN)
    for m in hiding[:-1] if how.causal else hiding:
        s = F.where(m, s, HIDDEN)
    if how.causal:
        at = hiding[-1]
        s = F.where(F.arange(s.shape[-1]) <= at.reshape(*at.shape, 1), s, HIDDEN)
    return s, slope


def _whole(x: Tensor) -> tuple[int, ...]:
    """The dims of scores [B, G, R, S, T] along which `x` [B, G, R, T] is broadcast."""
    return (*(i for i in range(3) if x.shape[i] == 1), 3)


def _product(index: str, a: Tensor, b: Tensor) -> Tensor:
    """An einsum with f32 results, also for narrower factors; f64 stays f64."""
    return emit("contract", a, b, index=index, dtype=adds_up_in(a.dtype, b.dtype))


def _flat(x: Tensor) -> Tensor:
    """`x` [B, G, 1, T, D] as [B, G, T, D]."""
    return x.reshape(*x.shape[:2], *x.shape[3:])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else F.concat(list(parts), 3)


def _longer(x: Tensor, size: int, fill: float = 0) -> Tensor:
    """`x` padded to `size` along dim 3 with `fill`."""
    rest = (*x.shape[:3], size - x.shape[3], *x.shape[4:])
    return F.concat([x, F.full(rest, fill, x.dtype)], 3) if rest[3] else x


def _by_rows(
    block: Callable[[Any, list[Tensor]], tuple[Any, list[Tensor]]],
    carry: list[Tensor],
    rows: list[Tensor],
    keys: int,
    how: Scores,
    fills: Sequence[float] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """`block(carry, rows)` on some of the rows (dim 3) at a time, with its results concatenated.
    `fills` are the padding values of each of `rows` (default zeros)."""
    seq = rows[0].shape[3]
    scores = how.most or scores_at_once(SCORES)
    most = max(ROWS, scores // max(1, math.prod(rows[0].type.local_shape[:3]) * keys))
    if seq <= most:
        return block(carry, rows)
    size = next(n for n in range(most, 0, -1) if seq % n == 0)
    if 2 * size <= most:  # no good divisor: with rows at the end that add nothing
        size = most
        fills = fills or [0] * len(rows)
        rows = [_longer(t, -(-seq // size) * size, f) for t, f in zip(rows, fills, strict=True)]
    count = rows[0].shape[3] // size
    xs = [
        t.reshape(*t.shape[:3], count, size, *t.shape[4:])
        .permute(3, 0, 1, 2, *range(4, t.ndim + 1))
        for t in rows
    ]  # fmt: skip
    carry, ys = scan(block, carry, xs, policy="recompute", name="rows")
    joined = [
        y.permute(1, 2, 3, 0, *range(4, y.ndim)).reshape(*y.shape[1:4], count * size, *y.shape[5:])
        for y in ys
    ]
    return carry, [y[:, :, :, :seq] for y in joined]
