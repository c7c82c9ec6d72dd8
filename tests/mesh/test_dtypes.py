"""Numbers of 64 bits, complex numbers and Fourier transforms, against JAX and NumPy."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tessera as ts
from tessera import dist, nn, optim
from tessera.core.context import replaced

MESH = dist.Mesh.parse("dp=2 tp=4")
LAYOUTS = ("[8, 8]", "[8@dp, 8@tp]", "[8@tp, 8@dp]", "[8, 8@(dp,tp)]")
REAL, WHOLE, COMPLEX = (ts.f32, ts.f64), (ts.int32, ts.int64, ts.uint32, ts.uint64), ("c64", "c128")
NUMBERS = (*REAL, *WHOLE, *COMPLEX)
SMOOTH = (*REAL, *COMPLEX)
# The table of functions by dtypes: a function of one or two tensors [8, 8], that of NumPy or JAX,
# the dtypes that it takes, and whether a gradient is compared.
TABLE: dict[str, tuple[Any, Any, tuple[Any, ...], bool]] = {
    "neg": (lambda x: -x, lambda x: -x, (*REAL, ts.int32, ts.int64, *COMPLEX), True),
    "add": (lambda x, y: x + y, lambda x, y: x + y, NUMBERS, True),
    "sub": (lambda x, y: x - y, lambda x, y: x - y, NUMBERS, True),
    "mul": (lambda x, y: x * y, lambda x, y: x * y, NUMBERS, True),
    "div": (lambda x, y: x / y, lambda x, y: x / y, SMOOTH, True),
    "floordiv": (lambda x, y: x // y, lambda x, y: x // y, (*REAL, *WHOLE), False),
    "mod": (lambda x, y: x % y, lambda x, y: x % y, (*REAL, *WHOLE), False),
    "square": (lambda x: x**2, lambda x: x**2, NUMBERS, True),
    "power": (lambda x, y: (x * x) ** y, lambda x, y: (x * x) ** y, SMOOTH, True),
    "matmul": (lambda x, y: x @ y, lambda x, y: x @ y, NUMBERS, True),
    "einsum": (
        lambda x, y: ts.einsum("ij,kj->ik", x, y), lambda x, y: jnp.einsum("ij,kj->ik", x, y),
        NUMBERS, True,
    ),
    "sum": (lambda x: ts.sum(x, 0), lambda x: x.sum(0), NUMBERS, True),
    "mean": (lambda x: ts.mean(x, 1), lambda x: x.mean(1), SMOOTH, True),
    "var": (lambda x: ts.var(x, 1), lambda x: x.var(1), SMOOTH, True),
    "prod": (lambda x: ts.prod(x[:, :3], 1), lambda x: x[:, :3].prod(1), NUMBERS, True),
    "cumsum": (lambda x: ts.cumsum(x, 1), lambda x: x.cumsum(1), NUMBERS, True),
    "max": (lambda x: ts.max(x, 0), lambda x: x.max(0), (*REAL, *WHOLE), False),
    "sort": (lambda x: ts.sort(x, 0)[0], lambda x: jnp.sort(x, 0), (*REAL, *WHOLE), False),
    "argmax": (lambda x: ts.argmax(x, 0), lambda x: x.argmax(0), (*REAL, *WHOLE), False),
    "maximum": (ts.maximum, jnp.maximum, (*REAL, *WHOLE), False),
    "exp": (ts.exp, jnp.exp, SMOOTH, True),
    "log": (lambda x: ts.log(x * x + 1), lambda x: jnp.log(x * x + 1), SMOOTH, True),
    "sqrt": (lambda x: ts.sqrt(x * x + 1), lambda x: jnp.sqrt(x * x + 1), SMOOTH, True),
    "rsqrt": (lambda x: ts.rsqrt(x * x + 1), lambda x: (x * x + 1) ** -0.5, SMOOTH, True),
    "tanh": (ts.tanh, jnp.tanh, SMOOTH, True),
    "sigmoid": (ts.sigmoid, jax.nn.sigmoid, REAL, True),
    "sin": (ts.sin, jnp.sin, SMOOTH, True),
    "cos": (ts.cos, jnp.cos, SMOOTH, True),
    "log1p": (lambda x: ts.log1p(x * x), lambda x: jnp.log1p(x * x), SMOOTH, True),
    "expm1": (ts.expm1, jnp.expm1, SMOOTH, True),
    "erf": (ts.erf, jax.scipy.special.erf, REAL, True),
    "abs": (ts.abs, jnp.abs, NUMBERS, True),
    "real": (ts.real, jnp.real, SMOOTH, True),
    "imag": (ts.imag, jnp.imag, COMPLEX, True),
    "conj": (ts.conj, jnp.conj, SMOOTH, True),
    "angle": (ts.angle, jnp.angle, COMPLEX, True),
    "complex": (ts.complex, lambda x, y: x + 1j * y, REAL, True),
    "eq": (lambda x, y: x == y, lambda x, y: x == y, NUMBERS, False),
    "less": (lambda x, y: x < y, lambda x, y: x < y, (*REAL, *WHOLE), False),
    "where": (lambda x, y: ts.where(x != y, x, y * 2), lambda x, y: jnp.where(x != y, x, y * 2),
              NUMBERS, True),
    "take": (lambda x: ts.take(x, ts.tensor([3, 0, 3]), 0), lambda x: x[jnp.array([3, 0, 3])],
             NUMBERS, True),
    "moved": (lambda x: ts.flip(x, 0).T.reshape(4, 16)[:, ::3], lambda x:
              jnp.flip(x, 0).T.reshape(4, 16)[:, ::3], NUMBERS, True),
    "concat": (lambda x, y: ts.concat([x, y], 1), lambda x, y: jnp.concatenate([x, y], 1),
               NUMBERS, True),
    "pad": (lambda x: ts.pad(x, (1, 2)), lambda x: jnp.pad(x, ((0, 0), (1, 2))), NUMBERS, True),
    "softmax": (ts.nn.softmax, jax.nn.softmax, REAL, True),
    "layer_norm": (lambda x: ts.nn.layer_norm(x), lambda x: (x - x.mean(-1, keepdims=True))
                   / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5), REAL, True),
    "norm": (ts.linalg.norm, jnp.linalg.norm, SMOOTH, True),
    "solve": (lambda x, y: ts.linalg.solve(x + 9 * ts.eye(8), y), lambda x, y:
              jnp.linalg.solve(x + 9 * jnp.eye(8), y), REAL, True),
}  # fmt: skip
CASES = [(name, ts.zeros(1, d).dtype) for name, row in TABLE.items() for d in row[2]]


def _data(dtype: Any, seed: int) -> np.ndarray[Any, Any]:
    r = np.random.RandomState(seed)
    if dtype.is_int:  # some do not fit 32 bits, nor the 24 of f32
        return r.randint(1, 2**40 if dtype.is_wide else 1000, (8, 8)).astype(dtype.numpy)
    x = r.randn(8, 8)
    return (x + 1j * r.randn(8, 8) if dtype.is_complex else x).astype(dtype.numpy)


def _close(got: Any, want: Any, dtype: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    if got.dtype.kind in "biu":
        assert np.array_equal(got, want)
        return
    tol = 1e-11 if dtype.is_wide else 2e-4
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol * max(1, np.abs(want).max()))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda c: str(c))
def test_a_function_for_a_dtype(name: str, dtype: Any) -> None:
    """The value, its dtype's precision and its gradient are those of JAX, compiled and not."""
    ours, theirs, _, smooth = TABLE[name]
    count = ours.__code__.co_argcount if hasattr(ours, "__code__") else 1
    count = 2 if name in ("maximum", "complex") else 1 if count not in (1, 2) else count
    arrays = [_data(dtype, seed) for seed in range(count)]
    with jax.enable_x64(True):
        want = np.asarray(theirs(*map(jnp.asarray, arrays)))
    layout = LAYOUTS[CASES.index((name, dtype)) % len(LAYOUTS)]
    xs = [ts.tensor(a, dtype=dtype, mesh=MESH, layout=layout) for a in arrays]
    for run in (ours, ts.jit(lambda *xs: ours(*xs))):
        got = run(*xs)
        assert (
            got.dtype.is_wide == dtype.is_wide
            or not (got.dtype.is_float or got.dtype.is_int)
            or (name == "argmax")
        )
        _close(got.numpy(), want, dtype)
    if not smooth or not dtype.is_float:
        return
    # With respect to a real factor of the arguments, so that the convention of complex gradients
    # does not count.
    weight = np.random.RandomState(9).randn(*want.shape)

    def loss(of: Any, lib: Any, w: Any, xs: Any, s: Any) -> Any:
        y = of(*[x * s for x in xs])
        return lib.sum(lib.real(y) * w) + lib.sum(lib.imag(y) * w)

    scale = np.linspace(0.5, 1.5, 8)
    real = dtype.real
    with jax.enable_x64(True):
        s = jnp.asarray(scale, real.numpy)
        slope = jax.grad(lambda s: loss(theirs, jnp, weight, list(map(jnp.asarray, arrays)), s))(s)
    w, s = ts.tensor(weight, dtype=real), ts.tensor(scale, dtype=real)
    mine = ts.jit(lambda s, xs: ts.value_and_grad(lambda s: loss(ours, ts, w, xs, s))(s)[1])(s, xs)
    assert mine.dtype is real
    _close(mine.numpy(), slope, dtype)


