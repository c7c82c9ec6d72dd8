"""Mistakes with optimizers, rates, masks and strategies. A row: name, error, mistake."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, optim
from tessera.core.layout import plain
from tests.mesh.errors import MESH, row

# fmt: off

def weight(*shape: int, dtype: Any = ts.f32) -> ts.Tensor:
    return ts.tensor(np.zeros(shape), dtype=dtype)


W = {"w": weight(2, 3), "b": weight(3)}
ADAM = optim.Adam()
STATE = ADAM.init(W)
VALUES: dict[str, Any] = {k: t.numpy() for k, t in ADAM.state_dict(STATE).items()}
EIGHT = plain(ts.f32, (8,), MESH)

# -- optimizers ------------------------------------------------------------------------------------
row("optim: negative lr", ts.UsageError, lambda: optim.SGD(-0.1))
row("optim: all settings at once", ts.UsageError,
    lambda: optim.AdamW(-1, betas=(1.0, 0.9), eps=0, weight_decay=-2))
row("optim: lr of no kind", ts.UsageError, lambda: optim.Lion("fast"))
row("optim: lr of a bool", ts.UsageError, lambda: optim.SGD(True))
row("optim: mask of no kind", ts.UsageError, lambda: optim.AdamW(mask=3))
row("optim: mask no expression", ts.UsageError, lambda: optim.AdamW(mask="["))
row("optim: mask of no weight", ts.UsageError, lambda: optim.AdamW(mask="kernel").init(W))
row("optim: mask of no weight by a function", ts.UsageError,
    lambda: optim.AdamW(mask=lambda name: None).init(W))
row("optim: mask of the tree", ts.UsageError,
    lambda: optim.AdamW(mask=lambda p: {k: k != "b" for k in p}).init(W))
row("optim: mask of leaves", ts.UsageError,
    lambda: optim.AdamW(mask=lambda p: [x.ndim > 1 for x in p]).init(W))
row("optim: not tensors", ts.UsageError,
    lambda: ADAM.init({"n": 3, "ids": weight(2, dtype=ts.int32), **W}))
row("optim: other names", ts.UsageError, lambda: ADAM.update(W, {"w": W["w"], "c": W["b"]}, STATE))
row("optim: other shapes", ts.ShapeError,
    lambda: ADAM.update(W, {"w": weight(3, 2), "b": weight(1)}, STATE))
row("optim: state of another optimizer", ts.UsageError, lambda: optim.Lion().update(W, W, STATE))
row("optim: no state", ts.UsageError, lambda: ADAM.update({"w": W["w"]}, {"w": W["w"]}, {}))
row("optim: load other names", ts.UsageError,
    lambda: ADAM.load_state_dict(STATE, {"step": np.array(3)}))
row("optim: load other shapes", ts.ShapeError,
    lambda: ADAM.load_state_dict(STATE, VALUES | {"m.w": np.zeros((3, 2), np.float32)}))
row("optim: load other dtypes", ts.DTypeError,
    lambda: ADAM.load_state_dict(STATE, VALUES | {"m.w": np.zeros((2, 3), np.int32)}))
row("optim: weights on no mesh", ts.StrategyError,
    lambda: ADAM.init(W, dist.strategy("tensor_parallel")))
row("optim: schedule of text", ts.UsageError,
    lambda: optim.SGD(lambda t: "0.1").update(W, W, {"step": weight()}))
row("optim: norm of zero", ts.UsageError, lambda: optim.clip_by_global_norm(W, 0.0))
row("optim: loss scale", ts.UsageError, lambda: optim.LossScale(init_scale=8.0, growth_interval=0))
row("optim: a number for finite", ts.UsageError, lambda: optim.apply_if_finite(weight(), W, W))
row("optim: apply_if_finite of two trees", ts.UsageError,
    lambda: optim.apply_if_finite(weight() == 0.0, W, {"w": W["w"]}))
row("optim: negative rate", ts.UsageError, lambda: optim.linear(0.1, -0.1, 5))
row("optim: no steps", ts.UsageError, lambda: optim.cosine(0.1, 0))
row("optim: warmup too long", ts.UsageError, lambda: optim.warmup_cosine(0.1, warmup=10, total=10))
row("optim: falling boundaries", ts.UsageError,
    lambda: optim.piecewise_constant([1.0, 0.5, 0.1], [9, 4]))
row("optim: a step of many", ts.ShapeError, lambda: optim.cosine(1.0, 5)(weight(2)))

# -- strategies ------------------------------------------------------------------------------------
row("strategy: kind", ts.StrategyError, lambda: dist.strategy("magic"))
row("strategy: stage of another", ts.StrategyError, lambda: dist.strategy("data_parallel", stage=1))
row("strategy: axis", ts.StrategyError,
    lambda: dist.strategy("tensor_parallel", "mp").weight("w", EIGHT))
row("strategy: no mesh", ts.MeshError,
    lambda: dist.place({"w": ts.tensor([1.0])}, dist.strategy("data_parallel")))
row("strategy: kind of place", ts.StrategyError,
    lambda: dist.place({"w": ts.tensor([1.0])}, dist.strategy("data_parallel"), MESH, kind="magic"))
