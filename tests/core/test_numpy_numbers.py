"""NumPy numbers as settings: equal to Python's."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim


def config(n: Any, x: Any) -> nn.GPTConfig:
    rope = nn.Rope(base=x(1e4), scaling="llama3", factor=x(2), original=n(8))
    return nn.GPTConfig(
        vocab=n(16), seq=n(8), d=n(8), layers=n(2), heads=n(2), positions="rotary",
        windows=(n(4), n(0)), experts=n(4), aux_weight=x(0.5), rope=rope,
    )  # fmt: skip


MADE: dict[str, Any] = {
    "config": config,
    "constant": lambda n, x: optim.constant(x(0.5)),
    "linear": lambda n, x: optim.linear(x(0), x(0.5), n(10)),
    "warmup_cosine": lambda n, x: optim.warmup_cosine(x(0.5), n(10), n(100)),
    "piecewise_constant": lambda n, x: optim.piecewise_constant([x(1), x(0.5)], [n(3)]),
    "optimizer": lambda n, x: optim.AdamW(x(0.5), betas=(x(0.5), x(0.25))),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("kinds", [(np.int64, np.float32), (np.int32, np.float64)])
def test_settings_hold_python_numbers(made: Any, kinds: Any) -> None:
    assert repr(made(*kinds)) == repr(made(int, float))


def test_settings_given_as_lists_are_those_given_as_tuples() -> None:
    listed, plain = optim.AdamW(1e-3, betas=[0.9, 0.99]), optim.AdamW(1e-3, betas=(0.9, 0.99))  # type: ignore[arg-type]
    assert listed == plain and hash(listed) == hash(plain)


def test_a_configuration_can_be_written_as_json() -> None:
    assert json.dumps(asdict(config(np.int64, np.float32))) == json.dumps(
        asdict(config(int, float))
    )


def test_a_gradient_by_one_argument_comes_alone() -> None:
    x, y = ts.tensor([1.0, 2.0]), ts.tensor([3.0, 4.0])

    def step(x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        slope = ts.value_and_grad(lambda x, y: (x * y).sum(), argnums=np.int64(1))(x, y)[1]
        assert isinstance(slope, ts.Tensor)
        return slope

    ts.jit(step).plan(x, y)
