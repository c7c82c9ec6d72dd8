"""Reproducible programs: a value split only for storage counts as whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import tessera as ts
from tessera import dist, graph, optim
from tessera.core.layout import TensorType, parse_type, same_type
from tessera.core.options import ProgramOptions
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.lang.parallel.strategy import finest
from tessera.ops.redistribute import NAMES

MESH = dist.Mesh.parse("tp=2,dp=4")
ZERO = dist.strategy("zero_redundancy_optimizer", stage=3)


def kind(text: str) -> TensorType:
    return parse_type(text, MESH)


def test_what_zero_splits_rests_and_what_rules_split_does_not() -> None:
    t = ZERO.weight("w", kind("f32[12, 8]"))
    assert str(t) == "f32[12@dp, 8]" and t.rest_axes == ("dp",) and t.in_use is kind("f32[12, 8]")
    assert t is not kind("f32[12@dp, 8]") and same_type(t, kind("f32[12@dp, 8]"))
    assert t.with_dims(t.in_use.dims).rest_axes == () and pickle.loads(pickle.dumps(t)) is t
    over = dist.strategy("tensor_parallel", "dp", rules=[("up", -2)]) + ZERO
    assert over.weight("up", kind("f32[12, 8]")).rest_axes == ()


UNEVEN = [  # the rule's dim, the whole weight, its layout in use, its stored layout
    (0, "f32[64, 32]", "f32[64@tp, 32]", "f32[(2@tp·32@dp), 32]"),
    (1, "f32[2, 16]", "f32[2, 16@tp]", "f32[2, (2@tp·8@dp)]"),
    (1, "f32[2, 15]", "f32[2, 15@tp]", "f32[2@dp, 15@tp]"),
    (0, "f32[64]", "f32[64@tp]", "f32[(2@tp·32@dp)]"),
    (0, "f32[15]", "f32[15@tp]", "f32[15@(tp,dp)]"),
]


@pytest.mark.parametrize(("dim", "whole", "used", "rests"), UNEVEN, ids=[u[1] for u in UNEVEN])
def test_a_weight_is_used_as_the_rules_split_it_where_zero_does_not_divide(
    dim: int, whole: str, used: str, rests: str
) -> None:
    mesh = dist.Mesh.parse("dp=3,tp=2")
    rules = dist.strategy("tensor_parallel", rules=[("w", dim)])
    t = (rules + ZERO).weight("w", parse_type(whole, mesh))
    assert str(t) == rests and t.rest_axes == ("dp",)
    assert t.in_use is parse_type(used, mesh) is rules.weight("w", parse_type(whole, mesh))


@pytest.mark.parametrize("level", ["fast", "mesh_invariant"])
def test_it_costs_the_bytes_of_the_same_weight_in_a_dim_that_divides(level: Any) -> None:
    """A step of x @ up @ down over dp=3, tp=2: a value split over tp stays split at any stage."""
    mesh, sent = dist.Mesh.parse("dp=3,tp=2"), {}
    for d in (64, 66):
        for stage in (0, 3):
            plan = dist.strategy("tensor_parallel") + (
                ZERO if stage else dist.strategy("data_parallel")
            )
            shapes = {"up": f"f32[32, {d}]", "down": f"f32[{d}, 32]"}
            w = {n: plan.weight(n, parse_type(t, mesh)) for n, t in shapes.items()}

            def step(w: Any, x: Any, plan: Any = plan) -> Any:
                return ts.grad((x @ w["up"] @ w["down"]).mean(), w, layout=plan)

            with dist.deterministic(level=level):
                g = graph.trace(step, w, parse_type("f32[12@dp, 32]", mesh))
            sent[d, stage] = graph.simplify(g).wire_bytes
    # 66 columns instead of 64, and blocks of 11 instead of 32 / 3.
    assert sent[64, 0] <= sent[64, 3] <= sent[66, 3] <= 1.1 * sent[64, 0], sent


def test_the_finest_blocks_are_one_choice_however_it_rests() -> None:
    for whole in ("f32[8]", "f32[12, 8]", "f32[8, 8]", "f32[6, 10]"):
        t = kind(whole)
        assert finest(ZERO.weight("w", t)) is finest(t), whole


def test_what_rests_is_laid_out_on_a_mesh_that_was_made_anew() -> None:
    # Types are interned: the one with the old mesh serves both, the stored one is new.
    old, new = (dist.Mesh.parse("tp=2,dp=7") for _ in range(2))
    to = finest(parse_type("f32[14, 6]", old))
    rests = TensorType(to.dtype, to.dims, mesh=new, rest_axes=("dp",))
    b = Builder("again", ProgramOptions(determinism="mesh_invariant"))
    x = b.input(rests, "x")
    assert rests.mesh is new and to.mesh is old
    assert b.redistribute(x, to).type is to


USES: dict[str, Callable[[Any, Any], Any]] = {
    "x @ w": lambda w, x: x @ w["a"],
    "x @ w.T": lambda w, x: x @ w["a"].T,
    "scaled": lambda w, x: x @ (w["a"] * 0.3),
    "low rank": lambda w, x: x @ (w["a"] + w["b"] @ w["b"]),
    "normed": lambda w, x: x @ (w["a"] / ts.sqrt((w["a"] * w["a"]).sum(0))),
    "gated": lambda w, x: x @ (w["a"] * ts.tanh(w["b"])),
    "twice": lambda w, x: x @ w["a"] @ w["a"].T + (w["a"] @ w["a"]).sum(),
    "penalty": lambda w, x: x @ w["a"] + (w["a"] ** 2).sum() + ts.abs(w["b"]).mean(),
    "norm": lambda w, x: x @ w["a"] * optim.global_norm(w),
}


def computed(g: Graph) -> list[tuple[object, ...]]:
    """The compute ops of `g` in order, with their attributes and without layouts."""
    moved = {*NAMES, "input", "reinterpret", "full", "broadcast_to"}
    told = lambda n: {k: v for k, v in n.attrs.items() if not isinstance(v, TensorType)}  # noqa: E731
    return [(n.op, n.type.shape, str(told(n))) for n in g.nodes if n.op not in moved]


@pytest.mark.parametrize("use", USES)
def test_the_same_is_computed_in_the_same_order(use: str) -> None:
    found = []
    for plan in (dist.strategy("data_parallel"), ZERO):
        w = {name: plan.weight(name, kind("f32[8, 8]")) for name in "ab"}

        def step(w: Any, x: Any) -> Any:
            return ts.grad((USES[use](w, x) ** 2).mean(), w)

        with dist.deterministic():
            g = graph.trace(step, w, kind("f32[16@dp, 8]"))
        found.append(computed(g))
    assert sorted(found[0]) == sorted(found[1])
    assert all(str(n.type) == "f32[8@dp, 8]" and n.type.rest_axes for n in g.outputs)
