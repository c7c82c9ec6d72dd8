"""Choice of the next token from logits: a penalty for repeated tokens, filters, a draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.declared import Natural, Rate, Share
from ..core.dtypes import f32, int32
from ..core.errors import ShapeError
from ..core.public import checked
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Like, Tensor

LEAST_TEMPERATURE = 1e-30
"""Below it, a temperature would be 0 in f32."""


def penalized(logits: Tensor, seen: Tensor, repetition: Like) -> Tensor:
    """`logits` [B, V] with those of the tokens `seen`, bool [B, V], divided by `repetition` where
    they are above 0, else multiplied by it (Keskar et al. 2019)."""
    return F.where(seen, F.where(logits < 0, logits * repetition, logits / repetition), logits)


def filtered(
    logits: Tensor, temperature: Like, top_k: Like, top_p: Like, min_p: Like, ranks: Tensor
) -> tuple[Tensor, Tensor]:
    """(Weights f32[B, n] of the n likeliest tokens, largest first, 0 for those that are left out;
    their ids).

    The weights are softmax(logits / temperature), up to a factor for each row. The filters follow
    each other as in transformers: the `top_k` largest (0: all); of those the fewest whose
    probabilities reach `top_p`; of those the ones with at least `min_p` of the largest. `ranks` are
    those of `ranks_for(top_k)`: only so many logits are sorted.
    """
    n = min(ranks.shape[0] or logits.shape[-1], logits.shape[-1])
    x, ids = F.topk(logits, n)
    # Not x[:, :1]: XLA's fast top-k takes a sort whose result is sliced in one way only.
    weights = F.exp((x - F.max(logits, -1, True)) / temperature)
    rank = F.arange(n).reshape(1, -1)
    weights = F.where((rank < top_k) | (as_tensor(top_k) == 0), weights, 0.0)
    before = F.cumsum(weights) - weights
    most = F.where(as_tensor(top_p) < 1.0, F.sum(weights, -1, True) * top_p, math.inf)
    weights = F.where((before < most) | (rank == 0), weights, 0.0)
    return F.where(weights >= min_p, weights, 0.0), ids


def ranks_for(top_k: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Numbers whose count is the least power of two of at least `top_k`, or 0 for all tokens: a
    size for `filtered`, so that similar bounds share a program."""
    return np.arange(1 << (top_k - 1).bit_length() if top_k else 0, dtype=np.int32)


def drawn(weights: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    """The id i32[B] where the running sum of `weights` [B, V] passes the share `at` f32[B]."""
    sums = F.cumsum(weights)
    below = (sums <= at.reshape(-1, 1) * sums[:, -1:]) & (weights > 0)
    count = F.sum(below.to(int32), -1, True)
    last = F.sum((weights > 0).to(int32), -1, True) - 1  # if a sum was rounded up to the last one
    return F.gather(ids, F.minimum(count, last), 1)[:, 0]


@checked
def sample(
    logits: Like,
    at: Like,
    *,
    temperature: Rate = 1.0,
    top_k: Natural = 0,
    top_p: Share = 1.0,
    min_p: Share = 0.0,
) -> Tensor:
    """Ids int32[B], drawn with softmax(logits / temperature) among the tokens that pass the
    filters.

    `logits` are [B, V]; `at` f32[B] are uniform numbers from 0 to 1, one for each row. `top_k`
    leaves the largest logits (0: all), then `top_p` the fewest tokens whose probabilities add up to
    it, then `min_p` those with at least this share of the largest probability. Temperature 0 takes
    the largest logit. A row with NaN, or whose largest logit is infinite, gives -1. Raises
    ShapeError if the shapes do not fit.

    >>> sample(np.array([[0.0, 3.0, 1.0]] * 2), [0.0, 0.999], temperature=0.0).numpy().tolist()
    [1, 1]
    >>> sample(np.array([[0.0, 3.0, 1.0]] * 2), [0.0, 0.999]).numpy().tolist()
    [1, 0]
    """
    x, share = as_tensor(logits).to(f32), as_tensor(at).to(f32)
    if x.ndim != 2 or not x.shape[1] or share.shape != x.shape[:1]:
        raise ShapeError(
            "sample: logits are [B, V], with one number [B] for each row",
            logits=x.type,
            uniform=share.type,
            fix="give those of one text as logits[None], [0.5]",
        )
    chosen = F.isfinite(F.max(x, -1)) & ~F.isnan(x).any(-1)
    if temperature == 0:
        return F.where(chosen, F.argmax(x, -1), -1)
    least = max(temperature, LEAST_TEMPERATURE)
    ranks = as_tensor(ranks_for(top_k))
    ids = drawn(*filtered(x, least, top_k, top_p, min_p, ranks), share)
    return F.where(chosen, ids, -1)


def uniform(seeds: list[int], count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Uniform numbers f32[rows, count] in [0, 1), row i from the seed `seeds[i]` alone."""
    rows = [np.random.Generator(np.random.Philox(s)).random(count, np.float32) for s in seeds]
    return np.stack(rows)


__all__ = ["drawn", "filtered", "penalized", "ranks_for", "sample", "uniform"]
