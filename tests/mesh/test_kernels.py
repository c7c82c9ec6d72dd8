"""Kernels of Tile IR in programs: the values of the NumPy oracle; layers by kernels; puts."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op, schedule
from tessera.core.context import replaced
from tessera.ir.tile.kernel import Kernel
from tessera.ir.tile.kernels import AG_MATMUL, MLP_UP, TEXTS, flash, ring_attention
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse
from tessera.lang.record.kernel_op import kernel_op

ATTENTION = [n for n in TEXTS if n.startswith(("flash", "ring"))]


def arrays(k: Kernel) -> list[Any]:
    """Arrays for the inputs of a kernel, of each device if it has a mesh."""
    rng = np.random.default_rng(zlib.crc32(k.name.encode()))
    made = []
    for r in (r for r in k.refs if r.kind == "in"):
        shape = (*(n for _, n in k.mesh), *k.shape(r))
        x = rng.normal(size=shape) * 0.3 if r.dtype.is_float else rng.integers(0, 32, shape)
        made.append(np.abs(x) if r.name in ("h", "v") else x)
        made[-1] = made[-1].astype(r.dtype.numpy)
    return made


def run(k: Kernel, given: list[Any]) -> list[ts.Tensor]:
    """The outputs of a kernel on tensors; with a mesh, the blocks of its devices, stacked."""
    if not k.mesh:
        made = ts.jit(lambda *xs: tuple(kernel_op(k, *xs)))(*map(ts.tensor, given))
        return list(made)
    n = k.mesh[0][1]
    mesh = dist.Mesh(("x",), shape={"x": n})

    @op.kernel
    def each(*xs: ts.Tensor) -> Any:
        outs = kernel_op(k, *(x.reshape(*x.shape[1:]) for x in xs), axes=("x",))
        return tuple(y.reshape(1, *y.shape) for y in outs)

    def layout(x: Any) -> str:
        return f"[{n}@x, {', '.join(map(str, x.shape[1:]))}]"

    xs = [ts.tensor(x, mesh=mesh, layout=layout(x)) for x in given]
    return list(ts.jit(lambda *xs: each(*xs))(*xs))


@pytest.mark.parametrize("name", TEXTS)
def test_every_kernel_is_its_oracle(name: str) -> None:
    k = parse(TEXTS[name])
    given = arrays(k)
    for found, want in zip(run(k, given), evaluate(k, *given), strict=True):
        assert found.numpy().dtype == want.dtype and found.shape == want.shape
        close = 1e-2 if want.dtype.itemsize < 4 else 1e-5
        np.testing.assert_allclose(
            found.numpy().astype(np.float32), want.astype(np.float32), close, close
        )


@pytest.mark.parametrize("executor", ["fused", "stepped"])
def test_devices_run_it_on_their_blocks(executor: str, mesh: dist.Mesh) -> None:
    k = parse(MLP_UP)
    x, w, b = arrays(k)
    layouts = ("[256@dp, 256]", "[256, 256@tp]", "[256@tp]")
    xs = [ts.tensor(a, mesh=mesh, layout=t) for a, t in zip((x, w, b), layouts, strict=True)]

    @schedule(tile={"bm": 32, "bk": 128}, warps=8)
    def f(*xs: ts.Tensor) -> ts.Tensor:
        (y,) = kernel_op(k, *xs, split=("M", "N"))
        return y

    with replaced(executor=executor):
        y = f(*xs)
    assert str(y.type) == "bf16[256@dp, 256@tp]"
    (want,) = evaluate(k, x, w, b)
    np.testing.assert_allclose(y.numpy().astype(np.float32), want.astype(np.float32), 2e-2, 2e-2)
    step = next(s for s in f.schedule.steps if "kernel" in s.description)
    assert step.description == "kernel mlp_up bm=32 bn=64 bk=128 warps=8 stages=3"
    assert "| " + "  tune bm=32 bn=64 bk=128" in f.schedule.text
    assert step.graph.flops == 2 * 256**3 + 4 * 256**2  # two products, their sums, bias, gelu


def test_a_kernel_that_puts_is_a_collective() -> None:
    k = parse(AG_MATMUL)
    mesh = dist.Mesh(("x",), shape={"x": 8})
    a, w = arrays(k)
    xs = (
        ts.tensor(a.reshape(128, 32), mesh=mesh, layout="[128@x, 32]"),
        ts.tensor(w[0], mesh=mesh),
    )

    @ts.jit
    def f(a: ts.Tensor, w: ts.Tensor) -> Any:
        return op.kernel(lambda a, w: kernel_op(k, a, w, axes=("x",))[0])(a, w)

    y = f(*xs).numpy().reshape(8, 128, 24)
    np.testing.assert_allclose(y, np.broadcast_to(a.reshape(128, 32) @ w[0], y.shape), 1e-5, 1e-5)
    (row,) = dist.inspect(f).rows
    assert (row.op, row.algorithm, row.sent_bytes) == ("ag_matmul", "puts", 7 * 16 * 32 * 4)
    with dist.profile() as profile:
        f(*xs)
    assert "kernel ag_matmul bn=12 x" in {r.what for r in profile.rows}


# -- layers ---------------------------------------------------------------------------------------
ROWS = [  # causal, heads, groups, queries, keys
    (True, 4, 4, 64, 64), (True, 4, 2, 131, 131), (False, 6, 2, 64, 96),
    (True, 2, 2, 40, 300), (True, 2, 1, 300, 37),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_attention_is_pytorchs(row: tuple[bool, int, int, int, int], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    causal, heads, groups, seq, keys = row
    rng = np.random.default_rng(0)
    sizes = ((2, heads, seq, 16), (2, groups, keys, 16), (2, groups, keys, 16), (2, heads, seq, 16))
    x = [rng.normal(size=s).astype(np.float32) for s in sizes]
    mesh = dist.Mesh(("dp",), shape={"dp": 2})

    @ts.jit
    def f(q: Any, k: Any, v: Any, c: Any) -> Any:
        y = nn.flash_attention(q, k, v, causal, implementation="kernel")
        return y, *ts.grad((y * c).sum(), [q, k, v])

    cut = [ts.tensor(a, mesh=mesh, layout=f"[2@dp, {', '.join(map(str, a.shape[1:]))}]") for a in x]
    found = f(*(t.to(dtype) for t in cut))
    assert all(t.type.split_axes == ("dp",) for t in found)
    q, k, v, c = (
        torch.tensor(t.to(dtype).numpy().astype(np.float32), requires_grad=True) for t in cut
    )
    seen = torch.ones(seq, keys, dtype=torch.bool)
    seen = seen.tril(keys - seq) if causal else seen
    some = seen.any(1, keepdim=True)
    y = (
        torch.nn.functional.scaled_dot_product_attention(q, k, v, seen | ~some, enable_gqa=True)
        * some
    )
    (y * c).sum().backward()
    near = 2e-4 if dtype == "f32" else 0.1
    for a, b in zip(found, (y, q.grad, k.grad, v.grad), strict=True):
        np.testing.assert_allclose(a.numpy().astype(np.float32), b.detach().numpy(), atol=near)


def test_attention_by_a_kernel_takes_no_mask() -> None:
    q = ts.random.normal((1, 2, 8, 4))
    with pytest.raises(ts.UsageError, match="the kernel takes no bias, mask or cap"):
        nn.flash_attention(q, q, q, bias=ts.zeros((2, 8)), implementation="kernel")


@pytest.mark.parametrize("classes", [96, 1000])
def test_a_head_with_its_loss_is_pytorchs(classes: int, mesh: dist.Mesh) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 24, 32)).astype(np.float32)
    w = (rng.normal(size=(32, classes)) / 5).astype(np.float32)
    y = rng.integers(0, classes, (4, 24)).astype(np.int32)
    y[0, 3] = -100

    @schedule(choices={"head_loss": "kernel"})
    def f(x: Any, w: Any, y: Any) -> Any:
        loss = nn.linear_cross_entropy(x, w, y)
        return loss, *ts.grad(loss, [x, w])

    found = f(ts.tensor(x, mesh=mesh, layout="[4@dp, 24, 32]"), ts.tensor(w), ts.tensor(y))
    a, b = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        (a @ b).reshape(-1, classes), torch.tensor(y.reshape(-1)).long()
    )
    loss.backward()
    for mine, theirs in zip(found, (loss, a.grad, b.grad), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), 1e-4, 1e-6)
    y[1, 1] = classes  # unknown on the host only after it is sent
    assert np.isnan(f(ts.tensor(x), ts.tensor(w), ts.tensor(y) + 0)[0].numpy())


def test_a_head_with_uneven_or_no_rows(mesh: dist.Mesh) -> None:
    x, w = ts.random.normal((13, 8)), ts.random.normal((8, 31))
    y = ts.tensor(np.arange(13, dtype=np.int32))
    f = schedule(choices={"head_loss": "kernel"})(lambda *a: nn.linear_cross_entropy(*a))
    cut = ts.tensor(x.numpy(), mesh=mesh, layout="[13@dp, 8]")
    want = nn.linear_cross_entropy(x, w, y).numpy()
    np.testing.assert_allclose(f(cut, w, y).numpy(), want, 1e-5)
    assert f(x[:0], w, y[:0]).shape == ()


def test_gradients_of_kernels_are_mesh_invariant() -> None:
    mesh = dist.Mesh(("dp",), shape={"dp": 4})
    x = np.random.default_rng(0).normal(size=(4, 2, 16, 8)).astype(np.float32)
    made = []
    for m in (mesh, mesh.fold(onto=2)):
        q = ts.tensor(x, mesh=m, layout="[4@dp, 2, 16, 8]").to(ts.bf16)
        with dist.deterministic(level="mesh_invariant"):
            y = ts.jit(
                lambda q: ts.grad(nn.flash_attention(q, q, q, implementation="kernel").sum(), q)
            )
            made.append(y(q).numpy())
    np.testing.assert_array_equal(*made)


# -- puts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention_by_puts(causal: bool) -> None:
    mesh = dist.Mesh(("cp",), shape={"cp": 4})
    rng = np.random.default_rng(2)
    x = [
        ts.tensor(rng.normal(size=(2, h, 64, 16)).astype(np.float32), mesh=mesh) for h in (4, 2, 2)
    ]
    made = []
    for backend in (None, "nvshmem"):

        @schedule(comm_backend=backend)
        def f(q: Any, k: Any, v: Any) -> Any:
            if causal:
                q, k, v = (nn.zigzag(t, 4, 2) for t in (q, k, v))
            y = nn.ring_attention(q, k, v, "cp", causal)
            return y, *ts.grad((y * ts.cos(y)).sum(), [q, k, v])

        made.append([t.numpy() for t in f(*x)])
    assert any(r.op.startswith("ring_attention") for r in dist.inspect(f).rows)
    for a, b in zip(*made, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


def test_ring_attention_by_puts_beside_other_axes_and_in_loops() -> None:
    mesh = dist.Mesh(("dp", "cp"), shape={"dp": 2, "cp": 4})
    x = np.random.default_rng(0).normal(size=(3, 2, 2, 32, 8)).astype(np.float32)
    q = ts.tensor(x, mesh=mesh, layout="[3, 2@dp, 2, 32@cp, 8]")

    def ring(q: Any) -> Any:
        return ts.vmap(lambda q: nn.ring_attention(q, q, q, "cp"))(q)  # a loop

    found = schedule(comm_backend="nvshmem")(ring)(q)
    np.testing.assert_allclose(found.numpy(), ring(q).numpy(), 1e-4, 1e-5)


def test_collectives_by_puts_over_several_axes(mesh: dist.Mesh) -> None:
    x = ts.tensor(np.arange(128.0).reshape(16, 8), mesh=mesh, layout="[16@(dp,tp), 8]")
    f = schedule(comm_backend="nvshmem")(lambda x: (dist.redistribute(x, "[16, 8]"), x.sum()))
    for a, b in zip(f(x), (x, x.sum()), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("epoch", ["soft", "hard"])
def test_experts_over_nvshmem(epoch: str) -> None:
    mesh = dist.Mesh(("ep",), shape={"ep": 4})
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 12, 16)).astype(np.float32)
    ts.seed(0)
    layer = nn.MoE(16, 32, 8, mesh=mesh)
    found = []
    for kind in ("auto", "nvshmem"):
        how = {"type": kind, "epoch": epoch, "bucket_bytes": 1024}

        @ts.jit
        def f(x: Any, layer: Any) -> Any:
            y = layer(x)
            return y, ts.grad((y * y).sum(), x)

        layer.transport = nn.experts.transport.transport_of(how)
        xs = ts.tensor(x, mesh=mesh, layout="[8@ep, 12, 16]")
        found.append([t.numpy() for t in f(xs, layer)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    used = {n.attrs.get("algorithm") for n, _ in f.graph.collectives() if n.op == "all_to_all"}
    assert used == {"puts_hard" if epoch == "hard" else "puts"}


def test_tiles_of_a_kernel_are_open_choices() -> None:
    k = parse(flash())
    f = schedule(tune=True)(lambda *xs: tuple(kernel_op(k, *xs)))
    f(*map(ts.tensor, arrays(k)))
    assert any("tile" in t.choices for t in f.timings)


def test_a_ring_needs_its_own_mesh() -> None:
    k = parse(ring_attention())
    with pytest.raises(ts.LayoutError, match="it runs on"):
        ts.jit(lambda *xs: tuple(kernel_op(k, *xs, axes=("x",))))(
            *(ts.zeros(s.shape[1:]) for s in arrays(k))
        )
