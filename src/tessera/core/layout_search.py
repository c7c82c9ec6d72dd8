"""Search for the collectives from one layout to another with the fewest received bytes.

A layout gives each mesh axis a place: none, an open sum, or one digit of one dim. A digit is the
part of the dim's index between two products of sizes, whatever the other digits are. So a
collective changes the place of one axis (or of a few together), and the cheapest way is a shortest
path over places (A*: Dijkstra's algorithm with a lower bound of the remaining cost). An edge costs
the bytes that one device receives, and a latency. On a described topology these are seconds of the
engine's rounds on its links; without one the fewest bytes count first, then the fewest collectives.
Between ways of equal cost, one is taken whose blocks are no larger than those at both ends.

>>> from tessera.core.mesh import Mesh
>>> from tessera.core.layout import parse_type
>>> mesh = Mesh(("dp", "tp"), shape={"dp": 128, "tp": 8})
>>> ends = ("f32[65536@dp, 16384@tp]", "f32[65536@tp, 16384@dp]")
>>> for move in cheapest(*(parse_type(text, mesh) for text in ends)):
...     print(move.kind, *move.axes, move.type)
all_to_all tp f32[65536@(dp,tp), 16384]
all_to_all dp f32[(128·512@tp), 16384@dp]
all_to_all tp f32[65536@tp, 16384@dp]
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, pairwise
from typing import NamedTuple

from .layout import Digit, TensorType, digits, grouped, shard_count
from .mesh import Mesh
from .topology import Topology

# Up to EXACT_AXES moving axes the way found is the cheapest. With more there are too many layouts:
# the remaining cost is an estimate, which alone orders the search after MOST_LAYOUTS layouts.
EXACT_AXES, MOST_LAYOUTS = 4, 2000
# Breaks ties between ways of equal time: the one with fewer collectives.
TIE_S = 1e-12
# Most messages of an exchange that are priced; of larger ones a sample of distances.
MOST_MESSAGES = 1 << 14
# Places per dim at which an axis may wait on the way, by the number of moving axes.
_PARKS = {1: 6, 2: 6, 3: 6, 4: 3}


class Place(NamedTuple):
    """The place of an axis: the part of dim `dim`'s index from the product of sizes `at` on, `size`
    long. An uneven factor has all its axes, `group`, at one place. An open sum has dim -1."""

    dim: int
    at: int
    size: int
    group: tuple[str, ...] = ()
    kind: str = ""

    def clashes(self, other: Place) -> bool:
        """Returns whether the two overlap: one must end before the other begins."""
        if self.dim != other.dim or self.dim < 0:
            return False
        return bool(self.at % (other.at * other.size) and other.at % (self.at * self.size))


Where = tuple[int, ...]  # for each moving axis the number of its place; 0: it has none


class Edge(NamedTuple):
    """A possible collective: it moves the axes `axis_indices` (by number) to the place number `to`;
    a device's block then has `block` bytes."""

    kind: str
    axis_indices: tuple[int, ...]
    to: int
    received_bytes: float
    block: int


class Price(NamedTuple):
    """The price of a collective: once, and per byte that a device receives."""

    latency: float = 1.0
    per_byte: float = 1.0


class Move(NamedTuple):
    """One collective: `kind` over `axes`, from dim `dim` to dim `to_dim` (-1: none)."""

    kind: str
    axes: tuple[str, ...]
    dim: int
    to_dim: int
    type: TensorType


def places(t: TensorType) -> dict[str, Place]:
    """Returns the place of each axis that `t` uses."""
    found = {a: Place(-1, 0, 0, (), kind) for a, kind in t.partial}
    for j, dim in enumerate(t.dims):
        at = 1
        for d in digits(dim, t.sizes):
            for a in d.axes:
                found[a] = Place(j, at, d.size, d.axes if d.uneven else ())
            at *= d.size
    return found


