"""Rows of the ops for transformers, which live under `ttnn.transformer` and `ttnn.experimental`:
attention, caches, heads, rotary positions.

Attention is of all tokens at once, or of one new token of each user. Keys and values of the tokens
before are in a cache [B, G, T, D] with T places for each user, or in pages [pages, G, P, D] of P
places, of which a table [B, N] names those of each user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import nn
from ..core.dtypes import int32
from ..lang.math import functions as F
from ..lang.math.shape import swap
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor as Value
from .errors import public, publics, wrong
from .names import no_name
from .op import op
from .tensor import Tensor


# -- attention ------------------------------------------------------------------------------------
@op()
def scaled_dot_product_attention(
    input_tensor_q: Value, input_tensor_k: Value, input_tensor_v: Value, *,
    attn_mask: Value | None = None, is_causal: bool = True, scale: float | None = None,
    sliding_window_size: int | None = None,
) -> Value:  # fmt: skip
    """Attention of q [B, H, S, D] to k and v [B, G, T, D]; each group of H / G heads shares a head
    of keys. `attn_mask` [B, 1 or H, S, T] is added to the scores. With `sliding_window_size` each
    row sees so many places, its own the last."""
    q, k, mask = input_tensor_q, input_tensor_k, attn_mask
    if is_causal and mask is not None:
        raise wrong(
            "scaled_dot_product_attention: is_causal and attn_mask exclude each other",
            fix="is_causal=False, with the mask",
        )
    if sliding_window_size:
        s, t = q.shape[-2], k.shape[-2]
        rows = F.arange(s).reshape(s, 1) + (t - s)
        far = F.where(F.arange(t).reshape(1, t) > rows - sliding_window_size, 0.0, -1e30)
        mask = far if mask is None else mask + far
    return nn.attention(q, k, input_tensor_v, causal=is_causal, scale=scale, mask=mask)


@op()
def scaled_dot_product_attention_decode(
    input_tensor_q: Value, input_tensor_k: Value, input_tensor_v: Value, *, is_causal: bool = True,
    attn_mask: Value | None = None, cur_pos: Sequence[int] = (),
    cur_pos_tensor: Value | None = None, scale: float | None = None,
    sliding_window_size: int | None = None,
) -> Value:  # fmt: skip
    """Attention of one new token for each of B users, q [1, B, H, D], to caches [B, G, T, D], of
    which user b sees the places up to and with `cur_pos[b]`, the last `sliding_window_size` of them
    if that is given: [1, B, H, D]. A user at place -1 gets zeros."""
    q, k, v, mask = input_tensor_q, input_tensor_k, input_tensor_v, attn_mask
    users, heads, d = q.shape[1:]
    keys = k.shape[-2]
    if is_causal:
        at = _places(cur_pos, cur_pos_tensor).reshape(users, 1)
        key = F.arange(keys).reshape(1, keys)
        visible = key <= at
        if sliding_window_size:
            visible = visible & (key > at - sliding_window_size)
        mask = visible.reshape(users, 1, 1, keys)  # who sees none gets zeros
    elif mask is not None and mask.shape[1] != 1:  # [B, 1, H, T], a row for each head
        mask = mask.reshape(users, heads, 1, keys)
    rows = q.reshape(users, heads, 1, d)
    return nn.attention(rows, k, v, scale=scale, mask=mask).reshape(1, users, heads, v.shape[-1])


def _places(numbers: Sequence[int], tensor: Value | None) -> Value:
    """The places of the users, [B]."""
    if tensor is not None:
        return tensor.to(int32).reshape(-1)
    return as_tensor(np.array([int(n) for n in numbers], np.int32))


def _joined(cache: Value, table: Value) -> Value:
    """The pages of each user one after the other: [B, G, N * P, D]."""
    users, count = table.shape
    _, groups, places, d = cache.shape
    found = F.take(cache, F.maximum(table.to(int32), 0).reshape(-1), 0)
    found = F.permute(found.reshape(users, count, groups, places, d), (0, 2, 1, 3, 4))
    return found.reshape(users, groups, count * places, d)


@op()
def paged_scaled_dot_product_attention_decode(
    input_tensor_q: Value, input_tensor_k: Value, input_tensor_v: Value, page_table_tensor: Value,
    *, is_causal: bool = True, attn_mask: Value | None = None, cur_pos_tensor: Value | None = None,
    scale: float | None = None, sliding_window_size: int | None = None,
) -> Value:  # fmt: skip
    """`scaled_dot_product_attention_decode` with keys and values in pages."""
    name = "paged_scaled_dot_product_attention_decode"
    if is_causal and cur_pos_tensor is None:
        raise wrong(f"{name}: it needs the users' places", fix="cur_pos_tensor=..., of one a user")
    caches = (_joined(c, page_table_tensor) for c in (input_tensor_k, input_tensor_v))
    found: Value = scaled_dot_product_attention_decode.op.body(
        input_tensor_q, *caches, is_causal=is_causal, attn_mask=attn_mask,
        cur_pos_tensor=cur_pos_tensor, scale=scale, sliding_window_size=sliding_window_size,
    )  # fmt: skip
    return found


@op()
def chunked_scaled_dot_product_attention(
    input_tensor_q: Value, input_tensor_k: Value, input_tensor_v: Value, page_table_tensor: Value,
    chunk_start_idx: int, *, scale: float | None = None,
) -> Value:  # fmt: skip
    """Attention of the tokens q [B, H, S, D] of a prompt's part, which begins at the place
    `chunk_start_idx`, to all places up to each token's own; keys and values are in pages."""
    end = chunk_start_idx + input_tensor_q.shape[-2]
    caches = (_joined(c, page_table_tensor) for c in (input_tensor_k, input_tensor_v))
    keys, values = (c[:, :, :end] for c in caches)  # the last rows are those of the tokens
    return nn.attention(input_tensor_q, keys, values, causal=True, scale=scale)


