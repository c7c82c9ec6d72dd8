"""Does every op with a counterpart in PyTorch give what PyTorch gives for its own samples?

Every sample is recorded, on one device and in a random layout of eight, forward and backward, and
computed by the oracle, whole and block by block. A seeded few of each op and dtype also run on the
engine; `--all-samples` runs them all. Samples that we refuse, and results that differ on purpose,
stand in `exceptions.py`; nothing else may differ, and no entry there may be stale.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import tessera as ts
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.lang.record import Recorder, recording
from tessera.lang.tensor import Tensor
from tests.peer.cases import OURS, TORCH, Answer, Case, Laid, answered, difference, laid_out
from tests.peer.exceptions import DIFFERS, REFUSED
from tests.peer.rows import FLOATS, ROWS, NotOffered, Row
from tests.peer.table import TABLE

assert TABLE is ROWS
OPS = {f"{o.name}.{o.variant_test_name}".rstrip("."): o for o in op_db}
# How many samples of an op and dtype the oracle computes, where not all,
MOST, FEW = {"f32": 12, "bf16": 6}, 4
# and how many of these run on the engine, on one device and on eight.
ENGINE, MESHED = {"f32": 2, "bf16": 1}, {"f32": 1}


def cases_of(row: Row, everything: bool) -> Iterator[tuple[Case, bool]]:
    """PyTorch's samples of the op, in every dtype that both have; and whether to compute each."""
    info = OPS[row.op]
    for dtype in row.dtypes:
        if TORCH[dtype] not in info.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        gradient = row.grad and dtype in FLOATS and info.supports_autograd
        samples = list(info.sample_inputs("cpu", TORCH[dtype], requires_grad=False))
        draw = random.Random(f"{row.op} {dtype}")
        most = len(samples) if everything else min(MOST.get(dtype, FEW), len(samples))
        chosen = set(draw.sample(range(len(samples)), most))
        for number, sample in enumerate(samples):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case = answered(row, info.op, dtype, number, sample, gradient)
            if case is not None:
                yield case, number in chosen


def layouts(case: Case) -> list[Laid]:
    draw = random.Random(case.name)
    return [laid_out(x, draw) for x in case.given]


@dataclass(frozen=True)
class Recorded:
    """A case as a graph, with the values of its inputs, and the dtypes of its results."""

    graph: Graph
    values: list[Any]
    dtypes: list[str]


def recorded(case: Case, laid: Sequence[Laid] | None) -> Recorded:
    """The case, forward and backward, on one device or in a layout of eight."""
    recorder = Recorder("case")
    placed = put(case, laid)
    arrays = case.given if laid is None else [p.placed for p in laid]
    known = {id(t): x for t, x in zip(placed, arrays, strict=True)}
    with recording(recorder):
        given = placed if laid is None else [p.made(t) for p, t in zip(laid, placed, strict=True)]
        outs, grads = case.run(given)
        graph = recorder.builder.graph([recorder.node(t) for t in (*outs, *grads)])
    verify(graph)
    of = {node: t for t, node in recorder.captured}
    values = [known[id(of[n])] if id(of[n]) in known else of[n].numpy() for n in graph.inputs]
    return Recorded(graph, values, [t.dtype.name for t in outs])


def put(case: Case, laid: Sequence[Laid] | None) -> list[Tensor]:
    if laid is None:
        return [ts.tensor(x) for x in case.given]
    return [ts.tensor(p.placed, mesh=p.type.mesh, layout=p.type) for p in laid]


def engine(cases: Sequence[Case], laid: Sequence[list[Laid]] | None) -> list[list[Any]]:
    """Results and gradients of several cases by one program of the engine."""
    placed = [put(c, None if laid is None else laid[i]) for i, c in enumerate(cases)]

    def run(all_given: list[list[Tensor]]) -> list[list[Tensor]]:
        made = []
        for i, (case, given) in enumerate(zip(cases, all_given, strict=True)):
            if laid is not None:
                given = [p.made(t) for p, t in zip(laid[i], given, strict=True)]
            outs, grads = case.run(given)
            made.append([*outs, *grads])
        return made

    return [[t.numpy() for t in one] for one in ts.jit(run)(placed)]


