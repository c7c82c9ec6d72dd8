"""Time of a collective by its algorithm, and the choice of the fastest algorithm.

The model is α-β-γ. A round takes the latencies on its longest way, plus the bytes on its most
loaded port over that port's bandwidth, plus the bytes that one device adds over its speed of
additions. Groups that run at the same time (all dp groups of a mesh) share the ports. So a time is
linear in the bytes S.

>>> from tessera.core.topology import cluster
>>> from tessera.ir.schedule.algorithms.build import build
>>> one_host = cluster("h100").of(1)
>>> cost = price(build("all_reduce", "ring", 8), one_host)
>>> round(cost.latency_s * 1e6, 1), cost.share
(47.6, 1.75)
>>> choose("all_reduce", 4096, one_host).algorithm.name
'halving'
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ..core.checks import number, one_of, unfit, whole
from ..core.errors import UsageError
from ..core.topology import Link, Port, Topology, cluster
from ..core.value_checks import is_list, is_whole
from ..ir.graph.text import size_text
from ..ir.schedule.algorithms.build import FLAT, NAMES, PUTS, build, can_segment, named
from ..ir.schedule.algorithms.check import in_pairs
from ..ir.schedule.algorithms.table import COLLECTIVES, Algorithm, Collective, need_algorithm

Groups = tuple[tuple[int, ...], ...]
# Above this many ranks only algorithms with small tables are tried.
_MANY = 64
_SEGMENTS = (4, 16, 64)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of `rounds`: their total `latency_s`, and seconds per byte of the tensor for sending
    and for adding.

    `share` is the number of times that the whole tensor's bytes pass the most loaded port, summed
    over the rounds.
    """

    rounds: int
    latency_s: float
    send_s_per_byte: float
    add_s_per_byte: float
    share: float

    def time_s(self, size_bytes: float) -> float:
        """Returns the time for a tensor of `size_bytes`: a rank's whole tensor (for an all_gather,
        its result)."""
        return self.latency_s + (self.send_s_per_byte + self.add_s_per_byte) * size_bytes


def price(
    algorithm: Algorithm, topology: Topology | str, groups: Sequence[Sequence[int]] | None = None
) -> Cost:
    """Returns the cost of `algorithm` with rank i of each group on device group[i] of `topology`,
    which may be the name of a cluster.

    `groups` are as from `mesh.groups(axis)`, all running at the same time; by default one group of
    the first n devices. Raises UsageError if they do not fit the algorithm or the topology.
    """
    a, links = need_algorithm("price", algorithm), cluster(topology)
    return _price(a, links, _groups(a.n, links, groups))


def _groups(n: int, topology: Topology, groups: Sequence[Sequence[int]] | None) -> Groups:
    """Returns the groups as tuples, by default one of the first n devices. Raises UsageError if
    they are not distinct devices of the topology."""
    made = _written(groups) if groups is not None else (tuple(range(n)),)
    devices = [d for g in made for d in g]
    if not made or any(len(g) != n for g in made) or len(set(devices)) != len(devices):
        raise UsageError(
            f"collective: the groups are not distinct devices, {n} a group",
            groups=made[:4],
            fix="pass mesh.groups(axis)",
        )
    for d in devices:
        topology.coords(d)  # raises where the topology is too small
    return made


def _written(groups: Any) -> Groups:
    """Returns a user's groups as tuples. Raises UsageError if they are not lists of integers."""
    if not is_list(groups, lambda g: is_list(g, is_whole)):
        raise unfit("collective", "groups", groups, "pass mesh.groups(axis), or [[0, 1], [2, 3]]")
    return tuple(tuple(map(int, g)) for g in groups)


@lru_cache(maxsize=512)
def _price(algorithm: Algorithm, topology: Topology, groups: Groups) -> Cost:
    """Returns the sum of all rounds' costs: the longest way's latency, the busiest port's bytes.
    Groups run at the same time and share ports."""
    a, latency_s, send, add, share = algorithm, 0.0, 0.0, 0.0, 0.0
    paths: dict[tuple[int, int], tuple[Port, ...]] = {}
    links: dict[tuple[int, ...], Link] = {}
    for moves in a.rounds:
        load: defaultdict[tuple[int, ...], int] = defaultdict(int)
        added: defaultdict[int, int] = defaultdict(int)
        longest = 0.0
        for group in groups:
            for t in moves:
                ends = group[t.src], group[t.dst]
                if ends not in paths:
                    paths[ends] = topology.route(*ends)
                    links.update((p.place, p.link) for p in paths[ends])
                way = paths[ends]
                longest = max(longest, sum([p.latency_s for p in way]))
                for port in way:
                    load[port.place] += len(t.chunks)
                if t.op == "add":
                    added[group[t.dst]] += len(t.chunks)
        latency_s += longest
        slowest = max(load, key=lambda p: load[p] / links[p].bytes_per_s)
        send += load[slowest] / links[slowest].bytes_per_s / a.parts
        share += load[slowest] / a.parts
        add += max(added.values(), default=0) / topology.add_bytes_per_s / a.parts
    return Cost(a.steps, latency_s, send, add, share)


