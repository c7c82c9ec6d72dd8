"""Origin of a NaN: `ts.debug.nan_origin(step, model, batch)` names the node and line.

The function's graph runs again with one measurement after each node: finite, infinite, or NaN. From
the results that are not finite the search goes back along nodes that are as bad, to those whose
operands are not; in a loop, iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.dtypes import f32, int32
from ..core.layout import shard_count
from ..ir.graph.build import Builder
from ..ir.graph.node import Emit, Graph, Node
from ..ir.graph.text import node_text
from ..lang.math import functions as F
from ..lang.record.tree import is_registered
from ..lang.value.eager import run_graph
from ..lang.value.tensor import Tensor
from ..ops.create import full
from ..ops.indexing import inside_range
from .instrument import Array, Run, Spot, as_f32, every_float, measured, recorded, tidy

FINITE, INF, NAN = 0, 1, 2
# The `elements` of ops whose result has exactly the elements of the operand, so that it is as bad.
SAME = ("same", "moved")
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Values:
    """The content of a tensor: numbers of elements, NaN, infinities, and the range of all
    others."""

    size: int
    nans: int
    infs: int
    low: float
    high: float

    def __str__(self) -> str:
        if not self.size:
            return "no elements"
        bad = [f"{n} {name}" for n, name in ((self.nans, "NaN"), (self.infs, "inf")) if n]
        rest = f"{tidy(self.low)} to {tidy(self.high)}"
        if not bad:
            return rest
        others = f", the others {rest}" if self.low <= self.high else ""
        return f"{' and '.join(bad)} of {self.size}{others}"


@dataclass(frozen=True, slots=True)
class NanNode:
    """A node, its line in the graph's text, and the iterations of the loops around it."""

    node: Node
    text: str
    iterations: tuple[tuple[Node, int], ...]
    holds: Values

    @property
    def loc(self) -> str:
        """The user's `file:line`."""
        return self.node.loc

    @property
    def scope(self) -> str:
        return self.node.scope

    def rows(self) -> list[tuple[str, str]]:
        iterations = [
            f"iteration {i + 1} of {n.attrs['length']}" + (f", loop at {n.loc}" if n.loc else "")
            for n, i in self.iterations
        ]
        rows = [("at", self.loc), ("scope", self.scope), ("in", "; ".join(iterations))]
        return [("node", self.text), *[r for r in rows if r[1]], ("holds", str(self.holds))]


@dataclass(frozen=True, slots=True)
class Origin:
    """The first node that is not finite though its `operands` are; `str()` is the report.

    `became_nan` is the first NaN, if that is another node than the first infinity.
    """

    first: NanNode
    operands: tuple[NanNode, ...]
    became_nan: NanNode | None = None

    @property
    def loc(self) -> str:
        return self.first.loc

    @property
    def scope(self) -> str:
        return self.first.scope

    @property
    def node(self) -> Node:
        return self.first.node

    def __str__(self) -> str:
        op, kind = self.node.op, "NaN" if self.first.holds.nans else "an infinity"
        if op == "scan" and self.node.attrs["length"] is None:
            op = "while_loop"
        if op == "input":
            head = f"input {self.node.attrs['name']!r} holds {kind} already"
        elif not self.operands:
            head = f"{op} is {kind}"
        else:
            finite = not any(f.holds.nans or f.holds.infs for f in self.operands)
            head = f"{op} makes {kind}" + (" of finite operands" if finite else " of infinities")
            head = _wrong_ids(self.node, self.operands) or head
        rows = self.first.rows()
        for f in self.operands:
            rows.append(("operand", f.text))
            rows.append(("", _origin_text(f)))
        if self.became_nan is not None:
            rows.append(("then NaN", self.became_nan.text))
            rows.append(("", _origin_text(self.became_nan)))
        width = max(len(name) for name, _ in rows)
        lines = (f"  {name:<{width}} {':' if name else ' '} {text}" for name, text in rows)
        return "\n".join([head, *lines])

    __repr__ = __str__


def _wrong_ids(n: Node, operands: tuple[NanNode, ...]) -> str:
    """The text if `n` is not finite because its ids are out of range; "" if they are not."""
    low, high = inside_range(n)
    for f in operands:
        if not f.node.type.dtype.is_int or not high:
            continue
        for id_ in (f.holds.high, f.holds.low):
            if not low <= id_ < high and id_ != n.attrs.get("ignore"):
                return f"{n.op} makes NaN of an id: {tidy(id_)} is outside {low} to {high - 1}"
    return ""


def _origin_text(f: NanNode) -> str:
    return f"{f.holds}" + (f"; made at {f.loc}" if f.loc else "")


