"""The local view: the order of blocks, and the numbers of ranks."""

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


# -- many rows at once ----------------------------------------------------------------------------
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
OF_A_ROW: dict[str, Callable[[Any], Any]] = {
    "gathered": lambda r: (dist.all_gather(r, "a") ** 2).sum() * r,
    "summed": lambda r: dist.all_reduce(r @ ts.tensor(W), "a") * r,
    "summed to a number": lambda r: dist.all_reduce(r.sum(), ("a", "b")) * r,
    "summed and cut": lambda r: dist.reduce_scatter(r * r, "a").sum() * r,
    "the largest": lambda r: dist.all_reduce(r, "a", op="max") * r,
    "handed on": lambda r: dist.shift(r, "a") * r,
}
for name, of_a_row in OF_A_ROW.items():

    @row(f"collectives of each row: {name}")
    def _(of_a_row: Any = of_a_row) -> None:
        x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        split = ts.tensor(x, mesh=MESH, layout="[8@(a,b), 4]")
        at_once = kernel(lambda x: ts.vmap(of_a_row)(x), ("a", "b"))(split)
        one_by_one = kernel(lambda x: ts.stack([of_a_row(r) for r in x]), ("a", "b"))(split)
        np.testing.assert_allclose(at_once.numpy(), one_by_one.numpy(), rtol=2e-5, atol=1e-6)


@row("a local body of each row")
def _() -> None:
    twice = op.kernel(lambda y: dist.all_reduce(y * 2, "a"), mesh_axes=("a",))
    x = ts.tensor(ROWS.reshape(4, 2), mesh=MESH, layout="[4, 2@a]")
    for given in (x, dist.redistribute(x, "[4@a, 2]")):
        rows = ts.stack([twice(r) for r in given])
        for run in (ts.vmap(twice), ts.jit(ts.vmap(twice))):
            assert run(given).numpy().tolist() == rows.numpy().tolist()


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


def by_rows(x: Any, mesh: Any) -> Any:
    return ts.vmap(lambda row: row + mesh["b"].rank * 10 + mesh["a"].rank)(x)


# -- places along one of several axes -------------------------------------------------------------
ALONG: dict[str, Callable[[Any], Any]] = {
    "as a tensor": lambda x: x + ts.mesh.current()["b"].rank * 10 + ts.mesh.current()["a"].rank,
    "as a number": lambda x: x + (10 if ts.mesh.current()["b"].rank else 0)
    + (1 if ts.mesh.current()["a"].rank else 0),
    "in another order": lambda x: x + ts.tensor([0.0, 1.0, 10.0, 11.0])[
        int(ts.mesh.current()["b", "a"].rank)
    ],
    "of each row": lambda x: by_rows(x, ts.mesh.current()),
}  # fmt: skip
for name, along in ALONG.items():

    @row(f"a device's place along one of several axes, {name}")
    def _(along: Any = along) -> None:
        x = ts.tensor(np.zeros(4), mesh=MESH, layout="[4@(a,b)]")
        assert kernel(along, ("a", "b"))(x).numpy().tolist() == [0.0, 10.0, 1.0, 11.0]


# -- loops by rank --------------------------------------------------------------------------------
BY_RANK: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "a scan": (
        lambda x: ts.scan(lambda c, r: (c + r, c), ts.zeros(2), x)[1] if rank() == 0 else x,
        [0, 0, 0, 1, 4, 5, 6, 7],
    ),
    "a while loop": (
        lambda x: ts.while_loop(lambda c: c.sum() < 50, lambda c: c * 2 + 1, x) if rank() else x,
        [0, 1, 2, 3, 19, 23, 27, 31],
    ),
    "rows by themselves": (
        lambda x: ts.map_chunks(lambda r: r * 2, x, rows=1) if rank() == 0 else x,
        [0, 2, 4, 6, 4, 5, 6, 7],
    ),
    "in a loop": (
        lambda x: ts.scan(lambda c, r: (c + r, c * (2.0 if rank() == 0 else 3.0)), ts.zeros(2), x)[
            1
        ],
        [0, 0, 0, 2, 0, 0, 12, 15],
    ),
}
for name, (by_rank, want) in BY_RANK.items():

    @row(f"a loop that only some ranks have: {name}")
    def _(by_rank: Any = by_rank, want: Any = want) -> None:
        x = ts.tensor(ROWS.reshape(4, 2), mesh=MESH, layout="[4@a, 2]")
        assert kernel(by_rank)(x).numpy().ravel().tolist() == want


@row("random numbers that only some ranks draw", error=ts.UsageError,
     says="random numbers are drawn, by some ranks only")  # fmt: skip
def _() -> None:
    kernel(lambda x: ts.nn.dropout(x, 0.5) if rank() == 0 else x)(
        ts.tensor(ROWS, mesh=MESH, layout="[8@a]")
    )


# -- what a body leaves outside -------------------------------------------------------------------
@row("a captured dict that gets what each device has", error=ts.ShapeError,
     says="is set in a local body to what differs between devices")  # fmt: skip
def _() -> None:
    seen = {"n": ts.tensor(0.0)}

    def body(x: Any) -> Any:
        seen["n"] = seen["n"] + x.sum()
        return x

    kernel(body)(ts.tensor(ROWS, mesh=MESH, layout="[8@a]"))


@row("a captured dict that gets a sum over the devices")
def _() -> None:
    seen = {"n": ts.tensor(0.0)}

    def body(x: Any) -> Any:
        seen["n"] = seen["n"] + dist.all_reduce(x.sum(), "a")
        return x * 2

    for batch in (None, "x"):
        run = ts.distribute(body, strategy="data_parallel", mesh_axes="a", mesh=MESH, batch=batch)
        for f in (run, ts.jit(run)):
            f(ROWS)
    assert seen["n"].item() == 4 * ROWS.sum()


@row("a gradient outside of compiled functions through a local body", error=ts.UsageError,
     says="no gradient goes through it")  # fmt: skip
def _() -> None:
    thrice = op.kernel(lambda x: x * 3, mesh_axes=("a",))
    x = ts.tensor(ROWS, mesh=MESH, layout="[8@a]")

    def loss(x: Any) -> Any:
        return thrice(x).sum() + (x * x).sum()

    grad = ts.jit(lambda x: ts.value_and_grad(loss)(x)[1])(x)
    assert grad.numpy().tolist() == (3 + 2 * ROWS).tolist()
    ts.value_and_grad(loss)(x)


# -- what a body takes from outside ---------------------------------------------------------------
MOVED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x, "a"),
    "all_gather": lambda x: dist.all_gather(x, "a"),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, "a"),
    "all_to_all": lambda x: dist.all_to_all(x, "a", 0, 1),
    "shift": lambda x: dist.shift(x, "a"),
    "broadcast": lambda x: dist.broadcast(x, "a", root=1),
}
for name, move in MOVED.items():

    @row(f"a split tensor from outside in a collective: {name}")
    def _(move: Any = move) -> None:
        x = ts.tensor(ROWS.reshape(4, 2), mesh=MESH, layout="[4@a, 2]")
        want = kernel(move)(x).numpy().tolist()
        assert kernel(lambda y: move(x))(x).numpy().tolist() == want
        made = ts.jit(lambda h: op.kernel(lambda y: move(h), mesh_axes=("a",))(x))
        assert made(x).numpy().tolist() == want
