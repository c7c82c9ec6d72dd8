"""Tokens for a model of a HuggingFace config: those of files, or text that is encoded once.

Text is encoded with the tokenizer.json of the model's folder; without one a byte-level BPE is
trained on it. Tokens and tokenizer are kept in a folder of the run, so a run that goes on has the
same ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import existing
from ..core.errors import UsageError
from ..core.files import write_whole
from ..data import tokenizer
from ..data.corpus import collect
from ..data.sources import TABLE_FILES, TOKEN_FILES, Reading, TokenSource, open_source
from ..data.tokenize_rows import is_dataset_folder
from ..interop.hf_files import write_json
from ..interop.hf_text import TOKENIZER, hf_tokenizer

ALL_MB = 1e6  # of text; it is in memory while it is encoded
TOKENS = "tokens.npy"
# What transformers' tokenizers read from a folder.
FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip


def holds_tokens(data: Path) -> bool:
    """Returns whether `data` is a file or folder of tokens or tables, not of text."""
    existing("train", data, "name a folder of text, or of tokens", folder=True)
    files = data.iterdir() if data.is_dir() else [data]
    known = TOKEN_FILES + TABLE_FILES
    return is_dataset_folder(data) or any(f.suffix in known for f in files)


@dataclass(frozen=True)
class Words:
    """The tokens of `data` for the model of a config.json `raw`. `folder` has the model's tokenizer
    if there is one, `weights` says whether the model was trained with it. Text is encoded into the
    folder `kept`."""

    data: Path
    kept: Path
    raw: Mapping[str, Any]
    folder: Path
    weights: bool
    dtype: str | None = None  # of .bin files

    @property
    def own(self) -> Path | None:
        """The model's own tokenizer, if it has one."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None

    @property
    def vocab(self) -> int:
        """The number of tokens that the model knows. Raises UsageError if its config has none."""
        found = self.raw.get("vocab_size")
        if not isinstance(found, int):
            raise UsageError(
                "train: the config has no vocab_size", fix="give that of a causal language model"
            )
        return found

    def prepare(self) -> None:
        """Encodes text, unless it is done. Raises UsageError if there is no text, or no tokenizer
        that the weights were trained with."""
        if holds_tokens(self.data) or (self.kept / TOKENS).is_file():
            return
        if self.own is None and self.weights:
            raise self._no_tokenizer()
        corpus = collect(self.data, max_mb=ALL_MB)
        texts = [d.text for d in (*corpus.train, *corpus.val)]
        if self.own is None:
            trained = tokenizer.train(texts, min(self.vocab, tokenizer.LARGEST_VOCAB))
            write_whole(self.kept / TOKENIZER, trained.text().encode())
            ids = trained.encode_documents(texts).astype(np.uint32)
        else:
            close = np.array([] if self._end is None else [self._end], np.uint32)
            encode = self._encode()
            ids = np.concatenate([part for text in texts for part in (encode(text), close)])
        buffer = BytesIO()
        np.save(buffer, ids)
        write_whole(self.kept / TOKENS, buffer.getvalue())

    def source(self) -> TokenSource:
        """The tokens. Raises UsageError if they cannot be read, or the model does not know one."""
        if holds_tokens(self.data):
            encode = self._encode() if self.own else self._refused
            found = open_source(self.data, Reading(dtype=self.dtype, tokenizer=encode))
        else:
            found = open_source(self.kept / TOKENS, Reading())
        top = max(int(piece.max()) for piece in found.pieces)
        if top >= self.vocab:
            raise UsageError(
                f"train: the data have token {top}, the model knows {self.vocab} tokens",
                data=found,
                fix="encode the data with the model's tokenizer, or raise vocab_size in its config",
            )
        return found

    @property
    def _end(self) -> int | None:
        """The token that closes a document, by the config."""
        ends = self.raw.get("eos_token_id")
        first = ends[0] if isinstance(ends, list) and ends else ends
        return first if isinstance(first, int) else None

    def _encode(self) -> Callable[[str], NDArray[np.uint32]]:
        engine = hf_tokenizer(self.folder, "train")
        return lambda text: np.array(engine.encode(text, add_special_tokens=False).ids, np.uint32)

    def _refused(self, text: str) -> NDArray[np.uint32]:
        raise self._no_tokenizer()

    def _no_tokenizer(self) -> UsageError:
        return UsageError(
            f"train: {str(self.folder)!r} has no {TOKENIZER} for the text in {str(self.data)!r}",
            fix="save it there: transformers.AutoTokenizer.from_pretrained(name)"
            ".save_pretrained(folder); or give tokens (.npy)",
        )

    # -- for the saved model ----------------------------------------------------------------------
    def special_tokens(self) -> dict[str, Any]:
        """The entries of config.json that a tokenizer that was trained here changes."""
        if not (self.kept / TOKENIZER).is_file():
            return {}
        end = tokenizer.load(self.kept / TOKENIZER).end
        return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}

    def copy_tokenizer(self, folder: Path) -> None:
        """Writes the files of the tokenizer, if there is one, beside a saved model."""
        if (self.kept / TOKENIZER).is_file():
            shutil.copy(self.kept / TOKENIZER, folder / TOKENIZER)
            said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.END}
            write_json(folder / "tokenizer_config.json", said)
        elif self.own is not None:
            for file in (self.folder / name for name in FILES):
                if file.is_file():
                    shutil.copy(file, folder / file.name)


__all__ = ["Words", "holds_tokens"]