# ---- closed forms ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Formula:
    """The number of rounds, and the number of times that S passes a port, if all links are equal
    and fit the algorithm."""

    rounds: int
    share: float

    def time_s(self, size_bytes: float, latency_s: float, bytes_per_s: float) -> float:
        """Returns rounds · α + share · S / W."""
        return self.rounds * latency_s + self.share * size_bytes / bytes_per_s


def formula(collective: Collective, name: str, n: int, segments: int = 1) -> Formula | None:
    """Returns the textbook's rounds and bytes, for any n; None without a closed form. Raises
    UsageError for an unknown name.

    Ring, line and direct are on their own topology; halving is for powers of two; double_tree is
    the limit of many segments, with the rounds of one: 2 ceil(log2 n) α + 2 S / W.

    >>> formula("all_reduce", "ring", 8)
    Formula(rounds=14, share=1.75)
    """
    one_of("formula", "the collective", collective, COLLECTIVES)
    one_of("formula", "the name", name, NAMES)
    n, segments = whole("formula", "n", n, 1), whole("formula", "segments", segments, 1)
    if n == 1:
        return Formula(0, 0.0)
    log2, most, power = (n - 1).bit_length(), (n - 1) / n, n & (n - 1) == 0
    passing = (n - 2 + segments, (n - 2 + segments) / segments)
    half = n // 2
    forms: dict[tuple[str, str], tuple[int, float] | None] = {
        ("all_reduce", "ring"): (2 * (n - 1), 2 * most),
        ("all_reduce", "direct"): (2 * (n - 1), 2 * most),
        ("all_reduce", "line"): (2 * (n - 1), 2 * most),
        ("all_reduce", "halving"): (2 * log2, 2 * most) if power else None,
        ("all_reduce", "tree"): (2 * log2, 2.0 * log2) if segments == 1 else None,
        ("all_reduce", "double_tree"): (2 * log2, 2.0),
        ("broadcast", "ring"): passing,
        ("broadcast", "line"): passing,
        ("broadcast", "direct"): (n - 1, float(n - 1)),
        ("broadcast", "tree"): (log2, float(log2)) if segments == 1 else None,
        ("broadcast", "halving"): (2 * log2, 2 * most) if power else None,
        ("all_to_all", "direct"): (n - 1, most),
        ("all_to_all", "halving"): (log2, log2 / 2) if power else None,
        ("all_to_all", "ring"): (half, half * (half + 1) / 2 / n),
    }
    for one in ("reduce_scatter", "all_gather"):
        forms |= {
            (one, "ring"): (n - 1, most),
            (one, "direct"): (n - 1, most),
            (one, "line"): (n - 1, most),
            (one, "halving"): (log2, most) if power else None,
        }
    cost = forms.get((collective, "direct" if name in PUTS else name))
    return Formula(*cost) if cost else None


# ---- the choice --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate: an algorithm, its cost here, and its time for the given bytes."""

    algorithm: Algorithm
    cost: Cost
    time_s: float


def choose(
    collective: Collective,
    size_bytes: float,
    topology: Topology | str,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    algorithm: str | Algorithm | None = None,
    order: Literal["any", "pairs"] = "any",
) -> Choice:
    """Returns the fastest algorithm for a tensor of `size_bytes`, or the fastest form of the named
    one.

    `groups` as in `price`; by default, all devices of the topology are one group. `order="pairs"`
    admits only algorithms that add in adjacent pairs of ranks, as `mesh_invariant` needs. Raises
    UsageError if a name is unknown, or if no algorithm keeps the order.
    """
    return candidates(collective, size_bytes, topology, groups, algorithm=algorithm, order=order)[0]


