"""Byte-level BPE tokenizer, trained on the corpus.

Byte-level means that any text can be encoded and decoded without change, and that each token stands
for a known number of bytes, so a loss in nats per token can be converted to bits per byte.

>>> tok = train(["def f(x):\\n    return x + 1\\n"] * 4, vocab=280)
>>> ids = tok.encode("return x")
>>> ids.dtype.name, tok.decode(ids), int(tok.token_bytes[ids].sum())
('uint16', 'return x', 8)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import existing, library, whole
from ..core.errors import UsageError

if TYPE_CHECKING:
    import tokenizers

END = "<|end|>"
"""Closes every document. It stands for no bytes."""

SMALLEST_VOCAB = 257
"""All bytes, and END."""
LARGEST_VOCAB = 1 << 16
"""Ids are stored as uint16."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A trained tokenizer: `encode`, `decode`, and the number of bytes of each token."""

    _engine: tokenizers.Tokenizer = field(repr=False)
    vocab: int
    end: int
    token_bytes: NDArray[np.int64] = field(repr=False)

    def encode(self, text: str) -> NDArray[np.uint16]:
        """The ids of `text`, without an end token."""
        return np.array(self._engine.encode(text, add_special_tokens=False).ids, np.uint16)

    def encode_documents(self, texts: Iterable[str]) -> NDArray[np.uint16]:
        """The ids of all texts in order, each closed by `end`."""
        parts: list[NDArray[np.uint16]] = []
        for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False):
            parts.append(np.array([*encoding.ids, self.end], np.uint16))
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`, without end tokens; bytes that are not UTF-8 become U+FFFD."""
        kept = [int(i) for i in ids if int(i) != self.end]
        return self._engine.decode(kept, skip_special_tokens=False)

    def bits_per_byte(self, nats_per_token: float, targets: NDArray[Any]) -> float:
        """A mean loss over `targets`, converted to bits per byte of their text."""
        covered = int(self.token_bytes[targets.astype(np.int64)].sum())
        return nats_per_token * targets.size / math.log(2) / covered

    def text(self) -> str:
        """The JSON of the `tokenizers` library, which determines the ids."""
        return self._engine.to_str()

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer as the JSON of the `tokenizers` library."""
        self._engine.save(str(path))


def train(texts: Iterable[str], vocab: int = 1024) -> Tokenizer:
    """A byte-level BPE of at most `vocab` tokens: 256 bytes, END, and the most useful merges.

    The same texts give the same tokenizer. Raises `UsageError` for a vocabulary that is too small
    to hold all bytes or too large for uint16.
    """
    whole("tokenizer", "vocab", vocab, SMALLEST_VOCAB, LARGEST_VOCAB)
    lib = _library()
    engine = lib.Tokenizer(lib.models.BPE())
    engine.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        # Sorted, so that the ids of bytes never depend on a set's order.
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return _wrap(engine)


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a file that `save` wrote."""
    existing("tokenizer", Path(path), "train one and save it: tokenizer.train(texts).save(path)")
    return _wrap(_library().Tokenizer.from_file(str(path)))


def _wrap(engine: tokenizers.Tokenizer) -> Tokenizer:
    """The library's tokenizer as a Tokenizer, with the bytes of each token. Raises UsageError if it
    has no end-of-document token."""
    size = engine.get_vocab_size()
    end = engine.token_to_id(END)
    if end is None:
        raise UsageError(
            f"tokenizer: it has no {END} token, so it was not made by tokenizer.train",
            fix="train one: tokenizer.train(texts)",
        )
    # The text "<|end|>" is encoded as text: only encode_documents adds the token.
    engine.encode_special_tokens = True
    # In the byte-level alphabet every character stands for one byte.
    token_bytes = np.array([len(engine.id_to_token(i) or "") for i in range(size)], np.int64)
    token_bytes[end] = 0
    return Tokenizer(engine, size, end, token_bytes)


def _library() -> Any:
    return library("tokenizer", "tokenizers", "demo")
