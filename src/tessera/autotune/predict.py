"""Prediction that a candidate cannot win, from its schedule: it is neither compiled nor timed.

A candidate has no chance if it computes far more than the defaults, if its collectives take far
longer on the given links, or if its peak does not fit in a device's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.flops import device_flops
from ..cost.memory import memory_plan
from ..cost.schedule_collectives import collective_costs
from ..ir.schedule.schedule import Schedule

FAR = 1.5


@dataclass(frozen=True, slots=True)
class Prediction:
    """Operations, seconds of collectives (0 without links) and peak bytes of a device in a run."""

    flops: int
    wire_s: float
    peak_bytes: int


def predict(schedule: Schedule) -> Prediction | None:
    """Returns the prediction for `schedule`; None for the stages of a pipeline, whose devices
    differ."""
    if schedule.is_staged:
        return None
    wire_s = sum(c.total_s or 0.0 for c in collective_costs(schedule))
    return Prediction(device_flops(schedule.graph), wire_s, memory_plan(schedule).peak)


def why_not(now: Prediction, base: Prediction, memory_bytes: int) -> str:
    """Returns why a candidate cannot win against the defaults; "" if it can."""
    if memory_bytes and now.peak_bytes > max(memory_bytes, base.peak_bytes):
        return f"needs {now.peak_bytes / 1e9:.1f} GB of a device's {memory_bytes / 1e9:.1f} GB"
    if now.flops > FAR * base.flops:
        return f"computes {now.flops / base.flops:.1f} times as much"
    if base.wire_s and now.wire_s > FAR * base.wire_s:
        return f"its collectives take {now.wire_s / base.wire_s:.1f} times as long"
    return ""
