"""The kernels against PyTorch in f64, or NumPy: at generated sizes, in every order of devices."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.dtypes import dtype_of
from tessera.ir.tile.cost import cost
from tessera.ir.tile.kernel import with_sizes
from tessera.ir.tile.kernels import (
    ADAMW,
    AG_MATMUL,
    MATMUL_RS,
    TEXTS,
    all_gather,
    combine,
    cross_entropy,
    cross_entropy_dw,
    cross_entropy_dx,
    dispatch,
    exchange,
    flash,
    flash_dkv,
    flash_dq,
    flash_grads,
    product,
    reduce_scatter,
    ring_attention,
    unpack,
)
from tessera.ir.tile.kernels.products import ACTIVATIONS
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse, to_text
from tessera.ir.tile.verify import faults

Array = Any
SEEDS = st.integers(0, 1000)
FEW = settings(deadline=None, max_examples=15)
ORDERS: tuple[str | int, ...] = ("in turn", "reversed", 0, 1, 2)
BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def close(a: Array, b: Array, tolerance: float) -> None:
    np.testing.assert_allclose(
        a.astype(np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
    )


def f64(x: Array) -> Any:
    return torch.tensor(np.asarray(x, np.float64), requires_grad=True)


def run(text: str, sizes: dict[str, int], *arrays: Array, **how: Any) -> tuple[Array, ...]:
    """The outputs of a kernel, which is checked: its text, the verifier, costs."""
    kernel = with_sizes(parse(text), **sizes)
    assert to_text(parse(text)) == text and faults(kernel) == ()
    done = cost(kernel)
    assert done.loaded_bytes > 0 and done.stored_bytes > 0
    return evaluate(kernel, *arrays, **how)


def in_orders(text: str, sizes: dict[str, int], *arrays: Array) -> tuple[Array, ...]:
    """The outputs of a kernel on a mesh, which are the same bits in every order."""
    first, *others = [run(text, sizes, *arrays, order=order) for order in ORDERS]
    for other in others:
        assert all(np.array_equal(x, y) for x, y in zip(first, other, strict=True))
    return first


def test_each_kernel_computes_or_sends() -> None:
    for text in TEXTS.values():
        done = cost(parse(text))
        assert done.flops or done.put_bytes


# ---- products ----------------------------------------------------------------------------------
ACTIVATE = {
    "none": lambda h: h,
    "gelu": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("to", ["f32", "bf16", "f8e4m3", "i8"])
def test_products(to: str, activation: str) -> None:
    narrow = to in ("f8e4m3", "i8")
    for seed, (bias, dtype) in enumerate(itertools.product((False, True), ("f32", "bf16"))):
        n = "block" if narrow else "bn"
        sizes = {"M": 16, "K": 48, "N": 24, "bm": 8, "bk": 16, n: 8}
        x, w = (normal(seed + i, *s, dtype=dtype_of(dtype).numpy)
                for i, s in enumerate([(16, 48), (48, 24)]))  # fmt: skip
        x[0] = 0
        b = [normal(seed + 2, 24)] * bias
        h = f64(x) @ f64(w) + (f64(b[0]) if bias else 0)
        want = ACTIVATE[activation](h).detach().numpy()
        y, *scale = run(product(bias, activation, to, dtype), sizes, x, w, *b)
        assert y.dtype == dtype_of(to).numpy
        if not narrow:
            close(y, want, 2e-5 if to == "f32" else 2**-7)
            exact = run(product(bias, activation, to, dtype), sizes, x, w, *b, wide=True)
            close(exact[0], want, 1e-12)
            continue
        blocks = want.reshape(16, 3, 8)
        most = {"f8e4m3": 448, "i8": 127}[to]
        top = np.abs(blocks).max(-1)
        close(scale[0], np.where(top > 0, top / most, 1), 1e-5)
        back = y.astype(np.float64).reshape(16, 3, 8) * scale[0][..., None]
        step = np.abs(blocks) / 16 + top[..., None] * 2**-10 / 448 if to != "i8" else None
        half = top[..., None] / 127 / 2 if step is None else step
        assert (np.abs(back - blocks) <= half * 1.001 + 1e-6).all()


# ---- attention ---------------------------------------------------------------------------------
def sees(t: int, s: int, causal: bool, qseg: Array = None, kseg: Array = None) -> Any:
    """Bool [B, 1, 1, T, S]: the keys that each query sees."""
    visible = np.ones((1, t, s), bool)
    if causal:
        visible &= np.arange(s) <= np.arange(t)[:, None] + s - t
    if qseg is not None:
        visible = visible & (qseg[:, :, None] == kseg[:, None])
    return torch.tensor(visible[:, None, None])


def attention(q: Any, k: Any, v: Any, visible: Any, scale: float) -> tuple[Any, Any]:
    """(o, lse) of q [B, H, G, T, D]; 0 and -inf for a query that sees no key."""
    scores = torch.einsum("bhgtd,bhsd->bhgts", q, k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    shift = torch.where(lse.isinf(), 0.0, lse)[..., None]
    return torch.einsum("bhgts,bhsd->bhgtd", torch.exp(scores - shift), v), lse


TILES = [(24, 24, 8, 8), (24, 24, 4, 12), (24, 24, 12, 4), (8, 40, 8, 20), (40, 8, 8, 4),
         (12, 20, 6, 5), (6, 6, 6, 1)]  # fmt: skip


@given(
    st.booleans(), st.booleans(), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3),
    st.sampled_from(TILES), st.sampled_from(["f32", "bf16"]), SEEDS,
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_attention_and_its_gradients(
    causal: bool, segments: bool, batch: int, heads: int, group: int,
    cut: tuple[int, int, int, int], dtype: str, seed: int,
) -> None:  # fmt: skip
    t, s, bq, bk = cut
    sizes = {"B": batch, "H": heads, "G": group, "T": t, "S": s, "D": 8, "bq": bq, "bk": bk}
    shapes = [(batch, heads, group, t, 8), *[(batch, heads, s, 8)] * 2, (batch, heads, group, t, 8)]
    q, k, v, go = (normal(seed + i, *x, dtype=dtype_of(dtype).numpy) for i, x in enumerate(shapes))
    draw = np.random.default_rng(seed)
    ids = [draw.integers(0, 3, (batch, n)).astype(np.int32) for n in (t, s)] if segments else []
    tq, tk, tv = f64(q), f64(k), f64(v)
    visible = sees(t, s, causal, *ids)
    want, lse = attention(tq, tk, tv, visible, 0.375)
    grads = torch.autograd.grad(want, (tq, tk, tv), f64(go))
    scale, tolerance = np.float32([0.375]), 2e-5 if dtype == "f32" else 3e-2
    o, l2 = run(flash(causal, segments, dtype), sizes, q, k, v, *ids, scale)
    close(o, want.detach(), tolerance)
    hidden = lse.isinf().numpy()
    assert (l2[hidden] < -5e29).all() and (o[hidden] == 0).all()
    close(l2[~hidden], lse.detach()[~lse.isinf()], 2e-5)
    delta = (want.detach().numpy() * go.astype(np.float64)).sum(-1).astype(np.float32)
    given = (q, k, v, *ids, go, l2, delta, scale)
    for wide in (False, True):
        (dq,) = run(flash_dq(causal, segments, dtype), sizes, *given, wide=wide)
        dk, dv = run(flash_dkv(causal, segments, dtype), sizes, *given, wide=wide)
        all_at_once = run(flash_grads(causal, segments, dtype), sizes, *given, wide=wide)
        for found in ((dq, dk, dv), all_at_once):
            for have, expected in zip(found, grads, strict=True):
                close(have, expected, 1e-5 if wide else 3 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("t", "s"), [(13, 13), (5, 18), (18, 5)])
def test_lengths_that_tiles_do_not_divide(t: int, s: int, causal: bool) -> None:
    """Padded in front, with a segment of their own."""
    q, k, v = normal(0, 1, 2, 2, t, 4), normal(1, 1, 2, s, 4), normal(2, 1, 2, s, 4)
    tq, tk, tv = f64(q), f64(k), f64(v)
    want, _ = attention(tq, tk, tv, sees(t, s, causal), 0.5)
    go = normal(3, *q.shape)
    grads = torch.autograd.grad(want, (tq, tk, tv), f64(go))

    def padded(x: Array, dim: int, fill: float = 0) -> Array:
        cuts = [(0, 0)] * x.ndim
        cuts[dim] = (-x.shape[dim] % 8, 0)
        return np.pad(x, cuts, constant_values=fill)

    q, k, v, go = (padded(x, -2, 7) for x in (q, k, v, go))
    ids = [padded(np.ones((1, n), np.int32), 1) for n in (t, s)]
    ids[0] *= 1 - 2 * (ids[0] == 0)
    scale = np.float32([0.5])
    sizes = {"T": q.shape[-2], "S": k.shape[-2], "D": 4, "bq": 8, "bk": 4}
    o, lse = run(flash(causal, True), sizes, q, k, v, *ids, scale)
    close(o[..., -t:, :], want.detach(), 2e-5)
    given = (q, k, v, *ids, go, lse, (o * go).sum(-1), scale)
    dq, *dkv = run(flash_dq(causal, True), sizes, *given) + run(
        flash_dkv(causal, True), sizes, *given
    )
    for have, expected, n in zip((dq, *dkv), grads, (t, s, s), strict=True):
        close(have[..., -n:, :], expected, 5e-5)


# ---- losses and updates ------------------------------------------------------------------------
@given(
    st.integers(1, 3), st.integers(1, 2), st.sampled_from([(12, 4), (12, 12), (8, 2)]),
    st.integers(0, 3), st.sampled_from(["f32", "bf16"]), SEEDS,
)  # fmt: skip
@FEW
def test_head_with_loss_and_its_gradients(
    rows: int, cols: int, vocabulary: tuple[int, int], short: int, dtype: str, seed: int
) -> None:
    (v, bv), n, c = vocabulary, 4 * rows, 8 * cols
    sizes = {"N": n, "bn": 4, "C": c, "bc": 8, "V": v, "bv": bv, "classes": v - short}
    x, w = (
        normal(seed + i, *s, dtype=dtype_of(dtype).numpy) for i, s in enumerate([(n, c), (c, v)])
    )
    draw = np.random.default_rng(seed)
    label = draw.integers(0, v - short, n).astype(np.int32)
    label[draw.random(n) < 0.3] = -7
    g, tx, tw = normal(seed + 2, n), f64(x), f64(w)
    logits = (tx @ tw)[:, : v - short]
    want = torch.nn.functional.cross_entropy(
        logits, torch.tensor(label, dtype=torch.long), ignore_index=-7, reduction="none"
    )
    grads = torch.autograd.grad(want, (tx, tw), f64(g))
    loss, lse = run(cross_entropy(-7, dtype), sizes, x, w, label)
    close(loss, want.detach(), 3e-5)
    close(lse, torch.logsumexp(logits, -1).detach(), 3e-5)
    for wide in (False, True):
        given = (x, w, label, lse, g)
        (dx,) = run(cross_entropy_dx(-7, dtype), sizes, *given, wide=wide)
        (dw,) = run(cross_entropy_dw(-7, dtype), sizes, *given, wide=wide)
        assert wide or dx.dtype == dw.dtype == np.float32
        tolerance = 1e-5 if wide else 5e-5 if dtype == "f32" else 3e-2
        close(dx, grads[0], tolerance)
        close(dw, grads[1], tolerance)
    close(dw[:, v - short :], 0 * dw[:, v - short :], 0)


@given(st.integers(1, 4), st.sampled_from([1, 3, 8]), SEEDS)
@FEW
def test_adamw_is_that_of_torch(tiles: int, bn: int, seed: int) -> None:
    n = tiles * bn
    rate, b1, b2, eps, decay = 0.01, 0.9, 0.99, 1e-6, 0.1
    p, m, v = normal(seed, n), np.zeros(n, np.float32), np.zeros(n, np.float32)
    peer = f64(p)
    optimizer = torch.optim.AdamW([peer], lr=rate, betas=(b1, b2), eps=eps, weight_decay=decay)
    for step in range(1, 5):
        g = normal(seed + step, n)
        peer.grad = f64(g).detach()
        optimizer.step()
        h = np.float32([rate, b1, b2, eps, decay, 1 / (1 - b1**step), 1 / (1 - b2**step)])
        p, m, v = run(ADAMW, {"N": n, "bn": bn}, h, p, m, v, g)
        close(p, peer.detach(), 2e-5)
    close(m, optimizer.state[peer]["exp_avg"], 1e-5)
    close(v, optimizer.state[peer]["exp_avg_sq"], 1e-5)


# ---- experts -----------------------------------------------------------------------------------
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 20), st.booleans(), SEEDS)
@FEW
def test_rows_to_experts_and_back(s: int, c: int, n: int, wide: bool, seed: int) -> None:
    name = "f32" if wide else "bf16"
    dtype = dtype_of(name).numpy
    x, draw = normal(seed, n, 128 * c, dtype=dtype), np.random.default_rng(seed)
    x[0] = 0
    ids = draw.integers(-1, n, 4 * s).astype(np.int32)
    sizes = {"S": 4 * s, "bs": 4, "C": 128 * c, "N": n}
    rows = np.where(ids[:, None] < 0, 0, x[ids]).astype(dtype)
    (y,) = run(dispatch(dtype=name), sizes | {"bc": 64}, x, ids)
    assert np.array_equal(y, rows) and y.dtype == dtype
    packed, scale = run(dispatch(True, name), sizes, x, ids)
    blocks = rows.astype(np.float32).reshape(4 * s, c, 128)
    top = np.abs(blocks).max(-1)
    assert np.array_equal(scale, np.where(top > 0, top * np.float32(1 / 448), 1))
    inside = np.clip(blocks / scale[..., None], -448, 448).astype(FP8)
    assert np.array_equal(packed.view(np.uint8), inside.reshape(packed.shape).view(np.uint8))
    (back,) = run(unpack(name), {"S": 4 * s, "bs": 4, "C": 128 * c}, packed, scale)
    want = (inside.astype(np.float32) * scale[..., None]).reshape(rows.shape).astype(dtype)
    assert np.array_equal(back, want)
    assert (
        np.abs(back.astype(np.float32) - rows.astype(np.float32)) <= np.repeat(top, 128, -1) / 14
    ).all()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.booleans(), SEEDS)
@FEW
def test_combine_adds_in_the_order_of_choices(
    n: int, k: int, s: int, wide: bool, seed: int
) -> None:
    name = "f32" if wide else "bf16"
    x = normal(seed, s, 12, dtype=dtype_of(name).numpy)
    ids = np.random.default_rng(seed).integers(-1, s, (4 * n, k)).astype(np.int32)
    gates = normal(seed + 1, 4 * n, k)
    x[0] = np.inf  # of a slot that no token has, so it must not be read as 0 * inf
    ids[ids == 0] = -1
    want = np.zeros((4 * n, 12), np.float32)
    for j in range(k):
        row = x[ids[:, j]].astype(np.float32) * gates[:, j : j + 1]
        want = want + np.where(ids[:, j : j + 1] < 0, 0, row)
    sizes = {"N": 4 * n, "bn": 4, "C": 12, "bc": 6, "S": s, "K": k}
    (y,) = run(combine(name), sizes, x, ids, gates)
    assert np.array_equal(y, want.astype(dtype_of(name).numpy))


# ---- devices -----------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_collectives_by_puts(name: str, n: int) -> None:
    sizes, dtype = {"x": n, "M": 6, "K": 4, "bm": 3}, dtype_of(name).numpy
    a, blocks = normal(0, n, 6, 4, dtype=dtype), normal(1, n, n, 6, 4, dtype=dtype)
    (gathered,) = in_orders(all_gather(name), sizes, a)
    assert all(np.array_equal(y, a) for y in gathered)
    (swapped,) = in_orders(exchange(name), sizes, blocks)
    assert np.array_equal(swapped, blocks.swapaxes(0, 1))
    (summed,) = in_orders(reduce_scatter(name), sizes, blocks)
    want = np.stack([blocks[r, r].astype(np.float32) for r in range(n)])
    for s in range(1, n):  # those of the devices before it
        want += np.stack([blocks[r - s, r].astype(np.float32) for r in range(n)])
    assert np.array_equal(summed, want.astype(dtype))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_gathered_and_scattered_products_over_a_ring(n: int) -> None:
    a, w = normal(0, n, 16, 32), normal(1, n, 32, 24)
    (y,) = in_orders(AG_MATMUL, {"x": n}, a, w)
    close(y, np.stack([a.reshape(n * 16, 32) @ w[i] for i in range(n)]), 1e-4)
    a, w = normal(2, n, 4 * n, 16), normal(3, n, 16, 24)
    (y,) = in_orders(MATMUL_RS, {"x": n}, a, w)
    close(y.reshape(4 * n, 24), sum(a[i] @ w[i] for i in range(n)), 1e-4)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_a_ring(causal: bool, n: int) -> None:
    r, at = 4, np.concatenate([[i, 2 * n - 1 - i] for i in range(n)])  # zig-zag

    def cut(x: Array, dim: int) -> Array:
        """The blocks [x, ..., 2, R, D] of devices."""
        parts = x.reshape(*x.shape[:dim], 2 * n, r, x.shape[-1]).take(at, dim)
        parts = parts.reshape(*x.shape[:dim], n, 2, r, x.shape[-1])
        return np.moveaxis(parts, dim, 0)

    q, k, v = (
        normal(0, 1, 2, 2, 2 * n * r, 8),
        normal(1, 1, 2, 2 * n * r, 8),
        normal(2, 1, 2, 2 * n * r, 8),
    )
    want, lse = attention(f64(q), f64(k), f64(v), sees(2 * n * r, 2 * n * r, causal), 0.375)
    sizes = {"x": n, "H": 2, "G": 2, "R": r, "D": 8, "bq": 2, "bk": 4}
    scale = np.full((n, 1), 0.375, np.float32)
    arrays = (cut(q, 3), cut(k, 2), cut(v, 2))
    o, own = in_orders(ring_attention(causal), sizes, *arrays, scale)
    close(o, cut(want.detach().numpy(), 3), 2e-5)
    close(own, cut(lse.detach().numpy()[..., None], 3)[..., 0], 2e-5)
    if n == 3:
        narrow = (x.astype(BF16) for x in arrays)
        close(run(ring_attention(causal, "bf16"), sizes, *narrow, scale)[0], o, 5e-2)


FREE = "    when s > 0 and s < x-1: wait free[s-1]\n"


@pytest.mark.parametrize(("old", "new", "kind"), [
    (FREE, "", "unwaited"),
    ("              wait gotk[s, b, h, c, j]\n", "", "unwaited"),
    ("      quiet\n", "", "two puts"),  # the own put may still read what the next one overwrites
    ("    when s < x-2:\n", f"{FREE}    when s < x-2:\n", "early read"),  # a wait too late
])  # fmt: skip
def test_a_ring_has_no_wait_too_many(old: str, new: str, kind: str) -> None:
    text = ring_attention()
    assert text.count(old) == 1
    text = text.replace(FREE, "") if FREE in new else text
    assert kind in {f.kind for f in faults(parse(text.replace(old, new)))}
