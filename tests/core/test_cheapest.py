"""The cheapest resharding, compared with an exhaustive search."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tessera.core.dtypes import f32
from tessera.core.layout import Digit, Dim, Factor, TensorType, digits, grouped, parse_type
from tessera.core.layout_search import cheapest
from tessera.core.mesh import Mesh
from tessera.core.reshard import steps_between, wire_bytes
from tessera.core.topology import Level, Link, Topology
from tessera.cost.collectives import named, price
from tests.cases import LONG


def cut(dim: Dim, axis: str, mesh: Mesh) -> Iterator[Dim]:
    """Yields `dim` with `axis` added at each possible place."""
    n, run = mesh.sizes[axis], digits(dim, mesh.sizes)
    for i, d in enumerate(run):
        if d.axes or d.size % n:
            continue
        for high in (h for h in range(1, d.size // n + 1) if d.size // n % h == 0):
            low = d.size // n // high
            new = [Digit(high, (), high), Digit(n, (axis,)), Digit(low, (), low)]
            yield grouped([*run[:i], *(x for x in new if x.size > 1), *run[i + 1 :]])


def joined(dim: Dim, axis: str, mesh: Mesh) -> Dim:
    run = digits(dim, mesh.sizes)
    return grouped(Digit(d.size, (), d.size) if axis in d.axes else d for d in run)


def every_way_on(t: TensorType) -> Iterator[tuple[str, tuple[str, ...], TensorType]]:
    """Yields (kind, axes, result type) for each collective on one axis, and each all_reduce on
    several."""
    mesh = t.mesh
    assert mesh is not None

    def put(j: int, dim: Dim) -> tuple[Dim, ...]:
        return (*t.dims[:j], dim, *t.dims[j + 1 :])

    for axis in mesh.axes:
        if axis in t.split_axes:
            i = next(i for i, d in enumerate(t.dims) if any(axis in f.axes for f in d))
            whole = t.with_dims(put(i, joined(t.dims[i], axis, mesh)))
            yield "all_gather", (axis,), whole
            for j, dim in enumerate(whole.dims):
                for new in cut(dim, axis, mesh):
                    to = whole.with_dims((*whole.dims[:j], new, *whole.dims[j + 1 :]))
                    if i != j or _apart(t.dims[i], new, axis, mesh):
                        yield "all_to_all", (axis,), to
        elif axis in t.partial_axes:
            rest = t.with_partial(tuple(p for p in t.partial if p[0] != axis))
            for j, dim in enumerate(t.dims):
                for new in cut(dim, axis, mesh):
                    yield "reduce_scatter", (axis,), rest.with_dims(put(j, new))
        else:
            for j, dim in enumerate(t.dims):
                for new in cut(dim, axis, mesh):
                    yield "shard", (axis,), t.with_dims(put(j, new))
    for n in range(1, len(t.partial) + 1):
        for some in itertools.combinations(t.partial, n):
            rest = tuple(p for p in t.partial if p not in some)
            yield "all_reduce", tuple(a for a, _ in some), t.with_partial(rest)


def _apart(old: Dim, new: Dim, axis: str, mesh: Mesh) -> bool:
    """Returns whether the index digits of `axis` in the two dims are disjoint."""

    def place(dim: Dim) -> tuple[int, int]:
        at = 1
        for d in digits(dim, mesh.sizes):
            if axis in d.axes:
                return at, at * d.size
            at *= d.size
        raise AssertionError(axis)

    (a, b), (c, d) = place(old), place(new)
    return c % b == 0 or a % d == 0


Cost = Callable[[str, tuple[str, ...], TensorType, TensorType], float]


def cheapest_of_all(src: TensorType, cost: Cost) -> dict[TensorType, float]:
    """Returns the cheapest cost of each layout that can be reached from `src`."""
    known: dict[TensorType, float] = {src: 0}
    heap, ticket = [(0.0, 0, src)], itertools.count(1)
    while heap:
        paid, _, now = heapq.heappop(heap)
        if paid > known[now]:
            continue
        for kind, axes, to in every_way_on(now):
            then = paid + cost(kind, axes, now, to)
            if then < known.get(to, math.inf):
                known[to] = then
                heapq.heappush(heap, (then, next(ticket), to))
    return known


def received(src: TensorType, dst: TensorType) -> int:
    return sum(s.wire_bytes for s in steps_between(src, dst))


def every_layout(mesh: Mesh, shape: tuple[int, ...], partial: bool) -> Iterator[TensorType]:
    """Yields all layouts with the axes in any order on any dim, unused, or partial."""
    for order in itertools.permutations(mesh.axes):
        for homes in itertools.product(range(-1 - partial, len(shape)), repeat=len(order)):
            dims = [
                (Factor(n, tuple(a for a, h in zip(order, homes, strict=True) if h == j)),)
                for j, n in enumerate(shape)
            ]
            open_ = tuple((a, "sum") for a, h in zip(order, homes, strict=True) if h == -2)
            yield TensorType(f32, dims, open_, mesh)


@pytest.mark.parametrize(
    ("sizes", "shape", "sources"),
    [
        ((2, 2), (16, 16), 99),
        ((2, 3), (36, 36), 99),
        ((2, 4), (64, 64), 99),
        pytest.param((3, 4), (144, 144), 99, marks=LONG),
        ((2, 3, 4), (24, 24), 4),
        ((2, 2, 2), (16, 16), 4),
        pytest.param((2, 2, 2, 2), (16, 4), 2, marks=LONG),
    ],
)
def test_no_way_receives_fewer_bytes(
    sizes: tuple[int, ...], shape: tuple[int, ...], sources: int
) -> None:
    """From each layout (a sample if there are many), if source and target use all axes."""
    mesh, rng = Mesh(tuple("wxyz"[: len(sizes)]), shape=sizes), random.Random(7)
    starts = list(dict.fromkeys(every_layout(mesh, shape, partial=True)))
    for a in rng.sample(starts, min(sources, len(starts))):
        best = cheapest_of_all(a, wire_bytes)
        for b in dict.fromkeys(every_layout(mesh, shape, partial=False)):
            used = {*a.split_axes, *a.partial_axes, *b.split_axes}
            if used == {*mesh.axes} and b in best:
                assert received(a, b) <= best[b], f"{a} -> {b}"


def test_two_axes_change_places_on_a_thousand_devices() -> None:
    mesh = Mesh(("dp", "tp"), shape={"dp": 128, "tp": 8})
    a = parse_type("f32[65536@dp, 16384@tp]", mesh)
    b = parse_type("f32[65536@tp, 16384@dp]", mesh)
    assert received(a, b) < 3 * a.local_bytes
    assert max(s.type.local_bytes for s in steps_between(a, b)) == a.local_bytes


def test_six_axes_end_by_themselves() -> None:
    mesh, rng = Mesh(tuple("abcdef"), shape=(2, 3, 2, 4, 2, 2)), random.Random(3)
    shape = (192, 96, 384)
    some = []
    while len(some) < 8:
        homes = [rng.randrange(3) for _ in mesh.axes]
        order = rng.sample(mesh.axes, 6)
        dims = [
            (Factor(n, tuple(a for a, h in zip(order, homes, strict=True) if h == j)),)
            for j, n in enumerate(shape)
        ]
        t = TensorType(f32, dims, (), mesh)
        if t.local_bytes * 192 == t.nbytes:  # only layouts without padding
            some.append(t)
    for a, b in itertools.pairwise(some):
        assert received(a, b) <= a.local_bytes * 20
        assert steps_between(a, b)[-1].type is b


def test_a_slow_axis_is_spared() -> None:
    """Links between hosts are slow: the sum over the fast axis comes first, and the value is split
    for it."""
    mesh = Mesh(("host", "chip"), shape={"host": 2, "chip": 4})
    slow, fast = Link("slow", 1e-5, 1e9), Link("fast", 1e-6, 1e11)
    where = Topology("two hosts", (Level(2, slow), Level(4, fast)))
    a = parse_type("f32[4096, 64] +host +chip", mesh)
    b = parse_type("f32[4096, 64]", mesh)
    kinds = [(m.kind, m.axes) for m in cheapest(a, b, topology=where)]
    assert kinds == [
        ("reduce_scatter", ("chip",)), ("all_reduce", ("host",)), ("all_gather", ("chip",)),
    ]  # fmt: skip
    assert [(m.kind, m.axes) for m in cheapest(a, b)] == [("all_reduce", ("host", "chip"))]


def seconds(kind: str, axes: tuple[str, ...], src: TensorType, dst: TensorType) -> float:
    """The cost model's time for a collective on `LINKS` in the shape of its mesh."""
    mesh = src.mesh
    if kind == "shard" or mesh is None:
        return 0.0
    groups = mesh.groups(axes)
    whole = dst if kind == "all_gather" else src
    table = named(kind, "engine", len(groups[0]))
    return price(table, links_of(mesh), groups).time_s(whole.local_bytes)


