"""Attention that never stores all scores: in tiles, over some sequences at a time, or by cuDNN.

>>> import tessera as ts
>>> import numpy as np
>>> q, k, v = ts.random.normal((3, 2, 4, 8, 16))
>>> whole = ts.nn.attention(q, k, v, causal=True)
>>> tiles = ts.nn.flash_attention(q, k, v, causal=True, implementation="tiles")
>>> np.testing.assert_allclose(tiles.numpy(), whole.numpy(), atol=1e-5)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any

from ..core.context import settings
from ..core.declared import Count, Flag, OneOf, Positive, Real
from ..core.devices import platform
from ..core.dtypes import bool_, f32
from ..core.errors import BackendError, UsageError
from ..core.layout import dim_axes
from ..lang.autodiff.custom import custom_gradient
from ..lang.autodiff.map_chunks import map_chunks
from ..lang.math import functions as F
from ..lang.math.elementwise import as_float
from ..lang.record.operands import as_tensor, emit
from ..lang.record.recorder import choose
from ..lang.value.engine import engine
from ..lang.value.tensor import Like, Tensor
from .block_size import scores_at_once
from .blockwise import NONE, Scores, attend, extras, largest_chunk, pulled
from .dot_product_attention import attention, check_heads
from .functional import row_order, rows_of

# Scores of one tile on a device: with their temporaries they fit a core's cache.
TILE = 1 << 18
IMPLEMENTATIONS = ("sequences", "tiles", "kernel", "cudnn")
Implementation = Annotated[str, OneOf(*IMPLEMENTATIONS)]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Flag = False,
    scale: Real | None = None,
    rows: Count | None = None,
    bias: Like | None = None,
    mask: Like | None = None,
    cap: Positive | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """`attention` of [B, H, S, D] that does not store all scores, to save memory.

    The backward pass recomputes scores, as FlashAttention does (Dao et al. 2022). `implementation`
    gives the scores that exist at once: "tiles" those of some heads and queries, for sequences of
    any length, where keys hidden from a tile by causality are skipped; "sequences" those of `rows`
    sequences (2). "kernel" is a kernel of Tile IR (docs/tile-ir.md), "cudnn" one of a library, on a
    GPU and for f16 and bf16; both are without `bias`, `mask` and `cap`. None is "cudnn" if that
    works, or else "tiles"; with `rows`, or with a float mask of all scores, whose gradient would be
    as large as the scores, it is "sequences", as the others refuse both. Raises the errors of
    `attention`; UsageError if `implementation` is unknown or does not take one of these;
    BackendError if it is "cudnn" and that does not work.
    """
    q, k, v = (as_float("flash_attention", t) for t in (q, k, v))
    how = implementation
    if q.ndim != 4 or k.shape[:1] != q.shape[:1] or v.shape[:1] != q.shape[:1]:
        if how == "cudnn":
            raise _none("it takes [B, H, S, D]", q, k, v)
        return attention(q, k, v, causal, scale, bias, mask, cap)
    if rows is not None and how not in (None, "sequences"):
        raise UsageError(
            "flash_attention: only sequences are computed so many at a time",
            rows=[("rows", rows), ("implementation", how)],
            fix='leave rows out, or give implementation="sequences"',
        )
    asked = how
    if how is None and (rows is not None or _of_all_scores(mask)):
        how = "sequences"
    if not all(t.size for t in (q, k, v)):  # of no elements there are no tiles
        return attention(q, k, v, causal, scale, bias, mask, cap)
    plain = bias is None and mask is None and cap is None and q.shape[-1] == v.shape[-1]
    if how == "cudnn" or (how is None and platform() == "gpu"):
        by_library = _by_library(q, k, v, causal, scale, bias, mask, cap)
        usual = "cudnn" if isinstance(by_library, Tensor) else "tiles"
        how = how or choose("attention", usual, ("tiles", *["kernel"] * plain))
        if how == "cudnn" and isinstance(by_library, Tensor):
            return by_library
        if asked is not None:
            raise _none(str(by_library), q, k, v)
    if how is None:
        how = choose("attention", "tiles", ("sequences", *["kernel"] * plain))
    if how == "kernel":
        if not plain:
            raise UsageError(
                "flash_attention: the kernel takes no bias, mask or cap, and values of q's size",
                rows=[("q", q.type), ("v", v.type)],
                fix='leave implementation out, or give "tiles"',
            )
        return _by_kernel(q, k, v, causal, scale)
    if how != "sequences":
        return _in_tiles(q, k, v, causal, scale, bias, mask, cap)
    return _by_sequences(q, k, v, causal, scale, 2 if rows is None else rows, bias, mask, cap)


def _of_all_scores(mask: Like | None) -> bool:
    """Returns whether `mask` has floats with a query dim, so that each score has its own."""
    if mask is None:
        return False
    m = as_tensor(mask)
    return m.dtype.is_float and m.ndim > 1 and m.shape[-2] > 1


def _none(why: str, q: Tensor, k: Tensor, v: Tensor) -> BackendError:
    return BackendError(
        f"flash_attention: cuDNN has no such attention: {why}",
        q=q.type,
        k=k.type,
        v=v.type,
        fix='leave implementation out, which takes "tiles" then',
    )


def _by_library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    bias: Like | None,
    mask: Like | None,
    cap: float | None,
) -> Tensor | str:
    """`attention` by a kernel of a library, or the reason why there is none."""
    q, k, v = F.narrowed(q, k, v)
    check_heads("attention", q, k, v)
    (batch, heads, seq, d), groups = q.shape, k.shape[1]
    if any(x is not None for x in (bias, mask, cap)):
        return "it takes no bias, mask or cap"
    if (level := settings().program.determinism) != "fast":
        # The engine fails if two equal gradients of this kind must keep an order:
        # openxla/xla#46500.
        return f'at level="{level}" it has no gradient'
    if causal and seq != k.shape[2]:
        return "its causal mask is for as many queries as keys"
    if any(any(map(dim_axes, t.type.dims[2:])) for t in (q, k, v)):
        return "devices split its sequences"
    if any(dim_axes(q.type.dims[i]) != dim_axes(t.type.dims[i]) for t in (k, v) for i in (0, 1)):
        return "devices split its queries and keys differently"
    if why_not := engine().no_fused_attention(causal, q.type, k.type, v.type):
        return why_not
    q = q.reshape(batch, groups, heads // groups, seq, d)
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    y = emit("attention", q, k, v, causal=causal, scale=scale)
    return y.reshape(batch, heads, seq, d)


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    from .kernels import attention_by_kernel  # imports the texts of kernels

    q, k, v = F.narrowed(q, k, v)
    check_heads("attention", q, k, v)
    (batch, heads, seq, d), groups = q.shape, k.shape[1]
    q = q.reshape(batch, groups, heads // groups, seq, d)
    y = attention_by_kernel(q, k, v, causal, 1.0 / math.sqrt(d) if scale is None else scale)
    return y.reshape(batch, heads, seq, d)


def _by_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    rows: int,
    bias: Like | None,
    mask: Like | None,
    cap: float | None,
) -> Tensor:
    optional = (("bias", bias), ("mask", mask))
    operands = {name: as_tensor(t) for name, t in optional if t is not None}
    rank = {"bias": 3, "mask": 4}  # its rank if it has a batch dim
    per_sequence = [
        n for n, t in operands.items() if t.ndim == rank[n] and t.shape[0] == q.shape[0] > 1
    ]

    def one_sequence(q: Tensor, k: Tensor, v: Tensor, *parts: Tensor) -> Tensor:
        now = {**operands, **dict(zip(per_sequence, parts, strict=True))}
        return attention(q, k, v, causal, scale, cap=cap, **now)

    return map_chunks(one_sequence, q, k, v, *(operands[n] for n in per_sequence), rows=rows)


def _in_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    bias: Like | None,
    mask: Like | None,
    cap: float | None,
) -> Tensor:
    """`attention` in tiles. The gradient keeps only the result and one number per query."""
    q, k, v = F.narrowed(q, k, v)
    check_heads("attention", q, k, v)
    (batch, heads, seq, d), (groups, keys) = q.shape, k.shape[1:3]
    operands = {"q": q.type, "k": k.type}
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    if (
        q.dtype.bytes >= f32.bytes
    ):  # fewer products than with the scores; narrower than f32 it would round
        q, scale = q * scale, 1.0
    q = q.reshape(batch, groups, heads // groups, seq, d)
    k, v = (t.reshape(batch, groups, 1, keys, t.shape[-1]) for t in (k, v))
    extra, masks = extras("attention", q, bias, mask, keys, operands)
    # Heads are rows, like sequences. Only heads that share a mask of all scores that differs
    # between sequences stay together.
    together = any(m.shape[0] > 1 and m.shape[1] == 1 < groups for m in masks)
    lead = (batch,) if together else (batch, groups)
    sizes, order = row_order(q, q.ndim - len(lead))

    def rows(t: Tensor) -> Tensor:
        """`t` with as many rows as q; a mask that is the same for all rows has one."""
        if t.dtype is not bool_ or any(n > 1 for n in t.shape[: len(lead)]):
            every, own = F.broadcast_to(t, (*lead, *t.shape[len(lead) :])), t.type.dims[len(lead) :]
            if t.mesh is None and q.mesh is not None:  # each device makes its own rows
                to = q.type.complete().with_dtype(t.dtype)
                every = F.relayout(every, to.with_dims((*to.dims[: len(lead)], *own)))
            t = rows_of(every, sizes, order, t.ndim - len(lead))
        else:
            t = t.reshape(1, *t.shape[len(lead) :])
        return t if together else t.reshape(t.shape[0], 1, *t.shape[1:])

    tiles = _tiles(Scores(causal, scale, cap, scores_at_once(TILE)))
    y: Tensor = tiles(rows(q), [*map(rows, (k, v, *extra))], [*map(rows, masks)])
    if order:
        y = y.reshape(*(sizes[i] for i in order), *y.shape[1:])
        back = [order.index(i) for i in range(len(order))]
        y = y.permute(*back, *range(len(back), y.ndim))
    return y.reshape(batch, heads, seq, v.shape[-1])


@lru_cache(maxsize=64)
def _tiles(how: Scores) -> Any:
    """Attention of q [N, G, R, S, D], with the keys and masks of `attend`, over some of N at a
    time."""

    def by_rows(fn: Callable[..., list[Tensor]], q: Tensor, *others: list[Tensor]) -> list[Tensor]:
        """`fn(q, *others)` over some rows at a time, without changing the structure of `others`."""
        every, keys = [q, *itertools.chain(*others)], others[-2][0]
        cut = [x.shape[0] == q.shape[0] for x in every]

        def one_block(*parts: Tensor) -> list[Tensor]:
            mine = iter(parts)
            now = iter([next(mine) if c else x for c, x in zip(cut, every, strict=True)])
            return fn(next(now), *([next(now) for _ in xs] for xs in others))

        # On a CPU a core's cache has room for a whole row of scores; elsewhere memory is the limit.
        sizes = q.type.local_shape
        one = sizes[3] * keys.shape[3] if platform() == "cpu" else largest_chunk(q, keys, how)
        of_row = math.prod(sizes[1:3]) * one
        count = max(1, (how.most or 1) // max(1, of_row))
        made: list[Tensor] = map_chunks(one_block, *itertools.compress(every, cut), rows=count)
        return made

    def forward(q: Tensor, keys: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        out, lse = attend(q, keys, how, masks)
        return [out.to(keys[1].dtype), lse]

    def backward(
        q: Tensor, q_parts: list[Tensor], keys: list[Tensor], masks: list[Tensor]
    ) -> list[Tensor]:
        """The gradients of q and of the floats in `keys`."""
        floats = [q, *(x for x in keys if x.dtype.is_float)]
        found = pulled([q, *q_parts], keys, how, masks)
        return [g.to(x.dtype) for g, x in zip(found, floats, strict=True)]

    @custom_gradient
    def tiles(q: Tensor, keys: list[Tensor], masks: list[Tensor]) -> tuple[Tensor, Any]:
        out, lse = by_rows(forward, q, keys, masks)
        late = how.causal and keys[0].shape[3] < q.shape[3]
        hidden = None  # queries that see no key
        if masks or late or any(x.dtype is bool_ for x in keys):
            hidden = (lse < NONE).reshape(*lse.shape, 1)
            out = F.where(hidden, 0.0, out)

        def pull(g: Tensor) -> Any:
            g = g.to(out.dtype)
            if hidden is not None:
                g = F.where(hidden, 0.0, g)
            rest = [g, lse, F.sum(F.wide(g) * F.wide(out), -1)]
            dq, *found = by_rows(backward, q, rest, keys, masks)
            grads = iter(found)
            dkeys = [next(grads) if x.dtype.is_float else None for x in keys]
            return (dq, dkeys, None) if masks else (dq, dkeys)

        return out, pull

    return tiles
