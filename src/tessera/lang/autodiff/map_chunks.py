"""`map_chunks`: a function of rows, computed block by block.

Each device cuts its own rows into blocks, so no data moves. Random numbers are those of the
function on all rows (chunk.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ...core.declared import Count
from ...core.dtypes import uint32
from ...core.errors import ShapeError
from ...core.layout import TensorType, dim_axes, shard_count, without
from ..math import functions as F
from ..math.functions import permute, relayout, reshape
from ..record.chunk import AllRows, Block, Chunk, Draw, Drew, NoDraws
from ..record.operands import as_tensor
from ..record.recorder import Recorder, current, recording
from ..record.tree import flatten, tree_map
from ..value.checks import asked_function
from ..value.tensor import Tensor
from .iteration import Iteration, Policy, finished, length_of, settled

R = TypeVar("R")
NOTHING = flatten(())[1]


def row_blocks(t: TensorType, rows: int) -> tuple[int, int, int]:
    """Returns (devices, blocks, rows per block) for dim 0 in blocks of at most `rows` on each
    device."""
    run = t.digits(0)
    split = [d for d in run if d.axes]
    if any(d.uneven for d in run) or run[: len(split)] != split:
        return t.shape[0], 1, 1  # uneven or scattered rows of a device: one block
    devices = math.prod(d.size for d in split)
    here = t.shape[0] // devices
    if not here:
        return 1, 1, 0
    size = next(n for n in range(min(rows, here), 0, -1) if here % n == 0)
    return devices, here // size, size


def to_blocks(x: Tensor, rows: int) -> Tensor:
    """Reshapes [T, ...] to [blocks, rows, ...]. Each device cuts its own rows, so no data moves."""
    devices, blocks, size = row_blocks(x.type, rows)
    rest = x.shape[1:]
    x = reshape(x, (devices, blocks, size, *rest))
    x = permute(x, 1, 0, *range(2, x.ndim))
    return reshape(x, (blocks, devices * size, *rest))


def from_blocks(y: Tensor, like: TensorType, rows: int) -> Tensor:
    """The inverse of `to_blocks` for a result with the rows of `like`."""
    devices, blocks, size = row_blocks(like, rows)
    rest = y.shape[2:]
    y = reshape(y, (blocks, devices, size, *rest))
    y = permute(y, 1, 0, *range(2, y.ndim))
    return reshape(y, (devices * blocks * size, *rest))


def _alike(x: Tensor, like: TensorType) -> Tensor:
    """Returns `x` with its rows split like those of `like`."""
    rows, axes = like.dims[0], dim_axes(like.dims[0])
    if x.type.dims[0] == rows:
        return x
    t = x.type.on(like.mesh)
    rest = [without(d, axes, t.sizes) for d in t.dims[1:]]
    open_ = tuple(p for p in t.partial if p[0] not in axes)
    return relayout(x, t.with_partial(open_).with_dims((rows, *rest)))


def _of_rows(out: R, block: Tensor) -> R:
    """Returns `out`, a result for `block`. Raises ShapeError unless it has as many rows."""
    for y in flatten(out)[0]:
        shape = getattr(y, "shape", ())
        if y is not None and tuple(shape[:1]) != block.shape[:1]:
            raise ShapeError(
                "map_chunks: the function gives another number of rows than it is given",
                block=block.type,
                gives=y.type if isinstance(y, Tensor) else shape,
                fix="it gets a block of rows: compute along the other dims, such as x.sum(-1); a"
                " function of one row is ts.vmap(fn)",
            )
    return out


def map_chunks(fn: Callable[..., R], *xs: Tensor, rows: Count, policy: Policy = "recompute") -> R:
    """`fn(*xs)` computed block by block, each of at most `rows` rows per device, to save memory.

    `fn` must treat each row (each slice along dim 0) on its own. It returns a tensor of as many
    rows, or a tree of them. All `xs` have the same number of rows; they take the layout of the one
    whose rows are split over the most devices. `fn` takes weights from its closure. With the
    default policy "recompute" the backward pass computes each block again, so intermediates of a
    block are not kept; other policies are those of `ts.scan`. If one block holds all rows there is
    no loop.

    Random numbers in `fn` are those of `fn(*xs)` for any `rows`. They are drawn in shapes with one
    dim for the rows, or in shapes that do not depend on the rows, as for weights.

    Raises ShapeError if the numbers of rows differ, or `fn` returns another number of rows;
    UsageError if `fn` draws in other shapes.
    """
    fn = asked_function("map_chunks", "the function", fn)
    xs = tuple(as_tensor(x) for x in xs)
    length_of("map_chunks", xs)
    first = max(xs, key=lambda x: shard_count(dim_axes(x.type.dims[0]), x.type.sizes)).type
    xs = tuple(_alike(x, first) for x in xs)
    _, count, each = row_blocks(first, rows)
    if count == 1:
        return _of_rows(fn(*xs), xs[0])
    blocks = [to_blocks(x, rows) for x in xs]

    def recorded(fn: Callable[..., R], blocks: list[Tensor]) -> Iteration:
        def body(_: object, slices: Sequence[Tensor]) -> tuple[Any, Any]:
            return (), _of_rows(fn(*slices), slices[0])

        return settled("map_chunks", body, NOTHING, (), blocks)

    iteration: Iteration | None = None
    with suppress(Drew):
        iteration = recorded(_as(NoDraws(), fn), blocks)
    if iteration is None:
        drawn = _drawn(fn, xs)
        blocks.append(F.arange(count, dtype=uint32))

        def placed(*slices: Tensor) -> R:
            *block, number = slices
            chunk = Block(drawn, number, count, block[0].shape[0], each)
            made = _as(chunk, fn)(*block)
            chunk.end()
            return made

        iteration = recorded(placed, blocks)
    _, ys = finished(iteration, (), blocks, count, False, policy)
    joined: R = tree_map(lambda y: from_blocks(y, first, rows), ys)
    return joined


def _as(chunk: Chunk, fn: Callable[..., R]) -> Callable[..., R]:
    """Returns `fn`, which sets `chunk` on the current recording."""

    def run(*args: Tensor) -> R:
        recorder = current()
        assert recorder is not None
        recorder.chunk = chunk
        return fn(*args)

    return run


def _drawn(fn: Callable[..., Any], xs: Sequence[Tensor]) -> list[Draw]:
    """The draws of `fn(*xs)`; the recording is never run."""
    recorder, every = Recorder("map_chunks", current()), AllRows()
    recorder.draws = []
    with recording(recorder):
        _as(every, fn)(*(recorder.input(x.type, f"x{i}") for i, x in enumerate(xs)))
    return every.drawn
