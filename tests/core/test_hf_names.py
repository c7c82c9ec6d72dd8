"""Tables of Hugging Face weight names: each tensor of both sides once."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import nn
from tessera.interop.hf import written_as
from tessera.interop.hf_models import ARCHITECTURES
from tessera.interop.hf_names import LAYER
from tessera.interop.slices import Block, Piece
from tessera.nn.positions import alibi_slopes
from tests.core.numpy_engine import Oracle

LLAMA = {
    "hidden_size": 24, "vocab_size": 10, "num_hidden_layers": 2, "num_attention_heads": 6,
    "intermediate_size": 14,
}  # fmt: skip
FALCON = {k: v for k, v in LLAMA.items() if k != "intermediate_size"}
MOE = {**LLAMA, "num_experts": 12, "moe_intermediate_size": 5, "norm_topk_prob": True}
GPT2 = {"n_embd": 24, "vocab_size": 10, "n_layer": 2, "n_head": 6, "n_positions": 8}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 7}),
    ("llama", LLAMA),
    ("llama", {**LLAMA, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**LLAMA, "head_dim": 10, "tie_word_embeddings": True}),
    ("mistral", {**LLAMA, "num_key_value_heads": 3, "sliding_window": None}),
    ("qwen2", {**LLAMA, "num_key_value_heads": 1}),
    ("qwen3", {**LLAMA, "num_key_value_heads": 2, "head_dim": 4}),
    ("qwen3_moe", {**MOE, "num_key_value_heads": 2, "head_dim": 4}),
    ("mixtral", {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 3}),
    ("gemma3_text", {**LLAMA, "num_key_value_heads": 2, "head_dim": 4}),
    ("phi", {**LLAMA, "qk_layernorm": True}),
    ("phi3", {**LLAMA, "num_key_value_heads": 3}),
    ("gpt_neox", LLAMA),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True}),
]


@pytest.mark.parametrize(("kind", "raw"), CONFIGS)
def test_a_table_is_a_bijection(kind: str, raw: dict[str, Any]) -> None:
    known = ARCHITECTURES[kind]
    config = known.read(raw)
    table = known.table(config)
    ours = {name: t.shape for name, t in nn.GPT(config).parameters().items()}
    assert set(table) == set(ours)
    files: dict[str, np.ndarray[Any, Any]] = {}
    numbers = {}
    count = 1
    for name, shape in ours.items():
        inner = shape[1:] if name.startswith(LAYER) else shape
        numbers[name] = np.arange(count, count + np.prod(inner)).reshape(inner)
        count += int(np.prod(inner))
        for piece in table[name]:
            piece.write(numbers[name], files.setdefault(piece.name, np.zeros(piece.shape, int)))
    written = np.sort(np.concatenate([f.ravel() for f in files.values()]))
    assert written.tolist() == list(range(1, count))  # each number once, without gaps
    for name, want in numbers.items():
        found = np.zeros_like(want)
        for piece in table[name]:
            piece.read(
                files[piece.name].__getitem__, tuple(map(slice, (0,) * 9, want.shape)), found
            )
        np.testing.assert_array_equal(found, want)


@given(st.data())
def test_a_block_is_read_from_its_own_places_alone(data: st.DataObject) -> None:
    """Compares blocks of a Falcon's keys, which lie between queries and values, with the whole."""
    groups, each, size, d = 3, 2, 4, 5
    places = np.arange(groups * (each + 2) * size).reshape(groups, each + 2, size)
    sizes = {"g": groups, "s": size, "d": d}
    keys = Piece("qkv", ("gs", "d"), "d0gs", sizes, places[:, each], places.size)
    file = np.arange(places.size * d).reshape(keys.shape)
    whole = np.full((d, 2, groups, size), -1)
    keys.read(file.__getitem__, (slice(0, d), slice(0, 2), slice(0, groups), slice(0, size)), whole)
    cuts = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in whole.shape]
    block: Block = tuple(slice(a, max(a + 1, b)) for a, b in cuts)
    asked = 0

    def get(at: Block) -> Any:
        nonlocal asked
        asked += file[at].size
        return file[at]

    out = np.full_like(whole[block], -1)
    keys.read(get, block, out)
    np.testing.assert_array_equal(out, whole[block])
    assert asked == (out >= 0).sum()


