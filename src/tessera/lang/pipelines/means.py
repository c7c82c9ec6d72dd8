"""Is a loss of microbatches, averaged, that of the batch? Only where it is a mean over rows.

Two recordings of one program, of a batch and of one twice as large, are read side by side. What
grows has a value for each row. What does not, and comes from rows, is added up over them. Linear
steps keep it so. Its degree says by what power of two a doubled batch would change it: 1 for a sum,
0 for a mean, whose divisor is in the program as a number that doubles too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from ...core.dtypes import bool_
from ...core.layout import TensorType, plain
from ...ir.graph.node import Node, input_node, reachable
from ...ir.graph.oracle import value_of
from ...ops.cast import cast
from ...ops.control import item, scan
from ...ops.create import full, iota
from ...ops.custom import custom
from ...ops.elementwise import add, maximum, minimum, mul, where
from ...ops.elementwise import inside as inside_
from ...ops.indexing import take
from ...ops.movement import broadcast_to, concat, pad, reshape, slice_, transpose
from ...ops.redistribute import NAMES
from .apart import (
    changes_layout,
    in_blocks,
    kept_apart,
    one_after_other,
    rows_of,
)
from .loops import MOVING, added_to, of_loop

Degree = float | None  # None: it cannot be told
NOTHING: Mapping[Any, Any] = MappingProxyType({})
ODD = math.nan  # the number of rows is in it, and by no power
# What leaves a row's place among all, times a number and with another added, as it is.
COUNTING = frozenset(
    op.name for op in (iota, add, mul, where, cast, reshape, broadcast_to, transpose)
)
KEEPING = frozenset(op.name for op in (maximum, minimum))  # a number from being too small


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
    along `axes`, what is equal along them is no part. The rows are of so many `blocks`, which are
    computed apart, each of rows of all `devices`."""

    name: str
    nodes: Sequence[Node]
    batch: Collection[Node]
    ahead: Mapping[Node, Node]
    losses: Sequence[Node]
    outs: Sequence[Node] = ()
    seen: Sequence[Sequence[Node]] = ()  # on the host, by each print
    inside: Collection[Node] = ()
    drawn: Collection[Node] = ()  # of random numbers alone, which each part draws for itself
    told: set[str] = field(default_factory=set)
    axes: Collection[str] = ()
    blocks: int = 1
    devices: int = 1
    turns: dict[Node, Mapping[Node, Value]] = field(default_factory=dict)  # of a loop's values
    crossing: list[Node] = field(default_factory=list)  # is told of those inside that go across
    balances: list[Node] = field(default_factory=list)  # and of what experts make of sums of rows
    apart: set[int] = field(default_factory=set)  # and which of `seen` are not of the whole batch
    # How the blocks lie in values with twice as many rows; and those that are made of no rows.
    cuts: dict[Node, Sequence[TensorType]] = field(default_factory=dict)
    loose: set[Node] = field(default_factory=set)

    def blocks_of(self, n: Node, m: Node) -> Sequence[TensorType] | None:
        """How the blocks of `m`, which is `n` for twice as many rows, lie in it."""
        if n not in self.cuts:
            pairs = zip(n.types, m.types, strict=True)
            made = [in_blocks(a, b, self.devices, 2 * self.blocks) for a, b in pairs]
            cut = [t for t in made if t is not None]
            if len(cut) < len(made):
                return None
            self.cuts[n] = cut
        return self.cuts[n]

    def in_order(self, n: Node, m: Node) -> bool:
        """Whether the blocks of `m`, which is `n` for twice as many rows, are one after the other
        in it; in a stage, whatever it does with those of a microbatch."""
        cut = self.blocks_of(n, m) if n in self.cuts and n not in self.inside else None
        plain_cut = in_blocks(n.type, m.type, self.devices, 2 * self.blocks)
        return cut is None or [*cut] == [plain_cut]

    @cached_property
    def users(self) -> dict[Node, list[Node]]:
        """Which nodes read each."""
        found: dict[Node, list[Node]] = {}
        for n in self.nodes:
            for a in n.args:
                found.setdefault(a, []).append(n)
        return found


def alike(once: Sequence[Node], larger: Sequence[Node]) -> bool:
    """Whether two recordings are of one program, for batches of two sizes."""
    return [n.op for n in once] == [n.op for n in larger]


