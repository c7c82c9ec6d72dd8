"""Key-value cache of decoding.

A cache has k and v, each [B, G, slots, size]; the token at position p is in slot p % slots. With as
many slots as tokens it holds all of them, with fewer the last ones, which suffice for a layer with
a window. The slot of a token, and the token in a slot, follow from the position `at` [B] of the
last token, so programs have fixed shapes while sequences differ in length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checks import unfit, whole
from ..core.errors import DTypeError, ShapeError, UsageError
from ..core.tensor_checks import floats, integers, ranked, shaped
from ..lang.math import functions as F
from ..lang.record.index_bounds import check_ids
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Tensor
from .gpt_config import GPTConfig

Cache = dict[str, Tensor]


def places(slots: int, at: Tensor) -> Tensor:
    """The position of the token in each slot after the one at `at` [B] is added: i32[B, slots];
    negative for an empty slot.

    >>> from tessera.lang.math.create import tensor
    >>> places(4, tensor([1, 5])).numpy().tolist()
    [[0, 1, -2, -1], [4, 5, 2, 3]]
    """
    last = at.reshape(at.shape[0], 1)
    return last - (last - F.arange(slots).reshape(1, slots)) % slots


def filled(whole: Cache, at: Tensor, slots: int) -> Cache:
    """The cache after sequences [B, G, S, size] whose last tokens are at `at`; later tokens are
    padding."""
    ids = places(slots, at)
    ids = ids.reshape(ids.shape[0], 1, slots, 1)
    return {name: F.gather_or_zero(t, ids, 2) for name, t in whole.items()}


def added(cache: Cache, one: Cache, at: Tensor) -> Cache:
    """The cache with the added token `one` [B, G, 1, size] at position `at`."""
    slots = cache["k"].shape[2]
    here = (at % slots).reshape(-1, 1, 1, 1) == F.arange(slots).reshape(1, 1, slots, 1)
    return {name: F.where(here, one[name].to(t.dtype), t) for name, t in cache.items()}


def visible_slots(slots: int, at: Tensor, window: Tensor | None) -> Tensor:
    """A mask, bool [B, 1, 1, slots], of the slots whose key the token at `at` sees."""
    place = places(slots, at)
    sees = place >= 0
    if window is not None:
        sees = sees & (at.reshape(at.shape[0], 1) - place < window)
    return sees.reshape(place.shape[0], 1, 1, slots)


# -- asked at the door ----------------------------------------------------------------------------
def checked_ids(ids: Any, c: GPTConfig) -> Tensor:
    """`ids` as token ids [B, S] with S at most `c.seq`. Raises ShapeError or DTypeError if they are
    not."""
    t: Tensor = as_tensor(ids)
    if not t.dtype.is_int:
        raise DTypeError(
            "GPT: ids must be integers", ids=t.type, fix="cast them with .to(ts.int32)"
        )
    if t.ndim != 2 or t.shape[1] > c.seq:
        fix = "cut the sequences, or build the model with a longer config.seq"
        raise ShapeError(
            f"GPT: ids must be integers [B, S] with S at most {c.seq}",
            ids=t.type,
            fix=fix if t.ndim == 2 else "give a batch: ids[None] for one sequence",
        )
    return t


def _wraps(c: GPTConfig) -> bool:
    """Returns whether slots may be reused: each layer has a window, and no rotary rates depend on
    the length of the sequence."""
    return all(c.layer_windows or [0]) and not any(
        r and r.by_length for r in (c.rope, c.local_rope)
    )


def prompt_of(ids: Any, at: Any, slots: Any, c: GPTConfig) -> tuple[Tensor, Tensor, int]:
    """The checked arguments of `GPT.prefill`. Raises ShapeError, DTypeError or UsageError if they
    do not fit."""
    name = "GPT.prefill"
    _no_context(name, c)
    ids, at = checked_ids(ids, c), as_tensor(at)
    _last_places(name, at, ids.shape[0], ids.shape[1])
    least = min(ids.shape[1], max(c.layer_windows)) if _wraps(c) else ids.shape[1]
    return ids, at, whole(name, "slots", slots, max(1, least))


def token_of(ids: Any, cache: Any, at: Any, c: GPTConfig) -> tuple[Tensor, Cache, Tensor, Tensor]:
    """The checked arguments of `GPT.decode`, and a factor per sequence: 1, or NaN if it has no slot
    left. Raises ShapeError, DTypeError or UsageError if they do not fit."""
    name = "GPT.decode"
    _no_context(name, c)
    if not isinstance(cache, Mapping) or set(cache) != {"k", "v"}:
        raise unfit(name, "the cache", cache, "give the second result of prefill or decode")
    ids, at, made = as_tensor(ids), as_tensor(at), {n: as_tensor(t) for n, t in cache.items()}
    ranked(name, "ids", ids.type, 1, "give one token of each sequence, [B]")
    integers(name, "ids", ids.type)
    slots = made["k"].shape[3] if made["k"].ndim == 5 else 1
    want = (c.layers, ids.shape[0], c.groups, slots, c.size)
    for what, t in made.items():
        shaped(name, f"the cache's {what}", t.type, want, ids=ids.type)
        floats(name, f"the cache's {what}", t.type)
    limit = c.seq if _wraps(c) and slots >= max(c.layer_windows) else min(slots, c.seq)
    _last_places(name, at, ids.shape[0], limit)
    return ids, made, at, emit("inside", at, size=limit)


def _last_places(name: str, at: Tensor, batch: int, limit: int) -> None:
    integers(name, "at", at.type)
    shaped(name, "at", at.type, (batch,))
    check_ids(name, "place", at, limit)


def _no_context(name: str, c: GPTConfig) -> None:
    if c.context is not None:
        raise UsageError(
            f"{name}: there is no cache of a sequence that is split by context={c.context!r}",
            fix="load the weights into an nn.GPT with context=None",
        )
