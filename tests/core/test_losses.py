"""Losses and masked attention against PyTorch, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import nn
from tests.core.numpy_engine import Oracle

RNG = np.random.default_rng(11)
LOGITS = RNG.normal(size=(3, 4, 7)).astype(np.float32)
LABELS = RNG.integers(0, 7, (3, 4))
WEIGHT = RNG.uniform(0.05, 0.3, 7).astype(np.float32)
SOME = np.where(RNG.uniform(size=(3, 4)) < 0.3, -100, LABELS)


@pytest.mark.parametrize(
    ("labels", "weight", "smoothing"),
    list(itertools.product((LABELS, SOME), (None, WEIGHT), (0.0, 0.1, 1.0))),
)
def test_cross_entropy(labels: Any, weight: Any, smoothing: float, oracle: Oracle) -> None:
    x = torch.tensor(LOGITS, requires_grad=True)
    want = torch.nn.functional.cross_entropy(
        x.reshape(-1, 7), torch.tensor(labels).reshape(-1), label_smoothing=smoothing,
        weight=None if weight is None else torch.tensor(weight),
    )  # fmt: skip
    want.backward()
    assert x.grad is not None
    mine = ts.tensor(LOGITS)
    eye = ts.tensor(np.eye(7, dtype=np.float32))
    for loss in (
        nn.cross_entropy(mine, labels, weight=weight, label_smoothing=smoothing),
        nn.linear_cross_entropy(
            mine, eye, labels, rows=5, class_weight=weight, label_smoothing=smoothing
        ),
    ):
        np.testing.assert_allclose(loss.numpy(), want.detach().numpy(), rtol=1e-5)
        np.testing.assert_allclose(
            ts.grad(loss, mine).numpy(), x.grad.numpy(), rtol=1e-4, atol=1e-6
        )


def test_labels_of_any_whole_dtype(oracle: Oracle) -> None:
    want = nn.cross_entropy(LOGITS, LABELS).item()
    for dtype in (ts.uint8, ts.int8, ts.uint32):
        assert nn.cross_entropy(LOGITS, ts.tensor(LABELS, dtype=dtype)).item() == want
    few = ts.tensor(np.where(LABELS > 3, -100, LABELS), dtype=ts.int8)
    assert np.isfinite(nn.cross_entropy(LOGITS, few).item())


Q = RNG.normal(size=(2, 4, 5, 8)).astype(np.float32)
K, V = RNG.normal(size=(2, 2, 2, 6, 8)).astype(np.float32)
MASKS = {
    "keys": RNG.uniform(size=(2, 1, 1, 6)) < 0.7,
    "scores": RNG.uniform(size=(5, 6)) < 0.7,
    "heads": RNG.uniform(size=(4, 5, 6)) < 0.7,
    "each": RNG.uniform(size=(2, 4, 5, 6)) < 0.7,
    "none seen": np.arange(5)[:, None] != np.full((5, 6), 2),
    "added": RNG.normal(size=(2, 1, 5, 6)).astype(np.float32),
    "added to heads": RNG.normal(size=(4, 1, 6)).astype(np.float32),
    "minus infinity": np.where(np.tril(np.ones((5, 6))) > 0, 0.0, -np.inf).astype(np.float32),
    "lowest float": np.where(np.tri(5, 6) > 0, 0.0, np.finfo(np.float32).min).astype(np.float32),
    "all minus infinity": np.where(np.arange(5)[:, None] == 1, -np.inf, 0.0).astype(np.float32),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_mask(name: str, oracle: Oracle) -> None:
    mask = MASKS[name]
    theirs = [torch.tensor(x, requires_grad=True) for x in (Q, K, V)]
    full = np.ascontiguousarray(np.broadcast_to(mask, (2, 4, 5, 6)))
    want = torch.nn.functional.scaled_dot_product_attention(
        *theirs, attn_mask=torch.tensor(full), enable_gqa=True
    )
    want.square().sum().backward()
    mine = [ts.tensor(x) for x in (Q, K, V)]
    for got in (nn.attention(*mine, mask=mask), nn.flash_attention(*mine, mask=mask, rows=1)):
        np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-4, atol=1e-6)
        for a, b in zip(ts.grad((got * got).sum(), mine), theirs, strict=True):
            np.testing.assert_allclose(a.numpy(), b.grad.numpy(), rtol=1e-3, atol=1e-5)


def test_causal_queries_before_the_first_key_give_zeros(oracle: Oracle) -> None:
    got = nn.attention(*(ts.tensor(x) for x in (K, K[:, :, :2], V[:, :, :2])), causal=True).numpy()
    assert (got[:, :, :4] == 0).all() and (got[:, :, 4] == V[:, :, 0]).all()


def test_causal_queries_whose_keys_are_hidden_see_none_of_the_later_ones(
    oracle: Oracle,
) -> None:
    """Left padding: the first queries see padding alone."""
    there = np.arange(6) >= 2
    for mask in (there, np.where(there, 0.0, np.finfo(np.float32).min).astype(np.float32)):
        k, v = ts.tensor(K), ts.tensor(V)
        got = nn.attention(k, k, v, causal=True, mask=mask)
        assert (got.numpy()[:, :, :2] == 0).all() and (got.numpy()[:, :, 2] == V[:, :, 2]).all()
        assert (ts.grad((got * got)[:, :, :2].sum(), v).numpy() == 0).all()


def test_masks_that_mean_nothing_are_refused(oracle: Oracle) -> None:
    q, k, v = (ts.tensor(x) for x in (Q, K, V))
    with pytest.raises(ts.ShapeError, match="does not broadcast to the scores"):
        nn.attention(q, k, v, mask=np.ones((2, 6), bool))
    with pytest.raises(ts.DTypeError, match="a mask of whole numbers"):
        nn.attention(q, k, v, mask=np.ones((5, 6), np.int32))
    with pytest.raises(ts.ShapeError, match=r"weight has shape \(2,\), not \(7,\)"):
        nn.cross_entropy(LOGITS, LABELS, weight=[1.0, 2.0])