def faults(case: Case, got: Sequence[Any], how: str) -> Iterator[tuple[Case, str, str]]:
    """What differs from PyTorch: the case, which part of it, and how."""
    wants: list[Answer] = [*case.answers, *case.gradients]
    if len(got) != len(wants):
        yield case, "value", f"{how}: {len(got)} results, PyTorch {len(wants)}"
        return
    for i, (x, want) in enumerate(zip(got, wants, strict=True)):
        part = "value" if i < len(case.answers) else "gradient"
        loose = case.row.loose * (8 if part == "gradient" else 1)  # sums of what may cancel
        said = difference(np.asarray(x), want, case.dtype, loose)
        if said:
            place = f" {i}" if len(wants) > 1 else ""
            yield case, part, f"{how}: {part}{place}: {said}"


def of_oracle(case: Case, compute: bool) -> Iterator[tuple[Case, str, str]]:
    """What differs in the oracle's results. Raises what our functions raise."""
    whole, spread = recorded(case, None), recorded(case, layouts(case))
    want = [OURS[a.dtype] for a in case.answers]
    if whole.dtypes != want:
        yield case, "dtype", f"dtypes {whole.dtypes}, PyTorch {want}"
    if compute:
        yield from faults(case, evaluate(whole.graph, whole.values), "whole")
        blocks = evaluate_blocks(spread.graph, spread.values, padding=np.nan)
        yield from faults(case, blocks, "spread")


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.op)
def test_it_gives_what_pytorch_gives(row: Row, request: pytest.FixtureRequest) -> None:
    everything = request.config.getoption("--all-samples")
    refusals = [r for r in REFUSED if r.op == row.op]
    differing = [d for d in DIFFERS if d.op == row.op]
    met: set[int] = set()
    wrong: list[tuple[Case, str, str]] = []
    taken: dict[str, list[Case]] = {}
    count = 0
    for case, compute in cases_of(row, everything):
        try:
            here = list(of_oracle(case, compute))
        except NotOffered:
            continue
        except ts.TesseraError as error:
            found = next((i for i, r in enumerate(refusals) if r.says in str(error)), None)
            if found is None:
                wrong.append((case, "refused", str(error).replace("\n", " | ")))
            else:
                met.add(found)
            continue
        count += 1
        wrong += here
        if not here:
            taken.setdefault(case.dtype, []).append(case)
    assert count, "PyTorch has no sample of it that we could try"
    draw = random.Random(row.op)
    for dtype, cases in taken.items():
        many = len(cases) if everything else ENGINE.get(dtype, 0)
        chosen = draw.sample(cases, min(many, len(cases)))
        if not chosen:
            continue
        for case, got in zip(chosen, engine(chosen, None), strict=True):
            wrong += faults(case, got, "engine")
        some = chosen if everything else chosen[: MESHED.get(dtype, 0)]
        if some:
            laid = [layouts(c) for c in some]
            for case, got in zip(some, engine(some, laid), strict=True):
                wrong += faults(case, got, "engine, spread")
    seen: set[int] = set()
    left = []
    for case, part, said in wrong:
        known = [i for i, d in enumerate(differing) if d.part == part and d.when(case.sample)]
        seen.update(known)
        if not known:
            left.append(f"{case.name} ({case.text()})\n    {said}")
    shown = left[:12] + ([f"... and {len(left) - 12} more"] if len(left) > 12 else [])
    assert not left, f"{row.op} differs from PyTorch:\n" + "\n".join(shown)
    stale = [r.says for i, r in enumerate(refusals) if i not in met]
    stale += [d.why for i, d in enumerate(differing) if d.always and i not in seen]
    assert not stale, f"no sample of {row.op} meets these entries any more: {stale}"


def test_exceptions_are_of_ops_in_the_table() -> None:
    ops = {r.op for r in ROWS}
    assert {e.op for e in (*REFUSED, *DIFFERS)} <= ops
    assert len(ops) == len(ROWS)
