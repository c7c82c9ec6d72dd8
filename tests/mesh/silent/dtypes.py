"""Narrow dtypes against PyTorch and NumPy: counts, sums and comparisons."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import torch

import tessera as ts
from tessera import dist, nn, op
from tests.mesh.silent.rows import row

BF16 = ml_dtypes.bfloat16


@row("u8 is compared with i8, and added to it")
def mixed_signs() -> None:
    x, y = np.array([200, 3, 255], np.uint8), np.array([-1, 3, -1], np.int8)
    a, b = ts.tensor(x), ts.tensor(y)
    assert np.array_equal((a > b).numpy(), x > y)
    assert np.array_equal((a == b).numpy(), x == y)
    assert np.array_equal((a + b).numpy(), x.astype(int) + y)
    assert (a + b).dtype is ts.int32


@row("u32 is compared with i32", error=ts.DTypeError, says="no dtype holds all values of both")
def mixed_words() -> None:
    ts.maximum(ts.tensor(np.array([3_000_000_000], np.uint32)), ts.tensor(np.array([-1], np.int32)))


@row("numbers are counted in a dtype that does not hold them", error=ts.DTypeError,
     says="arange: u8 does not hold every whole number below 300")  # fmt: skip
def counted_too_far() -> None:
    ts.arange(300, dtype="u8")


@row("f16 counts beyond 2048", error=ts.DTypeError,
     says="arange: f16 does not hold every whole number below 3000")  # fmt: skip
def counted_in_halves() -> None:
    ts.arange(3000, dtype=ts.f16)


@row("one_hot of u8 ids over more classes than u8 counts")
def many_classes() -> None:
    ids = np.array([0, 44, 255], np.uint8)
    made = ts.one_hot(ts.tensor(ids), 300).numpy()
    assert np.array_equal(made, np.eye(300, dtype=np.float32)[ids])


@row("narrow whole numbers are summed, multiplied and added up along a dim")
def narrow_sums() -> None:
    for dtype in (np.uint8, np.int8):
        x = np.array([[100, 100, 100], [-3, 7, 100]]).astype(dtype)
        theirs = torch.tensor(x)
        for ours, peer in (
            (ts.sum(ts.tensor(x)), theirs.sum()),
            (ts.prod(ts.tensor(x), 1), theirs.prod(1)),
            (ts.cumsum(ts.tensor(x)), theirs.cumsum(-1)),
            (ts.linalg.trace(ts.tensor(x)), theirs[:2, :2].trace()),
        ):
            assert np.array_equal(ours.numpy(), peer.numpy())
    assert ts.prod(ts.tensor(np.array([True, False]))).item() == 0


@row("the mean, the variance and the norm of halves whose sum is beyond their range")
def large_halves() -> None:
    x = np.full((300, 300), 300.0, np.float16)
    x[:, ::2] = 100.0
    t = ts.tensor(x)
    assert ts.mean(t).item() == 200.0 and ts.mean(t).dtype is ts.f16
    assert ts.var(t).item() == 10_000.0
    assert abs(ts.linalg.norm(t, dim=1)[0].item() / np.linalg.norm(x[0].astype(float)) - 1) < 1e-3
    assert nn.avg_pool2d(ts.full((1, 1, 2, 2), 30_000, ts.f16), 2).item() == 30_000.0
    on = dist.Mesh(("dp",), devices=8)
    assert ts.mean(ts.tensor(x, mesh=on, layout="[300@dp, 300]")).item() == 200.0


@row("a thousand ones are added to one row of bf16, on one device and on eight")
def many_ones() -> None:
    ones, ids = np.ones((1000, 2), BF16), ts.tensor(np.zeros(1000, np.int32))
    on = dist.Mesh(("dp",), devices=8)
    for u in (ts.tensor(ones), ts.tensor(ones, mesh=on, layout="[1000@dp, 2]")):
        assert ts.scatter_add(ts.zeros((4, 2), ts.bf16), ids, u, 0).numpy()[0].tolist() == [1e3] * 2
        along = ts.tensor(np.zeros((1000, 2), np.int32))
        made = ts.scatter_add(ts.zeros((4, 2), ts.bf16), along, u, 0)
        assert made.numpy()[0].tolist() == [1e3] * 2
    table = ts.zeros((4, 2), ts.bf16)
    g = ts.grad(ts.sum(nn.embedding(ids, table).to(ts.f32)), [table])[0]
    assert g.numpy()[0].tolist() == [1e3] * 2 and g.dtype is ts.bf16


@row("attention in bf16 with large scores")
def sharp_attention() -> None:
    rng = np.random.default_rng(0)
    given = [(rng.normal(size=(2, 4, 64, 64)) * 3).astype(BF16) for _ in range(3)]
    theirs = [torch.tensor(x.astype(np.float32)) for x in given]
    for causal in (False, True):
        attend = torch.nn.functional.scaled_dot_product_attention
        want = attend(*(t.double() for t in theirs), is_causal=causal).numpy()
        own = attend(*(t.bfloat16() for t in theirs), is_causal=causal).double().numpy()
        got = nn.attention(*map(ts.tensor, given), causal=causal).to(ts.f32).numpy()
        assert np.abs(got - want).max() <= 2 * np.abs(own - want).max()


@row("a whole number to a whole power")
def whole_powers() -> None:
    x = np.array([3, -3, 2, 7, 0, 1, -1, 5, 1291], np.int32)
    y = np.array([19, 13, 31, -1, -3, -5, -7, 13, 3], np.int32)
    theirs = torch.tensor(x) ** torch.tensor(y)
    made = ts.tensor(x) ** ts.tensor(y)
    assert np.array_equal(made.numpy(), theirs.numpy()) and made.dtype is ts.int32
    assert np.array_equal((ts.tensor(x) ** 5).numpy(), x**5)
    assert (2 ** ts.tensor(np.array([0, 30], np.int32))).numpy().tolist() == [1, 2**30]


@row("a whole number to the power of -1", error=ts.DTypeError, says="is no whole number")
def whole_inverse() -> None:
    ts.arange(1) ** -1


@row("bf16 is added up along a dim")
def running_sum() -> None:
    x = np.full(1000, 1.0, BF16)
    want = np.arange(1, 1001).astype(BF16)
    assert np.array_equal(ts.cumsum(ts.tensor(x)).numpy(), want)
    assert ts.prod(ts.tensor(np.full(64, 1.0078125, BF16))).item() == 1.6484375


@row("devices add up truths: they are counted, as by sum, and the largest is whether any is")
def counted_truths() -> None:
    x = np.array([[1, 1, -1, 1], [1, -1, -1, 1], [1, -1, -1, -1], [1, -1, -1, 1]])
    given = ts.tensor(x, mesh=dist.Mesh(("dp",), devices=4), layout="[4@dp, 4]")
    here = {
        "sum": lambda t: dist.all_reduce(t > 0, "dp"),
        "not": lambda t: ~dist.all_reduce(t > 0, "dp", op="max"),
        "mean": lambda t: dist.all_reduce(t > 0, "dp", op="mean"),
        "parts": lambda t: dist.all_gather(dist.reduce_scatter(t > 0, "dp", dim=1), "dp", dim=1),
        "scattered": lambda t: dist.all_gather(dist.scatter(t > 0, "dp", 2, 1), "dp", dim=1),
    }
    truths = x > 0
    want = {
        "sum": truths.sum(0, dtype=np.int32), "not": ~truths.any(0),
        "mean": truths.mean(0, dtype=np.float32), "parts": truths.sum(0, dtype=np.int32),
        "scattered": truths[2],
    }  # fmt: skip
    for name, body in here.items():
        out = op.kernel(body)(given)
        assert out.dtype.numpy == out.numpy().dtype == want[name].dtype, name
        assert np.array_equal(out.numpy()[0], want[name]), name


@row("a layout says that truths are a sum still to be completed")
def pending_truths() -> None:
    x = np.arange(8) % 3 > 0
    for order in (None, "binary"):
        for mesh in (dist.Mesh(("dp",), devices=4), dist.Mesh(("dp",), devices=8).fold(onto=4)):
            t = dist.redistribute(ts.tensor(x, mesh=mesh), "[8] +dp")
            with dist.deterministic(order) if order else contextlib.nullcontext():
                for y in (dist.all_reduce(t), dist.redistribute(t, "[8@dp]")):
                    assert y.numpy().dtype == bool and np.array_equal(y.numpy(), x)
