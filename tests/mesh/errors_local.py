"""Mistakes in the local view. A row: name, error, mistake."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, op
from tests.mesh.errors import MESH, row

# fmt: off

LOCAL = ts.tensor(np.ones((8, 4), np.float32), mesh=MESH, layout="[8@(dp,tp), 4]")


row("an axis that is not of the mesh", ts.LayoutError,
    lambda: op.kernel()(lambda x: dist.all_reduce(x, "pp"))(LOCAL))

row("local axes that are not of the mesh", ts.MeshError,
    lambda: op.kernel(mesh_axes="pp")(lambda x: x)(LOCAL))

row("an unknown reduction", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.all_reduce(x, "dp", op="prod"))(LOCAL))

row("a part that does not divide", ts.ShapeError,
    lambda: op.kernel()(lambda x: dist.reduce_scatter(x, "tp", dim=0))(LOCAL))

row("an exchange that does not divide", ts.ShapeError,
    lambda: op.kernel()(lambda x: dist.all_to_all(x[:, :3], "dp", split_dim=1))(LOCAL))

row("scalars gathered", ts.ShapeError,
    lambda: op.kernel()(lambda x: dist.all_gather(x.sum(), "dp"))(LOCAL))

row("a root that does not exist", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.broadcast(x, "dp", root=2))(LOCAL))

row("hand-overs to nobody", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.permute(x, "dp", [(0, 2)]))(LOCAL))

row("a shift by part of a place", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.shift(x, "dp", by=1.5))(LOCAL))

row("places that are no whole numbers", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.permute(x, "dp", [(0.5, "1")]))(LOCAL))

row("hand-overs that are none", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.permute(x, "dp", 3))(LOCAL))

row("a number that differs returned", ts.ShapeError,
    lambda: op.kernel()(lambda x: x.sum())(LOCAL))

row("a number that differs read", ts.UsageError,
    lambda: op.kernel()(lambda x: x.sum().item())(LOCAL))


def numbered() -> Any:
    def body(w: Any) -> Any:
        rank = int(ts.mesh.current().rank)
        return ts.grad(dist.all_reduce((w * rank).sum(), ("dp", "tp")), w)

    return op.kernel(body)(LOCAL)


row("a gradient through a collective, with the rank as a number", ts.GraphError, numbered)


def uneven() -> Any:
    x = ts.tensor(np.ones(6, np.float32), mesh=MESH, layout="[6@tp]")
    return op.kernel(lambda x: x)(x)


row("blocks that are not equal", ts.LayoutError, uneven)


def two_meshes() -> Any:
    other = dist.Mesh(("dp",), devices=2)
    fn = op.kernel(lambda x, y: x, mesh=MESH)
    return fn(LOCAL, ts.tensor(np.ones(2, np.float32), mesh=other))


row("an argument on another mesh", ts.MeshError, two_meshes)


def no_mesh() -> Any:
    fn = ts.distribute(strategy=dist.strategy("data_parallel") + dist.strategy("tensor_parallel"))
    return fn(lambda x: x)(ts.ones((4,)))


row("several axes and no mesh", ts.MeshError, no_mesh)

row("layouts of no argument", ts.UsageError,
    lambda: ts.distribute(layouts={"y": dist.ShardSpec()})(lambda x: x))

row("a batch of no argument", ts.UsageError,
    lambda: ts.distribute(strategy="data_parallel", batch="y")(lambda x: x))

row("a batch that is no name", ts.UsageError,
    lambda: ts.distribute(strategy="data_parallel", batch=3))

row("a batch without a strategy", ts.UsageError, lambda: ts.distribute(batch="x"))

row("layouts that are none", ts.LayoutError, lambda: ts.distribute(layouts=3))

row("a layout in words", ts.LayoutError, lambda: ts.distribute(layouts={"x": "[8@dp]"}))

row("a strategy that is none", ts.StrategyError, lambda: ts.distribute(strategy="hsdp"))

row("nothing to distribute", ts.UsageError, lambda: ts.distribute(strategy="data_parallel")(3))


def result_layout() -> Any:
    spec = dist.ShardSpec(("row",), ("dp",))
    return ts.distribute(lambda x: x, layouts={"return": spec})(LOCAL)


row("a result's layout that forgets an axis", ts.LayoutError, result_layout)


def a_gradient_laid_out_along_a_local_axis() -> None:
    plan = dist.strategy("zero_redundancy_optimizer")

    @op.kernel(mesh=MESH)
    def step(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return ts.grad(((x @ w) ** 2).mean(), w, layout=plan)

    step(np.ones((8, 4), np.float32), ts.nn.Parameter(4, 4))


row("a gradient laid out along a local axis", ts.LayoutError,
    a_gradient_laid_out_along_a_local_axis)
