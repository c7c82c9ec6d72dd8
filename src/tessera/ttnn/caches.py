"""How are keys and values of the tokens before kept? In a cache [B, G, T, D] with T places for each
user, or in pages [pages, G, P, D] of P places, of which a table [B, N] names those of each user."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtypes import int32
from ..lang import functions as F
from ..lang.operands import as_tensor
from ..lang.tensor import Tensor as Value
from .attention import attend, decode
from .faults import wrong
from .run import how, run
from .tensor import Tensor


def within(name: str, what: str, number: int, count: int, least: int = 0) -> None:
    """Raises TTNNError if `number` is none of `count`."""
    if not least <= number < count:
        raise wrong(
            f"{name}: the cache has no {what} {number}",
            [("the cache has", count)],
            fix=f"give a number from {least} to {count - 1}",
        )


def fill_cache(cache: Tensor, input: Tensor, batch_idx: int = 0, **options: Any) -> Tensor:
    """Writes [1, G, S, D] into the cache [B, G, T, D] of user `batch_idx`, from place 0 on. Raises
    TTNNError if the cache has no such user, or not so many places."""
    how("fill_cache", options)
    within("fill_cache", "user", batch_idx, cache.shape[0])
    within("fill_cache", "last place", input.shape[-2] - 1, cache.shape[-2])
    return run("fill_cache", _fill_user, [cache, input], output=cache, user=batch_idx)


def _fill_user(cache: Value, x: Value, user: int) -> Value:
    mine = F.arange(cache.shape[0]).reshape(-1, 1, 1, 1) == user
    full = F.pad(x, (0, 0, 0, cache.shape[-2] - x.shape[-2]))
    there = F.arange(cache.shape[-2]).reshape(1, 1, -1, 1) < x.shape[-2]
    return F.where(mine & there, full, cache)


def update_cache(
    cache: Tensor, input: Tensor, update_index: int, batch_offset: int = 0, **options: Any
) -> Tensor:
    """Writes one token of each user, [1, G, B, D], into the cache [B, G, T, D] at a place. Raises
    TTNNError if the cache has no such place."""
    how("update_cache", options)
    within("update_cache", "place", update_index, cache.shape[-2])
    users = cache.shape[0]
    return run("update_cache", _update_place, [cache, input], output=cache,
               places=(update_index,) * users, offset=batch_offset)  # fmt: skip


def _update_place(cache: Value, x: Value, places: tuple[int, ...], offset: int) -> Value:
    rows = F.permute(x, (2, 1, 0, 3))[offset : offset + cache.shape[0]]
    return put(cache, rows, np.array(places, np.int32))


def put(cache: Value, rows: Value, at: Any) -> Value:
    """`cache` [B, G, T, D] with `rows` [B, G, 1, D] at the places `at` [B]; none is below 0."""
    here = F.arange(cache.shape[-2]).reshape(1, -1) == at.reshape(-1, 1)
    return F.where(here.reshape(here.shape[0], 1, -1, 1), rows, cache)


# -- pages ----------------------------------------------------------------------------------------
def whole(cache: Value, table: Value) -> Value:
    """The pages of each user one after the other: [B, G, N * P, D]."""
    users, count = table.shape
    _, groups, places, d = cache.shape
    found = F.take(cache, F.maximum(table.to(int32), 0).reshape(-1), 0)
    found = F.permute(found.reshape(users, count, groups, places, d), (0, 2, 1, 3, 4))
    return found.reshape(users, groups, count * places, d)


def paged_scaled_dot_product_attention_decode(
    input_tensor_q: Tensor, input_tensor_k: Tensor, input_tensor_v: Tensor,
    page_table_tensor: Tensor, *, is_causal: bool = True, attn_mask: Tensor | None = None,
    cur_pos_tensor: Tensor | None = None, scale: float | None = None,
    sliding_window_size: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention_decode` with keys and values in pages."""
    name = "paged_scaled_dot_product_attention_decode"
    if is_causal and cur_pos_tensor is None:
        raise wrong(f"{name}: it needs the users' places", fix="cur_pos_tensor=..., of one a user")
    more = [t for t in (cur_pos_tensor, attn_mask) if t is not None]
    tensors = [input_tensor_q, input_tensor_k, input_tensor_v, page_table_tensor, *more]
    return run(
        name, _decode, tensors, **how(name, options), causal=is_causal, scale=scale,
        by_tensor=cur_pos_tensor is not None, window=sliding_window_size,
    )  # fmt: skip


def _decode(q: Value, k: Value, v: Value, table: Value, *more: Value, **options: Any) -> Value:
    return decode(q, whole(k, table), whole(v, table), *more, places=(), **options)


