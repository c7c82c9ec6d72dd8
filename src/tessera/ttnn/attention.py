"""Which ops has TT-NN for attention? Of all tokens at once, or of one new token of each user."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import nn
from ..core.dtypes import int32
from ..lang import functions as F
from ..lang.tensor import Tensor as Value
from .faults import wrong
from .run import how, run
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
        "scaled_dot_product_attention", attend, [input_tensor_q, input_tensor_k, input_tensor_v,
        *more], **how("scaled_dot_product_attention", options), causal=is_causal, scale=scale,
        window=sliding_window_size,
    )  # fmt: skip


def attend(
    q: Value, k: Value, v: Value, mask: Value | None = None, *, causal: bool,
    scale: float | None, window: int | None,
) -> Value:  # fmt: skip
    """Attention; with `window` each row sees so many places, its own the last."""
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
    cur_pos_tensor: Tensor | None = None, scale: float | None = None,
    sliding_window_size: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of one new token for each of B users, q [1, B, H, D], to caches [B, G, T, D], of
    which user b sees the places up to and with `cur_pos[b]`, the last `sliding_window_size` of them
    if that is given: [1, B, H, D]. A user at place -1 gets zeros."""
    said = how("scaled_dot_product_attention_decode", options)
    more = [t for t in (cur_pos_tensor, attn_mask) if t is not None]
    return run(
        "scaled_dot_product_attention_decode", decode, [input_tensor_q, input_tensor_k,
        input_tensor_v, *more], **said, places=tuple(int(p) for p in cur_pos), causal=is_causal,
        by_tensor=cur_pos_tensor is not None, scale=scale, window=sliding_window_size,
    )  # fmt: skip


def decode(
    q: Value, k: Value, v: Value, *more: Value, places: tuple[int, ...], causal: bool,
    by_tensor: bool, scale: float | None, window: int | None,
) -> Value:  # fmt: skip
    """Attention of one token for each user; `more` has their places with `by_tensor`, and a mask
    that is used without `causal`."""
    rest = [*more]
    users, heads, d = q.shape[1:]
    keys = k.shape[-2]
    mask = None
    if causal:
        at: Any = rest.pop(0).to(int32) if by_tensor else np.array(places, np.int32)
        at, key = at.reshape(users, 1), F.arange(keys).reshape(1, keys)
        seen = (key <= at) & (key > at - window) if window else key <= at
        mask = seen.reshape(users, 1, 1, keys)  # who sees none gets zeros
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
