"""Mistakes in the local view. A row: name, error, mistake, message."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, op
from tests.mesh.errors import MESH, row

# fmt: off

LOCAL = ts.tensor(np.ones((8, 4), np.float32), mesh=MESH, layout="[8@(dp,tp), 4]")


row("an axis that is not of the mesh", ts.LayoutError,
    lambda: op.kernel()(lambda x: dist.all_reduce(x, "pp"))(LOCAL), """
layout: axis 'pp' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : name one of dp, tp
""")

row("local axes that are not of the mesh", ts.MeshError,
    lambda: op.kernel(mesh_axes="pp")(lambda x: x)(LOCAL), """
<lambda>: axis 'pp' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : name axes of the mesh: mesh_axes=[...]
""")

row("an unknown reduction", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.all_reduce(x, "dp", op="prod"))(LOCAL), """
all_reduce: op cannot be 'prod'
  at  : AT
  fix : use sum, max, min, mean
""")

row("a part that does not divide", ts.ShapeError,
    lambda: op.kernel()(lambda x: dist.reduce_scatter(x, "tp", dim=0))(LOCAL), """
reduce_scatter: dim 0 of 1 does not divide by 4 devices
  x   : f32[1, 4] varying dp,tp
  at  : AT
  fix : pad it, or choose another dim
""")

row("an exchange that does not divide", ts.ShapeError,
    lambda: op.kernel()(lambda x: dist.all_to_all(x[:, :3], "dp", split_dim=1))(LOCAL), """
all_to_all: dim 1 of 3 does not divide by 2 devices
  x   : f32[1, 3] varying dp,tp
  at  : AT
  fix : pad it, or choose another dim
""")

row("scalars gathered", ts.ShapeError,
    lambda: op.kernel()(lambda x: dist.all_gather(x.sum(), "dp"))(LOCAL), """
all_gather: a scalar has no dim to join along
  x   : f32[] varying dp,tp
  at  : AT
  fix : reshape it to (1,) first
""")

row("a root that does not exist", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.broadcast(x, "dp", root=2))(LOCAL), """
broadcast: root cannot be 2
  at  : AT
  fix : give a whole number from 0 to 1
""")

row("hand-overs to nobody", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.permute(x, "dp", [(0, 2)]))(LOCAL), """
permute: [(0, 2)] are no hand-overs between 2 devices
  at  : AT
  fix : name places from 0 to 1, each at most once as giver and as taker
""")

row("a shift by part of a place", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.shift(x, "dp", by=1.5))(LOCAL), """
shift: by cannot be 1.5
  at  : AT
  fix : give a whole number
""")

row("places that are no whole numbers", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.permute(x, "dp", [(0.5, "1")]))(LOCAL), """
permute: pairs cannot be [(0.5, '1')]
  at  : AT
  fix : give (from, to) pairs, e.g. [(0, 1), (1, 0)]
""")

row("hand-overs that are none", ts.UsageError,
    lambda: op.kernel()(lambda x: dist.permute(x, "dp", 3))(LOCAL), """
permute: pairs cannot be 3
  at  : AT
  fix : give (from, to) pairs, e.g. [(0, 1), (1, 0)]
""")

row("a number that differs returned", ts.ShapeError,
    lambda: op.kernel()(lambda x: x.sum())(LOCAL), """
<lambda>: it returns a number that differs between devices
  result  : f32[] varying dp,tp
  made_at : AT
  at      : AT
  fix     : combine it first: dist.all_reduce(x, axis), or reshape it to (1,)
""")

row("a number that differs read", ts.UsageError,
    lambda: op.kernel()(lambda x: x.sum().item())(LOCAL), """
a value that differs between devices is read
  tensor  : f32[] varying dp,tp
  made_at : AT
  at      : AT
  fix     : combine it first: dist.all_reduce(x, axis), or choose with ts.where
""")


def numbered() -> Any:
    def body(w: Any) -> Any:
        rank = int(ts.mesh.current().rank)
        return ts.grad(dist.all_reduce((w * rank).sum(), ("dp", "tp")), w)

    return op.kernel(body)(LOCAL)


row("a gradient through a collective, with the rank as a number", ts.GraphError, numbered, """
grad: no gradient goes back through all_reduce in a body that reads its rank as a Python number
  loss : f32[]
  at   : AT
  fix  : leave the rank a tensor: w[rank], x * rank, and for an if ts.where(rank == 0, x, y)
