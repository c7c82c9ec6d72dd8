"""The values that a pipeline stage's forward keeps for its backward: a minimum of bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.core.dtypes import f32
from tessera.core.layout import plain
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Node
from tessera.ir.graph.remat import choose_saved

MESH = dist.Mesh.parse("pp=2")
W = {k: np.full((8, 8), 0.1, np.float32) for k in "ab"}
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
PARTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    # The result of a matrix product, from which all else follows cheaply.
    "element by element": (lambda w, x: nn.gelu(x @ w["a"]) * 2.0 + x, ["f32[4, 8]"]),
    # Two products, but not the values that are computed from one and multiplied by the other.
    "a gate": (lambda w, x: nn.silu(x @ w["a"]) * (x @ w["b"]), ["f32[4, 8]", "f32[4, 8]"]),
    # Statistics are small, and values computed from them are recomputed.
    "a norm": (lambda w, x: nn.rms_norm(x @ w["a"]) * 3.0, ["f32[4, 1]", "f32[4, 8]"]),
    # A mask of one byte per element, so that no random bits are drawn again.
    "dropout": (lambda w, x: nn.dropout(ts.tanh(x @ w["a"]), 0.5), ["bool[4, 8]", "f32[4, 8]"]),
    # A reshaped weight is reshaped again.
    "a view": (lambda w, x: x @ w["a"].reshape(2, 4, 8).transpose(0, 1).reshape(8, 8), []),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_stage_hands_over_what_its_backward_does_not_compute(name: str) -> None:
    part, want = PARTS[name]
    model = pipeline.compose(
        2, [lambda w, x: (w, part(w, x)), lambda w, x: x @ w["b"]], mesh=MESH, microbatches=4
    )

    @ts.jit
    def step(weights: Any, x: Any) -> Any:
        loss = (model(weights, x) ** 2).mean()
        return loss, ts.grad(loss, weights)

    step.plan(W, X)
    found = model.program.pipelined.regions
    gives = set(found[0, "F"].gives)
    back = {a for kind in "IW" if (0, kind) in found for a in found[0, kind].takes}
    assert sorted(str(a.type) for a in gives & back) == want


CHEAP = {"exp": 1, "neg": 1, "add": 2, "mul": 2}
SIZES = [(4,), (4, 4)]


@st.composite
def forwards(draw: st.DrawFn) -> tuple[list[Node], list[Node]]:
    """Draws the nodes of a forward, and those that its backward reads."""
    b = Builder("forward")
    x = b.input(plain(f32, (4, 4)))
    made: list[Node] = []
    for _ in range(draw(st.integers(2, 7))):
        op = draw(st.sampled_from([*CHEAP, "cumsum", "sum"]))
        args = [draw(st.sampled_from([x, *made])) for _ in range(CHEAP.get(op, 1))]
        if op == "sum" and args[0].type.rank < 2:
            continue
        attrs: dict[str, Any] = {"cumsum": {"dim": 0}, "sum": {"dims": (0,)}}.get(op, {})
        made.append(b(op, *args, **attrs))
    own = [n for n in b.nodes if n.op != "input"]
    return own, draw(st.lists(st.sampled_from(own), min_size=1, unique=True))


def suffices(own: list[Node], wanted: list[Node], kept: set[Node]) -> bool:
    """Returns whether cheap ops can compute the values `wanted` from the values `choose_saved`."""
    there: dict[Node, bool] = {}
    for n in own:
        cheap = n.op not in ("cumsum", "sum") and all(there.get(a, True) for a in n.args)
        there[n] = n in kept or cheap
    return all(there[n] for n in wanted)


@settings(max_examples=60, deadline=None)
@given(forwards())
def test_nothing_smaller_would_do(found: tuple[list[Node], list[Node]]) -> None:
    own, wanted = found
    x = next(a for n in own for a in n.args if a.op == "input")
    cut, again = choose_saved(wanted, set(own), {x})
    assert set(wanted) <= cut | again and all(a in cut | again | {x} for n in again for a in n.args)
    assert suffices(own, wanted, cut)
    size = sum(n.type.local_bytes for n in cut)
    for count in range(len(own) + 1):
        for others in map(set, combinations(own, count)):
            smaller = sum(n.type.local_bytes for n in others) < size
            assert not (smaller and suffices(own, wanted, others))
