"""Text of a run: a corpus with its tokenizer and token files, made once and cached.

The cache is keyed by a hash of the corpus' text: a changed file is never missed, and a second run
starts at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data import bigram, tokenizer
from ..data.corpus import Corpus, Document, collect
from ..data.tokenizer import Tokenizer
from ..data.tokens import Batch, open_tokens, write_tokens

FORMAT = b"1"
"""Must change when the cached files would be made differently."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Text:
    """A corpus as tokens. `train` and `val` are arrays of ids, each document closed by an end
    token."""

    name: str
    files: int
    train_bytes: int
    val_bytes: int
    tokenizer: Tokenizer = field(repr=False)
    train: NDArray[np.uint16] = field(repr=False)
    val: NDArray[np.uint16] = field(repr=False)
    kept_at: Path

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.files} files, {self.train_bytes / 1e6:.1f} MB = "
            f"{self.train.size:,} tokens to train on, {self.val_bytes / 1e6:.1f} MB = "
            f"{self.val.size:,} to validate; vocabulary {self.tokenizer.vocab}"
        )

    def bigram_loss(self, windows: list[Batch]) -> float:
        """Nats per token on `windows` of a bigram model fitted to all training tokens."""
        inputs = np.concatenate([w.inputs for w in windows])
        targets = np.concatenate([w.targets for w in windows])
        found = bigram.fit(self.train, self.tokenizer.vocab)
        return found.nats_per_token(inputs, targets)

    def bits_per_byte(self, nats_per_token: float, windows: list[Batch]) -> float:
        """A loss on `windows`, converted to bits per byte of their text."""
        targets = np.concatenate([w.targets for w in windows])
        return self.tokenizer.bits_per_byte(nats_per_token, targets)


def prepare(
    root: str | Path | None = None,
    *,
    vocab: int = 1024,
    cache: str | Path = "runs/.cache",
    max_mb: float = 16.0,
) -> Text:
    """The text under `root` (None: the standard library's source) as tokens, cached under `cache`.

    Raises UsageError if there is no such text, or if no vocabulary has that size.
    """
    corpus = collect(root, max_mb=max_mb)
    folder = Path(cache) / _fingerprint(corpus, vocab)
    if not folder.is_dir():
        _make(corpus, vocab, folder)
    return Text(
        corpus.name,
        len(corpus.train) + len(corpus.val),
        corpus.train_bytes,
        corpus.val_bytes,
        tokenizer.load(folder / "tokenizer.json"),
        open_tokens(folder / "train.npy"),
        open_tokens(folder / "val.npy"),
        folder,
    )


def _make(corpus: Corpus, vocab: int, folder: Path) -> None:
    """Trains the tokenizer and writes the token files into the folder `folder`, which appears only
    when it is complete."""
    trained = tokenizer.train((d.text for d in corpus.train), vocab)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed only when complete, so that a stopped run leaves no partial cache.
    part = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        trained.save(part / "tokenizer.json")
        for name, documents in (("train", corpus.train), ("val", corpus.val)):
            write_tokens(part / f"{name}.npy", trained.encode_documents(d.text for d in documents))
        os.chmod(part, 0o755)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # if it exists, another run made the same
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fingerprint(corpus: Corpus, vocab: int) -> str:
    h = hashlib.sha256(FORMAT + f" {vocab}".encode())
    for side in (corpus.train, corpus.val):
        _feed(h, b"side")
        for document in side:
            _document(h, document)
    return h.hexdigest()[:16]


def _document(h: Any, document: Document) -> None:
    _feed(h, document.name.encode("utf-8", "surrogateescape"))
    _feed(h, document.text.encode())


def _feed(h: Any, part: bytes) -> None:
    # With its length, so that different lists of texts never give the same bytes.
    h.update(len(part).to_bytes(8, "little"))
    h.update(part)