# -- Fourier transforms ---------------------------------------------------------------------------
TRANSFORMS = [
    (name, dim, norm, n)
    for name in ("fft", "ifft", "rfft", "irfft")
    for dim, norm, n in ((0, "backward", None), (1, "ortho", 6), (-1, "forward", 11))
]
GRIDS = [
    (name, dims, norm)
    for name in ("fftn", "ifftn", "rfftn", "irfftn")
    for dims, norm in (((0, 1), "backward"), ((2, 0), "ortho"), ((1, 2), "forward"))
]
GRID_LAYOUTS = ("[8@dp, 6, 10]", "[8, 6@dp, 10@tp]", "[8@tp, 6, 10@dp]", "[8@(dp,tp), 6, 10]",
                "[8, 6, 10]", "[8, 6@tp, 10]")  # fmt: skip


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("name", "dim", "norm", "n"), TRANSFORMS)
def test_a_transform_along_a_dim(name: str, dim: int, norm: str, n: Any, wide: bool) -> None:
    for layout, complex in itertools.product(LAYOUTS, (False, name != "rfft")):
        dtype = ts.zeros(
            1, ("c128" if wide else "c64") if complex else "f64" if wide else "f32"
        ).dtype
        x = _data(dtype, 3)
        got = getattr(ts.fft, name)(
            ts.tensor(x, dtype=dtype, mesh=MESH, layout=layout), n=n, dim=dim, norm=norm
        )
        want = getattr(np.fft, name)(x.astype("c16" if complex else "f8"), n=n, axis=dim, norm=norm)
        _close(got.numpy(), want, dtype)


