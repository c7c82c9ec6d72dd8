"""Shuffling without a table: the sample at place k, as a function of seed, epoch and k.

`permuted` is a keyed bijection of 0 .. n-1: a Feistel network over the least power of two that
holds n, iterated until the result is below n (Black and Rogaway, 2002). So each process computes
any places by itself, and all processes agree.

>>> permuted(np.arange(8), 8, seed=1, epoch=0).tolist()
[3, 7, 0, 4, 2, 6, 5, 1]
>>> permuted(np.array([3, 5]), 8, seed=1, epoch=0).tolist()
[4, 6]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 12
_BLOCK = 4096


def permuted(places: NDArray[Any], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples at `places` (each from 0 to n - 1) in the order of `seed` and `epoch`."""
    rounds: NDArray[np.uint64] = np.arange(_ROUNDS, dtype=np.uint64)
    keys = mix(mix(mix(word(seed)) + word(epoch)) + rounds)
    bits = max(1, (n - 1).bit_length())
    x = _feistel(places.astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(x >= n)).size:  # at most half of the range is outside
        x[outside] = _feistel(x[outside], bits, keys)
    return x.astype(np.int64)


def _feistel(x: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of the numbers of `bits` bits: each half in turn is XORed with a hash of the
    other."""
    low = np.uint64(bits // 2)
    right_mask, left_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    left, right = x >> low, x & right_mask
    for k in range(0, _ROUNDS, 2):
        right = right ^ (mix(left + keys[k]) & right_mask)
        left = left ^ (mix(right + keys[k + 1]) & left_mask)
    return (left << low) | right


class Order:
    """A map from places in an endless run over n samples, epoch by epoch, to sample numbers.

    For requests in order it computes a block at a time, so that a small batch costs little.
    """

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self._held: tuple[int, int, NDArray[np.int64]] | None = None

    def __call__(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at places `start` to `stop` of `epoch`; -1 for places after its end."""
        found = np.full(stop - start, -1, np.int64)
        for block in range(start // _BLOCK, (min(stop, self.n) - 1) // _BLOCK + 1):
            first = block * _BLOCK
            a, b = max(start, first), min(stop, first + _BLOCK, self.n)
            found[a - start : b - start] = self._block(epoch, block)[a - first : b - first]
        return found

    def _block(self, epoch: int, block: int) -> NDArray[np.int64]:
        if self._held is None or self._held[:2] != (epoch, block):
            places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.n))
            if self.shuffle:
                places = permuted(places, self.n, self.seed, epoch)
            self._held = (epoch, block, places)
        return self._held[2]


def word(value: int) -> NDArray[np.uint64]:
    """`value` as one 64-bit word, in an array of one."""
    # An array, because NumPy warns when a scalar wraps around and is silent for arrays.
    return np.array([value & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014), implemented here so that no NumPy release changes the
    data."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