""")


def uneven() -> Any:
    x = ts.tensor(np.ones(6, np.float32), mesh=MESH, layout="[6@tp]")
    return op.kernel(lambda x: x)(x)


row("blocks that are not equal", ts.LayoutError, uneven, """
local view: a dim does not divide over tp
  tensor : f32[6@tp]
  at     : AT
  fix    : pad it to a multiple, or pass the tensor replicated
""")


def two_meshes() -> Any:
    other = dist.Mesh(("dp",), devices=2)
    fn = op.kernel(lambda x, y: x, mesh=MESH)
    return fn(LOCAL, ts.tensor(np.ones(2, np.float32), mesh=other))


row("an argument on another mesh", ts.MeshError, two_meshes, """
<lambda>: argument 'y' lies on another mesh
  argument : f32[2] on dp=2
  here     : dp=2 tp=4
  at       : AT
  fix      : put all arguments on one mesh
""")


def no_mesh() -> Any:
    fn = ts.distribute(strategy=dist.strategy("data_parallel") + dist.strategy("tensor_parallel"))
    return fn(lambda x: x)(ts.ones((4,)))


row("several axes and no mesh", ts.MeshError, no_mesh, """
<lambda>: there is no mesh to distribute over
  axes : dp, tp
  at   : AT
  fix  : pass mesh=..., place a tensor on one, or say: with mesh:
""")

row("layouts of no argument", ts.UsageError,
    lambda: ts.distribute(layouts={"y": dist.ShardSpec()})(lambda x: x), """
distribute: layouts names 'y', which <lambda> does not take
  arguments : x
  at        : AT
  fix       : name arguments, or "return"
""")

row("a batch of no argument", ts.UsageError,
    lambda: ts.distribute(strategy="data_parallel", batch="y")(lambda x: x), """
distribute: batch names 'y', which <lambda> does not take
  arguments : x
  at        : AT
  fix       : name arguments
""")

row("a batch that is no name", ts.UsageError,
    lambda: ts.distribute(strategy="data_parallel", batch=3), """
distribute: batch cannot be 3
  at  : AT
  fix : name arguments, such as batch="images"
""")

row("a batch without a strategy", ts.UsageError, lambda: ts.distribute(batch="x"), """
distribute: batch= is cut by a strategy, and there is none
  at  : AT
  fix : give strategy="data_parallel" too, or layouts=
""")

row("layouts that are none", ts.LayoutError, lambda: ts.distribute(layouts=3), """
distribute: layouts cannot be 3
  at  : AT
  fix : give {"x": dist.ShardSpec(("row",), ("dp",))}
""")

row("a layout in words", ts.LayoutError, lambda: ts.distribute(layouts={"x": "[8@dp]"}), """
distribute: layouts['x'] cannot be '[8@dp]'
  at  : AT
  fix : give {"x": dist.ShardSpec(("row",), ("dp",))}
""")

row("a strategy that is none", ts.StrategyError, lambda: ts.distribute(strategy="fsdp"), """
strategy: the kind cannot be 'fsdp'
  at  : AT
  fix : use data_parallel, tensor_parallel, zero_redundancy_optimizer, expert_parallel
""")

row("nothing to distribute", ts.UsageError, lambda: ts.distribute(strategy="data_parallel")(3), """
distribute: what is distributed cannot be 3
  at  : AT
  fix : give a function; the strategy comes by name: strategy="data_parallel"
""")


def result_layout() -> Any:
    spec = dist.ShardSpec(("row",), ("dp",))
    return ts.distribute(lambda x: x, layouts={"return": spec})(LOCAL)


row("a result's layout that forgets an axis", ts.LayoutError, result_layout, """
<lambda>: the layout of its result does not say where 'tp' goes
  result : f32[1, 4] varying dp,tp
  at     : AT
  fix    : name 'tp' in the ShardSpec, or combine the value over it first
""")


def a_gradient_laid_out_along_a_local_axis() -> None:
    plan = dist.strategy("zero_redundancy_optimizer")

    @op.kernel(mesh=MESH)
    def step(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return ts.grad(((x @ w) ** 2).mean(), w, layout=plan)

    step(np.ones((8, 4), np.float32), ts.nn.Parameter(4, 4))


row("a gradient laid out along a local axis", ts.LayoutError,
    a_gradient_laid_out_along_a_local_axis, """
grad: 'dp' is local here, where a gradient is like its weight's block
  weight : f32[4, 4]
  layout : f32[4@dp, 4]
  at     : AT
  fix    : leave out layout=, and lay out what the body returns
""")
