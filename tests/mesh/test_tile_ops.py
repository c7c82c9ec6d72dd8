"""The ops of Tile IR computed by the engine's functions: as in NumPy, in the inferred types."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tessera.core.dtypes import held_as
from tessera.core.errors import TesseraError
from tessera.ir.graph import xp_numpy
from tessera.ir.tile.op import Call, Type
from tessera.ir.tile.ops import OPS, REDUCTIONS
from tessera.runtime import xp_jax

ATTRS = {
    "full": {"shape": "4,4", "value": "3"}, "iota": {"shape": "4,4", "dim": "1"},
    "cast": {"to": "bf16"}, "dot": {"transpose": "b"},
}  # fmt: skip
DTYPES = (np.float32, ml_dtypes.bfloat16, np.int32, np.int8, np.bool_)


@pytest.mark.parametrize("name", [*OPS, *(f"{name} dim" for name in REDUCTIONS)])
def test_ops_are_those_of_numpy(name: str) -> None:
    op = REDUCTIONS[name.removesuffix(" dim")] if name.endswith(" dim") else OPS[name]
    attrs = {"dim": "1"} if name.endswith(" dim") else ATTRS.get(name, {})
    rng, taken = np.random.default_rng(0), 0
    for dtype in DTYPES:
        xs: list[Any] = [np.abs(rng.normal(size=(4, 4)) * 3) + 0.2 for _ in range(op.operands)]
        xs = [x[0] if name in ("row", "col") else x for x in xs]
        xs = [x.astype(np.bool_ if name == "where" and i == 0 else dtype) for i, x in enumerate(xs)]
        try:
            out = op.infer([Type(held_as(x.dtype), x.shape) for x in xs], attrs, {})
        except TesseraError:
            continue  # the op does not take this dtype
        taken += 1
        by_numpy, by_jax = (
            Call(xp, out, attrs, lambda x, d, a=a: a(x).astype(d.numpy),
                 lambda text, d, a=a: a(float(text), d.numpy), a(3, np.int32))
            for xp, a in ((xp_numpy, np.asarray), (xp_jax, jnp.asarray))
        )  # fmt: skip
        want, have = op.compute(by_numpy, *xs), op.compute(by_jax, *map(jnp.asarray, xs))
        assert have.dtype == want.dtype == out.dtype.numpy
        assert have.shape == want.shape == out.shape
        near = 1e-5 if dtype is np.float32 else 2**-7
        np.testing.assert_allclose(np.asarray(have, float), np.asarray(want, float), near, near)
    assert taken