@pytest.mark.parametrize("layout", GRID_LAYOUTS)
@pytest.mark.parametrize(("name", "dims", "norm"), GRIDS)
def test_a_transform_of_a_grid(name: str, dims: Any, norm: str, layout: str) -> None:
    """Values and gradients on pencils are those of JAX; in a global function and folded."""
    x = np.random.RandomState(0).randn(8, 6, 10)
    mesh = MESH.fold(onto=4) if name == "rfftn" else MESH
    given = ts.tensor(x, dtype="f64", mesh=mesh, layout=layout)

    def loss(lib: Any, x: Any, **how: Any) -> Any:
        y = getattr(lib.fft, name)(x * 1.5, norm=norm, **how)
        return (abs(y * (1 + 0.5j) + 0.1) ** 2).sum()

    with jax.enable_x64(True):
        want, slope = jax.value_and_grad(lambda x: loss(jnp, x, axes=dims))(jnp.asarray(x))
    want, slope = np.asarray(want), np.asarray(slope)
    run = ts.jit(lambda x: ts.value_and_grad(lambda x: loss(ts, x, dim=dims))(x))
    got, g = run(given)
    np.testing.assert_allclose(got.item(), want, rtol=1e-12)
    np.testing.assert_allclose(g.numpy(), slope, rtol=1e-9, atol=1e-9 * abs(slope).max())


def test_pencils_are_turned_by_all_to_all() -> None:
    """A grid of which one dim is split needs one all_to_all forward and one back, also if the axis
    does not divide the half of the frequencies."""
    x = ts.tensor(np.ones((16, 16, 16)), mesh=MESH, layout="[16@dp, 16@tp, 16]")
    forward = ts.jit(lambda x: ts.fft.rfftn(x))
    forward(x)
    assert [n.op for n, _ in forward.graph.collectives()] == ["all_to_all"] * 2
    assert str(dist.inspect(forward)).count("all_to_all") == 2
    there_and_back = ts.jit(lambda x: ts.fft.irfftn(ts.fft.rfftn(x) * 2.0))
    np.testing.assert_allclose(there_and_back(x).numpy(), 2 * x.numpy(), atol=1e-5)
    assert {n.op for n, _ in there_and_back.graph.collectives()} == {"all_to_all"}


