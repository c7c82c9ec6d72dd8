"""Inputs for which the engine itself gives wrong results or crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxlib import version

import tessera as ts
from tessera import dist, nn
from tessera.core import flags
from tessera.core.context import replaced
from tessera.core.layout import parse_type
from tessera.core.options import ScheduleOptions
from tessera.ir.graph.build import Builder
from tessera.lang.value import eager
from tessera.train.memory import offload
from tests.mesh.silent.rows import row

SOURCE = str(Path(ts.__file__).resolve().parents[1])


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process without this process's engine flags."""
    own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**own, "PYTHONPATH": SOURCE, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# -- reductions that the engine fuses -------------------------------------------------------------
# Without the flag of core/flags.py each fails on jaxlib 0.10.2: an error of 0.8 %, an error of up
# to 1e23, or a crash.
def _squares(x: ts.Tensor) -> ts.Tensor:
    return ((x @ ts.eye(3)) ** 2).sum(-1)


def _shifted(x: ts.Tensor) -> ts.Tensor:
    return ((x - x.max(-1, keepdims=True)) @ ts.ones((4, 32, 256))).sum(-1)


def _deep(x: ts.Tensor) -> ts.Tensor:
    return (x * (x + 1)).sum(3)


def _data(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@row("squares of the rows of a long product, in one program")
def _() -> None:
    x = np.zeros((32769, 3), np.float32)
    x[:, 0] = np.arange(32769)
    got = ts.jit(_squares)(x).numpy()
    np.testing.assert_allclose(got, np.arange(32769.0) ** 2, rtol=1e-6)


@row("a sum of what is left over a row's maximum, by a product with ones")
def _() -> None:
    x = _data((4, 256, 32))
    left = x - x.max(-1, keepdims=True).astype(np.float64)
    want = 256 * left.sum(-1)
    np.testing.assert_allclose(ts.jit(_shifted)(x).numpy(), want, rtol=1e-5)


@row("a sum over one of seven dims")
def _() -> None:
    x = _data((3, 1, 2, 2, 8, 8, 8))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(ts.jit(_deep)(x).numpy(), (wide * (wide + 1)).sum(3), atol=1e-5)


def _flash(q: ts.Tensor, k: ts.Tensor, v: ts.Tensor) -> ts.Tensor:
    """Flash attention's loop over tiles, with one tile of keys."""

    def tile(carry: tuple[ts.Tensor, ...], kv: tuple[ts.Tensor, ts.Tensor]) -> tuple:
        most, total, out = carry
        scores = q @ kv[0].transpose(-2, -1) * 32**-0.5
        now = ts.maximum(most, scores.max(-1, keepdims=True))
        p, old = ts.exp(scores - now), ts.exp(most - now)
        return (now, total * old + p.sum(-1, keepdims=True), out * old + p @ kv[1]), None

    start = (ts.full((4, 256, 1), -1e30), ts.zeros((4, 256, 1)), ts.zeros((4, 256, 32)))
    rows = (k.reshape(1, 4, 256, 32), v.reshape(1, 4, 256, 32))
    (_, total, out), _ = ts.scan(tile, start, rows)
    return out / total


@row("the gradient of a flash loop of one tile under ones")
def _() -> None:
    q, k, v = (_data((4, 256, 32)) * s for s in (1, 0.5, 2))
    grads = ts.jit(lambda *xs: ts.grad(_flash(*xs).sum(), list(xs)))(*map(ts.tensor, (q, k, v)))
    p = np.exp(np.einsum("hqd,hkd->hqk", q, k, dtype=np.float64) * 32**-0.5)
    p /= p.sum(-1, keepdims=True)
    dp = np.broadcast_to(v.sum(-1, dtype=np.float64)[:, None], p.shape)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * 32**-0.5
    wants = (ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ np.ones(q.shape))
    for got, want in zip(grads, wants, strict=True):
        np.testing.assert_allclose(got.numpy(), want, atol=2e-5)


LATE = """
import warnings
import jax.numpy as jnp
import numpy as np
jnp.ones(3)
import tessera as ts
x = np.random.default_rng(0).normal(size=(4, 256, 32)).astype(np.float32)
def shifted(x):
    return ((x - x.max(-1, keepdims=True)) @ ts.ones((4, 32, 256))).sum(-1)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        got = ts.jit(shifted)(x).numpy()
want = 256 * (x - x.max(-1, keepdims=True).astype(np.float64)).sum(-1)
print(bool(np.allclose(got, want, rtol=1e-3)))
print(*[f"{w.category.__name__}: {w.message}" for w in seen], sep="\\n")
"""
PROMISED = """
from tessera import dist
try:
    with dist.deterministic():
        (ts.ones(3) + 1).numpy()
except ts.BackendError as error:
    print(error)
with dist.deterministic(level="run_to_run"):
    print((ts.ones(3) + 1).numpy().tolist())
"""


@row("jax has made an array before tessera is imported")
def _() -> None:
    done = fresh(LATE + PROMISED)
    assert done.returncode == 0, done.stderr
    right, *seen = done.stdout.splitlines()
    seen, said = seen[:-5], seen[-5:]
    if flags.X86:
        assert said == [
            "mesh_invariant: the backend contracts multiplications and additions",
            "  started : with XLA_FLAGS=''",
            "  at      : <string>:21",
            "  fix     : import tessera before the first array of jax, or set"
            ' XLA_FLAGS=--xla_cpu_max_isa=AVX; level="run_to_run" is kept as it is',
            "[2.0, 2.0, 2.0]",
        ]
    if version.__version_info__ < (0, 10, 2):
        assert (right, seen) == ("True", [""])
        return
    assert right == "False", "this jaxlib is right: core/flags.py need not guard it"
    assert seen == [
        f"EngineWarning: jaxlib {version.__version__} computes some sums and maxima on a CPU"
        " wrongly, and its backend runs without the flag that prevents it (<string>:13): import"
        " tessera before the first array of jax, or set"
        " XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce"
    ]


# -- donated tensors ------------------------------------------------------------------------------
def _on(mesh: dist.Mesh | None) -> ts.Tensor:
    x = np.arange(16, dtype=np.float32)
    return ts.tensor(x) if mesh is None else ts.tensor(x, mesh=mesh, layout="[16@dp]")


def _donated_is_read(mesh: dist.Mesh | None) -> None:
    """Asserts that any read of a donated tensor is an error, also after earlier runs of the
    program. On several devices the engine itself would end the process."""
    w, y = _on(mesh), _on(mesh)
    step = ts.jit(lambda w: w * 2, donate="w")
    both = ts.jit(lambda a, b: (a * 2, b + 1), donate="a")
    closed, given = ts.jit(lambda x: x + w), ts.jit(lambda x, w: x + w)
    cut = ts.jit(lambda x, w: w * 3 if x[0].item() > -1 else w)
    loss = (w * y * w).sum()
    uses: dict[str, Callable[[], object]] = {
        "numpy": lambda: w.numpy(),
        "an array": lambda: np.asarray(w),
        "text": lambda: f"{w}",
        "an op": lambda: w + y,
        "an index": lambda: w[3],
        "a closure": lambda: closed(y),
        "an argument": lambda: given(y, w),
        "after a read": lambda: cut(y, w),
        "a layout": lambda: dist.redistribute(w, "[16]") if mesh is not None else w * 1,
        "the tape": lambda: ts.grad(loss, [y]),
        "jax": lambda: w.jax(),
        "tensor": lambda: ts.tensor(w.jax()) * 1,
        "host memory": lambda: offload(w),
        "donated again": lambda: step(w),
    }
    for use in [*uses.values()][:-1]:
        use()
    step(_on(mesh))
    both(_on(mesh), _on(mesh))
    step(w)
    for name, use in uses.items():
        try:
            use()
        except ts.DonatedError as error:
            assert "a tensor is used after its buffer was donated" in str(error), name
        else:
            raise AssertionError(f"{name} reads memory that was given up")
    with pytest.raises(ts.DonatedError, match="is given a second time"):
        both(y, y)


@row("reads a donated tensor again, one device")
def _() -> None:
    _donated_is_read(None)


@row("reads a donated tensor again, on two devices")
def _() -> None:
    _donated_is_read(dist.Mesh(("dp",), devices=range(2)))


@row("reads a donated tensor again, on a folded mesh")
def _() -> None:
    _donated_is_read(dist.Mesh(("dp",), devices=range(4)).fold(onto=2))


ERRORS = """
import numpy as np
import tessera as ts
from tessera import dist
mesh = dist.Mesh(("dp",), devices=range(8))
x, y = (ts.tensor(np.ones(16, np.float32), mesh=mesh, layout="[16@dp]") for _ in range(2))
both = ts.jit(lambda a, b: (a * 2, b + 1), donate="a")
both(x + 0, y)
def huge():
    return ts.jit(lambda: ts.ones((10**6, 10**8)) + 1)()
both(x, y)
for use in (lambda: both(x, y), lambda: both(y, y), lambda: x.jax(), huge):
    try:
        use()
    except ts.TesseraError as error:
        print(type(error).__name__)
import jax, jax.numpy as jnp
twice = jax.jit(lambda a, b: (a * 2, b + 1), donate_argnums=0)
z = jnp.ones(3)
try:
    twice(z, z)
except Exception:
    print("the engine's own")
"""


@row("makes mistakes, and reads what the process prints")
def _() -> None:
    done = fresh(ERRORS)
    assert done.stdout.split("\n") == [
        *["DonatedError"] * 3,
        "BackendError",
        "the engine's own",
        "",
    ]
    assert done.stderr == ""


# -- NaN in a maximum or a minimum ----------------------------------------------------------------
NAN = np.array([[3, np.nan, 1, -2, 5, np.inf, 2, 0.5], [-1, 2, -3, 4, -5, -6, np.nan, 8]], "f4")


def _extremes(x: ts.Tensor, dtype: object) -> list[ts.Tensor]:
    wide = x.to(dtype)
    return [ts.max(wide, 1), ts.min(wide, 1), ts.max(wide), ts.min(wide, 0)]


def _nan_is_kept(mesh: dist.Mesh, executor: str = "fused") -> None:
    x = ts.tensor(np.nan_to_num(NAN, nan=7, posinf=9), mesh=mesh, layout="[2, 8@dp]")
    bad = ts.tensor(NAN, mesh=mesh, layout="[2, 8@dp]")
    with replaced(executor=executor):
        for dtype in (ts.f32, ts.bf16):
            run = ts.jit(lambda x, dtype=dtype: _extremes(x, dtype))
            for given in (x, bad):
                value = given.numpy()
                wants = (value.max(1), value.min(1), value.max(), value.min(0))
                for got, want in zip(run(given), wants, strict=True):
                    np.testing.assert_array_equal(got.to(ts.f32).numpy(), want)


@row("takes the maximum of a NaN over devices")
def _() -> None:
    _nan_is_kept(dist.Mesh(("dp",), devices=range(8)))


@row("takes the maximum of a NaN over devices, step by step")
def _() -> None:
    _nan_is_kept(dist.Mesh(("dp",), devices=range(8)), "stepped")


@row("takes the maximum of a NaN on a folded mesh")
def _() -> None:
    _nan_is_kept(dist.Mesh(("dp",), devices=range(8)).fold(onto=2))


@row("takes the maximum of a NaN with a table of rounds")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(8))
    x = ts.tensor(NAN, mesh=mesh, layout="[2, 8@dp]")
    with replaced(schedule=ScheduleOptions(algorithm=(("", "ring"),))):
        assert np.isnan(ts.jit(lambda x: ts.max(x, 1))(x).numpy()).all()