def chunked_scaled_dot_product_attention(
    input_tensor_q: Tensor, input_tensor_k: Tensor, input_tensor_v: Tensor,
    page_table_tensor: Tensor, chunk_start_idx: int, *, scale: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of the tokens q [B, H, S, D] of a prompt's part, which begins at the place
    `chunk_start_idx`, to all places up to each token's own; keys and values are in pages."""
    name = "chunked_scaled_dot_product_attention"
    tensors = [input_tensor_q, input_tensor_k, input_tensor_v, page_table_tensor]
    return run(name, _chunk, tensors, **how(name, options), start=int(chunk_start_idx), scale=scale)


def _chunk(q: Value, k: Value, v: Value, table: Value, *, start: int, scale: float | None) -> Value:
    keys, values = whole(k, table), whole(v, table)
    end = start + q.shape[-2]
    keys, values = keys[:, :, :end], values[:, :, :end]  # its last rows are those of the tokens
    return attend(q, keys, values, causal=True, scale=scale, window=None)


def paged_fill_cache(
    cache_tensor: Tensor, input_tensor: Tensor, page_table: Tensor, *,
    batch_idx_tensor: Tensor | None = None, batch_idx: int = 0, **options: Any,
) -> Tensor:  # fmt: skip
    """Writes [1, G, S, D] into the pages of the user `batch_idx`, from the first place on."""
    how("paged_fill_cache", _without_places(options))
    within("paged_fill_cache", "user", batch_idx, page_table.shape[0])
    most = page_table.shape[1] * cache_tensor.shape[2]
    within("paged_fill_cache", "last place", input_tensor.shape[-2] - 1, most)
    more = [batch_idx_tensor] if batch_idx_tensor is not None else []
    tensors = [cache_tensor, input_tensor, page_table, *more]
    return run("paged_fill_cache", _fill, tensors, output=cache_tensor, user=int(batch_idx))


def _fill(cache: Value, x: Value, table: Value, at: Value | None = None, *, user: int) -> Value:
    pages, groups, places, d = cache.shape
    number = user if at is None else at.to(int32).reshape(())
    mine = F.arange(table.shape[0]).reshape(-1, 1) == number
    row = F.sum(F.where(mine, table.to(int32), 0), 0)  # the user's pages
    count = -(-x.shape[-2] // places)  # so many of them are written
    rows = F.pad(x[0], (0, 0, 0, count * places - x.shape[-2]))
    parts = F.permute(rows.reshape(groups, count, places, d), (1, 0, 2, 3))
    hit = F.arange(pages).reshape(-1, 1) == row[:count]
    which = F.max(F.where(hit, F.arange(count), -1), 1)  # the part that a page gets, or none
    new = F.take(parts, F.maximum(which, 0), 0)
    place = which.reshape(-1, 1) * places + F.arange(places)
    wanted = (which.reshape(-1, 1) >= 0) & (place < x.shape[-2])
    return F.where(wanted.reshape(pages, 1, places, 1), new, cache)


def paged_update_cache(
    cache_tensor: Tensor, input_tensor: Tensor, *, update_idxs: Any = (),
    update_idxs_tensor: Tensor | None = None, page_table: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Writes one token of each user, [1, B, G, D], at the user's place: into the cache
    [B, G, T, D], or with `page_table` into the user's pages. A place of -1 writes nothing."""
    options = _without_places(options)
    if options.pop("share_cache", None) or options.pop("batch_offset", 0):
        raise wrong(
            "paged_update_cache: share_cache and batch_offset are not provided",
            fix="give each user a cache of its own, from the first one on",
        )
    how("paged_update_cache", options)
    most = cache_tensor.shape[2] * (page_table.shape[1] if page_table is not None else 1)
    for i in update_idxs:
        within("paged_update_cache", "place", int(i), most, -1)
    more = [t for t in (update_idxs_tensor, page_table) if t is not None]
    return run(
        "paged_update_cache", _update, [cache_tensor, input_tensor, *more], output=cache_tensor,
        places=tuple(int(i) for i in update_idxs), by_tensor=update_idxs_tensor is not None,
        paged=page_table is not None,
    )  # fmt: skip


def _update(
    cache: Value, x: Value, *more: Value, places: tuple[int, ...], by_tensor: bool, paged: bool
) -> Value:
    at: Any = more[0].to(int32).reshape(-1) if by_tensor else np.array(places, np.int32)
    rows = F.permute(x, (1, 2, 0, 3))[:, : cache.shape[1]]  # [B, G, 1, D]
    if not paged:
        return put(cache, rows, at)
    size = cache.shape[2]
    table = more[-1].to(int32)
    at = as_tensor(at)
    order = F.arange(table.shape[1]) == (at // size).reshape(-1, 1)
    page = F.sum(F.where(order, table, 0), 1)
    hit = (F.arange(cache.shape[0]).reshape(-1, 1, 1) == page) & (
        F.arange(size).reshape(-1, 1) == at % size
    )
    users = F.arange(table.shape[0])
    which = F.max(F.where(hit & (at >= 0), users, -1), -1)  # [pages, P]: the user who writes here
    new = F.take(rows[:, :, 0], F.maximum(which, 0).reshape(-1), 0)
    new = F.permute(new.reshape(*which.shape, *rows.shape[1:2], rows.shape[-1]), (0, 2, 1, 3))
    return F.where(F.unsqueeze(F.unsqueeze(which >= 0, 1), -1), new, cache)


def paged_fused_update_cache(
    cache_tensor1: Tensor, input_tensor1: Tensor, cache_tensor2: Tensor, input_tensor2: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`paged_update_cache` of two caches."""
    first = paged_update_cache(cache_tensor1, input_tensor1, **dict(options))
    return first, paged_update_cache(cache_tensor2, input_tensor2, **dict(options))


def _without_places(options: dict[str, Any]) -> dict[str, Any]:
    """The options without `mesh_coords`, which is for all devices here. Raises TTNNError if it is
    not."""
    if options.pop("mesh_coords", None) is not None:
        raise wrong(
            "mesh_coords= is not provided: an op writes on all devices of the mesh",
            fix="leave it out, or give the other devices places of -1",
        )
    return options
