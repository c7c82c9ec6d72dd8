"""Paged key-value caches against contiguous ones, and decoding against the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as T

from tessera import ttnn
from tests.ttnn.test_ops import on, same

USERS, GROUPS, HEADS, D, SIZE, PAGES, EACH = 3, 2, 4, 8, 4, 16, 3
TABLE = torch.tensor([[5, 2, 9], [0, 15, 3], [7, 8, 1]], dtype=torch.int32)


def table(device: ttnn.MeshDevice) -> ttnn.Tensor:
    return ttnn.from_torch(TABLE, device=device)


def whole(pages: torch.Tensor) -> torch.Tensor:
    """[2, PAGES, G, SIZE, D] as [2, USERS, G, EACH * SIZE, D]."""
    return pages[:, TABLE.long()].transpose(2, 3).flatten(3, 4)


def test_tokens_are_written_into_the_pages_of_their_users(pair: ttnn.MeshDevice) -> None:
    cache, c = on(pair, PAGES, GROUPS, SIZE, D)
    new, n = on(pair, 1, USERS, GROUPS, D)
    places = [4, -1, 11]
    at = ttnn.from_torch(torch.tensor(places, dtype=torch.int32), device=pair)
    handle = cache
    ttnn.experimental.paged_update_cache(cache, new, update_idxs_tensor=at, page_table=table(pair))
    assert cache is handle
    for user, place in enumerate(places):
        if place >= 0:
            c[:, TABLE[user, place // SIZE], :, place % SIZE] = n[:, 0, user]
    same(cache, c)
    fused = ttnn.experimental.paged_fused_update_cache
    keys, values = ttnn.clone(cache), ttnn.clone(cache)
    fused(keys, new, values, new, update_idxs=[1, 2, 3], page_table=table(pair))
    for user in range(USERS):
        c[:, TABLE[user, 0], :, user + 1] = n[:, 0, user]
    same(keys, c)
    same(values, c)


@pytest.mark.parametrize("length", [4, 7, 12])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_a_prompt_fills_the_pages_of_a_user(
    length: int, by_tensor: bool, pair: ttnn.MeshDevice
) -> None:
    cache, c = on(pair, PAGES, GROUPS, SIZE, D)
    prompt, p = on(pair, 1, GROUPS, length, D)
    user = {"batch_idx": 1}
    if by_tensor:
        user = {"batch_idx_tensor": ttnn.from_torch(torch.tensor([1]).int(), device=pair)}
    ttnn.experimental.paged_fill_cache(cache, prompt, table(pair), **user)
    for place in range(length):
        c[:, TABLE[1, place // SIZE], :, place % SIZE] = p[:, 0, :, place]
    same(cache, c)


def test_attention_with_pages(pair: ttnn.MeshDevice) -> None:
    (keys, k), (values, v) = (on(pair, PAGES, GROUPS, SIZE, D) for _ in range(2))
    k, v = whole(k), whole(v)
    q, a = on(pair, 1, USERS, HEADS, D)
    places = [4, -1, 11]
    at = ttnn.from_torch(torch.tensor(places, dtype=torch.int32), device=pair)
    paged = ttnn.transformer.paged_scaled_dot_product_attention_decode
    for window in (None, 3):
        want = torch.zeros(2, 1, USERS, HEADS, D)
        for user, place in enumerate(places):
            first = 0 if window is None else max(0, place + 1 - window)
            for d in (0, 1):
                if place >= 0:
                    seen = (t[d, user, :, first : place + 1] for t in (k, v))
                    rows = a[d, 0, user][:, None]
                    found = T.scaled_dot_product_attention(rows, *seen, enable_gqa=True)
                    want[d, 0, user] = found[:, 0]
        more = {} if window is None else {"sliding_window_size": window}
        same(paged(q, keys, values, table(pair), cur_pos_tensor=at, **more), want)
    rows, r = on(pair, USERS, HEADS, 3, D)
    chunked = ttnn.transformer.chunked_scaled_dot_product_attention
    for start in (0, 5):
        end = start + 3
        mask = torch.ones(3, end).tril(start).bool()
        want = T.scaled_dot_product_attention(
            r, k[..., :end, :], v[..., :end, :], attn_mask=mask, enable_gqa=True
        )
        same(chunked(rows, keys, values, table(pair), start), want)


def test_heads_of_one_token_a_user(pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 1, 1, USERS, (HEADS + 2 * GROUPS) * D)
    q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
        x, num_heads=HEADS, num_kv_heads=GROUPS, memory_config=ttnn.L1_MEMORY_CONFIG
    )
    parts = a.split([HEADS * D, GROUPS * D, GROUPS * D], -1)
    for got, want in zip((q, k, v), parts, strict=True):
        same(got, want.reshape(2, 1, USERS, -1, D))
    same(ttnn.experimental.nlp_concat_heads_decode(q, num_heads=HEADS), parts[0])
    same(ttnn.experimental.nlp_concat_heads_decode(q, num_heads=1), parts[0][..., :D])


def test_a_product_of_what_is_gathered(pair: ttnn.MeshDevice) -> None:
    (x, a), (w, b) = on(pair, 1, 1, 4, 8), on(pair, 16, 5)
    whole_x, product = ttnn.experimental.all_gather_matmul_async(
        x, w, persistent_output_buffer=None, dim=3, multi_device_global_semaphore=None,
        all_gather_core_grid_offset=(0, 4), num_links=1, memory_config_mm=ttnn.L1_MEMORY_CONFIG,
    )  # fmt: skip
    both = torch.cat([a[0], a[1]], -1)
    same(whole_x, torch.stack([both, both]))
    same(product, torch.stack([both @ b[0], both @ b[1]]))
    assert ttnn.get_memory_config(product) == ttnn.L1_MEMORY_CONFIG


def test_places_that_a_cache_lacks_are_refused(pair: ttnn.MeshDevice) -> None:
    (cache, _), (pages, _) = on(pair, USERS, GROUPS, 6, D), on(pair, PAGES, GROUPS, SIZE, D)
    (token, _), (tokens, _) = on(pair, 1, USERS, GROUPS, D), on(pair, 1, GROUPS, USERS, D)
    prompt, _ = on(pair, 1, GROUPS, 13, D)
    experimental = ttnn.experimental
    for call, says in (
        (lambda: ttnn.fill_cache(cache, tokens, USERS), "the cache has no user 3"),
        (lambda: ttnn.fill_cache(cache, prompt, 0), "no last place 12"),
        (lambda: ttnn.update_cache(cache, tokens, 6), "no place 6"),
        (lambda: experimental.paged_update_cache(cache, token, update_idxs=[0, 6, 0]), "place 6"),
        (lambda: experimental.paged_fill_cache(pages, prompt, table(pair)), "no last place 12"),
        (lambda: experimental.paged_update_cache(cache, token, mesh_coords=[(0, 0)]),
         "mesh_coords= is not provided"),
    ):  # fmt: skip
        with pytest.raises(ttnn.TTNNError, match=says):
            call()
