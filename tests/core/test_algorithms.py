"""Correctness of the collective algorithms' tables for every n up to 64, and their textbook
costs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tessera import GraphError, UsageError, dist
from tessera.core.topology import CLUSTERS, Level, Link, Topology, Wiring, cluster, flat
from tessera.cost.collectives import Formula, candidates, choose, explain, formula, nesting, price
from tessera.ir.schedule.algorithms.build import FLAT, NAMES, build, can_segment
from tessera.ir.schedule.algorithms.check import (
    adjacent_pairs,
    evaluate,
    fold,
    in_pairs,
    order,
    verify,
)
from tessera.ir.schedule.algorithms.table import COLLECTIVES, Algorithm, Collective, Round, Transfer
from tessera.ir.schedule.algorithms.text import parse, picture, text

WIRE = Link("wire", 1e-6, 1e9)
# Sizes at which tables are also priced: small ones, and those around powers of two.
SIZES = (*range(2, 14), 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)
SUMS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")


def factors(n: int, least: int = 2) -> list[tuple[int, ...]]:
    """Returns all ordered factorizations of n into sizes above 1."""
    found: list[tuple[int, ...]] = []
    for a in range(least, n):
        if n % a == 0:
            found.append((a, n // a))
            found += [(a, *rest) for rest in factors(n // a)]
    return found


# ---- promises ----------------------------------------------------------------------------------
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_is_right_for_every_n_up_to_64(
    collective: Collective, everything: bool
) -> None:
    for n in range(1, 65) if everything else (*range(1, 18), 24, 31, 32, 33):
        for name in (*FLAT, "engine"):
            verify(build(collective, name, n))
        if can_segment(collective, "double_tree"):
            for name in FLAT:
                if can_segment(collective, name):
                    verify(build(collective, name, n, segments=3))
        if collective == "broadcast":
            for name in (*FLAT, "engine"):
                verify(build(collective, name, n, root=n // 2))
                verify(build(collective, name, n, root=n - 1))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_nesting_is_right(collective: Collective) -> None:
    """Every nesting of each n up to 24, and of 32, 36, 48, 60 and 64, with random levels."""
    draw = random.Random(0)
    for n in (*range(2, 25), 32, 36, 48, 60, 64):
        shapes = factors(n)
        for shape in shapes if n <= 24 else draw.sample(shapes, 4):
            levels = tuple(draw.choice(FLAT) for _ in shape)
            root = draw.randrange(n) if collective == "broadcast" else 0
            verify(build(collective, "hierarchical", shape=shape, levels=levels, root=root))


def test_all_ranks_add_in_one_order_and_trees_in_adjacent_pairs() -> None:
    for n in (*range(1, 18), 24, 31, 33, 48, 63, 64):
        for collective in SUMS:
            for name in FLAT:
                a = build(collective, name, n)
                found = order(a)  # raises if ranks add in different orders
                assert found is not None and len(found) == a.chunks
                if name in ("tree", "halving"):
                    assert in_pairs(a), a
                elif n > 8:
                    assert not in_pairs(a), a


def test_a_ring_is_a_left_fold_from_the_rank_after_the_owner() -> None:
    chunk_0, chunk_1, *_ = order(build("reduce_scatter", "ring", 4)) or ()
    assert chunk_0 == (0, ((1, 2), 3))  # ((1 + 2) + 3) + 0
    assert chunk_1 == ((0, (2, 3)), 1)  # ((2 + 3) + 0) + 1


def test_nested_pairs_are_pairs_of_the_whole_where_inner_sizes_are_powers_of_two() -> None:
    for shape in [(2, 4), (3, 2), (5, 8), (3, 2, 4), (7, 2, 2)]:
        assert in_pairs(build("all_reduce", "hierarchical", shape=shape,
                              levels=("halving",) * len(shape)))  # fmt: skip
    assert not in_pairs(build("all_reduce", "hierarchical", shape=(2, 3), levels=("tree",) * 2))


def test_the_tree_of_seven() -> None:
    assert adjacent_pairs(5) == (((0, 1), (2, 3)), 4)
    assert fold(adjacent_pairs(3), ["a", "b", "c"]) == "abc"
    values = [np.float32(1e8), np.float32(1), np.float32(-1e8)]
    assert fold(adjacent_pairs(3), values) == 0 and fold((0, (1, 2)), values) == 0
    assert fold(((0, 2), 1), values) == 1


def test_evaluate_is_what_numpy_says() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 4, 6, 7):
        for name in (*FLAT, "engine"):
            for collective in COLLECTIVES:
                a = build(collective, name, n)
                rows = a.parts // n if collective == "all_gather" else a.parts * n
                blocks = [rng.integers(0, 99, (rows, 2)) for _ in range(n)]
                total = np.sum(blocks, axis=0)
                got = evaluate(a, blocks)
                for r in range(n):
                    match collective:
                        case "all_reduce":
                            want = total
                        case "reduce_scatter":
                            want = np.split(total, n)[r]
                        case "all_gather":
                            want = np.concatenate(blocks)
                        case "broadcast":
                            want = blocks[0]
                        case "all_to_all":
                            want = np.concatenate([np.split(b, n)[r] for b in blocks])
                    np.testing.assert_array_equal(got[r], want, err_msg=repr(a))


# ---- what verify finds -------------------------------------------------------------------------
RING = build("all_reduce", "ring", 4)


def with_first(a: Algorithm, *moves: Transfer, at: int = 0) -> Algorithm:
    """Returns `a` with the first transfer of round `at` replaced by `moves`."""
    rounds: list[Round] = list(a.rounds)
    rounds[at] = tuple(sorted((*moves, *rounds[at][1:]), key=lambda t: (t.src, t.dst, t.op)))
    return dataclasses.replace(a, rounds=tuple(rounds))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (with_first(RING), "rank 0 ends without rank 0 in chunk 3"),
        (with_first(RING, Transfer(0, 4, (3,), "add")), "the ranks are not two of the group"),
        (with_first(RING, Transfer(0, 0, (3,), "add")), "the ranks are not two of the group"),
        (with_first(RING, Transfer(0, 1, (4,), "add")), "a chunk is not one of 4"),
        (with_first(RING, Transfer(0, 1, (3, 3), "add")), "no chunk, or one twice"),
        (with_first(RING, Transfer(0, 1, (3,), "copy")), "without rank 1 in chunk 3"),
        (
            with_first(RING, Transfer(0, 1, (3,), "add"), Transfer(3, 1, (3,), "copy")),
            "chunk 3 of rank 1 is written twice",
        ),
        (
            dataclasses.replace(RING, rounds=(RING.rounds[0], *RING.rounds)),
            "shares of chunk 3 are added twice",
        ),
        (
            dataclasses.replace(RING, rounds=(RING.rounds[0][::-1], *RING.rounds[1:])),
            "transfers are not in ascending order of sender",
        ),
        (dataclasses.replace(RING, rounds=RING.rounds[:-1]), "ends without rank"),
        (dataclasses.replace(RING, rounds=(*RING.rounds, RING.rounds[-1])), "holds this chunk"),
        (
            with_first(build("all_gather", "ring", 3), Transfer(0, 1, (1,), "copy")),
            "rank 0 does not hold chunk 1",
        ),
        (
            with_first(build("all_gather", "ring", 3), Transfer(0, 1, (0,), "add")),
            "an all_gather adds nothing",
        ),
    ],
)
def test_a_broken_table_is_found(bad: Algorithm, said: str) -> None:
    with pytest.raises(GraphError) as error:
        verify(bad)
    assert said in str(error.value), error.value


def test_any_transfer_left_out_or_turned_is_found() -> None:
    """Every single mutation of small tables is found: no transfer is redundant."""
    for collective in COLLECTIVES:
        for name in FLAT:
            a = build(collective, name, 5)
            for k, moves in enumerate(a.rounds):
                for i, t in enumerate(moves):
                    turned = Transfer(t.dst, t.src, t.chunks, t.op)
                    rest = moves[:i] + moves[i + 1 :]
                    for new in (rest, (*rest, turned)):
                        ordered = tuple(sorted(new, key=lambda t: (t.src, t.dst, t.op)))
                        rounds = (*a.rounds[:k], ordered, *a.rounds[k + 1 :])
                        with pytest.raises(GraphError):
                            verify(dataclasses.replace(a, rounds=rounds))


def test_an_order_that_differs_between_ranks_is_found() -> None:
    """The sums are complete, but (0+1)+(2+3) at ranks 0 and 1, and (0+3)+(1+2) at 2 and 3."""
    two = parse(
        'all_reduce "two sums"  n=4 chunks=1\n'
        "  0: 0>3 +0  1>0 +0  2>1 +0  3>2 +0\n"
        "  1: 1>3 +0  2>0 +0\n"
        "  2: 0>1 =0\n"
        "  3: 3>2 =0\n"
    )
    with pytest.raises(GraphError) as error:
        order(two)
    assert "rank 2 adds chunk 0 up in another order" in str(error.value)
    butterfly = parse(
        'all_reduce "butterfly"  n=4 chunks=1\n'
        "  0: 0>1 +0  1>0 +0  2>3 +0  3>2 +0\n"
        "  1: 0>2 +0  1>3 +0  2>0 +0  3>1 +0\n"
    )
    assert in_pairs(butterfly)  # all ranks add, in the same order


def test_order_is_for_sums_of_ours() -> None:
    assert order(build("all_reduce", "engine", 4)) is None
    assert not in_pairs(build("all_reduce", "engine", 4))
    with pytest.raises(UsageError, match="all_gather adds nothing"):
        order(build("all_gather", "ring", 4))


# ---- rounds and bytes --------------------------------------------------------------------------
def wiring(name: str) -> Wiring:
    return "ring" if name == "ring" else "line" if name == "line" else "all"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rounds_and_bytes_are_the_textbooks(collective: Collective) -> None:
    """The price of each table on its own topology is the closed form rounds · α + share · S / W."""
    compared = 0
    for n in SIZES:
        for name in FLAT:
            form = formula(collective, name, n)
            if form is None or name == "double_tree":
                continue
            cost = price(build(collective, name, n), flat(n, WIRE, wiring(name)))
            assert cost.rounds == form.rounds, (name, n)
            assert math.isclose(cost.share, form.share), (name, n)
            got, want = cost.time_s(1e6), form.time_s(1e6, WIRE.latency_s, WIRE.bytes_per_s)
            assert math.isclose(got, want), (name, n)
            compared += 1
    assert compared >= len(SIZES)


def test_the_reference_formulas() -> None:
    """The textbook times of collectives, for several α, W, S and n."""
    a, w, s = WIRE.latency_s, WIRE.bytes_per_s, 3e6

    def time(collective: Collective, name: str, n: int) -> float:
        return price(build(collective, name, n), flat(n, WIRE)).time_s(s)

    for n in SIZES:
        half = (n - 1) * a + (n - 1) / n * s / w
        assert math.isclose(time("all_reduce", "ring", n), 2 * half)
        assert math.isclose(time("reduce_scatter", "ring", n), half)
        assert math.isclose(time("all_gather", "ring", n), half)
        assert math.isclose(time("all_to_all", "direct", n), half)


def test_two_trees_take_2_log_n_rounds_and_2_s() -> None:
    """The textbook time: about 2 log2(n) α + 2 S / W. No rank sends or receives more than 2 S."""
    for n in range(2, 65):
        a = build("all_reduce", "double_tree", n)
        form = formula("all_reduce", "double_tree", n)
        assert form is not None and a.steps == form.rounds == 2 * math.ceil(math.log2(n))
        most = 2 * a.chunks if n > 3 else 2 * a.chunks - (4 - n)
        assert max(a.sent()) == max(a.received()) == most
    for n in (4, 8, 16, 33):
        many = price(build("all_reduce", "double_tree", n, segments=512), flat(n, WIRE))
        assert many.rounds == 2 * math.ceil(math.log2(n)) + 511
        assert 2.0 <= many.share <= 2.1, n


def test_a_hierarchy_is_scatter_reduce_gather() -> None:
    """The textbook time: RS(g, W1) + AR(N, S / g, W2) + AG(g, W1)."""
    fast, slow, s = Link("fast", 1e-6, 100e9), Link("slow", 5e-6, 10e9), 64e6
    for hosts, g in [(2, 4), (4, 8), (3, 6), (8, 2)]:
        both = Topology("hosts", (Level(hosts, slow), Level(g, fast)))
        a = build("all_reduce", "hierarchical", shape=(hosts, g))
        within = formula("reduce_scatter", "ring", g)
        across = formula("all_reduce", "ring", hosts)
        assert within is not None and across is not None
        want = 2 * within.time_s(s, 1e-6, 100e9) + across.time_s(s / g, 5e-6, 10e9)
        assert math.isclose(price(a, both).time_s(s), want)
        # Each host has one port, which the g groups across the hosts share.
        one = Topology("hosts", (Level(hosts, slow, shared=True), Level(g, fast)))
        want = 2 * within.time_s(s, 1e-6, 100e9) + across.time_s(s, 5e-6, 10e9)
        assert math.isclose(price(a, one).time_s(s), want)


def test_halving_sends_no_more_than_the_bound_where_n_is_no_power_of_two() -> None:
    for n in range(2, 65):
        a = build("reduce_scatter", "halving", n)
        assert a.steps == math.ceil(math.log2(n))
        assert sum(a.sent()) == n * (n - 1)  # each chunk is sent exactly once
        assert max(a.sent()) == n - 1
        assert max(a.received()) <= (n - 1 if n & (n - 1) == 0 else 1.5 * n), n


def test_adding_costs_and_groups_share_ports() -> None:
    slow_adder = Topology("one", (Level(4, WIRE),), add_bytes_per_s=1e8)
    ring = build("all_reduce", "ring", 4)
    plain_s = price(ring, flat(4, WIRE)).time_s(1e6)
    assert math.isclose(price(ring, slow_adder).time_s(1e6), plain_s + 0.75 * 1e6 / 1e8)
    # dp over hosts with one port each: 4 concurrent groups need 4 times the bytes.
    hosts = Topology("hosts", (Level(2, WIRE, shared=True), Level(4, Link("in", 0.0, 1e12))))
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    pair = build("all_reduce", "ring", 2)
    one, all_four = (price(pair, hosts, g) for g in (mesh.groups("dp")[:1], mesh.groups("dp")))
    assert math.isclose(all_four.send_s_per_byte, 4 * one.send_s_per_byte)
    assert all_four.latency_s == one.latency_s


def test_a_ring_on_a_line_pays_for_the_way_back() -> None:
    """The wrap-around message crosses the whole line. Each link carries two messages, one in each
    direction, so only the latency grows."""
    n = 8
    ring, line = (
        price(build("all_gather", name, n), flat(n, WIRE, "line")) for name in ("ring", "line")
    )
    assert ring.rounds == line.rounds and math.isclose(ring.share, line.share)
    assert math.isclose(ring.latency_s, (n - 1) * line.latency_s)


# ---- topologies --------------------------------------------------------------------------------
def test_ways_follow_the_wires() -> None:
    ring, line = flat(6, WIRE, "ring"), flat(6, WIRE, "line")
    assert [p.text for p in ring.route(1, 5)] == ["wire from 1 to 0", "wire from 0 to 5"]
    assert len(line.route(1, 5)) == 4 and line.route(2, 2) == ()
    torus = cluster("tpu_v4")
    assert torus.size == 64 and len(torus.route(0, 63)) == 3  # the wrap-around link of each axis
    for t in CLUSTERS.values():
        assert [t.device(t.coords(d)) for d in range(t.size)] == list(range(t.size))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Topology("x", ()), "Topology 'x': its levels cannot be ()"),
        (lambda: Topology("x", 8), "Topology 'x': its levels cannot be 8"),
        (lambda: cluster(dist.Mesh("dp", 2)), "a mesh's is mesh.links"),
        (lambda: price(RING, flat(8, WIRE), [0, 1, 2, 3]), "groups cannot be [0, 1, 2, 3]"),
        (lambda: price(RING, flat(8, WIRE), "dp"), "groups cannot be 'dp'"),
        (
            lambda: explain("all_gather", 8, flat(4, WIRE), algorithm=RING),
            "choose: the table is of another collective than all_gather",
        ),
        (lambda: formula("allreduce", "ring", 4), "the collective cannot be 'allreduce'"),
        (lambda: formula("all_reduce", "rings", 4), "the name cannot be 'rings'"),
        (lambda: formula("all_reduce", "ring", "4"), "n cannot be '4'"),
        (lambda: formula("all_reduce", "ring", -4), "n cannot be -4"),
        (lambda: formula("broadcast", "ring", 4, 0), "segments cannot be 0"),
        (lambda: cluster("h100").coords(32), "there is no device 32"),
        (lambda: cluster("h100").of(1, 2, 3), "3 sizes for 2 levels"),
        (lambda: cluster("h100").of(0), "at  : test_algorithms.py:"),
        (lambda: cluster("cray"), "'cray' is not described"),
        (lambda: price(RING, flat(2, WIRE)), "there is no device 2"),
        (lambda: price(RING, flat(8, WIRE), [[0, 1], [2, 3]]), "not distinct devices, 4 a group"),
        (lambda: price(RING, flat(8, WIRE), [[0, 1, 2, 2]]), "not distinct devices"),
        (lambda: build("psum", "ring", 4), "the collective cannot be 'psum'"),
        (lambda: build("all_reduce", "star", 4), "the name cannot be 'star'"),
        (lambda: build("all_reduce", "ring"), "n cannot be None"),
        (lambda: build("all_reduce", "ring", 0), "n cannot be 0"),
        (lambda: build("all_reduce", "ring", True), "n cannot be True"),
        (lambda: build("all_reduce", "ring", 4, segments=2), "is not cut into segments"),
        (lambda: build("all_reduce", "ring", 4, root=1), "all_reduce has no root"),
        (lambda: build("broadcast", "ring", 4, root=4), "root cannot be 4"),
        (lambda: build("all_reduce", "ring", 4, shape=(2, 2)), "ring has no shape"),
        (lambda: build("all_reduce", "ring", 4, levels=("ring",)), "ring has no levels"),
        (lambda: build("all_reduce", "hierarchical", 8, shape=(2, 3)), "needs the shape"),
        (
            lambda: build("all_reduce", "hierarchical", shape=(2, 3), levels=("ring",)),
            "one algorithm a level",
        ),
        (
            lambda: build("all_gather", "hierarchical", shape=(2, 3), segments=2),
            "not cut into segments",
        ),
        (lambda: choose("all_reduce", -1, flat(2, WIRE)), "size_bytes cannot be -1"),
        (lambda: choose("psum", 1, flat(2, WIRE)), "the collective cannot be 'psum'"),
        (lambda: choose("all_reduce", 1, flat(2, WIRE), order="some"), "order cannot be 'some'"),
        (
            lambda: choose("all_reduce", 1, flat(8, WIRE), algorithm="ring", order="pairs"),
            "does not add in adjacent pairs",
        ),
        (
            lambda: choose("all_reduce", 1, flat(8, WIRE), algorithm="hierarchical"),
            "there is no hierarchy",
        ),
        (
            lambda: choose("all_reduce", 1, flat(8, WIRE), algorithm="star"),
            "the name cannot be 'star'",
        ),
        (lambda: price("ring", "h100"), "price: the algorithm cannot be 'ring'"),
        (lambda: price(RING, "cray"), "'cray' is not described"),
        (lambda: price(RING, 8), "8 is not described"),
        (lambda: explain("all_reduce", 1, ["h100"]), "['h100'] is not described"),
        (lambda: verify("ring"), "verify: the algorithm cannot be 'ring'"),
        (lambda: order("ring"), "order: the algorithm cannot be 'ring'"),
        (lambda: text("ring"), "text: the algorithm cannot be 'ring'"),
        (lambda: picture(RING.name), "picture: the algorithm cannot be 'ring'"),
        (lambda: parse(RING), "algorithm: the text cannot be an object of type Algorithm"),
        (
            lambda: build("all_reduce", "hierarchical", shape=(2, 3), levels="ring"),
            "levels : ('ring',)",
        ),
        (lambda: build("all_reduce", "hierarchical", shape=8, n=4), "needs the shape"),
    ],
)
def test_bad_input_is_said(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert said in str(error.value)


# ---- the choice --------------------------------------------------------------------------------
def test_small_messages_take_few_rounds_and_large_ones_few_bytes() -> None:
    ring = flat(8, WIRE, "ring")
    assert choose("all_reduce", 64, flat(8, WIRE)).algorithm.name == "halving"
    assert choose("all_reduce", 2**26, ring).algorithm.name in ("ring", "engine")
    line = flat(8, WIRE, "line")
    assert choose("all_gather", 2**26, line).algorithm.name == "line"
    hosts = cluster("h100")
    assert "hierarchical" in choose("all_to_all", 2**24, hosts).algorithm.name
    assert choose("broadcast", 2**28, flat(8, WIRE)).algorithm.name.startswith("double_tree/")


def test_the_user_can_name_it_or_bring_a_table() -> None:
    one = flat(8, WIRE)
    assert choose("all_reduce", 64, one, algorithm="ring").algorithm == build(
        "all_reduce", "ring", 8
    )
    assert (
        choose("all_reduce", 2**26, one, algorithm="double_tree").algorithm.name == "double_tree/64"
    )
    assert choose("all_reduce", 64, one, algorithm="double_tree").algorithm.name == "double_tree"
    mine = build("all_reduce", "hierarchical", shape=(4, 2))
    assert choose("all_reduce", 64, one, algorithm=mine).algorithm is mine


@pytest.mark.parametrize(
    "name", ["ring", "double_tree/16", "hierarchical(4:halving x 2:ring)", "hierarchical(8:line)"]
)
def test_each_name_that_a_table_has_is_taken(name: str) -> None:
    assert choose("all_reduce", 64, flat(8, WIRE), algorithm=name).algorithm.name == name


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [64, 2**16, 2**20, 2**24])
@pytest.mark.parametrize("name", ["t3000", "galaxy", "dgx_h100"])
def test_the_choice_is_not_far_from_the_best_nesting(
    collective: Collective, size: int, name: str
) -> None:
    links = cluster(name) if name != "dgx_h100" else cluster(name).of(2)
    every = itertools.product(FLAT, repeat=len(links.shape))
    tables = (build(collective, "hierarchical", shape=links.shape, levels=a) for a in every)
    best = min(price(a, links).time_s(size) for a in tables)
    assert choose(collective, size, links).time_s <= 1.1 * best


def test_numbers_of_numpy_and_lists_are_numbers_and_levels() -> None:
    size, rate = np.int64(4), np.float32(1e9)
    made = Topology("x", [Level(size, Link("wire", 1e-6, rate))], rate)
    assert made == Topology("x", (Level(4, WIRE),), 1e9)
    assert choose("all_reduce", 64, made, np.arange(4)[None]).time_s > 0


def test_the_order_can_be_asked_for() -> None:
    for n in (6, 8):
        for size in (64, 2**26):
            for found in candidates("all_reduce", size, flat(n, WIRE), order="pairs"):
                assert in_pairs(found.algorithm)
    gathers = candidates("all_gather", 64, flat(8, WIRE), order="pairs")
    assert len(gathers) == len(candidates("all_gather", 64, flat(8, WIRE)))


def test_the_choice_is_the_least_of_what_is_priced() -> None:
    for collective in COLLECTIVES:
        for size in (1, 1e4, 1e8):
            found = candidates(collective, size, cluster("h100").of(2))
            assert [c.time_s for c in found] == sorted(c.time_s for c in found)
            for c in found:
                assert c.time_s == price(c.algorithm, cluster("h100").of(2)).time_s(size)
                assert c.algorithm.collective == collective


def test_groups_of_a_mesh_lie_on_levels() -> None:
    hosts = cluster("h100").of(2)
    mesh = dist.Mesh(("pp", "dp", "tp"), shape={"pp": 2, "dp": 2, "tp": 4})
    assert nesting(hosts, mesh.groups("tp")) == (4,)
    assert nesting(hosts, mesh.groups(("pp", "dp"))) == (2, 2)
    assert nesting(hosts, [[1, 0]]) == () and nesting(hosts, [[0, 1, 8]]) == ()
    assert nesting(hosts, [[0, 1], [0, 8, 1, 9]]) == ()


def test_explain_is_a_table() -> None:
    said = explain("all_reduce", 2**20, flat(4, WIRE), algorithm="ring")
    assert said == (
        "all_reduce of 1 MiB among 4 on all of 4\n"
        "  algorithm  rounds  latency µs   send µs    add µs  total µs\n"
        "  ring            6         6.0    1572.9       0.0    1578.9"
    )


# ---- text --------------------------------------------------------------------------------------
def test_text_is_read_back() -> None:
    for n in (1, 2, 3, 4, 5, 8):
        for collective in COLLECTIVES:
            for name in (*FLAT, "engine"):
                root = n - 1 if collective == "broadcast" else 0
                a = build(collective, name, n, root=root)
                assert parse(text(a)) == a
    nested = build("all_reduce", "hierarchical", shape=(2, 2, 3), levels=("tree", "ring", "line"))
    assert parse(text(nested)) == nested


def test_what_a_table_looks_like() -> None:
    assert text(build("all_reduce", "halving", 4)) == (
        'all_reduce "halving"  n=4 chunks=4\n'
        "  0: 0>1 +2-3  1>0 +0-1  2>3 +2-3  3>2 +0-1\n"
        "  1: 0>2 +1  1>3 +3  2>0 +0  3>1 +2\n"
        "  2: 0>2 =0  1>3 =2  2>0 =1  3>1 =3\n"
        "  3: 0>1 =0-1  1>0 =2-3  2>3 =0-1  3>2 =2-3"
    )
    assert text(build("broadcast", "tree", 5, root=2)) == (
        'broadcast "tree"  n=5 chunks=1 root=2\n  0: 2>1 =0\n  1: 2>4 =0\n  2: 2>3 =0  4>0 =0'
    )
    assert picture(build("broadcast", "line", 3, root=1)) == (
        "broadcast by line\n"
        "        rank 0  rank 1  rank 2\n"
        "start   ·       #       ·\n"
        "0       #       #       #"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "cannot read the first line"),
        ('sum "x"  n=2 chunks=1', "cannot read the first line"),
        ('all_reduce "x"  n=0 chunks=1', "cannot read the first line"),
        ('all_gather "x"  n=2 chunks=3', "3 chunks are not whole blocks"),
        ('all_reduce "x"  n=2 chunks=0', "0 chunks are not whole blocks"),
        ('broadcast "x"  n=2 chunks=1 root=2', "root=2 is not one of the ranks"),
        ('all_reduce "x"  n=2 chunks=1\n  1: 0>1 +0', "cannot read round 0"),
        ('all_reduce "x"  n=2 chunks=1\n  0: 0>1 0', "cannot read round 0"),
        ('all_reduce "x"  n=2 chunks=1\n  0: 0>1 +0', "rank 0 ends without rank 1 in chunk 0"),
        ('all_reduce "x"  n=2000 chunks=1', "n=2000 chunks=1 is more than a table holds"),
        ('all_reduce "x"  n=2 chunks=99999999', "more than a table holds"),
        ('all_reduce "x"  n=2 chunks=' + "9" * 5000, "cannot read the first line"),
        ('all_reduce "x"  n=2 chunks=1\n  0: 0>1 +0-999999999', "transfer : 0 > 1 add 0, 1"),
        ('all_reduce "x"  n=2 chunks=1\n  0: 0>1 +' + "9" * 5000, "cannot read round 0"),
    ],
)
def test_bad_text_is_said(source: str, said: str) -> None:
    with pytest.raises(GraphError) as error:
        parse(source)
    assert said in str(error.value)


def test_no_closed_form_is_made_up() -> None:
    assert formula("all_reduce", "halving", 6) is None
    assert formula("all_to_all", "tree", 8) is None
    assert formula("all_reduce", "ring", 1) == Formula(0, 0.0)
    assert set(FLAT) < set(NAMES)
