"""Is the mean of the devices' numbers that of the whole batch? Only where each is a mean, or a sum,
of the device's rows.

What a device adds up over its rows is read as an open sum over the devices. Ops that an open sum
passes keep the mean; the quotient of two such sums, a root or a product of them does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ...core.dtypes import bool_
from ...core.errors import StrategyWarning, lines_up
from ...core.layout import TensorType
from ...ir.graph.node import Node
from ...ops.control import item, scan
from ...ops.op import OPS, infer
from ...passes.loops import adds_up

# What keeps a mean, also where only one argument is added up; a choice guards a loss against NaN.
PASSED = ("each", "joint")


def check_mean(end: Node, axes: Sequence[str], told: set[Node]) -> None:
    """One StrategyWarning where the mean over `axes` of each device's number `end` is not that
    number of the whole batch and `told` does not have it."""
    by = _odd(end, frozenset(axes))
    if by is None or by in told:
        return
    told.add(by)
    over = ", ".join(repr(a) for a in axes)
    warnings.warn(
        f"a number that is averaged over {over} is no mean of rows: {by.op!r} of what each device"
        f" added up ({by.loc}) gives the mean of the devices' results, not the result of the whole"
        f" batch\n  combine the sums first: dist.all_reduce(x.sum(), {over})",
        StrategyWarning,
        stacklevel=lines_up(),
    )


def _odd(end: Node, axes: frozenset[str]) -> Node | None:
    """The first node on the way to `end` that is not linear in what a device added up."""
    summed: set[Node] = set()
    same: set[Node] = set()  # on all devices, though it stands for what each has of its own
    for n in _in_order(end):
        t = n.types[0]
        cut = any(axes.intersection((*t.split_axes, *t.partial_axes)) for t in n.types)
        if not cut and (n.args or axes.isdisjoint(t.varying)) and same.issuperset(n.args):
            same.add(n)
            continue
        if len(n.types) > 1 or t.rank or t.dtype is bool_ or not axes.intersection(t.varying):
            continue
        if _added_up(n):
            summed.add(n)
            continue
        rows = any(a.types[0].rank and axes.intersection(a.types[0].varying) for a in n.args)
        if not rows and summed.isdisjoint(n.args):
            continue
        summed.add(n)
        if n.kind.degree in PASSED or (n.kind.sums and rows):
            continue
        if rows or not _passes(n, summed, axes):
            return n
    return None


def _added_up(n: Node) -> bool:
    """Whether `n` is what a loop has added up, such as a loss in blocks of rows."""
    loop, at = (n.args[0], n.attrs["index"]) if n.op == item.name else (n, 0)
    return loop.op == scan.name and adds_up(loop, at)


def _passes(n: Node, summed: set[Node], axes: frozenset[str]) -> bool:
    """Whether `n`, of numbers, lets open sums over `axes` through."""
    ins = [_open(a.type, axes) if a in summed else a.type.with_varying(()) for a in n.args]
    got = infer(OPS[n.op], tuple(ins), dict(n.attrs))
    return all(a.partial == b.partial for a, b in zip(got.wants, ins, strict=True))


def _open(t: TensorType, axes: frozenset[str]) -> TensorType:
    more = [(a, "sum") for a in t.varying if a in axes]
    return t.with_varying(()).with_partial((*t.partial, *more))


def _in_order(end: Node) -> list[Node]:
    """`end` and all that it depends on, arguments first."""
    order: list[Node] = []
    seen: set[Node] = set()
    todo: list[tuple[Node, bool]] = [(end, False)]
    while todo:
        n, ready = todo.pop()
        if ready:
            order.append(n)
        elif n not in seen:
            seen.add(n)
            todo.append((n, True))
            todo += [(a, False) for a in n.args]
    return order