def placed(t: TensorType, where: Mapping[str, Place]) -> TensorType:
    """Returns `t` with its axes at these places."""
    dims = []
    for j, size in enumerate(t.shape):
        run, at = [], 1
        here = {p: p.group or (a,) for a, p in where.items() if p.dim == j}
        for p in sorted(here):
            if p.at > at:
                run.append(Digit(p.at // at, (), p.at // at))
            n = shard_count(here[p], t.sizes)
            run.append(Digit(p.size, here[p], -(-p.size // n), bool(p.group)))
            at = p.at * p.size
        if at < size:
            run.append(Digit(size // at, (), size // at))
        dims.append(grouped(run))
    partial = tuple((a, p.kind) for a, p in where.items() if p.dim < 0)
    return TensorType(t.dtype, dims, partial, t.mesh, t.varying, t.rest_axes)


def cheapest(
    src: TensorType, dst: TensorType, in_order: bool = False, topology: Topology | None = None
) -> list[Move]:
    """Returns the collectives from `src` to `dst`, whose open sums are all open in `src`, too.

    With `in_order` sums are completed one axis after the other, axes in time first and then the
    last name first: this fixes the order of additions. `topology` prices the axes.
    """
    return _Search(src, dst, in_order, topology).cheapest_path()


@lru_cache(maxsize=1024)
def price(mesh: Mesh, axes: tuple[str, ...], kind: str, topology: Topology) -> Price:
    """Returns the price of the collective `kind` over `axes` as the engine runs it, in seconds:
    each device of a group sends to its neighbour, round by round, or to each other device in turn.
    All groups run at once and share the links.

    >>> from tessera.core.topology import cluster
    >>> mesh = Mesh(("dp", "tp"), shape={"dp": 4, "tp": 8})
    >>> for axis in mesh.axes:
    ...     latency, per_byte = price(mesh, (axis,), "all_reduce", cluster("h100"))
    ...     print(f"{latency * 1e6:.1f} µs, {1e-9 / per_byte:.0f} GB/s")
    57.6 µs, 50 GB/s
    47.6 µs, 450 GB/s
    """
    groups = mesh.physical.groups(axes)
    n = len(groups[0])
    # All rounds are equal, or each has its own distance; of many distances a sample is priced.
    skip = 1 + n * len(groups) * n // MOST_MESSAGES
    distances = range(1, n)[::skip] if kind == "all_to_all" else range(1, min(n, 2))
    latency = per_byte = 0.0
    for far in distances:
        longest, load = 0.0, defaultdict[tuple[int, ...], float](float)
        for group in groups:
            for path in map(topology.route, group, (*group[far:], *group[:far])):
                longest = max(longest, sum([port.latency_s for port in path]))
                for port in path:
                    load[port.place] += 1 / port.link.bytes_per_s
        latency += longest
        per_byte += max(load.values())
    rounds = (1 + (kind == "all_reduce")) * (n - 1)
    most = max(1, len(distances))
    return Price(latency / most * rounds + TIE_S, per_byte / most)


class _Search:
    def __init__(
        self, src: TensorType, dst: TensorType, in_order: bool, topology: Topology | None
    ) -> None:
        self.src, self.in_order, self.topology = src, in_order, topology
        self.most_bytes = max(src.local_bytes, dst.local_bytes)
        first, last = places(src), places(dst)
        # Axes at their goal stay there all the way.
        self.fixed_axes = {a: p for a, p in first.items() if last.get(a) == p}
        self.axes = [a for a in src.sizes if a not in self.fixed_axes and (a in first or a in last)]
        self.sizes = [src.sizes[a] for a in self.axes]
        self.prices: dict[tuple[str, tuple[int, ...]], Price] = {}
        # The cheapest price of all axes, for the lower bounds.
        self.low = self._least()
        ends = [tuple(t.get(a) for a in self.axes) for t in (first, last)]
        self.exact = len(self.axes) <= EXACT_AXES
        # The places by number, and the numbers of those that each clashes with, as bits.
        self.place: list[Place | None] = [None]
        self.number: dict[Place | None, int] = {None: 0}
        self.clash: list[int] = [0]
        self.dim, self.size = [-1], [1]
        rests = [self._rests(k, (*ends[0], *ends[1])) for k in range(len(self.axes))]
        self.rests = [[self._number(p) for p in row] for row in rests]
        self.start, self.goal = (tuple(map(self._number, end)) for end in ends)
        self.members: dict[int, tuple[int, ...]] = {
            self.number[p]: tuple(self.axes.index(a) for a in p.group)
            for p in (*ends[0], *ends[1])
            if p is not None and p.group
        }
        self.whole_bytes = math.prod(src.shape) * src.dtype.bytes
        self.least_bytes = self.whole_bytes // shard_count(
            (*self.axes, *self.fixed_axes), src.sizes
        )
        self.goal_bytes = self.bytes(self.goal)
        self.held_bytes = self.whole_bytes // shard_count(self.fixed_axes, src.sizes)
        self.uneven = bool(self.members) or any(p.group for p in self.fixed_axes.values())

    def _number(self, p: Place | None) -> int:
        """Returns the number of place `p`, a new one at its first use; `clash` then has the places
        that cannot be used together with it."""
        if p is not None and p not in self.number:
            me = self.number[p] = len(self.place)
            self.place.append(p)
            self.clash.append(0)
            self.dim.append(p.dim)
            self.size.append(p.size if p.dim >= 0 else 1)
            for q, other in self.number.items():
                if q is not None and p.clashes(q):
                    self.clash[me] |= 1 << other
                    self.clash[other] |= 1 << me
        return self.number[p]

    def _rests(self, k: int, ends: Sequence[Place | None]) -> list[Place]:
        """Returns the places at which axis `k` may be on the way: its goal, and beside the digits
        at both ends, or beside another axis at such a place. Places that clash with the fewest
        others come first."""
        n = self.sizes[k]
        start, goal = ends[k], ends[k + len(self.sizes)]
        others = [p for i, p in enumerate(ends) if p is not None and i % len(self.sizes) != k]
        places_by_dim = []
        for j, size in enumerate(self.src.shape):
            edges = {1, size}
            for p in (*others, *self.fixed_axes.values(), start, goal):
                if p is not None and p.dim == j:
                    edges |= {p.at, p.at * p.size}
            edges |= {e * m for e in [*edges] for m in self.sizes}
            edges |= {e // m for e in [*edges] for m in self.sizes if e % m == 0}
            here = [Place(j, at, n) for at in sorted(edges) if size % (at * n) == 0]
            here = [p for p in here if not any(map(p.clashes, self.fixed_axes.values()))]
            here.sort(key=lambda p: sum(map(p.clashes, others)))
            places_by_dim += here[: _PARKS.get(len(self.axes), 1)]
        if goal is not None and goal.dim >= 0 and not goal.group and goal not in places_by_dim:
            places_by_dim.append(goal)
        return places_by_dim

    def bytes(self, where: Where) -> int:
        """Returns the bytes of one device's block."""
        size = math.prod(self.src.shape)
        for p in {*self.fixed_axes.values(), *(self.place[q] for q in where)}:
            if p is not None and p.group:
                size = size // p.size * -(-p.size // shard_count(p.group, self.src.sizes))
            elif p is not None and p.dim >= 0:
                size //= p.size
        return size * self.src.dtype.bytes

    # -- costs ------------------------------------------------------------------------------------
    def price(self, kind: str, axis_indices: tuple[int, ...]) -> Price:
        """Returns the price of the collective `kind` over the axes `axis_indices`; 0 for a slice,
        which sends nothing."""
        if kind == "shard":
            return Price(0.0, 0.0)
        mesh, topology = self.src.mesh, self.topology
        if topology is None or mesh is None:
            return Price()
        if (kind, axis_indices) not in self.prices:
            axes = tuple(self.axes[k] for k in axis_indices)
            self.prices[kind, axis_indices] = price(mesh, axes, kind, topology)
        return self.prices[kind, axis_indices]

    def _least(self) -> Price:
        """Returns a lower bound of a collective's price: one message on the cheapest link that it
        must pass."""
        mesh, topology = self.src.mesh, self.topology
        if topology is None or mesh is None:
            return Price()
        cheapest = Price(math.inf, math.inf)
        for axis in self.axes:
            group = mesh.physical.groups(axis)[0]
            ports = [p for pair in pairwise(group) for p in topology.route(*pair)]
            slowest = max((1 / p.link.bytes_per_s for p in ports), default=0.0)
            longest = max((p.latency_s for p in ports), default=0.0)
            cheapest = Price(*map(min, cheapest, (longest, slowest)))
        return cheapest

    # -- bounds of the remaining cost -------------------------------------------------------------
    def remaining_cost(self, where: Where, block: int) -> float:
        """Returns an estimate of the remaining cost; a lower bound while the search is exact."""
        each = self.least_bytes if self.exact else block
        cost, wrong = 0.0, 0
        for p, goal, n in zip(where, self.goal, self.sizes):  # all of the same length
            if p and p != goal:
                cost += each * (n - 1) / n
                wrong += 1
        if not wrong:
            return 0.0
        if not self.exact:
            return cost * self.low.per_byte + wrong * self.low.latency
        cost = max(cost, self._unheld(where), self._unsummed(where))
        dims = {self.dim[p] for p, goal in zip(where, self.goal) if p and p != goal}
        return cost * self.low.per_byte + len(dims) * self.low.latency

    def _unheld(self, where: Where) -> float:
        """Returns the bytes of the block at the goal that some device does not hold yet."""
        if self.uneven:
            return 0.0
        seen, parts = 0, 1
        for p, goal in zip(where, self.goal):
            for q in (p, goal) if p != goal else (p,):
                if self.clash[q] & seen:
                    return self.goal_bytes
                seen |= 1 << q
                parts *= self.size[q]
        return self.goal_bytes - self.held_bytes / parts

    def _unsummed(self, where: Where) -> float:
        """Returns the bytes that a device receives for open sums that are not split, at the
        smallest block."""
        sums = [k for k, p in enumerate(where) if p and self.dim[p] < 0]
        if not sums:
            return 0.0
        n = math.prod([self.sizes[k] for k in sums if not self.goal[k]])
        return 2 * (n - 1) * self.least_bytes * math.prod([self.sizes[k] for k in sums]) / n

    # -- edges ------------------------------------------------------------------------------------
    def edges(self, where: Where, block: int) -> Iterator[Edge]:
        """Yields the possible steps from the layout `where`, whose block has `block` bytes: for
        each axis a gather, an exchange to another dim, a slice, or the completion of a sum."""
        at = [self.place[p] for p in where]
        sums = [k for k, p in enumerate(at) if p is not None and p.dim < 0]
        if self.in_order and sums:
            time = self.src.mesh.time if self.src.mesh is not None else ()
            sums = [max(sums, key=lambda k: (self.axes[k] in time, self.axes[k]))]
        taken = 0
        for q in where:
            taken |= 1 << q
        # Axes that a gather may include, by their place's begin.
        along = {
            (p.dim, p.at): k
            for k, p in enumerate(at)
            if p is not None and p.dim >= 0 and not p.group and where[k] != self.goal[k]
        }
        for k, p in enumerate(at):
            n, others = self.sizes[k], taken & ~(1 << where[k])
            if p is None:
                yield from self._arrivals("shard", where, k, others, 0, block)
            elif where[k] == self.goal[k]:
                continue
            elif p.group:
                axis_indices = self.members[where[k]]
                if k == axis_indices[0]:
                    n = shard_count(p.group, self.src.sizes)
                    whole = self._block(where, axis_indices, 0)
                    yield Edge("all_gather", axis_indices, 0, (n - 1) * block, whole)
            elif p.dim >= 0:
                mine = self.clash[where[k]]
                for q in self.rests[k]:
                    if q != where[k] and not mine >> q & 1 and not self.clash[q] & others:
                        yield Edge("all_to_all", (k,), q, (n - 1) * block / n, block)
                yield from self._gathers(k, p, along, block)
            elif k in sums:
                alike = tuple(m for m in sums if where[m] == where[k])
                for axis_indices in {(k,), alike if k == alike[0] else (k,)}:
                    n = math.prod([self.sizes[m] for m in axis_indices])
                    yield Edge("all_reduce", axis_indices, 0, 2 * (n - 1) * block // n, block)
                if p.kind == "sum":
                    n = self.sizes[k]
                    received = (n - 1) * block / n
                    yield from self._arrivals("reduce_scatter", where, k, others, received, block)

    def _block(self, where: Where, axis_indices: Sequence[int], to: int) -> int:
        """Returns the bytes of a block with the axes `axis_indices` at the place `to`."""
        return self.bytes(tuple(to if k in axis_indices else p for k, p in enumerate(where)))

    def _arrivals(
        self, kind: str, where: Where, k: int, others: int, received: float, block: int
    ) -> Iterator[Edge]:
        """Yields the steps that bring axis `k`, which splits nothing, to a dim; `others` are the
        places of the other axes."""
        for q in self.rests[k]:
            if not self.clash[q] & others:
                yield Edge(kind, (k,), q, received, block // self.sizes[k])
        goal = self.goal[k]
        if goal not in self.members or self.clash[goal] & others:
            return
        who = self.members[goal]
        free = kind == "shard" and k == who[0] and not any(where[m] for m in who)
        if free or len(who) == 1:
            yield Edge(kind, who, goal, received, self._block(where, who, goal))

    def _gathers(
        self, k: int, p: Place, along: Mapping[tuple[int, int], int], block: int
    ) -> Iterator[Edge]:
        """Yields the gathers of axis `k` at `p`, alone or together with the axes below it."""
        who, n = [k], self.sizes[k]
        yield Edge("all_gather", (k,), 0, (n - 1) * block, n * block)
        while (p.dim, p.at * n) in along:
            who.append(along[p.dim, p.at * n])
            n *= self.sizes[who[-1]]
            yield Edge("all_gather", tuple(who), 0, (n - 1) * block, n * block)

    # -- the search -------------------------------------------------------------------------------
    def cheapest_path(self) -> list[Move]:
        """Returns the cheapest way, by A*: layouts are visited in the order of the cost so far plus
        the bound of the remaining cost. After `MOST_LAYOUTS` of them only the remaining cost
        counts, so that a way is found in time, though perhaps not the cheapest."""
        ticket = count()
        best_costs: dict[Where, float] = {self.start: 0.0}
        came: dict[Where, tuple[Edge, Where]] = {}
        heap = [(0.0, 0.0, next(ticket), self.start, self.bytes(self.start))]
        done: set[Where] = set()
        while heap:
            *_, now, block = heapq.heappop(heap)
            if now == self.goal:
                return self._told(came)
            if now in done:
                continue
            done.add(now)
            so_far = best_costs[now]
            for edge in self.edges(now, block):
                then = tuple([edge.to if m in edge.axis_indices else p for m, p in enumerate(now)])
                latency, per_byte = self.price(edge.kind, edge.axis_indices)
                more = edge.received_bytes + max(0, edge.block - self.most_bytes) / 1000
                cost = so_far + latency + more * per_byte
                if cost < best_costs.get(then, math.inf):
                    best_costs[then], came[then] = cost, (edge, now)
                    remaining = self.remaining_cost(then, edge.block)
                    first = remaining if len(done) > MOST_LAYOUTS else cost + remaining
                    heapq.heappush(heap, (first, remaining, next(ticket), then, edge.block))
        raise AssertionError("whatever is split can be gathered")

    def _told(self, came: dict[Where, tuple[Edge, Where]]) -> list[Move]:
        """Returns the way as moves, read backwards from the goal."""
        out: list[Move] = []
        now = self.goal
        while now in came:
            edge, before = came[now]
            at = [self.place[p] for p in now]
            here = {a: p for a, p in zip(self.axes, at, strict=True) if p is not None}
            old, new = self.place[before[edge.axis_indices[0]]], self.place[edge.to]
            dim, to_dim = (p.dim if p is not None else -1 for p in (old, new))
            axes = tuple(self.axes[k] for k in edge.axis_indices)
            out.append(Move(edge.kind, axes, dim, to_dim, placed(self.src, self.fixed_axes | here)))
            now = before
        return out[::-1]
