"""Errors of optimizers, schedules and masks for invalid input."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, optim


def weight(*shape: int, dtype: Any = ts.f32) -> ts.Tensor:
    return ts.tensor(np.zeros(shape), dtype=dtype)


W = {"w": weight(2, 3), "b": weight(3)}
ADAM = optim.Adam()
STATE = ADAM.init(W)
BAD: list[tuple[str, Callable[[], Any], str]] = [
    ("negative lr", lambda: optim.SGD(-0.1), """
UsageError: SGD: a setting is out of range
  lr  : -0.1, must be >= 0
  at  : FILE
  fix : correct it"""),
    ("all settings at once", lambda: optim.AdamW(-1, betas=(1.0, 0.9), eps=0, weight_decay=-2), """
UsageError: AdamW: a setting is out of range
  lr           : -1, must be >= 0
  weight_decay : -2, must be >= 0
  betas[0]     : 1.0, must be >= 0 and < 1
  eps          : 0, must be > 0
  at           : FILE
  fix          : correct it"""),
    ("lr of no kind", lambda: optim.Lion("fast"), """
UsageError: Lion: lr is a str
  at  : FILE
  fix : give a number or a schedule: optim.warmup_cosine(...); weights go to optimizer.init"""),
    ("lr of a bool", lambda: optim.SGD(True), """
UsageError: SGD: lr is a bool
  at  : FILE
  fix : give a number or a schedule: optim.warmup_cosine(...); weights go to optimizer.init"""),
    ("mask of no kind", lambda: optim.AdamW(mask=3), """