@op()
def attention_softmax(
    input_tensor: Value, *, head_size: int | None = None, attention_mask: Value | None = None
) -> Value:
    """Softmax of the scores, divided by the root of `head_size`, plus a mask."""
    x = input_tensor if head_size is None else input_tensor * (1.0 / math.sqrt(head_size))
    return nn.softmax(x if attention_mask is None else x + attention_mask)


# -- caches ---------------------------------------------------------------------------------------
def _within(name: str, label: str, number: int, count: int, least: int = 0) -> None:
    """Raises TTNNError if a cache with `count` places has none with this number."""
    if not least <= number < count:
        raise wrong(
            f"{name}: the cache has no {label} {number}",
            [("the cache has", count)],
            fix=f"give a number from {least} to {count - 1}",
        )


@op(into="cache")
def fill_cache(cache: Value, input: Value, batch_idx: int = 0) -> Value:
    """Writes [1, G, S, D] into the cache [B, G, T, D] of user `batch_idx`, from place 0 on. Raises
    TTNNError if the cache has no such user, or not so many places."""
    (users, _, most, _), count = cache.shape, input.shape[-2]
    _within("fill_cache", "user", batch_idx, users)
    _within("fill_cache", "last place", count - 1, most)
    mine = F.arange(users).reshape(-1, 1, 1, 1) == batch_idx
    full = F.pad(input, (0, 0, 0, most - count))
    return F.where(mine & (F.arange(most).reshape(1, 1, -1, 1) < count), full, cache)


@op(into="cache")
def update_cache(cache: Value, input: Value, update_index: int, batch_offset: int = 0) -> Value:
    """Writes one token of each user, [1, G, B, D], into the cache [B, G, T, D] at a place. Raises
    TTNNError if the cache has no such place."""
    users, _, most, _ = cache.shape
    _within("update_cache", "place", update_index, most)
    rows = F.permute(input, (2, 1, 0, 3))[batch_offset : batch_offset + users]
    return _put(cache, rows, _places([update_index] * users, None))


def _put(cache: Value, rows: Any, at: Value) -> Value:
    """`cache` [B, G, T, D] with `rows` [B, G, 1, D] at the places `at` [B]; none is below 0."""
    here = F.arange(cache.shape[-2]).reshape(1, -1) == at.reshape(-1, 1)
    return F.where(here.reshape(here.shape[0], 1, -1, 1), rows, cache)


def _everywhere(mesh_coords: object) -> None:
    if mesh_coords is not None:
        raise wrong(
            "mesh_coords= is not provided: an op writes on all devices of the mesh",
            fix="leave it out, or give the other devices places of -1",
        )


