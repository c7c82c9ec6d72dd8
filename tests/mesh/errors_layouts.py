"""Mistakes with meshes, layouts and strategies. A row: name, error, mistake, message."""

from __future__ import annotations

from typing import Any

import tessera as ts
from tessera import dist, nn
from tests.mesh.errors import MESH, ONES, OTHER, X, row, split

# fmt: off

class Table:
    """As pandas has one: it has a shape and lends no memory."""

    shape = (8, 2)


# -- meshes and layouts ----------------------------------------------------------------------------
row("an axis that is not there", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@pp, 4]"), """
layout: axis 'pp' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : name one of dp, tp
""")
row("an axis used twice", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@dp, 4@dp]"), """
layout: axis 'dp' is used twice in one type
  type : f32[8@dp, 4@dp]
  at   : AT
  fix  : an axis splits one dim, or is partial, but not both
""")
row("an axis without a mesh", ts.LayoutError, lambda: ts.tensor(ONES, layout="[8@dp, 4]"), """
layout: axis 'dp' is named but there is no mesh
  at  : AT
  fix : pass mesh=..., or open one: with dist.Mesh(...):
""")
row("a layout of another shape", ts.ShapeError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@dp, 5]"), """
layout: [8@dp, 5] is for shape (8, 5), the tensor has (8, 4)
  at  : AT
  fix : write the tensor's own sizes
""")
row("a layout of each device's own", ts.LayoutError,
    lambda: dist.redistribute(ts.tensor(ONES, mesh=MESH), "[8, 4] varying dp"), """
layout: [8, 4] varying dp has a value for each device along dp
  at  : AT
  fix : give these values a dim and split that; only local bodies have what varies
""")
row("a layout that is no text", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="[8@dp; 4]"), """
layout: '8@dp; 4' is not a dim
  at  : AT
  fix : write 8, 8@dp, 256@(y,x) or (3·16@tp·64)
""")
row("a layout without brackets", ts.LayoutError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="8@dp, 4"), """
layout: '8@dp, 4' has no brackets
  at  : AT
  fix : write a text such as "[8@dp, 4096]"
""")
row("a layout with another dtype", ts.DTypeError,
    lambda: ts.tensor(ONES, mesh=MESH, layout="bf16[8@dp, 4]"), """
layout: 'bf16[8@dp, 4]' names bf16, the tensor is of f32
  at  : AT
  fix : leave the dtype out of the layout; for bf16 give dtype=, or cast
""")
row("a layout that is a number", ts.LayoutError, lambda: ts.tensor(ONES, mesh=MESH, layout=3), """
layout: 3 is no layout
  at  : AT
  fix : use dist.ShardSpec(...), or a text such as "[8@dp, 4096]"
""")
row("a shard spec out of step", ts.LayoutError,
    lambda: dist.tensor((8, 4), dist.ShardSpec(("row", "col"), ("tp",)), MESH), """
ShardSpec: 2 entries in partition, 1 in mesh_axes
  partition : ('row', 'col')
  mesh_axes : ('tp',)
  at        : AT
  fix       : each entry pairs with the mesh axis at the same place
""")
row("a shard spec of an unknown role", ts.LayoutError,
    lambda: dist.tensor((8, 4), dist.ShardSpec(("rows",), ("tp",)), MESH), """
ShardSpec: 'rows' names no dim
  partition : ('rows',)
  at        : AT
  fix       : use row, col, batch, seq, hidden, vocab, experts, heads or a number
""")
row("a shard spec of a dim too many", ts.LayoutError,
    lambda: dist.tensor((8,), dist.ShardSpec((1,), ("tp",)), MESH), """
ShardSpec: 1 is dim 1, but the tensor has 1 dims
  partition : (1,)
  at        : AT
  fix       : name a dim that exists
""")
row("a shard spec of one dim twice", ts.LayoutError,
    lambda: dist.tensor((8,), dist.ShardSpec((0, 0), ("dp", "tp")), MESH), """
ShardSpec: dim 0 is named twice
  partition : (0, 0)
  at        : AT
  fix       : give its axes as one tuple, major first
""")
row("tensors on two meshes", ts.MeshError,
    lambda: split("[8@dp, 4]") + split("[8@dp, 4]", mesh=OTHER), """
add: arguments are on different meshes
  arg 0 : f32[8@dp, 4] on dp=2 tp=4
  arg 1 : f32[8@dp, 4] on dp=4 tp=2
  at    : AT
  fix   : build all on one mesh, or outside of a function: dist.place(x, mesh=...)
