"""Language models of transformers."""

from __future__ import annotations

from .hugging_face import SIZES, hugging_face
from .model import ids

causal = hugging_face(
    "AutoModelForCausalLM", "logits", ids("input_ids"), {**SIZES, "num_key_value_heads": 2}, True
)
masked = hugging_face("AutoModelForMaskedLM", "logits", ids("input_ids"), SIZES, True)
features = hugging_face("AutoModel", "last_hidden_state", ids("input_ids"), SIZES, True)
_both = ids("input_ids", "decoder_input_ids")
pairs = hugging_face(
    "AutoModelForSeq2SeqLM", "logits", _both,
    {"d_model": 32, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
     "decoder_start_token_id": 0, "max_position_embeddings": 32, "encoder_layers": 2,
     "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
     "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
)  # fmt: skip
t5 = hugging_face(
    "AutoModelForSeq2SeqLM", "logits", _both,
    {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64,
     "pad_token_id": 0, "decoder_start_token_id": 0},
)  # fmt: skip

CONTRACT = "'contract' needs all microbatches"
ROUTED = "needs all microbatches"  # their routing looks at the tokens of all rows

# -- decoders -------------------------------------------------------------------------------------
for _name in ("llama", "mistral", "qwen2", "olmo", "olmo2", "olmo3", "stablelm", "starcoder2",
              "granite", "phi", "phi3", "smollm3", "arcee", "seed_oss", "nemotron", "persimmon",
              "gpt2", "gpt_neox", "gpt_bigcode", "bloom", "biogpt"):  # fmt: skip
    causal(_name)
for _name in ("qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "glm", "glm4",
              "ernie4_5", "helium", "ministral", "apertus"):  # fmt: skip
    causal(_name, head_dim=8)
for _name in ("mixtral", "olmoe", "qwen3_moe", "qwen2_moe", "granitemoe"):
    causal(_name, uncut=ROUTED, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
           moe_intermediate_size=32, shared_expert_intermediate_size=32)  # fmt: skip
# In training it draws random numbers.
causal("phimoe", mode="eval", uncut=ROUTED, num_local_experts=4, num_experts_per_tok=2)
causal("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=4)
causal("gptj", rotary_dim=4)
causal("codegen", rotary_dim=4)
causal("opt", ffn_dim=64, word_embed_proj_dim=32)
causal("falcon", new_decoder_architecture=False)
causal("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=32)
causal("mamba", state_size=4, time_step_rank=4)
causal("mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)
causal("xglm", ffn_dim=64, attention_heads=4, num_layers=2, d_model=32)

# -- encoders -------------------------------------------------------------------------------------
for _name in ("bert", "roberta", "electra", "mpnet", "camembert", "ernie", "nystromformer",
              "xlm-roberta", "megatron-bert", "roberta-prelayernorm", "data2vec-text"):  # fmt: skip
    masked(_name)
masked("roformer", embedding_size=32)
masked("rembert", input_embedding_size=32, output_embedding_size=32)
masked("esm", position_embedding_type="rotary", mask_token_id=3)
masked("distilbert", dim=32, n_heads=4, n_layers=2, hidden_dim=64)
masked("albert", embedding_size=16)
masked(
    "deberta-v2",
    uncut=CONTRACT,
    relative_attention=True,
    position_buckets=8,
    pos_att_type=["p2c", "c2p"],
)
masked("deberta", uncut=CONTRACT, relative_attention=True, pos_att_type=["p2c", "c2p"])
masked("modernbert", local_attention=4, cls_token_id=1, sep_token_id=2)
masked("squeezebert", embedding_size=32)
masked("mobilebert", embedding_size=16, intra_bottleneck_size=16)
hugging_face(
    "AutoModel", "last_hidden_state", ids("input_ids"),
    {"d_model": 32, "n_head": 4, "d_inner": 64, "n_layer": 2, "vocab_size": 64, "mem_len": None},
)("xlnet")  # fmt: skip
masked("fnet", tpu_short_seq_length=8, refused="complex64 is not imported")

# -- encoders with decoders -----------------------------------------------------------------------
t5("t5")
t5("mt5", feed_forward_proj="gated-gelu")
t5("umt5")
for _name in ("bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "m2m_100", "plbart"):
    pairs(_name)
pairs("marian", decoder_vocab_size=64)
