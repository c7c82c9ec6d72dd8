"""Kernels written in Python: their text, their values, their errors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.ir.tile.kernel import Kernel, with_sizes
from tessera.ir.tile.kernels import AG_MATMUL, DISPATCH, FLASH_CAUSAL, MLP_UP
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse
from tests.messages import Golden

Array = Any


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---- the examples of Tile IR --------------------------------------------------------------------
@ts.kernel(
    grid="i=M//bm j=N//bn",
    x="in bf16[M, K] tiles [bm, bk]",
    w="in bf16[K, N] tiles [bk, bn]",
    b="in f32[N] tiles [bn]",
    y="out bf16[M, N] tiles [bm, bn]",
    tune={"bm": 64, "bn": 64, "bk": 64},
    speed={"warps": 4, "stages": 3},
    split="M N",
)
def mlp_up(x, w, b, y, i, j, K, bk, bm, bn):  # type: ignore[no-untyped-def]
    total = ts.kernel.loop(K // bk, lambda k, t: t + x[i, k] @ w[k, j], ts.zeros((bm, bn)))
    y[i, j] = ts.nn.gelu(total + b[j]).to(ts.bf16)


@ts.kernel(
    grid="b=B h=H g=G i=T//bq",
    q="in [B, H, G, T, D] tiles [1, 1, 1, bq, D]",
    k="in [B, H, S, D] tiles [1, 1, bk, D]",
    v="in [B, H, S, D] tiles [1, 1, bk, D]",
    scale="in f32[1] tiles [1]",
    o="out [B, H, G, T, D] tiles [1, 1, 1, bq, D]",
    lse="out f32[B, H, G, T] tiles [1, 1, 1, bq]",
    tune={"bq": 16, "bk": 16},
    split="B H G",
)
def flash(q, k, v, scale, o, lse, b, h, g, i, bq, bk, T, S, D):  # type: ignore[no-untyped-def]
    queries, by = q[b, h, g, i, 0], scale[0]
    rows = (ts.arange(bq) + (i * bq + S - T))[:, None]

    def body(j: Any, top: Any, total: Any, acc: Any) -> Any:
        cols = ts.arange(bk) + j * bk
        s = ts.where(rows >= cols, queries @ k[b, h, j, 0].T * by, -math.inf)
        new = ts.maximum(top, ts.max(s, 1))
        p, fade = ts.exp(s - new[:, None]), ts.exp(top - new)
        return new, total * fade + ts.sum(p, 1), acc * fade[:, None] + p @ v[b, h, j, 0]

    start = ts.full((bq,), -1e30), ts.zeros((bq,)), ts.zeros((bq, D))
    high = ((i + 1) * bq + S - T + bk - 1) // bk
    top, total, acc = ts.kernel.loop(high, body, *start)
    total = ts.maximum(total, 1e-30)
    o[b, h, g, i, 0] = acc / total[:, None]
    lse[b, h, g, i] = top + ts.log(total)


@ts.kernel(
    grid="i=S//bs j=C//bc",
    x="in bf16[N, C] tiles [1, bc]",
    ids="in i32[S] tiles [bs]",
    y="out bf16[S, C] tiles [bs, bc]",
    tune={"bs": 16, "bc": 32},
    speed={"warps": 4},
)
def dispatch(x, ids, y, i, j):  # type: ignore[no-untyped-def]
    at = ids[i]
    y[i, j] = ts.where((at >= 0)[:, None], x[ts.maximum(at, 0), j], 0)


@ts.kernel(
    mesh={"x": 8},
    a="in f32[M, K] tiles [M, K]",
    w="in f32[K, N] tiles [K, bn]",
    y="out f32[x*M, N] tiles [M, bn]",
    buf="sym f32[x, M, K] tiles [1, M, K]",
    got="sig [x]",
    tune={"bn": 12},
)
def ag_matmul(a, w, y, buf, got, rank_x, x, N, bn):  # type: ignore[no-untyped-def]
    ts.kernel.enter("x")
    buf[0, 0, 0] = a[0, 0]

    def turn(s: Any) -> None:
        with ts.kernel.when(s > 0):
            ts.kernel.wait(got[s])
        with ts.kernel.when(s < x - 1):
            there = buf.at(s + 1, 0, 0)
            ts.kernel.put(buf.at(s, 0, 0), there, at=(rank_x + 1) % x, sig=got[s + 1])
        block = buf[s, 0, 0]

        def column(j: Any) -> None:
            y[(rank_x - s + x) % x, j] = block @ w[0, j]

        ts.kernel.loop(N // bn, column)

    ts.kernel.loop(x, turn)
    ts.kernel.quiet()


def test_kernels_that_compute_no_values_are_their_texts() -> None:
    assert ag_matmul.kernel(M=16, K=32, N=24) == parse(AG_MATMUL)
    made = dispatch.kernel(N=64, C=64, S=96)
    text = DISPATCH
    for n, name in enumerate(("%ids", "%is", "%has", "%at", "%x", "%y")):
        text = text.replace(f"{name} ", f"%{n} ").replace(f"{name}\n", f"%{n}\n")
    text = text.replace("rows %at", "rows %3").replace("= %y", "= %5")
    assert made == parse(text)


@pytest.mark.parametrize("sizes", [{}, {"bm": 32, "bk": 128}])
def test_a_product_has_the_values_of_its_text(sizes: dict[str, int]) -> None:
    x, w = draw(256, 256).astype("bfloat16"), (draw(256, 256) / 16).astype("bfloat16")
    made = mlp_up.kernel(M=256, K=256, N=256, **sizes)
    (y,) = evaluate(made, x, w, draw(256))
    (want,) = evaluate(with_sizes(parse(MLP_UP), **sizes), x, w, draw(256))
    np.testing.assert_allclose(y.astype("f4"), want.astype("f4"), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("sizes", [{}, {"bq": 32, "bk": 8}, {"bq": 8, "bk": 32}])
def test_attention_has_the_bits_of_its_text(sizes: dict[str, int]) -> None:
    made = flash.kernel(B=1, H=2, G=2, T=64, S=64, D=16, **sizes)
    given = draw(1, 2, 2, 64, 16), draw(1, 2, 64, 16, seed=1), draw(1, 2, 64, 16, seed=2), draw(1)
    for y, want in zip(
        evaluate(made, *given), evaluate(with_sizes(parse(FLASH_CAUSAL), **sizes), *given)
    ):
        assert np.array_equal(y, want)


def test_large_sizes_are_verified_at_a_few_tiles() -> None:
    made = mlp_up.kernel(M=16384, K=16384, N=16384)  # sizes in bounds of loops are expressions
    assert made.dims == (("M", 16384), ("K", 16384), ("N", 16384))
    half = with_sizes(made, M=8192)
    assert half.extents == {"i": 128, "j": 256}
    small = {"M": 256, "K": 256, "N": 256}  # sizes in shapes are expressions, too
    assert with_sizes(mlp_up.kernel(**small), bm=32) == mlp_up.kernel(**small, bm=32)
    at = {"B": 1, "H": 1, "G": 1, "T": 64, "S": 64, "D": 8}
    assert with_sizes(flash.kernel(**at), bq=32) == flash.kernel(**at, bq=32)


# ---- ops ----------------------------------------------------------------------------------------
def tiled(body: Callable[..., Any], **options: Any) -> Kernel:
    """The kernel `y[i, 0] = body(a tile of x, a tile of z)` on 8 rows in 2 tiles."""

    @ts.kernel(
        grid="i=M//bm", x="in f32[M, N] tiles [bm, N]", z="in f32[M, N] tiles [bm, N]",
        y="out f32[M, N] tiles [bm, N]", tune={"bm": 4},
    )  # fmt: skip
    def kernel(x, z, y, i):  # type: ignore[no-untyped-def]
        y[i, 0] = body(x[i, 0], z[i, 0])

    return kernel.kernel(M=8, N=4, **options)


BLOCKS = (slice(0, 4), slice(4, 8))  # the rows of the tiles


def each_tile(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, z: np.concatenate([f(x[b], z[b]) for b in BLOCKS])


def narrow(x: Array) -> Array:
    return x.astype("bfloat16").astype(np.float32)


def soft(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Array]]] = {
    "arithmetic": (
        lambda x, z: (x + z) * (x - z) / (z * z + 1.0),
        lambda x, z: (x + z) * (x - z) / (z * z + 1),
    ),
    "numbers": (lambda x, z: 2.0 - x / 4, lambda x, z: 2 - x / 4),
    "functions": (
        lambda x, z: ts.exp(ts.tanh(x)) + ts.log(abs(z) + 1.0) - ts.sigmoid(-x),
        lambda x, z: np.exp(np.tanh(x)) + np.log(abs(z) + 1) - 1 / (1 + np.exp(x)),
    ),
    "roots": (
        lambda x, z: ts.sqrt(abs(x)) + ts.rsqrt(z * z + 1.0),
        lambda x, z: np.sqrt(abs(x)) + 1 / np.sqrt(z * z + 1),
    ),
    "erf": (
        lambda x, z: ts.erf(x) + ts.nn.gelu(z, approximate="none"),
        lambda x, z: np.vectorize(math.erf)(x) + z * 0.5 * (1 + np.vectorize(math.erf)(z / 2**0.5)),
    ),
    "extremes": (
        lambda x, z: ts.maximum(x, z) - ts.minimum(x, 0.0),
        lambda x, z: np.maximum(x, z) - np.minimum(x, 0),
    ),
    "choices": (
        lambda x, z: ts.where((x > z) & ~(x <= 0.0) | (x == z), x, -1.0),
        lambda x, z: np.where((x > z) & (x > 0), x, -1),
    ),
    "a choice of numbers": (
        lambda x, z: ts.where(x < z, 1.0, 2.0), lambda x, z: np.where(x < z, 1, 2),
    ),
    "casts": (
        lambda x, z: x.to(ts.bf16).to(ts.f32) + (x >= z).to(ts.f32),
        lambda x, z: narrow(x) + (x >= z),
    ),
    "sums": (
        lambda x, z: x - ts.mean(x, 1, keepdims=True) + ts.sum(z, 0),
        each_tile(lambda x, z: x - x.mean(1, keepdims=True) + z.sum(0)),
    ),
    "all elements": (
        lambda x, z: x * ts.max(z) + ts.min(x), each_tile(lambda x, z: x * z.max() + x.min()),
    ),
    "softmax": (lambda x, z: ts.nn.softmax(x, -1) * z, lambda x, z: soft(x) * z),
    "products": (
        lambda x, z: x @ z + x @ z.T + x.T @ z + x.T @ z.T + z.T.T @ x,
        each_tile(lambda x, z: x @ z + x @ z.T + x.T @ z + x.T @ z.T + z @ x),
    ),
    "einsum": (
        lambda x, z: ts.einsum("km,nk->nm", x, z),
        each_tile(lambda x, z: np.einsum("km,nk->nm", x, z)),
    ),
    "narrow products are wide": (
        lambda x, z: x.to(ts.bf16) @ z.to(ts.bf16),
        each_tile(lambda x, z: narrow(x) @ narrow(z)),
    ),
    "counts": (
        lambda x, z: x + ts.arange(4).to(ts.f32) + ts.arange(4, dtype=ts.f32)[:, None] * 2.0,
        each_tile(lambda x, z: x + np.arange(4) + 2 * np.arange(4)[:, None]),
    ),
    "shapes": (
        lambda x, z: x + ts.sum(z, 1)[:, None].reshape(4) + ts.broadcast_to(ts.sum(x, 0), (4, 4)),
        each_tile(lambda x, z: x + z.sum(1) + x.sum(0)),
    ),
    "fills": (
        lambda x, z: x * ts.ones((4, 4)) + ts.full_like(z, 0.5), lambda x, z: x + 0.5,
    ),
    "constants for gradients": (lambda x, z: ts.stop_gradient(x), lambda x, z: x),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_ops_have_the_values_of_numpy(name: str) -> None:
    body, want = ROWS[name]
    made, x, z = tiled(body), draw(8, 4), draw(8, 4, seed=1)
    np.testing.assert_allclose(evaluate(made, x, z)[0], want(x, z), atol=2e-5, rtol=2e-5)
    assert parse(made.text) == made == pickle.loads(pickle.dumps(made))


def indexed(body: Callable[..., Any], n: int = 4) -> list[float]:
    """The values that `body(i, M)` gives for each index i of the grid."""

    @ts.kernel(grid="i=M", y="out f32[M] tiles [bm]", tune={"bm": 1})
    def kernel(y, i, M):  # type: ignore[no-untyped-def]
        y[i] = ts.zeros((1,)) + body(i, M)

    (out,) = evaluate(kernel.kernel(M=n))
    return [float(v) for v in out]


def test_indices_are_values_too() -> None:
    assert indexed(lambda i, M: ((M - i) * 3 // 2 % 4).to(ts.f32)) == [2, 0, 3, 1]
    assert indexed(lambda i, M: ts.where((i > 0) & ~(i == M - 1), 1.0, 0.0)) == [0, 1, 1, 0]
    assert indexed(lambda i, M: ts.maximum(i - 1, ts.minimum(1, i)).to(ts.f32)) == [0, 1, 1, 2]
    assert indexed(lambda i, M: ts.where((i < 1) | (-i <= 1 - M), i.to(ts.f32), 9.0)) == [
        0,
        9,
        9,
        3,
    ]
    assert indexed(lambda i, M: (ts.arange(1) - i).to(ts.f32) + 0.5 * i) == [0, -0.5, -1, -1.5]


# ---- loops --------------------------------------------------------------------------------------
def looped(body: Callable[..., Any]) -> Array:
    @ts.kernel(x="in f32[N] tiles [N]", y="out f32[N] tiles [N]")
    def kernel(x, y, N):  # type: ignore[no-untyped-def]
        y[0] = body(x[0], N)

    return evaluate(kernel.kernel(N=2), np.array([1, 2], np.float32))[0].tolist()


def test_loops_carry_values() -> None:
    loop = ts.kernel.loop
    assert looped(lambda x, N: loop(3, lambda k, t: t * 2.0, x)) == [8, 16]
    assert looped(lambda x, N: loop((1, N + 1), lambda k, t: t + k, x)) == [4, 5]
    assert looped(lambda x, N: loop(3, lambda k, t: t * x, x)) == [1, 16]  # x itself is read, too
    assert looped(lambda x, N: sum(loop(3, lambda k, s, t: (t, s + t), x, x))) == [8, 16]
    assert looped(lambda x, N: x * loop(2, lambda k, t: t + 0.5, 1.0)) == [2, 4]
    nested = looped(lambda x, N: loop(2, lambda k, t: loop(k + 1, lambda j, u: u + t, t), x))
    assert nested == [6, 12]
    same = looped(lambda x, N: loop(2, lambda k, t: loop(2, lambda k, u: u + k, t), x))
    assert same == [3, 4]


def test_only_used_values_are_in_the_text() -> None:
    def body(x: Any, N: Any) -> Any:
        unused = ts.exp(x) + 1.0
        ts.kernel.loop(2, lambda k, t: t + unused, x)
        return ts.kernel.loop(2, lambda k, t: (ts.tanh(t), t + x)[1], x * 2.0)

    @ts.kernel(x="in f32[N] tiles [N]", y="out f32[N] tiles [N]")
    def kernel(x, y, N):  # type: ignore[no-untyped-def]
        y[0] = body(x[0], N)

    assert kernel.kernel(N=2).text.splitlines()[4:] == [
        "  %0 = load x[0]",
        "  %1 = mul %0 2.0",
        "  %3 = loop k in 0..2 carry %1",
        "    %2 = add %1 %0",
        "    next %2",
        "  store y[0] = %3",
    ]


def test_conditions_and_functions_in_python() -> None:
    @ts.kernel(grid="i=M", x="in f32[M] tiles [1]", y="out f32[M] tiles [1]")
    def kernel(x, y, i, M, twice=True):  # type: ignore[no-untyped-def]
        assert x.shape == (M,) and x.dtype is ts.f32 and M == 4 and isinstance(M // 2, int)
        with ts.kernel.when((i % 2 == 0) | (i == M - 1)):
            y[i] = x[i] * 2.0 if twice else x[i]
        with ts.kernel.when(~((i % 2 == 0) | (i == M - 1))):
            y[i] = 0.0
        with ts.kernel.when(M > 4):
            y[i] = 1.0

    assert evaluate(kernel.kernel(M=4), np.ones(4, np.float32))[0].tolist() == [2, 0, 2, 2]


# ---- sizes and dtypes ---------------------------------------------------------------------------
def test_sizes_and_dtypes_of_a_kernel() -> None:
    sizes = {"M": 64, "K": 64, "N": 64}
    other = mlp_up.under(bm=32, warps=8)
    assert dict(mlp_up.kernel(**sizes).tune) == {"bm": 64, "bn": 64, "bk": 64}
    assert dict(other.kernel(**sizes).tune)["bm"] == 32
    assert dict(other.under(bm=16).kernel(**sizes).speed) == {"warps": 8, "stages": 3}
    assert mlp_up.kernel(**sizes) is mlp_up.kernel(**sizes)
    assert repr(mlp_up) == "<kernel mlp_up>" and mlp_up.__name__ == "mlp_up"
    half = flash.kernel(B=1, H=1, G=1, T=16, S=16, D=4)
    assert str(half.ref("q").dtype) == "f32" and str(half.ref("o").dtype) == "f32"
    with ts.autocast("bf16"):  # the text of a kernel is the same everywhere
        assert tiled(lambda x, z: x @ z) == tiled(lambda x, z: x @ z)
        assert "bf16" not in tiled(lambda x, z: x @ z).text


# ---- errors -------------------------------------------------------------------------------------
TILES = {
    "grid": "i=M//bm", "x": "in f32[M, N] tiles [bm, N]", "y": "out f32[M, N] tiles [bm, N]",
    "tune": {"bm": 4},
}  # fmt: skip
Outer = ts.tensor(np.ones(4, np.float32))


def made(fn: Callable[..., Any], **options: Any) -> Kernel:
    """The kernel of `fn` at a small size."""
    return ts.kernel(**{**TILES, **options})(fn).kernel(M=8, N=4)


def stores(value: Callable[..., Any], **options: Any) -> Kernel:
    """The kernel `y[i, 0] = value(x, i)`."""

    def kernel(x: Any, y: Any, i: Any) -> None:
        y[i, 0] = value(x, i)

    return made(kernel, **options)


def returns(x: Any, y: Any, i: Any) -> Any:
    return x[i, 0]


def unknown(x: Any, y: Any, ii: Any) -> None: ...


def forgets(x: Any, y: Any, i: Any) -> None:
    x[i, 0] * 2.0


def beyond(x: Any, y: Any, i: Any) -> None:
    y[i + 1, 0] = x[i, 0]


def writes(x: Any, y: Any, i: Any) -> None:
    x[i, 0] = 1.0


def chooses(x: Any, y: Any, i: Any) -> None:
    with ts.kernel.when(x[i, 0] > 0):
        y[i, 0] = x[i, 0]


def leaks(x: Any, i: Any) -> Any:
    found: list[Any] = []
    ts.kernel.loop(2, lambda k: found.append(x[i, 0]))
    return found[0]


def fast(x: Any, y: Any, warps: Any) -> None: ...


KEPT: list[Any] = []


def uses_later() -> None:
    stores(lambda x, i: KEPT.append(x[i, 0]) or 1.0)
    KEPT[-1] + 1.0


@ts.kernel(**TILES)  # type: ignore[arg-type]
def good(x, y, i):  # type: ignore[no-untyped-def]
    y[i, 0] = x[i, 0]


BAD: dict[str, Callable[[], Any]] = {
    "a value is returned": lambda: made(returns),
    "a parameter without a meaning": lambda: made(unknown),
    "a parameter that is a speed": lambda: made(fast, speed={"warps": 4}),
    "an output that is never stored": lambda: made(forgets),
    "a tile outside": lambda: made(beyond),
    "a store to an input": lambda: made(writes),
    "a condition on tiles": lambda: made(chooses),
    "a tensor from outside": lambda: stores(lambda x, i: x[i, 0] + Outer),
    "if": lambda: stores(lambda x, i: x[i, 0] if i > 0 else 0.0),
    "range": lambda: stores(lambda x, i: max(range(i))),
    "a value that is read": lambda: stores(lambda x, i: x[i, 0].numpy()),
    "a value of a loop": lambda: stores(leaks),
    "a value after its kernel": uses_later,
    "an op that kernels lack": lambda: stores(lambda x, i: ts.sin(x[i, 0])),
    "a slice": lambda: stores(lambda x, i: x[i, 0][:, :2]),
    "a transpose": lambda: stores(lambda x, i: x[i, 0].T),
    "a reshape": lambda: stores(lambda x, i: x[i, 0].reshape(16)),
    "a product of vectors": lambda: stores(lambda x, i: x[i, 0] @ ts.zeros((4,))),
    "shapes": lambda: stores(lambda x, i: x[i, 0] + ts.zeros((3,))),
    "the dtype of a tile": lambda: stores(lambda x, i: x[i, 0].to(ts.bf16)),
    "the shape of a tile": lambda: stores(lambda x, i: ts.sum(x[i, 0], 1)),
    "an index": lambda: stores(lambda x, i: x[0.5, 0]),
    "the number of indices": lambda: stores(lambda x, i: x[i]),
    "bounds": lambda: stores(lambda x, i: ts.kernel.loop(x[i, 0], lambda k: None)),
    "carries": lambda: stores(lambda x, i: ts.kernel.loop(2, lambda k, t: None, x[i, 0])),
    "types of carries": lambda: stores(
        lambda x, i: ts.kernel.loop(2, lambda k, t: ts.sum(t, 1), x[i, 0])
    ),
    "a dim that cannot be split": lambda: stores(
        lambda x, i: x[i, 0] + (ts.arange(4) + i * 4).to(ts.f32), split="M"
    ),
    "a tile of another place, along a split dim": lambda: stores(
        lambda x, i: x[i, 0] - x[0, 0], split="M"
    ),
    "a split of no dim": lambda: stores(lambda x, i: x[i, 0], split="Q"),
    "a reference": lambda: stores(lambda x, i: x[i, 0], x="in f32[M, N]"),
    "a reference's index": lambda: stores(lambda x, i: x[i, 0], x="in f32[M-] tiles [1]"),
    "a grid": lambda: stores(lambda x, i: x[i, 0], grid="i"),
    "sizes": lambda: stores(lambda x, i: x[i, 0], tune={"bm": 0}),
    "tiles that do not divide": lambda: stores(lambda x, i: x[i, 0], tune={"bm": 3}),
    "no parentheses": lambda: ts.kernel(returns),  # type: ignore[operator]
    "a name of two things": lambda: stores(lambda x, i: x[i, 0], tune={"bm": 4, "y": 1}),
    "a name of a size": lambda: stores(lambda x, i: x[i, 0], tune={"b m": 4}),
    "too many inputs": lambda: good(Outer, Outer),
    "an unknown input": lambda: good(z=Outer),
    "a missing size": lambda: good.kernel(M=8),
    "an unknown size": lambda: good.kernel(M=8, N=4, bn=4),
    "an unknown tile": lambda: good.under(bn=4),
    "a missing input": lambda: good(),
    "an input's dims": lambda: good(Outer),
    "an input's dtype": lambda: good(ts.zeros((8, 4), ts.bf16)),
    "an input's sizes": lambda: good(ts.zeros((8, 4)), M=16),
    "a kernel on a mesh, without one": lambda: ag_matmul(ts.zeros((16, 32)), ts.zeros((32, 24))),
    "a loop without a kernel": lambda: ts.kernel.loop(2, lambda k: None),
    "a put of values": lambda: stores(lambda x, i: ts.kernel.put(x[i, 0], x, at=0, sig=x)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_kernels_are_refused_with_the_whole_message(name: str, golden: Golden) -> None:
    with pytest.raises(ts.TesseraError) as caught:
        BAD[name]()
    golden(caught.value)