@op(into="cache_tensor")
def paged_fill_cache(
    cache_tensor: Value, input_tensor: Value, page_table: Value, *,
    batch_idx_tensor: Value | None = None, batch_idx: int = 0, mesh_coords: Any = None,
) -> Value:  # fmt: skip
    """Writes [1, G, S, D] into the pages of the user `batch_idx`, from the first place on."""
    _everywhere(mesh_coords)
    (pages, groups, places, d), count = cache_tensor.shape, input_tensor.shape[-2]
    _within("paged_fill_cache", "user", batch_idx, page_table.shape[0])
    _within("paged_fill_cache", "last place", count - 1, page_table.shape[1] * places)
    user = batch_idx if batch_idx_tensor is None else batch_idx_tensor.to(int32).reshape(())
    mine = F.arange(page_table.shape[0]).reshape(-1, 1) == user
    row = F.sum(F.where(mine, page_table.to(int32), 0), 0)  # the user's pages
    filled = -(-count // places)  # so many pages are written
    rows = F.pad(input_tensor[0], (0, 0, 0, filled * places - count))
    parts = F.permute(rows.reshape(groups, filled, places, d), (1, 0, 2, 3))
    hit = F.arange(pages).reshape(-1, 1) == row[:filled]
    which = F.max(F.where(hit, F.arange(filled), -1), 1)  # the part that a page gets, or none
    new = F.take(parts, F.maximum(which, 0), 0)
    place = which.reshape(-1, 1) * places + F.arange(places)
    wanted = (which.reshape(-1, 1) >= 0) & (place < count)
    return F.where(wanted.reshape(pages, 1, places, 1), new, cache_tensor)


@op(into="cache_tensor")
def paged_update_cache(
    cache_tensor: Value, input_tensor: Value, *, update_idxs: Sequence[int] = (),
    update_idxs_tensor: Value | None = None, page_table: Value | None = None,
    share_cache: Any = None, batch_offset: int = 0, mesh_coords: Any = None,
) -> Value:  # fmt: skip
    """Writes one token of each user, [1, B, G, D], at the user's place: into the cache
    [B, G, T, D], or with `page_table` into the user's pages. A place of -1 writes nothing."""
    _everywhere(mesh_coords)
    if share_cache or batch_offset:
        raise wrong(
            "paged_update_cache: share_cache and batch_offset are not provided",
            fix="give each user a cache of its own, from the first one on",
        )
    pages, groups, size, _ = cache_tensor.shape
    most = size * (page_table.shape[1] if page_table is not None else 1)
    for i in update_idxs:
        _within("paged_update_cache", "place", int(i), most, -1)
    at = _places(update_idxs, update_idxs_tensor)
    rows = F.permute(input_tensor, (1, 2, 0, 3))[:, :groups]  # [B, G, 1, D]
    if page_table is None:
        return _put(cache_tensor, rows, at)
    table = page_table.to(int32)
    order = F.arange(table.shape[1]) == (at // size).reshape(-1, 1)
    page = F.sum(F.where(order, table, 0), 1)
    hit = (F.arange(pages).reshape(-1, 1, 1) == page) & (F.arange(size).reshape(-1, 1) == at % size)
    users = F.arange(table.shape[0])
    which = F.max(F.where(hit & (at >= 0), users, -1), -1)  # [pages, P]: the user who writes here
    new = F.take(rows[:, :, 0], F.maximum(which, 0).reshape(-1), 0)
    new = F.permute(new.reshape(*which.shape, groups, rows.shape[-1]), (0, 2, 1, 3))
    return F.where(F.unsqueeze(F.unsqueeze(which >= 0, 1), -1), new, cache_tensor)


@public
def paged_fused_update_cache(
    cache_tensor1: Tensor, input_tensor1: Tensor, cache_tensor2: Tensor, input_tensor2: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`paged_update_cache` of two caches."""
    first = paged_update_cache(cache_tensor1, input_tensor1, **options)
    return first, paged_update_cache(cache_tensor2, input_tensor2, **options)


# -- heads ----------------------------------------------------------------------------------------
def _cut(x: Value, heads: int, groups: int | None) -> tuple[list[Value], int]:
    """[..., (H + 2 G) * D] as queries, keys and values, and D."""
    groups = groups or heads
    d = x.shape[-1] // (heads + 2 * groups)
    return [*F.split(x, [heads * d, groups * d, groups * d], -1)], d


@op()
def split_query_key_value_and_split_heads(
    input_tensor: Value, kv_input_tensor: Value | None = None, *, num_heads: int,
    num_kv_heads: int | None = None, transpose_key: bool = True,
) -> tuple[Value, ...]:  # fmt: skip
    """[B, S, (H + 2 G) * D] as queries [B, H, S, D], keys [B, G, D, S] (with `transpose_key`) and
    values [B, G, S, D]."""
    x = input_tensor
    x = x if kv_input_tensor is None else F.concat([x, kv_input_tensor], -1)
    b, s = x.shape[0], x.shape[-2]
    parts, d = _cut(x.reshape(b, s, x.shape[-1]), num_heads, num_kv_heads)
    q, k, v = (F.permute(p.reshape(b, s, -1, d), (0, 2, 1, 3)) for p in parts)
    return q, (swap(k, -2, -1) if transpose_key else k), v


@public
def nlp_create_qkv_heads(
    input_tensor: Tensor, kv_input_tensor: Tensor | None = None, *, num_heads: int,
    num_kv_heads: int | None = None, transpose_k_heads: bool = True, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """[B, 1, S, (H + 2 G) * D] as queries [B, H, S, D], keys and values [B, G, S, D]."""
    found: tuple[Tensor, ...] = split_query_key_value_and_split_heads(
        input_tensor, kv_input_tensor, num_heads=num_heads, num_kv_heads=num_kv_heads,
        transpose_key=transpose_k_heads, **options,
    )  # fmt: skip
    return found


@op()
def nlp_create_qkv_heads_decode(
    input_tensor: Value, *, num_heads: int, num_kv_heads: int | None = None,
    overlap_qk_coregrid: bool = True, batch_offset: Any = None, slice_size: Any = None,
) -> tuple[Value, ...]:  # fmt: skip
    """[1, 1, B, (H + 2 G) * D] of one token a user as queries [1, B, H, D], keys and values
    [1, B, G, D]."""
    if batch_offset is not None or slice_size is not None:
        raise wrong(
            "nlp_create_qkv_heads_decode: batch_offset= and slice_size= are not provided",
            fix="slice the tensor first",
        )
    parts, d = _cut(input_tensor, num_heads, num_kv_heads)
    return tuple(p.reshape(1, input_tensor.shape[-2], -1, d) for p in parts)


@op()
def concatenate_heads(input_tensor: Value) -> Value:
    """[B, H, S, D] as [B, S, H * D]."""
    b, h, s, d = input_tensor.shape
    return F.permute(input_tensor, (0, 2, 1, 3)).reshape(b, s, h * d)


@op()
def nlp_concat_heads(input_tensor: Value) -> Value:
    """[B, H, S, D] as [B, 1, S, H * D]."""
    b, h, s, d = input_tensor.shape
    return F.permute(input_tensor, (0, 2, 1, 3)).reshape(b, 1, s, h * d)


@op()
def nlp_concat_heads_decode(input_tensor: Value, *, num_heads: int) -> Value:
    """The first `num_heads` heads of [1, B, H, D] as [1, 1, B, num_heads * D]."""
    _, b, _, d = input_tensor.shape
    return input_tensor[:, :, :num_heads].reshape(1, 1, b, num_heads * d)


# -- rotary positions -----------------------------------------------------------------------------
@op()
def rotary_embedding(
    input_tensor: Value, cos_cache: Value, sin_cache: Value, token_index: int | None = None
) -> Value:
    """Rotary positions (halves rotated, as in HuggingFace) for [B, H, S, D], from tables
    [1, 1, T, D]: of the first S places, or of the place `token_index` alone."""
    x, at = input_tensor, token_index
    rows = slice(0, x.shape[-2]) if at is None else slice(at, at + 1)
    half = x.shape[-1] // 2
    turned = F.concat([-x[..., half:], x[..., :half]], -1)
    return x * cos_cache[..., rows, :] + turned * sin_cache[..., rows, :]


@op()
def rotary_embedding_llama(
    input_tensor: Value, cos_cache: Value, sin_cache: Value, trans_mat: Value, *,
    is_decode_mode: bool = False,
) -> Value:  # fmt: skip
    """Rotary positions with pairs of neighbours, which `trans_mat` [1, 1, 32, 32] turns: for
    [1, H, S, D], or for [1, B, H, D] of one token a user in decode mode."""
    x, cos, sin, side = input_tensor, cos_cache, sin_cache, trans_mat.shape[-1]
    rows = x.reshape(*x.shape[:-1], x.shape[-1] // side, side)
    turned = (rows @ trans_mat.reshape(side, side)).reshape(*x.shape)
    if cos.shape[-2] not in (1, x.shape[-2]):
        cos, sin = cos[..., : x.shape[-2], :], sin[..., : x.shape[-2], :]
    return x * cos + turned * sin


# Those that write into caches of pages are experimental.
__all__ = [n for n in publics(vars()) if not (n.startswith("paged_") and n.endswith("_cache"))]


def __getattr__(name: str) -> Any:
    raise no_name(name, __all__, __name__)
