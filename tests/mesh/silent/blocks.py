"""Do the blocks of a local body keep their order, and its ranks their numbers?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, op
from tests.mesh.silent.rows import row

MESH = dist.Mesh.parse("a=2,b=2")
ROWS = np.arange(8, dtype=np.float32)


def kernel(body: Callable[..., Any], axes: tuple[str, ...] = ("a",)) -> Any:
    return ts.jit(op.kernel(body, mesh_axes=axes))


def rank() -> Any:
    return ts.mesh.current().rank


# -- the order of rows ----------------------------------------------------------------------------
@row("rows that are split in another order than that of the mesh's axes")
def _() -> None:
    for layout in ("[8@(a,b)]", "[8@(b,a)]", "[(2·4@a)]"):
        x = ts.tensor(ROWS, mesh=MESH, layout=layout)
        for axes in (("a", "b"), ("a",), ("b",)):
            if not {*axes} & {*x.type.split_axes}:
                continue
            for body in (
                op.kernel(lambda x: x * 2, mesh_axes=axes),
                ts.distribute(lambda x: x * 2, strategy="data_parallel", mesh_axes=axes, batch="x"),
            ):
                assert ts.jit(body)(x).numpy().tolist() == (2 * ROWS).tolist(), (layout, axes)


@row("rows of two dims that become one on the way to a local body")
def _() -> None:
    x = ts.tensor(ROWS.reshape(4, 2), mesh=MESH, layout="[4@b, 2@a]")
    body = ts.distribute(
        lambda x: {"twice": x * 2}, strategy="data_parallel", mesh_axes=("a", "b"), batch="x"
    )
    got = ts.jit(lambda x: body(x.reshape(8)))(x)["twice"]
    assert got.numpy().tolist() == (2 * ROWS).tolist()


@row("fewer rows than those that are split in another order", error=ts.LayoutError,
     says="in which order do the devices' blocks of a result follow each other?")  # fmt: skip
def _() -> None:
    kernel(lambda x: x.sum().reshape(1), ("a", "b"))(ts.tensor(ROWS, mesh=MESH, layout="[8@(b,a)]"))


@row("a body over an axis that the body around it is not over", error=ts.UsageError,
     says="it is local along 'b', and the body that calls it is not")  # fmt: skip
def _() -> None:
    inner = op.kernel(lambda y: dist.all_reduce(y, "b"), mesh_axes=("b",))
    x = ts.tensor(ROWS, mesh=MESH, layout="[8@a]")
    assert ts.jit(inner)(x).numpy().tolist() == (2 * ROWS).tolist()
    kernel(lambda x: inner(x) * 1.0)(x)


# -- ranks as keys --------------------------------------------------------------------------------
BY_KEY: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda x: x * {0: 1.0, 1: 2.0}[rank()],
    "a dict, or else": lambda x: x * {0: 1.0, 1: 2.0}.get(rank(), 7.0),
    "a set": lambda x: x * 2 if rank() in {1} else x,
}
for name, body in BY_KEY.items():

    @row(f"a rank that is looked up: {name}")
    def _(body: Any = body) -> None:
        x = ts.tensor(np.ones(4), mesh=MESH, layout="[4@a]")
        assert kernel(body)(x).numpy().tolist() == [1.0, 1.0, 2.0, 2.0]
