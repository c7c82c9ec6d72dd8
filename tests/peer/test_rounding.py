"""Activations of narrow floats: rounded once, like PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import nn

torch = pytest.importorskip("torch")
theirs = torch.nn.functional
DTYPES = {ts.bf16: torch.bfloat16, ts.f16: torch.float16}
NAMES = ["silu", "gelu", "softplus", "elu", "mish", "selu", "hardswish", "logsigmoid", "glu"]
NAMES += ["leaky_relu", "hardsigmoid"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_activation_of_a_narrow_float_is_rounded_once(name: str, dtype: ts.DType) -> None:
    x = np.random.default_rng(0).normal(size=(64, 256), scale=3).astype(np.float32)
    narrow = ts.tensor(x).to(dtype)
    got = getattr(nn, name)(narrow)
    assert got.dtype is dtype
    wide = torch.tensor(narrow.to(ts.f32).numpy()).double()
    options = {"approximate": "tanh"} if name == "gelu" else {}
    want = getattr(theirs, name)(wide, **options).to(DTYPES[dtype]).float().numpy()
    # An f32 function may differ in its last bit, and is then rounded to the other side.
    assert np.mean(got.to(ts.f32).numpy() != want) < 0.02