# ---- the search --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Frame:
    """The graph, or one iteration of a loop's body inside `outer`."""

    graph: Graph
    loop: Node | None = None
    iteration: int = 0
    outer: _Frame | None = None

    @property
    def iterations(self) -> tuple[tuple[Node, int], ...]:
        if self.loop is None or self.outer is None:
            return ()
        return (*self.outer.iterations, (self.loop, self.iteration))

    def spot(self, n: Node) -> Spot:
        return Spot(n, tuple(loop for loop, _ in self.iterations))


class _Search:
    """A search from bad values back to their origin, by the measured state of each value."""

    def __init__(self, states: dict[Spot, Array]) -> None:
        self.states = states

    def state(self, frame: _Frame, n: Node) -> int:
        while n.kind.elements in SAME:
            n = n.args[0]
        if n.op == full.name:
            return int(_state(np.asarray(abs(n.attrs["value"]))))
        found = self.states.get(frame.spot(n))
        return FINITE if found is None else int(found[tuple(i for _, i in frame.iterations)].max())

    def first(self, frame: _Frame, targets: Iterable[Node], level: int) -> tuple[_Frame, Node]:
        """The place where `targets`, one of which is at least as bad as `level`, became so."""
        chain: set[Node] = set()
        todo = [t for t in targets if self.state(frame, t) >= level]
        starts = []
        while todo:
            n = todo.pop()
            if n in chain:
                continue
            chain.add(n)
            worse = [a for a in operands(n) if self.state(frame, a) >= level]
            todo += worse
            if not worse:
                starts.append(n)
        # A constant infinity in the program is intended: a mask.
        starts = [n for n in starts if not _written(n)] or starts
        place = {n: i for i, n in enumerate(frame.graph.nodes)}
        n = min(starts, key=place.__getitem__)
        source = n.args[0] if n.op == "item" else n
        if source.op == "scan":
            return self.in_iterations(frame, source, n.attrs["index"], level)
        if n.op == "input" and frame.loop is not None:
            return self.before(frame, n, level)
        return frame, source

    def in_iterations(
        self, frame: _Frame, loop: Node, result: int, level: int
    ) -> tuple[_Frame, Node]:
        """The origin in the first iteration after which this result of the body is bad."""
        body: Graph = loop.attrs["body"]
        out = body.outputs[result]
        iterations = [_Frame(body, loop, i, frame) for i in order(loop)]
        bad = next((f for f in iterations if self.state(f, out) >= level), None)
        return (frame, loop) if bad is None else self.first(bad, [out], level)

    def before(self, frame: _Frame, n: Node, level: int) -> tuple[_Frame, Node]:
        """The origin of a bad input of a loop's body: the iteration before, or outside of the
        loop."""
        loop, outer = frame.loop, frame.outer
        assert loop is not None and outer is not None
        k, consts = frame.graph.inputs.index(n), loop.attrs["consts"]
        iterations = list(order(loop))
        at = iterations.index(frame.iteration)
        if consts <= k < consts + loop.attrs["carries"] and at:
            earlier = _Frame(frame.graph, loop, iterations[at - 1], outer)
            return self.first(earlier, [frame.graph.outputs[k - consts]], level)
        return self.first(outer, [loop.args[k]], level)


def order(loop: Node) -> Iterable[int]:
    """The iterations of a loop, first to last."""
    iterations = range(loop.attrs["length"] or 0)  # a while loop's are not measured
    return reversed(iterations) if loop.attrs["reverse"] else iterations


def operands(n: Node) -> tuple[Node, ...]:
    return n.args[0].args if n.op == "item" else n.args


def _written(n: Node) -> bool:
    return not n.args and n.kind.creates