def test_rates_are_stretched_between_the_two_wavelengths(oracle: Oracle) -> None:
    rope = nn.Rope(scaling="llama3", factor=8.0, low=1.0, high=4.0, original=64)
    plain = 10000.0 ** (-np.arange(8) / 8)
    slower = plain / rope.rates(16).numpy()
    waves = 2 * np.pi / plain  # wavelengths in tokens: 6, 20, 63, 199 and more
    np.testing.assert_allclose(slower[waves < 64 / 4], 1.0, rtol=1e-5)
    np.testing.assert_allclose(slower[waves > 64], 8.0, rtol=1e-5)
    # At a quarter of the way from 1 to 4 periods in 64 tokens, a quarter of the frequency is kept.
    kept = (64 / waves - 1) / 3
    between = (waves > 64 / 4) & (waves < 64)
    assert between.sum() == 2
    np.testing.assert_allclose(1 / slower[between], (kept + (1 - kept) / 8)[between], rtol=1e-5)
    linear = nn.Rope(scaling="linear", factor=4.0).rates(16).numpy()
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-5)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    # Six heads: the slopes of four heads, then every second slope of eight heads.
    np.testing.assert_allclose(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


@pytest.mark.parametrize(
    ("kind", "raw", "says"),
    [
        ("gpt2", {**GPT2, "activation_function": "mish"}, "'activation_function' is 'mish'"),
        ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer"),
        ("gpt2", {k: v for k, v in GPT2.items() if k != "n_head"}, "lacks 'n_head'"),
        ("gpt2", {**GPT2, "n_head": "six"}, "'n_head' cannot be 'six'"),
        ("gpt2", {**GPT2, "layer_norm_epsilon": True}, "'layer_norm_epsilon' cannot be True"),
        ("gpt2", {**GPT2, "tie_word_embeddings": 1}, "'tie_word_embeddings' cannot be 1"),
        ("llama", {**LLAMA, "rope_scaling": {"type": "spiral"}}, "'rope_type' is 'spiral'"),
        ("llama", {**LLAMA, "rope_scaling": {"type": "linear", "twist": 2}}, "'twist' is 2"),
        ("llama", {**LLAMA, "attention_sinks": 4}, "'attention_sinks' is 4, which is not known"),
        ("phi3", {**LLAMA, "rope_scaling": {"type": "linear"}}, "'rope_type' is 'linear'"),
        ("gemma", {**LLAMA, "use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
        ("qwen3_moe", {**MOE, "norm_topk_prob": False}, "'norm_topk_prob' is False"),
        ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}, "'mlp_only_layers' is [1]"),
        ("mixtral", {**LLAMA, "num_experts_per_tok": 1}, "'num_experts_per_tok' is 1"),
        ("gemma2", {**LLAMA, "layer_types": ["linear"] * 2}, "'layer_types' is 'linear'"),
        ("llama", {**LLAMA, "rope_parameters": {"a": {}}}, "'rope_parameters' is {'a': {}}"),
        ("llama", {**LLAMA, "hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ("falcon", {**FALCON, "num_ln_in_parallel_attn": 2}, "'num_ln_in_parallel_attn' is 2"),
        ("falcon", {**FALCON, "multi_query": False, "num_kv_heads": 2}, "'num_kv_heads' is 2"),
        ("llama", {**LLAMA, "num_key_value_heads": 4}, "do not divide"),
    ],
)
def test_an_option_that_we_have_not_is_named(kind: str, raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ts.UsageError, match=re.escape(says)) as error:
        ARCHITECTURES[kind].read(raw)
    assert "  fix" in str(error.value)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (nn.GPTConfig(), "gpt2"),
        (nn.GPTConfig(tied=True, biases=("qkv", "out", "mlp"), activation="relu"), "gpt2"),
        (nn.GPTConfig(norm="rms", activation="swiglu", positions="rotary", kv_heads=2), "llama"),
        (
            nn.GPTConfig(norm="rms", activation="swiglu", positions="rotary", biases=("qkv",)),
            "qwen2",
        ),
        (nn.GPTConfig(positions="rotary", block="parallel", kv_heads=1), "falcon"),
        (nn.GPTConfig(positions="rotary", block="parallel", kv_heads=2), "falcon"),
        (nn.GPTConfig(positions="rotary", block="parallel_norms", kv_heads=2), "falcon"),
        (nn.GPTConfig(positions="alibi"), "falcon"),
    ],
)
def test_a_model_of_our_own_is_written_as_the_first_that_fits(
    config: nn.GPTConfig, kind: str
) -> None:
    known, options, back = written_as(nn.GPT(config), None)
    assert (known.kind, options["model_type"]) == (kind, kind)
    assert set(nn.GPT(config).parameters()) <= set(known.table(back))


def test_a_model_that_fits_none_is_refused_with_every_reason() -> None:
    with pytest.raises(ts.UsageError) as error:
        written_as(nn.GPT(nn.GPTConfig(norm="rms")), None)
    text = str(error.value)
    assert all(f"  {kind}" in text for kind in ARCHITECTURES)
    assert "norm is 'rms' here, 'layer' there" in text
    with pytest.raises(ts.UsageError, match="positions is 'learned' here, 'rotary' there"):
        written_as(nn.GPT(nn.GPTConfig()), "llama")
    with pytest.raises(ts.UsageError, match="architecture 'bert' is not known"):
        written_as(nn.GPT(nn.GPTConfig()), "bert")