@row("takes the largest of literal blocks, one of them NaN")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(8))

    @ts.distribute(mesh=mesh)
    def most(x: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce(ts.max(x), "dp", op="max")

    got = most(ts.tensor(NAN[0], mesh=mesh, layout="[8@dp]")).numpy()
    assert np.isnan(got).all(), got


@row("sorts, and picks the largest, with a NaN over devices")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(8))
    x = ts.tensor(NAN, mesh=mesh, layout="[2, 8@dp]")
    t = torch.tensor(NAN)
    for got, want in (
        (ts.argmax(x, 1), t.argmax(1)),
        (ts.argmax(x, 1, keepdims=True), t.argmax(1, keepdim=True)),
        (ts.argmin(x, 1), t.argmin(1)),
        (ts.topk(x, 3)[0], t.topk(3)[0]),
        (ts.topk(x, 3)[1], t.topk(3)[1]),
        (ts.sort(x, 1)[0], t.sort(1)[0]),
        (ts.sort(x, 1, descending=True)[0], t.sort(1, descending=True)[0]),
    ):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


@row("takes the gradient through a NaN maximum")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(8))
    x = ts.tensor(NAN, mesh=mesh, layout="[2, 8@dp]")
    y = ts.tensor(NAN[::-1].copy(), mesh=mesh, layout="[2, 8@dp]")
    for ours, theirs in (
        (lambda x, y: ts.max(x), lambda x, y: x.max()),
        (lambda x, y: ts.min(x), lambda x, y: x.min()),
        (lambda x, y: ts.maximum(x, y).sum(), lambda x, y: torch.maximum(x, y).sum()),
        (lambda x, y: ts.minimum(x, y).sum(), lambda x, y: torch.minimum(x, y).sum()),
    ):
        t, u = torch.tensor(NAN, requires_grad=True), torch.tensor(NAN[::-1].copy())
        theirs(t, u).backward()
        got = ts.jit(lambda x, y, ours=ours: ts.grad(ours(x, y), [x])[0])(x, y)
        np.testing.assert_array_equal(got.numpy(), t.grad.numpy())
    # PyTorch returns the last NaN of a window, Tessera the first of equal values.
    pool = ts.tensor(np.array([[[1, np.nan, 2, 3]]], "f4"))
    grad = ts.grad(nn.max_pool1d(pool, 2).sum(), [pool])[0]
    assert grad.numpy().tolist() == [[[0, 1, 0, 1]]]


