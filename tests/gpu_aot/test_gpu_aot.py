"""Programs compiled for GPUs on a machine without one: the compiled text is what the schedule says.

`make check-gpu-aot` runs these tests, with the two wheels that they need.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tessera.runtime.ahead_of_time import CHIPS, compiled, described, why_not
from tests.gpu_aot.programs import (
    CASES,
    Made,
    ahead,
    by_kind,
    gathers_in_text,
    gathers_planned,
    in_text,
    made,
    planned,
    recorded,
)

WHY = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY), reason=f"{WHY}; make check-gpu-aot brings it"),
    pytest.mark.filterwarnings("ignore:1F1B"),
]
BOUND = 0.1  # of the peak: the plan against the compiler
FEW = "GPT, ZeRO-3, prefetch"
# Collectives that may overlap with work and do not, by case. In the backward pass of sequence
# parallelism XLA keeps the gradients of weights, which could run at any time, for the last ones.
ALONE = {"GPT, tp, sequence parallel": 5}


@pytest.fixture(params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(name: str, chip: str) -> Made:
    return made(name, chip)


def test_the_collectives_are_those_of_the_schedule(name: str, case: Made) -> None:
    for part, text in case.parts:
        want, found = planned(part.schedule), in_text(text)
        assert by_kind(found) == by_kind(want), part.name
        if CASES[name].is_merged:
            assert found.total() <= want.total(), part.name
        else:
            assert found == want, part.name
    some = sum(planned(part.schedule).total() for part, _ in case.parts)
    assert (some > 0) == (CASES[name].devices > 1)


def test_what_may_overlap_overlaps(name: str, case: Made) -> None:
    if CASES[name].is_merged:
        return
    ((part, text),) = case.parts
    may, does = planned(part.schedule, overlapping=True), in_text(text, overlapping=True)
    assert may.total() > 10
    assert (may - does).total() == ALONE.get(name, 0)


def test_merged_sums_overlap_too(chip: str) -> None:
    ((part, text),) = made("GPT, dp", chip).parts
    assert 1 < len(text.collectives) < planned(part.schedule).total()
    assert all(x.overlaps for x in text.collectives)


def test_a_weight_is_gathered_at_most_one_block_ahead_for_the_gradient(chip: str) -> None:
    ((part, text),) = made(FEW, chip).parts
    steps = gathers_planned(part.schedule)
    again = sum(a for _, _, a in steps)
    assert again > 10
    assert max(ahead([(i, j) for i, j, _ in steps])) == 1
    found = ahead(gathers_in_text(text))
    assert max(found[-again:]) == 1
    assert max(found[:-again]) == 2  # forward XLA starts some a block earlier


def test_a_plan_is_what_the_compiler_says(case: Made) -> None:
    for mine, theirs in case.peaks:
        assert abs(mine / theirs - 1) <= BOUND


def test_recomputed_layers_are_computed_again(chip: str) -> None:
    ((kept, text),), ((again, more),) = (
        made(name, chip).parts for name in ("GPT, one device", "GPT, recompute")
    )
    assert again.bytes["temporary"] < 0.4 * kept.bytes["temporary"]
    assert len(more.products) > 1.2 * len(text.products)


def test_arguments_are_exact(name: str, case: Made) -> None:
    if case.schedule.is_staged:
        return
    ((part, _),) = case.parts
    given = [part.schedule.buffers[b] for b in part.schedule.inputs]
    assert part.bytes["arguments"] == sum(t.local_bytes for t in given)


def test_products_have_factors_of_bf16(case: Made) -> None:
    given = Counter(p.given for _, text in case.parts for p in text.products)
    assert given.keys() == {("bf16", "bf16")} and given.total() > 40


def test_nothing_goes_to_the_host(case: Made) -> None:
    assert not [text.host for _, text in case.parts if text.host]


def test_donated_memory_is_reused(case: Made) -> None:
    for part, text in case.parts:
        outs = [part.schedule.buffers[b] for b in part.schedule.outputs]
        assert len(text.reused) == len(part.donate), part.name
        size = sum(outs[k].local_bytes for k in part.donate.values())
        assert part.bytes["reused"] == size, part.name
    assert sum(len(part.donate) for part, _ in case.parts) > 80
    if not case.schedule.is_staged:  # XLA sees the results in donated memory first
        ((part, text),) = case.parts
        assert text.reused == dict(enumerate(sorted(part.donate)))


def test_attention_is_in_tiles() -> None:
    step, _ = recorded("GPT, one device")
    assert not {"attention", "attention_grad"} & {n.op for n in step.schedule.graph.nodes}


def test_products_in_fp8_are_fp8_there() -> None:
    """A GPT's step under `ts.autocast("fp8")` multiplies e4m3 by e4m3, and e5m2 by e4m3."""
    with described("h100"):
        model = nn.GPT(nn.GPTConfig(vocab=512, seq=128, d=256, layers=2, heads=4))

        @ts.jit
        def step(model: Any, ids: Any, labels: Any) -> Any:
            with ts.autocast("fp8"):
                loss = nn.cross_entropy(model(ids), labels)
            return loss, ts.grad(loss, model)

        step.plan(model, *(ts.tensor(np.zeros((8, 128), np.int32)) for _ in range(2)))
        (part,) = compiled(step.programs[0])
    # The factors of a product are the parameters of its fusion, or those of a library's call.
    found: Counter[tuple[str, str]] = Counter()
    for body in re.split(r"\n(?=%|ENTRY)", part.text):
        types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", body))
        for a, b in re.findall(r" dot\(%([\w.-]+), %([\w.-]+)\)", body):
            found[types[a], types[b]] += 1
        for a, b in re.findall(r" custom-call\(%([\w.-]+), %([\w.-]+),.*matmul\$f8", body):
            found[types[a], types[b]] += 1
    narrow = {pair: n for pair, n in found.items() if all(t.startswith("f8") for t in pair)}
    planned = [n for n in step.graph.nodes if n.op == "contract_fp8"]
    assert {t for pair in narrow for t in pair} == {"f8e4m3fn", "f8e5m2"}
    assert sum(narrow.values()) == len(planned) > 10
