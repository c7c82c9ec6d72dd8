"""Comparison of two runs, node by node: the first difference, with both source lines.

Two functions (or one on two meshes) are recorded; their nodes are matched in program order by their
ops and shapes, so that collectives of only one of them are skipped. Both run piece by piece and
each pair of values is compared, and finally their results, whatever nodes compute them. Two
training runs are compared step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from ..core.checks import shown, unfit
from ..core.declared import Flag, NonNegative
from ..core.layout import TensorType
from ..core.wording import columns
from ..ir.graph.node import Graph, Node, reachable
from ..ir.graph.text import node_text
from ..lang.value.host_data import is_array
from ..ops.redistribute import NAMES
from . import compare_runs
from .instrument import Array, Run, Spot, measured, outside, recorded, results, run_of, tidy


@dataclass(frozen=True, slots=True)
class Pair:
    """Two matched nodes, and the difference of their values.

    `relative` is the largest difference divided by the largest value of the tensor; `at` is the
    place of the largest difference (iterations of loops first), with the two values there.
    """

    a: Node
    b: Node
    text_a: str
    text_b: str
    absolute: float
    relative: float
    differ: bool
    at: tuple[int, ...]
    values: tuple[Any, Any]

    def rows(self) -> list[tuple[str, str]]:
        where = f" at {list(self.at)}" if self.at else ""
        x, y = self.values
        return [
            ("a", _line(self.text_a, self.a)),
            ("b", _line(self.text_b, self.b)),
            ("by", f"{tidy(self.absolute)}, {tidy(self.relative)} of the largest value;"
                   f"{where} {_exact(x, y)}"),
        ]  # fmt: skip


def _exact(x: Any, y: Any) -> str:
    short = (tidy(float(x)), tidy(float(y)))
    return f"{short[0]} and {short[1]}" if short[0] != short[1] else f"{x} and {y}"


def _line(text: str, n: Node) -> str:
    return "  ".join([text, *([f"# {n.loc}"] if n.loc else []), *([n.scope] if n.scope else [])])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every pair in program order; `first` is the first that differs. `str()` is the report."""

    pairs: tuple[Pair, ...]
    only_a: int
    only_b: int
    how: str
    unlike: tuple[str, ...]  # differences of results' numbers, names and non-tensors
    first: Pair | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", next((p for p in self.pairs if p.differ), None))

    @property
    def same(self) -> bool:
        """Returns whether no pair differs, and the results have equal numbers and names."""
        return self.first is None and not self.unlike

    def scopes(self) -> dict[str, tuple[int, int, float, float]]:
        """Per scope: (number of nodes, number that differ, largest absolute and relative
        difference)."""
        found: dict[str, tuple[int, int, float, float]] = {}
        for p in self.pairs:
            n, bad, far, part = found.get(p.a.scope, (0, 0, 0.0, 0.0))
            found[p.a.scope] = (
                n + 1, bad + p.differ, max(far, p.absolute), max(part, p.relative),
            )  # fmt: skip
        return found

    def __str__(self) -> str:
        counts = f"{len(self.pairs)} pairs of nodes compared {self.how}"
        alone = f"; {self.only_a} only in a, {self.only_b} only in b"
        if self.first is None:
            said = "their results differ" if self.unlike else "the same"
            head = [said, f"  {counts}{alone}"]
        else:
            bad = sum(p.differ for p in self.pairs)
            rows = [*self.first.rows(), ("of", f"{counts}, {bad} differ{alone}")]
            head = [f"they differ first at {self.first.a.op}"]
            head += [f"  {name:<2} : {text}" for name, text in rows]
        head += [f"  {text}" for text in self.unlike]
        rows_ = [
            [scope or "(none)", str(n), str(bad), tidy(far), tidy(part)]
            for scope, (n, bad, far, part) in self.scopes().items()
        ]
        titles = ("scope", "nodes", "differ", "absolute", "relative")
        return "\n".join([*head, "", *columns([titles, *rows_], 1)])

    __repr__ = __str__