def cuts_more(once: Sequence[Node], larger: Sequence[Node]) -> bool:
    """Whether the recording for more rows cuts values that are whole in the other: it has not
    taken as many rows of all that should have them (`ts.gather` takes an index with fewer)."""
    counts = [sum(n.op == slice_.name for n in nodes) for nodes in (once, larger)]
    return counts[0] < counts[1]


def values(
    once: Reading, larger: Sequence[Node], known: Mapping[Node, Value] = NOTHING
) -> dict[Node, Value]:
    """How the nodes of `once` depend on the rows of the batch; `larger` are the nodes of a
    recording with twice as many rows, which is `alike`. Of some it may be `known`."""
    found = {**known}
    for n, m in zip(once.nodes, larger, strict=True):
        if n in known:
            continue
        found[n] = _value(once, n, m, found, n in once.inside)
        if found[n].by is n and not found[n].across and of_experts(n):
            if n.type.dtype.is_float:  # a product of two means, which is told of
                once.balances.append(n)
            found[n] = Value("added", None)
    return found


def of_experts(n: Node) -> bool:
    """Whether `n` is of a layer of experts, whose rows go by places of their own."""
    return "moe" in n.scope.split("/")


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
        return Value("same", _degree(n, m, args), places=grown and _by_places(once, n, m, args))
    kinds = {v.kind for v in args}
    if n.op == "input":
        return Value("rows" if n in once.batch or grown else "same")
    if grown:
        odd = next((v for v in args if v.kind == "odd"), None)
        mixed = [i for i, v in enumerate(args) if v.kind == "added" or v.mixed]
        places, across = _by_places(once, n, m, args), _across(once, n, m, values)
        counts = n.op in COUNTING or n.type.dtype is bool_
        if places and counts and not n.type.dtype.is_float:
            return Value("rows", _degree(n, m, args), places=True)
        across = across or (places and n.op != inside_.name)  # whether a place exists
        if odd is None and not inside and _pairs(n, m, args):
            return Value("odd", None, n, across=True)
        if inside and odd is not None and odd.across:
            return odd
        if inside or not (odd or mixed or across):
            degree = _degree(n, m, args)
            if inside and (odd or mixed or across or degree or _pairs(n, m, args)):
                once.crossing.append(n)
            return Value("rows", 0.0 if inside and degree else degree)
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
    if n.op == item.name and n.args[0].op == scan.name and not inside:
        return _of_turns(once, n, m, values)
    if n.kind.bodies or (n.op == item.name and n.args[0].kind.bodies):
        return Value("added", None)
    if "rows" in kinds:
        if not n.kind.sums:
            return Value("odd", None, n)
        degree = _degree(n, m, args)
        return Value("added", None if degree is None else degree + _dims_of_rows(n, m))
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


def _of_turns(once: Reading, n: Node, m: Node, values: Mapping[Node, Value]) -> Value:
    """What `n`, a result of a loop, is of the rows: where its turns go along these, a sum of what
    each turn adds, or else "odd"."""
    loop, twin, at = n.args[0], m.args[0], n.attrs["index"]
    first, carries = loop.attrs["consts"], loop.attrs["carries"]
    body, larger = loop.attrs["body"], twin.attrs["body"]
    if at >= carries or loop.attrs["length"] == twin.attrs["length"]:
        return _of_a_turn(once, n, m, values)
    if not alike(body.nodes, larger.nodes):
        return Value("odd", None, n)
    inner = Reading(once.name, body.nodes, (), {}, (), axes=once.axes)
    found: dict[Node, Value] = {}
    for i, (x, y, a) in enumerate(zip(body.inputs, larger.inputs, loop.args, strict=True)):
        known = values[a]
        found[x] = (
            known if i < first or x.type.shape != y.type.shape else Value("same", known.degree)
        )
    for x, y in zip(body.nodes, larger.nodes, strict=True):
        if x not in found:
            found[x] = _value(inner, x, y, found, False)
    carried, start = body.inputs[first : first + carries], loop.args[first + at]
    terms = added_to(body.outputs[at], carried[at])
    if terms is None or not reachable(terms).isdisjoint(carried):
        return Value("odd", None, n, across=True)
    odd = next((found[t] for t in terms if found[t].kind == "odd"), None)
    degrees = {found[t].degree for t in terms}
    if odd is not None or len(degrees) > 1:
        return Value("odd", None, n, across=True)
    degree = next(iter(degrees), 0.0)
    while start.op in NAMES:
        start = start.args[0]
    zero = start.op == full.name and start.attrs["value"] == 0
    wider = any(x.type.shape != y.type.shape for x, y in zip(body.inputs, larger.inputs))
    total = None if degree is None else degree if wider else degree + 1  # wider turns count rows
    return Value("added", total if zero or not total else ODD)


