"""`overlap=True`: a collective runs beside independent steps, without more memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op
from tessera.core.layout import parse_type
from tessera.core.options import ScheduleOptions
from tessera.cost.memory import memory_plan
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import cut, join, run_blocks
from tessera.ir.graph.remat import is_free
from tessera.ir.schedule.schedule import Collective, Compute, Schedule
from tessera.ir.schedule.verify import verify_schedule
from tessera.passes.simplify import simplify
from tests.core.scheduled import scheduled
from tests.core.test_schedule import GRAPHS, run

PAYLOAD = 2 * 8 * 4 * 16 * 4  # bytes that a device of `experts` sends


def experts(buckets: int, trains: bool) -> Graph:
    mesh = dist.Mesh(("ep",), devices=4)
    shapes = {"router": "[16, 8]", "up": "[8@ep, 16, 32]", "down": "[8@ep, 32, 16]"}
    w = {name: parse_type(f"f32{shape}", mesh) for name, shape in shapes.items()}

    def layer(w: dict[str, ts.Tensor], x: ts.Tensor) -> Any:
        transport: Any = {"bucket_bytes": PAYLOAD // buckets} if buckets > 1 else "auto"
        y = op.moe(x, w, k=2, capacity=1.0, transport=transport)
        return (y, ts.grad((y * y).sum(), w)) if trains else y

    g = simplify(graph.trace(layer, w, parse_type("f32[8@ep, 16, 16]", mesh)))
    assert sum(n.op == "all_to_all" for n in g.nodes) == 2 * buckets + trains * buckets
    return g


def ring(devices: int, trains: bool) -> Graph:
    mesh = dist.Mesh(("cp",), devices=devices)
    t = parse_type("f32[2, 4, 64@cp, 8]", mesh)

    def layer(q: ts.Tensor, k: ts.Tensor, v: ts.Tensor) -> Any:
        y = nn.ring_attention(q, k, v, "cp")
        return (y, ts.grad((y * y).sum(), [q, k, v])) if trains else y

    return simplify(graph.trace(layer, t, t, t))


def at_rest() -> Graph:
    """ZeRO-3: the gradients gather the weights again."""
    plan = dist.strategy("zero_redundancy_optimizer", stage=3)
    mesh = dist.Mesh(("dp",), devices=4)
    types = {name: parse_type("f32[16, 16]", mesh) for name in "abcd"}
    w = {name: plan.weight(name, t) for name, t in types.items()}

    def step(w: dict[str, ts.Tensor], x: ts.Tensor) -> Any:
        for v in w.values():
            x = ts.tanh(x @ v)
        return ts.grad((x * x).mean(), w, layout=plan)

    return simplify(graph.trace(step, w, parse_type("f32[8@dp, 16]", mesh)))


PROGRAMS: dict[str, tuple[Callable[[], Graph], ScheduleOptions]] = {
    "ZeRO-3": (lambda: GRAPHS["zero 3"], ScheduleOptions()),
    "ZeRO-3, prefetch": (lambda: GRAPHS["zero 3"], ScheduleOptions(prefetch=1)),
    "ZeRO-3, gathered again": (at_rest, ScheduleOptions()),
    "ZeRO-3, gathered again, prefetch": (at_rest, ScheduleOptions(prefetch=1)),
    "gradients": (lambda: GRAPHS["step"], ScheduleOptions()),
    "bucketed gradients": (lambda: GRAPHS["step"], ScheduleOptions(bucket_bytes=300)),
}
for trains in (False, True):
    for n in (1, 2, 4):
        made = lambda n=n, trains=trains: experts(n, trains)  # noqa: E731
        PROGRAMS[f"experts, buckets={n}, trains={trains}"] = made, ScheduleOptions()
    for n in (2, 4, 8):
        made = lambda n=n, trains=trains: ring(n, trains)  # noqa: E731
        PROGRAMS[f"ring, cp={n}, trains={trains}"] = made, ScheduleOptions()


@cache
def numbered(name: str) -> Graph:
    """The program `name` with a separate scope for each node."""
    number = iter(range(1 << 20))

    def rule(was: Node, now: Node, emit: Any) -> Node:
        found: Node = emit(replace(now, scope=f"n{next(number)}"))
        return found

    return PROGRAMS[name][0]().rewrite(rule)


def schedules(name: str) -> tuple[Schedule, Schedule]:
    """Returns (the default schedule, the schedule with overlap)."""
    o = PROGRAMS[name][1]
    g = numbered(name)
    return scheduled(g, o), scheduled(g, replace(o, overlap=True))


def beside(s: Schedule) -> dict[str, list[int]]:
    """For each collective, the compute steps that are independent of it."""
    found = {}
    for i, st in enumerate(s.steps):
        if isinstance(st, Collective):
            free = [
                j
                for j, other in enumerate(s.steps)
                if isinstance(other, Compute) and i not in s.waits[j] and j not in s.waits[i]
            ]
            found.update((n.scope, free) for n in st.nodes)
    return found


def computed(s: Schedule, steps: Any) -> set[str]:
    """The scopes of the nodes that `steps` compute, without the nodes that each reader
    recomputes."""
    found = [s.steps[i] for i in steps]
    return {n.scope for st in found if isinstance(st, Compute) for n in st.nodes if not is_free(n)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_fewer_steps_may_run_beside_a_collective_than_by_default(name: str) -> None:
    plain, early = schedules(name)
    verify_schedule(early)
    before, now = beside(plain), beside(early)
    assert before.keys() == now.keys()
    for n in before:
        assert len(now[n]) >= len(before[n]), n
        assert computed(early, now[n]) >= computed(plain, before[n]), n


def free_of_streams(s: Schedule) -> Schedule:
    return replace(s, steps=tuple(replace(st, after=()) for st in s.steps))


@pytest.mark.parametrize("name", [n for n in PROGRAMS if "bucketed" not in n])
def test_a_step_waits_for_nothing_that_it_does_not_need(name: str) -> None:
    """Checked node by node: no collective waits for unrelated work, and no work for an unrelated
    collective."""
    s = free_of_streams(schedules(name)[1])
    needs: dict[str, set[str]] = {}
    for n in numbered(name).nodes:
        needs[n.scope] = {n.scope}.union(*(needs[a.scope] for a in n.args))
    sent = {st.nodes[0].scope for st in s.steps if isinstance(st, Collective)}
    for i, st in enumerate(s.steps):
        if isinstance(st, Collective):
            assert computed(s, s.waits[i]) <= needs[st.nodes[0].scope]
        else:
            waits = {s.steps[j].nodes[0].scope for j in s.waits[i]} & sent
            assert all(waits <= needs[n.scope] for n in st.nodes if not is_free(n))


@pytest.mark.parametrize("name", PROGRAMS)
def test_streams_hold_up_no_work(name: str) -> None:
    """A collective follows the previous one of its op and axes. The work before a sum's operand
    comes earlier in any case; all other collectives stay beside the same steps."""
    s = schedules(name)[1]
    bare = free_of_streams(s)
    sums = False
    for i, st in enumerate(s.steps):
        for j in st.after:
            earlier = s.steps[j]
            assert isinstance(st, Collective)
            if st.nodes[0].attrs.get("again") and isinstance(earlier, Compute):
                continue  # intended: weights must not all be gathered again at once
            assert isinstance(earlier, Collective)
            assert (st.op, st.axes) == (earlier.op, earlier.axes)
            sums = sums or "reduce" in st.op
            first, second = (
                [k for k in bare.waits[x] if isinstance(s.steps[k], Compute)] for x in (j, i)
            )
            assert max(first, default=-1) <= max(second, default=-1)
    assert sums or beside(s) == beside(bare)
    assert sums == (name in ("gradients", "bucketed gradients") or "ZeRO" in name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_planned_peak_is_that_of_the_default_and_of_one_block_ahead(name: str) -> None:
    plain, early = (memory_plan(s).peak for s in schedules(name))
    received = [n.type.local_bytes for n, _ in schedules(name)[1].collectives()]
    ahead = "ring" in name or "again" in name
    assert early <= plain + ahead * 2 * max(received)


@pytest.mark.parametrize("devices", [4, 8])
def test_a_ring_holds_two_blocks_of_keys_and_of_values(devices: int) -> None:
    s = schedules(f"ring, cp={devices}, trains=False")[1]
    sent = [i for i, st in enumerate(s.steps) if isinstance(st, Collective)]
    spans = [s.lifetimes[b] for i in sent for b in s.steps[i].writes]
    assert len(spans) == 2 * (devices - 1)
    assert max(sum(a <= i <= b for a, b in spans) for i in range(len(s.steps))) <= 4


def test_all_buckets_are_sent_before_the_first_expert_is_done() -> None:
    s = schedules("experts, buckets=4, trains=False")[1]
    ops = [{n.op for n in st.nodes} & {"all_to_all", "sigmoid"} for st in s.steps]
    sends, work = {"all_to_all"}, {"sigmoid"}
    assert [k for k in ops if k] == [sends] * 4 + [work, sends] * 4


@pytest.mark.parametrize("name", [n for n in PROGRAMS if "experts" in n or "ring" in n])
def test_results_are_unchanged(name: str) -> None:
    g, rng = numbered(name), np.random.default_rng(2)
    given = [rng.normal(size=n.type.shape).astype(np.float32) for n in g.inputs]
    blocks = [cut(n.type.on(g.mesh), x) for n, x in zip(g.inputs, given, strict=True)]
    want = run_blocks(g, blocks, g.mesh)
    found = run(schedules(name)[1], blocks)
    for n, a, b in zip(g.outputs, found, want, strict=True):
        t = n.type.on(g.mesh)
        np.testing.assert_array_equal(join(t, a), join(t, b))