def candidates(
    collective: Collective,
    size_bytes: float,
    topology: Topology | str,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    algorithm: str | Algorithm | None = None,
    order: Literal["any", "pairs"] = "any",
) -> list[Choice]:
    """Returns all candidates of `choose`, fastest first; among equals the engine's own comes
    first."""
    topology = cluster(topology)
    one_of("choose", "the collective", collective, COLLECTIVES)
    number("choose", "size_bytes", size_bytes, least=0, below=math.inf)
    one_of("choose", "order", order, ("any", "pairs"))
    places = _written(groups) if groups is not None else (tuple(range(topology.size)),)
    n = len(places[0]) if places else 0
    places = _groups(n, topology, places)
    if isinstance(algorithm, Algorithm):
        if algorithm.collective != collective:
            raise UsageError(
                f"choose: the table is of another collective than {collective}",
                table=algorithm,
                fix=f"give a table of {collective}, or price {algorithm.collective}",
            )
        tables: Sequence[Algorithm] = (algorithm,)
    else:
        tables = _tables(collective, topology, places)
        if algorithm is not None:
            tables = [a for a in tables if a.name.split("(")[0].split("/")[0] == algorithm]
            tables = tables or [_named(collective, algorithm, n)]
    if order == "pairs" and collective in ("all_reduce", "reduce_scatter"):
        tables = [a for a in tables if in_pairs(a)]
        if not tables:
            raise UsageError(
                f"choose: {algorithm} does not add in adjacent pairs",
                collective=collective,
                ranks=n,
                fix="take halving or tree, or order='any'",
            )
    made = []
    for a in tables:
        cost = price(a, topology, places)
        made.append(Choice(a, cost, cost.time_s(size_bytes)))
    return sorted(made, key=lambda c: (c.time_s, not c.algorithm.native))


def _named(collective: Collective, name: str, n: int) -> Algorithm:
    if name == "hierarchical":
        raise UsageError(
            "choose: these devices lie on one level of the topology, so there is no hierarchy",
            ranks=n,
            fix="pass a table: build(..., 'hierarchical', shape=(...)), or name another",
        )
    return named(collective, name, n)


@lru_cache(maxsize=16)
def _tables(collective: Collective, topology: Topology, groups: Groups) -> tuple[Algorithm, ...]:
    """Returns the candidate tables: each flat algorithm, also in segments if it allows that, and
    some nestings by the levels of links. Large groups leave out long tables of an all_to_all."""
    n = len(groups[0])
    names: Sequence[str] = FLAT
    if n > _MANY:
        names = [x for x in FLAT if collective != "all_to_all" or x in ("direct", "halving")]
    made = [build(collective, "engine", n)]
    for name in names:
        made.append(build(collective, name, n))
        if can_segment(collective, name) and n > 2:
            made += [build(collective, name, n, segments=k) for k in _SEGMENTS]
    shape = nesting(topology, groups)
    if len(shape) > 1:
        inner = (
            ("direct", "ring", "line", "halving")
            if collective != "broadcast"
            else ("tree", "halving")
        )
        made += [
            build(collective, "hierarchical", shape=shape, levels=(name,) * len(shape))
            for name in inner
        ]
        if collective == "all_reduce":
            made += [
                build(
                    collective,
                    "hierarchical",
                    shape=shape,
                    levels=("double_tree", *("halving",) * (len(shape) - 1)),
                    segments=k,
                )
                for k in (1, *_SEGMENTS)
            ]
    return tuple(made)


def nesting(topology: Topology, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the sizes of each group on the topology's levels, outermost first; () if the groups
    differ, or if one is not a box of devices in row-major order.

    >>> from tessera.core.topology import cluster
    >>> nesting(cluster("h100"), [range(32)]), nesting(cluster("h100"), [range(0, 32, 4)])
    ((4, 8), (4, 2))
    """
    shapes = set()
    for group in groups:
        places = [topology.coords(d) for d in group]
        each = [sorted({p[i] for p in places}) for i in range(len(topology.levels))]
        if math.prod(map(len, each)) != len(group) or places != sorted(places):
            return ()
        shapes.add(tuple(len(e) for e in each if len(e) > 1))
    return shapes.pop() if len(shapes) == 1 else ()


def explain(
    collective: Collective,
    size_bytes: float,
    topology: Topology | str,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    algorithm: str | Algorithm | None = None,
    order: Literal["any", "pairs"] = "any",
) -> str:
    """Returns the candidates as a table with their times, the fastest first."""
    found = candidates(collective, size_bytes, topology, groups, algorithm=algorithm, order=order)
    n, topology = found[0].algorithm.n, cluster(topology)
    groups_text = (
        f", {len(groups)} groups at once" if groups is not None and len(groups) > 1 else ""
    )
    wide = max(len("algorithm"), *(len(c.algorithm.name) for c in found))
    rows = [
        f"{collective} of {size_text(int(size_bytes))} among {n}{groups_text} on {topology.name}",
        f"  {'algorithm':<{wide}}  rounds  latency µs   send µs    add µs  total µs",
    ]
    for c in found:
        send, add = c.cost.send_s_per_byte * size_bytes, c.cost.add_s_per_byte * size_bytes
        rows.append(
            f"  {c.algorithm.name:<{wide}}  {c.cost.rounds:>6}  {c.cost.latency_s * 1e6:>10.1f}"
            f"  {send * 1e6:>8.1f}  {add * 1e6:>8.1f}  {c.time_s * 1e6:>8.1f}"
        )
    return "\n".join(rows)
