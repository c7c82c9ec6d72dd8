"""Which ops has TT-NN for transformers? Attention, heads, rotary positions and caches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import nn
from ..core.dtypes import int32
from ..lang import functions as F
from ..lang.shaping import swap
from ..lang.tensor import Tensor as Value
from .faults import wrong
from .run import how, run, run_many
from .tensor import Tensor


def scaled_dot_product_attention(
    input_tensor_q: Tensor, input_tensor_k: Tensor, input_tensor_v: Tensor, *,
    attn_mask: Tensor | None = None, is_causal: bool = True, scale: float | None = None,
    sliding_window_size: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of q [B, H, S, D] to k and v [B, G, T, D]; each group of H / G heads shares a head
    of keys. `attn_mask` [B, 1 or H, S, T] is added to the scores."""
    if is_causal and attn_mask is not None:
        raise wrong(
            "scaled_dot_product_attention: is_causal and attn_mask exclude each other",
            fix="is_causal=False, with the mask",
        )
    more = [attn_mask] if attn_mask is not None else []
    return run(
        "scaled_dot_product_attention", _attention, [input_tensor_q, input_tensor_k, input_tensor_v,
        *more], **how("scaled_dot_product_attention", options), causal=is_causal, scale=scale,
        window=sliding_window_size,
    )  # fmt: skip


def _attention(
    q: Value, k: Value, v: Value, mask: Value | None = None, *, causal: bool,
    scale: float | None, window: int | None,
) -> Value:  # fmt: skip
    if window:
        s, t = q.shape[-2], k.shape[-2]
        rows = F.arange(s).reshape(s, 1) + (t - s)
        near = F.arange(t).reshape(1, t) > rows - window
        far = F.where(near, 0.0, -1e30)
        mask = far if mask is None else mask + far
    return nn.attention(q, k, v, causal=causal, scale=scale, mask=mask)


