"""Rules for losses. `reduction` is a number: 0 is none, 1 the mean, 2 the sum."""

from __future__ import annotations

from typing import Any

from ...core.dtypes import f32
from ...lang.autodiff.custom import custom_gradient
from ...lang.math import functions as F
from ...lang.value.tensor import Tensor
from ...nn import activations as A
from .table import aten, floats


def _reduced(x: Tensor, reduction: int) -> Tensor:
    return x if reduction == 0 else F.mean(x) if reduction == 1 else F.sum(x)


@aten("mse_loss")
def _mse(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    a, b = floats(x, target)
    return _reduced((a - b) ** 2, reduction)


@aten("l1_loss")
def _l1(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    a, b = floats(x, target)
    return _reduced(F.abs(a - b), reduction)


@aten("smooth_l1_loss")
def _smooth_l1(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    apart = F.abs(x - target)
    if beta == 0:
        return _reduced(apart, reduction)
    near = apart * apart * (0.5 / beta)
    return _reduced(F.where(apart < float(beta), near, apart - 0.5 * beta), reduction)


@aten("huber_loss")
def _huber(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    apart = F.abs(x - target)
    near, far = apart * apart * 0.5, (apart - 0.5 * delta) * float(delta)
    return _reduced(F.where(apart <= float(delta), near, far), reduction)


@custom_gradient
def _log_loss(x: Tensor, target: Tensor) -> tuple[Tensor, Any]:
    """The loss with its logarithms not below -100. Its gradient is finite at 0 and 1 too."""
    yes, no = (F.maximum(F.log(p), -100.0) for p in (x, 1.0 - x))
    spread = F.maximum(x * (1.0 - x), 1e-12)
    loss = -(target * yes + (1.0 - target) * no)
    return loss, lambda g: (g * (x - target) / spread, g * (no - yes))


@aten("binary_cross_entropy")
def _bce(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    loss = _log_loss(x, target)
    return _reduced(loss if weight is None else loss * weight, reduction)


@aten("binary_cross_entropy_with_logits")
def _bce_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:  # fmt: skip
    rate = 1.0 if pos_weight is None else (pos_weight - 1.0) * target + 1.0
    loss = (1.0 - target) * x - A.logsigmoid(x) * rate
    return _reduced(loss if weight is None else loss * weight, reduction)


@aten("soft_margin_loss")
def _soft_margin(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced(-A.logsigmoid(x * target), reduction)


@aten("nll_loss_forward", "nll_loss2d_forward")
def _nll(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss of log-probabilities x [N, C, ...] or [C], and the sum of the weights."""
    classes = 0 if x.ndim == 1 else 1
    keep = target != ignore_index
    ids = F.where(keep, target, 0)
    at = ids.reshape((*ids.shape[:classes], 1, *ids.shape[classes:]))
    picked = F.gather(x, at, classes).reshape(target.shape)
    each = keep.to(x.dtype) if weight is None else F.where(keep, F.take(weight, ids), 0.0)
    loss, total = -picked * each, F.sum(each.to(f32)).to(x.dtype)
    if reduction == 0:
        return loss, F.full((), 0.0, x.dtype)
    summed = F.sum(loss)
    return (summed / total if reduction == 1 else summed), total
