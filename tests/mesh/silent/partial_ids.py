"""Ids that are partial sums: the same rows as with complete sums."""

from __future__ import annotations

import numpy as np

import tessera as ts
from tessera import dist, nn
from tests.mesh.silent.rows import row

TABLE = np.arange(40, dtype=np.float32).reshape(8, 5)
PARTS = np.array([[1, 0, 2], [2, 1, 0], [0, 3, 1], [3, 2, 2]], np.int32)  # sums: 6, 6, 5


def mesh() -> dist.Mesh:
    return dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


def ids() -> ts.Tensor:
    """Ids as a partial sum of a split dim."""
    found = ts.sum(ts.tensor(PARTS, mesh=mesh(), layout="[4@tp, 3]"), 0)
    assert found.type.partial == (("tp", "sum"),)
    return found


WHOLE = PARTS.sum(0)


@row("rows of a table are taken by ids that are a sum over a split dim")
def taken() -> None:
    assert np.array_equal(ts.take(ts.tensor(TABLE), ids()).numpy(), TABLE[WHOLE])
    assert np.array_equal(nn.embedding(ids(), ts.tensor(TABLE)).numpy(), TABLE[WHOLE])
    assert np.array_equal(ts.tensor(TABLE)[ids()].numpy(), TABLE[WHOLE])


@row("elements are gathered by ids that are a sum over a split dim")
def gathered() -> None:
    x = np.array([[10.0, 11, 12, 13, 14, 15, 16, 17]], np.float32)
    m = ts.tensor(np.array([[1, 0, 2, 1]], np.int32), mesh=mesh(), layout="[1, 4@tp]")
    assert ts.gather(ts.tensor(x), ts.sum(m, 1, True), 1).item() == 14.0


@row("values are added at ids that are a sum over a split dim, and the gradient goes back there")
def added() -> None:
    u = ts.tensor(np.array([1.0, 2.0, 3.0], np.float32))
    made = ts.scatter_add(ts.zeros((8,)), ids(), u, 0).numpy()
    assert made.tolist() == [0, 0, 0, 0, 0, 3, 3, 0]
    table = ts.tensor(TABLE)
    g = ts.grad(ts.sum(nn.embedding(ids(), table)), [table])[0].numpy()
    assert g[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 2, 0]
