"""`ts.autocast("fp8")`: products rounded to fp8 by one scale, and training with them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn

MESH = dist.Mesh.parse("dp=2 tp=4")


def rounded(x: Any, kind: Any) -> Any:
    """`x` rounded to the dtype `kind` with the scale of its largest value, by ml_dtypes."""
    x = np.asarray(x, np.float32)
    scale = np.float32(np.abs(x).max()) * np.float32(1 / float(ml_dtypes.finfo(kind).max))
    return (x / scale).astype(kind).astype(np.float64) * scale


def bf16(x: Any) -> Any:
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("layouts", [
    ("[16, 32]", "[32, 64]"), ("[16@dp, 32]", "[32, 64@tp]"), ("[16@dp, 32@tp]", "[32@tp, 64]"),
    ("[16@tp, 32]", "[32@dp, 64]"),
])  # fmt: skip
def test_a_product_and_its_gradients(layouts: tuple[str, str]) -> None:
    """Values are rounded to e4m3 and gradients to e5m2, the same on every layout."""
    r = np.random.RandomState(0)
    a, b, g = r.randn(16, 32), r.randn(32, 64) * 1e-3, r.randn(16, 64) * 1e4
    x, w = (ts.tensor(v, mesh=MESH, layout=t) for v, t in zip((a, b), layouts, strict=True))

    @ts.jit
    def run(x, w):
        def loss(x, w):
            with ts.autocast("fp8"):
                return ts.sum((x @ w).to("f32") * ts.tensor(g))

        with ts.autocast("fp8"):
            y = x @ w
        return y, ts.grad(loss(x, w), [x, w])

    y, (dx, dw) = run(x, w)
    e4, e5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    xq, wq, gq = rounded(bf16(a), e4), rounded(bf16(b), e4), rounded(bf16(g), e5)
    assert y.dtype is ts.bf16 and dx.dtype is dw.dtype is ts.f32
    for got, want in ((y.to("f32"), xq @ wq), (dx, gq @ wq.T), (dw, xq.T @ gq)):
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-2, atol=1e-2 * np.abs(want).max())
    exact = bf16(a).astype(np.float64) @ bf16(b)
    assert 0.01 < np.linalg.norm(y.to("f32").numpy() - exact) / np.linalg.norm(exact) < 0.06


def test_what_is_in_fp8() -> None:
    """Products with a matrix are; those of attention and of two batches are bf16; zeros are."""
    x, w = ts.zeros((2, 4, 8)), ts.ones((8, 8))
    f = ts.jit(lambda x, w: (x @ w, x @ x.transpose(1, 2), nn.linear(x, w)))
    with ts.autocast("fp8"):
        y, *_ = f(x, w)
    assert not y.to("f32").numpy().any()
    assert [n.op for n in f.graph.nodes if "contract" in n.op].count("contract_fp8") >= 1
    assert [n.op for n in f.graph.nodes].count("contract") == 1
    with ts.autocast("fp8"), ts.autocast(ts.bf16):
        assert (x @ w).dtype is ts.bf16
    with pytest.raises(ts.DTypeError, match=r'write ts.autocast\("fp8"\)'):
        ts.autocast(ts.fp8_e4m3)


def losses(how: str, steps: int = 60) -> list[float]:
    """The losses of a small GPT on a fixed text."""
    ts.seed(0)
    model = nn.GPT(nn.GPTConfig(vocab=32, seq=32, d=64, layers=2, heads=4))
    dist.place(model, dist.strategy("data_parallel") + dist.strategy("tensor_parallel"), MESH)
    optimizer = ts.optim.AdamW(3e-3)
    state = optimizer.init(model)
    text = np.random.RandomState(1).randint(0, 32, 4096)
    text[1::2] = (text[::2] * 7 + 3) % 32  # every second token can be learned

    @ts.jit
    def step(model, state, ids, labels):
        with ts.autocast(how):
            loss = nn.cross_entropy(model(ids), labels)
        new, state = optimizer.update(model, ts.grad(loss, model), state)
        model.load_parameters(new)
        return loss, state

    found = []
    for i in range(steps):
        rows = (np.arange(16)[:, None] * 61 + i * 97 + np.arange(33)) % 4095
        ids = text[rows]
        loss, state = step(model, state, ids[:, :-1], ids[:, 1:])
        found.append(loss.item())
    return found


def test_training_reaches_the_loss_of_bf16() -> None:
    narrow, wide = losses("fp8"), losses("bf16")
    assert wide[-1] < 0.8 * wide[0]
    np.testing.assert_allclose(np.mean(narrow[-10:]), np.mean(wide[-10:]), rtol=0.01)
