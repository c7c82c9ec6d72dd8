"""Mistakes with meshes, layouts and strategies. A row: name, error, mistake."""

from __future__ import annotations

from typing import Any

import tessera as ts
from tessera import dist, nn
from tests.mesh.errors import MESH, ONES, OTHER, X, row, split

# fmt: off

class Table:
    """A table like pandas': it has a shape, but no buffer."""

    shape = (8, 2)


# -- meshes and layouts ----------------------------------------------------------------------------
row("an axis that is not there", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@pp, 4]"))
row("an axis used twice", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@dp, 4@dp]"))
row("an axis without a mesh", ts.LayoutError, lambda: ts.tensor(ONES, layout="[8@dp, 4]"))
row("a layout of another shape", ts.ShapeError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@dp, 5]"))
row("a layout of each device's own", ts.LayoutError,
    lambda: dist.redistribute(ts.tensor(ONES, mesh=MESH), "[8, 4] varying dp"))
row("a layout that is no text", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@dp; 4]"))
row("a layout without brackets", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="8@dp, 4"))
row("a layout with another dtype", ts.DTypeError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="bf16[8@dp, 4]"))
row("a layout that is a number", ts.LayoutError, lambda: ts.tensor(ONES, mesh=MESH, layout=3))
row("a shard spec out of step", ts.LayoutError,
    lambda: dist.tensor((8, 4), dist.ShardSpec(("row", "col"), ("tp",)), MESH))
row("a shard spec of an unknown role", ts.LayoutError,
    lambda: dist.tensor((8, 4), dist.ShardSpec(("rows",), ("tp",)), MESH))
row("a shard spec of a dim too many", ts.LayoutError,
    lambda: dist.tensor((8,), dist.ShardSpec((1,), ("tp",)), MESH))
row("a shard spec of one dim twice", ts.LayoutError,
    lambda: dist.tensor((8,), dist.ShardSpec((0, 0), ("dp", "tp")), MESH))
row("tensors on two meshes", ts.MeshError,
    lambda: split("[8@dp, 4]") + split("[8@dp, 4]", mesh=OTHER))
row("redistributed onto another mesh", ts.MeshError,
    lambda: dist.redistribute(split(), "[8@dp, 4]", OTHER))
row("a reduction over an unknown axis", ts.LayoutError, lambda: dist.all_reduce(split(), "pp"))
row("a reduction of another kind", ts.LayoutError,
    lambda: dist.all_reduce(ts.sum(split("[8@dp, 4]"), 0), op="max"))
row("a mesh in words", ts.MeshError, lambda: ts.tensor(1.0, mesh="dp=2"))
row("a shape that does not hold the devices", ts.MeshError,
    lambda: dist.Mesh(("dp", "tp"), devices=8, shape=(2, 3)))
row("a device named twice", ts.MeshError, lambda: dist.Mesh(("dp",), devices=[0, 1, 1]))
row("a device below zero", ts.MeshError, lambda: dist.Mesh(("dp",), devices=[-1, 0]))
row("a part of a mesh by an unknown axis", ts.MeshError, lambda: MESH["pp"])
row("a slice outside the mesh", ts.MeshError, lambda: MESH.slice(tp=4))
row("no mesh is open", ts.MeshError, lambda: ts.mesh.current())
row("a mesh larger than the machine", ts.BackendError,
    lambda: ts.tensor(1.0, mesh=dist.Mesh(("dp",), devices=4096)).numpy())
row("a device out of range", ts.BackendError,
    lambda: X + ts.tensor(X, mesh=dist.Mesh(("dp",), devices=[0, 99]), layout="[2@dp, 3]"))

def a_collective_under_strict() -> Any:
    with ts.strict():
        return ts.jit(nn.softmax)(split("[8, 4@tp]"))


row("a collective under strict", ts.LayoutError, a_collective_under_strict)

# -- strategies ------------------------------------------------------------------------------------
row("an unknown strategy", ts.StrategyError, lambda: dist.strategy("fully_sharded"))
row("an unknown stage", ts.StrategyError,
    lambda: dist.strategy("zero_redundancy_optimizer", stage=4))
row("a stage of another strategy", ts.StrategyError,
    lambda: dist.strategy("data_parallel", stage=1))
row("a strategy over an unknown axis", ts.StrategyError,
    lambda: dist.place({"w": X}, dist.strategy("tensor_parallel", "ep"), MESH))
row("a strategy over two axes at once", ts.UsageError,
    lambda: dist.strategy("data_parallel", axis=["dp", "tp"]))
class Halves(dist.AxisStrategy):
    def lay_weight(self, name, t):
        return t.with_dtype(ts.bf16)


row("a batch over an unknown axis", ts.StrategyError,
    lambda: dist.place(X, dist.strategy("data_parallel", "ep"), MESH, kind="batch"))
row("an own strategy over an unknown axis", ts.StrategyError,
    lambda: dist.place({"w": X}, Halves("ep"), MESH))
row("an own strategy that gives another type", ts.StrategyError,
    lambda: dist.place({"narrow": X}, Halves("tp"), MESH))
row("a rule that is no pattern", ts.StrategyError,
    lambda: dist.strategy("tensor_parallel", rules=[("(", 0)]))
row("a rule whose dim is not there", ts.StrategyError,
    lambda: dist.place({"w": X}, dist.strategy("tensor_parallel", rules=[("w", 2)]), MESH))
row("placed without a mesh", ts.MeshError,
    lambda: dist.place({"w": X}, dist.strategy("data_parallel")))
row("the names and weights of a model, placed one by one", ts.UsageError,
    lambda: dist.place(ts.nn.Linear(2, 3).named_parameters(), "data_parallel", MESH))
row("a batch of lists", ts.UsageError,
    lambda: dist.place([[1, 2], [3]], "data_parallel", MESH, kind="batch"))
row("a batch with a table of another library", ts.UsageError,
    lambda: dist.place({"x": ONES, "n": 3, "y": Table()}, "data_parallel", MESH, kind="batch"))
row("placed by something else", ts.StrategyError,
    lambda: dist.place({"w": X}, "tensor", MESH))
