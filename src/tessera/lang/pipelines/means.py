"""Is a loss of microbatches, averaged, that of the batch? Only where it is a mean over rows.

Two recordings of one program, of a batch and of one twice as large, are read side by side. What
grows has a value for each row. What does not, and comes from rows, is added up over them. Linear
steps keep it so. Its degree says by what power of two a doubled batch would change it: 1 for a sum,
0 for a mean, whose divisor is in the program as a number that doubles too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.dtypes import bool_
from ...core.errors import GraphError, StrategyWarning, fail, lines_up
from ...ir.graph.node import Node, reachable
from ...ir.schedule.pipelines.stages import depends
from ...ops.cast import cast
from ...ops.control import item, scan
from ...ops.create import full, iota
from ...ops.elementwise import add, maximum, minimum, mul, where
from ...ops.elementwise import inside as inside_
from ...ops.indexing import take
from ...ops.movement import broadcast_to, concat, reshape, slice_, transpose
from ...ops.reduce import argsort, cumsum, flip
from .microbatch import PipeState

Degree = float | None  # None: it cannot be told
# What leaves a row's place among all, times a number and with another added, as it is.
COUNTING = frozenset(
    op.name for op in (iota, add, mul, where, cast, reshape, broadcast_to, transpose)
)
KEEPING = frozenset(op.name for op in (maximum, minimum))  # a number from being too small
ALONG = frozenset(op.name for op in (flip, cumsum, argsort, take))  # ops along one dim


@dataclass(frozen=True)
class Value:
    """`kind` "same" in all microbatches, of "rows", "added" up over them, or "odd": what the node
    `by` made of that, so that no average of parts is the whole; it went `across` rows. Rows with
    what was added up as a term are `mixed`. Numbers made of rows' places among all, `places`, say
    which row is taken; what else is made of them goes across."""

    kind: str
    degree: Degree = 0.0
    by: Node | None = None
    across: bool = False
    mixed: bool = False
    places: bool = False


@dataclass
class Reading:
    """What is recorded of a part of the batch: the `nodes`, those that hold it, those that are
    means over all parts and of what, the losses and all results. Nodes `inside` of a model may go
    across the rows of a part, as a batch normalization does. Where the parts are those of devices
    along `axes`, what is equal along them is no part."""

    name: str
    nodes: Sequence[Node]
    batch: Collection[Node]
    ahead: Mapping[Node, Node]
    losses: Sequence[Node]
    outs: Sequence[Node] = ()
    inside: Collection[Node] = ()
    told: Collection[str] = ()
    axes: Collection[str] = ()
    crossing: list[Node] = field(default_factory=list)  # is told of those inside that go across


def alike(once: Sequence[Node], larger: Sequence[Node]) -> bool:
    """Whether two recordings are of one program, for batches of two sizes."""
    return [n.op for n in once] == [n.op for n in larger]


def cuts_more(once: Sequence[Node], larger: Sequence[Node]) -> bool:
    """Whether the recording for more rows cuts values that are whole in the other: it has not
    taken as many rows of all that should have them (`ts.gather` takes an index with fewer)."""
    counts = [sum(n.op == slice_.name for n in nodes) for nodes in (once, larger)]
    return counts[0] < counts[1]


def values(once: Reading, larger: Sequence[Node]) -> dict[Node, Value]:
    """How the nodes of `once` depend on the rows of the batch; `larger` are the nodes of a
    recording with twice as many rows, which is `alike`."""
    found: dict[Node, Value] = {}
    for n, m in zip(once.nodes, larger, strict=True):
        found[n] = _value(once, n, m, found, n in once.inside)
    return found


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
    for n in dict.fromkeys([*once.losses, *(o for o in once.outs if not o.type.rank)]):
        value = found[n]
        # The auxiliary loss of experts is a product of two means; it has been told of.
        product = value.by is not None and value.by.kind.degree == "product"
        known = product and "experts" in once.told
        if n.type.dtype.is_float and value.kind == "odd" and not known:
            raise _odd(once.name, n, value)
        if n.type.dtype.is_float and value.kind == "added" and value.degree:
            raise _plain_sum(once.name, n)
    for n in once.outs:
        if n.type.rank and found[n].kind in ("added", "odd"):
            raise inseparable(once.name, n)


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


def nodes_of(state: PipeState) -> list[Node]:
    """What was recorded in `state`."""
    assert state.recorder is not None
    return state.recorder.builder.nodes


def reading(once: PipeState) -> Reading:
    """That of a pipelined function, whose stages see one microbatch."""
    nodes, pipe = nodes_of(once), once.pipe
    late = depends(nodes, once.asked)
    inside = [n for first, stop in once.spans for n in nodes[first:stop]]
    if pipe.body is not None:
        inside = [n for n in nodes if pipe.name in n.scope.split("/")]
    outs = [o for o in once.outputs if o not in late and o.op != "input"]
    return Reading(
        pipe.name, nodes, once.batch, once.ahead, once.losses, outs, {*inside}, pipe.said
    )


def _value(once: Reading, n: Node, m: Node, values: dict[Node, Value], inside: bool) -> Value:
    """How the value of `n` depends on the rows of the batch: not at all ("same"), row by row
    ("rows"), as a sum over rows ("added", with the degree of their number in it), or otherwise
    ("odd"). `m` is the node in a recording with more rows. What is `inside` of a stage and goes
    across rows goes across those of a microbatch."""
    if n in once.ahead:
        return Value("same", values[once.ahead[n]].degree)
    grown = any(a.size != b.size for a, b in zip(n.types, m.types, strict=True))
    args = [values[a] for a in n.args]
    if once.axes and not any(a in t.varying for t in n.types for a in once.axes):
        return Value("same", _degree(n, m, args), places=grown and _by_places(n, m, args))
    kinds = {v.kind for v in args}
    if n.op == "input":
        return Value("rows" if n in once.batch or grown else "same")
    if grown:
        odd = next((v for v in args if v.kind == "odd"), None)
        mixed = [i for i, v in enumerate(args) if v.kind == "added" or v.mixed]
        places, across = _by_places(n, m, args), _across(n, m, args)
        counts = n.op in COUNTING or n.type.dtype is bool_
        if places and counts and not n.type.dtype.is_float:
            return Value("rows", _degree(n, m, args), places=True)
        across = across or (places and n.op != inside_.name)  # whether a place exists
        if odd is None and not inside and _pairs(n, m, args):
            return Value("odd", None, n, across=True)
        if inside and odd is not None and odd.across:
            return odd
        if inside or not (odd or mixed or across):
            if inside and (odd or mixed or across or _pairs(n, m, args)):
                once.crossing.append(n)
            return Value("rows", _degree(n, m, args))
        if odd is None and mixed and not across:
            rest = {v.kind for i, v in enumerate(args) if i not in mixed}
            if n.kind.degree in ("each", "joint") or (
                rest <= {"same"} and mixed == [0] and n.kind.degree in ("product", "quotient")
            ):
                return Value("rows", _degree(n, m, args), mixed=True)
        return odd or Value("odd", None, n, across=True)
    if kinds <= {"same"}:
        return Value("same", _degree(n, m, args))
    odd = next((v for v in args if v.kind == "odd"), None)
    if odd is not None:
        return odd
    if n.kind.bodies or (n.op == "item" and n.args[0].kind.bodies):
        return Value("added", None)
    if "rows" in kinds:
        if not n.kind.sums:
            return Value("odd", None, n)
        degree = _degree(n, m, args)
        return Value("added", None if degree is None else degree + 1)
    added = [i for i, v in enumerate(args) if v.kind == "added"]
    degree = _degree(n, m, args)
    match n.kind.degree:
        case "each":
            linear = True
        case "product":
            linear = len(added) == 1
        case "quotient":
            linear = added == [0]
        case "joint":
            chooses = n.op == where.name and 0 in added  # by what was added up
            linear = not chooses and len({v.degree for v in args if v.degree is not None}) <= 1
        case _:
            linear = False
    return Value("added", degree) if linear else Value("odd", None, n)


def _rows(n: Node, m: Node) -> int | None:
    """The dim of the rows; None where another of its results has them."""
    pairs = enumerate(zip(n.types[0].shape, m.types[0].shape, strict=True))
    return next((d for d, (a, b) in pairs if a != b), None)


def _by_places(n: Node, m: Node, args: list[Value]) -> bool:
    """Whether it is made of the rows' places among all, but for rows that are taken by them: each
    its own, as in `x[ts.arange(x.shape[0]), labels]`."""
    if n.op == iota.name:
        return bool(n.attrs["dim"] == _rows(n, m))
    return n.op != take.name and any(v.places for v in args)


def _across(n: Node, m: Node, args: list[Value]) -> bool:
    """Whether a row of `n` comes from other rows."""
    dim = _rows(n, m)
    if dim is None or n.op == scan.name:  # of whose results each is asked
        return False
    if n.op == item.name and n.args[0].op == scan.name:  # from row to row, or block by block
        loop = n.args[0]
        body, first = loop.attrs["body"], loop.attrs["consts"]
        carried = body.inputs[first : first + loop.attrs["carries"]]
        stacked = n.attrs["index"] >= len(carried) and dim == 0  # else rows are inside the body
        return stacked and not reachable(body.outputs[len(carried) :]).isdisjoint(carried)
    if n.op == slice_.name:
        source = n.args[0]
        joins = source.op == concat.name and source.attrs["dim"] == dim  # parts of it may be whole
        return not joins and source.type.shape[dim] != n.type.shape[dim]
    if n.op not in ALONG or n.attrs["dim"] != dim or args[0].kind != "rows":
        return False  # or rows say what they take of a table
    return n.op != take.name or not args[1].places


def _pairs(n: Node, m: Node, args: list[Value]) -> bool:
    """Whether `n` is the first with an element for each pair of rows."""
    before = max((_growth(a, b) for a, b in zip(n.args, m.args, strict=True)), default=0.0)
    return 1.0 < before < _growth(n, m) and {v.kind for v in args} == {"rows"}


def _growth(n: Node, m: Node) -> float:
    """How many times as many elements as `n` the node `m` has."""
    return max(b.size / max(1, a.size) for a, b in zip(n.types, m.types, strict=True))


def _degree(n: Node, m: Node, args: list[Value]) -> Degree:
    """By what power of two the elements of `n` change where the batch is doubled."""
    if n.op == full.name:
        a, b = n.attrs["value"], m.attrs["value"]
        return math.log2(b / a) if a and b and a * b > 0 and math.isfinite(a * b) else 0.0
    given = [v.degree for v in args]
    if None in given:
        return None
    known = [d for d in given if d is not None]
    kept = n.op in KEEPING or n.kind.degree in ("each", "joint")
    if kept and {v.kind for v in args} == {"same"} and len(some := {*known} - {0.0}) == 1:
        return some.pop()  # a number of rows that is kept from zero: max(count, 1)
    match n.kind.degree:
        case "product":
            return sum(known)
        case "quotient":
            return known[0] - known[1]
        case "each" | "joint":
            return max(known, default=0.0) if len(set(known)) < 2 else None
        case _:
            return None if any(known) else 0.0


def inseparable(name: str, o: Node) -> GraphError:
    return fail(
        GraphError,
        f"{name}: a result does not separate by microbatch",
        [("result", o.type), *([("made at", o.loc)] if o.loc else [])],
        fix="return losses (float scalars), gradients, or values with the batch as dim 0",
    )


def _plain_sum(name: str, n: Node) -> GraphError:
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
