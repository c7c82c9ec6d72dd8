"""Edge cases: zero, ties, empty tensors, masks, and conventions of other libraries."""

from __future__ import annotations

import numpy as np
import torch

import tessera as ts
from tessera import dist, nn
from tests.mesh.silent.rows import row

RNG = np.random.default_rng(5)


@row("relu and x ** 0 have the slope 0 at 0, as in PyTorch")
def _() -> None:
    x = ts.tensor([0.0, 1.0, -1.0])
    slope = ts.jit(lambda x: [ts.grad(y.sum(), x) for y in (nn.relu(x), x**0, x**0.0)])
    assert [g.numpy().tolist() for g in slope(x)] == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert np.isnan(nn.relu(ts.tensor([np.nan])).item())


@row("a norm with a NaN in it is NaN, and its slope too")
def _() -> None:
    x = ts.tensor([np.nan, 1.0])
    for ord_ in (1, 2, 3, np.inf):
        assert np.isnan(ts.linalg.norm(x, ord_).item()), ord_
        assert np.isnan(ts.grad(ts.linalg.norm(x, ord_), x).numpy()[0]) or ord_ in (1, np.inf)


for name, divide in {"//": lambda x, y: x // y, "%": lambda x, y: x % y}.items():
    row(f"whole numbers {name} 0", error=ts.UsageError, says="cannot be divided by zero")(
        lambda divide=divide: divide(ts.tensor([5, 6]), 0)
    )
    row(f"whole numbers {name} a tensor with a zero", error=ts.UsageError, says="by zero")(
        lambda divide=divide: divide(ts.tensor([5, 6]), ts.tensor([1, 0]))
    )


@row("whole numbers by a zero that only the devices know are the lowest number, not 0 or -1")
def _() -> None:
    lowest = {ts.int32: -(2**31), ts.int8: -128, ts.uint8: 255, ts.uint32: 2**32 - 1}

    def both(x: object, y: object) -> tuple[ts.Tensor, ts.Tensor]:
        return ts.jit(lambda x, y: (x // y, x % y))(x, y)

    for dtype, mark in lowest.items():
        x, y = np.array([7, 9], dtype.numpy), np.array([0, 2], dtype.numpy)
        assert [t.numpy().tolist() for t in both(x, y)] == [[mark, 4], [mark, 1]]
    floats = both(np.array([7.0, -7.0], np.float32), np.zeros(2, np.float32))
    assert np.isinf(floats[0].numpy()).all() and np.isnan(floats[1].numpy()).all()


@row("flash attention and map_chunks take an unsplit tensor beside a split one, in any order")
def _() -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    x = RNG.normal(size=(8, 2, 6, 4)).astype(np.float32)
    want = nn.attention(*[ts.tensor(x)] * 3).numpy()
    split = ts.tensor(x, mesh=mesh, layout="[8@dp, 2, 6, 4]")
    heads = ts.tensor(x, mesh=mesh, layout="[8, 2@dp, 6, 4]")
    for q, k in ((ts.tensor(x), split), (split, ts.tensor(x)), (heads, split)):
        np.testing.assert_allclose(nn.flash_attention(q, k, k, rows=2).numpy(), want, atol=1e-5)
    pair = ts.map_chunks(
        lambda a, b: a * 10 + b, ts.arange(8), split[:, 0, 0, 0].to(ts.int32), rows=2
    )
    np.testing.assert_array_equal(
        pair.numpy(), np.arange(8) * 10 + np.trunc(x[:, 0, 0, 0]).astype(int)
    )


@row("x[i, j] with two arrays of ids and x[mask] give what NumPy gives, in any layout")
def _() -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    x = RNG.normal(size=(4, 8, 2)).astype(np.float32)
    i, j, mask = np.array([0, -1, 2]), np.array([7, -8, 3]), x[..., 0] > 0
    for layout in ("[4, 8, 2]", "[4@dp, 8@tp, 2]", "[4@dp, 8, 2]"):
        t = ts.tensor(x, mesh=mesh, layout=layout)
        np.testing.assert_array_equal(ts.jit(lambda t, i, j: t[i, j])(t, i, j).numpy(), x[i, j])
        np.testing.assert_array_equal(t[mask].numpy(), x[mask])
        np.testing.assert_array_equal(t[t[..., 0] > 0].numpy(), x[mask])


row("x[mask] inside a recorded function", error=ts.UsageError, says="ts.where(mask, x, 0)")(
    lambda: ts.jit(lambda x: x[x > 0])(np.ones(3, np.float32))
)
row("x[::0]", error=ts.UsageError, says="is no slice of dim 0")(lambda: ts.ones(4)[::0])
row("x[:1.5]", error=ts.UsageError, says="is no slice of dim 0")(lambda: ts.ones(4)[:1.5])


@row("^, &, | and ~ of whole numbers work on their bits, as in NumPy")
def _() -> None:
    for dtype in (ts.int32, ts.int8, ts.uint8, ts.uint32):
        x, y = np.array([5, 12, 0], dtype.numpy), np.array([3, 100, 7], dtype.numpy)
        a, b = ts.tensor(x), ts.tensor(y)
        for got, want in ((a ^ b, x ^ y), (a & b, x & y), (a | b, x | y), (~a, ~x), (1 ^ a, 1 ^ x)):
            np.testing.assert_array_equal(got.numpy(), want)
    truth = ts.tensor([True, False])
    assert (truth ^ True).numpy().tolist() == [False, True]


@row("round goes to the even neighbour, as in NumPy and PyTorch")
def _() -> None:
    x = np.array([0.5, 1.5, -0.5, -1.5, 0.49999997, 2.5, 1e9, -3.7, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(round(ts.tensor(x)).numpy(), np.round(x))
    np.testing.assert_allclose(round(ts.tensor([1.2345]), 2).numpy(), [1.23], rtol=1e-6)


@row("concat and stack of mixed dtypes widen, as in PyTorch")
def _() -> None:
    parts = [ts.tensor([1, 2]), ts.tensor([0.5, 1.5]), ts.tensor([True, False])]
    assert ts.concat(parts).numpy().tolist() == [1.0, 2.0, 0.5, 1.5, 1.0, 0.0]
    assert ts.stack([parts[2], parts[0]]).numpy().tolist() == [[1, 0], [1, 2]]


@row("dim=0 and dim=-1 of a scalar mean its one element, as in PyTorch")
def _() -> None:
    x = ts.tensor(3.0)
    for f in (ts.sum, ts.mean, ts.max, ts.min, ts.prod, ts.logsumexp, ts.cumsum, ts.flip):
        assert [f(x, d).shape for d in (0, -1)] == [(), ()] and f(x, 0).item() == 3.0, f
    assert nn.softmax(x, 0).item() == 1.0 and ts.argmax(x).item() == 0
    values, ids = ts.sort(x)
    assert (values.item(), ids.item()) == (3.0, 0)


row("dim=1 of a scalar", error=ts.ShapeError, says="there is no dim 1")(
    lambda: ts.sum(ts.tensor(3.0), 1)
)


@row("scatter_add and gather with fewer ids than rows take the first rows, as PyTorch does")
def _() -> None:
    import torch

    x, u = np.zeros((4, 6), np.float32), RNG.normal(size=(3, 5)).astype(np.float32)
    for d in (0, 1):
        ids = RNG.integers(0, 4, (2, 3))
        want = torch.zeros(4, 6).scatter_add(d, torch.tensor(ids), torch.tensor(u))
        np.testing.assert_allclose(ts.scatter_add(x, ids, u, d).numpy(), want.numpy(), rtol=1e-6)
        want = torch.gather(torch.tensor(u), d, torch.tensor(ids % 3))
        np.testing.assert_array_equal(ts.gather(u, ids % 3, d).numpy(), want.numpy())


@row("var divides by the count unless correction= is given")
def _() -> None:
    x = RNG.normal(size=(3, 5)).astype(np.float32)
    for c in (0, 1, 2):
        got = ts.var(x, 1, correction=c).numpy()
        np.testing.assert_allclose(got, x.var(1, ddof=c), rtol=1e-5)
    assert np.isnan(ts.var(ts.ones(1), correction=1).item())


@row("a mask of attention and weights of classes work on any layout, compiled and backwards")
def _() -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    x = RNG.normal(size=(4, 4, 6, 4)).astype(np.float32)
    keys = np.arange(6) < np.array([6, 3, 1, 0])[:, None]  # the last sequence is padding alone
    y, weight = RNG.integers(0, 4, (4, 4, 6)).astype(np.int32), np.array([1, 2, 0.5, 0.1])

    def loss(x: ts.Tensor, keys: ts.Tensor, y: ts.Tensor) -> list[ts.Tensor]:
        out = nn.flash_attention(x, x, x, mask=keys[:, None, None], rows=1)
        end = nn.cross_entropy(out, y, weight=weight, label_smoothing=0.1)
        return [out, end, ts.grad(end, x)]

    want = [t.numpy() for t in loss(ts.tensor(x), ts.tensor(keys), ts.tensor(y))]
    assert (want[0][3] == 0).all() and all(np.isfinite(w).all() for w in want)
    for mine, theirs in (("[4@dp, 4, 6, 4]", "[4, 6]"), ("[4, 4@tp, 6, 4]", "[4@dp, 6]")):
        given = ts.tensor(x, mesh=mesh, layout=mine), ts.tensor(keys, mesh=mesh, layout=theirs)
        for got, w in zip(ts.jit(loss)(*given, y), want, strict=True):
            np.testing.assert_allclose(got.numpy(), w, rtol=1e-4, atol=1e-6)


@row("random numbers that are rounded to the end of their range")
def _() -> None:
    for low, high, dtype in ((0.0, 1.0, "bf16"), (0.0, 1.0, "f16"), (100.0, 101.0, "f32")):
        drawn = ts.random.uniform((100_000,), low=low, high=high, dtype=dtype).numpy()
        assert low <= float(drawn.min()) and float(drawn.max()) < high
        assert abs(float(drawn.astype(np.float64).mean()) - (low + high) / 2) < 0.01


@row("an array with masked values", error=ts.DTypeError, says="some values of the array are masked")
def _() -> None:
    x = np.ma.masked_array([1.0, 2.0, 1e20], [0, 0, 1])
    assert ts.tensor(x[:2]).numpy().tolist() == [1.0, 2.0]
    ts.tensor(x)


@row("the last argument, by its place from the end")
def _() -> None:
    of = ts.value_and_grad(lambda x, w: (x * w).sum(), argnums=-1)
    assert of(ts.tensor([2.0, 3.0]), ts.ones(2))[1].numpy().tolist() == [2.0, 3.0]


@row("what narrow floats and whole numbers become on the way")
def _() -> None:
    for dtype in (ts.bf16, ts.f16):
        x = torch.tensor([1.1484, 70.0, float("inf"), float("nan")]).to(
            torch.bfloat16 if dtype is ts.bf16 else torch.float16
        )
        mine = ts.tensor(x.float().numpy(), dtype=dtype)
        for got, want in (
            (ts.nan_to_num(mine), torch.nan_to_num(x)),
            (ts.round(mine, 1), torch.round(x, decimals=1)),
        ):
            assert got.dtype is dtype
            np.testing.assert_array_equal(got.to(ts.f32).numpy(), want.float().numpy())
    assert ts.round(ts.tensor([11504.0], dtype=ts.f16), 1).numpy().tolist() == [11504.0]
    whole = np.array([0, 1, 3, 100], np.uint8)
    want = torch.nn.functional.logsigmoid(torch.tensor(whole).float()).numpy()
    np.testing.assert_allclose(nn.logsigmoid(whole).numpy(), want, rtol=1e-6, atol=1e-30)
    assert ts.linalg.vector_norm(ts.tensor([np.nan, 1.0, 0.0]), 0).item() == 2.0


@row(
    "NumPy's x.transpose() of three dims", error=ts.UsageError, says="x.T has all in reverse order"
)
def _() -> None:
    x = ts.ones((2, 3, 4))
    assert x.transpose(0, 1).shape == (3, 2, 4) and x.transpose((2, 0, 1)).shape == (4, 2, 3)
    assert ts.ones((2, 3)).transpose().shape == (3, 2)
    x.transpose()


@row("a sum still to be completed, along the axis that splits what it is used with")
def _() -> None:
    mesh = dist.Mesh(("a",), devices=2)
    q, k, v = (RNG.normal(size=(2, 2, 4, 4)).astype(np.float32) for _ in range(3))
    want = nn.attention(q, k, v).numpy()
    open_ = ts.tensor(k, mesh=mesh, layout="[2, 2, 4, 4] +a")
    for split in ("[2@a, 2, 4, 4]", "[2, 2@a, 4, 4]", "[2, 2, 4@a, 4]"):
        mine = (ts.tensor(x, mesh=mesh, layout=split) for x in (q, v))
        got = nn.flash_attention(next(mine), open_, next(mine))
        np.testing.assert_allclose(got.numpy(), want, atol=1e-5)
    x = ts.tensor(k[0, 0], mesh=mesh, layout="[4, 4] +a")
    y = ts.tensor(v[0, 0], mesh=mesh, layout="[4@a, 4]")
    got = ts.map_chunks(lambda a, b: ts.tanh(a) * b, x, y, rows=1)
    np.testing.assert_allclose(got.numpy(), np.tanh(k[0, 0]) * v[0, 0], rtol=1e-6)


@row("dims of one element, split over axes in another order than the mesh's")
def _() -> None:
    mesh = dist.Mesh(("a", "b"), shape={"a": 2, "b": 2})
    x = RNG.normal(size=(1, 1, 5)).astype(np.float32)
    mine = torch.tensor(x, requires_grad=True)
    (torch.nn.functional.adaptive_max_pool1d(mine, 3) * torch.arange(3)).sum().backward()
    for layout in ("[1@b, 1@a, 5]", "[1@a, 1@b, 5]", "[1@(b,a), 1, 5]"):
        of = ts.jit(lambda x: ts.grad((nn.adaptive_max_pool1d(x, 3) * np.arange(3.0)).sum(), x))
        got = of(ts.tensor(x, mesh=mesh, layout=layout))
        np.testing.assert_allclose(got.numpy(), mine.grad, rtol=1e-6)
