"""Gradient accumulation: a large batch in microbatches whose gradients are summed (guide 4,
"Advanced Data Parallel Features").

The batch is split over an axis in time. The loop holds one microbatch's activations and one sum of
gradients, for any number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from ..core.checks import unfit
from ..core.declared import Called, Count
from ..core.errors import ShapeError
from ..core.layout import dim_axes, shard_count
from ..core.public import checked
from ..lang.autodiff.grad import grad
from ..lang.autodiff.gradient_checks import need_loss
from ..lang.autodiff.map_chunks import row_blocks, to_blocks
from ..lang.jit.jit import jit
from ..lang.parallel.microbatches import in_microbatches
from ..lang.record.operands import as_tensor
from ..lang.record.recorder import current
from ..lang.value.tensor import Tensor

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch, Any], Tensor]


def micro_batches(batch: Batch, count: int) -> list[dict[str, Tensor]]:
    """`batch` in `count` parts of equal rows, cut within each device's rows.

    Raises ShapeError if the rows do not divide.

    >>> import tessera as ts
    >>> [part["x"].numpy().tolist() for part in micro_batches({"x": ts.arange(4)}, 2)]
    [[0, 1], [2, 3]]
    """
    out: dict[str, Tensor] = {}
    for name, t in _tensors(batch).items():
        devices = shard_count(dim_axes(t.type.dims[0]), t.type.sizes) if t.ndim else 1
        if not t.ndim or t.shape[0] % (row_blocks(t.type, 1)[0] * count):
            raise ShapeError(
                f"microbatches: the rows of {name!r} do not divide into {count} on each device",
                rows=[(name, t.type)],
                fix=f"give a batch whose rows are a multiple of {devices * count}",
            )
        out[name] = to_blocks(t, t.shape[0] // (devices * count))
    return [{name: t[i] for name, t in out.items()} for i in range(count)]


@checked
def accumulated(
    loss_fn: Annotated[Loss, Called("it comes first: accumulated(loss_fn, batch, weights, count)")],
    batch: Batch,
    weights: Any,
    count: Count,
    goal: Callable[[Tensor], Tensor] = lambda loss: loss,
    reduce_dtype: object = None,
) -> tuple[Tensor, Any]:
    """(loss, gradients) of `loss_fn(batch, weights)`, computed in `count` microbatches.

    Both equal the results of the whole batch, for any loss. A computation that needs all rows,
    such as the number of labels that count or the statistics of a batch norm, ends one loop over
    the microbatches, and another begins; values of the first loop that the second reads are kept
    for all rows. Rows that do not divide into `count` are computed in more microbatches.
    `goal(loss)` is the value that is differentiated.

    Each device sums its own gradients in f32, and devices sum them once, after the last microbatch,
    in `reduce_dtype` as in `ts.grad`. The gradient of a split weight is reduced in each microbatch,
    except at the level "mesh_invariant": no device holds the whole sum. Raises UsageError if
    `batch` is not a dict, and the errors of `ts.grad`.

    >>> import tessera as ts
    >>> w = {"w": ts.tensor([2.0])}
    >>> mean = lambda part, w: (part["x"] * w["w"]).mean()
    >>> loss, grads = accumulated(mean, {"x": ts.tensor([1.0, 2.0, 3.0, 6.0])}, w, 2)
    >>> loss.item(), grads["w"].numpy().tolist()
    (6.0, [3.0])
    """
    if current() is None:
        run = jit(lambda batch, weights: accumulated(
            loss_fn, batch, weights, count, goal, reduce_dtype))  # fmt: skip
        return run.at_once(batch, weights)
    batch_tensors = _tensors(batch)
    tensors = list(batch_tensors.values())
    first = next((t for t in tensors if t.ndim), None)
    parts = dict(zip(batch_tensors, in_microbatches(tensors, count, first), strict=True))
    loss = loss_fn(parts, weights)
    need_loss("accumulated", loss, "return the loss alone, a scalar tensor, from loss_fn")
    return loss, grad(goal(loss), weights, reduce_dtype=reduce_dtype)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    if not isinstance(batch, Mapping):
        raise unfit("microbatches", "the batch", batch, 'give a dict: {"x": x, "y": y}')
    return {name: as_tensor(x) for name, x in batch.items()}


__all__ = ["accumulated", "micro_batches"]
