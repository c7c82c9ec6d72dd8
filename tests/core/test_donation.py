"""Donation: the results that reuse the memory of donated arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tessera as ts
from tessera.core.dtypes import f32
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.donation import aliases_in, donation_aliases
from tessera.ir.schedule.schedule import Compute, Schedule, Send, Step
from tessera.ir.schedule.text import parse
from tessera.ir.schedule.verify import verify_schedule

MESH = Mesh.parse("pp=2,dp=2")
FIRST, SECOND = MESH.slice(pp=0), MESH.slice(pp=1)
WHOLE = parse_type("f32[8]", MESH)


def send(on: Mesh, source: int, to: int) -> Step:
    return Send((source,), (to,), (WHOLE.on(on),))


def updated(on: Mesh) -> Graph:
    b = Builder("update")
    x = b.input(WHOLE.on(on), "x")
    return b.graph([b("add", x, x)])


def sent_and_updated(*more: Step, outputs: tuple[int, ...] = (2,)) -> Schedule:
    """A schedule that sends b0 of the whole mesh to stage 0 as b1, where b2 is its double."""
    steps = (send(FIRST, 0, 1), Compute((1,), (2,), updated(FIRST)), *more)
    types = (WHOLE, WHOLE.on(FIRST), WHOLE.on(FIRST), *[WHOLE.on(SECOND)] * (2 * bool(more)))
    return Schedule("f", MESH, types, (0,), outputs, steps, donated=(0,))


def test_what_was_sent_of_an_argument_is_taken_over_where_it_is_read_last() -> None:
    s = sent_and_updated()
    assert donation_aliases(s) == ({}, {0: 0})
    assert donation_aliases(replace(s, donated=())) == ({}, {})


def test_not_while_another_stage_still_needs_the_argument() -> None:
    later = (send(SECOND, 0, 3), Compute((3,), (4,), updated(SECOND), stage=1))
    s = sent_and_updated(*later, outputs=(2, 4))
    verify_schedule(s)
    # Blocks that are already on the device are not copied by a send.
    assert donation_aliases(s) == ({}, {}, {}, {0: 0})


def test_not_what_is_given_back() -> None:
    assert donation_aliases(sent_and_updated(outputs=(1, 2))) == ({}, {})


def same_gradient(values: int) -> Graph:
    """A backward whose gradients are its inputs."""
    b = Builder("backward")
    return b.graph([b.input(WHOLE.on(FIRST), f"g{i}") for i in range(values)])


@pytest.mark.parametrize("way", ["stop_gradient", "custom", "custom of two"])
def test_what_a_step_hands_on_is_its_argument_still(way: str) -> None:
    b = Builder("hand on")
    t = WHOLE.on(FIRST)
    x = b.input(t, "x")
    if way == "stop_gradient":
        end = b(way, x)
    elif way == "custom":
        end = b("custom", x, x, values=1, backward=same_gradient(1))
    else:
        one = b("full", dtype=f32, shape=(8,), value=1.0, layout=t)
        two = b("custom", one, x, one, x, values=2, backward=same_gradient(2))
        end = b("item", two, index=1)
    steps = (Compute((0,), (1,), b.graph([end])), Compute((0,), (2,), updated(FIRST)))
    for outputs, want in (((1, 2), {}), ((2,), {0: 0})):
        s = Schedule("f", FIRST, (t, t, t), (0,), outputs, steps, donated=(0,))
        assert donation_aliases(s)[1] == want


def test_each_result_takes_one_argument_of_its_type() -> None:
    b = Builder("f")
    x, y, z = (b.input(plain(f32, (n,)), name) for name, n in (("x", 8), ("y", 8), ("z", 4)))
    s = build_schedule(b.graph([b("add", x, y), b("neg", b("sum", z, dims=(0,)))]))
    assert donation_aliases(replace(s, donated=(0, 1, 2))) == ({0: 0},)
    assert donation_aliases(replace(s, donated=(1, 2))) == ({1: 0},)


def test_arguments_of_one_type_go_to_what_is_made_of_them() -> None:
    b = Builder("momentum")
    w, m, g, spare = (b.input(plain(f32, (8,)), name) for name in ("w", "m", "g", "spare"))
    m2 = b("add", b("mul", m, m), g)
    w2 = b("sub", w, b("mul", m2, m2))
    count = b("sum", g, dims=(0,))
    other = b("flip", spare, dim=0)
    for outputs, want in (
        ((count, w2, m2, other), {0: 1, 1: 2, 3: 3}),
        ((m2, other, w2), {0: 2, 1: 0, 3: 1}),
        ((m2, m2, w2), {0: 2, 1: 0, 3: 1}),  # also arguments that are returned twice
        ((other,), {0: 0}),
    ):
        assert aliases_in(b.graph(list(outputs)), (3, 1, 0)) == want
    assert aliases_in(b.graph([m2, w2]), ()) == {}


def test_the_text_says_what_is_given_up() -> None:
    s = sent_and_updated()
    again = parse(s.text)
    assert again.donated == (0,) and again.text == s.text and again.hash == s.hash
    assert s.hash != replace(s, donated=()).hash
    with pytest.raises(ts.GraphError, match="b1 is donated and no input"):
        verify_schedule(replace(s, donated=(1,)))
