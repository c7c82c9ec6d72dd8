"""Published formulas for the bubble and the peak memory of pipeline schedules, and their ranges.

p ranks, m microbatches, v chunks (stages on a rank). F, I, W are the times of one stage on one
microbatch: forward, backward for inputs, backward for weights. All stages take the same time and
sending takes none. The bubble is the longest time that a rank idles between its first and its last
action (`Timeline.bubble_s`). The peak counts the microbatch activations of single stages on rank 0.

| schedule | bubble | holds for | peak | holds for |
|---|---|---|---|---|
| GPipe | (p-1)(F+I+W) | all | m | all |
| 1F1B | (p-1)(F+I+W) | all | p | m >= p |
| Interleaved1F1B | (p-1)(F+I+W) | m >= p or v = 1 | pv+p-1 | p divides m, m >= 2p, v > 1 |
| ZB-H1 | (p-1)(F+I-W) | m >= p, F >= W | p | m >= p |
| ZB-H2 | (p-1)(F+I-2W) | m >= 2p-1, F >= W, F+I >= 2W | 2p-1 | m >= 2p-1 |
| ZBV | 0 | m >= 2p-1, F = I = W | 2p | m >= 2p-1 |
| DualPipeV | (p-1)(F&B+I-2W) | F = I >= W, F&B = F+I+W | 2p+1 | all |

F&B is a pair that runs together. Where communication is hidden in it, the bubble is smaller than
the formula. A paper's unit is often a rank's whole share of the model: v of the units here, so
Interleaved1F1B is its (p-1)(F+B)/v and p(1+(p-1)/(pv)), and ZBV its p.

Outside these regions `simulate` knows. Sources: Narayanan et al. 2021 (1F1B, interleaved), Qi et
al. 2023 (H1, H2) and 2024 (V), DeepSeek-AI 2024 (DualPipe).

>>> bubble_s("ZB-H1", ranks=4, microbatches=8), peak_activations("ZB-H1", 4, 8)
(3, 4)
>>> bubble_s("ZB-H1", ranks=4, microbatches=8, forward_s=1, backward_weight_s=2) is None
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .orders import named_schedule
from .tables import count


@dataclass(frozen=True, slots=True)
class _Case:
    """The arguments of a formula."""

    p: int
    m: int
    v: int
    F: float
    I: float  # noqa: E741  # as the papers have it
    W: float
    FB: float


@dataclass(frozen=True, slots=True)
class _Formula:
    """The two formulas of a schedule, and the cases in which they hold."""

    bubble: Callable[[_Case], float]
    bubble_holds: Callable[[_Case], bool]
    peak: Callable[[_Case], int]
    peak_holds: Callable[[_Case], bool]


def _always(c: _Case) -> bool:
    return True


def _full(c: _Case) -> float:
    return (c.p - 1) * (c.F + c.I + c.W)


_FORMULAS = {
    "GPipe": _Formula(_full, _always, lambda c: c.m, _always),
    "1F1B": _Formula(_full, _always, lambda c: c.p, lambda c: c.m >= c.p),
    "Interleaved1F1B": _Formula(
        _full,
        lambda c: c.m >= c.p or c.v == 1,
        lambda c: c.p * c.v + c.p - 1,
        lambda c: c.m % c.p == 0 and c.m >= 2 * c.p and c.v > 1,
    ),
    "ZB-H1": _Formula(
        lambda c: (c.p - 1) * (c.F + c.I - c.W),
        lambda c: c.m >= c.p and c.F >= c.W,
        lambda c: c.p,
        lambda c: c.m >= c.p,
    ),
    "ZB-H2": _Formula(
        lambda c: (c.p - 1) * (c.F + c.I - 2 * c.W),
        lambda c: c.m >= 2 * c.p - 1 and c.F >= c.W and c.F + c.I >= 2 * c.W,
        lambda c: 2 * c.p - 1,
        lambda c: c.m >= 2 * c.p - 1,
    ),
    "ZBV": _Formula(
        lambda c: 0,
        lambda c: c.m >= 2 * c.p - 1 and c.F == c.I == c.W,
        lambda c: 2 * c.p,
        lambda c: c.m >= 2 * c.p - 1,
    ),
    "DualPipeV": _Formula(
        lambda c: (c.p - 1) * (c.FB + c.I - 2 * c.W),
        lambda c: c.m >= 2 * c.p and c.F == c.I >= c.W and c.FB == c.F + c.I + c.W,
        lambda c: 2 * c.p + 1,
        lambda c: c.m >= 2 * c.p,
    ),
}


def bubble_s(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    forward_s: float = 1,
    backward_input_s: float = 1,
    backward_weight_s: float = 1,
    joined_s: float | None = None,
) -> float | None:
    """The bubble by the formula of `schedule`, in seconds; None where the formula does not hold.

    Raises UsageError for an unknown name.
    """
    named = named_schedule(schedule)
    ranks, microbatches = count("ranks", ranks), count("microbatches", microbatches)
    whole = forward_s + backward_input_s + backward_weight_s
    case = _Case(
        ranks,
        microbatches,
        chunks or named.chunks or 2,
        forward_s,
        backward_input_s,
        backward_weight_s,
        whole if joined_s is None else joined_s,
    )
    formula = _FORMULAS[named.name]
    return formula.bubble(case) if formula.bubble_holds(case) else None


def peak_activations(
    schedule: str, ranks: int, microbatches: int, chunks: int | None = None
) -> int | None:
    """The peak number of activations on rank 0 by the formula of `schedule`, counted in
    microbatches of single stages; None where the formula does not hold.

    Raises UsageError for an unknown name.
    """
    known = named_schedule(schedule)
    ranks, microbatches = count("ranks", ranks), count("microbatches", microbatches)
    case = _Case(ranks, microbatches, chunks or known.chunks or 2, 1, 1, 1, 3)
    formula = _FORMULAS[known.name]
    return formula.peak(case) if formula.peak_holds(case) else None
