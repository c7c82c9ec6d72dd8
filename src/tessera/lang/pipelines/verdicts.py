"""What is said of a loss that is no mean over the rows of the batch (means.py)?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from ...core.errors import GraphError, StrategyWarning, fail, lines_up
from ...ir.graph.node import Node
from ...ir.schedule.pipelines.simulate import PipelineWarning
from ...ir.schedule.pipelines.stages import depends
from .balances import has_balance
from .means import Reading, Value, alike, values


def check(once: Reading, larger: Sequence[Node]) -> None:
    """Raises GraphError if a loss, or another result, is not a mean over the rows of the batch, or
    it cannot be told. `larger` are the nodes of a recording with twice as many rows."""
    if not alike(once.nodes, larger):
        raise fail(
            GraphError,
            f"{once.name}: with more rows it is another program, so it cannot be told whether its"
            " losses are means over rows",
            [("ops", f"{len(once.nodes)}, and {len(larger)} for twice as many rows")],
            fix="write it with ops of all rows, such as ts.cumsum, not row by row",
        )
    found = values(once, larger)
    numbers = dict.fromkeys([*once.losses, *(o for o in once.outs if not o.type.rank)])
    for n in numbers:
        value = found[n]
        if n.type.dtype.is_float and value.kind == "odd":
            raise _odd(once.name, n, value)
        if n.type.dtype.is_float and value.kind == "added" and value.degree:
            raise _plain_sum(once.name, n, value.degree)
    of_batch, sizes = depends(once.nodes, once.batch), dict(zip(once.nodes, larger, strict=True))
    for n in once.outs:
        if n.type.rank and found[n].kind != "same" and not separates(once, n, sizes[n], found[n]):
            raise inseparable(once.name, n)
        if n in once.drawn and n.type.shape == sizes[n].type.shape:
            raise _drawn(once.name, n)
        if n in once.inside:
            continue
        if found[n].degree or (n not in of_batch and n.type.shape != sizes[n].type.shape):
            raise _by_number(once.name, n)
    means = {n for n in numbers if not found[n].degree}
    once.apart.update(
        i
        for i, nodes in enumerate(once.seen)
        if not all(n in means or _is_whole(once, n, sizes[n], found[n]) for n in nodes)
    )
    if "experts" not in once.told and has_balance(once, larger, [*numbers]):
        once.told.add("experts")
        warnings.warn(
            "the auxiliary loss of experts is taken of each microbatch: its mean is"
            " not that of the whole batch on one device. Where that matters, use fewer"
            " microbatches",
            PipelineWarning,
            stacklevel=lines_up(),
        )


def separates(once: Reading, n: Node, m: Node, value: Value) -> bool:
    """Whether each row of the batch gives a row of `n` along dim 0, of `value`, and nothing of the
    other rows is in it. `m` is the node in a recording with twice as many rows."""
    first, *rest = n.type.shape
    if m.type.shape != (2 * first, *rest) or value.kind != "rows" or value.mixed:
        return False
    return once.in_order(n, m)


def _is_whole(once: Reading, n: Node, m: Node, value: Value) -> bool:
    """Whether what the microbatches' values of `n` are put together to is that of the batch."""
    if n.op == "input":
        return True
    if not n.type.rank:
        return n.type.dtype.is_float and value.kind == "added" and value.degree == 0
    rows = {x.type.shape[0] for x in once.batch}
    return n.type.shape[0] in rows and separates(once, n, m, value) and value.degree == 0


def warn_of_crossing(read: Reading) -> None:
    """One StrategyWarning where an op of a stage goes across rows, and so across those of one
    microbatch; a batch norm is known to do so, and experts see to it that rows keep apart."""
    known = {"batch_norm", "moe"} - {read.name}
    n = next((n for n in read.crossing if known.isdisjoint(n.scope.split("/"))), None)
    if n is not None:
        warnings.warn(
            f"{read.name}: {n.op!r} goes across the rows of a microbatch ({n.loc}), where it would"
            " go across those of the batch without the pipeline\n  compute it before the call or"
            " of its results, or divide the batch into one microbatch",
            StrategyWarning,
            stacklevel=lines_up(),
        )


def inseparable(name: str, o: Node) -> GraphError:
    return fail(
        GraphError,
        f"{name}: a result does not separate by microbatch",
        [("result", o.type), *([("made at", o.loc)] if o.loc else [])],
        fix="return losses, gradients, or values with the batch as dim 0, each row of its own",
    )


def _drawn(name: str, n: Node) -> GraphError:
    return fail(
        GraphError,
        f"{name}: a result is random numbers alone, which each microbatch draws for itself",
        [("result", n.type), *([("made at", n.loc)] if n.loc else [])],
        at=n.loc,
        fix="draw them outside of the compiled function, and give them as an argument",
    )


def _by_number(name: str, n: Node) -> GraphError:
    return fail(
        GraphError,
        f"{name}: a result follows from the number of rows, of which a microbatch has fewer",
        [("result", n.type), *([("made at", n.loc)] if n.loc else [])],
        at=n.loc,
        fix="use x.shape[0] only to divide a sum over rows by it, or compute it before the call",
    )


def _plain_sum(name: str, n: Node, degree: float) -> GraphError:
    if math.isnan(degree):
        return _by_number(name, n)
    return fail(
        GraphError,
        f"{name}: a loss is a sum over the batch, not a mean",
        [("loss", n.type), *([("made at", n.loc)] if n.loc else [])],
        at=n.loc,
        fix="use .mean(), or divide by x.shape[0]: a loss is averaged over the microbatches",
    )


def _odd(name: str, n: Node, value: Value) -> GraphError:
    assert value.by is not None
    if value.across:
        return fail(
            GraphError,
            f"{name}: {value.by.op!r} goes across the rows of the batch, and a loss is computed of"
            " one microbatch at a time",
            [("value", value.by.type), *([("made at", value.by.loc)] if value.by.loc else [])],
            at=n.loc,
            fix="compute it before the call, or outside of the compiled function, and give the"
            " result as an argument with a row for each row of the batch",
        )
    return fail(
        GraphError,
        f"{name}: a loss is no mean over the batch's rows: {value.by.op!r} of what was added up",
        [("value", n.type), *([("made at", value.by.loc)] if value.by.loc else [])],
        at=n.loc,
        fix="give a mean or sums of rows, and divide by what is the same for all microbatches;"
        " nn.cross_entropy counts the labels of the whole batch by itself",
    )
