"""Positions in attention: rotary rates with their scalings, and ALiBi.

>>> alibi_bias(4, 3, 1.0)[0].tolist()
[0.0, 0.25, 0.5]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import ml_dtypes
import numpy as np

from ..core.checks import number, unread
from ..core.declared import Count, Flag, Listed, Number, OneOf, Scale
from ..core.dtypes import f32
from ..core.errors import UsageError
from ..core.value_checks import is_number
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor

HIGH = {"llama3": 4.0, "yarn": 32.0}
# The scalings that use a field; a field that is not listed is used by all.
READ = {
    "factor": ("linear", "llama3", "dynamic", "yarn", "longrope"),
    "low": ("llama3", "yarn"), "high": ("llama3", "yarn"), "truncate": ("yarn",),
    "original": ("llama3", "dynamic", "yarn", "longrope"),
    "short": ("longrope",), "long": ("longrope",),
}  # fmt: skip
Rates = Annotated[tuple[float, ...], Listed(is_number)]
SCALINGS = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """The rates of rotary embeddings (Su et al. 2021): `base`, and their scaling.

    `scaling` "linear" divides all rates by `factor` (Chen et al. 2023). "llama3" (Llama 3.1)
    divides by `factor` the rates with a wavelength above `original`/`low` tokens, keeps those with
    a wavelength below `original`/`high`, and interpolates between them. "yarn" (Peng et al. 2023)
    interpolates by the index of the rate instead, between those that rotate `high` and `low` times
    within `original` tokens, rounded outwards if `truncate`. "dynamic" raises the base for a
    sequence longer than `original`, with the same meaning of `factor`. "longrope" (Ding et al.
    2024) divides each rate by its number in `short`, or in `long` for sequences longer than
    `original`. `partial` is the part of a head that is rotated. `attention` multiplies the rotated
    queries and keys; None: 1, for "yarn" 0.1 ln(`factor`) + 1, for "longrope" sqrt(1 + ln(`factor`)
    / ln(`original`)). `high` None is 4, for "yarn" 32. Raises UsageError if `scaling` is unknown or
    does not use a field that is given, a number is not above 0, or `low` is not below `high`.
    """

    base: Scale = 10000.0
    scaling: Annotated[str, OneOf(*SCALINGS)] = "default"
    factor: Scale = 1.0
    low: Scale = 1.0
    high: Scale | None = None
    original: Count = 8192
    partial: Annotated[float, Number(above=0, most=1)] = 1.0
    attention: Scale | None = None
    truncate: Flag = True
    short: Rates = ()
    long: Rates = ()

    def __post_init__(self) -> None:
        for each in (*self.short, *self.long):
            number("Rope", "a factor of longrope", each, above=0, below=math.inf)
        for field, scalings in READ.items():
            if self.scaling not in scalings:
                unread(
                    "Rope", self, (field,), f'scaling is "{self.scaling}"',
                    "give scaling=" + " or ".join(f'"{s}"' for s in scalings),
                )  # fmt: skip
        if self.high is None and self.scaling in HIGH:
            object.__setattr__(self, "high", HIGH[self.scaling])
        if self.high is not None and self.scaling in HIGH and self.low >= self.high:
            raise UsageError(
                f"Rope: low={self.low} is not below high={self.high}",
                fix="low=1, high=4 are Llama 3.1's, low=1, high=32 those of yarn",
            )

    @property
    def by_length(self) -> bool:
        """Returns whether the rates depend on the length of the sequence."""
        return self.scaling in ("dynamic", "longrope")

    @property
    def amplitude(self) -> float:
        """The factor of the rotated part of queries and keys."""
        if self.attention is not None or self.factor <= 1.0:
            return self.attention or 1.0
        if self.scaling == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        if self.scaling == "longrope":
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original))
        return 1.0

    def rates(self, size: int, length: int = 0) -> Tensor:
        """The rate of each rotated pair of a head of size `size`, in radians per position: f32[n],
        in a sequence of `length` tokens."""
        rotated_dims = int(size * self.partial)
        base, longer = self.base, length > self.original
        if self.scaling == "dynamic" and longer:
            stretch = self.factor * length / self.original - (self.factor - 1.0)
            base *= stretch ** (rotated_dims / (rotated_dims - 2))
        rate = F.exp(
            F.arange(rotated_dims // 2, dtype=f32) * (-2.0 * math.log(base) / rotated_dims)
        )
        high = self.high or 1.0
        if self.scaling == "linear":
            return rate * (1.0 / self.factor)
        if self.scaling == "llama3":
            rotations = rate * (self.original / (2.0 * math.pi))  # within the original window
            unscaled_part = (rotations - self.low) * (1.0 / (high - self.low))
            unscaled_part = F.minimum(F.maximum(unscaled_part, 0.0), 1.0)
            return rate * (unscaled_part + (1.0 - unscaled_part) * (1.0 / self.factor))
        if self.scaling == "yarn":
            first, last = (self._index(n, rotated_dims) for n in (high, self.low))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rotated_dims - 1)
            slower = (np.arange(rotated_dims // 2) - first) / max(last - first, 0.001)
            slower = np.clip(slower, 0.0, 1.0)
            return rate * as_tensor((1.0 - slower + slower / self.factor).astype(np.float32))
        if self.scaling == "longrope":
            by = np.array(self.long if longer else self.short, np.float32)
            shaped_factors(by, rotated_dims)
            return rate * as_tensor(1.0 / by)
        return rate

    def _index(self, rotations: float, rotated_dims: int) -> float:
        """The index of the rate that rotates `rotations` times within `original` tokens."""
        tokens = self.original / (rotations * 2.0 * math.pi)
        return rotated_dims * math.log(tokens) / (2.0 * math.log(self.base))


def shaped_factors(by: np.ndarray[Any, Any], rotated_dims: int) -> None:
    """Raises UsageError unless longrope has one factor per pair."""
    if by.shape != (rotated_dims // 2,):
        raise UsageError(
            f"Rope: longrope has {by.size} factors for {rotated_dims // 2} pairs",
            fix=f"give {rotated_dims // 2} numbers as short and as long",
        )


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """One slope per head: powers of one number. If `heads` is not a power of two, the slopes of the
    next smaller power of two and every second one of the next larger (Press et al. 2022)."""
    near = 2 ** int(math.log2(heads))

    def powers(n: int) -> np.ndarray[Any, Any]:
        return 2.0 ** (-8.0 / n * np.arange(1, n + 1))

    return np.concatenate([powers(near), powers(2 * near)[::2][: heads - near]])


def alibi_bias(heads: int, keys: int, scale: float) -> np.ndarray[Any, Any]:
    """[heads, keys]: the bias of attention's scores by the position of the key.

    Softmax ignores a constant over the keys of a query, so the position of the key serves as well
    as its distance. The products are rounded to bf16 and then scaled, as Falcon's weights were
    trained.
    """
    slopes = alibi_slopes(heads).astype(ml_dtypes.bfloat16)[:, None]
    places = np.arange(keys).astype(ml_dtypes.bfloat16)
    bias: np.ndarray[Any, Any] = (slopes * places).astype(np.float32)
    return bias * np.float32(scale)
