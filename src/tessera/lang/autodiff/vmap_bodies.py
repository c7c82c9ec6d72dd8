"""Loops, branches and own gradients for many rows at once: their bodies are applied to all rows.

A loop stays one loop, whose carries have rows if they depend on rows. A branch whose bool differs
between rows computes both bodies and selects; a while loop goes on until all rows are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...ir.graph.node import Graph, Node
from ...ops.control import after, scan
from ...ops.custom import custom
from ...ops.local import cond
from ..math import functions as F
from ..math.functions import broadcast_to, permute, reshape, where
from ..record.operands import emit
from ..record.recorder import Recorder, current, recording
from ..value.tensor import Tensor
from .branches import chosen
from .custom import passed
from .iteration import body_of
from .scan import scan as scanned
from .while_loop import while_loop

Rows = tuple[Tensor, bool]
"""A value, and whether it has a leading dim of rows."""
Apply = Callable[[Graph, Sequence[Rows]], list[Rows]]  # the results of a graph for all rows


def of_rows(n: Node, args: Sequence[Rows], rows: int, apply: Apply) -> list[Rows] | None:
    """The results of `n`, an op with bodies or `after`, for all rows; None for other ops."""
    if n.op == after.name:
        return [(emit(after.name, args[0][0], args[1][0]), args[0][1])]
    if n.op == custom.name:
        return _own_gradient(n, args, rows, apply)
    if n.op == cond.name:
        return _branch(n, args, rows, apply)
    if n.op == scan.name:
        return (_loop if n.attrs["length"] is not None else _while)(n, args, rows, apply)
    return None


def _with_rows(x: Rows, rows: int) -> Tensor:
    t, has = x
    return t if has else broadcast_to(t, (rows, *t.shape))


def _each(pick: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The rows of `x` where `pick` [rows] is true, else those of `y`."""
    return where(reshape(pick, (*pick.shape, *(1,) * (x.ndim - 1))), x, y)


def _own_gradient(n: Node, args: Sequence[Rows], rows: int, apply: Apply) -> list[Rows]:
    """Values with a gradient of the user's own, whose backward is applied to all rows. The gradient
    of a tensor without rows is the sum of those of the rows."""
    values, body = n.attrs["values"], n.attrs["backward"]
    outs = [_with_rows(x, rows) for x in args[:values]]
    sources = args[values : values + len(body.outputs)]
    r = Recorder(body.name, current())
    with recording(r):
        gs = [r.input(t.type.complete(), f"g{i}") for i, t in enumerate(outs)]
        found = apply(body, [*args[values + len(sources) :], *((g, True) for g in gs)])
        gradients = [
            _with_rows(x, rows) if has else F.sum(x[0], 0) if x[1] else x[0] * rows
            for x, (_, has) in zip(found, sources, strict=True)
        ]
        ends = [r.node(g) for g in gradients]
    graph, extras = body_of(r, [r.node(g) for g in gs], ends)
    given = [*outs, *(t for t, _ in sources), *extras]
    return [(t, True) for t in passed(given, {"values": values, "backward": graph})]


def _branch(n: Node, args: Sequence[Rows], rows: int, apply: Apply) -> list[Rows]:
    (pick, each), *given = args

    def run(body: Graph) -> list[Tensor]:
        return [_with_rows(x, rows) for x in apply(body, given)]

    yes, no = n.attrs["yes"], n.attrs["no"]
    if each:
        outs = [_each(pick, a, b) for a, b in zip(run(yes), run(no), strict=True)]
    else:
        outs = chosen("vmap", pick, [lambda: run(yes), lambda: run(no)])
    return [(t, True) for t in outs]


def _carried(body: Graph, given: Sequence[bool], first: int, count: int) -> list[bool]:
    """A flag for each input of a loop's body that has rows: those `given`, and carries that depend
    on rows after some iterations."""
    flags = list(given)
    while True:
        on = {x for x, has in zip(body.inputs, flags, strict=True) if has}
        for m in body.nodes:
            if any(a in on for a in m.args):
                on.add(m)
        new = list(flags)
        for i, end in enumerate(body.outputs[:count], first):
            new[i] = new[i] or end in on
        if new == flags:
            return flags
        flags = new


def _loop(n: Node, args: Sequence[Rows], rows: int, apply: Apply) -> list[Rows]:
    body, first, count = n.attrs["body"], n.attrs["consts"], n.attrs["carries"]
    flags = _carried(body, [has for _, has in args], first, count)
    start = [
        _with_rows(x, rows) if has else x[0]
        for x, has in zip(args[first : first + count], flags[first:], strict=False)
    ]
    stacks = [_second(t) if has else t for t, has in args[first + count :]]
    found: list[bool] = []

    def step(carry: Any, xs: Any) -> Any:
        now = [*(t for t, _ in args[:first]), *carry, *xs]
        outs = apply(body, list(zip(now, flags, strict=True)))
        ends = [
            _with_rows(x, rows) if has else x[0]
            for x, has in zip(outs[:count], flags[first:], strict=False)
        ]
        found[:] = [has for _, has in outs[count:]]
        return ends, [t for t, _ in outs[count:]]

    ends, ys = scanned(
        step, start, stacks, reverse=n.attrs["reverse"], policy=n.attrs["policy"], name="vmap",
        length=n.attrs["length"],
    )  # fmt: skip
    return [
        *zip(ends, flags[first : first + count], strict=True),
        *((_second(t) if has else t, has) for t, has in zip(ys, found, strict=True)),
    ]


def _second(t: Tensor) -> Tensor:
    """`t` with its first two dims exchanged."""
    return permute(t, 1, 0, *range(2, t.ndim))


def _while(n: Node, args: Sequence[Rows], rows: int, apply: Apply) -> list[Rows]:
    body, first, count = n.attrs["body"], n.attrs["consts"], n.attrs["carries"]
    flags = _carried(body, [has for _, has in args], first, count)
    if flags[first]:
        flags[first:] = [True] * count
    each = flags[first]
    start = [
        _with_rows(x, rows) if has else x[0]
        for x, has in zip(args[first:], flags[first:], strict=True)
    ]

    def step(carry: Any) -> Any:
        now = [*(t for t, _ in args[:first]), *carry]
        outs = apply(body, list(zip(now, flags, strict=True)))
        ends = [
            _with_rows(x, rows) if has else x[0] for x, has in zip(outs, flags[first:], strict=True)
        ]
        if each:  # a row that is done stays as it is
            ends = [_each(carry[0], new, old) for new, old in zip(ends, carry, strict=True)]
        return ends

    ends = while_loop(lambda carry: F.any(carry[0]) if each else carry[0], step, start)
    return list(zip(ends, flags[first:], strict=True))
