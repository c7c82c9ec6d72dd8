"""Mistakes with values, dtypes and shapes. A row: name, error, mistake."""

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
row("strings are no tensor", ts.DTypeError, lambda: ts.tensor(["a", "b"]))
row("objects are no tensor", ts.DTypeError, lambda: ts.tensor(object()))
row("a transform of no values", ts.UsageError, lambda: ts.fft.fftn(np.eye(4), s=(0, 2)))
row("a transform of one size for two dims", ts.UsageError, lambda: ts.fft.fft2(np.eye(4), s=2))
row("a transform along no dim", ts.ShapeError, lambda: ts.fft.rfftn(np.eye(4), dim=()))
row("frequencies of samples at one place", ts.UsageError, lambda: ts.fft.fftfreq(4, 0.0))
row("complex numbers", ts.DTypeError, lambda: ts.tensor(np.ones(2, np.complex64), dtype=ts.f32))
row("a sparse tensor of PyTorch", ts.UsageError, lambda: ts.tensor(torch.eye(2).to_sparse()))
row("PyTorch's meta device", ts.UsageError, lambda: X + torch.ones(2, device="meta"))
row("a dtype of PyTorch alone", ts.DTypeError, lambda: ts.tensor(
    torch.ones(2).to(torch.float8_e5m2fnuz)))
row("memory that is lent to no one", ts.UsageError, lambda: ts.tensor(Unlent()))
row("u32 beside i32", ts.DTypeError, lambda: ts.zeros((2,), "u32") + ts.zeros((2,), "i32"))
row("counting further than u8 goes", ts.DTypeError, lambda: ts.arange(300, dtype="u8"))
row("a whole number to a negative power", ts.DTypeError, lambda: ts.arange(3) ** -1)
row("one_hot of floats", ts.DTypeError, lambda: ts.one_hot(ts.tensor([0.5]), 3))
row("sort along a dim that is not there", ts.ShapeError, lambda: ts.sort(ts.ones((2,)), 9))
row("a whole number too large", ts.DTypeError, lambda: ts.tensor(np.array([1, 2**40])))
row("a negative unsigned number", ts.DTypeError, lambda: ts.tensor([-1, 2], dtype=ts.uint8))
row("ragged lists", ts.ShapeError, lambda: ts.tensor([[1.0, 2.0], [3.0]]))
row("a size below 0", ts.ShapeError, lambda: ts.zeros((2, -1)))
row("the largest of nothing", ts.ShapeError, lambda: ts.max(ts.zeros((2, 0)), 1))
row("a number out of nothing", ts.ShapeError, lambda: ts.zeros((0, 2))[0])
row("ids into nothing", ts.ShapeError, lambda: ts.zeros((0, 2))[[1, 0]])
row("a size to be found without elements", ts.ShapeError, lambda: ts.zeros((0, 2)).reshape(0, -1))
row("a batch norm of nothing", ts.ShapeError, lambda: ts.nn.BatchNorm(2)(ts.zeros((0, 2))))
row("a shape in words", ts.ShapeError, lambda: ts.ones("8x4"))
row("an unknown dtype", ts.DTypeError, lambda: X.to("f64x"))
row("a number that an int cannot hold", ts.DTypeError, lambda: IDS + 2**40)
row("a fraction for an int", ts.DTypeError, lambda: ts.full((2,), 0.5, ts.int32))
row("nothing added", ts.DTypeError, lambda: X + None)

# -- shapes ----------------------------------------------------------------------------------------
row("matmul of inner sizes that differ", ts.ShapeError, lambda: X @ Y)
row("matmul of leading dims that differ", ts.ShapeError,
    lambda: ts.ones((2, 3, 4)) @ ts.ones((5, 4, 3)))
row("matmul with a scalar", ts.ShapeError, lambda: ts.matmul(X, ts.tensor(1.0)))
row("shapes that do not broadcast", ts.ShapeError, lambda: X + Y)
row("reshape to another size", ts.ShapeError, lambda: X.reshape(4, 2))
row("reshape with a rest that does not divide", ts.ShapeError, lambda: X.reshape(4, -1))
row("reshape to text", ts.UsageError, lambda: X.reshape("6"))
row("permute of too few dims", ts.ShapeError, lambda: X.permute(0))
row("concat of other sizes", ts.ShapeError, lambda: ts.concat([X, Y], 0))
row("concat of nothing", ts.UsageError, lambda: ts.concat([]))
row("stack of other shapes", ts.ShapeError, lambda: ts.stack([X, Y]))
row("split that does not divide", ts.ShapeError, lambda: ts.split(X, 2, -1))
row("broadcast to less", ts.ShapeError, lambda: ts.broadcast_to(X, (2,)))
row("a dim that is not there", ts.ShapeError, lambda: ts.sum(X, 2))
row("a dim by name", ts.UsageError, lambda: ts.sum(X, "rows"))
row("an index outside", ts.ShapeError, lambda: X[2])
row("too many indices", ts.ShapeError, lambda: X[0, 0, 0])
row("an index of text", ts.UsageError, lambda: X["a"])
row("an index of floats", ts.DTypeError, lambda: X[ts.tensor([0.5])])
row("ids of floats", ts.DTypeError, lambda: ts.take(X, ts.tensor([0.5])))
row("topk of too many", ts.ShapeError, lambda: ts.topk(X, 4))
row("scatter of other shapes", ts.ShapeError, lambda: ts.scatter_add(X, IDS, IDS))
row("item of many", ts.ShapeError, lambda: X.item())
row("the length of a scalar", ts.ShapeError, lambda: len(ts.tensor(1.0)))

def truth_of_many() -> Any:
    return bool(X)


row("truth of many", ts.ShapeError, truth_of_many)
row("einsum of too few letters", ts.ShapeError, lambda: ts.einsum("b s d, d n -> b s n", X, Y))
row("einsum of an unknown letter", ts.ShapeError, lambda: ts.einsum("i j -> i z", X))
row("einsum of a diagonal of two sizes", ts.ShapeError, lambda: ts.einsum("ii", X))
row("einsum of sizes that differ", ts.ShapeError, lambda: ts.einsum("i j, j k -> i k", X, Y))
row("einsum without a string", ts.UsageError, lambda: ts.einsum(X, Y))

def a_write_in_place() -> Any:
    X[0] = 1.0


row("a write in place", ts.UsageError, a_write_in_place)
row("a format that does not fit", ts.UsageError, lambda: f"{X:.2f}")
row("an array of ids outside", ts.ShapeError, lambda: X[[0, 2, -3]])
row("a mask of another shape", ts.ShapeError, lambda: X[[True, False, True]])
row("a slice by halves", ts.UsageError, lambda: X[:1.5])
row("a remainder by zero", ts.UsageError, lambda: IDS % 0)
row("a number for two", ts.UsageError, lambda: ts.optim.AdamW(betas=0.9))
row("a string for a norm", ts.UsageError, lambda: ts.optim.clip_by_global_norm({"w": X}, "1"))
row("a string for a truth", ts.UsageError, lambda: ts.nn.Linear(2, 3, bias="no"))


def _through_a_cut() -> object:
    first = ts.ones((2,))
    second = first - ts.grad((first * first).sum(), first)
    ts.grad((second * second).sum(), second)
    return ts.grad((second * second).sum(), {"w": first})


row("a gradient through an update of long ago", ts.GraphError, _through_a_cut)
row("no room for programs", ts.UsageError, lambda: ts.set_program_cache(maps=0))
row("statistics of tensors without elements", ts.UsageError,
    lambda: ts.debug.statistics({"x": ts.ones((0, 3))}))