def _of_a_turn(once: Reading, n: Node, m: Node, before: Mapping[Node, Value]) -> Value:
    """The same of a loop over layers, say, each of which has all rows: "odd" where a turn makes
    that of them, or of what the turns before it made."""
    loop = n.args[0]
    if loop not in once.turns:
        once.turns[loop] = _turn(once, loop, m.args[0], before)
    value = once.turns[loop].get(loop.attrs["body"].outputs[n.attrs["index"]])
    return value if value is not None and value.kind == "odd" else Value("added", None)


def _turn(
    once: Reading, loop: Node, twin: Node, before: Mapping[Node, Value]
) -> Mapping[Node, Value]:
    """How the values of a turn depend on rows, of any but the first; nothing if it is unlike that
    of `twin`."""
    first, carries = loop.attrs["consts"], loop.attrs["carries"]
    body, larger = loop.attrs["body"], twin.attrs["body"]
    if not alike(body.nodes, larger.nodes):
        return NOTHING
    experts = {*filter(of_experts, body.nodes)}
    inner = Reading(once.name, body.nodes, (), {}, (), inside=experts, axes=once.axes)
    known = [before[a] for a in loop.args]
    for i in range(first, first + carries):
        if known[i].kind == "same":  # of a total that begins with zero no power is known
            known[i] = Value("same", None)
    while True:
        found = values(inner, larger.nodes, dict(zip(body.inputs, known, strict=True)))
        news = [found[out] for out in body.outputs[:carries]]
        changed = [
            i
            for i, v in enumerate(news, first)
            if (v.kind != "same" == known[i].kind) or (v.kind == "odd" != known[i].kind)
        ]
        if not changed:
            return found
        for i in changed:
            known[i] = news[i - first]


def _by_places(once: Reading, n: Node, m: Node, args: list[Value]) -> bool:
    """Whether it is made of the rows' places among all, but for rows that are taken by them. With
    the place of a device these are places among the rows of all of them."""
    if n.op == iota.name:
        return bool(n.attrs["dim"] == rows_of(n.type, m.type))
    ranked = any(
        v.kind == "same" and any(x in a.type.varying for x in once.axes)
        for a, v in zip(n.args, args, strict=True)
    )
    if n.op == take.name or ranked:
        return False
    return any(
        v.places and (len(args) == 1 or _in_line(n, m, a, b))
        for a, b, v in zip(n.args, m.args, args, strict=True)
    )


def _in_line(n: Node, m: Node, a: Node, b: Node) -> bool:
    """Whether the rows of the argument `a` are those of `n`, aligned as of what is computed element
    by element; they may be other rows' columns."""
    rows, mine = rows_of(n.type, m.type), rows_of(a.type, b.type)
    return rows is None or mine is None or n.type.rank - a.type.rank + mine == rows


def _across(once: Reading, n: Node, m: Node, values: Mapping[Node, Value]) -> bool:
    """Whether a row of `n` comes from other rows."""
    dim = rows_of(n.types[0], m.types[0])
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
    if n.op == custom.name and n.args[0] in once.cuts:  # the same value
        once.cuts[n] = once.cuts[n.args[0]]
    if n.op == concat.name and n.attrs["dim"] == dim:
        cuts = [once.blocks_of(a, b) for a, b in zip(n.args, m.args, strict=True)]
        parts = [None if cut is None else cut[0] for cut in cuts]
        if (joined := one_after_other(parts, dim)) is not None:
            once.cuts[n] = [joined]
    if n.op in (concat.name, pad.name) or n.kind.bodies or n.op == item.name:
        return False
    if n.op == take.name and values[n.args[1]].places:
        return not _takes_its_own(n, m, values)
    pairs = [(a, b) for a, b in zip(n.args, m.args, strict=True) if values[a].kind != "same"]
    grown = [a for a, b in pairs if a.types != b.types]
    if once.loose.issuperset(grown):  # made of nothing that has rows, wherever these are wanted
        once.loose.add(n)
        return False
    if changes_layout(n) or n.is_collective:
        source = n.args[0]
        if source in once.cuts and source.type.shape == n.type.shape:
            once.cuts[n] = once.cuts[source]
        return False
    ins: list[TensorType] | None = []
    for a, b in zip(n.args, m.args, strict=True):
        ends = of_experts(a) and not of_experts(n)
        if ends or (a in once.inside and n not in once.inside):
            once.cuts.pop(a, None)  # in order, however it came about there
        whole = [plain(t.dtype, t.shape) for t in b.types]
        free = a in once.loose or values[a].kind == "same"
        given = whole if free else once.blocks_of(a, b)
        ins = None if ins is None or given is None else [*ins, *given]
    outs = None if ins is None else kept_apart(n, m, ins)
    if outs is not None:
        once.cuts[n] = outs
        return False
    # Rows in groups, as a loop takes them, are each by itself in it, in whatever group they are.
    return n.op not in MOVING or not (_is_looped(once, n) or of_loop(n))