@pytest.mark.parametrize("layout", ["[4@dp, 8@tp, 3]", "[4@dp, 8, 3@tp]"])
def test_a_transform_whose_result_is_sent_and_read_along_another_dim(layout: str) -> None:
    x = np.random.RandomState(0).randn(4, 8, 3).astype(np.float32)
    run = ts.jit(lambda x: ts.fft.rfft2(x))
    _close(run(ts.tensor(x, mesh=MESH, layout=layout)).numpy(), np.fft.rfft2(x), ts.f32)


def test_transforms_in_local_bodies_and_vmap() -> None:
    x = np.random.RandomState(0).randn(8, 6)
    rows = dist.ShardSpec(("row",), ("dp",))

    @ts.distribute(mesh=MESH, layouts={"x": rows, "return": rows})
    def local(x):
        return ts.fft.rfft(x)

    given = ts.tensor(x, mesh=MESH, layout="[8@dp, 6]")
    _close(local(given).numpy(), np.fft.rfft(x), ts.f32)
    _close(ts.vmap(ts.fft.fft)(given).numpy(), np.fft.fft(x), ts.f32)


# -- 64 bits at the edges -------------------------------------------------------------------------
def test_64_bits_are_asked_for() -> None:
    """Nothing is wide unless it is asked for, and a wide tensor stays wide on its ways."""
    x = np.array([1 + 2.0**-40, 3.0])
    assert ts.tensor(x).dtype is ts.f32 and ts.tensor(x, dtype=ts.f64).dtype is ts.f64
    w = ts.tensor(x, dtype=ts.f64, mesh=MESH, layout="[2@dp]")
    assert (w * 2.0 + 1).dtype is ts.f64 and np.array_equal(w.numpy(), x)
    assert np.array_equal(dist.redistribute(w).numpy(), x)
    assert ts.jit(lambda w: w)(w).numpy()[0] == x[0]
    assert (w + ts.ones(2)).dtype is ts.f64 and (w * 1j).dtype is ts.complex128
    y = ts.jit(lambda v: (v.to(ts.f64) + 2.0**-30).sum().to("f32"))(ts.ones(2))
    assert y.dtype is ts.f32
    top = ts.max(ts.tensor([[1.0, 2.0 + 2**-45]], dtype=ts.f64, mesh=MESH, layout="[1, 2@dp]"))
    assert top.item() == 2.0 + 2**-45
    assert ts.tensor([2**50], dtype="i64").item() == 2**50
    assert ts.sum(ts.tensor([2**40, 2**40], dtype="i64")).item() == 2**41
    with pytest.raises(ts.DTypeError, match="complex numbers do not fit"):
        ts.tensor([1j]).to("f32")
    with pytest.raises(ts.DTypeError, match="complex numbers do not fit"):
        ts.tensor([1j], dtype=ts.f32)


def test_64_bits_in_loops_and_steps() -> None:
    """Bodies of loops, and programs of single steps, keep 64 bits."""
    x = ts.tensor(np.full((8, 4), 1 + 2.0**-40), dtype=ts.f64, mesh=MESH, layout="[8@dp, 4]")

    def run(x):
        return ts.scan(lambda c, _: (c + 2.0**-40, ts.sum(c)), x, ts.zeros(3))

    for executor in ("fused", "stepped"):
        with replaced(executor=executor):
            end, sums = ts.jit(run)(x)
        assert end.numpy()[0, 0] == 1 + 4 * 2.0**-40
        assert sums.dtype is ts.f64 and sums.numpy()[0] == 32 * (1 + 2.0**-40)


