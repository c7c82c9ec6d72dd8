"""Hybrid parallelism: the same numbers for every placement and order.

A sample of all combinations, each compared with one device over two steps; unsupported ones are an
error before the run. By default a few run that cover every kind of choice, pipelines for one step;
`test_pipeline.py` trains with each schedule.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera import pipeline
from tessera.core.errors import TesseraError
from tests.cases import LONG
from tests.mesh.hybrids import (
    BATCH,
    CHOICES,
    PROGRAMS,
    STEPS,
    Hybrid,
    alone,
    few,
    kinds,
    sample,
    trained,
)  # fmt: skip

# Two parts of a tied weight's gradient come from two stages, each with a different layout.
TIED = Hybrid("experts6", pp=2, ep=3, zero=3, zero_axis="ep", schedule="ZBV", microbatches=2)
FEW = {TIED} | few(sample(40), TIED)
SAMPLE = [h for h in sample(40) if h in FEW or h in sample(28)]
HYBRIDS = [*SAMPLE, TIED]


def quietly(h: Hybrid, steps: int = 1) -> Any:
    with warnings.catch_warnings():  # few microbatches leave stages idle, without effect here
        warnings.simplefilter("ignore", pipeline.PipelineWarning)
        return trained(h, steps)


@pytest.mark.parametrize(
    "h",
    [pytest.param(h, id=h.id, marks=[LONG] * (h not in FEW)) for h in HYBRIDS],
)
def test_as_on_one_device(h: Hybrid, request: pytest.FixtureRequest) -> None:
    # A pipeline is recorded again for its second step, since its weights then lie on their stages.
    steps, run = quietly(h, STEPS if h.pp == 1 or request.config.getoption("--long") else 1)
    for (loss, *found), (whole_loss, *whole) in zip(steps, alone(h.program), strict=False):
        assert abs(loss - whole_loss) < 1e-4
        # First the gradients, then the values computed from them: moments are their squares.
        for parts, wholes, least, part in zip(found, whole, (1e-4, 0), (1e-4, 3e-4), strict=True):
            assert parts.keys() == wholes.keys()
            for name, w in wholes.items():
                largest = np.abs(w).max()
                assert largest > least, f"{name}: nothing is compared"
                np.testing.assert_allclose(parts[name], w, 0, part * largest, err_msg=name)
    if h.pp > 1:  # and each stage computes something
        stages = set(range(run.table.stages))
        for kind in "FB":
            assert {s for s, k in run.program.pipelined.regions if k == kind} == stages


def test_the_sample_has_everything() -> None:
    assert len(set(SAMPLE)) == 30
    assert len(FEW) < 7 and {*HYBRIDS} > FEW
    assert set().union(*map(kinds, FEW)) == set().union(*map(kinds, HYBRIDS))
    for name, many in CHOICES.items():
        assert {getattr(h, name) for h in SAMPLE} == set(many)
    programs = [(h, PROGRAMS[h.program]) for h in SAMPLE]
    uneven = {
        "rows": [h for h, _ in programs if BATCH % h.dp],
        "stages": [h for h, p in programs if (p.layers + 2) % max(h.stages, 1)],
        "heads": [h for h, p in programs if p.heads % h.tp],
        "words": [h for h, p in programs if p.vocab % h.tp],
        "hidden": [h for h, p in programs if p.hidden % h.tp],
        "experts": [h for h, p in programs if h.ep > 1 and p.vocab % h.ep],
        "shards": [h for h, p in programs if h.zero and p.d % getattr(h, h.zero_axis)],
    }
    assert all(uneven.values()), [k for k, found in uneven.items() if not found]
    # Split over one axis, replicated over another one that splits the batch too.
    both = [h for h in SAMPLE if h.zero and h.dp > 1 and h.zero_axis != "dp"]
    assert {h.zero for h in both} and any(h.pp > 1 for h in both)
    assert max(sum(getattr(h, a) > 1 for a in ("dp", "pp", "ep", "cp", "tp")) for h in SAMPLE) == 3


PIPE = Hybrid("even", pp=2, schedule="1F1B", microbatches=4)
REFUSED = {
    "moe: 6 rows of experts cannot be divided over ep of 4": Hybrid("experts6", ep=4),
    "all_to_all_attention: 3 heads of keys do not divide over 2 devices": Hybrid(
        "odd", cp=2, context="all_to_all"
    ),
    "all_to_all_attention: 2 heads of keys do not divide over 4 devices": Hybrid(
        "tied", cp=2, tp=2, context="all_to_all"
    ),
    "zigzag: a sequence of 16 does not divide into 6 chunks": Hybrid("even", cp=3, context="ring"),
    "pipeline: DualPipeV on 2 ranks needs 4 microbatches": replace(
        PIPE, schedule="DualPipeV", microbatches=3
    ),
    "compose: 4 functions for 8 stages": replace(PIPE, pp=4, schedule="ZBV"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_says_so(message: str) -> None:
    with pytest.raises(TesseraError) as caught:
        quietly(REFUSED[message])
    first, *rest = str(caught.value).splitlines()
    assert first == message and rest[-1].startswith("  fix")
