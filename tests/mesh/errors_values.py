"""Mistakes with values, dtypes and shapes. A row: name, error, mistake, message."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tessera as ts
from tests.mesh.errors import IDS, X, Y, row

# fmt: off

class Unlent:
    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("on a device of its own")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


# -- values and dtypes -----------------------------------------------------------------------------
row("strings are no tensor", ts.DTypeError, lambda: ts.tensor(["a", "b"]), """
tensor: ['a', 'b'] holds no numbers of a dtype that is known
  NumPy's dtype : <U1
  at            : AT
  fix           : give numbers, nested lists of numbers, or an array
""")
row("objects are no tensor", ts.DTypeError, lambda: ts.tensor(object()), """
tensor: an object of type object holds no numbers of a dtype that is known
  NumPy's dtype : object
  at            : AT
  fix           : give numbers, nested lists of numbers, or an array
""")
row("complex numbers", ts.DTypeError, lambda: ts.tensor(np.ones(2, np.complex64)), """
tensor: array([1.+0.j, 1.+0.j], dtype=complex64) holds no numbers of a dtype that is known
  NumPy's dtype : complex64
  at            : AT
  fix           : give numbers, nested lists of numbers, or an array
""")
row("a sparse tensor of PyTorch", ts.UsageError, lambda: ts.tensor(torch.eye(2).to_sparse()), """
tensor: the tensor of PyTorch is sparse, sparse_coo
  at  : AT
  fix : give x.to_dense()
""")
row("PyTorch's meta device", ts.UsageError, lambda: X + torch.ones(2, device="meta"), """
add: the tensor of PyTorch is on the meta device, without values
  at  : AT
  fix : load its values first
""")
row("a dtype of PyTorch alone", ts.DTypeError, lambda: ts.tensor(
    torch.ones(2).to(torch.float8_e5m2fnuz)), """
tensor: the tensor of PyTorch is of float8_e5m2fnuz, which is no dtype here
  at  : AT
  fix : convert it: x.float()
""")
row("memory that is lent to no one", ts.UsageError, lambda: ts.tensor(Unlent()), """
tensor: the memory of this array is not read from here
  array : tests.mesh.errors_values.Unlent
  says  : on a device of its own
  at    : AT
  fix   : copy it to the host, and give a NumPy array
""")
row("u32 beside i32", ts.DTypeError, lambda: ts.zeros((2,), "u32") + ts.zeros((2,), "i32"), """
add: no dtype holds all values of both u32 and i32
  x   : u32[2]
  y   : i32[2]
  at  : AT
  fix : cast both: .to("i32") where all are small, .to("u32") where none is negative
""")
row("counting further than u8 goes", ts.DTypeError, lambda: ts.arange(300, dtype="u8"), """
arange: u8 does not hold every whole number below 300
  at  : AT
  fix : count in i32, and cast where that is meant: ts.arange(300).to('u8')
""")
row("a whole number to a negative power", ts.DTypeError, lambda: ts.arange(3) ** -1, """
pow: i32 to the power of -1 is no whole number
  x   : i32[3]
  at  : AT
  fix : give the exponent as a float: x ** -1.0
""")
row("one_hot of floats", ts.DTypeError, lambda: ts.one_hot(ts.tensor([0.5]), 3), """
one_hot: ids must be integers
  ids : f32[1]
  at  : AT
  fix : cast them with .to(ts.int32)
""")
row("sort along a dim that is not there", ts.ShapeError, lambda: ts.sort(ts.ones((2,)), 9), """
sort: there is no dim 9
  x   : f32[2]
  at  : AT
  fix : dims are -1 to 0
""")
row("a whole number too large", ts.DTypeError, lambda: ts.tensor(np.array([1, 2**40])), """
tensor: values from 1 to 1099511627776 do not fit i32
  at  : AT
  fix : keep them within -2147483648 to 2147483647
""")
row("a negative unsigned number", ts.DTypeError, lambda: ts.tensor([-1, 2], dtype=ts.uint8), """
tensor: values from -1 to 2 do not fit u8
  at  : AT
  fix : keep them within 0 to 255
""")
row("ragged lists", ts.ShapeError, lambda: ts.tensor([[1.0, 2.0], [3.0]]), """
tensor: the nested lists are ragged
  data : [[1.0, 2.0], [3.0]]
  at   : AT
  fix  : give lists of one length at each depth
""")
row("a size below 0", ts.ShapeError, lambda: ts.zeros((2, -1)), """
zeros: shape (2, -1) has a dim that is not from 0 to 2**31 - 1
  at  : AT
  fix : every dim has from 0 to 2**31 - 1 elements
