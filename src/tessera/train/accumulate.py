"""How does a batch that is too large fit? In microbatches whose gradients are added (guide 4,
"Advanced Data Parallel Features").

The loop form holds one microbatch's activations and one sum of gradients, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core.checks import function_of, unfit, whole
from ..core.dtypes import f32
from ..core.errors import ShapeError, UsageError, fail
from ..core.layout import Factor, dim_axes, ways
from ..core.reshard import completed as completed_type
from ..ir.graph.node import Node, reachable
from ..ir.schedule.pipelines.stages import depends
from ..lang import functions as F
from ..lang.eager import here
from ..lang.functions import relayout
from ..lang.grad import completed, grad, summed_in
from ..lang.gradient_checks import need_loss
from ..lang.local.view import View, view_of
from ..lang.loop import scan
from ..lang.map_chunks import row_blocks, to_blocks
from ..lang.operands import as_tensor, scalar
from ..lang.parameter import trained
from ..lang.pipelines.apart import ways_cut
from ..lang.pipelines.means import Reading, alike
from ..lang.pipelines.verdicts import check
from ..lang.record import WHOLE, Frame, Recorder, current, recording, symbolic
from ..lang.tape import known_as_gradients
from ..lang.tensor import Tensor
from ..lang.tree import flatten, unflatten
from ..ops.redistribute import NAMES

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
    batch.

    The loss must be a mean over rows. `nn.cross_entropy` and its like count the labels of the whole
    batch, so ignored labels and classes with weights may be distributed unevenly. `goal(loss)` is
    what is differentiated. Sums are f32. Statistics over rows inside of a module, as in batch
    normalization, and random numbers are those of a microbatch, which has some rows of each device.

    Each device adds up its own gradients, and devices sum them once, after the last microbatch, in
    `reduce_dtype` as in `ts.grad`. The gradient of a weight that lies split is divided in each
    microbatch: no device holds the sum for all of it. At the level "mesh_invariant", where both
    kinds of weight have the same bits, devices sum all gradients in each microbatch.

    Raises ShapeError if the rows do not divide, GraphError if the loss is a sum or no mean of
    rows, and the errors of `ts.grad`.

    >>> import tessera as ts
    >>> w = {"w": ts.tensor([2.0])}
    >>> mean = lambda part, w: (part["x"] * w["w"]).mean()
    >>> loss, grads = accumulated(mean, {"x": ts.tensor([1.0, 2.0, 3.0, 6.0])}, w, 2)
    >>> loss.item(), grads["w"].numpy().tolist()
    (6.0, [3.0])
    """
    fix = "it comes first: accumulated(loss_fn, batch, weights, count)"
    function_of("accumulated", "loss_fn", loss_fn, fix)

    def loss_of(part: Batch, weights: Any) -> Tensor:
        loss = loss_fn(part, weights)
        need_loss("accumulated", loss, "return the loss alone, a scalar tensor, from loss_fn")
        return loss

    if whole("accumulated", "count", count, 1) == 1:
        loss = loss_of(batch, weights)
        return loss, grad(goal(loss), weights, reduce_dtype=reduce_dtype)
    blocks = _blocks(batch, count)
    means, buffers = _ahead(loss_of, blocks, weights, count)
    leaves, spec = flatten(trained(weights))

    def one(carry: Any, part: Any) -> tuple[Any, tuple[()]]:
        total, sums, states = carry
        recorder = current()
        assert recorder is not None
        own = _Part.of(recorder, count, means)
        if own is not None:
            own.batch = [recorder.node(t) for t in part.values()]
        with _holding(recorder, buffers, states) as states:
            loss = loss_of(part, weights) * (1.0 / count)
        at_once = recorder.options.mesh_invariant
        found = flatten(grad(goal(loss), weights, reduce_partial=at_once))[0]
        sums = [s + g.to(f32) for s, g in zip(sums, found, strict=True)]
        return (total + loss, sums, states), ()

    zeros = [F.zeros_like(w).to(f32) for w in leaves]
    carry: Any = (scalar(0.0, f32), zeros, [as_tensor(getattr(*at)) for at in buffers])
    with summed_in(reduce_dtype):
        carry, _ = scan(one, carry, blocks, policy="recompute", name="microbatches")
        sums = completed(carry[1], [w.type.with_dtype(f32).complete() for w in leaves])
    for (holder, name), last in zip(buffers, carry[2], strict=True):
        setattr(holder, name, last)
    known_as_gradients(sums)
    return carry[0], unflatten(spec, sums)


