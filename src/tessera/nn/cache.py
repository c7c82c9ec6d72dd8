"""Which keys and values does a token see that comes alone? A cache of what was computed before it.

A cache has k and v, each [B, G, slots, size], with a token at the slot place % slots: as many slots
as tokens hold all, fewer hold the last ones, which is all that a layer with a window sees. So a
token's slot and a slot's token follow from the place of the last token, `at` [B], and programs have
one shape. Each sequence has a length of its own.
"""

from __future__ import annotations

from ..lang import functions as F
from ..lang.tensor import Tensor

Cache = dict[str, Tensor]


def places(slots: int, at: Tensor) -> Tensor:
    """The place of the token in each slot once that at `at` [B] is in: i32[B, slots]; below 0 where
    there is none.

    >>> from tessera.lang.create import tensor
    >>> places(4, tensor([1, 5])).numpy().tolist()
    [[0, 1, -2, -1], [4, 5, 2, 3]]
    """
    last = at.reshape(at.shape[0], 1)
    return last - (last - F.arange(slots).reshape(1, slots)) % slots


def filled(whole: Cache, at: Tensor, slots: int) -> Cache:
    """The cache after sequences [B, G, S, size] whose last tokens are at `at`; what follows is
    padding."""
    ids = places(slots, at)
    ids = ids.reshape(ids.shape[0], 1, slots, 1)
    return {name: F.gather_or_zero(t, ids, 2) for name, t in whole.items()}


def added(cache: Cache, one: Cache, at: Tensor) -> Cache:
    """The cache with the token `one` [B, G, 1, size], which is at `at`."""
    slots = cache["k"].shape[2]
    here = (at % slots).reshape(-1, 1, 1, 1) == F.arange(slots).reshape(1, 1, slots, 1)
    return {name: F.where(here, one[name].to(t.dtype), t) for name, t in cache.items()}


def seen(slots: int, at: Tensor, window: Tensor | None) -> Tensor:
    """Whether the token at `at` sees the key in each slot: bool [B, 1, 1, slots]."""
    place = places(slots, at)
    sees = place >= 0
    if window is not None:
        sees = sees & (at.reshape(at.shape[0], 1) - place < window)
    return sees.reshape(place.shape[0], 1, 1, slots)


def near(seq: int, window: Tensor) -> Tensor:
    """Whether each query's key is within `window` tokens before it: bool [S, S]."""
    place = F.arange(seq)
    return place.reshape(seq, 1) - place.reshape(1, seq) < window
