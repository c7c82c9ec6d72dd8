"""Small programs of many kinds on a GPU, against the NumPy oracle or one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist, graph, nn, pipeline
from tessera.core.context import replaced
from tessera.runtime.offload import HostCopy
from tests.gpu.test_gpu import has_gpu

pytestmark = [
    pytest.mark.skipif(not has_gpu(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:1F1B"),
]
RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(s, np.float32) for s in ((16, 8), (8, 8)))
GRID = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4}).fold(onto=1)
Pair = tuple[Any, Any]  # the result on a GPU, and the expected one


def stepped() -> Pair:
    """The stepped executor over a folded mesh."""
    slope = ts.jit(lambda x, w: ts.grad(ts.tanh(x @ w).sum(), w))
    with replaced(executor="stepped"):
        got = slope(
            ts.tensor(X, mesh=GRID, layout="[16@dp, 8]"),
            ts.tensor(W, mesh=GRID, layout="[8, 8@tp]"),
        )
    return got.numpy(), X.T @ (1 - np.tanh(X @ W) ** 2)


def piped() -> Pair:
    mesh = dist.Mesh(("pp",), shape={"pp": 4}).fold(onto=1)
    weights = {f"w{i}": W / 3 + i for i in range(4)}

    def layers(w: Any, x: Any) -> Any:
        for i in range(4):
            x = ts.tanh(x @ w[f"w{i}"])
        return x

    def slopes(model: Callable[..., Any]) -> list[np.ndarray]:
        def step(w: Any, x: Any) -> Any:
            loss = (model(w, x) ** 2).mean()
            return [loss, *ts.grad(loss, w).values()]

        return [t.numpy() for t in ts.jit(step)(weights, X)]

    run = pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=4, mesh=mesh)
    return slopes(run(layers)), slopes(layers)


def ring() -> Pair:
    mesh = dist.Mesh(("dp", "cp"), shape={"dp": 1, "cp": 4}).fold(onto=1)
    ts.seed(0)
    model = nn.GPT(nn.GPTConfig(vocab=64, seq=64, d=32, layers=2, heads=4, context="ring"))
    ids = RNG.integers(0, 64, (2, 64)).astype(np.int32)
    loss = ts.jit(lambda model, ids: model.loss(ids, ids))
    alone = loss(model, ts.tensor(ids)).item()
    placed = dist.place(model, dist.strategy("data_parallel"), mesh)
    return loss(placed, ts.tensor(ids, mesh=mesh)).item(), alone


def experts() -> Pair:
    ts.seed(0)
    layer = nn.MoE(32, 64, 8, 2)
    x = ts.tensor(RNG.standard_normal((4, 32, 32), np.float32))

    def run(layer: Any, x: Any) -> Any:
        y = layer(x)
        return [y, *ts.grad((y**2).sum(), layer.parameters()).values()]

    values = [t.numpy() for t in layer.state_dict().values()]
    return (
        [t.numpy() for t in ts.jit(run)(layer, x)],
        graph.evaluate(graph.trace(run, layer, x), [*values, x.numpy()]),
    )


def in_order() -> Pair:
    with dist.deterministic("ring", level="run_to_run"):
        x = ts.tensor(X, mesh=GRID, layout="[16@dp, 8@tp]")
        return ts.jit(lambda x: x.sum())(x).item(), X.sum()


def narrow() -> Pair:
    import ml_dtypes

    return ts.tensor(X).to("fp8_e4m3").to(ts.f32).numpy(), X.astype(ml_dtypes.float8_e4m3fn)


def wide() -> Pair:
    return ts.jit(lambda x: (x * x).sum())(X.astype(np.float64)).item(), np.sum(
        X.astype(float) ** 2
    )


def solved() -> Pair:
    a = W @ W.T + 8 * np.eye(8, dtype=np.float32)
    return ts.linalg.inv(ts.tensor(a)).numpy(), np.linalg.inv(a)


def waiting() -> Pair:
    """A copy to host memory and back."""
    x = ts.random.normal((64, 64))
    copy = HostCopy(x.stored, x.type)
    copy.wait()
    return np.asarray(copy()), x.numpy()


@pytest.mark.parametrize(
    "program", [stepped, piped, ring, experts, in_order, narrow, wide, solved, waiting]
)
def test_it_gives_what_is_right(program: Callable[[], Pair]) -> None:
    with jax.default_matmul_precision("highest"):
        got, want = program()
    for x, y in zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]:
        np.testing.assert_allclose(x, np.asarray(y, np.float64), rtol=1e-3, atol=1e-3)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    x = ts.random.normal((64, 8))
    checkpoint.save("a", {"x": x}, root=tmp_path, quiet=True)
    checkpoint.wait()
    back = checkpoint.load(tensors={"x": ts.zeros((64, 8))}, root=tmp_path).tensors["x"]
    assert (back.numpy() == x.numpy()).all()
