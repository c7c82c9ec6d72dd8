"""Narrow floats that are only moved, which XLA on CPUs would convert to f32."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import xp_jax
from tessera.runtime.devices import start

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
    """Each iteration of a loop writes one row of the stacked result; with f32 it would write all
    rows."""

    def rows(x):
        return xp_jax.scan(lambda c, now: (c, (now[0] * 2,)), (), (x,), len(X), False)

    text = jax.jit(rows).lower(jnp.asarray(X, dtype)).compile().as_text()
    assert "while(" in text and not re.search(r"\bf(32|16)\[8,32\]", text)


AXES = ("x",)
COLLECTIVES = {
    "all_gather": (lambda x: xp_jax.all_gather(x, AXES, 0), "all-gather"),
    "all_to_all": (lambda x: xp_jax.all_to_all(x.reshape(4, 2, 32), AXES, 0, 0), "all-to-all"),
    "permute": (lambda x: xp_jax.permute(x, AXES, [(0, 1), (1, 3)]), "collective-permute"),
    "broadcast": (lambda x: xp_jax.broadcast(x, AXES, 2), "collective-permute"),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_sends_what_a_value_has(name, dtype):
    """Each element is sent in its own width, and arrives unchanged."""
    move, sent = COLLECTIVES[name]
    start(4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), AXES)
    spec = jax.sharding.PartitionSpec("x")
    run = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = np.concatenate([X] * 4).astype(dtype)
    bits = f"u{x.itemsize}"
    width = {1: "u8", 2: "u16", 4: "f32"}[x.itemsize]
    text = run.lower(x).compile().as_text()
    assert set(re.findall(rf"= \(?(\w+)\[[^=]* {sent}\(", text)) == {width}
    got, want = run(x), run(x.view(bits))
    np.testing.assert_array_equal(np.asarray(got).view(bits), np.asarray(want))


def test_fp8_is_rounded_as_everywhere_else():
    """Casts from all kinds of floats to fp8, and from fp8 to wider ones: the bits of ml_dtypes."""
    e4m3 = ml_dtypes.float8_e4m3fn
    every = np.random.default_rng(1).integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    steps = np.linspace(-500, 500, 1 << 16, dtype=np.float32)
    codes = np.arange(256, dtype=np.uint8).view(e4m3)
    exact = codes.astype(np.float32)
    middles = exact[:-1] / 2 + exact[1:] / 2
    x = np.concatenate([every, steps, steps / 2**14, exact, middles])
    x = np.concatenate([x, np.nextafter(middles, np.float32(9))])
    with np.errstate(invalid="ignore", over="ignore"):
        for given in (x, x.astype(np.float16), x.astype(ml_dtypes.bfloat16)):
            got = np.asarray(jax.jit(lambda x: xp_jax.cast(x, ts.fp8_e4m3))(given))
            np.testing.assert_array_equal(got.view(np.uint8), given.astype(e4m3).view(np.uint8))
    for wide in (ts.f32, ts.f16, ts.bf16):
        got = np.asarray(jax.jit(lambda x, wide=wide: xp_jax.cast(x, wide))(codes))
        want = codes.astype(wide.numpy)
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