""")
row("the largest of nothing", ts.ShapeError, lambda: ts.max(ts.zeros((2, 0)), 1), """
max: dim 1 has no elements, so there is none to give
  x   : f32[2, 0]
  at  : AT
  fix : ask x.size first, or ts.concat a value that stands for none
""")
row("a number out of nothing", ts.ShapeError, lambda: ts.zeros((0, 2))[0], """
index: 0 is outside dim 0 of size 0
  x   : f32[0, 2]
  at  : AT
  fix : ask x.size first: there is nothing to pick
""")
row("ids into nothing", ts.ShapeError, lambda: ts.zeros((0, 2))[[1, 0]], """
index: id 1 at [0] is outside a dim of size 0, and 1 more
  ids : i32[2]
  at  : AT
  fix : ask x.size first: there is nothing to pick
""")
row("a size to be found without elements", ts.ShapeError, lambda: ts.zeros((0, 2)).reshape(0, -1),
    """
reshape: 0 elements do not fit shape (0, -1)
  x   : f32[0, 2]
  at  : AT
  fix : sizes are >= 0; one of them may be -1 where the rest, above 0, divides
""")
row("a batch norm of nothing", ts.ShapeError, lambda: ts.nn.BatchNorm(2)(ts.zeros((0, 2))), """
batch_norm: a batch without elements has no mean to train with
  x   : f32[0, 2]
  at  : AT
  fix : leave the batch out, or pass training=False
""")
row("a shape in words", ts.ShapeError, lambda: ts.ones("8x4"), """
ones: the shape cannot be '8x4'
  at  : AT
  fix : give sizes, e.g. (8, 4096)
""")
row("an unknown dtype", ts.DTypeError, lambda: X.to("f64x"), """
dtype 'f64x' is not known
  at  : AT
  fix : use one of f32, bf16, f16, f8e4m3, f8e5m2, i32, i8, u32, u8, bool
""")
row("a number that an int cannot hold", ts.DTypeError, lambda: IDS + 2**40, """
add: 1099511627776 does not fit i32
  at  : AT
  fix : use a whole number from -2147483648 to 2147483647, or another dtype
""")
row("a fraction for an int", ts.DTypeError, lambda: ts.full((2,), 0.5, ts.int32), """
full: 0.5 does not fit i32
  at  : AT
  fix : use a whole number from -2147483648 to 2147483647, or another dtype
""")
row("nothing added", ts.DTypeError, lambda: X + None, """
add: None holds no numbers of a dtype that is known
  NumPy's dtype : object
  at            : AT
  fix           : give numbers, nested lists of numbers, or an array
""")

# -- shapes ----------------------------------------------------------------------------------------
row("matmul of inner sizes that differ", ts.ShapeError, lambda: X @ Y, """
matmul: the inner sizes 3 and 4 differ
  x   : f32[2, 3]
  y   : f32[4, 5]
  at  : AT
  fix : transpose one of them, or give y a dim -2 of 3
""")
row("matmul of leading dims that differ", ts.ShapeError,
    lambda: ts.ones((2, 3, 4)) @ ts.ones((5, 4, 3)), """
matmul: the leading dims (2,) and (5,) do not broadcast
  x   : f32[2, 3, 4]
  y   : f32[5, 4, 3]
  at  : AT
  fix : make them equal, or 1
""")
row("matmul with a scalar", ts.ShapeError, lambda: ts.matmul(X, ts.tensor(1.0)), """
matmul: a scalar has no matrix
  x   : f32[2, 3]
  y   : f32[]
  at  : AT
  fix : multiply by it: x * y
""")
row("shapes that do not broadcast", ts.ShapeError, lambda: X + Y, """
add: sizes 2 and 4 do not match
  arg 0 : f32[2, 3]
  arg 1 : f32[4, 5]
  at    : AT
  fix   : make the dims equal, or one of them 1
""")
row("reshape to another size", ts.ShapeError, lambda: X.reshape(4, 2), """
reshape: 6 elements do not fit shape (4, 2)
  x   : f32[2, 3]
  at  : AT
  fix : keep the number of elements, or give one dim as -1
""")
row("reshape with a rest that does not divide", ts.ShapeError, lambda: X.reshape(4, -1), """
reshape: 6 elements do not fit shape (4, -1)
  x   : f32[2, 3]
  at  : AT
  fix : sizes are >= 0; one of them may be -1 where the rest, above 0, divides
""")
row("reshape to text", ts.UsageError, lambda: X.reshape("6"), """
reshape: a size cannot be '6'
  at  : AT
  fix : give a whole number
