"""Which losses are bad? Those that are no number, and those far above the ones before.

>>> judge = Judge(spike=3.0)
>>> [judge.why({"loss": 2.0}) for _ in range(FEW)][-1]
''
>>> judge.why({"loss": 7.0})
'its loss is 7, and that of the steps before it 2'
>>> judge.why({"loss": float("nan")}), judge.why({"loss": 2.0, "grad_norm": float("inf")})
('its loss is nan', 'its grad_norm is inf')
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from ..core.errors import TesseraError

WATCHED = ("loss", "grad_norm")
RECENT = 50  # losses with which a new one is compared
FEW = 8  # losses that say nothing yet


class LossError(TesseraError, ArithmeticError):
    """Raised when a loss is no number, or too large, and the policy is to stop."""


class Judge:
    """Says what is wrong with the values of a step. A loss above `spike` times the median of the
    last 50 good ones is bad; None: only what is not finite."""

    def __init__(self, spike: float | None) -> None:
        self._spike = spike
        self._losses: deque[float] = deque(maxlen=RECENT)

    def why(self, row: Mapping[str, Any]) -> str:
        """What is wrong with `row`, "" if nothing is."""
        for name in WATCHED:
            if isinstance(row.get(name), (float, np.floating)) and not is_finite(row[name]):
                return f"its {name} is {row[name]}"
        loss: Any = row.get("loss")
        if self._spike is None or not is_finite(loss):
            return ""
        usual = median(self._losses) if len(self._losses) >= FEW else math.inf
        if loss > self._spike * usual > 0:
            return f"its loss is {loss:.4g}, and that of the steps before it {usual:.4g}"
        self._losses.append(loss)
        return ""


def is_finite(value: object) -> bool:
    """Whether it is a finite number."""
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["Judge", "LossError", "is_finite"]
