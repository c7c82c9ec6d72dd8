"""Table of known HuggingFace architectures: conversion of their configs, and names of their
tensors.

A new one needs functions from its options to a GPTConfig and back, and its `Names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..nn.gpt_config import GPTConfig
from ..nn.positions import Rope
from .hf_llama import (
    GEMMA2,
    LLAMA,
    MIXTRAL,
    PHI3,
    QWEN3_MOE,
    gemma2_config,
    gemma2_options,
    gemma3_config,
    gemma_config,
    gemma_options,
    llama_config,
    llama_options,
    mistral_config,
    mixtral_config,
    mixtral_options,
    options_without,
    phi3_config,
    phi3_options,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    qwen_options,
)
from .hf_names import Names, Table
from .hf_options import Options, rope_options, unsupported

ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """An architecture: `kind` is its model_type, `prefix` begins the names of its tensors.

    `also` are keys of its config.json that repeat another key.
    """

    kind: str
    class_name: str
    prefix: str
    config: Callable[[Options], GPTConfig]
    options: Callable[[GPTConfig], dict[str, Any]]
    names: Callable[[GPTConfig], Names]
    also: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The meaning of a missing key in `transformers`, if it differs from that of null."""

    def read(self, raw: Mapping[str, Any]) -> GPTConfig:
        """The GPTConfig for the content of a config.json. Raises UsageError for unsupported or
        unknown keys."""
        options = Options({**self.defaults, **raw})
        config = self.config(options)
        options.finish(also=self.also)
        return config

    def table(self, config: GPTConfig) -> Table:
        return self.names(config).table(config)


# -- GPT-2 ----------------------------------------------------------------------------------------
def _gpt2_config(o: Options) -> GPTConfig:
    """The GPTConfig for a GPT-2's config.json; options that change its arithmetic in an unsupported
    way are refused."""
    for key, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        o.only(key, value)
    d = o.size("n_embd")
    return GPTConfig(
        vocab=o.size("vocab_size"),
        seq=o.size("n_positions"),
        d=d,
        layers=o.size("n_layer"),
        heads=o.size("n_head"),
        hidden=o.size("n_inner", 4 * d),
        activation=o.choice("activation_function", "gelu_new", ACTIVATIONS),
        norm_eps=o.number("layer_norm_epsilon", 1e-5),
        tied=o.flag("tie_word_embeddings", True),
        biases=("qkv", "out", "mlp"),
    )


def _theirs(activation: str) -> str:
    """Their name of our activation; for one that they lack any other, which shows when the config
    is read back."""
    return next((name for name, ours in ACTIVATIONS.items() if ours == activation), "gelu")