UsageError: AdamW: mask is a int
  at  : FILE
  fix : give a function from a weight's name to a bool, or a regular expression"""),
    ("mask no expression", lambda: optim.AdamW(mask="["), """
UsageError: AdamW: mask '[' is no regular expression: unterminated character set at position 0
  at  : FILE
  fix : write one, such as "weight$", or give a function of the name"""),
    ("mask of no weight", lambda: optim.AdamW(mask="kernel").init(W), """
UsageError: AdamW: mask 'kernel' is in no weight's name, so nothing decays
  weights : w, b
  at      : FILE
  fix     : write what the names contain, or set weight_decay=0"""),
    ("mask of no weight", lambda: optim.AdamW(mask=lambda name: None).init(W), """
UsageError: AdamW: mask is true of no weight's name, so nothing decays
  weights : w, b
  at      : FILE
  fix     : write what the names contain, or set weight_decay=0"""),
    ("mask of the tree", lambda: optim.AdamW(mask=lambda p: {k: k != "b" for k in p}).init(W), """
UsageError: AdamW: what the mask gives for the weight 'w' cannot be {'w': True}
  at  : FILE
  fix : give a function of one weight's name; a mask of optax goes with optim.from_optax"""),
    ("mask of leaves", lambda: optim.AdamW(mask=lambda p: [x.ndim > 1 for x in p]).init(W), """
UsageError: AdamW: the mask fails for the weight 'w'
  says : 'str' object has no attribute 'ndim'
  at   : FILE
  fix  : give a function of one weight's name; a mask of optax goes with optim.from_optax"""),
    ("not tensors", lambda: ADAM.init({"n": 3, "ids": weight(2, dtype=ts.int32), **W}), """
UsageError: Adam.init: 2 leaves are not float tensors
  n   : int
  ids : i32[2]
  at  : FILE
  fix : give a dict of float tensors, such as model.parameters()"""),
    ("other names", lambda: ADAM.update(W, {"w": W["w"], "c": W["b"]}, STATE), """
UsageError: Adam.update: params and grads: 1 names are missing, 1 are too many
  missing : b
  extra   : c
  at      : FILE
  fix     : take the gradients of the same tree: ts.grad(loss, params)"""),
    ("other shapes", lambda: ADAM.update(W, {"w": weight(3, 2), "b": weight(1)}, STATE), """
ShapeError: Adam.update: params and grads: 2 shapes are different
  w   : (3, 2), not (2, 3)
  b   : (1,), not (3,)
  at  : FILE
  fix : take the gradients of the same tree: ts.grad(loss, params)"""),
    ("state of another optimizer", lambda: optim.Lion().update(W, W, STATE), """
UsageError: Lion.update: params and state: 0 names are missing, 2 are too many
  missing : none
  extra   : v.w, v.b
  at      : FILE
  fix     : start from Lion(...).init(params); after unfreezing see docs/training.md"""),
    ("no state", lambda: ADAM.update({"w": W["w"]}, {"w": W["w"]}, {}), """
UsageError: Adam.update: params and state: 3 names are missing, 0 are too many
  missing : step, m.w, v.w
  extra   : none
  at      : FILE
  fix     : start from Adam(...).init(params); after unfreezing see docs/training.md"""),
    ("load other names", lambda: ADAM.load_state_dict(STATE, {"step": np.array(3)}), """
UsageError: Adam.load_state_dict: 4 names are missing, 0 are too many
  missing : m.w, m.b, v.w, v.b
  extra   : none
  at      : FILE
  fix     : give what state_dict named, of the same weights and optimizer"""),
    ("load other shapes", lambda: loaded("m.w", np.zeros((3, 2), np.float32)), """
ShapeError: Adam.load_state_dict: 1 shapes are different
  m.w : (3, 2), not (2, 3)
  at  : FILE
  fix : give what state_dict named, of the same weights and optimizer"""),
    ("load other dtypes", lambda: loaded("m.w", np.zeros((2, 3), np.int32)), """
DTypeError: Adam.load_state_dict: 'm.w' has another dtype
  have  : f32[2, 3]
  given : i32[2, 3]
  at    : FILE
  fix   : give what state_dict named, of the same weights and optimizer"""),
    ("weights on no mesh", lambda: ADAM.init(W, dist.strategy("tensor_parallel")), """
StrategyError: strategy 'tensor_parallel': the weight 'w' lies on no mesh
  weight : f32[2, 3]
  at     : FILE
  fix    : lay the model out first: dist.place(model, strategy, mesh); what a step makes itself \
lies on the mesh in force: with mesh:"""),
    ("schedule of text", lambda: optim.SGD(lambda t: "0.1").update(W, W, {"step": weight()}), """
UsageError: SGD: the schedule does not give a float tensor of one number
  schedule : LAMBDA
  gives    : str
  at       : FILE
  fix      : return f32[], such as optim.constant(lr)(step)"""),
    ("norm of zero", lambda: optim.clip_by_global_norm(W, 0.0), """
UsageError: clip_by_global_norm: max_norm cannot be 0.0
  at  : FILE
  fix : give a number above 0"""),
    ("loss scale", lambda: optim.LossScale(init_scale=8.0, growth_interval=0), """
UsageError: LossScale: a setting is out of range
  settings : SETTINGS
  at       : FILE
  fix      : all > 0, min_scale <= init_scale <= max_scale, backoff_factor < 1 < growth_factor"""),
    ("a number for finite", lambda: optim.apply_if_finite(weight(), W, W), """
UsageError: apply_if_finite: `finite` is not one bool
  finite : f32[]
  at     : FILE
  fix    : pass what unscale(...) gives"""),
    ("apply_if_finite of two trees", lambda: optim.apply_if_finite(weight() == 0.0, W, {"w":
    W["w"]}), """
UsageError: trees: the second does not have the leaves of the first
  missing : b
  extra   : none
  at      : FILE
  fix     : give trees of one structure"""),
    ("negative rate", lambda: optim.linear(0.1, -0.1, 5), """
UsageError: linear: a setting is out of range
  end : -0.1: rates and steps are finite numbers >= 0
  at  : FILE
  fix : correct it"""),
    ("no steps", lambda: optim.cosine(0.1, 0), """
UsageError: cosine: total cannot be 0
  at  : FILE
  fix : give a whole number of at least 1"""),
    ("warmup too long", lambda: optim.warmup_cosine(0.1, warmup=10, total=10), """
UsageError: warmup_cosine: total cannot be 10
  at  : FILE
  fix : give a whole number of at least 11"""),
    ("falling boundaries", lambda: optim.piecewise_constant([1.0, 0.5, 0.1], [9, 4]), """
UsageError: piecewise_constant: 3 pieces do not lie between boundaries (9, 4)
  at  : FILE
  fix : give rising boundaries, and one piece more than boundaries"""),
    ("a step of many", lambda: optim.cosine(1.0, 5)(weight(2)), """
ShapeError: cosine: the step is not one number
  step : f32[2]
  at   : FILE
  fix  : give a Python int or an i32[] tensor"""),
]  # fmt: skip


SETTINGS = (
    "LossScale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=0,"
    " min_scale=1.0, max_scale=16777216.0)"
)


def loaded(name: str, value: Any) -> Any:
    values: dict[str, Any] = {k: t.numpy() for k, t in ADAM.state_dict(STATE).items()}
    return ADAM.load_state_dict(STATE, values | {name: value})


@pytest.mark.parametrize(("call", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ts.TesseraError) as found:
        call()
    said = f"{type(found.value).__name__}: {found.value}"
    said = re.sub(r"test_optim_errors\.py:\d+", "FILE", said)
    assert re.sub(r"<function .*>", "LAMBDA", said) == text.strip().replace("SETTINGS", SETTINGS)