def links_of(mesh: Mesh) -> Topology:
    first, *rest = mesh.shape
    return Topology(
        "links", (Level(first, SLOW, *WIRED[first]), Level(math.prod(rest), FAST, "ring"))
    )


SLOW, FAST = Link("slow", 1e-5, 1e9), Link("fast", 1e-6, 1e11)
WIRED: dict[int, tuple[Any, ...]] = {2: ("all", True), 3: ("line",), 4: ("ring",)}


@pytest.mark.parametrize(
    ("sizes", "shape"), [((2, 2, 2), (16, 16)), ((3, 4), (144, 144)), ((4, 4), (4096, 64))]
)
def test_no_way_takes_less_time_on_the_links(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    mesh, rng = Mesh(tuple("wxyz"[: len(sizes)]), shape=sizes), random.Random(5)
    links = links_of(mesh)
    starts = list(dict.fromkeys(every_layout(mesh, shape, partial=True)))
    for a in rng.sample(starts, 2):
        best = cheapest_of_all(a, seconds)
        for b in dict.fromkeys(every_layout(mesh, shape, partial=False)):
            if {*a.split_axes, *a.partial_axes, *b.split_axes} == {*mesh.axes} and b in best:
                at, took = a, 0.0
                for step in steps_between(a, b, topology=links):
                    took += seconds(step.kind, step.axes, at, step.type)
                    at = step.type
                assert took <= best[b] * (1 + 1e-9), f"{a} -> {b}"