X64, W64, Q64, IMAGE64 = (
    np.random.RandomState(7).randn(*shape) for shape in ((8, 4), (4, 6), (2, 2, 8, 4), (2, 3, 8, 8))
)
LABELS = np.arange(8, dtype=np.int32) % 4
_attention = torch.nn.functional.scaled_dot_product_attention
OF_64_BITS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "attention": (lambda q, k: nn.attention(q, k, q, causal=True),
                  lambda q, k: _attention(q, k, q, is_causal=True), (Q64, Q64 * 0.5)),
    "attention in tiles": (lambda q, k: nn.flash_attention(q, k, q, causal=True),
                           lambda q, k: _attention(q, k, q, is_causal=True), (Q64, Q64 * 0.5)),
    "pooling": (lambda x: nn.avg_pool2d(x, 2), lambda x: torch.nn.functional.avg_pool2d(x, 2),
                (IMAGE64,)),
    "a head with its loss": (lambda x, w: nn.linear_cross_entropy(x, w, LABELS, rows=4),
                             lambda x, w: torch.nn.functional.cross_entropy(
                                 x @ w, torch.tensor(LABELS).long()), (X64, W64)),
    "a norm of gradients": (lambda x, w: optim.clip_by_global_norm([x, w], 0.5)[0][0],
                            lambda x, w: x * 0.5 / torch.cat([x.ravel(), w.ravel()]).norm(),
                            (X64, W64)),
}  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", OF_64_BITS)
def test_f64_is_rounded_nowhere(name: str, split: bool) -> None:
    """Values and gradients in f64 are those of PyTorch."""
    mine, theirs, arrays = OF_64_BITS[name]
    xs = [torch.tensor(x, requires_grad=True) for x in arrays]
    want = theirs(*xs)
    want.sin().sum().backward()

    @ts.jit
    def run(*xs: Any) -> Any:
        y = mine(*xs)
        return y, ts.grad(ts.sum(ts.sin(y)), list(xs))

    mesh = dist.Mesh.parse("dp=2") if split else None
    given = []
    for x in arrays:
        rest = "".join(f", {n}" for n in x.shape[1:])
        layout = f"[{len(x)}@dp{rest}]" if split else None
        given.append(ts.tensor(x, mesh, layout, dtype="f64"))
    y, slopes = run(*given)
    for got, x in zip([y, *slopes], [want.detach(), *(x.grad for x in xs)], strict=True):
        assert got.dtype is ts.f64
        np.testing.assert_allclose(got.numpy(), x.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("mine", "theirs"), [
    (optim.SGD(0.1), partial(torch.optim.SGD, lr=0.1)),
    (optim.Momentum(0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (optim.Adam(1e-2), partial(torch.optim.Adam, lr=1e-2)),
    (optim.AdamW(1e-2, betas=(0.9, 0.99), mask=lambda name: True),
     partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)),
], ids=["SGD", "Momentum", "Adam", "AdamW"])  # fmt: skip
def test_weights_of_64_bits_are_trained_in_them(mine: Any, theirs: Any) -> None:
    """Beside a weight in f32, whose update stays in f32."""
    p = torch.nn.Parameter(torch.tensor(X64))
    other = theirs([p])
    weights = {"w": ts.tensor(X64, dtype="f64"), "narrow": ts.ones((2, 2))}
    state = mine.init(weights)
    for k in range(3):
        g = np.cos(X64 * (k + 1))
        p.grad = torch.tensor(g)
        other.step()
        grads = {"w": ts.tensor(g, dtype="f64"), "narrow": ts.ones((2, 2))}
        weights, state = mine.update(weights, grads, state)
    np.testing.assert_allclose(weights["w"].numpy(), p.detach().numpy(), rtol=1e-11)
    assert {str(x.dtype) for kind in state if kind != "step" for x in [state[kind]["w"]]} <= {"f64"}
    assert weights["narrow"].dtype is ts.f32


def test_an_adapter_of_f64_rounds_nothing() -> None:
    layer = nn.Linear(4, 6).to("f64")
    layer.weight.put(ts.tensor(W64, dtype="f64"))
    np.testing.assert_array_equal(nn.lora(layer, r=2).weight.numpy(), W64)


def test_the_norm_of_complex_gradients_is_that_of_pytorch() -> None:
    z = torch.tensor([3 + 4j, 1j])
    z.grad = z.clone()
    want = torch.nn.utils.clip_grad_norm_([z], 1.0)
    (got,), norm = optim.clip_by_global_norm([ts.tensor([3 + 4j, 1j])], 1.0)
    assert norm.item() == pytest.approx(want.item())
    np.testing.assert_allclose(got.numpy(), z.grad.numpy(), rtol=1e-5)


def test_numbers_in_a_row_of_64_bits() -> None:
    rows = {
        "f8": (ts.arange(0, 1, 0.1, dtype="f64"), np.arange(0, 1, 0.1)),
        "steps": (ts.linspace(0, 1, 7, dtype="f64"), np.linspace(0, 1, 7)),
        "i8": (ts.arange(2**40, 2**40 + 3, dtype="i64"), np.arange(2**40, 2**40 + 3)),
        "back": (ts.arange(2**33, 2**32, -(2**31), dtype="f64"), np.arange(2**33, 2**32, -(2**31))),
    }
    for got, want in rows.values():
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-15, atol=1e-16)
