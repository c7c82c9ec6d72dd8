"""Kernels on GPUs that are not there: all are lowered, and those of one device are interpreted."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from tessera.ir.tile.kernel import Kernel, with_sizes
from tessera.ir.tile.kernels import TEXTS
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse
from tessera.runtime.kernels_gpu import gpu_call, lowered, why_not

TILES = dict.fromkeys(("bm", "bn", "bk", "bq", "bs", "bc", "bv", "D", "R"), 64)
SIZES = {**TILES, **dict.fromkeys(("T", "S", "N", "C", "V"), 256), "M": 128, "classes": 200}
OTHERS: dict[str, dict[str, int]] = {
    "adamw": {"bn": 1024, "N": 4096},
    "ag_matmul": {"M": 64, "K": 64, "N": 128},
    "matmul_rs": {"M": 64, "K": 64, "N": 64},
    "all_gather": {"K": 64},
    "reduce_scatter": {"K": 64},
    "exchange": {"K": 64},
    "ring_attention": {"C": 2},
    "ring_attention_causal": {"C": 2},
}


def at_real_sizes(name: str) -> Kernel:
    """The kernel with tiles of 64."""
    k = parse(TEXTS[name])
    known = dict([*k.dims, *k.tune])
    sizes = {**SIZES, **OTHERS.get(name, {})}
    return with_sizes(k, **{n: size for n, size in sizes.items() if n in known})


GATHERS = ("dispatch", "dispatch_packed", "combine")


@pytest.mark.parametrize("name", TEXTS)
def test_lowered(name: str) -> None:
    k = at_real_sizes(name)
    if name in GATHERS and jax.__version_info__ >= (0, 11):
        assert why_not(k) == "tuple index out of range"  # so that XLA's loops run it
        return
    assert why_not(k) == ""
    text = lowered(k).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert ("red.release.sys" in text) == bool(k.mesh)  # signals to other devices


SMALL: dict[str, dict[str, int]] = {
    "mlp_up": {"M": 32, "K": 64, "N": 32, "bm": 16, "bn": 16, "bk": 16},
    "adamw": {"N": 1024, "bn": 512},
    "dispatch": {"bc": 64},
    "combine": {"bc": 64},
}
# Not long: a product, transposed operands, a bound that depends on the grid, gathers, bytes.
QUICK = ("mlp_up", "adamw", "flash_causal", "flash_dkv_causal", "dispatch_packed", "combine")


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.long)
        for n in TEXTS
        if not parse(TEXTS[n]).mesh
    ],
)
def test_as_the_oracle(name: str) -> None:
    k = with_sizes(parse(TEXTS[name]), **SMALL.get(name, {}))
    rng = np.random.default_rng(0)
    xs: list[Any] = []
    for r in (r for r in k.refs if r.kind == "in"):
        if r.dtype.is_float:
            x = rng.normal(size=k.shape(r)) + (8 if r.name == "lse" else 0)
        else:
            x = rng.integers(0, 3 if "seg" in r.name else 60, size=k.shape(r))
        if name == "adamw":
            x = [1e-3, 0.9, 0.99, 1e-8, 0.1, 10, 100] if r.name == "h" else abs(x)
        xs.append(np.asarray(x).astype(r.dtype.numpy))
    how = InterpretGPUParams(detect_races=True)
    got = jax.jit(lambda *a: gpu_call(k, *a, interpret=how))(*xs)
    for y, want in zip(got, evaluate(k, *xs)):
        wide = want.astype(np.float32)
        most = np.abs(wide[np.isfinite(wide)]).max()
        np.testing.assert_allclose(np.float32(y), wide, rtol=1e-5, atol=1e-5 * most)


EDGES = """\
kernel edges  v1
  dims N=128
  grid i=1
  in x : f32[N] tiles [N]
  out root : f32[N] tiles [N]
  out byte : f8e4m3[N] tiles [N]
  out near : f32[N] tiles [N]
  %x = load x[i]
  %root = sqrt %x
  store root[i] = %root
  %byte = cast %x to=f8e4m3
  store byte[i] = %byte
  %near = erf %x
  store near[i] = %near"""


def test_ends_of_functions() -> None:
    k, x = parse(EDGES), np.linspace(-4, 4, 128).astype(np.float32)
    x[:9] = 0, -0.0, np.inf, np.nan, 1e-40, 464, 464.1, -500, 448
    assert why_not(k) == ""
    got = jax.jit(lambda a: gpu_call(k, a, interpret=InterpretGPUParams()))(x)
    for y, want in zip(got, evaluate(k, x)):
        ok = np.abs(x) != np.float32(1e-40)  # the engine takes it for zero
        np.testing.assert_allclose(
            np.float32(y)[ok], want.astype(np.float32)[ok], rtol=1e-6, atol=1e-7
        )


def test_what_is_not_lowered() -> None:
    assert why_not(parse(TEXTS["flash"])) == (
        "kernels on GPUs: values of two dims are tiles of 64 by 8, not f32[16, 16]"
    )
    assert "gather" in why_not(parse(TEXTS["dispatch"]))
    narrow = EDGES.replace("f8e4m3", "f8e5m2")
    assert why_not(parse(narrow)) == "kernels on GPUs: no cast to f8e5m2"
