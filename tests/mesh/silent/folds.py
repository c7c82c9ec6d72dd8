"""Messages between devices on folds and along any axes: unchanged, and to the right device."""

from __future__ import annotations

import numpy as np

import tessera as ts
from tessera import dist, op, schedule
from tests.mesh.silent.rows import row


@row("hands on negative zeros, on a folded mesh")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=range(4)).fold(onto=2)
    x = ts.tensor(np.full(4, -0.0, np.float32), mesh=mesh, layout="[4@dp]")
    for body in (
        lambda x: dist.shift(x, "dp"),
        lambda x: dist.permute(x, "dp", [(0, 3), (1, 2), (2, 0), (3, 1)]),
    ):
        assert np.signbit(ts.jit(op.kernel(body))(x).numpy()).all()


@row("names the axes of a collective in another order than the mesh does")
def _() -> None:
    mesh = dist.Mesh.parse("dp=2 tp=4")
    x = ts.tensor(np.arange(8.0), mesh=mesh, layout="[8@(dp,tp)]")
    # Along (tp, dp), index k is the device tp = k // 2, dp = k % 2, which holds 4 * dp + tp.
    held = [4 * (k % 2) + k // 2 for k in range(8)]

    @op.kernel
    def moved(x: ts.Tensor) -> tuple[ts.Tensor, ...]:
        axes = ("tp", "dp")
        shifted = dist.permute(x, axes, [(k, (k + 1) % 8) for k in range(8)])
        return shifted, dist.broadcast(x, axes, root=1) + 0.0 * x

    shifted, same = ts.jit(moved)(x)
    want = np.zeros(8)
    for k in range(8):
        want[held[(k + 1) % 8]] = held[k]
    assert shifted.numpy().tolist() == want.tolist() and same.numpy().tolist() == [4.0] * 8


@row("names those axes for a gather by a table")
def _() -> None:
    mesh = dist.Mesh.parse("dp=2 tp=4")
    x = ts.tensor(np.arange(8.0), mesh=mesh, layout="[8@(tp,dp)]")

    @schedule(algorithm="ring")
    def whole(x: ts.Tensor) -> ts.Tensor:
        return dist.redistribute(x, "[8]")

    assert whole(x).numpy().tolist() == list(range(8))


@row("a tensor moves between a mesh and folds of it")
def _() -> None:
    mesh = dist.Mesh.parse("dp=2 tp=4")
    value = np.arange(96, dtype=np.float32).reshape(8, 12)
    meshes = [mesh, *(mesh.fold(onto=n) for n in (1, 2, 4)), dist.Mesh.parse("tp=4")]
    for here in meshes:
        t = ts.tensor(value, mesh=here, layout="[8@tp, 12]")
        for there in meshes:
            np.testing.assert_array_equal(dist.place(t, mesh=there).numpy(), value)