def _is_looped(once: Reading, n: Node) -> bool:
    """Whether nothing but loops takes `n`, or what it is moved to."""
    users = once.users.get(n, ())
    return bool(users) and all(
        x.kind.bodies or (x.op in MOVING and _is_looped(once, x)) for x in users
    )


def _takes_its_own(n: Node, m: Node, values: Mapping[Node, Value]) -> bool:
    """Whether each row of `n` is taken of the same row, as in `x[ts.arange(x.shape[0]), labels]`,
    where the index is known but for the labels: any will do."""
    table, index = n.args
    dim, at = rows_of(table.type, m.args[0].type), rows_of(index.type, m.args[1].type)
    if dim is None or at is None or dim != n.attrs["dim"] or values[table].kind != "rows":
        return False
    known: dict[Node, Any] = {}

    def value(x: Node) -> Any:
        if x not in known:
            known[x] = np.full(x.type.shape, x.type.dtype is bool_, x.type.dtype.numpy)
            if x.op != "input" and (values[x].places or not x.args):
                plainly = {
                    a: input_node(plain(a.type.dtype, a.type.shape), "") for a in (x, *x.args)
                }
                args = tuple(plainly[a] for a in x.args)
                alone = replace(x, args=args, types=plainly[x].types)
                known[x] = value_of(alone, [value(a) for a in x.args])
        return known[x]

    rows, each = index.type.shape[at], table.type.shape[dim] / index.type.shape[at]
    found = np.moveaxis(np.asarray(value(index)).reshape(index.type.shape), at, -1)
    return bool((found // each == np.arange(rows)).all())


def _pairs(n: Node, m: Node, args: list[Value]) -> bool:
    """Whether `n` is the first with an element for each pair of rows."""
    before = max((_growth(a, b) for a, b in zip(n.args, m.args, strict=True)), default=0.0)
    return 1.0 < before < _growth(n, m) and {v.kind for v in args} == {"rows"}


def _dims_of_rows(n: Node, m: Node) -> float:
    """How many dims of rows the sum `n` takes: two of the products of a device's rows with those of
    all."""
    dims = math.log2(max(_growth(a, b) for a, b in zip(n.args, m.args, strict=True)))
    return dims if dims.is_integer() else 1.0


def _growth(n: Node, m: Node) -> float:
    """How many times as many elements as `n` the node `m` has."""
    return max(b.size / max(1, a.size) for a, b in zip(n.types, m.types, strict=True))


def _degree(n: Node, m: Node, args: list[Value]) -> Degree:
    """By what power of two the elements of `n` change where the batch is doubled."""
    if n.op == full.name:
        a, b = n.attrs["value"], m.attrs["value"]
        return math.log2(b / a) if a and b and a * b > 0 and math.isfinite(a * b) else 0.0
    if n.type.dtype.is_float and n.op != cast.name:  # whole numbers choose, as those of a table
        args = [v for a, v in zip(n.args, args, strict=True) if a.type.dtype.is_float]
    known = [v.degree for v in args if v.degree is not None]
    if len(known) < len(args):  # of a loop, which may have divided by their number
        return ODD if n.kind.degree == "product" and max(known, default=0.0) > 0 else None
    kept = n.op in KEEPING or n.kind.degree in ("each", "joint")
    if kept and {v.kind for v in args} == {"same"} and len(some := {*known} - {0.0}) == 1:
        return some.pop()  # a number of rows that is kept from zero: max(count, 1)
    match n.kind.degree:
        case "product":
            return sum(known)
        case "quotient":
            return known[0] - known[1]
        case "each" | "joint":
            return max(known, default=0.0) if len(set(known)) < 2 else ODD
        case _:
            odd = None if n.type.dtype is bool_ else ODD
            return odd if any(known) else 0.0
