"""Settings of a block of code: in force in all of it, and not beyond."""

from __future__ import annotations

import numpy as np

import tessera as ts
from tessera.core.context import settings
from tests.mesh.silent.rows import row


@row("two functions compared inside of ts.autocast, which goes on afterwards")
def _() -> None:
    def less(x: ts.Tensor) -> ts.Tensor:
        return ts.exp(x) * 1.5

    def more(x: ts.Tensor) -> ts.Tensor:
        return ts.exp(x) * 2.0

    x = np.ones((2, 2), np.float32)
    before = settings()
    with ts.autocast("bf16"):
        assert not ts.debug.compare(less, more, x).same
        assert (ts.tensor(x) @ ts.tensor(x)).dtype is ts.bf16
    assert settings() is before


@row("two layers that make weights for themselves, compiled from lambdas")
def _() -> None:
    def layer(x: ts.Tensor) -> ts.Tensor:
        return ts.op.transformer_block(x, heads=2, hidden=16)

    small, large = ts.jit(lambda x: layer(x)), ts.jit(lambda x: layer(x))
    assert small(ts.ones((1, 4, 8))).shape == (1, 4, 8)
    assert large(ts.ones((1, 4, 16))).shape == (1, 4, 16)
