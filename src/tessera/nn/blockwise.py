"""Attention in blocks, as ring attention puts it together: each block's result comes with the
logsumexp of its scores, by which results over different keys are merged.

Queries are [B, G, R, S, D], scaled, in G groups of R heads; `keys` are k [B, G, 1, T, D], v
[B, G, 1, T, E] and what belongs to them, [B, G, R, T] or 1 in place of B, G or R: a float is added
to the scores, a bool hides its key where it is False. `masks` are bool [B, G, R, S, T], or 1 in
place of B, G or R, and hide a key from a query. What is summed is f32. The logsumexp of a query
that sees no key is below NONE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtypes import f32
from ..lang import functions as F
from ..lang.loop import scan
from ..lang.operands import emit
from ..lang.tensor import Tensor
from .dot_product_attention import HIDDEN, causal_chunks

# Scores that a device computes at once, and the least queries in one block: large enough for the
# matrix units, small enough to stay near the cores.
SCORES, ROWS = 1 << 21, 128
NONE = HIDDEN / 2


def attend(
    q: Tensor, keys: Sequence[Tensor], causal: bool, masks: Sequence[Tensor] = ()
) -> list[Tensor]:
    """[result [B, G, R, S, E], logsumexp [B, G, R, S]], both f32. Causal: query i sees keys to i.

    >>> from tessera.lang.functions import ones
    >>> q, k, v = ones((1, 1, 1, 4, 2)), ones((1, 1, 1, 4, 2)), ones((1, 1, 1, 4, 3))
    >>> out, lse = attend(q, [k, v], causal=True)
    >>> [round(float(x), 3) for x in lse.numpy().flat]  # 2 + the log of 1, 2, 3 and 4 keys
    [2.0, 2.693, 3.099, 3.386]
    """
    found = []
    for start, stop in _chunks(q, causal):
        near = [x[:, :, :, :stop] for x in keys]

        def block(nothing: Any, rows: list[Tensor], near: Any = near) -> tuple[Any, list[Tensor]]:
            s = _scores(rows[0], near, rows[1:], causal)
            top = F.max(s, -1, True)
            e = F.exp(s - top)
            total = F.sum(e, -1, True)
            y = _product("bgrst,bgte->bgrse", e.to(near[1].dtype), _flat(near[1]))
            return nothing, [y * (1.0 / total), (top + F.log(total)).reshape(total.shape[:-1])]

        rows = [q[:, :, :, start:stop], *_hiding(start, stop, masks, causal)]
        found.append(_by_rows(block, [], rows, stop)[1])
    return [_joined(parts) for parts in zip(*found, strict=True)]


def merged(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """The results of `attend` over two sets of keys as that over both."""
    top = F.maximum(a[1], b[1])
    lse = top + F.log(F.exp(a[1] - top) + F.exp(b[1] - top))
    shares = [F.exp(x[1] - lse).reshape(*lse.shape, 1) for x in (a, b)]
    return [a[0] * shares[0] + b[0] * shares[1], lse]


def pulled(
    rows: Sequence[Tensor], keys: Sequence[Tensor], causal: bool, masks: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The gradients of q and of the floats of `keys`, f32, from one block's scores, which are
    computed again.

    `rows` are q, the gradient of the whole result, the logsumexp over all keys, and the sum over E
    of gradient times result (Dao et al. 2022, appendix B).
    """
    dqs, total = [], None
    for start, stop in _chunks(rows[0], causal):
        near = [x[:, :, :, :stop] for x in keys]

        def block(sums: Any, now: list[Tensor], near: Any = near) -> tuple[Any, list[Tensor]]:
            q, g, lse, share = now[:4]
            k, v = map(_flat, near[:2])
            p = F.exp(_scores(q, near, now[4:], causal) - lse.reshape(*lse.shape, 1))
            dp = _product("bgrse,bgte->bgrst", g, v)
            ds = p * (dp - share.reshape(*share.shape, 1))
            narrow = ds.to(k.dtype)
            dk = _product("bgrst,bgrsd->bgtd", narrow, q)
            dv = _product("bgrst,bgrse->bgte", p.to(g.dtype), g)
            new = [dk, dv]
            new += [F.sum(ds, _whole(x)) for x in near[2:] if x.dtype.is_float]
            new = [t + x.reshape(t.shape) for t, x in zip(sums, new, strict=True)]
            return new, [_product("bgrst,bgtd->bgrsd", narrow, k)]

        part = [x[:, :, :, start:stop] for x in rows]
        sums: list[Tensor] = [F.zeros(x.shape, f32) for x in near if x.dtype.is_float]
        part += _hiding(start, stop, masks, causal)
        sums, (dq,) = _by_rows(block, sums, part, stop)
        dqs.append(dq)
        sums = [_longer(t, keys[0].shape[3]) for t in sums]
        total = sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
    return [_joined(dqs), *(total or [])]