""")
row("redistributed onto another mesh", ts.MeshError,
    lambda: dist.redistribute(split(), "[8@dp, 4]", OTHER), """
redistribute: the two layouts are on different meshes
  from : f32[8, 4] on dp=2 tp=4
  to   : f32[8@dp, 4] on dp=4 tp=2
  at   : AT
  fix  : build both on one mesh, or outside of a function: dist.place(x, mesh=...)
""")
row("a reduction over an unknown axis", ts.LayoutError, lambda: dist.all_reduce(split(), "pp"), """
layout: axis 'pp' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : name one of dp, tp
""")
row("a reduction of another kind", ts.LayoutError,
    lambda: dist.all_reduce(ts.sum(split("[8@dp, 4]"), 0), op="max"), """
all_reduce: a sum over dp is pending, not a max
  x   : f32[4] +dp
  at  : AT
  fix : leave out op=, or name the kind that is pending
""")
row("a mesh in words", ts.MeshError, lambda: ts.tensor(1.0, mesh="dp=2"), """
tensor: mesh cannot be 'dp=2'
  at  : AT
  fix : give a dist.Mesh, e.g. dist.Mesh(("dp",), devices=8)
""")
row("a shape that does not hold the devices", ts.MeshError,
    lambda: dist.Mesh(("dp", "tp"), devices=8, shape=(2, 3)), """
Mesh: a shape of 2 × 3 holds 6 devices, 8 given
  axes : ('dp', 'tp')
  at   : AT
  fix  : pass devices=range(6), or a shape whose product is 8
""")
row("a device named twice", ts.MeshError, lambda: dist.Mesh(("dp",), devices=[0, 1, 1]), """
Mesh: device 1 is named twice
  axes    : ('dp',)
  devices : [0, 1, 1]
  at      : AT
  fix     : name each device once
""")
row("a device below zero", ts.MeshError, lambda: dist.Mesh(("dp",), devices=[-1, 0]), """
Mesh: device id -1 is negative
  axes    : ('dp',)
  devices : [-1, 0]
  at      : AT
  fix     : name devices by their ids: 0, 1, 2, ...
""")
row("a part of a mesh by an unknown axis", ts.MeshError, lambda: MESH["pp"], """
Mesh: axis 'pp' is not one of ('dp', 'tp')
  mesh : dp=2 tp=4
  at   : AT
  fix  : name one of dp, tp
""")
row("a slice outside the mesh", ts.MeshError, lambda: MESH.slice(tp=4), """
mesh.slice: tp=4 is outside the axis, which has size 4
  mesh : dp=2 tp=4
  at   : AT
  fix  : give a number from 0 to 3
""")
row("no mesh is open", ts.MeshError, lambda: ts.mesh.current(), """
mesh.current: no mesh is open here
  at  : AT
  fix : open one: with ts.mesh.auto(): ..., or pass mesh=...
""")
row("a mesh larger than the machine", ts.BackendError,
    lambda: ts.tensor(1.0, mesh=dist.Mesh(("dp",), devices=4096)).numpy(), """
mesh: needs 4096 devices, this machine has 8
  backend : 8 x cpu
  at      : AT
  fix     : mesh.fold(onto=8), a smaller mesh, or TESSERA_DEVICES=4096 (virtual CPU devices)
""")
row("a device out of range", ts.BackendError,
    lambda: X + ts.tensor(X, mesh=dist.Mesh(("dp",), devices=[0, 99]), layout="[2@dp, 3]"), """
mesh: needs 100 devices, this machine has 8
  backend : 8 x cpu
  at      : AT
  fix     : name devices from 0 to 7, or TESSERA_DEVICES=100 (virtual CPU devices)
""")

def a_collective_under_strict() -> Any:
    with ts.strict():
        return ts.jit(nn.softmax)(split("[8, 4@tp]"))


row("a collective under strict", ts.LayoutError, a_collective_under_strict, """
sub: needs a collective that ts.strict() forbids to insert
  have    : f32[8, 1] max tp
  need    : f32[8, 1]
  made_at : AT
  at      : AT
  fix     : write dist.redistribute(x, 'f32[8, 1]') where you want it
""")

# -- strategies ------------------------------------------------------------------------------------
row("an unknown strategy", ts.StrategyError, lambda: dist.strategy("fully_sharded"), """
strategy: the kind cannot be 'fully_sharded'
  at  : AT
  fix : use data_parallel, tensor_parallel, zero_redundancy_optimizer, expert_parallel
