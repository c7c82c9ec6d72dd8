"""Further elementwise activations. (`relu`, `silu` and `gelu` are in `functional.py`.)"""

from __future__ import annotations

from ..core.declared import Positive, Real
from ..core.dtypes import f32
from ..lang.math import functions as F
from ..lang.math.elementwise import as_float
from ..lang.math.shape import dims_of
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Like, Tensor
from .functional import rounded_once


@rounded_once
def softplus(x: Like, beta: Positive = 1.0) -> Tensor:
    """`log(1 + exp(beta * x)) / beta`, elementwise, without overflow.

    It needs no `threshold`, unlike PyTorch's: for a large `beta * x` the result is `x`. Raises
    UsageError if `beta` is not above 0.
    """
    t = as_float("softplus", x)
    z = t if beta == 1 else t * beta
    y = F.maximum(z, 0.0) + F.log1p(F.exp(-F.abs(z))).to(z.dtype)
    return y if beta == 1 else y * (1.0 / beta)


@rounded_once
def leaky_relu(x: Like, negative_slope: Real = 0.01) -> Tensor:
    """`x` where it is above 0, else `negative_slope * x`, elementwise (Maas et al. 2013)."""
    t = as_tensor(x)
    return F.where(t > 0, t, t * negative_slope)


@rounded_once
def elu(x: Like, alpha: Real = 1.0) -> Tensor:
    """`x` where it is above 0, else `alpha * (exp(x) - 1)`, elementwise (Clevert et al. 2015)."""
    t = as_tensor(x)
    above = t > 0  # a large x would overflow, and its gradient with it
    low = F.expm1(F.where(above, 0.0, t)).to(t.dtype if t.dtype.is_float else f32)
    return F.where(above, t, low if alpha == 1 else low * alpha)


@rounded_once
def mish(x: Like) -> Tensor:
    """`x * tanh(softplus(x))`, elementwise (Misra 2019)."""
    t = as_tensor(x)
    return t * F.tanh(softplus(t))


@rounded_once
def selu(x: Like) -> Tensor:
    """`elu` scaled so that layers keep zero mean and unit variance (Klambauer et al. 2017)."""
    return elu(x, 1.6732632423543772) * 1.0507009873554805


def hardtanh(x: Like, min_val: Real = -1.0, max_val: Real = 1.0) -> Tensor:
    """`x` clamped to `min_val` and `max_val`, elementwise. The gradient at both ends is 0."""
    t = as_tensor(x)
    return F.where(t <= min_val, min_val, F.where(t >= max_val, max_val, t))


def relu6(x: Like) -> Tensor:
    """`x` clamped to 0 and 6, elementwise (Howard et al. 2017)."""
    return hardtanh(x, 0.0, 6.0)


@rounded_once
def hardsigmoid(x: Like) -> Tensor:
    """`x / 6 + 1/2` clamped to 0 and 1, elementwise."""
    return relu6(as_tensor(x) + 3.0) * (1.0 / 6.0)


@rounded_once
def hardswish(x: Like) -> Tensor:
    """`x * hardsigmoid(x)`, elementwise (Howard et al. 2019)."""
    t = as_tensor(x)
    return t * hardsigmoid(t)


@rounded_once
def logsigmoid(x: Like) -> Tensor:
    """`log(sigmoid(x))`, elementwise, without overflow."""
    return -softplus(-as_float("logsigmoid", x))


@rounded_once
def glu(x: Like, dim: int = -1) -> Tensor:
    """The first half of `x` along `dim` times the sigmoid of the second half (Dauphin et al. 2017).

    Raises ShapeError if `dim` does not divide by 2.
    """
    t = as_tensor(x)
    a, gate = F.split(t, 2, *dims_of("glu", t, (dim,)))
    return a * F.sigmoid(gate)
