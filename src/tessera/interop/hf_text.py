"""Text of a HuggingFace folder: its tokenizer, and the ids that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.checks import existing, library
from ..core.errors import UsageError
from .hf_files import CONFIG, read_json

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"


def hf_tokenizer(folder: Path, name: str = "generate") -> Any:
    """The tokenizer of `folder`, of the library `tokenizers`, for the command `name`. Raises
    UsageError if there is no tokenizer.json, or it cannot be read."""
    path = folder / TOKENIZER
    existing(name, path, f"give a folder with {TOKENIZER}, which transformers saves")
    tokenizers = library(name, "tokenizers", "demo")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise UsageError(
            f"{name}: {str(path)!r} is no tokenizer: {error}", fix="fetch or save it anew"
        ) from None


def hf_ends(folder: Path) -> list[int]:
    """The ids that end a text: `eos_token_id` of generation_config.json, else of config.json."""
    for name in (GENERATION, CONFIG):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            return [*found] if isinstance(found, list) else [found]
    return []


__all__ = ["hf_ends", "hf_tokenizer"]
