"""Optimizers, learning rate schedules, gradient clipping and loss scaling, as pure functions.

>>> import tessera as ts
>>> opt = ts.optim.AdamW(lr=ts.optim.warmup_cosine(3e-4, warmup=100, total=1000), weight_decay=0.1)
>>> params = {"w": ts.tensor([[1.0, 2.0]])}
>>> sorted(opt.state_dict(opt.init(params)))
['m.w', 'step', 'v.w']
"""

from typing import TYPE_CHECKING

from ..core.public import public
from .base import Optimizer
from .clipping import clip_by_global_norm, global_norm
from .loss_scale import LossScale, apply_if_finite
from .optax_updates import from_optax
from .optimizers import SGD, Adafactor, Adam, AdamW, Lion, Momentum
from .schedules import (
    Schedule,
    constant,
    cosine,
    inverse_sqrt,
    join_schedules,
    linear,
    piecewise_constant,
    warmup_cosine,
    warmup_linear,
)

__all__ = [
    "SGD", "Adafactor", "Adam", "AdamW", "Lion", "LossScale", "Momentum", "Optimizer", "Schedule",
    "apply_if_finite", "clip_by_global_norm", "constant", "cosine", "from_optax", "global_norm",
    "inverse_sqrt", "join_schedules", "linear", "piecewise_constant", "warmup_cosine",
    "warmup_linear",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("optim", globals())
