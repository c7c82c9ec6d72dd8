"""Whose memory is a tensor's? What the user gave is taken when it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera import dist, pipeline

from .rows import row

MESH = dist.Mesh(("dp",), devices=8)


def _buffer(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Memory that the engine would use as it lies: it starts at a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    at = -raw.ctypes.data % 64
    return raw[at : at + size].view(dtype).reshape(shape)


def _batches(buffer: np.ndarray[Any, Any]) -> Iterator[float]:
    """Fills one buffer four times, as a fast loader does."""
    for i in range(4):
        buffer[...] = i
        yield float(i)


def _each_is_its_own(take: Callable[[np.ndarray[Any, Any]], ts.Tensor]) -> None:
    buffer = _buffer((8, 64))
    kept = [(i, take(buffer)) for i in _batches(buffer)]
    buffer[...] = 77
    for i, t in kept:
        np.testing.assert_array_equal(t.numpy(), np.full(t.shape, i))


@row("one NumPy buffer is filled again for each batch: ts.tensor(buffer)")
def reused_tensor() -> None:
    _each_is_its_own(ts.tensor)


@row("one buffer is filled again for each batch, split over eight devices")
def reused_split() -> None:
    for layout in ("[8@dp, 64]", "[8, 64@dp]", "[8, 64]"):
        _each_is_its_own(lambda b, layout=layout: ts.tensor(b, mesh=MESH, layout=layout))  # type: ignore[misc]


@row("one buffer is filled again after dist.place put its batch on the devices")
def reused_place() -> None:
    plan = dist.strategy("data_parallel")
    _each_is_its_own(
        lambda b: dist.place({"x": b}, plan, MESH, kind="batch")["x"],  # type: ignore[no-any-return]
    )


@row("a jitted function is called on one buffer that is filled again")
def reused_jit() -> None:
    _each_is_its_own(ts.jit(lambda x: x + 0))


@row("an op is called on one buffer that is filled again")
def reused_eager() -> None:
    zero = ts.tensor(np.zeros(64, np.float32))
    _each_is_its_own(lambda b: zero + b)
    _each_is_its_own(lambda b: ts.reshape(b, (8, 64)))


@row("a pipeline is called on one buffer that is filled again")
def reused_pipeline() -> None:
    mesh = dist.Mesh(("pp",), devices=2)
    parts = [lambda x: x * 1.0, lambda x: x + 0.0]
    _each_is_its_own(ts.jit(pipeline.compose(2, parts, mesh=mesh, microbatches=4)))


@row("a batch is held as narrower numbers, and other kinds than floats are reused")
def reused_kinds() -> None:
    for dtype in (np.float64, np.int32, np.int64, np.bool_, np.uint8):
        buffer = _buffer((8, 64), dtype)
        buffer[...] = 1
        t = ts.tensor(buffer)
        buffer[...] = 0
        assert (t.numpy() == 1).all(), dtype


@row("a view of a buffer is made read-only, given, and the buffer is filled again")
def reused_read_only() -> None:
    buffer = _buffer((8, 64))
    view = buffer[:]
    view.flags.writeable = False
    t = ts.tensor(view)
    buffer[...] = 5
    assert (t.numpy() == 0).all()


@row("a PyTorch tensor is changed in place after it was given")
def reused_torch() -> None:
    x = torch.ones(8, 64)
    t = ts.tensor(x)
    x.zero_()
    assert (t.numpy() == 1).all()


@row("a weight is updated in place after it was loaded into a module")
def reused_weight() -> None:
    layer = ts.nn.Linear(8, 64, bias=False)
    buffer = _buffer((8, 64))
    layer.load_parameters({"weight": buffer})
    buffer[...] = 9
    assert (layer.parameters()["weight"].numpy() == 0).all()


@row("a copy made by np.array(t) is written to, and a read one is kept over a donated step")
def results_are_copies() -> None:
    t = ts.tensor(np.ones((8, 64), np.float32), mesh=MESH, layout="[8@dp, 64]")
    mine = np.array(t)
    mine[...] = 3
    assert (t.numpy() == 1).all()
    step = ts.jit(lambda x: x * 2, donate="x")
    for layout in ("[8@dp, 64]", "[8, 64]"):
        x = step(ts.tensor(np.ones((8, 64), np.float32), mesh=MESH, layout=layout))
        seen = x.numpy()
        y = step(x)
        assert (seen == 2).all() and (y.numpy() == 4).all()
