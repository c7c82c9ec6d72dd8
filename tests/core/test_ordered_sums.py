"""`deterministic=True` of one sum: its order in all passes, down to the schedule."""

from __future__ import annotations

from typing import Any

import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core.context import replaced
from tessera.core.layout import parse_type
from tessera.core.options import ScheduleOptions
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.graph.text import parse, to_text
from tessera.ir.schedule.build import build_schedule
from tessera.lang.program.schedule import options
from tessera.passes.plan import plan
from tessera.passes.simplify import simplify
from tests.core.moe_reference import X as TOKENS
from tests.core.moe_reference import drawn

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
X = parse_type("f32[8@dp, 64]", MESH)
SUMS = ("all_reduce", "reduce_scatter")


def orders(g: Graph) -> list[tuple[str, Any]]:
    return [(n.op, n.attrs.get("order")) for n, _ in g.collectives() if n.op in SUMS]


def traced(run: Any, *args: Any) -> list[tuple[str, Any]]:
    return orders(graph.trace(run, *args))


def test_a_sum_of_the_global_view_has_an_order_and_another_text() -> None:
    def run(x: ts.Tensor, on: bool) -> ts.Tensor:
        return dist.all_reduce(ts.sum(x, 0), deterministic=on)

    plain, ordered = (graph.trace(lambda x, on=on: run(x, on), X) for on in (False, True))
    assert orders(plain) == [("all_reduce", None)]
    assert orders(ordered) == [("all_reduce", "binary")]
    assert 'order="binary"' in to_text(ordered)
    assert to_text(parse(to_text(ordered))) == to_text(ordered)
    assert plan(plain).hash != plan(ordered).hash


