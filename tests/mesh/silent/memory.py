"""Ownership of memory: a tensor copies the user's data when it is created."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera import dist, pipeline

from .rows import row

MESH = dist.Mesh(("dp",), devices=8)


@dataclass
class _Batch:
    x: Any
    scale: float


def _buffer(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Memory that the engine could use without a copy: it is aligned to 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    at = -raw.ctypes.data % 64
    return raw[at : at + size].view(dtype).reshape(shape)


def _batches(buffer: np.ndarray[Any, Any]) -> Iterator[float]:
    """Fills one buffer four times, like a fast data loader."""
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


@row("a compiled function is given one PyTorch tensor that is filled again, also in a dataclass")
def reused_torch_argument() -> None:
    x, batch = torch.ones(8, 64), _Batch(torch.ones(8, 64), 2.0)
    f, g = ts.jit(lambda x: x * 2), ts.jit(lambda b: b.x * b.scale)
    for i in range(1, 4):
        x.fill_(i), batch.x.fill_(i)
        for out in (f(x), g(batch)):
            assert isinstance(out, ts.Tensor) and (out.numpy() == 2 * i).all()
    assert len(f.programs) == len(g.programs) == 1


@row("a PyTorch tensor that a compiled function reads outside is changed in place")
def torch_outside() -> None:
    scale, held = torch.ones(4), SimpleNamespace(rows=[torch.ones(4)])
    f = ts.jit(lambda x, static: x * scale * held.rows[0] * static.w)
    x, static = ts.tensor([1.0, 1.0, 1.0, 1.0]), SimpleNamespace(w=torch.ones(4))
    for i in range(1, 3):
        scale.fill_(i), held.rows[0].fill_(i), static.w.fill_(i)
        assert (f(x, static).numpy() == i**3).all()


@row("PyTorch tensors of narrow dtypes, and trained ones, are taken with their values")
def torch_kinds() -> None:
    given = torch.tensor([[0.5, -1.5], [2.0, 3.0]])
    for dtype, ours in (
        (torch.bfloat16, ts.bf16),
        (torch.float8_e4m3fn, ts.fp8_e4m3),
        (torch.float8_e5m2, ts.fp8_e5m2),
        (torch.float16, ts.f16),
    ):
        t = ts.tensor(given.to(dtype).T)  # not contiguous
        assert t.dtype is ours and (t.numpy().astype(np.float32) == given.T.numpy()).all()
        rows = ts.tensor([given.to(dtype).requires_grad_()])
        assert rows.shape == (1, 2, 2)
    layer, theirs = ts.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    turned = dict(theirs.named_parameters()) | {"weight": theirs.weight.T}
    layer.load_state_dict(turned)
    np.testing.assert_array_equal(layer.weight.numpy(), theirs.weight.detach().numpy().T)
    np.testing.assert_array_equal(ts.tensor(theirs.bias).numpy(), theirs.bias.detach().numpy())
    narrow = theirs.bfloat16().state_dict()
    layer.load_state_dict({**narrow, "weight": narrow["weight"].T})
    np.testing.assert_array_equal(layer.bias.numpy(), theirs.bias.detach().float().numpy())


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