""")
row("permute of too few dims", ts.ShapeError, lambda: X.permute(0), """
permute: (0,) is no order of 2 dims
  x   : f32[2, 3]
  at  : AT
  fix : name each of 0 to 1 once
""")
row("concat of other sizes", ts.ShapeError, lambda: ts.concat([X, Y], 0), """
concat: argument 1 does not fit along dim 0
  arg 0 : f32[2, 3]
  arg 1 : f32[4, 5]
  at    : AT
  fix   : all other dims and the dtype must be equal
""")
row("concat of nothing", ts.UsageError, lambda: ts.concat([]), """
concat: nothing to join in []
  at  : AT
  fix : give a list of tensors
""")
row("stack of other shapes", ts.ShapeError, lambda: ts.stack([X, Y]), """
stack: tensors of one shape and a dim from -3 to 2 are needed
  x0  : f32[2, 3]
  x1  : f32[4, 5]
  dim : 0
  at  : AT
  fix : reshape the tensors, or use ts.concat along a dim that is there
""")
row("split that does not divide", ts.ShapeError, lambda: ts.split(X, 2, -1), """
split: dim 1 of size 3 does not divide into 2
  x   : f32[2, 3]
  at  : AT
  fix : give a divisor, or sizes that add up
""")
row("broadcast to less", ts.ShapeError, lambda: ts.broadcast_to(X, (2,)), """
broadcast_to: (2, 3) does not broadcast to (2,)
  x   : f32[2, 3]
  at  : AT
  fix : a dim broadcasts from 1, and new dims stand first
""")
row("a dim that is not there", ts.ShapeError, lambda: ts.sum(X, 2), """
sum: there is no dim 2
  x   : f32[2, 3]
  at  : AT
  fix : dims are -2 to 1
""")
row("a dim by name", ts.UsageError, lambda: ts.sum(X, "rows"), """
sum: dim cannot be 'rows'
  at  : AT
  fix : give a whole number
""")
row("an index outside", ts.ShapeError, lambda: X[2], """
index: 2 is outside dim 0 of size 2
  x   : f32[2, 3]
  at  : AT
  fix : use -2 to 1
""")
row("too many indices", ts.ShapeError, lambda: X[0, 0, 0], """
index: 3 indices for 2 dims
  x   : f32[2, 3]
  at  : AT
  fix : use fewer
""")
row("an index of text", ts.UsageError, lambda: X["a"], """
index: cannot index with str
  x   : f32[2, 3]
  at  : AT
  fix : use whole numbers, slices, ..., None, ids or a mask
""")
row("an index of floats", ts.DTypeError, lambda: X[ts.tensor([0.5])], """
index: ids must be integers
  ids : f32[1]
  at  : AT
  fix : cast them with .to(ts.int32)
""")
row("ids of floats", ts.DTypeError, lambda: ts.take(X, ts.tensor([0.5])), """
take: ids must be integers
  ids : f32[1]
  at  : AT
  fix : cast them with .to(ts.int32)
""")
row("topk of too many", ts.ShapeError, lambda: ts.topk(X, 4), """
topk: cannot take 4 of dim 1
  x   : f32[2, 3]
  at  : AT
  fix : 0 <= k <= its size
""")
row("scatter of other shapes", ts.ShapeError, lambda: ts.scatter_add(X, IDS, IDS), """
scatter_add: ids and updates must match each other, and x but for dim 1
  x       : f32[2, 3]
  ids     : i32[2]
  updates : i32[2]
  at      : AT
  fix     : give each update an id: both of one shape, with the rank of x
""")
row("item of many", ts.ShapeError, lambda: X.item(), """
item: a tensor of 6 elements is not one number
  tensor : f32[2, 3]
  at     : AT
  fix    : reduce it first, or use .numpy()
""")
row("the length of a scalar", ts.ShapeError, lambda: len(ts.tensor(1.0)), """
len: a scalar has no length
  tensor : f32[]
  at     : AT
  fix    : use .item() for its value, or .size
""")

def truth_of_many() -> Any:
    return bool(X)


row("truth of many", ts.ShapeError, truth_of_many, """
item: a tensor of 6 elements is not one number
  tensor : f32[2, 3]
  at     : AT
  fix    : reduce it first, or use .numpy()
""")
row("einsum of too few letters", ts.ShapeError, lambda: ts.einsum("b s d, d n -> b s n", X, Y), """
einsum: 'b s d, d n -> b s n' names 3 dims of an argument with 2
  at  : AT
  fix : name each dim once, or use ... for leading dims
