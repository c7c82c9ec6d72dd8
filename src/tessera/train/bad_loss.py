"""Detection of bad losses: not finite, or far above the losses before.

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

from ..core.errors import TesseraError, warn_no_effect

WATCHED = ("loss", "grad_norm")
RECENT = 50  # number of losses that a new one is compared with
FEW = 8  # losses that say nothing yet


class LossError(TesseraError, ArithmeticError):
    """Raised when a loss is not finite, or too large, and the policy is to stop."""


class Judge:
    """Checks the values of a step. A loss above `spike` times the median of the last 50 good ones
    is bad; None: only a loss that is not finite."""

    def __init__(self, spike: float | None) -> None:
        self._spike = spike
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._told = False

    def why(self, row: Mapping[str, Any]) -> str:
        """The reason why `row` is bad, "" if it is not."""
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

    def warn_of_unseen(self, row: Mapping[str, Any], policy: str) -> None:
        """Warns once if `policy` has no effect on `row`, the row of a step: there is no row, or it
        has no loss and the policy is not the default."""
        asked = f"on_bad_loss={policy!r}"
        asked += "" if self._spike is None else f", spike={self._spike}"
        if not row:
            why = "the loop does not write the row of the step that the guard gave out"
        else:
            names = ", ".join(name for name in row if name != "step") or "nothing"
            why = f"the row of a step has no number called 'loss' or 'grad_norm', but {names}"
        has_loss = any(isinstance(row.get(name), (int, float)) for name in WATCHED)
        if self._told or has_loss or policy == "ignore" or (row and asked == "on_bad_loss='stop'"):
            return
        self._told = True
        warn_no_effect(
            f"Guard: {asked}",
            why,
            means="what comes after a loss that is no finite number, or too large",
            fix='write with run.step(step) as row: row["loss"] = train_step(...)',
        )


def is_finite(value: object) -> bool:
    """Returns whether `value` is a finite number."""
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["Judge", "LossError", "is_finite"]