def _gpt2_options(c: GPTConfig) -> dict[str, Any]:
    """The config.json of a GPT-2 for our config."""
    return {
        "vocab_size": c.vocab,
        "n_positions": c.seq,
        "n_embd": c.d,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.width,
        "activation_function": _theirs(c.activation),
        "layer_norm_epsilon": c.make_norm().eps,
        "tie_word_embeddings": c.tied,
        "resid_pdrop": c.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_names(c: GPTConfig) -> Names:
    return Names(
        "transformer.wte", "transformer.ln_f", "transformer.h.{}", "ln_1", "ln_2",
        ("attn.c_attn",), "attn.c_proj", "mlp.c_fc", "mlp.c_proj", fused="kinds",
        position="transformer.wpe", joined=True,
    )  # fmt: skip


# -- Phi, GPT-NeoX --------------------------------------------------------------------------------
def _neox_config(o: Options) -> GPTConfig:
    side_by_side = o.flag("use_parallel_residual", True)
    base, part = o.number("rotary_emb_base", 1e4), o.number("rotary_pct", 0.25)
    return GPTConfig(
        vocab=o.size("vocab_size"),
        seq=o.size("max_position_embeddings", 2048),
        d=o.size("hidden_size"),
        layers=o.size("num_hidden_layers"),
        heads=o.size("num_attention_heads"),
        hidden=o.size("intermediate_size"),
        activation=o.choice("hidden_act", "gelu", ACTIVATIONS),
        positions="rotary",
        tied=o.flag("tie_word_embeddings", False),
        norm_eps=o.number("layer_norm_eps", 1e-5),
        rope=o.rope(part, base),
        block="parallel_norms" if side_by_side else "sequential",
        biases=("qkv", "out", "mlp") if o.flag("attention_bias", True) else ("mlp",),
    )


def _neox_options(c: GPTConfig) -> dict[str, Any]:
    rope = {"partial_rotary_factor": c.rope.partial, **rope_options(c.rope)}
    return {
        **_shared_options(c, rope),
        "use_parallel_residual": c.block == "parallel_norms",
        "attention_bias": "out" in c.biases,
    }


def _shared_options(c: GPTConfig, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab,
        "max_position_embeddings": c.seq,
        "hidden_size": c.d,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.width,
        "hidden_act": _theirs(c.activation),
        "tie_word_embeddings": c.tied,
        "layer_norm_eps": c.make_norm().eps,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": None,
    }


NEOX = Names(
    "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "gpt_neox.layers.{}", "input_layernorm",
    "post_attention_layernorm", ("attention.query_key_value",), "attention.dense",
    "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", fused="groups", head="embed_out",
)  # fmt: skip


def _phi_config(o: Options) -> GPTConfig:
    heads = o.size("num_attention_heads")
    return GPTConfig(
        vocab=o.size("vocab_size"),
        seq=o.size("max_position_embeddings", 2048),
        d=o.size("hidden_size"),
        layers=o.size("num_hidden_layers"),
        heads=heads,
        kv_heads=o.size("num_key_value_heads", heads),
        hidden=o.size("intermediate_size"),
        activation=o.choice("hidden_act", "gelu_new", ACTIVATIONS),
        positions="rotary",
        tied=o.flag("tie_word_embeddings", False),
        norm_eps=o.number("layer_norm_eps", 1e-5),
        rope=o.rope(0.5),
        block="parallel",
        biases=("qkv", "out", "mlp", "head"),
        qk_norm=o.flag("qk_layernorm", False),
    )


def _phi_options(c: GPTConfig) -> dict[str, Any]:
    rope = {"partial_rotary_factor": c.rope.partial, **rope_options(c.rope)}
    more = {"num_key_value_heads": c.groups, "qk_layernorm": c.qk_norm}
    return {**_shared_options(c, rope), **more}


PHI = Names(
    "model.embed_tokens", "model.final_layernorm", "model.layers.{}", "input_layernorm", "",
    LLAMA.qkv, "self_attn.dense", "mlp.fc1", "mlp.fc2",
    q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
)  # fmt: skip


# -- Falcon ---------------------------------------------------------------------------------------
def _falcon_config(o: Options) -> GPTConfig:
    """The GPTConfig for a Falcon's config.json. Three generations share the name: multi-head,
    multi-query, and the new decoder with grouped queries."""
    d, heads = o.size("hidden_size"), o.size("num_attention_heads")
    new, parallel = o.flag("new_decoder_architecture", False), o.flag("parallel_attn", True)
    groups = o.size("num_kv_heads", heads)
    if new:
        o.only("parallel_attn", True)
    elif o.flag("multi_query", True):
        groups = 1
    elif groups != heads:
        raise unsupported("num_kv_heads", groups, [f"{heads}, as many as heads"])
    norms = o.size("num_ln_in_parallel_attn", 2 if new else 1)
    if norms > (2 if new else 1):
        raise unsupported("num_ln_in_parallel_attn", norms, [1])
    side_by_side = "parallel_norms" if norms == 2 else "parallel"
    alibi = o.flag("alibi", False)
    return GPTConfig(
        vocab=o.size("vocab_size"),
        seq=o.size("max_position_embeddings", 2048),
        d=d,
        layers=o.size("num_hidden_layers"),
        heads=heads,
        kv_heads=groups,
        hidden=o.size("ffn_hidden_size", 4 * d),
        activation=o.choice("activation", "gelu", ACTIVATIONS),
        positions="alibi" if alibi else "rotary",
        tied=o.flag("tie_word_embeddings", True),
        norm_eps=o.number("layer_norm_epsilon", 1e-5),
        rope=Rope() if alibi else o.rope(),
        block=side_by_side if parallel else "sequential",
        biases=("qkv", "out", "mlp") if o.flag("bias", False) else (),
    )


def _falcon_options(c: GPTConfig) -> dict[str, Any]:
    """The config.json of a Falcon for our config, in the generation that fits."""
    # The form: several groups in a parallel block need the newer one.
    new = c.block == "parallel_norms" or (c.block == "parallel" and 1 < c.groups < c.heads)
    return {
        "vocab_size": c.vocab,
        "max_position_embeddings": c.seq,
        "hidden_size": c.d,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_kv_heads": c.groups,
        "ffn_hidden_size": c.width,
        "activation": _theirs(c.activation),
        "alibi": c.positions == "alibi",
        "tie_word_embeddings": c.tied,
        "layer_norm_epsilon": c.make_norm().eps,
        "rope_parameters": rope_options(c.rope),
        "new_decoder_architecture": new,
        "multi_query": c.groups == 1,
        "parallel_attn": c.block != "sequential",
        "num_ln_in_parallel_attn": 2 if c.block == "parallel_norms" else 1,
        "bias": bool(c.biases),
        "hidden_dropout": c.dropout,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _falcon_names(c: GPTConfig) -> Names:
    two = c.block == "parallel_norms"
    return Names(
        "transformer.word_embeddings", "transformer.ln_f", "transformer.h.{}",
        "ln_attn" if two else "input_layernorm", "ln_mlp" if two else "post_attention_layernorm",
        ("self_attention.query_key_value",), "self_attention.dense", "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h", fused="groups",
    )  # fmt: skip


def _row(
    kind: str,
    name: str,
    read: Callable[[Options], GPTConfig],
    options: Callable[[GPTConfig], dict[str, Any]],
    names: Names,
    heads: int | None = None,
    window: int | None = None,
    also: Sequence[str] = (),
) -> Architecture:
    defaults = {"num_key_value_heads": heads, "sliding_window": window}
    prefix = names.embed.split(".")[0] + "."
    return Architecture(
        kind,
        f"{name}ForCausalLM",
        prefix,
        read,
        options,
        lambda c: names,
        tuple(also),
        {k: v for k, v in defaults.items() if v is not None},
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    a.kind: a
    for a in (
        Architecture(
            "gpt2", "GPT2LMHeadModel", "transformer.", _gpt2_config, _gpt2_options, _gpt2_names
        ),
        _row("llama", "Llama", llama_config, llama_options, LLAMA),
        _row("mistral", "Mistral", mistral_config, options_without("mlp_bias", "attention_bias"),
             LLAMA, 8, 4096),
        _row("qwen2", "Qwen2", qwen2_config, qwen_options, LLAMA, 32, 4096, ("attention_bias",)),
        Architecture(
            "falcon", "FalconForCausalLM", "transformer.", _falcon_config, _falcon_options,
            _falcon_names, ("multi_query", "rope_parameters"),
        ),
        _row("qwen3", "Qwen3", qwen3_config, qwen_options, LLAMA, 32, 4096),
        _row("gemma", "Gemma", gemma_config, gemma_options, LLAMA, 16),
        _row("gemma2", "Gemma2", gemma2_config, gemma2_options, GEMMA2, 4, 4096),
        _row("gemma3_text", "Gemma3", gemma3_config, gemma2_options, GEMMA2, 4, 4096,
             ("rope_theta",)),
        _row("mixtral", "Mixtral", mixtral_config, mixtral_options, MIXTRAL, 8),
        _row("qwen3_moe", "Qwen3Moe", qwen3_moe_config, qwen_options, QWEN3_MOE, 4, 4096),
        _row("phi", "Phi", _phi_config, _phi_options, PHI),
        _row("phi3", "Phi3", phi3_config, phi3_options, PHI3),
        _row("gpt_neox", "GPTNeoX", _neox_config, _neox_options, NEOX),
    )
}  # fmt: skip
