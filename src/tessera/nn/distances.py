"""Losses by absolute differences, and cosine similarity."""

from __future__ import annotations

from ..core.declared import NonNegative, Positive
from ..lang.math import functions as F
from ..lang.math import norms
from ..lang.math.elementwise import as_float
from ..lang.math.shape import Dims, dims_of
from ..lang.value.tensor import Like, Tensor
from .functional import wide
from .losses import Reduction, pair, reduced


def l1_loss(x: Like, target: Like, reduction: Reduction = "mean") -> Tensor:
    """The absolute difference of `x` and `target`, in f32: by default its mean over all elements.

    `reduction` is "mean", "sum" or "none". Raises ShapeError if the shapes differ, UsageError for
    another reduction.
    """
    a, b = pair("l1_loss", x, target)
    return reduced(F.abs(a - b), reduction)


def huber_loss(
    x: Like, target: Like, reduction: Reduction = "mean", delta: Positive = 1.0
) -> Tensor:
    """The Huber loss of `x` and `target` (Huber 1964), in f32.

    It is half the squared difference below `delta`, and `delta` times the absolute difference less
    `delta / 2` above. `reduction` is "mean", "sum" or "none". Raises ShapeError if the shapes
    differ, UsageError for another reduction or if `delta` is not above 0.
    """
    a, b = pair("huber_loss", x, target)
    return reduced(_huber(a - b, delta), reduction)


def smooth_l1_loss(
    x: Like, target: Like, reduction: Reduction = "mean", beta: NonNegative = 1.0
) -> Tensor:
    """`huber_loss` with delta `beta`, divided by `beta` (Girshick 2015); beta 0: `l1_loss`.

    Raises ShapeError if the shapes differ, UsageError for another reduction or if `beta` is below
    0.
    """
    if not beta:
        return l1_loss(x, target, reduction)
    a, b = pair("smooth_l1_loss", x, target)
    return reduced(_huber(a - b, beta) * (1.0 / beta), reduction)


def _huber(gap: Tensor, delta: float) -> Tensor:
    size = F.abs(gap)
    return F.where(size < delta, 0.5 * size * size, delta * (size - 0.5 * delta))


def normalize(x: Like, p: float = 2.0, dim: Dims = -1, eps: NonNegative = 1e-12) -> Tensor:
    """`x` divided by its `p`-norm along `dim`, or by `eps` if the norm is less.

    PyTorch's `dim` is 1 by default. Raises ShapeError if `x` has no such dim.
    """
    t = as_float("normalize", x)
    size = norms.vector_norm(wide(t), p, dims_of("normalize", t, dim), True)
    return (wide(t) / F.maximum(size, eps)).to(t.dtype)


def cosine_similarity(x: Like, y: Like, dim: int = -1, eps: NonNegative = 1e-8) -> Tensor:
    """The cosine of the angle between `x` and `y` along `dim`; other dims broadcast.

    Norms below `eps` count as `eps`. PyTorch's `dim` is 1 by default. Raises ShapeError if there is
    no such dim.
    """
    a, b = wide(x), wide(y)
    dims_of("cosine_similarity", a if a.ndim >= b.ndim else b, dim)
    sizes = [F.maximum(norms.vector_norm(t, 2, dim, True), eps) for t in (a, b)]
    return F.sum((a / sizes[0]) * (b / sizes[1]), dim).to(as_float("cosine_similarity", x).dtype)
