"""Collective algorithms in a schedule: their names and their costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tessera as ts
from tessera import dist, graph, schedule
from tessera.core.layout import TensorType, parse_type
from tessera.core.options import ScheduleOptions
from tessera.core.topology import Link, cluster, flat
from tessera.cost.collectives import choose, formula
from tessera.cost.schedule_collectives import collective_costs
from tessera.ir.schedule.algorithms.build import FLAT, build, named
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.schedule import Schedule
from tessera.ir.schedule.text import parse
from tessera.ir.schedule.verify import verify_schedule
from tessera.lang.program.schedule import options
from tessera.passes.algorithms import algorithms
from tessera.passes.simplify import simplify
from tests.core.scheduled import scheduled

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
X = parse_type("f32[8@dp, 64]", MESH)
W = parse_type("f32[64@tp, 12]", MESH)


def body(x: ts.Tensor, w: ts.Tensor) -> Any:
    """An all_reduce of a product, gathers, a maximum, and a loop with an all_reduce in its body."""
    whole = dist.redistribute(x, "[8, 64]")
    rows = ts.scan(lambda h, r: (h + ts.tanh(r @ w), ()), ts.zeros((12,)), whole)[0]
    return ts.tanh(x @ w), x.max(0), rows


GRAPH = simplify(graph.trace(body, X, W))


def made(**how: Any) -> Schedule:
    o = options(**how)
    s = algorithms(scheduled(GRAPH, o))
    verify_schedule(s)
    return s


def chosen(s: Schedule) -> list[tuple[str, str]]:
    return [(r.op, r.algorithm) for r in collective_costs(s)]


def test_what_is_chosen_stands_in_the_text_and_is_read_back() -> None:
    plain = build_schedule(GRAPH)
    assert {name for _, name in chosen(plain)} == {"engine"} and "algorithm=" not in plain.text
    assert made(algorithm="engine").text.replace("  options algorithm=engine", "") == plain.text
    s = made(algorithm={"all_reduce": "double_tree/4", "all_gather": "line"})
    assert s.text.startswith(
        f"schedule {s.name}  v1  mesh dp=2 tp=4"
        "  options algorithm=all_reduce:double_tree/4,all_gather:line"
    )
    rows = chosen(s)
    assert ("all_gather", "line") in rows and ("all_reduce", "double_tree/4") in rows
    assert ("all_reduce", "engine") in rows  # the maximum
    inside = [r for r in collective_costs(s) if r.times > 1]
    assert [(r.op, r.times, r.algorithm) for r in inside] == [("all_reduce", 8, "double_tree/4")]
    again = parse(s.text)
    assert again.text == s.text and again.hash == s.hash and chosen(again) == rows
    verify_schedule(again)


def test_a_step_that_names_no_table_is_not_valid() -> None:
    text = made(algorithm="ring").text
    for wrong in ("square", "ring/4", "hierarchical(3:ring x 4:ring)"):
        with pytest.raises(ts.GraphError, match="no such table"):
            verify_schedule(parse(text.replace('"ring"', f'"{wrong}"')))


@pytest.mark.parametrize("name", FLAT)
def test_rounds_and_bytes_are_the_formulas(name: str) -> None:
    s = made(algorithm=name, topology=flat(8, Link("wire", 2e-6, 1e9), "all"))
    checked = 0
    for row in collective_costs(s, cluster("virtual")):
        n = 1
        for a in row.axes:
            n *= MESH.sizes[a]
        want = formula(row.op, row.algorithm, n)  # type: ignore[arg-type]
        if row.algorithm == "engine" or want is None or "tree" in row.algorithm:
            continue
        assert row.rounds == want.rounds
        if name != "line" and (row.op, name) != ("all_to_all", "ring"):
            assert row.sent_bytes == round(want.share * row.size_bytes)
        checked += 1
    assert checked > 0 or "tree" in name
    assert all(r.time_s is not None for r in collective_costs(s, cluster("virtual")))


def big(mb: float) -> TensorType:
    return parse_type(f"f32[{int(mb * 2**18)}] +dp", dist.Mesh.parse("dp=16"))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "i32"])
@pytest.mark.parametrize("fold", [ts.sum, ts.max, ts.min])
def test_what_is_sent_is_what_the_graph_receives(dtype: str, fold: Any) -> None:
    x = parse_type(f"{dtype}[8@dp, 256]", dist.Mesh(("dp",), devices=8))
    s = graph.trace(lambda x: fold(x, 0), x).schedule
    (row,) = collective_costs(s)
    assert row.sent_bytes == sum(n.wire_bytes * k for n, k in s.collectives()) > 0


def test_cheapest_is_what_cost_chooses_for_each_size() -> None:
    hosts = cluster("pcie").of(2, 8)
    found = set()
    for mb in (1 / 256, 1, 64):
        g = simplify(graph.trace(lambda x: ts.tanh(x), big(mb)))
        o = options(algorithm="cheapest", topology=hosts)
        (row,) = collective_costs(algorithms(scheduled(g, o)), hosts)
        best = choose("all_reduce", row.size_bytes, hosts)
        assert row.algorithm == best.algorithm.name and row.time_s == best.time_s
        assert row.rounds == best.cost.rounds
        found.add(row.algorithm)
    assert len(found) > 1
    one = ScheduleOptions(algorithm=(("", "cheapest"),), topology=cluster("virtual").of(2))
    pair = parse_type("f32[64] +dp", dist.Mesh.parse("dp=2"))
    g = simplify(graph.trace(lambda x: ts.tanh(x), pair))
    (row,) = collective_costs(algorithms(scheduled(g, one)))
    assert row.algorithm == "engine"  # on two devices no algorithm is cheaper


def test_the_mesh_of_the_operands_has_the_links() -> None:
    """Meshes of the same devices with different links do not share types, plans or prices."""
    plain = dist.Mesh(("dp", "tp"), shape=(4, 8))
    step: Any = schedule(algorithm="cheapest")
    found = {}
    for name in ("dgx_h100", "dgx_b200"):
        mesh = ts.mesh.preset(name, axes=("dp", "tp"), nodes=4)
        x = dist.tensor((1 << 20,), mesh=mesh, layout="[1048576] +tp")
        both = dist.inspect(step(lambda x: ts.tanh(x)).plan(x))
        assert both.topology == mesh.links and f"priced on {name}" in str(both)
        (row,) = both.rows
        best = choose("all_reduce", row.size_bytes, mesh.links, mesh.groups(("tp",)))
        assert row.time_s == best.time_s and mesh.links is not None
        found[name] = row.time_s
    assert found["dgx_b200"] < found["dgx_h100"]
    bare = dist.tensor((64,), mesh=plain, layout="[64] +dp")
    with pytest.raises(ts.UsageError, match="what is cheapest depends on the links"):
        step(lambda x: ts.tanh(x)).plan(bare)
    assert dist.inspect(ts.jit(lambda x: ts.tanh(x)).plan(bare)).total.time_s is None
    wired = dist.tensor((64,), mesh=mesh, layout="[64] +dp")
    with pytest.raises(ts.MeshError, match=r"no links\n.*dgx_b200, 32 devices"):
        ts.jit(lambda x, y: x + y).plan(bare, wired)


def test_the_dearest_comes_first_and_all_add_up() -> None:
    mesh = ts.mesh.preset("dgx_h100", axes=("dp", "tp"), nodes=4)
    small, large = "[64] +dp", "[1048576] +tp"
    f = ts.jit(lambda x, y, w: (ts.tanh(x), ts.tanh(y), ts.tanh(w)))
    types = ((64, small), (1 << 20, large), (1 << 22, "[4194304] +dp"))
    plan = f.plan(*(dist.tensor((n,), mesh=mesh, layout=text) for n, text in types))
    found = dist.inspect(plan)
    times = [r.total_s for r in found.rows]
    assert times == sorted(times, reverse=True) and str(found) == str(dist.inspect(f))
    assert [r.step for r in dist.inspect(plan, topology="h100").rows] != [0, 1, 2]
    assert list(found.by_axis) == ["dp", "tp"] and found.by_axis["dp"].count == 2
    assert found.total.time_s == sum(times) == sum(t.time_s for t in found.by_axis.values())
    assert found.total.sent_bytes == sum(r.sent_bytes for r in found.rows)
    last = str(found).splitlines()[-3:]
    assert [line.split()[0] for line in last] == ["total", "over", "over"]
    assert f"{found.total.time_s * 1e6:.1f}" in last[0]
    unpriced = str(dist.inspect(plan_on(dist.Mesh(("dp", "tp"), shape=(4, 8))))).splitlines()
    assert [line.split()[0] for line in unpriced[2:]] == ["s0", "s2", "total", "over", "over"]


def plan_on(mesh: Any) -> Any:
    f = ts.jit(lambda x, y: (ts.tanh(x), ts.tanh(y)))
    return f.plan(*(dist.tensor((64,), mesh=mesh, layout=f"[64] +{a}") for a in ("dp", "tp")))


def test_a_loop_counts_each_of_its_runs() -> None:
    mesh = ts.mesh.preset("dgx_h100", axes=("dp", "tp"), nodes=4)
    w = dist.tensor((8, 8), mesh=mesh, layout="[8@tp, 8]")
    f = ts.jit(
        lambda w: ts.scan(lambda c, _: (ts.tanh(c @ w), ()), ts.ones((8, 8)), ts.arange(5))[0]
    )
    found = dist.inspect(f.plan(w))
    (row,) = [r for r in found.rows if r.times == 5]
    assert row.time_s is not None and row.total_s == 5 * row.time_s
    assert found.total.count == sum(r.times for r in found.rows)


def test_a_bucket_is_chosen_for_what_goes_together() -> None:
    types = [parse_type("f32[2048] +dp", dist.Mesh.parse("dp=16")) for _ in range(64)]
    g = simplify(graph.trace(lambda *xs: list(xs), *types))
    hosts = cluster("h100").of(2)
    apart = options(algorithm="cheapest", topology=hosts)
    bucket = replace(apart, bucket_bytes=1 << 30)
    alone = collective_costs(algorithms(scheduled(g, apart)))
    (joined,) = collective_costs(algorithms(scheduled(g, bucket)))
    assert len(alone) == 64 and joined.count == 64
    assert joined.size_bytes == 64 * alone[0].size_bytes
    assert joined.algorithm == choose("all_reduce", joined.size_bytes, hosts).algorithm.name


def test_hierarchical_follows_the_axes_or_the_links() -> None:
    both = parse_type("f32[64] +dp +tp", MESH)
    g = simplify(graph.trace(lambda x: ts.tanh(x), both))
    for topology, want in [
        (None, "hierarchical(2:ring x 4:ring)"),
        (cluster("h100").of(4, 2), "hierarchical(4:ring x 2:ring)"),
    ]:
        o = options(algorithm="hierarchical", topology=topology)
        (row,) = collective_costs(algorithms(scheduled(g, o)))
        assert row.algorithm == want
    one = options(algorithm="hierarchical")
    single = simplify(graph.trace(lambda x: ts.tanh(x), parse_type("f32[64] +tp", MESH)))
    assert chosen(algorithms(scheduled(single, one))) == [("all_reduce", "engine")]


def test_statements_set_and_take_back() -> None:
    try:
        schedule.algorithm("halving", "all_reduce")
        schedule.algorithm("ring", "all_gather")
        assert schedule.current().algorithm == (("all_reduce", "halving"), ("all_gather", "ring"))
        schedule.algorithm("cheapest", topology="h100")
        assert schedule.current().text() == "algorithm=cheapest topology=h100(32)"
        schedule.algorithm(None)
        assert schedule.current() == ScheduleOptions()
    finally:
        schedule.reset()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: schedule.algorithm("square"), "the name cannot be 'square'"),
        (lambda: schedule.algorithm("ring", "gossip"), "the collective cannot be 'gossip'"),
        (lambda: schedule.algorithm("ring", topology="moon"), "'moon' is not described"),
        (lambda: schedule.algorithm(3), "the algorithm cannot be 3"),  # type: ignore[arg-type]
        (lambda: schedule.algorithm("ring/4"), "not cut into segments"),
        (lambda: schedule.algorithm("hierarchical(x)"), "is not an algorithm"),
        (lambda: schedule(algorithm="ring", topology=4), "topology: 4 is not described"),
        (lambda: schedule(algorithm=["ring"]), "the algorithm cannot be"),
    ],
)
def test_what_is_no_choice(call: Any, text: str) -> None:
    before = schedule.current()
    with pytest.raises(ts.UsageError) as caught:
        call()
    assert text in str(caught.value)
    assert schedule.current() == before


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_names_are_read_back(kind: str) -> None:
    tables = [build(kind, name, 6) for name in FLAT]
    tables += [build(kind, "hierarchical", shape=(2, 3), levels=("tree", "line"))]
    if kind == "all_reduce":
        tables += [
            build(kind, "tree", 6, segments=5),
            build(kind, "hierarchical", shape=(3, 2), levels=("double_tree", "ring"), segments=4),
        ]
    for a in tables:
        assert named(kind, a.name, 6) == a


def test_folded_meshes_and_promised_bits_leave_it_to_the_engine() -> None:
    with dist.deterministic():
        with (
            schedule_of("ring"),
            pytest.raises(ts.UsageError, match="the algorithm ring adds up in an order of its own"),
        ):
            graph.trace(body, X, W).schedule  # noqa: B018  # the property checks
        with schedule_of("cheapest"):
            s = graph.trace(body, X, W).schedule
        assert {name for _, name in chosen(s)} == {"engine"}
        with schedule_of({"all_gather": "ring"}):  # an all_gather has no sum to order
            s = graph.trace(body, X, W).schedule
        assert {("all_gather", "ring"), ("all_reduce", "engine")} <= {*chosen(s)}
    mesh = MESH.fold(onto={"tp": 2})
    g = simplify(graph.trace(lambda x: ts.tanh(x), parse_type("f32[64] +tp", mesh)))
    o = options(algorithm="ring")
    assert chosen(algorithms(scheduled(g, o))) == [("all_reduce", "engine")]


def schedule_of(name: str | dict[str, str]) -> Any:
    from tessera.core.context import replaced

    return replaced(schedule=options(algorithm=name, topology="h100"))