def compare(
    a: Any,
    b: Any,
    *args: Any,
    rtol: NonNegative = 1e-4,
    atol: NonNegative = 1e-6,
    bitwise: Flag = False,
    ignore: Sequence[str] = compare_runs.SPEEDS,
) -> Comparison | compare_runs.RunComparison:
    """Compares `a` and `b` node by node: the first difference, and the sizes of all differences.

    Each is a function (both are then called with `args`), a pair `(function, args)`, a pair
    `(graph, values)`, or a training run: its folder, its metrics file, or rows. Two values are
    equal if they differ by at most `atol + rtol * m`, where m is the largest absolute value of the
    tensor; with `bitwise` only if dtype and bits are equal. For training runs the metrics in
    `ignore` are left out. Raises UsageError if an argument is anything else.
    """
    outside("compare")
    if compare_runs.is_run(a) and compare_runs.is_run(b) and not args:
        return compare_runs.compare_runs(a, b, rtol, atol, bitwise, ignore)
    run_a, run_b = _side("a", a, args), _side("b", b, args)
    matched = _matched(run_a.graph, run_b.graph)
    how = "bit by bit" if bitwise else f"to {tidy(rtol)} of the largest value"
    found = tuple(
        _pair(run_a.graph, run_b.graph, s, t, x, y, rtol, atol, bitwise)
        for (s, x), (t, y) in _values(run_a, run_b, matched)
    )
    nodes = [_count(run_a.graph), _count(run_b.graph)]
    pairs, unlike = _ends(run_a, run_b)
    matched_nodes = {(s.node, t.node) for s, t in matched}
    more = tuple(
        _pair(run_a.graph, run_b.graph, s, t, x, y, rtol, atol, bitwise)
        for n, m in pairs
        if (n, m) not in matched_nodes
        for (s, x), (t, y) in _values(run_a, run_b, [(Spot(n, ()), Spot(m, ()))])
    )
    alone = nodes[0] - len(found), nodes[1] - len(found)
    return Comparison((*found, *more), *alone, how, unlike)