""")
row("einsum of an unknown letter", ts.ShapeError, lambda: ts.einsum("i j -> i z", X), """
einsum: 'i j -> i z': result letter 'z' is in no argument
  at  : AT
  fix : each letter once per group
""")
row("einsum of a diagonal of two sizes", ts.ShapeError, lambda: ts.einsum("ii", X), """
einsum: 'ii': the two dims 'i' have sizes 2 and 3
  at  : AT
  fix : a diagonal is of dims of one size
""")
row("einsum of sizes that differ", ts.ShapeError, lambda: ts.einsum("i j, j k -> i k", X, Y), """
contract 'i j, j k -> i k': sizes 3 and 4 of dim 'j' differ
  arg 0 : f32[2, 3]
  arg 1 : f32[4, 5]
  at    : AT
  fix   : make the two dims equal
""")
row("einsum without a string", ts.UsageError, lambda: ts.einsum(X, Y), """
einsum: <Tensor f32[2, 3]> is no index string
  at  : AT
  fix : say which dims go where, e.g. "b s d, d n -> b s n"
""")

def a_write_in_place() -> Any:
    X[0] = 1.0


row("a write in place", ts.UsageError, a_write_in_place, """
a tensor cannot be changed in place
  tensor : f32[2, 3]
  at     : AT
  fix    : make a new one: ts.where(mask, value, x), ts.concat, ts.scatter_add
""")
row("a format that does not fit", ts.UsageError, lambda: f"{X:.2f}", """
format: '.2f' does not fit the value
  tensor : f32[2, 3]
  at     : AT
  fix    : format one number with .item(), or the array of .numpy()
""")
row("an array of ids outside", ts.ShapeError, lambda: X[[0, 2, -3]], """
index: id 2 at [1] is outside -2 to 1, and 1 more
  ids : i32[3]
  at  : AT
  fix : keep each id within -2 to 1
""")
row("a mask of another shape", ts.ShapeError, lambda: X[[True, False, True]], """
index: a mask of shape (3,) stands on dim 0
  x   : f32[2, 3]
  at  : AT
  fix : give a mask of the shape of the dims that it picks from
""")
row("a slice by halves", ts.UsageError, lambda: X[:1.5], """
index: slice(None, 1.5, None) is no slice of dim 0
  x   : f32[2, 3]
  at  : AT
  fix : give whole numbers, and a step that is not 0
""")
row("a remainder by zero", ts.UsageError, lambda: IDS % 0, """
mod: whole numbers cannot be divided by zero
  x       : i32[2]
  divisor : 0
  at      : AT
  fix     : divide by something else where it is zero: ts.where(y == 0, 1, y)
""")
row("a number for two", ts.UsageError, lambda: ts.optim.AdamW(betas=0.9), """
AdamW: betas cannot be 0.9
  at  : AT
  fix : give two numbers, e.g. (0.9, 0.999)
""")
row("a string for a norm", ts.UsageError, lambda: ts.optim.clip_by_global_norm({"w": X}, "1"), """
clip_by_global_norm: max_norm cannot be '1'
  at  : AT
  fix : give a number or a tensor
""")
row("a string for a truth", ts.UsageError, lambda: ts.nn.Linear(2, 3, bias="no"), """
Linear: bias cannot be 'no'
  at  : AT
  fix : give True or False
""")


def _through_a_cut() -> object:
    first = ts.ones((2,))
    second = first - ts.grad((first * first).sum(), first)
    ts.grad((second * second).sum(), second)
    return ts.grad((second * second).sum(), {"w": first})


row("a gradient through an update of long ago", ts.GraphError, _through_a_cut, """
grad: what leads from 'w' to the loss was let go of, by an earlier gradient, as weights were set, or as it was moved
  loss    : f32[]
  weight  : f32[2]
  through : f32[2]
  at      : AT
  fix     : put all of it in one function under ts.jit, which remembers; or take the gradient by the newest weights; nn.functional_call(model, w, x) sets none
""")  # noqa: E501
row("no room for programs", ts.UsageError, lambda: ts.set_program_cache(maps=0), """
set_program_cache: maps cannot be 0
  at  : AT
  fix : give a whole number of at least 1
""")
row("statistics of tensors without elements", ts.UsageError,
    lambda: ts.debug.statistics({"x": ts.ones((0, 3))}), """
statistics: there is no tensor of floats with elements in {'x': <Tensor f32[0, 3]>}
  at  : AT
  fix : give a tensor, or a dict of them such as ts.grad returns
""")
