"""Bodies of loops: recorded once, and put into one op.

`settled` records a body with a carry that ends in the layout in which it began; `emitted` makes the
loop. Random numbers in a body are those of the same iterations written out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from ...core.declared import OneOf
from ...core.errors import ShapeError, UsageError
from ...core.layout import TensorType
from ...ir.graph.node import Emit, Graph, Node, input_node
from ...ops.cast import cast as to
from ...ops.control import item
from ...ops.elementwise import add
from ...ops.elementwise import save_for_backward as save
from ...ops.redistribute import NAMES, all_reduce, gathers_for_use
from ..math.functions import relayout, reshape
from ..math.random import keys
from ..record.operands import as_tensor, cast, emit, emit_many
from ..record.recorder import Recorder, current, recording, symbolic
from ..record.tree import Spec, fitted, flatten, unflatten
from ..value.eager import current_trace
from ..value.host_outputs import each_iteration
from ..value.tensor import Tensor

Keep = Callable[[Node], bool]  # whether a result is kept for the gradient
Policy = Annotated[str, OneOf("save", "recompute", "products", "together")]


def finished(
    iteration: Iteration,
    start: Sequence[Tensor],
    rows: Sequence[Tensor],
    length: int,
    reverse: bool,
    policy: str,
    keep: Keep | None = None,
) -> tuple[list[Tensor], Any]:
    """Returns (the last carry, the stacked ys) of a `scan` with the body `iteration`, and registers
    its host outputs. `keep`: see `emitted`."""
    ends, ys, seen = emitted(iteration, start, rows, length, reverse, policy, keep)
    for output in each_iteration(iteration.recorder.host_outputs, length, reverse, seen):
        current_trace().show(output.tensors, output.act)
    return ends, unflatten(iteration.y_spec, ys)


def tensors(tree: Any) -> tuple[list[Tensor], Spec]:
    """Returns (the leaves of `tree` as tensors, the structure of the tree of tensors)."""
    leaves, spec = flatten(tree)
    made = [as_tensor(t) for t in leaves]
    return made, flatten(unflatten(spec, made))[1]


def length_of(name: str, rows: Sequence[Tensor], fix: str = "give at least one tensor") -> int:
    """The common leading length of the tensors. Raises ShapeError, with `fix`, if there is none."""
    if not rows:
        raise ShapeError(f"{name}: there is no tensor to take turns over", fix=fix)
    lengths = {t.shape[0] if t.shape else -1 for t in rows}
    if len(lengths) != 1 or -1 in lengths:
        raise ShapeError(
            f"{name}: the tensors need one leading length",
            rows=[(f"x{i}", t.type) for i, t in enumerate(rows)],
            fix="give tensors whose first dims are equal"
            if any(t.shape for t in rows)
            else "join what the turns take in one tensor: ts.tensor(numbers), ts.stack(tensors)",
        )
    return lengths.pop()


@dataclass(frozen=True)
class Iteration:
    """A recorded loop body: inputs `carry` and `xs`, results `ends` and `ys`."""

    recorder: Recorder
    carry: list[Tensor]
    xs: list[Tensor]
    ends: list[Tensor]
    ys: list[Tensor]
    y_spec: Spec

    def carry_types(self, decides: bool) -> list[TensorType]:
        """The types of the carry after this iteration, before the layout is forced. `decides`: see
        `settled`."""
        types = []
        alike = self.ends[0].type.varying if decides else ()
        for end, start in zip(self.ends, self.carry, strict=True):
            last, first = self.recorder.node(end), self.recorder.node(start)
            t = _natural(last, first)
            if decides and not (last.op == add.name and first in last.args):
                t = t.complete()
            own = (*start.type.varying, *alike)
            if own and t.mesh is None:
                t = t.on(start.type.mesh or self.ends[0].type.mesh)
            types.append(t.with_varying((*t.varying, *own)))
        return types


Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]


def settled(
    name: str,
    call: Call,
    carry_spec: Spec,
    start: Sequence[Tensor],
    rows: Sequence[Tensor],
    decides: bool = False,
) -> Iteration:
    """Records the body with the carry layout that the body itself produces: a sum stays partial
    until after the loop. In a while loop the first carry `decides` whether to go on. All carries
    then vary over the devices over which it varies; a sum stays partial only if the body does no
    more than add to it, as the condition may read the carry."""
    types = [t.type for t in start]
    for attempt in itertools.count():
        iteration = _recorded(name, call, carry_spec, types, rows)
        carry_types = iteration.carry_types(decides)
        grown = any(a.varying != b.varying for a, b in zip(types, carry_types, strict=True))
        if carry_types == types or (attempt and not grown):
            break
        types = carry_types
    with recording(iteration.recorder):
        ends = [relayout(e, c.type) for e, c in zip(iteration.ends, iteration.carry, strict=True)]
    return replace(iteration, ends=ends)


def _recorded(
    name: str,
    call: Call,
    carry_spec: Spec,
    types: Sequence[TensorType],
    rows: Sequence[Tensor],
) -> Iteration:
    """Records the body with a carry of these `types`. Raises UsageError if it returns no pair,
    ShapeError if the carry changes."""
    r = Recorder(name, current())
    r.draws = []
    with recording(r):
        carry = [r.input(t, f"carry{i}") for i, t in enumerate(types)]
        xs = [r.input(t.type.with_dims(t.type.dims[1:]), f"x{i}") for i, t in enumerate(rows)]
        ends, ys, y_spec = called(call, carry_spec, carry, xs)
    return Iteration(r, carry, xs, ends, ys, y_spec)


def called(
    call: Call, carry_spec: Spec, carry: Sequence[Tensor], xs: Sequence[Tensor]
) -> tuple[list[Tensor], list[Any], Spec]:
    """Returns (the carry after `call`, its ys, their structure). Raises UsageError if it returns no
    pair, ShapeError if the carry changes."""
    results = call(carry, xs)
    if not isinstance(results, tuple) or len(results) != 2:
        raise UsageError(
            f"scan: the body gave a {type(results).__name__}, not a pair",
            fix="return (carry, y); y may be ()",
        )
    (ends, new_spec), (ys, y_spec) = tensors(results[0]), flatten(results[1])
    ends = fitted(
        "scan: the carry changes its shape, dtype or structure", ("before", "after"),
        carry_spec, carry, new_spec, ends, "return a carry like the one that came in",
    )  # fmt: skip
    return ends, ys, y_spec


def emitted(
    iteration: Iteration,
    start: Sequence[Tensor],
    rows: Sequence[Tensor],
    length: int | None,
    reverse: bool,
    policy: str,
    keep: Keep | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns (the last carry, the stacked ys, the stacked host outputs) of a `scan` with the body
    `iteration`. With `keep` it is a region, and results that `keep` returns True for are kept for
    the gradient."""
    r = iteration.recorder
    draws = r.draws or []
    host_tensors = r.host_tensors
    outs = [r.node(t) for t in (*iteration.ends, *map(as_tensor, iteration.ys), *host_tensors)]
    every = list(rows) if length is None else [*rows, *iteration_keys(length, draws)]
    given = [r.node(t) for t in (*iteration.carry, *iteration.xs, *draws)]
    graph, consts = body_of(r, given, outs, keep is not None)
    graph = graph if keep is None else _marked(graph, keep)
    carry = [relayout(t, c.type) for t, c in zip(start, iteration.carry, strict=True)]
    results = emit_many(
        "scan",
        *consts,
        *carry,
        *every,
        body=graph,
        consts=len(consts),
        carries=len(carry),
        length=length,
        reverse=reverse,
        policy=policy,
    )
    k, stop = len(carry), len(results) - len(host_tensors)
    return results[:k], results[k:stop], results[stop:]


