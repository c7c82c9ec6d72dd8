"""How does a batch that is too large fit? In microbatches whose gradients are added (guide 4,
"Advanced Data Parallel Features").

The loop form holds one microbatch's activations and one sum of gradients, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.checks import whole
from ..core.dtypes import f32
from ..core.errors import ShapeError, fail
from ..lang import functions as F
from ..lang.grad import completed, grad, summed_in
from ..lang.loop import row_blocks, scan, to_blocks
from ..lang.operands import as_tensor, scalar
from ..lang.parameter import trained
from ..lang.record import current
from ..lang.tensor import Tensor
from ..lang.tree import flatten, unflatten

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch, Any], Tensor]


def micro_batches(batch: Batch, count: int) -> list[dict[str, Tensor]]:
    """`batch` in `count` parts of equal rows, each device's rows cut in place.

    Raises ShapeError if the rows do not divide.

    >>> import tessera as ts
    >>> [part["x"].numpy().tolist() for part in micro_batches({"x": ts.arange(4)}, 2)]
    [[0, 1], [2, 3]]
    """
    blocks = _blocks(batch, count)
    return [{name: t[i] for name, t in blocks.items()} for i in range(count)]


def accumulated(
    loss_fn: Loss,
    batch: Batch,
    weights: Any,
    count: int,
    goal: Callable[[Tensor], Tensor] = lambda loss: loss,
    reduce_dtype: object = None,
) -> tuple[Tensor, Any]:
    """(loss, gradients) of `loss_fn(batch, weights)` over `count` microbatches: those of the whole
    batch, where the loss is a mean over tokens.

    Where the batch has `labels`, a microbatch weighs as many as its labels that are not -100, so
    that the result is the whole batch's. `goal(loss)` is what is differentiated. Sums are f32.

    Each device adds up its own gradients, and devices sum them once, after the last microbatch, in
    `reduce_dtype` as in `ts.grad`. The gradient of a weight that lies split is divided in each
    microbatch: no device holds the sum for all of it. At the level "mesh_invariant", where both
    kinds of weight have the same bits, devices sum all gradients in each microbatch.

    Raises ShapeError if the rows do not divide, and the errors of `ts.grad`.

    >>> import tessera as ts
    >>> w = {"w": ts.tensor([2.0])}
    >>> mean = lambda part, w: (part["x"] * w["w"]).mean()
    >>> loss, grads = accumulated(mean, {"x": ts.tensor([1.0, 2.0, 3.0, 6.0])}, w, 2)
    >>> loss.item(), grads["w"].numpy().tolist()
    (6.0, [3.0])
    """
    if whole("accumulated", "count", count, 1) == 1:
        loss = loss_fn(batch, weights)
        return loss, grad(goal(loss), weights, reduce_dtype=reduce_dtype)
    blocks = _blocks(batch, count)
    share = _shares(blocks, count)
    leaves, spec = flatten(trained(weights))

    def one(carry: Any, iteration: Any) -> tuple[Any, tuple[()]]:
        (total, sums), (part, share) = carry, iteration
        loss = loss_fn(part, weights) * share
        recorder = current()
        assert recorder is not None
        at_once = recorder.options.mesh_invariant
        found = flatten(grad(goal(loss), weights, reduce_partial=at_once))[0]
        return (total + loss, [s + g.to(f32) for s, g in zip(sums, found, strict=True)]), ()

    carry: Any = (scalar(0.0, f32), [F.zeros_like(w).to(f32) for w in leaves])
    with summed_in(reduce_dtype):
        carry, _ = scan(one, carry, (blocks, share), policy="recompute", name="microbatches")
        sums = completed(carry[1], [w.type.with_dtype(f32).complete() for w in leaves])
    return carry[0], unflatten(spec, sums)


def _blocks(batch: Batch, count: int) -> dict[str, Tensor]:
    """[B, ...] as [count, B / count, ...]."""
    out = {}
    for name, x in batch.items():
        t = as_tensor(x)
        devices = row_blocks(t.type, 1)[0] if t.ndim else 1
        if not t.ndim or t.shape[0] % (devices * count):
            raise fail(
                ShapeError,
                f"microbatches: the rows of {name!r} do not divide into {count} on each device",
                [(name, t.type)],
                fix=f"give a batch whose rows are a multiple of {devices * count}",
            )
        out[name] = to_blocks(t, t.shape[0] // (devices * count))
    return out


def _shares(blocks: dict[str, Tensor], count: int) -> Tensor:
    """What part of the whole mean each microbatch is, f32[count]."""
    if "labels" not in blocks:
        return F.full(count, 1.0 / count)
    labels = blocks["labels"]
    counted = F.sum((labels.reshape(count, -1) != -100).to(f32), 1)
    return counted / F.maximum(F.sum(counted), 1.0)


__all__ = ["accumulated", "micro_batches"]
