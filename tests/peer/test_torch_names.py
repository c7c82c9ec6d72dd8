"""`dist.strategy("tensor_parallel")` on models of transformers, by the names of their weights."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = TINY | {"num_key_value_heads": 2, "head_dim": 8}
NEO = {"vocab_size": 64, "max_position_embeddings": 32, "hidden_size": 32, "num_layers": 2,
       "num_heads": 4, "attention_types": [[["global"], 2]]}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
FALCON = TINY | {"new_decoder_architecture": False, "multi_query": False, "bias": True}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OPT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
       "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32}  # fmt: skip
# Of each family: its class and options, and the all_reduces of a layer: one where attention and MLP
# are parallel.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", GROUPED, 2),
    "mistral": ("MistralForCausalLM", GROUPED, 2),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, 2),
    "qwen3": ("Qwen3ForCausalLM", GROUPED, 2),
    "gemma": ("GemmaForCausalLM", GROUPED, 2),
    "gpt2": ("GPT2LMHeadModel", GPT2, 2),
    "gpt_neo": ("GPTNeoForCausalLM", NEO, 2),
    "gpt_neox": ("GPTNeoXForCausalLM", TINY, 1),
    "bloom": ("BloomForCausalLM", BLOOM, 2),
    "falcon": ("FalconForCausalLM", FALCON, 1),
    "opt": ("OPTForCausalLM", OPT, 2),
    "phi": ("PhiForCausalLM", TINY, 1),
    "phi3": ("Phi3ForCausalLM", TINY | {"pad_token_id": 0}, 2),
    "bert": ("BertForMaskedLM", TINY, 2),
}


def made(name: str) -> Any:
    kind, options, _ = FAMILIES[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    config = cls.config_class(**options, use_cache=False)
    return cls(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_split_as_megatron_splits_it(name: str) -> None:
    peer = made(name)
    ids = torch.randint(0, 64, (2, 16))
    model = ts.from_torch(peer, (), {"input_ids": ids})
    mesh = dist.Mesh(("tp",), devices=2)
    dist.place(model, dist.strategy("tensor_parallel"), mesh)
    layers = {
        n: t.type
        for n, t in model.parameters().items()
        if re.search(r"\.(\d+)\.", n) and len(t.shape) == 2
    }
    assert len(layers) >= 8 and all("tp" in t.split_axes for t in layers.values()), layers
    f = ts.jit(lambda model, ids: model(input_ids=ids)["logits"])
    x = ts.tensor(ids.numpy().astype(np.int32), mesh=mesh)
    found = f(model, x)
    np.testing.assert_allclose(found.numpy(), peer(ids).logits.detach().numpy(), atol=2e-5)
    sent = Counter(n.op for n in f.schedule.graph.nodes if n.is_collective)
    assert sent == {"all_reduce": 2 * FAMILIES[name][2] + 1}  # and one of the embedding