def scaled_dot_product_attention_decode(
    input_tensor_q: Tensor, input_tensor_k: Tensor, input_tensor_v: Tensor, *,
    is_causal: bool = True, attn_mask: Tensor | None = None, cur_pos: Any = (),
    cur_pos_tensor: Tensor | None = None, scale: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of one new token for each of B users, q [1, B, H, D], to caches [B, G, T, D], of
    which user b sees the places up to and with `cur_pos[b]`: [1, B, H, D]."""
    said = how("scaled_dot_product_attention_decode", options)
    more = [t for t in (cur_pos_tensor, attn_mask) if t is not None]
    return run(
        "scaled_dot_product_attention_decode", _decode, [input_tensor_q, input_tensor_k,
        input_tensor_v, *more], **said, places=tuple(int(p) for p in cur_pos), causal=is_causal,
        by_tensor=cur_pos_tensor is not None, scale=scale,
    )  # fmt: skip


def _decode(
    q: Value, k: Value, v: Value, *more: Value, places: tuple[int, ...], causal: bool,
    by_tensor: bool, scale: float | None,
) -> Value:  # fmt: skip
    rest = [*more]
    users, heads, d = q.shape[1:]
    keys = k.shape[-2]
    mask = None
    if causal:
        at: Any = rest.pop(0).to(int32) if by_tensor else np.array(places, np.int32)
        seen = F.arange(keys).reshape(1, keys) <= at.reshape(users, 1)
        mask = seen.reshape(users, 1, 1, keys)
    elif rest:
        mask = rest[-1]
        if mask.shape[1] != 1:  # [B, 1, H, T], a row for each head
            mask = mask.reshape(users, heads, 1, keys)
    rows = q.reshape(users, heads, 1, d)
    found = nn.attention(rows, k, v, scale=scale, mask=mask)
    return found.reshape(1, users, heads, v.shape[-1])


def attention_softmax(
    input_tensor: Tensor, *, head_size: int | None = None, attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Softmax of the scores, divided by the root of `head_size`, plus a mask."""
    more = [attention_mask] if attention_mask is not None else []
    said = how("attention_softmax", options)
    scale = 1.0 if head_size is None else 1.0 / math.sqrt(head_size)
    return run("attention_softmax", _attention_softmax, [input_tensor, *more], **said, scale=scale)


def _attention_softmax(x: Value, mask: Value | None = None, *, scale: float) -> Value:
    return nn.softmax(x * scale if mask is None else x * scale + mask)


def split_query_key_value_and_split_heads(
    input_tensor: Tensor, kv_input_tensor: Tensor | None = None, *, num_heads: int,
    num_kv_heads: int | None = None, transpose_key: bool = True, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """[B, S, (H + 2 G) * D] as queries [B, H, S, D], keys [B, G, D, S] (with `transpose_key`) and
    values [B, G, S, D]."""
    name = "split_query_key_value_and_split_heads"
    more = [kv_input_tensor] if kv_input_tensor is not None else []
    kinds = [input_tensor.dtype] * 3
    found = run_many(
        name, _split_heads, [input_tensor, *more], kinds, **how(name, options), count=3,
        heads=num_heads, groups=num_kv_heads or num_heads, turned=transpose_key,
    )  # fmt: skip
    return found[0], found[1], found[2]


def _split_heads(
    x: Value, kv: Value | None = None, *, heads: int, groups: int, turned: bool
) -> tuple[Value, Value, Value]:
    if kv is not None:
        x = F.concat([x, kv], -1)
    x = x.reshape(x.shape[0], x.shape[-2], x.shape[-1])
    b, s, width = x.shape
    d = width // (heads + 2 * groups)
    parts = F.split(x, [heads * d, groups * d, groups * d], -1)
    q, k, v = (F.permute(p.reshape(b, s, -1, d), (0, 2, 1, 3)) for p in parts)
    return q, (swap(k, -2, -1) if turned else k), v


def concatenate_heads(input_tensor: Tensor, **options: Any) -> Tensor:
    """[B, H, S, D] as [B, S, H * D]."""
    said = how("concatenate_heads", options)
    return run("concatenate_heads", _join_heads, [input_tensor], **said)


def _join_heads(x: Value) -> Value:
    b, h, s, d = x.shape
    return F.permute(x, (0, 2, 1, 3)).reshape(b, s, h * d)


# -- experimental ---------------------------------------------------------------------------------
def nlp_create_qkv_heads(
    input_tensor: Tensor, kv_input_tensor: Tensor | None = None, *, num_heads: int,
    num_kv_heads: int | None = None, transpose_k_heads: bool = True, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """[B, 1, S, (H + 2 G) * D] as queries [B, H, S, D], keys and values [B, G, S, D]."""
    return split_query_key_value_and_split_heads(
        input_tensor, kv_input_tensor, num_heads=num_heads, num_kv_heads=num_kv_heads,
        transpose_key=transpose_k_heads, **options,
    )  # fmt: skip


def nlp_concat_heads(input_tensor: Tensor, **options: Any) -> Tensor:
    """[B, H, S, D] as [B, 1, S, H * D]."""
    return run(
        "nlp_concat_heads", _concat_heads, [input_tensor], **how("nlp_concat_heads", options)
    )


def _concat_heads(x: Value) -> Value:
    joined = _join_heads(x)
    return joined.reshape(joined.shape[0], 1, *joined.shape[1:])


def rotary_embedding(
    input_tensor: Tensor, cos_cache: Tensor, sin_cache: Tensor, token_index: int | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Rotary positions (halves rotated, as in HuggingFace) for [B, H, S, D], from tables
    [1, 1, T, D]: of the first S places, or of the place `token_index` alone."""
    said = how("rotary_embedding", options)
    return run("rotary_embedding", _rotary, [input_tensor, cos_cache, sin_cache], **said,
               at=token_index)  # fmt: skip


def _rotary(x: Value, cos: Value, sin: Value, at: int | None) -> Value:
    rows = (0, x.shape[-2]) if at is None else (at, at + 1)
    cos, sin = cos[..., rows[0] : rows[1], :], sin[..., rows[0] : rows[1], :]
    half = x.shape[-1] // 2
    turned = F.concat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def rotary_embedding_llama(
    input_tensor: Tensor, cos_cache: Tensor, sin_cache: Tensor, trans_mat: Tensor, *,
    is_decode_mode: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Rotary positions with pairs of neighbours, which `trans_mat` [1, 1, 32, 32] turns: for
    [1, H, S, D], or for [1, B, H, D] of one token a user in decode mode."""
    said = how("rotary_embedding_llama", options)
    return run("rotary_embedding_llama", _rotary_pairs, [input_tensor, cos_cache, sin_cache,
               trans_mat], **said)  # fmt: skip


def _rotary_pairs(x: Value, cos: Value, sin: Value, turn: Value) -> Value:
    side = turn.shape[-1]
    rows = x.reshape(*x.shape[:-1], x.shape[-1] // side, side)
    turned = (rows @ turn.reshape(side, side)).reshape(*x.shape)
    if cos.shape[-2] != 1 and cos.shape[-2] != x.shape[-2]:
        cos, sin = cos[..., : x.shape[-2], :], sin[..., : x.shape[-2], :]
    return x * cos + turned * sin


# -- caches ---------------------------------------------------------------------------------------
def fill_cache(cache: Tensor, input: Tensor, batch_idx: int = 0, **options: Any) -> Tensor:
    """Writes [1, G, S, D] into the cache [B, G, T, D] of user `batch_idx`, from place 0 on."""
    how("fill_cache", options)
    return run("fill_cache", _fill, [cache, input], output=cache, user=batch_idx)


def _fill(cache: Value, x: Value, user: int) -> Value:
    mine = F.arange(cache.shape[0]).reshape(-1, 1, 1, 1) == user
    full = F.pad(x, (0, 0, 0, cache.shape[-2] - x.shape[-2]))
    there = F.arange(cache.shape[-2]).reshape(1, 1, -1, 1) < x.shape[-2]
    return F.where(mine & there, full, cache)


def update_cache(
    cache: Tensor, input: Tensor, update_index: int, batch_offset: int = 0, **options: Any
) -> Tensor:
    """Writes one token of each user, [1, G, B, D], into the cache [B, G, T, D] at a place."""
    how("update_cache", options)
    users = cache.shape[0]
    return run("update_cache", _update, [cache, input], output=cache,
               places=(update_index,) * users, offset=batch_offset)  # fmt: skip


def _update(cache: Value, x: Value, places: tuple[int, ...], offset: int) -> Value:
    rows = F.permute(x, (2, 1, 0, 3))[offset : offset + cache.shape[0]]
    return _put(cache, rows, np.array(places, np.int32))


def _put(cache: Value, rows: Value, at: Any) -> Value:
    """`cache` [B, G, T, D] with `rows` [B, G, 1, D] at the places `at` [B]; none is below 0."""
    here = F.arange(cache.shape[-2]).reshape(1, -1) == at.reshape(-1, 1)
    return F.where(here.reshape(here.shape[0], 1, -1, 1), rows, cache)


def paged_update_cache(
    cache_tensor: Tensor, input_tensor: Tensor, *, update_idxs: Any = (),
    update_idxs_tensor: Tensor | None = None, page_table: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Writes one token of each user, [1, B, G, D], into the cache [B, G, T, D] at the user's place;
    a place of -1 writes nothing. Raises TTNNError with a table of pages, which is not provided."""
    if options.pop("share_cache", None) or options.pop("batch_offset", 0):
        raise wrong(
            "paged_update_cache: share_cache and batch_offset are not provided",
            fix="give each user a cache of its own, from the first one on",
        )
    how("paged_update_cache", options)
    if page_table is not None:
        raise wrong(
            "paged_update_cache: tables of pages are not provided here",
            fix="keep a cache of all places for each user: page_table=None",
        )
    more = [update_idxs_tensor] if update_idxs_tensor is not None else []
    return run("paged_update_cache", _paged, [cache_tensor, input_tensor, *more],
               output=cache_tensor, places=tuple(int(i) for i in update_idxs))  # fmt: skip


def _paged(cache: Value, x: Value, at: Value | None = None, *, places: tuple[int, ...]) -> Value:
    rows = F.permute(x, (1, 2, 0, 3))[:, : cache.shape[1]]
    return _put(cache, rows, np.array(places, np.int32) if at is None else at.to(int32))
