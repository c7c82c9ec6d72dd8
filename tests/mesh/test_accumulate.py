"""Gradient accumulation: the loss and gradients of the whole batch, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.train.accumulate import accumulated


def test_microbatches_in_a_local_body_count_all_labels() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(6, 3)).astype(np.float32)
    data = {"x": x, "y": np.int32([-100, -100, -100, 1, 2, 1, -100, 1])}
    found = []
    for count in (1, 2):

        @ts.jit
        @ts.distribute(strategy="data_parallel")
        def step(batch: Any, w: Any, count: int = count) -> Any:
            return accumulated(lambda b, w: nn.cross_entropy(b["x"] @ w, b["y"]), batch, w, count)

        with dist.Mesh(("dp",), devices=2):
            loss, g = step(data, w)
        found.append([loss.numpy(), g.numpy()])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("given", [lambda x: (x.mean(), 1), lambda x: None, lambda x: x.mean(0)])
def test_a_loss_that_is_none_says_so_at_once(given: Any, count: int) -> None:
    with pytest.raises(ts.TesseraError, match=r"accumulated: the loss (cannot|is not)"):
        accumulated(lambda b, w: given(b["x"] @ w), {"x": ts.ones((8, 6))}, ts.ones((6, 3)), count)


def test_a_batch_norm_has_the_statistics_of_the_batch() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    norm, theirs = nn.BatchNorm(3), torch.nn.BatchNorm1d(3)
    model = {"norm": norm}

    def loss(batch: Any, w: Any) -> ts.Tensor:
        return ((norm(batch["x"]) * batch["x"] * w) ** 2).mean()

    @ts.jit
    def step(x: Any, w: Any, model: Any) -> Any:
        return accumulated(loss, {"x": x}, w, 4)

    w = torch.ones(3, requires_grad=True)
    for _ in range(2):
        got, gradient = step(x, ts.ones(3), model)
        w.grad = None
        whole = torch.tensor(x)
        want = ((theirs(whole) * whole * w) ** 2).mean()
        want.backward()
        assert got.item() == pytest.approx(want.item(), rel=1e-5)
        np.testing.assert_allclose(gradient.numpy(), w.grad.numpy(), rtol=1e-4, atol=1e-6)
        for name in ("running_mean", "running_var"):
            want = getattr(theirs, name).numpy()
            np.testing.assert_allclose(getattr(norm, name).numpy(), want, rtol=1e-5, atol=1e-6)
