"""Functions outside PyTorch's samples, against PyTorch and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import nn
from tests.core.numpy_engine import Oracle

EDGES = np.array([-200.0, -30.0, -1.5, -1e-4, 0.0, 1e-4, 2.0, 30.0, 200.0], np.float32)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.softplus, torch.nn.functional.softplus),
        (lambda x: nn.softplus(x, 3.0), lambda x: torch.nn.functional.softplus(x, 3.0)),
        (lambda x: nn.elu(x, 0.5), lambda x: torch.nn.functional.elu(x, 0.5)),
        (nn.leaky_relu, torch.nn.functional.leaky_relu),
        (ts.log1p, torch.log1p),
        (lambda x: ts.clip(x, -1.5, 2.0), lambda x: torch.clamp(x, -1.5, 2.0)),
    ],
)
def test_slopes_at_the_edges_are_those_of_pytorch(
    ours: Callable[..., Any], theirs: Callable[..., Any], oracle: Oracle
) -> None:
    edges = EDGES if theirs is not torch.log1p else np.abs(EDGES)
    x = torch.tensor(edges, requires_grad=True)
    want = theirs(x)
    want.sum().backward()
    mine = ts.tensor(edges)
    got = ours(mine)
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-6, atol=1e-12)
    assert x.grad is not None
    np.testing.assert_allclose(ts.grad(got.sum(), mine).numpy(), x.grad.numpy(), rtol=2e-6)


def test_the_slope_of_a_logistic_loss(oracle: Oracle) -> None:
    rng = np.random.default_rng(3)
    logits, target = rng.normal(size=(4, 3)), rng.uniform(size=(4, 3))
    weight, positive = rng.uniform(size=(4, 1)), rng.uniform(size=3)
    z, *rest = (torch.tensor(a, dtype=torch.float32) for a in (logits, target, weight, positive))
    z.requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    loss(z, rest[0], rest[1], pos_weight=rest[2]).backward()
    mine, y, w, p = (ts.tensor(a, dtype=ts.f32) for a in (logits, target, weight, positive))
    got = ts.grad(nn.binary_cross_entropy_with_logits(mine, y, w, pos_weight=p), mine)
    assert z.grad is not None
    np.testing.assert_allclose(got.numpy(), z.grad.numpy(), rtol=1e-5)


def test_a_loss_of_another_shape_is_not_broadcast(oracle: Oracle) -> None:
    with pytest.raises(ts.ShapeError, match=r"mse_loss: the target has shape \(2, 1\), not \(2,\)"):
        nn.mse_loss(ts.ones(2), ts.ones((2, 1)))


@pytest.mark.parametrize(
    "args", [(5,), (2, 9, 3), (3, -4, -2), (4, 4), (0.5, 3.0), (1, 2, 0.25), (2, 1, 0.5)]
)
def test_numbers_in_a_row(args: tuple[Any, ...], oracle: Oracle) -> None:
    got, want = ts.arange(*args), np.arange(*args)
    assert got.dtype is (ts.int32 if want.dtype.kind == "i" else ts.f32)
    np.testing.assert_array_equal(got.numpy(), want.astype(got.numpy().dtype))


def test_numbers_that_a_dtype_does_not_hold_are_refused(oracle: Oracle) -> None:
    assert ts.arange(2047, 2049, dtype=ts.f16).shape == (2,)
    with pytest.raises(ts.DTypeError, match="does not hold every whole number up to 2049"):
        ts.arange(2040, 2050, dtype=ts.f16)
    with pytest.raises(ts.DTypeError, match="fractions do not fit i32"):
        ts.arange(0.5, 2, dtype=ts.int32)
    with pytest.raises(ts.UsageError, match="step cannot be 0"):
        ts.arange(1, 2, 0)
    for dtype in (ts.f32, "f32", np.float32):
        with pytest.warns(DeprecationWarning, match="arange"):
            assert ts.arange(3, dtype).dtype is ts.f32


def test_bits_of_signed_numbers(oracle: Oracle) -> None:
    x = ts.tensor([-8, -1, 7])
    assert (x >> 1).numpy().tolist() == [-4, -1, 3]
    assert (x << 2).numpy().tolist() == [-32, -4, 28]
    assert (1 << ts.tensor([0, 3])).numpy().tolist() == [1, 8]
    with pytest.raises(ts.UsageError, match="the count cannot be -1"):
        x >> -1


def test_the_smallest_put_nan_last(oracle: Oracle) -> None:
    values, ids = ts.topk(ts.tensor([np.nan, 3.0, np.inf, -1.0, 3.0]), 4, largest=False)
    assert values.numpy().tolist() == [-1.0, 3.0, 3.0, np.inf]
    assert ids.numpy().tolist() == [3, 1, 4, 2]


def test_repeat_is_pytorchs_and_repeat_interleave_is_numpys(oracle: Oracle) -> None:
    x = ts.tensor([1, 2])
    assert x.repeat(2).numpy().tolist() == ts.tile(x, 2).numpy().tolist() == [1, 2, 1, 2]
    assert np.repeat(x, 2).numpy().tolist() == [1, 1, 2, 2]  # type: ignore[attr-defined]
    with pytest.raises(ts.ShapeError, match="repeat: 1 numbers for 2 dims"):
        x.reshape(1, 2).repeat(2)


def test_running_products_and_extremes_of_a_split_dim_send_once(oracle: Oracle) -> None:
    mesh = ts.dist.Mesh(("a",), shape={"a": 8})
    x = ts.tensor(np.ones((2, 64), np.float32), mesh=mesh, layout="[2, 64@a]")
    for f in (ts.cumprod, lambda x: ts.cummax(x, 1)[1]):
        text = ts.graph.trace(f, x).text
        assert text.count("redistribute") + text.count("all_gather") <= 2, text


def test_norms_are_over_the_dims_that_their_weights_have(oracle: Oracle) -> None:
    rng = np.random.default_rng(3)
    x, w, b = (rng.normal(size=s).astype(np.float32) for s in ((2, 3, 4), (3, 4), (3, 4)))
    tx, tw, tb = map(torch.tensor, (x, w, b))
    for got, want in (
        (nn.layer_norm(x, w, b), torch.nn.functional.layer_norm(tx, (3, 4), tw, tb)),
        (nn.layer_norm(x, w[0]), torch.nn.functional.layer_norm(tx, (4,), tw[0])),
        (nn.rms_norm(x, w, 1e-3), torch.nn.functional.rms_norm(tx, (3, 4), tw, 1e-3)),
    ):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
    for norm in (nn.layer_norm, nn.rms_norm):
        for sizes in ((4,), (3, 4), 4):  # PyTorch's form with a second argument
            with pytest.raises(ts.UsageError, match="there is no argument for sizes"):
                norm(x, sizes)
        for wrong in (w[:1], ts.ones((2, 4))):
            with pytest.raises(ts.ShapeError, match="follows from them"):
                norm(x, wrong)
    with pytest.raises(ts.ShapeError, match="follows from them"):
        nn.layer_norm(x, w[0], b)


@pytest.mark.parametrize(
    "call",
    [
        ts.any, ts.all, ts.var, ts.std, ts.logsumexp, nn.softmax, nn.log_softmax, nn.glu,
        nn.normalize, nn.cosine_similarity,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_dim_that_is_not_there_is_that_of_the_function_called(call: Any) -> None:
    x = ts.ones((2, 3))
    args = (x, x) if call is nn.cosine_similarity else (x,)
    with pytest.raises(ts.ShapeError, match=rf"^{call.__name__}: there is no dim 5\n  x   : f32"):
        call(*args, dim=5)


@pytest.mark.parametrize(
    ("name", "fix"), [("shape", "reshape"), ("dtype", "x.to"), ("data", "make a new tensor")]
)
def test_a_tensor_does_not_change(name: str, fix: str) -> None:
    x = ts.ones((2, 3))
    with pytest.raises(ts.UsageError, match=f"^Tensor.{name} cannot be set\n(.*\n)*.*{fix}"):
        setattr(x, name, getattr(x, name))


@pytest.mark.parametrize("what", [3.0, 9.0, np.array([2.0, 7.0, 7.0]), np.array([7.0, 7.0, 2.0])])
def test_what_is_in_a_tensor_is_one_of_its_elements(what: Any, oracle: Oracle) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (what in ts.tensor(x)) == (what in x)
