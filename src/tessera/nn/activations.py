"""Further activations, elementwise. (`relu`, `silu` and `gelu` stand in `functional.py`.)"""

from __future__ import annotations

from ..core.checks import number
from ..core.dtypes import f32
from ..lang import functions as F
from ..lang.operands import as_tensor
from ..lang.tensor import Like, Tensor


def softplus(x: Like, beta: float = 1.0) -> Tensor:
    """`log(1 + exp(beta * x)) / beta`, elementwise, without overflow.

    PyTorch's `threshold` is not needed: where `beta * x` is large the result is `x`. Raises
    UsageError if `beta` is not above 0.
    """
    t, b = as_tensor(x), number("softplus", "beta", beta, above=0)
    z = t if b == 1 else t * b
    y = F.maximum(z, 0.0) + F.log1p(F.exp(-F.abs(z))).to(z.dtype)
    return y if b == 1 else y * (1.0 / b)


def leaky_relu(x: Like, negative_slope: float = 0.01) -> Tensor:
    """`x` where it is above 0, else `negative_slope * x`, elementwise (Maas et al. 2013)."""
    t, slope = as_tensor(x), number("leaky_relu", "negative_slope", negative_slope)
    return F.where(t > 0, t, t * slope)


def elu(x: Like, alpha: float = 1.0) -> Tensor:
    """`x` where it is above 0, else `alpha * (exp(x) - 1)`, elementwise (Clevert et al. 2015)."""
    t, a = as_tensor(x), number("elu", "alpha", alpha)
    above = t > 0  # a large x would overflow, and its gradient with it
    low = F.expm1(F.where(above, 0.0, t)).to(t.dtype if t.dtype.is_float else f32)
    return F.where(above, t, low if a == 1 else low * a)