def _marked(body: Graph, keep: Keep) -> Graph:
    """`body` with a mark on the results of the nodes that `keep` returns True for: policies that
    recompute save these."""

    def mark(was: Node, n: Node, emit: Emit) -> Node | None:
        if n.op == "input" or len(n.types) > 1:
            return None
        if not keep(n.args[0] if n.op == item.name else n):
            return None
        return emit(Node(save.name, (emit(n),), n.types, {}, n.loc, n.scope))

    return body.rewrite(mark, lambda inner: inner)


def iteration_keys(length: int, draws: Sequence[Tensor]) -> list[Tensor]:
    """Returns the stacked keys of all iterations for each key in `draws`: the keys that the same
    iterations draw with when they are written out."""
    counts = [t.size // 2 for t in draws]
    each = sum(counts)
    if not each:
        return []
    every = reshape(keys(length * each), (length, each, 2))
    made, at = [], 0
    for t, count in zip(draws, counts, strict=True):
        starts, stops = (0, at, 0), (length, at + count, 2)
        part = emit("slice", every, starts=starts, stops=stops, steps=(1, 1, 1))
        made.append(reshape(part, (length, *t.shape)))
        at += count
    return made


def _natural(end: Node, start: Node) -> TensorType:
    """The type that a carry takes on by itself. A sum completed only to be added to the carry is
    added partial instead, so that a sum over all iterations is completed once, after them."""
    if end.op == add.name and start in end.args:
        other = end.args[end.args[0] is start]
        summed = other.args[0] if other.op == to.name else other
        first = summed
        while first.op == all_reduce.name and first.note == "for add":
            first = first.args[0]
        if first is not summed and other.type is end.type:
            return first.type.with_dtype(end.type.dtype)
    return end.type if all(k == "sum" for _, k in end.type.partial) else end.type.complete()


def body_of(
    r: Recorder, inner: list[Node], outs: list[Node], is_region: bool = False
) -> tuple[Graph, list[Tensor]]:
    """Returns (the body, the tensors from outside that it takes as constants).

    A change of layout or dtype of a constant is the same in every iteration, so it is moved out of
    the loop. Out of a region, which has one iteration, only gathers of weights at rest are moved:
    other results would be kept for the gradient in place of the constant.
    """
    graph = r.builder.graph(outs)
    consts = {node: t for t, node in r.captured}
    changes: dict[Node, Node] = {}  # changes of constants, with their arguments
    for n in graph.nodes:
        same = n.op in NAMES or n.op == to.name
        if same and (n.args[0] in consts or n.args[0] in changes):
            changes[n] = n.args[0]
    if is_region:
        wanted = {n for n in changes if gathers_for_use(n)}
        for n in reversed(changes):
            wanted.update([changes[n]] if n in wanted else ())
        changes = {n: x for n, x in changes.items() if n in wanted}
    moved: dict[Node, Node] = {}
    for n, x in changes.items():
        moved[n] = input_node(n.type, f"moved{len(moved)}")
        consts[moved[n]] = _outside(consts[moved.get(x, x)], n)
    body = graph.part([*consts, *inner], graph.outputs, moved)
    used = {a for n in body.nodes for a in n.args} | set(body.outputs)
    kept = [n for n in consts if n in used]
    inputs = (*kept, *inner)
    nodes = (*inputs, *(n for n in body.nodes if n.op != "input"))
    return replace(body, nodes=nodes, inputs=inputs), [consts[n] for n in kept]


def _outside(t: Tensor, n: Node) -> Tensor:
    """Applies the change of layout or dtype `n` to the tensor `t`, outside of the loop."""
    recorder = current()
    if n.op == to.name:
        return cast(t, n.type.dtype)
    if recorder is None:
        return relayout(t, n.type)
    recorder.builder.loc = n.loc
    made = recorder.builder.redistribute(recorder.node(t), n.type, n.note)
    recorder.builder.loc = None
    return symbolic(made, recorder)