@row("completes a maximum in parts", error=ts.LayoutError, says="only a sum is completed in parts")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(4))
    b = Builder("parts")
    x = b.input(parse_type("f32[8] max dp", mesh))
    b("reduce_scatter", x, axes=("dp",), to_dim=0, into="8@dp")


@row("drops a step whose gradients overflow, their norm taken over devices")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(8))
    scaler = ts.optim.LossScale(init_scale=8.0)
    grads = {"w": ts.tensor(NAN, mesh=mesh, layout="[2, 8@dp]")}
    _, finite = scaler.unscale(grads, scaler.init(mesh))
    assert not finite.item()
    assert np.isnan(ts.optim.global_norm(grads).item())


# -- the cache of one-op programs -----------------------------------------------------------------
def _misses() -> int:
    return eager._program.cache_info().misses


@row("walks over rows by number: one program, not one a row")
def _() -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    data = _data((6, 5, 8))
    for x in (ts.tensor(data), ts.tensor(data, mesh=mesh, layout="[6, 5, 8@tp]")):
        x[0], x[1, 2], x[:, 3]
        before = _misses()
        for i in range(-6, 6):
            np.testing.assert_array_equal(x[i].numpy(), data[i])
            assert x[i].layout == x[0].layout
            np.testing.assert_array_equal(x[i, i % 5].numpy(), data[i, i % 5])
            np.testing.assert_array_equal(x[:, i % 5].numpy(), data[:, i % 5])
        assert _misses() == before
        assert [r.shape for r in x] == [(5, 8)] * 6
    w = ts.tensor(data)
    slope = ts.grad((w[4, -1] * 3.0).sum(), w).numpy()
    assert slope[4, -1].tolist() == [3.0] * 8 and np.count_nonzero(slope) == 8


