"""Kernels on tiles against the engine's own forms: the bits of packed rows, and optax."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import tessera as ts
from tessera.ir.tile.kernel import with_sizes
from tessera.ir.tile.kernels import ADAMW, dispatch, unpack
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse
from tessera.nn.experts import packing


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_packed_rows_have_the_bits_of_packing(dtype: type, size: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(16, 256)) * size).astype(dtype)
    x[3] = 0
    name = "f32" if dtype is np.float32 else "bf16"
    sizes = {"N": 16, "S": 16, "bs": 8, "C": 256}
    ids = np.arange(16, dtype=np.int32)
    packed, scale = evaluate(with_sizes(parse(dispatch(True, name)), **sizes), x, ids)
    want, scales = packing.pack(ts.tensor(x))
    assert np.array_equal(scale, scales.numpy()[..., 0])
    have = want.numpy().reshape(16, 256)
    assert np.array_equal(packed.view(np.uint8), have.view(np.uint8))
    del sizes["N"]
    (back,) = evaluate(with_sizes(parse(unpack(name)), **sizes), packed, scale)
    own = packing.unpack(want, scales, 256, ts.tensor(x).dtype).numpy()
    assert np.array_equal(back.view(np.uint8), own.view(np.uint8))


def test_adamw_is_that_of_optax() -> None:
    rng = np.random.default_rng(0)
    p = rng.normal(size=64).astype(np.float32)
    m, v, peer = np.zeros_like(p), np.zeros_like(p), jnp.asarray(p)
    update = optax.adamw(0.01, 0.9, 0.99, 1e-6, weight_decay=0.1)
    state = update.init(peer)
    kernel = with_sizes(parse(ADAMW), N=64, bn=16)
    for step in range(1, 6):
        g = rng.normal(size=64).astype(np.float32)
        change, state = update.update(jnp.asarray(g), state, peer)
        peer = optax.apply_updates(peer, change)
        h = np.float32([0.01, 0.9, 0.99, 1e-6, 0.1, 1 / (1 - 0.9**step), 1 / (1 - 0.99**step)])
        p, m, v = evaluate(kernel, h, p, m, v, g)
        np.testing.assert_allclose(p, peer, rtol=1e-5, atol=1e-6)
