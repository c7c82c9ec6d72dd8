"""Which models of others do we know? Per architecture: its config as ours, its tensors as ours.

To add one: a function from its options to a GPTConfig and back, and a table of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..nn.positions import Rope
from ..nn.transformer import GPTConfig
from .hf_options import Options, rope_options, unsupported
from .slices import Array, Piece

LAYER = "blocks.block."
"""How the names of our stacked weights begin; the names of their pieces have a {} for the layer."""
Table = dict[str, list[Piece]]
ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu",
    "silu": "silu", "swish": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A kind of model: `kind` is its model_type, `prefix` begins the names of its tensors."""

    kind: str
    class_name: str
    prefix: str
    config: Callable[[Options], GPTConfig]
    options: Callable[[GPTConfig], dict[str, Any]]
    table: Callable[[GPTConfig], Table]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What `transformers` means by a key that is missing, where that is not what null means."""

    def read(self, raw: Mapping[str, Any]) -> GPTConfig:
        """The content of a config.json as our config. Raises UsageError."""
        return self.config(Options({**self.defaults, **raw}))


class _Names:
    """Builds a table: `add` says which of their tensors is which of our weights."""

    def __init__(self, c: GPTConfig, joined: bool) -> None:
        self.c, self.table = c, Table()
        self.sizes = {
            "d": c.d, "h": c.heads, "g": c.groups, "s": c.size, "f": c.width, "v": c.vocab,
            "n": c.seq,
        }  # fmt: skip
        self.joined = joined  # whether weights are [in, out]

    def add(self, ours: str, letters: str, name: str, theirs: Sequence[str], **more: Any) -> None:
        piece = Piece(name, tuple(theirs), letters, self.sizes, **more)
        self.table.setdefault(ours, []).append(piece)

    def matrix(self, ours: str, letters: str, name: str, come: str, go: str) -> None:
        """A weight from dims `come` to dims `go`."""
        self.add(LAYER + ours, letters, name, (come, go) if self.joined else (go, come))

    def norm(self, ours: str, name: str) -> None:
        self.add(f"{ours}.weight", "d", f"{name}.weight", ("d",))
        if self.c.norm == "layer":
            self.add(f"{ours}.bias", "d", f"{name}.bias", ("d",))

    def bias(self, kind: str, ours: str, letters: str, name: str) -> None:
        if kind in self.c.biases:
            self.add(LAYER + ours, letters, name, (letters,))

    def qkv(self, names: Sequence[str], fused: Sequence[Array] | None = None) -> None:
        """Queries, keys and values: tensors of their own, or one in which each has its places."""
        one = self.c.groups == self.c.heads
        for i, name in enumerate(names):
            heads = "h" if one or i == 0 else "g"
            ours, at = ("qkv", i) if one else ("kv", i - 1) if i else ("q", -1)
            letters = f"{'' if at < 0 else at}{heads}s"
            more: dict[str, Any] = {}
            if fused is not None:
                more = {"places": fused[i], "total": sum(p.size for p in fused)}
            out, come = f"{heads}s", "d"
            theirs = (come, out) if self.joined else (out, come)
            self.add(f"{LAYER}attention.{ours}", f"d{letters}", f"{name}.weight", theirs, **more)
            if "qkv" in self.c.biases:
                # Our bias of the queries alone has a dim of one where keys and values have two.
                to = letters if at >= 0 else f"0{letters}"
                name, where = f"{name}.bias", f"{LAYER}attention.{ours}_bias"
                self.add(where, to, name, (out,), **more)

    def ends(self, embed: str, norm: str) -> None:
        """The embedding, the last norm and the head."""
        self.add("embed.weight", "vd", f"{embed}.weight", ("v", "d"))
        self.norm("norm", norm)
        if not self.c.tied:
            self.add("head", "dv", "lm_head.weight", ("v", "d"))


# -- GPT-2 ----------------------------------------------------------------------------------------
def _gpt2_config(o: Options) -> GPTConfig:
    """The config.json of a GPT-2 as ours; what changes its arithmetic in a way we lack is
    refused."""
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
    """Their name of our activation; of one they have not, any: it shows when it is read back."""
    return next((name for name, ours in ACTIVATIONS.items() if ours == activation), "gelu")


def _gpt2_options(c: GPTConfig) -> dict[str, Any]:
    """Our config as the config.json of a GPT-2."""
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


def _gpt2_table(c: GPTConfig) -> Table:
    """Where each weight of a GPT-2 lies in our tensors: q, k and v are one matrix of [in, out]."""
    t, layer = _Names(c, joined=True), "transformer.h.{}"
    t.ends("transformer.wte", "transformer.ln_f")
    t.add("position", "nd", "transformer.wpe.weight", ("n", "d"))
    t.norm(LAYER + "norm_1", f"{layer}.ln_1")
    t.norm(LAYER + "norm_2", f"{layer}.ln_2")
    places = np.arange(3 * c.heads * c.size).reshape(3, c.heads, c.size)
    t.qkv([f"{layer}.attn.c_attn"] * 3, list(places))
    t.matrix("attention.out", "hsd", f"{layer}.attn.c_proj.weight", "hs", "d")
    t.bias("out", "attention.out_bias", "d", f"{layer}.attn.c_proj.bias")
    t.matrix("mlp.up", "df", f"{layer}.mlp.c_fc.weight", "d", "f")
    t.bias("mlp", "mlp.up_bias", "f", f"{layer}.mlp.c_fc.bias")
    t.matrix("mlp.down", "fd", f"{layer}.mlp.c_proj.weight", "f", "d")
    t.bias("mlp", "mlp.down_bias", "d", f"{layer}.mlp.c_proj.bias")
    return t.table


# -- Llama, Mistral, Qwen2 ------------------------------------------------------------------------
def _llama_like(o: Options, seq: int, biases: Sequence[str]) -> GPTConfig:
    """The config that Llama, Mistral and Qwen share: RMS norms, SwiGLU, rotary positions. They
    differ in length of context and biases, which the caller reads."""
    d, heads = o.size("hidden_size"), o.size("num_attention_heads")
    return GPTConfig(
        vocab=o.size("vocab_size"),
        seq=seq,
        d=d,
        layers=o.size("num_hidden_layers"),
        heads=heads,
        kv_heads=o.size("num_key_value_heads", heads),
        hidden=o.size("intermediate_size"),
        norm="rms",
        activation=o.choice("hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu"}),
        positions="rotary",
        tied=o.flag("tie_word_embeddings", False),
        head_size=o.size("head_dim", d // heads),
        norm_eps=o.number("rms_norm_eps", 1e-6),
        rope=o.rope(),
        biases=tuple(biases),
    )


def _llama_config(o: Options) -> GPTConfig:
    biases = ["qkv", "out"] if o.flag("attention_bias", False) else []
    biases += ["mlp"] if o.flag("mlp_bias", False) else []
    return _llama_like(o, o.size("max_position_embeddings", 2048), biases)


def _mistral_config(o: Options) -> GPTConfig:
    most = o.window("sliding_window", o.size("max_position_embeddings", 4096 * 32))
    return _llama_like(o, most, ())


def _qwen2_config(o: Options) -> GPTConfig:
    sliding = o.flag("use_sliding_window", False)
    most = o.window("sliding_window", o.size("max_position_embeddings", 32768), sliding)
    return _llama_like(o, most, ("qkv",))


def _llama_options(c: GPTConfig) -> dict[str, Any]:
    """Our config as the config.json of a Llama."""
    return {
        "vocab_size": c.vocab,
        "max_position_embeddings": c.seq,
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


def _mistral_options(c: GPTConfig) -> dict[str, Any]:
    return {**_llama_options(c), "sliding_window": None}


def _llama_table(c: GPTConfig) -> Table:
    t, layer = _Names(c, joined=False), "model.layers.{}"
    t.ends("model.embed_tokens", "model.norm")
    t.norm(LAYER + "norm_1", f"{layer}.input_layernorm")
    t.norm(LAYER + "norm_2", f"{layer}.post_attention_layernorm")
    t.qkv([f"{layer}.self_attn.{x}_proj" for x in "qkv"])
    t.matrix("attention.out", "hsd", f"{layer}.self_attn.o_proj.weight", "hs", "d")
    t.bias("out", "attention.out_bias", "d", f"{layer}.self_attn.o_proj.bias")
    for ours, come, go in (("up", "d", "f"), ("gate", "d", "f"), ("down", "f", "d")):
        t.matrix(f"mlp.{ours}", come + go, f"{layer}.mlp.{ours}_proj.weight", come, go)
        t.bias("mlp", f"mlp.{ours}_bias", go, f"{layer}.mlp.{ours}_proj.bias")
    return t.table


# -- Falcon ---------------------------------------------------------------------------------------
def _falcon_config(o: Options) -> GPTConfig:
    """The config.json of a Falcon as ours. Three generations share the name: many heads,
    multi-query, and the new decoder with groups of queries."""
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
    """Our config as the config.json of a Falcon, of the generation that it fits."""
    # Which of its three forms: any number of groups side by side is the newer one.
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


def _falcon_table(c: GPTConfig) -> Table:
    """Where each weight of a Falcon lies in our tensors: q, k and v are one matrix, group by
    group."""
    t, layer = _Names(c, joined=False), "transformer.h.{}"
    t.ends("transformer.word_embeddings", "transformer.ln_f")
    two = c.block == "parallel_norms"
    t.norm(LAYER + "norm_1", f"{layer}.{'ln_attn' if two else 'input_layernorm'}")
    if c.block != "parallel":
        t.norm(LAYER + "norm_2", f"{layer}.{'ln_mlp' if two else 'post_attention_layernorm'}")
    # Each group's queries, its key and its value lie together: one group is multi-query.
    each, size = c.heads // c.groups, c.size
    places = np.arange(c.groups * (each + 2) * size).reshape(c.groups, each + 2, size)
    fused = [places[:, :each].reshape(c.heads, size), places[:, each], places[:, each + 1]]
    t.qkv([f"{layer}.self_attention.query_key_value"] * 3, fused)
    t.matrix("attention.out", "hsd", f"{layer}.self_attention.dense.weight", "hs", "d")
    t.bias("out", "attention.out_bias", "d", f"{layer}.self_attention.dense.bias")
    t.matrix("mlp.up", "df", f"{layer}.mlp.dense_h_to_4h.weight", "d", "f")
    t.bias("mlp", "mlp.up_bias", "f", f"{layer}.mlp.dense_h_to_4h.bias")
    t.matrix("mlp.down", "fd", f"{layer}.mlp.dense_4h_to_h.weight", "f", "d")
    t.bias("mlp", "mlp.down_bias", "d", f"{layer}.mlp.dense_4h_to_h.bias")
    return t.table


KNOWN: Mapping[str, Architecture] = {
    a.kind: a
    for a in (
        Architecture(
            "gpt2", "GPT2LMHeadModel", "transformer.", _gpt2_config, _gpt2_options, _gpt2_table
        ),
        Architecture(
            "llama", "LlamaForCausalLM", "model.", _llama_config, _llama_options, _llama_table
        ),
        Architecture(
            "mistral", "MistralForCausalLM", "model.", _mistral_config, _mistral_options,
            _llama_table, {"sliding_window": 4096, "num_key_value_heads": 8}
        ),
        Architecture(
            "qwen2", "Qwen2ForCausalLM", "model.", _qwen2_config, _llama_options, _llama_table,
            {"sliding_window": 4096, "num_key_value_heads": 32}
        ),
        Architecture(
            "falcon", "FalconForCausalLM", "transformer.", _falcon_config, _falcon_options,
            _falcon_table,
        ),
    )
}  # fmt: skip
