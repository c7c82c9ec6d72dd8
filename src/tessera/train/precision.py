"""Mixed precision of a recipe: autocast, loss scale, and skipped steps.

Products run in the narrow dtype inside `ts.autocast` (docs/precision.md has the rule of each op);
weights, gradients, optimizer state and losses stay f32. fp16 needs a loss scale, which
`optim.LossScale` adapts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..core.context import Settings
from ..core.dtypes import f32
from ..core.mesh import Mesh
from ..lang.record.contexts import autocast
from ..lang.value.tensor import Tensor
from ..optim import LossScale, apply_if_finite
from .config import TrainingConfig

State = dict[str, Any]


def autocast_of(c: TrainingConfig) -> AbstractContextManager[Settings]:
    """`ts.autocast` by the key `mixed_precision`."""
    return autocast(c.compute or f32, enabled=c.compute is not None)


def scaler_of(c: TrainingConfig) -> LossScale:
    """The settings of the loss scale. A fixed scale never changes."""
    if isinstance(c.loss_scale, (int, float)):
        fixed = float(c.loss_scale)
        return LossScale(init_scale=fixed, min_scale=min(fixed, 1.0), max_scale=fixed + 1.0)
    return (
        LossScale(growth_interval=c.loss_scale_interval) if c.scaled else LossScale(init_scale=1.0)
    )


def initial_scale(c: TrainingConfig, mesh: Mesh | None) -> State:
    """`loss_scale` f32[] and `good_steps` i32[], as parts of an optimizer state."""
    made = scaler_of(c).init(mesh)
    return {"loss_scale": made["scale"], "good_steps": made["good"]}


def scaled(c: TrainingConfig, loss: Tensor, state: State) -> Tensor:
    """The scaled loss, for differentiation."""
    return scaler_of(c).scale(loss, _scale(state)) if c.scaled else loss


def unscaled(c: TrainingConfig, grads: Any, state: State) -> tuple[Any, Tensor | None]:
    """(unscaled gradients, bool[] that is true if all are finite; None without a scale)."""
    return scaler_of(c).unscale(grads, _scale(state)) if c.scaled else (grads, None)


def new_if_finite(finite: Tensor | None, new: Any, old: Any) -> Any:
    """`new`, or `old` if a gradient was not finite."""
    return new if finite is None else apply_if_finite(finite, new, old)


def moved_scale(c: TrainingConfig, finite: Tensor | None, state: State) -> State:
    """`loss_scale` and `good_steps` after a step."""
    if finite is None or not c.dynamic:
        return {name: state[name] for name in ("loss_scale", "good_steps")}
    made = scaler_of(c).update(finite, _scale(state))
    return {"loss_scale": made["scale"], "good_steps": made["good"]}


def scale_of_now(c: TrainingConfig, was: Mapping[str, Any], mine: State) -> State:
    """The entries of the current state `mine` that replace a saved scale when a run continues with
    `c`. They are none if the scale was dynamic in `was`, the saved configuration, and still is;
    otherwise both."""
    before = TrainingConfig(
        loss_scale=was.get("loss_scale"), mixed_precision=was.get("mixed_precision", False)
    )
    taken = before.dynamic and c.dynamic
    return {} if taken else {name: mine[name] for name in ("loss_scale", "good_steps")}


def _scale(state: State) -> dict[str, Tensor]:
    return {"scale": state["loss_scale"], "good": state["good_steps"]}
