"""A smoothed bigram model: the baseline that a language model must beat.

p(b | a) = (count(a, b) + m p(b)) / (count(a) + m): the counted follower, drawn towards the unigram
frequency, with `m` pseudocounts after each `a` (Dirichlet smoothing: MacKay and Peto, 1995). `m` is
chosen on a held-out part of the training tokens, then everything is counted.

>>> tokens = np.array([0, 1, 2] * 200, np.uint16)
>>> model = fit(tokens, vocab=4)
>>> round(model.nats_per_token(tokens[:-1], tokens[1:]), 2)   # all but certain of the next token
0.0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""The values of `m` that are tried."""

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Bigram:
    """The counts of a bigram model and its smoothing strength."""

    counts: NDArray[np.int64] = field(repr=False)
    strength: float

    @property
    def vocab(self) -> int:
        return len(self.counts)

    def probabilities(self) -> NDArray[np.float64]:
        """p(b | a) as [vocab, vocab]; each row sums to one and no entry is zero."""
        # Add-one smoothing, so that an unseen token has a probability above 0.
        single = self.counts.sum(0, dtype=np.float64) + 1.0
        single /= single.sum()
        after = self.counts.sum(1, dtype=np.float64)[:, None]
        found: NDArray[np.float64] = (self.counts + self.strength * single) / (
            after + self.strength
        )
        return found

    def nats_per_token(self, inputs: NDArray[Any], targets: NDArray[Any]) -> float:
        """The mean of -ln p(target | input); both arrays have the same shape, of any rank."""
        pairs = _count(inputs.reshape(-1), targets.reshape(-1), self.vocab)
        return float(-(pairs * np.log(self.probabilities())).sum() / inputs.size)


def fit(tokens: NDArray[Any], vocab: int, held_out: float = 0.05) -> Bigram:
    """The bigram model of all `tokens`, with the smoothing that is best on their last `held_out`
    part."""
    cut = tokens.size - max(2, int(tokens.size * held_out))
    if cut < 2:
        raise UsageError(
            f"bigram: {tokens.size} tokens are too few to count and to choose the smoothing on",
            fix="take more text",
        )
    counted = _count(tokens[: cut - 1], tokens[1:cut], vocab)
    rest = _count(tokens[cut:-1], tokens[cut + 1 :], vocab)

    def loss(strength: float) -> float:
        return float(-(rest * np.log(Bigram(counted, strength).probabilities())).sum())

    best = min(STRENGTHS, key=loss)
    return Bigram(_count(tokens[:-1], tokens[1:], vocab), best)


def _count(first: NDArray[Any], second: NDArray[Any], vocab: int) -> NDArray[np.int64]:
    """The number of occurrences of each pair, as [vocab, vocab]. It counts in chunks, so that a
    mapped file is never read as a whole."""
    counts = np.zeros(vocab * vocab, np.int64)
    for start in range(0, first.size, _CHUNK):
        a = first[start : start + _CHUNK].astype(np.int64)
        b = second[start : start + _CHUNK].astype(np.int64)
        if a.max() >= vocab or b.max() >= vocab:
            raise UsageError(
                f"bigram: token {max(a.max(), b.max())} is outside a vocabulary of {vocab}",
                fix="pass the vocabulary of the tokenizer that made the tokens",
            )
        counts += np.bincount(a * vocab + b, minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)
