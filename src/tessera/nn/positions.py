"""How does attention know where a token stands? Rotary rates with their scalings, and ALiBi.

>>> alibi_bias(4, 3, 1.0)[0].tolist()
[0.0, 0.25, 0.5]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..core.checks import number, one_of, whole
from ..core.dtypes import f32
from ..core.errors import UsageError, fail
from ..lang import functions as F
from ..lang.tensor import Tensor

SCALINGS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """The rates of rotary embeddings (Su et al. 2021): `base`, and how they are scaled.

    `scaling` "linear" divides all rates by `factor` (Chen et al. 2023). "llama3" (Llama 3.1)
    divides by `factor` the rates with a wavelength above `original`/`low` tokens, keeps those with
    a wavelength below `original`/`high`, and interpolates between them. Raises UsageError if
    `scaling` is unknown, a number is not above 0, or `low` is not below `high`.
    """

    base: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        for what in ("base", "factor", "low", "high"):
            number("Rope", what, getattr(self, what), above=0, below=math.inf)
        whole("Rope", "original", self.original, 1)
        one_of("Rope", "scaling", self.scaling, SCALINGS)
        if self.scaling == "llama3" and self.low >= self.high:
            raise fail(
                UsageError,
                f"Rope: low={self.low} is not below high={self.high}",
                fix="low=1, high=4 are Llama 3.1's",
            )

    def rates(self, size: int) -> Tensor:
        """The rate of each pair of a head of size `size`, in radians per position: f32[size/2]."""
        rate = F.exp(F.arange(size // 2, dtype=f32) * (-2.0 * math.log(self.base) / size))
        if self.scaling == "linear":
            return rate * (1.0 / self.factor)
        if self.scaling == "llama3":
            turns = rate * (self.original / (2.0 * math.pi))  # within the original window
            kept = (turns - self.low) * (1.0 / (self.high - self.low))
            kept = F.minimum(F.maximum(kept, 0.0), 1.0)
            return rate * (kept + (1.0 - kept) * (1.0 / self.factor))
        return rate


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """A slope a head: powers of one number, for other counts than 2, 4, 8, … every second one of
    the next larger set besides (Press et al. 2022)."""
    near = 2 ** int(math.log2(heads))

    def powers(n: int) -> np.ndarray[Any, Any]:
        return 2.0 ** (-8.0 / n * np.arange(1, n + 1))

    return np.concatenate([powers(near), powers(2 * near)[::2][: heads - near]])


def alibi_bias(heads: int, keys: int, scale: float) -> np.ndarray[Any, Any]:
    """[heads, keys]: what attention's scores get for the place of the key.

    Softmax ignores what all keys of a query share, so the key's own place serves as well as its
    distance. The products are rounded to bf16 and then scaled, as Falcon's weights were trained.
    """
    slopes = alibi_slopes(heads).astype(ml_dtypes.bfloat16)[:, None]
    places = np.arange(keys).astype(ml_dtypes.bfloat16)
    bias: np.ndarray[Any, Any] = (slopes * places).astype(np.float32)
    return bias * np.float32(scale)
