"""Narrow floats that are only moved: a CPU's compiler would move them as f32."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import xp_jax

KINDS = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.float32]
X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
X[0, :4] = np.nan, np.inf, -0.0, -np.inf
IDS = np.array([3, 0, 7], np.int32)

MOVES = {
    "concat": (lambda x: ts.concat([x, x[2:5]]), lambda x: np.concatenate([x, x[2:5]])),
    "pad": (lambda x: ts.pad(x, (1, 2)), lambda x: np.pad(x, ((0, 0), (1, 2)))),
    "take": (lambda x: ts.take(x, IDS, 0), lambda x: x[IDS]),
    "scan": (lambda x: ts.scan(lambda c, row: (c, row), ts.zeros(()), x)[1], lambda x: x),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("move", MOVES)
def test_each_bit_stays(move, dtype):
    ours, theirs = MOVES[move]
    x = X.astype(dtype)
    got = ts.jit(ours)(ts.tensor(x)).numpy()
    np.testing.assert_array_equal(got.view(np.uint8), theirs(x).view(np.uint8))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_block_is_written_into_a_narrow_buffer_and_no_more(dtype):
    """Of the rows that a loop stacks, each iteration writes one; as f32 it would write them all."""

    def rows(x):
        return xp_jax.scan(lambda c, now: (c, (now[0] * 2,)), (), (x,), len(X), False)

    text = jax.jit(rows).lower(jnp.asarray(X, dtype)).compile().as_text()
    assert "while(" in text and not re.search(r"\bf(32|16)\[8,32\]", text)