""")
row("an unknown stage", ts.StrategyError,
    lambda: dist.strategy("zero_redundancy_optimizer", stage=4), """
strategy 'zero_redundancy_optimizer': stage 4 does not exist
  at  : AT
  fix : zero_redundancy_optimizer takes stage 1, 2 or 3
""")
row("a stage of another strategy", ts.StrategyError,
    lambda: dist.strategy("data_parallel", stage=1), """
strategy 'data_parallel': stage 1 does not exist
  at  : AT
  fix : zero_redundancy_optimizer takes stage 1, 2 or 3
""")
row("a strategy over an unknown axis", ts.StrategyError,
    lambda: dist.place({"w": X}, dist.strategy("tensor_parallel", "ep"), MESH), """
strategy 'tensor_parallel': axis 'ep' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : say dist.strategy('tensor_parallel', axis="...") with an axis of the mesh
""")
row("a strategy over two axes at once", ts.UsageError,
    lambda: dist.strategy("data_parallel", axis=["dp", "tp"]), """
strategy 'data_parallel': axis cannot be ['dp', 'tp']
  at  : AT
  fix : name one mesh axis, e.g. "dp"; strategies for several are added: a + b
""")
class Halves(dist.AxisStrategy):
    def lay_weight(self, name, t):
        return t.with_dtype(ts.bf16)


row("a batch over an unknown axis", ts.StrategyError,
    lambda: dist.place(X, dist.strategy("data_parallel", "ep"), MESH, kind="batch"), """
strategy 'data_parallel': axis 'ep' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : say dist.strategy('data_parallel', axis="...") with an axis of the mesh
""")
row("an own strategy over an unknown axis", ts.StrategyError,
    lambda: dist.place({"w": X}, Halves("ep"), MESH), """
strategy 'Halves': axis 'ep' is not an axis of the mesh
  mesh : dp=2 tp=4
  at   : AT
  fix  : say Halves(axis="...") with an axis of the mesh
""")
row("an own strategy that gives another type", ts.StrategyError,
    lambda: dist.place({"narrow": X}, Halves("tp"), MESH), """
strategy 'Halves': it gives no layout of the tensor that it is asked for
  tensor   : f32[2, 3]
  it gives : bf16[2, 3]
  at       : AT
  fix      : return the type that it gets, or self.split of it
""")
row("a rule that is no pattern", ts.StrategyError,
    lambda: dist.strategy("tensor_parallel", rules=[("(", 0)]), r"""
strategy 'tensor_parallel': ('(', 0) is no rule
  at  : AT
  fix : give pairs of a regular expression and a dim, e.g. (r"\.up$", -1)
""")
row("a rule whose dim is not there", ts.StrategyError,
    lambda: dist.place({"w": X}, dist.strategy("tensor_parallel", rules=[("w", 2)]), MESH), """
strategy 'tensor_parallel': the rule 'w' splits dim 2, which 'w' does not have
  tensor : f32[2, 3]
  at     : AT
  fix    : write a rule that fits only those that have it, or count from the end
""")
row("placed without a mesh", ts.MeshError,
    lambda: dist.place({"w": X}, dist.strategy("data_parallel")), """
place: there is no mesh
  at  : AT
  fix : pass mesh=..., or say: with mesh:
""")
row("the names and weights of a model, placed one by one", ts.UsageError,
    lambda: dist.place(ts.nn.Linear(2, 3).named_parameters(), "data_parallel", MESH), """
place: an object of type generator holds no tensors that can be laid out
  at  : AT
  fix : give the module itself, its parameters(), or a dict or list of tensors
""")
row("a batch of lists", ts.UsageError,
    lambda: dist.place([[1, 2], [3]], "data_parallel", MESH, kind="batch"), """
place: a batch is laid out as tensors or arrays, and it has none
  0.0 : 1
  0.1 : 2
  1.0 : 3
  at  : AT
  fix : make arrays of it, such as np.asarray(x)
""")
row("a batch with a table of another library", ts.UsageError,
    lambda: dist.place({"x": ONES, "n": 3, "y": Table()}, "data_parallel", MESH, kind="batch"), """
place: a batch is laid out as tensors or arrays, and some of it is neither
  y   : an object of type Table
  at  : AT
  fix : make arrays of it, such as np.asarray(x)
""")
row("placed by something else", ts.StrategyError,
    lambda: dist.place({"w": X}, "tensor", MESH), """
place: the strategy cannot be 'tensor'
  at  : AT
  fix : give dist.strategy("data_parallel") or a sum of strategies
""")
