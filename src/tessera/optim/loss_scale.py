"""Dynamic loss scaling for f16 gradients (Micikevicius et al. 2018).

The loss is multiplied by a scale before gradients are taken, and the gradients are divided by it.
If one overflows, the step is skipped and the scale halved; after enough good steps it is doubled.

>>> import tessera as ts
>>> scaler = ts.optim.LossScale(init_scale=8.0, growth_interval=2)
>>> state = scaler.init()
>>> scaler.scale(ts.tensor(0.5), state).item()
4.0
>>> grads, finite = scaler.unscale({"w": ts.tensor([16.0, float("inf")])}, state)
>>> finite.item(), scaler.update(finite, state)["scale"].item()
(False, 4.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.checks import shown
from ..core.context import replaced, settings
from ..core.declared import Integer, Real
from ..core.dtypes import bool_, f32, int32
from ..core.errors import UsageError
from ..core.mesh import Mesh
from ..lang.math import functions as F
from ..lang.math.create import tensor
from ..lang.record.operands import emit
from ..lang.record.parameter import trained
from ..lang.record.recorder import current
from ..lang.record.tree import aligned, flatten, unflatten
from ..lang.value.tensor import Tensor
from .clipping import scaled, total
from .trees import named, one_line

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossScale:
    """Settings of dynamic loss scaling for f16 (Micikevicius et al. 2018); the state is separate.

    The state is `{"scale": f32[], "good": i32[]}`. The scale grows by `growth_factor` after
    `growth_interval` good steps and shrinks by `backoff_factor` after a step that overflowed,
    between `min_scale` and `max_scale`. Powers of two cause no rounding. Raises UsageError if a
    setting is out of range.
    """

    init_scale: Real = 2.0**15
    growth_factor: Real = 2.0
    backoff_factor: Real = 0.5
    growth_interval: Integer = 2000
    min_scale: Real = 1.0
    max_scale: Real = 2.0**24

    def __post_init__(self) -> None:
        ok = 0 < self.min_scale <= self.init_scale <= self.max_scale < math.inf
        if (
            not ok
            or not 0 < self.backoff_factor < 1 < self.growth_factor
            or self.growth_interval < 1
        ):
            raise UsageError(
                "LossScale: a setting is out of range",
                settings=self,
                fix="all > 0, min_scale <= init_scale <= max_scale,"
                " backoff_factor < 1 < growth_factor",
            )

    def init(self, mesh: Mesh | None = None) -> State:
        """The state before the first step, on `mesh`."""
        return {
            "scale": tensor(self.init_scale, mesh=mesh, dtype=f32),
            "good": tensor(0, mesh=mesh, dtype=int32),
        }

    def scale(self, loss: Tensor, state: State) -> Tensor:
        """The loss times the scale, in f32, for the gradients."""
        return scaled(loss, state["scale"])

    def unscale(self, grads: Any, state: State) -> tuple[Any, Tensor]:
        """Returns (gradients divided by the scale, in f32; bool[] that is true if all are
        finite)."""
        with one_line("loss_scale"):
            leaves = list(named("unscale", grads).values())
            bad = [F.sum(emit("logical_not", F.isfinite(g)).to(f32)) for g in leaves]
            factor = 1.0 / state["scale"]
            spec = flatten(trained(grads))[1]
            return unflatten(spec, [scaled(g, factor) for g in leaves]), total(bad) == 0.0

    def update(self, finite: Tensor, state: State) -> State:
        """The state after a step; `finite` (bool[]) is true if its gradients were finite."""
        # The scale needs no gradient; outside of recordings, each scale would keep all earlier ones
        # alive.
        now = settings().no_grad or current() is None
        with one_line("loss_scale"), replaced(no_grad=now):
            _need_finite("LossScale.update", finite)
            scale, good = state["scale"], state["good"] + 1
            grow = good >= self.growth_interval
            up = F.where(grow, F.minimum(scale * self.growth_factor, self.max_scale), scale)
            down = F.maximum(scale * self.backoff_factor, self.min_scale)
            new = {
                "scale": F.where(finite, up, down),
                "good": F.where(finite & ~grow, good, 0),
            }
            return {k: F.relayout(t, state[k].type) for k, t in new.items()}


def apply_if_finite(finite: Tensor, new: Any, old: Any) -> Any:
    """The tree `new` if `finite` (bool[]) is true, else `old`, which skips a step that overflowed.

    Both trees have the same structure. Raises UsageError if they do not, or if `finite` is not one
    bool.
    """
    _need_finite("apply_if_finite", finite)
    leaves, spec = flatten(trained(new))
    pairs = zip(leaves, aligned(spec, trained(old)), strict=True)
    with one_line("apply_if_finite"):
        return unflatten(spec, [F.relayout(F.where(finite, a, b), b.type) for a, b in pairs])


def _need_finite(call: str, finite: Tensor) -> None:
    one = isinstance(finite, Tensor)
    if not one or finite.dtype is not bool_ or finite.shape:
        raise UsageError(
            f"{call}: `finite` is not one bool",
            finite=finite.type if one else shown(finite),
            fix="pass what unscale(...) gives",
        )