# ---- the question ------------------------------------------------------------------------------
def nan_origin(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Origin | None:
    """The first node of `fn(*args, **kwargs)` that is not finite though its operands are.

    None if all results are finite. The call is recorded and run again on its mesh; containers that
    `fn` changes are not changed. Random numbers are those that the next call draws (for an earlier
    call, restore `ts.random.state()` first). Constant infinities, such as a mask's, are not an
    origin. Raises UsageError if an argument is a type.
    """
    if is_registered(type(fn)):  # as an argument its weights have names
        fn, args = _called, (fn, *args)
    run = counted(recorded("nan_origin", fn, args, kwargs))
    states = {spot: _state(made[0]) for spot, made in measured(run, _telling, _largest)}
    search, top = _Search(states), _Frame(run.graph)
    outs = run.graph.outputs
    level = max((search.state(top, n) for n in outs), default=FINITE)
    if level == FINITE:
        return None
    at, node = search.first(top, outs, level)
    became = None
    infinite = [a for a in operands(node) if search.state(at, a) == INF]
    if level == NAN and infinite:
        before, cause = search.first(at, infinite, INF)
        if not _written(cause):
            became, (at, node) = (at, node), (before, cause)
    about = dict.fromkeys(operands(node))
    wanted = [(at, node), *((at, a) for a in about), *([became] if became else [])]
    looked_at = _looked_at(run, wanted)
    between = looked_at[1:-1] if became else looked_at[1:]
    return Origin(looked_at[0], tuple(between), looked_at[-1] if became else None)


def _called(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _telling(graph: Graph, loop: Node | None) -> list[Node]:
    """The float nodes whose state does not follow from another node's."""
    telling = every_float(graph, loop)
    return [n for n in telling if n.op != full.name and n.kind.elements not in SAME]


def _largest(x: Tensor) -> list[Tensor]:
    """One number per tensor: infinite or NaN if any element is."""
    y = x if x.dtype.bytes > 1 else as_f32(x)
    return [F.max(F.abs(y))]


def _state(largest: Array) -> Array:
    return np.where(np.isnan(largest), NAN, np.where(np.isposinf(largest), INF, FINITE))


def _looked_at(run: Run, wanted: list[tuple[_Frame, Node]]) -> list[NanNode]:
    """The values of these nodes, by a second run."""
    chosen = {r for at, n in wanted for r in _results(at, n)}
    made: dict[Spot, list[Array]] = {}
    for spot, values in measured(run, lambda g, loop: chosen, _range):
        made[spot] = values
    found = []
    for at, n in wanted:
        iterations = tuple(i for _, i in at.iterations)
        # Unused results of a node have no value.
        spots = [at.spot(r) for r in _results(at, n)]
        parts = [[a[iterations] for a in made[spot]] for spot in spots if spot in made]
        low, high = min(p[0].min() for p in parts), max(p[1].max() for p in parts)
        size = sum(t.size * shard_count(t.varying, t.sizes) for t in n.types)  # on all devices
        nans, infs = (int(sum(p[i].sum() for p in parts)) for i in (2, 3))
        holds = Values(size, nans, infs, float(low), float(high))
        found.append(NanNode(n, node_text(at.graph, n), at.iterations, holds))
    return found


def _results(at: _Frame, n: Node) -> list[Node]:
    items = [m for m in at.graph.nodes if m.op == "item" and m.args[0] is n]
    return items or [n]


def _range(x: Tensor) -> list[Tensor]:
    """[smallest finite value, largest finite value, number of NaN, number of infinities]."""
    if not x.size:
        return [F.full((), v) for v in (LARGEST, -LARGEST, 0.0, 0.0)]
    y = as_f32(x)
    finite = F.isfinite(y)
    nan = y != y
    low = F.min(F.where(finite, y, LARGEST))
    high = F.max(F.where(finite, y, -LARGEST))
    infinite = ~finite & ~nan
    return [low, high, F.sum(nan.to(f32)), F.sum(infinite.to(f32))]


# While loops as loops with a measured number of turns, so that their values can be measured.

MOST = 100_000


def counted(run: Run) -> Run:
    """`run` with its while loops replaced by loops of a fixed length; it runs once to count their
    turns. While loops inside other loops, with a condition that varies over devices, without a turn
    or with more than `MOST` turns are not replaced."""
    loops = [n for n in run.graph.nodes if _decides(n) and not n.types[0].varying]
    if not loops:
        return run
    counts: list[Node] = []

    def count(was: Node, now: Node, emit: Emit) -> Node | None:
        if was not in loops:
            return None
        counting, turns = _counting(now, run.graph, emit)
        counts.append(turns)
        return counting

    graph = run.graph.rewrite(count, _same)
    every = run_graph(replace(graph, outputs=tuple(counts)), run.values)
    iterations = dict(zip(loops, (int(t.item()) for t in every), strict=True))

    def over_iterations(was: Node, now: Node, emit: Emit) -> Node | None:
        length = iterations.get(was, 0)
        if not 0 < length <= MOST:
            return None
        return emit(replace(now, attrs={**now.attrs, "length": length}))

    return replace(run, graph=run.graph.rewrite(over_iterations, _same))


def _decides(n: Node) -> bool:
    return n.op == "scan" and n.attrs["length"] is None


def _counting(loop: Node, graph: Graph, emit: Emit) -> tuple[Node, Node]:
    """(`loop` with a further carry that counts its turns, the node of the count)."""
    body, consts, carries = loop.attrs["body"], loop.attrs["consts"], loop.attrs["carries"]
    inside = Builder(body.name, options=body.options)
    inside.nodes, inside.inputs = list(body.nodes), list(body.inputs)
    one = inside("cast", body.inputs[consts], dtype=int32)
    more = inside("add", inside.input(one.type, "turns"), one)
    attrs = {**loop.attrs, "body": inside.graph([*body.outputs, more]), "carries": carries + 1}
    outside = Builder(graph.name, options=graph.options)
    none = outside.redistribute(outside(full.name, dtype=int32, shape=(), value=0), one.type)
    counting = outside("scan", *loop.args, none, **attrs)
    turns = outside("item", counting, index=carries)
    for n in outside.nodes:
        emit(n)
    return counting, turns


def _same(body: Graph) -> Graph:
    return body
