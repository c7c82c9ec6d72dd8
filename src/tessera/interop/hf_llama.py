"""Llama and later models of its kind: conversion of their configs, and names of their weights.

They share RMS norms, a gated MLP and rotary positions; their differences are options of the one
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..nn.gpt_config import GPTConfig
from .hf_names import Names
from .hf_options import KINDS, Options, rope_options, unsupported

SILU = {"silu": "swiglu", "swish": "swiglu"}
GELU = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}  # Gemma means the one by tanh with both


def _llama_like(o: Options, **overrides: Any) -> GPTConfig:
    """The config that Llama and similar models share: RMS norms, SwiGLU, rotary positions. Fields
    in `overrides` override it."""
    d, heads = o.size("hidden_size"), o.size("num_attention_heads")
    fields: dict[str, Any] = {
        "vocab": o.size("vocab_size"),
        "d": d,
        "layers": o.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": o.size("num_key_value_heads", heads),
        "hidden": o.size("intermediate_size"),
        "norm": "rms",
        "positions": "rotary",
        "tied": o.flag("tie_word_embeddings", False),
        "head_size": o.size("head_dim", overrides.pop("default_head_size", d // heads)),
        "norm_eps": o.number("rms_norm_eps", overrides.pop("default_eps", 1e-6)),
    }
    fields |= overrides
    for key, ask in (
        ("rope", o.rope),
        ("seq", lambda: o.size("max_position_embeddings", 2048)),
        ("activation", lambda: o.choice("hidden_act", "silu", SILU)),
    ):
        if key not in fields:
            fields[key] = ask()
    rope = fields["rope"]
    if rope.scaling == "dynamic":  # it is for longer ones than it was trained with
        fields["seq"] = int(fields["seq"] * rope.factor)
    # A window as long as the longest sequence has no effect.
    if all(w == 0 or w >= fields["seq"] for w in fields.get("windows", ())):
        fields["windows"] = ()
    return GPTConfig(**fields)


def llama_config(o: Options) -> GPTConfig:
    biases: tuple[str, ...] = ("qkv", "out") if o.flag("attention_bias", False) else ()
    biases += ("mlp",) if o.flag("mlp_bias", False) else ()
    return _llama_like(o, biases=biases)


def _window(o: Options) -> int | None:
    """The sliding window; null means none."""
    return None if o.get("sliding_window") is None else o.size("sliding_window")


def mistral_config(o: Options) -> GPTConfig:
    seq = o.size("max_position_embeddings", 4096 * 32)
    windows = o.windows(KINDS[1:], _window(o))
    return _llama_like(o, seq=seq, windows=windows)


def _qwen_windows(o: Options) -> tuple[int, ...]:
    """The windows of layers: layers from max_window_layers on have one if use_sliding_window is
    true."""
    first, layers = o.get("max_window_layers", 28), o.size("num_hidden_layers")
    window, on = _window(o), o.flag("use_sliding_window", False)
    types = [KINDS[i >= first] for i in range(layers)]
    return o.windows(types, window if on else None)


def qwen2_config(o: Options) -> GPTConfig:
    seq = o.size("max_position_embeddings", 32768)
    return _llama_like(o, seq=seq, windows=_qwen_windows(o), biases=("qkv",))


def qwen3_config(o: Options, **overrides: Any) -> GPTConfig:
    return _llama_like(
        o, seq=o.size("max_position_embeddings", 32768), windows=_qwen_windows(o), qk_norm=True,
        biases=("qkv", "out") if o.flag("attention_bias", False) else (), default_head_size=128,
        **overrides,
    )  # fmt: skip


def _experts(o: Options, count: str, hidden: str) -> dict[str, Any]:
    """Options for experts without capacity, with normalized gates."""
    k = o.size("num_experts_per_tok", 2)
    if k == 1:
        raise unsupported("num_experts_per_tok", 1, ["2 or more"])
    return {
        "experts": o.size(count, 8 if count == "num_local_experts" else 128),
        "experts_per_token": k, "capacity": None,
        "hidden": o.size(hidden), "aux_weight": o.number("router_aux_loss_coef", 0.001),
    }  # fmt: skip


def mixtral_config(o: Options) -> GPTConfig:
    seq = o.size("max_position_embeddings", 4096 * 32)
    windows = o.windows(KINDS[1:], _window(o))
    experts = _experts(o, "num_local_experts", "intermediate_size")
    return _llama_like(
        o, seq=seq, windows=windows, default_eps=1e-5, **experts,
        rope=o.rope(base=1e6),
    )  # fmt: skip


def qwen3_moe_config(o: Options) -> GPTConfig:
    o.only("norm_topk_prob", True, False)
    o.only("decoder_sparse_step", 1)
    o.size("intermediate_size", 1)
    count = "num_experts" if "num_experts" in o.raw else "num_local_experts"
    if o.get("mlp_only_layers"):
        raise unsupported("mlp_only_layers", o.get("mlp_only_layers"), [[]])
    return qwen3_config(o, **_experts(o, count, "moe_intermediate_size"))


def phi3_config(o: Options) -> GPTConfig:
    seq = o.size("max_position_embeddings", 4096)
    windows = o.windows(KINDS[1:], _window(o))
    rope = o.rope(1.0)
    if rope.scaling not in ("default", "longrope"):
        raise unsupported("rope_type", rope.scaling, ("default", "longrope"))
    o.get("original_max_position_embeddings")
    return _llama_like(o, seq=seq, windows=windows, rope=rope, default_eps=1e-5)


def _gemma_like(o: Options, **overrides: Any) -> GPTConfig:
    o.only("use_bidirectional_attention", False)
    key = "hidden_activation" if o.get("hidden_activation") is not None else "hidden_act"
    return _llama_like(
        o, norm="rms_offset", activation=o.choice(key, "gelu_pytorch_tanh", GELU),
        tied=o.flag("tie_word_embeddings", True), embed_scale=True, default_head_size=256,
        biases=("qkv", "out") if o.flag("attention_bias", False) else (), **overrides,
    )  # fmt: skip


def gemma_config(o: Options) -> GPTConfig:
    seq = o.size("max_position_embeddings", 8192)
    return _gemma_like(o, seq=seq)


def gemma2_config(o: Options) -> GPTConfig:
    types = [KINDS[(i + 1) % 2] for i in range(o.size("num_hidden_layers"))]
    return _gemma_like(
        o, seq=o.size("max_position_embeddings", 8192), block="post_norms",
        query_scale=o.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=_cap(o, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(o, "final_logit_softcapping", 30.0),
        windows=o.windows(types, _window(o)),
    )  # fmt: skip


def _cap(o: Options, key: str, default: float | None) -> float | None:
    """A cap of scores or logits: null means none."""
    if key not in o.raw:
        return default
    return None if o.get(key) is None else o.number(key, 0.0)


def gemma3_config(o: Options) -> GPTConfig:
    # transformers reads attn_logit_softcapping for these models but does not use it.
    o.get("attn_logit_softcapping")
    every = o.size("sliding_window_pattern", o.get("_sliding_window_pattern", 6))
    types = [KINDS[(i + 1) % every > 0] for i in range(o.size("num_hidden_layers"))]
    windows = o.windows(types, _window(o))
    old = Options({"rope_theta": o.number("rope_local_base_freq", 1e4)})
    nested = isinstance(o.get("rope_parameters"), dict)
    local = o.rope(base=1e4, kind=KINDS[1]) if nested else old.rope()
    return _gemma_like(
        o, seq=o.size("max_position_embeddings", 131072), block="post_norms",
        query_scale=o.number("query_pre_attn_scalar", 256) ** -0.5, qk_norm=True,
        logit_cap=_cap(o, "final_logit_softcapping", None),
        windows=windows, rope=o.rope(base=1e6, kind=KINDS[0]), local_rope=local,
    )  # fmt: skip


def llama_options(c: GPTConfig) -> dict[str, Any]:
    """Our config as a Llama's config.json; similar models take parts of it."""
    seq = c.seq
    if c.rope.scaling == "dynamic":
        seq = c.rope.original
    return {
        "vocab_size": c.vocab,
        "max_position_embeddings": seq,
        "hidden_size": c.d,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.groups,
        "intermediate_size": c.width,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tied,
        "head_dim": c.size,
        "rms_norm_eps": c.make_norm().eps,
        "rope_parameters": rope_options(c.rope),
        "attention_bias": "out" in c.biases,
        "mlp_bias": "mlp" in c.biases,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def options_without(*without: str) -> Callable[[GPTConfig], dict[str, Any]]:
    """A function that gives the options of a Llama without `without`, with the windows of
    layers."""

    def options(c: GPTConfig) -> dict[str, Any]:
        said = {k: v for k, v in llama_options(c).items() if k not in without}
        return {**said, "sliding_window": max(c.windows, default=0) or None}

    return options


def phi3_options(c: GPTConfig) -> dict[str, Any]:
    # Its default is an id of Phi-3's own vocabulary.
    return {**options_without("mlp_bias", "attention_bias")(c), "pad_token_id": None}


def qwen_options(c: GPTConfig) -> dict[str, Any]:
    windows = c.layer_windows
    said: dict[str, Any] = {**options_without("mlp_bias")(c), "use_sliding_window": bool(windows)}
    if windows:
        said["layer_types"] = [KINDS[w > 0] for w in windows]
    if c.experts:
        said |= {
            "num_experts": c.experts, "num_experts_per_tok": c.experts_per_token,
            "moe_intermediate_size": c.width, "norm_topk_prob": True,
            "router_aux_loss_coef": c.aux_weight,
        }  # fmt: skip
    return said


def mixtral_options(c: GPTConfig) -> dict[str, Any]:
    return {
        **options_without("mlp_bias", "attention_bias")(c), "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token, "router_aux_loss_coef": c.aux_weight,
    }  # fmt: skip


def gemma_options(c: GPTConfig) -> dict[str, Any]:
    return {
        **{k: v for k, v in llama_options(c).items() if k != "mlp_bias"},
        "hidden_act": "gelu_pytorch_tanh",
    }


def gemma2_options(c: GPTConfig) -> dict[str, Any]:
    windows = c.layer_windows or [0] * c.layers
    said = {k: v for k, v in qwen_options(c).items() if k not in ("hidden_act", "mlp_bias")}
    scale = c.query_scale or c.size**-0.5
    said |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": c.attention_cap,
        "final_logit_softcapping": c.logit_cap,
        "layer_types": [KINDS[w > 0] for w in windows],
    }
    del said["use_sliding_window"]
    if c.local_rope is not None:
        ropes = (c.rope, c.local_rope)
        said["rope_parameters"] = {k: rope_options(r) for k, r in zip(KINDS, ropes, strict=True)}
    return said


LLAMA = Names(
    "model.embed_tokens", "model.norm", "model.layers.{}", "input_layernorm",
    "post_attention_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj",
    q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
)  # fmt: skip
PHI3 = replace(LLAMA, qkv=("self_attn.qkv_proj",), fused="kinds", gate_up="mlp.gate_up_proj")
GEMMA2 = replace(
    LLAMA, norm_2="pre_feedforward_layernorm", post_norm_1="post_attention_layernorm",
    post_norm_2="post_feedforward_layernorm",
)  # fmt: skip
MIXTRAL = replace(
    LLAMA,
    experts=("block_sparse_moe.gate", *(f"block_sparse_moe.experts.[].w{i}" for i in (1, 2, 3))),
)  # fmt: skip
QWEN3_MOE = replace(
    LLAMA, experts=("mlp.gate", *(f"mlp.experts.[].{x}_proj" for x in ("gate", "down", "up")))
)  # fmt: skip
