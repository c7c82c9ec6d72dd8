"""Programs whose partial sums are completed once compute what they do without a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist
from tessera.lang.record.tree import tree_map
from tests.core.test_partial_sums import TP, A, B, W, layer, llama, llama_weights, normed, slopes


def placed(t: Any, mesh: bool) -> ts.Tensor:
    """A tensor of the type `t` with small random values, on its mesh or on none."""
    seed = np.random.default_rng(sum(t.shape))
    if t.dtype is ts.int32:
        values = seed.integers(0, 64, t.shape)
    else:
        values = seed.normal(size=t.shape) / max(4, t.shape[0]) ** 0.5
    where: dict[str, Any] = {"mesh": TP, "layout": t} if mesh else {}
    return ts.tensor(values, dtype=t.dtype, **where)


def block(x: ts.Tensor, a: ts.Tensor, b: ts.Tensor) -> ts.Tensor:
    """A parallel block, whose two partial terms are added first."""
    return ts.tanh(x + a @ b + ts.tanh(a) @ b)


def gradient(p: dict[str, Any], ids: ts.Tensor) -> Any:
    return ts.grad((llama(p, ids).to(ts.f32) ** 2).mean(), p)


X = dist.tensor((8, 32), mesh=TP).type
IDS = dist.tensor((2, 4), mesh=TP, dtype="int32").type
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "norm": (normed, (A, B, W), 1e-5),
    "layer": (layer, (A, B, W), 1e-5),
    "gradient of a norm": (slopes, (A, B, W), 1e-4),
    "parallel block": (block, (X, A, B), 1e-5),
    "llama": (llama, (llama_weights("f32"), IDS), 1e-4),
    "gradient of a llama": (gradient, (llama_weights("f32"), IDS), 1e-4),
    "llama in bf16": (llama, (llama_weights("bf16"), IDS), 5e-2),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_without_a_mesh(case: str) -> None:
    run, types, rtol = CASES[case]
    args = [tree_map(lambda t, mesh=mesh: placed(t, mesh), types) for mesh in (True, False)]
    compiled = ts.jit(run)
    got, want = compiled(*args[0]), run(*args[1])
    assert compiled.graph.wire_bytes < ts.graph.trace(run, *args[0]).wire_bytes

    def close(a: ts.Tensor, b: ts.Tensor) -> None:
        x, y = (np.asarray(t.to(ts.f32).numpy()) for t in (a, b))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(1e-3, np.abs(y).max()))

    tree_map(close, got, want)


def test_the_same_bits_on_every_fold_of_the_mesh() -> None:
    """At the level "mesh_invariant" the sums stay where they were recorded."""
    with dist.deterministic():
        p, ids = (tree_map(lambda t: placed(t, True), t) for t in (llama_weights("f32"), IDS))
        assert dist.validate_determinism(gradient, p, ids).same


def test_the_same_bits_in_every_run() -> None:
    with dist.deterministic(level="run_to_run"):
        args = [placed(t, True) for t in (A, B, W)]
        first, second = (ts.jit(layer)(*args).numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)