# -- parts ----------------------------------------------------------------------------------------
def _chunks(q: Tensor, causal: bool) -> list[tuple[int, int]]:
    return causal_chunks(q.shape[3]) if causal else [(0, q.shape[3])]


def _hiding(start: int, stop: int, masks: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """What hides keys from the queries from `start` to `stop`: their masks, and if it is causal
    their places."""
    rows = [m[:, :, :, start:stop, :stop] for m in masks]
    if causal:
        rows.append((F.arange(stop - start) + start).reshape(1, 1, 1, stop - start))
    return rows


def _scores(q: Tensor, keys: Sequence[Tensor], hiding: Sequence[Tensor], causal: bool) -> Tensor:
    s = _product("bgrsd,bgtd->bgrst", q, _flat(keys[0]))
    for x in keys[2:]:
        each = x.reshape(*x.shape[:3], 1, x.shape[3])
        s = s + each if x.dtype.is_float else F.where(each, s, HIDDEN)
    for m in hiding[:-1] if causal else hiding:
        s = F.where(m, s, HIDDEN)
    if causal:
        at = hiding[-1]
        s = F.where(F.arange(s.shape[-1]) <= at.reshape(*at.shape, 1), s, HIDDEN)
    return s


def _whole(x: Tensor) -> tuple[int, ...]:
    """The dims of scores [B, G, R, S, T] over which `x` [B, G, R, T] is the same."""
    return (*(i for i in range(3) if x.shape[i] == 1), 3)


def _product(index: str, a: Tensor, b: Tensor) -> Tensor:
    """An einsum in f32 of factors that may be narrower."""
    return emit("contract", a, b, index=index, dtype=f32)


def _flat(x: Tensor) -> Tensor:
    """[B, G, 1, T, D] as [B, G, T, D]."""
    return x.reshape(*x.shape[:2], *x.shape[3:])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else F.concat(list(parts), 3)


def _longer(x: Tensor, size: int) -> Tensor:
    """`x` with zeros at the end of dim 3."""
    rest = size - x.shape[3]
    return F.concat([x, F.zeros((*x.shape[:3], rest, *x.shape[4:]), x.dtype)], 3) if rest else x


def _by_rows(
    block: Callable[[Any, list[Tensor]], tuple[Any, list[Tensor]]],
    carry: list[Tensor],
    rows: list[Tensor],
    keys: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """`block(carry, rows)` for some of the rows (dim 3) at a time, what it gives joined again."""
    seq = rows[0].shape[3]
    most = max(ROWS, SCORES // (math.prod(rows[0].type.local_shape[:3]) * keys))
    size = next(n for n in range(min(most, seq), 0, -1) if seq % n == 0)
    if size == seq:
        return block(carry, rows)
    xs = [
        t.reshape(*t.shape[:3], seq // size, size, *t.shape[4:])
        .permute(3, 0, 1, 2, *range(4, t.ndim + 1))
        for t in rows
    ]  # fmt: skip
    carry, ys = scan(block, carry, xs, policy="recompute", name="rows")
    return carry, [
        y.permute(1, 2, 3, 0, *range(4, y.ndim)).reshape(*y.shape[1:4], seq, *y.shape[5:])
        for y in ys
    ]
