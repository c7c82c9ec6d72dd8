"""Composite functions against PyTorch and NumPy, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tests.core.numpy_engine import Oracle

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(2, 4, 6)).astype(np.float32) * 3
EDGES = np.array([-8.0, -6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0, 8.0, 90.0, -90.0], np.float32)
ODD = np.array([[np.nan, np.inf, -np.inf, 2.0], [0.0, -1.5, 1e30, 0.5]], np.float32)
IDS = RNG.integers(0, 6, 4)
PROBS = RNG.uniform(size=(4, 6)).astype(np.float32)
TF = torch.nn.functional if hasattr(torch, "nn") else None
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    **{
        name: (getattr(nn, name), getattr(TF, name), (X,))
        for name in ("mish", "selu", "hardtanh", "relu6", "hardsigmoid", "hardswish", "logsigmoid")
    },
    **{
        f"{name} at edges": (getattr(nn, name), getattr(TF, name), (EDGES,))
        for name in ("mish", "selu", "hardtanh", "relu6", "hardsigmoid", "hardswish", "logsigmoid")
    },
    "glu": (nn.glu, TF.glu, (X,)),
    "glu of rows": (lambda x: nn.glu(x, 0), lambda x: TF.glu(x, 0), (X,)),
    "normalize": (nn.normalize, lambda x: TF.normalize(x, dim=-1), (X,)),
    "normalize by 1": (lambda x: nn.normalize(x, 1, 0), lambda x: TF.normalize(x, 1, 0), (X,)),
    "normalize zeros": (nn.normalize, lambda x: TF.normalize(x, dim=-1), (X * 0 + 1e-13,)),
    "cosine": (nn.cosine_similarity, lambda x, y: TF.cosine_similarity(x, y, -1), (X, Y)),
    "tan": (ts.tan, torch.tan, (X / 3,)),
    **{name: (getattr(ts, name), getattr(torch, name), (X * scale,))
       for names, scale in ((("atan", "sinh", "cosh", "asinh", "erfc"), 1.0),
                            (("asin", "acos", "atanh", "erfinv"), 0.1)) for name in names},
    **{f"{name} of odd": (getattr(ts, name), getattr(torch, name), (ODD,))
       for name in ("atan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc",
                    "erfinv")},
    "sinh and back": (lambda x: ts.sinh(ts.asinh(x)), lambda x: x.clone(), (EDGES * 1e30,)),
    "cosh and back": (lambda x: ts.cosh(ts.acosh(x)), lambda x: x.clone(), (1 + X**2,)),
    "cosh, far, of odd": (ts.cosh, torch.cosh, (EDGES[-2:] * 0.99,)),
    "atan2": (ts.atan2, torch.atan2, (X, Y)),
    "atan2 of odd": (ts.atan2, torch.atan2, (ODD, ODD.T.copy()[:2, :1])),
    "hypot": (ts.hypot, torch.hypot, (X * 1e30, Y * 1e30)),
    "trunc": (ts.trunc, torch.trunc, (X,)),
    "trunc of whole": (ts.trunc, torch.trunc, (IDS.astype(np.int32),)),
    "nan_to_num": (ts.nan_to_num, torch.nan_to_num, (ODD,)),
    "nan_to_num of": (lambda x: ts.nan_to_num(x, 1.0, 2.0, 3.0),
                      lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0), (ODD,)),
    "logaddexp": (ts.logaddexp, torch.logaddexp, (X * 30, Y * 30)),
    "logaddexp of infinities": (ts.logaddexp, torch.logaddexp, (EDGES[:4] * np.inf, ODD[1])),
    "outer": (ts.outer, torch.outer, (X[0], Y[1])),
    "diff": (ts.diff, torch.diff, (X,)),
    "diff twice": (lambda x: ts.diff(x, 2, 0), lambda x: torch.diff(x, 2, 0), (X,)),
    "diff of bools": (ts.diff, torch.diff, (X > 0,)),
    "count": (ts.count_nonzero, torch.count_nonzero, (np.maximum(X, 0),)),
    "count along": (lambda x: ts.count_nonzero(x, (0, 1)),
                    lambda x: torch.count_nonzero(x, (0, 1)), (X > 0,)),
    **{
        f"{name} {how}": (
            lambda x, y, name=name, how=how: getattr(nn, name)(x, y, reduction=how),
            lambda x, y, name=name, how=how: getattr(TF, name)(x, y, reduction=how), (X, Y))
        for name in ("l1_loss", "huber_loss", "smooth_l1_loss") for how in ("mean", "sum", "none")
    },
    "huber": (lambda x, y: nn.huber_loss(x, y, delta=0.3),
              lambda x, y: TF.huber_loss(x, y, delta=0.3), (X, Y)),
    "smooth": (lambda x, y: nn.smooth_l1_loss(x, y, beta=0.3),
               lambda x, y: TF.smooth_l1_loss(x, y, beta=0.3), (X, Y)),
    "smooth 0": (lambda x, y: nn.smooth_l1_loss(x, y, beta=0.0),
                 lambda x, y: TF.smooth_l1_loss(x, y, beta=0.0), (X, Y)),
    "nll": (lambda x: nn.nll_loss(x, IDS), lambda x: TF.nll_loss(x, torch.tensor(IDS)), (X,)),
    "nll weighted": (
        lambda x: nn.nll_loss(x, IDS, np.arange(6.0), int(IDS[0])),
        lambda x: TF.nll_loss(x, torch.tensor(IDS), torch.arange(6.0), ignore_index=int(IDS[0])),
        (X,),
    ),
    "nll each": (lambda x: nn.nll_loss(x, IDS, reduction="none"),
                 lambda x: TF.nll_loss(x, torch.tensor(IDS), reduction="none"), (X,)),
    "bce": (lambda x: nn.binary_cross_entropy(x, PROBS[::-1].copy()),
            lambda x: TF.binary_cross_entropy(x, torch.tensor(PROBS[::-1].copy())), (PROBS,)),
    "bce weighted": (
        lambda x: nn.binary_cross_entropy(x, PROBS, np.arange(6.0), "sum"),
        lambda x: TF.binary_cross_entropy(
            x, torch.tensor(PROBS), torch.arange(6.0), reduction="sum"), (PROBS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, oracle: Oracle) -> None:
    ours, theirs, given = CASES[name]
    mine = [ts.tensor(x) for x in given]
    peer = [torch.tensor(x, requires_grad=x.dtype == np.float32) for x in given]
    got, want = ours(*mine), theirs(*peer)
    assert got.shape == tuple(want.shape)
    np.testing.assert_allclose(
        got.numpy().astype(np.float64), want.detach().numpy().astype(np.float64),
        rtol=2e-5, atol=2e-6,
    )  # fmt: skip
    if not want.requires_grad or name == "trunc" or name.endswith("of odd"):
        return
    want.sum().backward()
    for a, b in zip(ts.grad(got.sum(), mine), peer, strict=True):
        np.testing.assert_allclose(a.numpy(), b.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_logs_of_0_and_1_are_bounded(oracle: Oracle) -> None:
    p, y = np.array([0.0, 1.0, 0.0], np.float32), np.array([1.0, 0.0, 0.0], np.float32)
    want = TF.binary_cross_entropy(torch.tensor(p), torch.tensor(y)).item()
    assert nn.binary_cross_entropy(p, y).item() == pytest.approx(want)


@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_grids(indexing: Any, oracle: Oracle) -> None:
    for axes in ([X[0]], [X[0], X[1, :2]], [X[0, :2], X[1, :3], X[2, :4]]):
        found = ts.meshgrid(*axes, indexing=indexing)
        for a, b in zip(found, np.meshgrid(*axes, indexing=indexing), strict=True):
            np.testing.assert_array_equal(a.numpy(), b)
