"""Models of other libraries with random weights, in small configurations: a row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS = 4  # of each batch
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4, "num_labels": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model: `make()` gives a PyTorch module, `inputs()` a call of it by name, and `pick` takes
    the tensor that counts from its results."""

    name: str
    library: str
    make: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    pick: Callable[[Any], Any] = lambda out: out


MODELS: dict[str, Model] = {}


def add(model: Model) -> None:
    assert model.name not in MODELS
    MODELS[model.name] = model


# -- inputs ---------------------------------------------------------------------------------------
def ids(*names: str) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randint(3, 64, (ROWS, 8)) for name in names}


def images(size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(ROWS, 3, size, size)}


# -- transformers ---------------------------------------------------------------------------------
def without_dropout(config: Any) -> Any:
    """The config, and those in it, with every rate of dropout at 0 and without a cache."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def hugging_face(
    head: str, result: str, inputs: Callable[[], dict[str, Any]], sizes: Mapping[str, Any]
) -> Callable[..., None]:
    """A function that adds a row: `added(name, **keys)` for the config's type `name`."""

    def added(name: str, **keys: Any) -> None:
        def make() -> nn.Module:
            import transformers

            config = transformers.AutoConfig.for_model(name, **{**sizes, **keys})
            made: nn.Module = getattr(transformers, head).from_config(without_dropout(config))
            return made

        add(Model(name, "transformers", make, inputs, lambda out: out[result]))

    return added


causal = hugging_face("AutoModelForCausalLM", "logits", ids("input_ids"), GROUPED)
masked = hugging_face("AutoModelForMaskedLM", "logits", ids("input_ids"), SIZES)
image = hugging_face("AutoModelForImageClassification", "logits", images(16), IMAGES)

for _name in ("llama", "mistral", "qwen2", "olmo", "olmo2", "stablelm", "starcoder2", "granite",
              "phi", "phi3", "smollm3", "arcee", "seed_oss"):  # fmt: skip
    causal(_name)
for _name in ("qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "glm", "glm4",
              "ernie4_5"):  # fmt: skip
    causal(_name, head_dim=8)
for _name in ("mixtral", "olmoe", "qwen3_moe", "qwen2_moe"):
    causal(_name, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
           moe_intermediate_size=32, shared_expert_intermediate_size=32)  # fmt: skip
masked("bert")
image("vit")