def _side(name: str, x: Any, args: tuple[Any, ...]) -> Run:
    """One of the two programs to compare: recorded from a function, or a graph with its values."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and not args:
        what, given = x
        if isinstance(what, Graph):
            return run_of("compare", name, what, given)
        if callable(what) and isinstance(given, (tuple, list)):
            return recorded("compare", what, given, {})
    elif callable(x):
        return recorded("compare", x, args, {})
    raise unfit(
        "compare",
        name,
        x,
        "give two functions and their arguments, two pairs (function, args), or the folders of "
        "two training runs",
    )


# ---- matching of nodes -------------------------------------------------------------------------
def _user_nodes(graph: Graph) -> list[Node]:
    """The nodes to match: values and loops that a result depends on, in program order."""
    live = reachable(graph.outputs)
    values = set(results(graph))
    return [
        n for n in graph.nodes
        if n in live and (n.op == "scan" or (n in values and not _incidental(n)))
    ]  # fmt: skip


def _incidental(n: Node) -> bool:
    """Returns whether `n` may have been added for a layout or a dtype, without changing the
    computation."""
    return n.op in NAMES or n.kind.incidental


def _results(graph: Graph) -> list[Node]:
    """The nodes that compute the results of `graph`, before nodes that a layout or a dtype
    added."""
    found = []
    for n in graph.outputs:
        while _incidental(n) and len(n.args) == 1 and _like(n.type, n.args[0].type):
            n = n.args[0]
        found.append(n)
    return found


def _ends(run_a: Run, run_b: Run) -> tuple[list[tuple[Node, Node]], tuple[str, ...]]:
    """(pairs of nodes that compute results of the same name, or of the same place if a side is a
    graph; texts on unlike results)."""
    ends = _results(run_a.graph), _results(run_b.graph)
    if run_a.names is None or run_b.names is None:
        n, m = map(len, ends)
        return list(zip(*ends)), () if n == m else (f"a has {n} results, b has {m}",)
    a, b = dict(zip(run_a.names, ends[0])), dict(zip(run_b.names, ends[1]))
    x, y = (
        {**dict.fromkeys(run.names or (), "a tensor"), **dict(run.plain)} for run in (run_a, run_b)
    )
    unlike = [
        f"only {side} has {f'the result {name!r}' if name else 'a result'}"
        for side, mine, other in (("a", x, y), ("b", y, x))
        for name in mine
        if name not in other
    ]
    unlike += [
        f"result {name!r}: {shown(x[name])} in a, {shown(y[name])} in b"
        for name in x
        if name in y and not _equal(x[name], y[name])
    ]
    return [(n, b[name]) for name, n in a.items() if name in b], tuple(unlike)


def _equal(x: Any, y: Any) -> bool:
    """Returns whether two results that are neither tensors nor floats are equal."""
    if is_array(x) and is_array(y):
        return np.array_equal(np.asarray(x), np.asarray(y))
    return type(x) is type(y) and (x is y or bool(x == y))


def _like(a: TensorType, b: TensorType) -> bool:
    return a.shape == b.shape and a.dtype.is_float == b.dtype.is_float


def _key(n: Node) -> object:
    if n.op == "item":
        return n.op, n.args[0].op, n.attrs["index"], n.type.shape
    return n.op, tuple(t.shape for t in n.types), n.attrs.get("length")


def _matched(
    a: Graph, b: Graph, around: tuple[tuple[Node, ...], tuple[Node, ...]] = ((), ())
) -> list[tuple[Spot, Spot]]:
    """The pairs of matched spots of two graphs, in program order, including bodies of loops."""
    left, right = _user_nodes(a), _user_nodes(b)
    blocks = SequenceMatcher(
        None, [_key(n) for n in left], [_key(n) for n in right], autojunk=False
    ).get_matching_blocks()
    found: list[tuple[Spot, Spot]] = []
    for block in blocks:
        for i in range(block.size):
            n, m = left[block.a + i], right[block.b + i]
            if n.op == "scan":
                inner = ((*around[0], n), (*around[1], m))
                found += _matched(n.attrs["body"], m.attrs["body"], inner)
            else:
                found.append((Spot(n, around[0]), Spot(m, around[1])))
    return found


def _count(graph: Graph) -> int:
    nodes = _user_nodes(graph)
    inner = sum(_count(n.attrs["body"]) for n in nodes if n.op == "scan")
    return inner + sum(n.op != "scan" for n in nodes)


# ---- their values ------------------------------------------------------------------------------
def _values(
    run_a: Run, run_b: Run, matched: list[tuple[Spot, Spot]]
) -> Iterator[tuple[tuple[Spot, Array], tuple[Spot, Array]]]:
    """Yields ((spot, value), (spot, value)) of each pair."""
    mine, yours = [s for s, _ in matched], [t for _, t in matched]
    return zip(_stream(run_a, mine), _stream(run_b, yours), strict=True)


def _stream(run: Run, spots: list[Spot]) -> Iterator[tuple[Spot, Array]]:
    # A body that several loops run is measured in each of them; only matched spots count.
    wanted = set(spots)
    for spot, values in measured(run, _chooser(spots), lambda x: [x]):
        if spot in wanted:
            yield spot, values[0]


def _chooser(spots: list[Spot]) -> Any:
    by_loop: dict[Node | None, list[Node]] = {}
    for s in spots:
        by_loop.setdefault(s.loops[-1] if s.loops else None, []).append(s.node)
    return lambda graph, loop: by_loop.get(loop, [])


def _pair(
    ga: Graph, gb: Graph, s: Spot, t: Spot, x: Array, y: Array, rtol: float, atol: float,
    bitwise: bool,
) -> Pair:  # fmt: skip
    """The comparison of the two values of one pair. Values of different shapes differ: they belong
    to different meshes."""
    text_a, text_b = _text(ga, s), _text(gb, t)
    if x.shape != y.shape:  # each device has its own value, on another mesh
        return Pair(s.node, t.node, text_a, text_b, np.inf, np.inf, True, (), (x.size, y.size))
    far, part, at = difference(x, y)
    if bitwise:
        differ = x.dtype != y.dtype or x.tobytes() != y.tobytes()
    else:
        differ = bool(far > atol + rtol * _scale(x, y))
    there = (x[at], y[at]) if x.size else (0, 0)
    return Pair(s.node, t.node, text_a, text_b, far, part, differ, at, there)


def _text(graph: Graph, s: Spot) -> str:
    return node_text(s.loops[-1].attrs["body"] if s.loops else graph, s.node)


def difference(x: Array, y: Array) -> tuple[float, float, tuple[int, ...]]:
    """(largest absolute difference, largest relative difference, its index); (0, 0, ()) for empty
    arrays.

    >>> difference(np.array([1.0, np.nan]), np.array([1.5, np.nan]))
    (0.5, 0.3333333333333333, (0,))
    """
    if not x.size:
        return 0.0, 0.0, ()
    p, q = _wide(x), _wide(y)
    with np.errstate(all="ignore"):
        gap = np.abs(p - q)
    gap = np.where((p == q) | (np.isnan(p) & np.isnan(q)), 0.0, gap)
    gap = np.where(np.isnan(gap), np.inf, gap)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(gap)), gap.shape))
    far = float(gap[at])
    scale = _scale(x, y)
    return far, (far / scale if scale else 0.0) if far else 0.0, at


def _wide(x: Array) -> Array:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _scale(x: Array, y: Array) -> float:
    both = np.abs(np.concatenate([_wide(x).ravel(), _wide(y).ravel()]))
    finite = both[np.isfinite(both)]
    return float(finite.max()) if finite.size else 0.0
