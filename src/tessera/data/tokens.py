"""Token files and batches: the windows of a step, drawn from seed and step.

Tokens are in one memory-mapped file. A batch is a pure function of seed and step, so a run that
resumes, or runs on other devices, sees the same data without saved state.

>>> data = TokenBatches(np.arange(1000, dtype=np.uint16), batch_size=2, seq_len=4, seed=7)
>>> batch = data.batch(17)
>>> batch.inputs.shape, bool((batch.targets == batch.inputs + 1).all())
((2, 4), True)
>>> bool((data.batch(17).inputs == batch.inputs).all())
True
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.declared import Count
from ..core.errors import UsageError
from ..core.public import checked
from .shuffle import mix, word


class Batch(NamedTuple):
    """int32 [batch, seq] each; a target is the token after its input."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]


def write_tokens(path: str | Path, tokens: NDArray[np.uint16]) -> None:
    """Writes tokens as a .npy file."""
    with open(path, "wb") as file:
        np.save(file, np.ascontiguousarray(tokens, np.uint16))


def open_tokens(path: str | Path) -> NDArray[np.uint16]:
    """The tokens of a file, memory-mapped: a page is read on use."""
    tokens: NDArray[np.uint16] = np.load(path, mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype != np.uint16:
        raise UsageError(
            f"tokens: {str(path)!r} holds {tokens.dtype} of shape {tokens.shape}",
            fix="write it with write_tokens: one row of uint16",
        )
    return tokens


@checked
@dataclass(frozen=True, slots=True, eq=False)
class TokenBatches:
    """Windows of `seq_len` + 1 tokens, `batch_size` of them a step, at places drawn from `seed`."""

    tokens: NDArray[np.uint16]
    batch_size: Count
    seq_len: Count
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens.size <= self.seq_len:
            raise UsageError(
                f"tokens: {self.tokens.size} tokens hold no window of {self.seq_len} and the "
                "token after it",
                fix="take more text, or a shorter seq_len",
            )

    @property
    def batch_tokens(self) -> int:
        """The number of tokens per step."""
        return self.batch_size * self.seq_len

    def batch(self, step: int) -> Batch:
        """The batch of `step`: windows at independent, uniformly drawn places."""
        row = np.arange(self.batch_size, dtype=np.uint64)
        drawn = mix(mix(mix(word(self.seed)) + word(step)) + row)
        return self._windows((drawn % np.uint64(self.tokens.size - self.seq_len)).astype(np.int64))

    def fixed(self, batches: int) -> list[Batch]:
        """At most `batches` full batches of windows that do not overlap, spread evenly.

        For validation: they depend on the tokens only. A short file gives fewer; a file that cannot
        fill a batch without overlap gives one batch whose windows overlap.
        """
        room = self.tokens.size - self.seq_len
        fitting = max(1, min(batches, (self.tokens.size - 1) // self.batch_tokens))
        starts = np.linspace(0, room - 1, fitting * self.batch_size).astype(np.int64)
        return [self._windows(part) for part in starts.reshape(fitting, self.batch_size)]

    def _windows(self, starts: NDArray[np.int64]) -> Batch:
        places = starts[:, None] + np.arange(self.seq_len + 1)
        windows = np.asarray(self.tokens[places], np.int32)
        return Batch(windows[:, :-1], windows[:, 1:])
