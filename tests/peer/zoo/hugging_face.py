"""Rows of transformers from a config's type and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .model import Model, add

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4, "num_labels": 10,
}  # fmt: skip


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
    head: str, result: str, inputs: Callable[[], dict[str, Any]], sizes: Mapping[str, Any],
    layers: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """A function that adds a row: `added(name, **keys)` for the config's type `name`. The key None
    takes a size out."""

    def added(
        name: str, *, given: Any = None, mode: str = "train", cut: bool = layers,
        refused: str = "", uncut: str = "", **keys: Any,
    ) -> None:  # fmt: skip
        def make() -> Any:
            import transformers

            chosen = {k: v for k, v in {**sizes, **keys}.items() if v is not None}
            config = transformers.AutoConfig.for_model(name, **chosen)
            return getattr(transformers, head).from_config(without_dropout(config))

        pick = lambda out: out[result]  # noqa: E731
        add(Model(name, "transformers", make, given or inputs, pick, mode, cut, refused, uncut))

    return added