def test_it_takes_the_order_that_is_in_force_and_adds_nothing_where_the_level_has_one() -> None:
    def run(x: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce(ts.sum(x, 0), deterministic=True)

    with dist.deterministic("ring", level="run_to_run"):
        assert traced(run, X) == [("all_reduce", "ring")]
    with dist.deterministic("ring", level="mesh_invariant"):
        assert traced(run, X) == [("all_reduce", None)]


def test_it_is_of_this_sum_alone() -> None:
    def run(x: ts.Tensor) -> Any:
        part = ts.sum(x, 0)
        first = dist.all_reduce(part)
        return first, dist.all_reduce(part, deterministic=True), dist.all_reduce(part)

    assert traced(run, X) == [("all_reduce", None), ("all_reduce", "binary")]  # the third: again

    def turned(x: ts.Tensor) -> Any:
        part = ts.sum(x, 0)
        ordered = dist.all_reduce(part, deterministic=True)
        return ordered, dist.all_reduce(part)

    assert traced(turned, X) == [("all_reduce", "binary"), ("all_reduce", None)]


def test_a_maximum_and_a_gather_have_none() -> None:
    def run(x: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce(ts.max(x, 0), deterministic=True)

    assert traced(run, X) == [("all_reduce", None)]


@pytest.mark.parametrize("level", ["fast", "mesh_invariant"])
def test_a_sum_is_not_sent_narrow(level: str) -> None:
    narrow = parse_type("bf16[8@dp, 64]", MESH)

    def run(x: ts.Tensor) -> ts.Tensor:
        w = ts.ones((8, 64), dtype=ts.bf16)
        return dist.all_reduce(ts.einsum("bi,bo->io", x, w).to(ts.f32), deterministic=True)

    with dist.deterministic(level=level):
        found = [n.type.dtype for n, _ in graph.trace(run, narrow).collectives()]
    assert found == [ts.f32]


def test_in_a_local_body_and_in_one_that_tells_its_ranks_apart() -> None:
    @ts.distribute(mesh_axes=("dp",))
    def alike(x: ts.Tensor) -> Any:
        part = dist.reduce_scatter(x, "dp", dim=1, op="mean", deterministic=True)
        return dist.all_reduce(x, "dp", deterministic=True), part, dist.all_reduce(part, "dp")

    @ts.distribute(mesh_axes=("dp",))
    def apart(x: ts.Tensor) -> ts.Tensor:
        y = x * 2.0 if ts.mesh.current().rank == 1 else x
        return dist.all_reduce(y, "dp", deterministic=True)

    with MESH:
        found = traced(alike, X)
        assert sorted(found, key=str) == [
            ("all_reduce", "binary"), ("all_reduce", None), ("reduce_scatter", "binary")
        ]  # fmt: skip
        assert traced(apart, X) == [("all_reduce", "binary")]


def test_ranks_that_differ_in_it_are_an_error() -> None:
    @ts.distribute(mesh_axes=("dp",))
    def apart(x: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce(x, "dp", deterministic=bool(ts.mesh.current().rank == 1))

    with MESH, pytest.raises(ts.UsageError, match="all_reduce over dp sum in a fixed order f32"):
        graph.trace(apart, X)


def test_a_sum_that_is_cut_keeps_its_order_as_it_scatters() -> None:
    b = Builder(ordered=True)
    x = b.input(parse_type("f32[8, 4] +tp", MESH))
    whole = b.redistribute(x, parse_type("f32[8, 4]", MESH), "first")
    g = b.graph([b.redistribute(whole, parse_type("f32[8@tp, 4]", MESH), "then")])
    assert orders(g) == [("all_reduce", "binary")]
    assert orders(simplify(g)) == [("reduce_scatter", "binary")]


def test_sums_of_other_orders_share_no_bucket() -> None:
    def run(x: ts.Tensor) -> Any:
        parts = [ts.sum(x * float(i), 0) for i in range(1, 5)]
        return [dist.all_reduce(p, deterministic=i % 2 > 0) for i, p in enumerate(parts)]

    with replaced(schedule=ScheduleOptions(bucket_bytes=1 << 20)):
        g = simplify(graph.trace(run, X))
    steps = [s for s in build_schedule(g).steps if s.kind == "collective"]
    assert [[n.attrs.get("order") for n in s.nodes] for s in steps] == [[None] * 2, ["binary"] * 2]


def test_no_algorithm_takes_its_place() -> None:
    def both(x: ts.Tensor) -> Any:
        y = ts.sum(x, 0)
        return dist.all_reduce(y), dist.all_reduce(y * 2.0, deterministic=True)

    with replaced(schedule=options(algorithm="ring")):
        s = plan(graph.trace(both, X))
    found = [(n.attrs.get("order"), n.attrs.get("algorithm")) for n, _ in s.collectives()]
    assert sorted(found, key=str) == [("binary", None), (None, "ring")]


def test_a_layer_of_experts_orders_the_sums_of_its_forward_pass() -> None:
    mesh = dist.Mesh.parse("dp=2,tp=2")
    w = drawn()
    laid = {"up": "[8, 16, 24@tp]", "gate": "[8, 16, 24@tp]", "down": "[8, 24@tp, 16]"}
    given = {k: ts.tensor(w[k], mesh=mesh, layout=v) for k, v in laid.items()}
    given["router"] = ts.tensor(w["router"], mesh=mesh)

    def run(x: ts.Tensor, on: bool) -> Any:
        y, routing = op.moe(x, given, deterministic=on, stats=True)
        return y, routing.load, dist.all_reduce(ts.sum(y, 0))

    x = ts.tensor(TOKENS, mesh=mesh, layout=f"[{len(TOKENS)}@dp, 12, 16]")
    plain, ordered = (traced(lambda x, on=on: run(x, on), x) for on in (False, True))
    assert len(ordered) > 2 and [o for _, o in plain] == [None] * len(plain)
    assert [o for _, o in ordered] == ["binary"] * (len(ordered) - 1) + [None]


def test_the_choice_is_a_bool() -> None:
    for call in (
        lambda: dist.all_reduce(ts.ones(4), deterministic="yes"),  # type: ignore[arg-type]
        lambda: dist.reduce_scatter(ts.ones(4), "dp", deterministic=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(ts.UsageError, match="deterministic"):
            call()
