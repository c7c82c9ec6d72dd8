"""ZeRO-3's weights, gathered for the forward, freed, and gathered again for the gradient."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, schedule
from tessera.core.context import replaced
from tessera.core.options import ScheduleOptions
from tessera.cost.memory import memory_plan
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.schedule import Collective, Compute
from tessera.ir.schedule.text import parse
from tessera.ir.schedule.verify import verify_schedule
from tessera.lang.jit.trace import trace
from tessera.passes.simplify import simplify
from tests.core.numpy_engine import Oracle
from tests.core.option_rows import pipe_arguments, piped

MESH = dist.Mesh(("dp",), devices=4)
ZERO = dist.strategy("zero_redundancy_optimizer", stage=3)
D, LAYERS = 64, 4
A_LAYER = 12 * D * D  # elements of a layer's matrices


KEPT, FREED = ScheduleOptions(reshard_after_forward=False), ScheduleOptions()


def gpt_step(o: ScheduleOptions, level: str = "fast", **how: Any) -> Graph:
    """The graph of a GPT's gradients with ZeRO-3."""
    config = nn.GPTConfig(vocab=64, seq=16, d=D, layers=LAYERS, heads=4, **how)
    model = dist.place(nn.GPT(config), ZERO, MESH)
    ids = dist.place(np.zeros((4, 16), np.int32), ZERO, MESH, kind="batch")

    def step(model: Any, ids: ts.Tensor) -> Any:
        return ts.grad(model.loss(ids, ids), model.parameters(), layout=ZERO)

    with replaced(schedule=o, determinism=level):
        return simplify(trace(step, model, ids))


def gathered(g: Graph) -> Counter[bool]:
    """Counts the gathers of the layers' matrices by whether they are repeated."""
    found: Counter[bool] = Counter()
    for n, times in g.collectives():
        if n.op == "all_gather" and n.type.rank > 1 and n.scope.startswith("blocks"):
            found["again" in n.attrs] += times
    return found


WRITTEN = {"written out": {"loop": False}, "in a loop": {"loop": True},
           "apart": {"stacked": False}}  # fmt: skip


@pytest.mark.parametrize("level", ["fast", "mesh_invariant"])
@pytest.mark.parametrize("how", WRITTEN)
def test_the_weights_of_all_layers_are_not_there_at_once(how: str, level: str) -> None:
    kept, freed = (gpt_step(o, level, **WRITTEN[how]) for o in (KEPT, FREED))
    assert gathered(kept) == {False: 4 * LAYERS}
    assert gathered(freed) == {False: 4 * LAYERS, True: 4 * LAYERS}
    if level == "fast":  # otherwise whole gradients exist at the peak
        saved = memory_plan(kept).peak - memory_plan(freed).peak
        assert saved > 0.4 * LAYERS * A_LAYER * 4  # bytes; one layer's are there in any case


@pytest.mark.parametrize("remat", [True, "products"])
def test_what_is_computed_again_gathers_its_weights_once(remat: Any) -> None:
    for o in (KEPT, FREED):
        assert gathered(gpt_step(o, remat=remat)) == {False: 8 * LAYERS}


@pytest.mark.parametrize("o", [FREED, ScheduleOptions(prefetch=1, overlap=True)])
def test_each_waits_for_work_before_the_one_before_it(o: ScheduleOptions) -> None:
    s = build_schedule(gpt_step(o, loop=False))
    verify_schedule(s)
    assert parse(s.text).text == s.text
    again = [
        i for i, st in enumerate(s.steps)
        if isinstance(st, Collective) and "again" in st.nodes[0].attrs
    ]  # fmt: skip
    assert len(again) == 4 * LAYERS
    for last, i in pairwise(again):
        waits = [j for j in s.steps[i].after if isinstance(s.steps[j], Compute)]
        assert waits and max(waits) < last


def test_a_weight_that_a_user_gathers_is_gathered_once() -> None:
    def step(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
        whole = dist.redistribute(w, "[8, 8]")
        return ts.grad(ts.tanh(ts.tanh(x @ whole) @ whole).sum(), w)

    w = ZERO.weight("w", ts.zeros((8, 8)).type.on(MESH))
    g = simplify(trace(step, w, ts.zeros((4, 8)).type.on(MESH)))
    assert [n.op for n, _ in g.collectives()].count("all_gather") == 1


def test_in_a_pipeline_the_choice_has_no_effect(oracle: Oracle) -> None:
    with pytest.warns(ts.OptionWarning, match="microbatches of a pipeline share the weights"):
        schedule(reshard_after_forward=True)(piped()).plan(*pipe_arguments())