@contextmanager
def _holding(
    recorder: Recorder, buffers: Sequence[tuple[Any, str]], states: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Inside, the attributes `buffers` of modules are `states`; what is set there goes into the
    list that it gives, and the attributes are as before."""
    before = [getattr(*at) for at in buffers]
    for (holder, name), state in zip(buffers, states, strict=True):
        holder.__dict__[name] = state
    last: list[Tensor] = []
    recorder.undone = True
    try:
        yield last
        last += [relayout(getattr(*at), s.type) for at, s in zip(buffers, states, strict=True)]
    finally:
        recorder.changes.undo()
        recorder.undone = False
        for (holder, name), value in zip(buffers, before, strict=True):
            holder.__dict__[name] = value


class _Part(Frame):
    """Of one microbatch. What a loss divides by, such as how many labels count, it is given as the
    mean over all microbatches: from `means`, or while these are looked for a stand-in."""

    def __init__(self, recorder: Recorder, count: int, means: Sequence[Tensor] | None) -> None:
        self.recorder, self.count, self.means = recorder, count, means
        self.ahead: dict[Node, Node] = {}
        self.batch: list[Node] = []

    @staticmethod
    def of(recorder: Recorder, count: int, means: Sequence[Tensor] | None = None) -> _Part | None:
        """The frame of `recorder` from now on, in a local body what is around its own. None in a
        pipeline, which has microbatches itself."""
        part, frame = _Part(recorder, count, means), recorder.frame
        if frame is WHOLE:
            recorder.frame = part
        elif isinstance(frame, View) and frame.outer is WHOLE:
            recorder.frame = replace(frame, outer=part)
        else:
            return None
        return part

    def row_by_row(self, recorder: Recorder, rows: Sequence[Node]) -> Frame:
        """Each row of the batch has a loss of its own, which divides by what it counts itself."""
        own = depends(recorder.builder.nodes, self.batch)
        return self if own.isdisjoint(rows) else WHOLE

    def mean_over_batch(self, recorder: Recorder, x: Tensor) -> tuple[Tensor, int]:
        if recorder is not self.recorder:
            raise fail(
                UsageError,
                "accumulated: a loss over labels is computed in a loop, where it is unknown how"
                " many labels the other microbatches have",
                [("count", x.type)],
                fix="compute it outside of ts.scan",
            )
        node = recorder.node(relayout(x, completed_type(x.type, x.type.partial_axes)))
        stand_in = recorder.builder.input(node.type, "mean") if self.means is None else node
        mean = symbolic(stand_in, recorder) if self.means is None else self.means[len(self.ahead)]
        self.ahead[stand_in] = node
        return mean, self.count


# The frame and the recorder of one microbatch, its inputs by name, its loss.
Trial = tuple[_Part | None, Recorder, dict[str, Node], Tensor]


def _ahead(
    loss_fn: Loss, blocks: Batch, weights: Any, count: int
) -> tuple[list[Tensor], list[tuple[Any, str]]]:
    """The means over all microbatches that the loss asks for, and the attributes of modules that it
    sets, such as the statistics of a batch norm. Raises GraphError where the mean of the
    microbatches' losses is not the loss of the batch."""
    part, once, inputs, loss = _trial(loss_fn, blocks, weights, count, 1)
    buffers = [(a.holder, a.name) for a in once.changes.assigned.values()]
    if part is None:
        return [], buffers
    if view_of(once) is None:  # in a local body a loss is each device's own
        seen: Trial = part, once, inputs, loss
        times, twice = 1, _trial(loss_fn, blocks, weights, count, 2)
        if not alike(once.builder.nodes, twice[1].builder.nodes):  # in blocks from some size on
            times, seen, twice = 2, twice, _trial(loss_fn, blocks, weights, count, 4)
        _check(*seen, twice[1].builder.nodes, times)
    return _means([*part.ahead.values()], once, inputs, blocks, count), buffers


def _check(
    part: _Part | None, once: Recorder, inputs: Mapping[str, Node], loss: Tensor,
    larger: Sequence[Node], times: int,
) -> None:  # fmt: skip
    """Raises GraphError unless the loss that `once` recorded, of a microbatch so many `times`, is a
    mean over rows; `larger` are the nodes for twice as many."""
    assert part is not None
    nodes = once.builder.nodes
    inside = {n for n in nodes if n.scope}
    ends, rows = [once.node(loss)], {*inputs.values()}
    devices = ways_cut(n.type for n in rows)
    read = Reading(
        "accumulated",
        nodes,
        rows,
        part.ahead,
        ends,
        inside=inside,
        blocks=times,
        devices=devices,
    )
    check(read, larger)


def _means(
    wanted: Sequence[Node], once: Recorder, inputs: Mapping[str, Node], blocks: Batch, count: int
) -> list[Tensor]:
    """The means over all microbatches of the nodes `wanted` of the recording `once` of one."""
    if not wanted:
        return []
    nodes = once.builder.nodes
    outside, needed = {node: t for t, node in once.captured}, reachable(wanted)

    def asked(_: Any, block: Any) -> Any:
        env = {node: [block[name]] for name, node in inputs.items()}
        env |= {node: [t] for node, t in outside.items()}
        for n in (n for n in nodes if n in needed and n not in env):
            if n.op == "item":
                env[n] = [env[n.args[0]][n.attrs["index"]]]
                continue
            args = [env[a][0] for a in n.args]
            moved = n.op in NAMES
            env[n] = here().apply(
                "redistribute" if moved else n.op, args, {"to": n.type} if moved else dict(n.attrs)
            )
        return (), [env[n][0] for n in wanted]

    found = scan(asked, (), blocks, name="labels")[1]
    return [F.sum(t, 0) * (1.0 / count) for t in found]


def _trial(loss_fn: Loss, blocks: Batch, weights: Any, count: int, times: int) -> Trial:
    """A recording of the loss of a microbatch, or of one so many `times` as large."""
    recorder = Recorder("microbatch", current())
    recorder.draws = []
    recorder.undone = True
    part = _Part.of(recorder, count)
    given = {}
    with recording(recorder):
        for name, t in blocks.items():
            first, *rest = t.type.dims[1:]
            rows = (Factor(first[0].size * times, first[0].axes), *first[1:])
            given[name] = recorder.input(t.type.with_dims((rows, *rest)), name)
        if part is not None:
            part.batch = [recorder.node(t) for t in given.values()]
        try:
            loss = loss_fn(given, weights)
        finally:
            recorder.changes.undo()
    inputs = {name: recorder.node(t) for name, t in given.items()}
    return part, recorder, inputs, loss


def _blocks(batch: Batch, count: int) -> dict[str, Tensor]:
    """[B, ...] as [count, B / count, ...]."""
    out = {}
    if not isinstance(batch, Mapping):
        raise unfit("microbatches", "the batch", batch, 'give a dict: {"x": x, "y": y}')
    for name, x in batch.items():
        t = as_tensor(x)
        devices = ways(dim_axes(t.type.dims[0]), t.type.sizes) if t.ndim else 1
        if not t.ndim or t.shape[0] % (row_blocks(t.type, 1)[0] * count):
            raise fail(
                ShapeError,
                f"microbatches: the rows of {name!r} do not divide into {count} on each device",
                [(name, t.type)],
                fix=f"give a batch whose rows are a multiple of {devices * count}",
            )
        out[name] = to_blocks(t, t.shape[0] // (devices * count))
    return out


__all__ = ["accumulated", "micro_batches"]
