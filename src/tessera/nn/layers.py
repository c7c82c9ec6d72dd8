"""Basic layers: linear, embedding, norms, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.checks import sizes, unfit
from ..core.declared import Count, Flag, Integer, Probability, Real
from ..lang.math.create import Init, Normal
from ..lang.record.parameter import Parameter
from ..lang.value.tensor import Tensor
from . import functional as fn
from .module import Module
from .torch_layout import TRANSPOSED


def normal(std: float) -> Init:
    """An initializer: normal with standard deviation `std`."""
    return Normal(std)


class Linear(Module):
    """`x @ weight + bias` for x [..., in_features]: [..., out_features].

    `weight` [in_features, out_features] is normal with standard deviation `std` (default
    1/sqrt(in_features)), `bias` [out_features] is zero.
    """

    def __init__(
        self, in_features: Count, out_features: Count, bias: Flag = True, std: Real | None = None
    ):
        self.weight = Parameter(
            in_features, out_features, init=normal(std or 1.0 / math.sqrt(in_features))
        )
        self.bias = Parameter(out_features, init="zeros") if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return fn.linear(x, self.weight, self.bias)


TRANSPOSED.add(Linear)


class Embedding(Module):
    """Rows of `weight` [vocab, d] by integer ids [...]: [..., d], as `nn.embedding`."""

    def __init__(self, vocab: Integer, d: Integer, *, std: Real = 0.02):
        self.weight = Parameter(vocab, d, init=normal(std))

    def __call__(self, ids: Tensor) -> Tensor:
        return fn.embedding(ids, self.weight)


def _normed(name: str, d: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes of the dims that a norm is over. Raises UsageError if there are none."""
    found = sizes(name, d)
    if not found:
        raise unfit(name, "d", d, "give the size of the last dim, or of several, e.g. (4, 5)")
    return found


class LayerNorm(Module):
    """`nn.layer_norm` over the last dim [d], with `weight` [d] and `bias` [d].

    With a tuple it is over as many of the last dims: `nn.LayerNorm((4, 5))` takes [..., 4, 5], and
    `weight` and `bias` have the shape [4, 5].
    """

    def __init__(self, d: int | Sequence[int], eps: Real = 1e-5):
        shape = _normed("LayerNorm", d)
        self.weight = Parameter(*shape, init="ones")
        self.bias = Parameter(*shape, init="zeros")
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return fn.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """`nn.rms_norm` over the last dim [d], with `weight` [d]; with a tuple over as many dims.

    With `offset` the norm multiplies by 1 + `weight`, which begins at zeros (Gemma).
    """

    def __init__(self, d: int | Sequence[int], eps: Real = 1e-6, *, offset: Flag = False):
        self.weight = Parameter(*_normed("RMSNorm", d), init="zeros" if offset else "ones")
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Tensor) -> Tensor:
        weight = fn.wide(self.weight) + 1.0 if self.offset else self.weight
        return fn.rms_norm(x, weight, self.eps)


class Dropout(Module):
    """`nn.dropout` with probability `p` while `training` is True; `eval()` turns it off."""

    def __init__(self, p: Probability):
        self.p = p
        self.training = True

    def __call__(self, x: Tensor) -> Tensor:
        return fn.dropout(x, self.p, self.training)
