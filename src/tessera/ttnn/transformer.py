"""Which ops has TT-NN for transformers? Attention, heads, rotary positions and caches."""

from __future__ import annotations

from typing import Any

from ..lang import functions as F
from ..lang.shaping import swap
from ..lang.tensor import Tensor as Value
from .attention import (
    attention_softmax,
    scaled_dot_product_attention,
    scaled_dot_product_attention_decode,
)
from .caches import (
    chunked_scaled_dot_product_attention,
    fill_cache,
    paged_scaled_dot_product_attention_decode,
    update_cache,
)
from .faults import wrong
from .names import no_name
from .run import how, run, run_many
from .tensor import Tensor


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


def nlp_create_qkv_heads_decode(
    input_tensor: Tensor, *, num_heads: int, num_kv_heads: int | None = None,
    overlap_qk_coregrid: bool = True, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """[1, 1, B, (H + 2 G) * D] of one token a user as queries [1, B, H, D], keys and values
    [1, B, G, D]."""
    name = "nlp_create_qkv_heads_decode"
    for word in ("batch_offset", "slice_size"):
        if options.pop(word, None) is not None:
            raise wrong(f"{name}: {word}= is not provided", fix="slice the tensor first")
    kinds, groups = [input_tensor.dtype] * 3, num_kv_heads or num_heads
    found = run_many(
        name, _heads_of_token, [input_tensor], kinds, **how(name, options), count=3,
        heads=num_heads, groups=groups,
    )  # fmt: skip
    return found[0], found[1], found[2]


def _heads_of_token(x: Value, heads: int, groups: int) -> tuple[Value, ...]:
    d = x.shape[-1] // (heads + 2 * groups)
    parts = F.split(x, [heads * d, groups * d, groups * d], -1)
    return tuple(p.reshape(1, x.shape[-2], -1, d) for p in parts)


def nlp_concat_heads_decode(input_tensor: Tensor, *, num_heads: int, **options: Any) -> Tensor:
    """The first `num_heads` heads of [1, B, H, D] as [1, 1, B, num_heads * D]."""
    said = how("nlp_concat_heads_decode", options)
    return run("nlp_concat_heads_decode", _join_token, [input_tensor], **said, heads=num_heads)


def _join_token(x: Value, heads: int) -> Value:
    return x[:, :, :heads].reshape(1, 1, x.shape[1], heads * x.shape[-1])


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


__all__ = [
    "attention_softmax", "chunked_scaled_dot_product_attention", "concatenate_heads", "fill_cache",
    "nlp_concat_heads", "nlp_concat_heads_decode", "nlp_create_qkv_heads",
    "nlp_create_qkv_heads_decode", "paged_scaled_dot_product_attention_decode", "rotary_embedding",
    "rotary_embedding_llama", "scaled_dot_product_attention",
    "scaled_dot_product_attention_decode", "split_query_key_value_and_split_heads", "update_cache",
]  # fmt: skip


def __getattr__(name: str) -> object:
    raise no_name(name, __all__, __name__)