@row("runs an op again under other settings")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(4))
    x = ts.tensor(_data((8, 3)), mesh=mesh, layout="[8@dp, 3]")
    for changes in (
        {"executor": "stepped"},
        {"schedule": ScheduleOptions(algorithm=(("all_reduce", "ring"),))},
        {"strict": True},
        {"comm_trace": True},
    ):
        for op in (lambda: ts.sum(x, 1), lambda: dist.redistribute(x, "[8, 3]")):
            op()
            before = _misses()
            with replaced(**changes):
                op(), op()
            assert _misses() == before + 1, changes


@row("scales by another number each step")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(4))
    data = np.abs(_data((8, 3))) + 1
    for x in (ts.tensor(data), ts.tensor(data, mesh=mesh, layout="[8@dp, 3]")):
        before = -1
        for i in range(12):
            f = 0.1 * i + 0.05
            full = ts.full((3,), f)
            for got, want in (
                (x * f, data * np.float32(f)),
                (f - x, np.float32(f) - data),
                (x**f, data ** np.float32(f)),
                (ts.maximum(x, f), np.maximum(data, np.float32(f))),
                (x + i, data + i),
                (full, np.full(3, f, "f4")),
                (ts.full((), f), np.float32(f)),
            ):
                np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)
            (slope,) = ts.grad((x * f).sum(), [x])
            np.testing.assert_allclose(slope.numpy(), np.full((8, 3), f), rtol=1e-6)
            assert before in (-1, _misses()), "a program for a number"
            before = _misses()
    assert eager._program.cache_info().maxsize == eager.MOST_PROGRAMS


@row("fills with zero, and with the other zero")
def _() -> None:
    for shape in ((2,), ()):
        signs = [np.signbit(ts.full(shape, v).numpy()).all() for v in (0.0, -0.0, 0.0)]
        assert signs == [False, True, False]


@row(
    "seeds in a compiled function",
    error=ts.UsageError,
    says="seed: a compiled function runs it only when it is recorded",
)
def _() -> None:
    @ts.jit
    def drawn(x: ts.Tensor) -> ts.Tensor:
        ts.seed(7)
        return x + ts.random.normal(())

    drawn(ts.ones(2))


@row("reads a sum of whole numbers over devices that is larger than they hold")
def _() -> None:
    mesh = dist.Mesh(("tp",), devices=4)
    x = np.full(8, 2**30, np.int32)
    total = ts.sum(ts.tensor(x, mesh=mesh, layout="[8@tp]"))
    assert total.type.partial and total.numpy().dtype == np.int32
    assert total.item() == (total + 0).item() == ts.sum(ts.tensor(x)).item() == 0
