"""Rows of the option table: layouts, strategies, the local view and its collectives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core import limits
from tessera.core.context import settings
from tests.core.option_rows import MESH, OTHER, SQUARE, A, row, sharded
from tests.core.option_rows_models import said
from tests.core.option_rows_programs import traced

# -- collectives in the local view -----------------------------------------------------------------
BLOCKS = ts.tensor(np.ones((64, 8)), mesh=MESH, layout="[64@(dp,tp), 8]").type


def local(collective: Callable[..., Any]) -> Callable[..., str]:
    """Returns a function that gives the program of a local body with one collective."""
    return lambda **k: traced(op.kernel(lambda x: collective(x, **k)), BLOCKS)


TP = {"axis": "tp"}
row("tessera.dist.all_reduce", local(dist.all_reduce), TP, axis="dp", op="max")
row("tessera.dist.reduce_scatter", local(dist.reduce_scatter), TP, dim=1, op="mean")
row("tessera.dist.all_gather of a dim", local(dist.all_gather), TP, dim=1)
row("tessera.dist.all_to_all", local(dist.all_to_all), TP, split_dim=1, concat_dim=1)
row("tessera.dist.broadcast", local(dist.broadcast), TP, root=1)
row("tessera.dist.gather", local(dist.gather), TP, dim=1, root=1)
row("tessera.dist.scatter", local(dist.scatter), TP, dim=1, root=1)
row("tessera.dist.shard", local(dist.shard), TP, dim=1)
row("tessera.dist.shift", local(dist.shift), TP, by=2)


def sent(to: str = "", at: str = "") -> str:
    """The sum that rank 1 receives of two messages from rank 0, with the names `to` and "other"."""

    def body(x: Any) -> Any:
        rank = ts.mesh.current().rank
        if rank == 0:
            dist.send(x * 2.0, 1, **({"name": to} if to else {}))
            dist.send(x * 3.0, 1, name="other")
        if rank == 1:
            first = dist.recv(0, **({"name": at} if at else {}))
            return first + dist.recv(0, "" if at else "other")
        return x

    return said(lambda: traced(op.kernel(body), BLOCKS))


row("tessera.dist.send", lambda **k: sent(to=k.get("name", "")), name="mine")
row("tessera.dist.recv", lambda **k: sent(at=k.get("name", "")), name="other")

# -- layouts and strategies ------------------------------------------------------------------------
row("tessera.dist.redistribute onto a mesh", lambda **k: dist.redistribute(ts.tensor(A), **k),
    {"layout": "[3, 4]"}, mesh=MESH)  # fmt: skip
row("tessera.dist.ShardSpec", lambda **k: said(lambda: dist.ShardSpec(**k).type(
    (8, 8), ts.f32, MESH)), {"partition": ("row",), "mesh_axes": ("dp",)},
    partition=("col",), mesh_axes=("tp",))  # fmt: skip


def placed(**k: Any) -> Any:
    made = dist.place({"up": np.ones((8, 8), np.float32), "t": ts.tensor(SQUARE)}, **k)
    return {n: x if isinstance(x, ts.Tensor) else type(x) for n, x in made.items()}


ZERO = dist.strategy("zero_redundancy_optimizer", stage=3)
row("tessera.dist.place", placed, {"mesh": MESH}, mesh=OTHER, strategy=ZERO, kind="batch")
row("tessera.dist.strategy by rules",
    lambda **k: dist.strategy("tensor_parallel", **k).weight("own", sharded("[8, 8]").type),
    rules=[("own$", 0)])  # fmt: skip
row("tessera.from_jax", lambda **k: ts.from_jax(A, **k), on=MESH)


# -- functions of blocks ---------------------------------------------------------------------------
def step(x: Any, w: Any) -> Any:
    return dist.all_reduce(x @ w)


def distributed(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """The program of a local function whose decorator is used with or without options."""

    def run(fn: Any = None, **k: Any) -> str:
        with MESH:
            made = decorate(fn) if fn is not None else decorate(**k)(step)
        return said(lambda: traced(made, np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)))

    return run


SPECS = {"x": dist.ShardSpec(("row",), ("dp",)), "return": dist.ShardSpec(("row",), ("dp",))}
row("tessera.distribute", distributed(ts.distribute), {"mesh": MESH}, strategy="data_parallel",
    mesh=OTHER, mesh_axes=("dp",), layouts=SPECS, fn=lambda x, w: x + w)  # fmt: skip
row("tessera.distribute of batches", distributed(ts.distribute),
    {"mesh": MESH, "strategy": "data_parallel"}, batch="w")  # fmt: skip
row("tessera.op.kernel", distributed(op.kernel), {"mesh": MESH}, mesh=OTHER, mesh_axes=("dp",),
    fn=lambda x, w: x + w)  # fmt: skip


# -- settings --------------------------------------------------------------------------------------
def deterministically(**k: Any) -> str:
    with dist.deterministic(**k):
        return str(settings().program)


def set_and_shown(**k: Any) -> str:
    with dist.deterministic():
        dist.set_deterministic(**k)
        return str(settings().program)


ORDERS: dict[str, Any] = {"level": "run_to_run", "reduce_tree": "ring"}
row("tessera.dist.deterministic", deterministically, **ORDERS)
row("tessera.dist.set_deterministic", set_and_shown, **ORDERS, on=False)


def remembered(**k: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_set", [])
        dist.set_collective_timeout(7.0, **k)
        return str(limits.limits())


row("tessera.dist.set_collective_timeout", remembered, records=3)


# -- a user's own op -------------------------------------------------------------------------------
def own(index: str = "b d -> b", **k: Any) -> Any:
    """The texts of a user's op: its graph, its gradient's graph and its report."""
    made = ts.op(index=index, **k)(lambda x, **sizes: x.sum(1))
    g = graph.trace(lambda x: made(x), sharded("[8@dp, 8@tp]").type)
    slope = graph.trace(lambda x: ts.grad(made(x).sum(), x), sharded("[8@dp, 8@tp]").type)
    run = ts.jit(lambda x: made(x))
    s = run.plan(sharded("[8@dp, 8@tp]"))
    report = str(dist.inspect(run)).replace(s.hash, "")
    # The names of ops made from equal functions are numbered.
    return [re.sub(r'(name="\w+)\.\d+', r"\1", text) for text in (g.text, slope.text, report)]


row(
    "tessera.op.from_jax",
    own,
    {"name": "own"},
    dtype=ts.bf16,
    reduces="sum",
    whole="b",
    flops=7,
    name="mine",
)
row("tessera.op.from_jax of sizes", own, {"index": "b d -> b e", "sizes": {"e": 3}, "name": "own"},
    sizes={"e": 5})  # fmt: skip

# -- looking ---------------------------------------------------------------------------------------
RUN = [{"step": 1, "loss": 1.0, "step_s": 1.0}], [{"step": 1, "loss": 1.001, "step_s": 2.0}]
row("tessera.debug.compare", lambda **k: ts.debug.compare(*RUN, **k), rtol=1.0, atol=1.0,
    ignore=())  # fmt: skip
NEAR = [{"step": 1, "loss": 1.0}], [{"step": 1, "loss": 1.0 + 1e-7}]
row("tessera.debug.compare bit by bit", lambda **k: ts.debug.compare(*NEAR, **k), bitwise=True)


def finite(**k: Any) -> str:
    return said(lambda: ts.debug.check_finite(ts.tensor([np.inf]), **k))


row("tessera.debug.check_finite", finite, name="loss")
